"""The processor of images that goes with a model: preprocessor_config.json as transformers has it, or "image_processor" in its
processor_config.json. Needs no package."""

from __future__ import annotations

from pathlib import Path

from text_data.special_tokens import read_object

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
