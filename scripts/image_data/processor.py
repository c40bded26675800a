"""The processor of images that goes with a model: preprocessor_config.json as transformers has it, or "image_processor" in its
processor_config.json. Needs no package."""

from __future__ import annotations

from pathlib import Path
from typing import Sequence

from text_data.special_tokens import read_object

# Classes of transformers for each --geometry.
TYPES = {"crop": "CLIPImageProcessor", "pad": "LlavaImageProcessor", "stretch": "SiglipImageProcessor"}
BICUBIC = 3  # Pillow's number
FILES = ("preprocessor_config.json", "processor_config.json")


def geometry_of(folder: Path) -> str | None:
    """What transformers' processor of images in the folder does; None where there is none, or it does otherwise."""
    for name in FILES:
        config = read_object(folder / name)
        config = config.get("image_processor", config)
        size = config.get("size") if isinstance(config, dict) else None
        if not isinstance(size, dict):
            continue
        if config.get("do_pad"):
            return "pad"
        if config.get("do_center_crop") and "shortest_edge" in size:
            return "crop"
        if "height" in size and "width" in size:
            return "stretch"
    return None


def processor_config(geometry: str, size: int, mean: Sequence[float], deviation: Sequence[float]) -> dict:
    """The preprocessor_config.json by which transformers makes of pictures what pictures.py, mean and deviation make of them."""
    square = {"height": size, "width": size}
    cropped = {"crop_size": square, "do_center_crop": True, "size": {"shortest_edge": size}}
    return {
        "image_processor_type": TYPES[geometry],
        "do_convert_rgb": True,
        "do_resize": True,
        "resample": BICUBIC,
        **({"do_pad": True} if geometry == "pad" else {}),
        **({"size": square} if geometry == "stretch" else cropped),
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(mean),
        "image_std": list(deviation),
    }
