"""Makes the pixels of a picture file that a vision tower sees: a square of 8-bit RGB, before mean and deviation.

The geometry and the bicubic filter are those with which CLIP and SigLIP were trained. Pillow does the resizing, and its
bits are the reference. Transparency is dropped without blending, and the orientation in EXIF data is not applied, both as
LLaVA and VILA do it.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from text_data.common import one_line
from text_data.formats import POINTERS, is_irregular, kind_of_start, read_start, told

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "PPM")
GEOMETRIES = ("crop", "pad", "stretch")
# Modes of Pillow with 8 bits or fewer for each of red, green and blue.
MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX")
# The largest ratio of long to short side: beyond it the resized picture would need memory without bound, and show nothing.
MOST_STRETCHED = 100


class PictureError(Exception):
    """What is wrong with a picture, without its name."""


@dataclass(frozen=True)
class Tower:
    """What a family of vision towers is given."""

    size: int  # pixels of a side
    patch: int  # pixels of a patch's side
    geometry: str
    mean: tuple[float, float, float]  # subtracted from pixels / 255 in training
    deviation: tuple[float, float, float]  # by which the difference is divided


TOWERS = {
    "clip": Tower(336, 14, "crop", (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "siglip": Tower(384, 14, "stretch", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
}


@dataclass(frozen=True)
class Fitting:
    """How a picture becomes a square.

    crop     the shorter side becomes `size`, and the middle of the longer side is kept
    pad      the picture lies in the middle of a square of `colour`, which becomes `size` wide
    stretch  both sides become `size`, whatever they were
    """

    geometry: str
    size: int
    colour: tuple[int, int, int]  # of the padding

    def of(self, picture: Image.Image) -> Image.Image:
        """The square of an RGB picture."""
        width, height = picture.size
        long, short = max(width, height), min(width, height)
        if long > MOST_STRETCHED * short:
            raise PictureError(f"is {width} x {height}, a side more than {MOST_STRETCHED} times the other")
        if self.geometry == "crop":
            # Transformers and torchvision round down, too.
            longer = int(self.size * long / short)
            new = (self.size, longer) if width <= height else (longer, self.size)
            left, top = (new[0] - self.size) // 2, (new[1] - self.size) // 2
            resized = picture.resize(new, Image.Resampling.BICUBIC)
            return resized.crop((left, top, left + self.size, top + self.size))
        if self.geometry == "pad" and width != height:
            if long * long > 2 * Image.MAX_IMAGE_PIXELS:  # where Pillow refuses to read
                raise PictureError(f"is {width} x {height}, too large for a square around it")
            square = Image.new("RGB", (long, long), self.colour)
            square.paste(picture, ((long - width) // 2, (long - height) // 2))
            picture = square
        return picture.resize((self.size, self.size), Image.Resampling.BICUBIC)


def slots_of(size: int, patch: int, downsample: int) -> int:
    """Tokens that a projector makes of a picture."""
    return (-(-(size // patch) // downsample)) ** 2


def colour_of(mean: tuple[float, float, float]) -> tuple[int, int, int]:
    """The colour of padding, as LLaVA rounds it: down."""
    red, green, blue = (int(value * 255) for value in mean)
    return red, green, blue


def read_picture(path: Path) -> Image.Image:
    """The first frame in RGB. Raises PictureError for what is no picture, is not whole, or has other than 8-bit RGB."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # Pixels without bound would take memory without bound.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            if is_irregular(path):
                raise PictureError("is a pipe, a socket or a device, not a file")
            with Image.open(path, formats=FORMATS) as picture:
                check_mode(picture)
                picture.load()
                return picture.convert("RGB")
    except UnidentifiedImageError:
        raise PictureError(told_of(path))
    except OSError as error:
        raise PictureError(f"cannot be read ({error.strerror or one_line(error)})")
    except (Image.DecompressionBombWarning, Image.DecompressionBombError):
        raise PictureError(f"has more than {Image.MAX_IMAGE_PIXELS:,} pixels")
    except (SyntaxError, ValueError, EOFError, OverflowError, IndexError, struct.error, zlib.error) as error:
        raise PictureError(f"cannot be read ({one_line(error)})")  # what decoders raise for damaged files


def told_of(path: Path) -> str:
    """What is wrong with a file of none of the formats."""
    start, size = read_start(path), path.stat().st_size
    kind = kind_of_start(start, size)
    if size == 0:
        return "is empty"
    return told(kind) if kind in POINTERS else f"is no picture of the formats {', '.join(FORMATS)}"


def check_mode(picture: Image.Image) -> None:
    """Of a picture that is opened and not yet decoded."""
    if has_16_bits(picture):
        raise PictureError("has 16 bits for each colour, not 8")
    if picture.mode not in MODES:
        raise PictureError(f"has the colours {picture.mode}, not RGB, grey or a palette")


def has_16_bits(picture: Image.Image) -> bool:
    """Pillow reads some 16-bit pictures as RGB of 8 bits; what it will decode tells."""
    if picture.mode.startswith(("I", "F")):
        return True
    for tile in picture.tile:
        arguments = tile[3] if isinstance(tile[3], tuple) else (tile[3],)
        # "BGR;16" has 16 bits for all three colours, 5 or 6 for each.
        if any(isinstance(a, str) and ";16" in a and a != "BGR;16" for a in arguments):
            return True
        if tile[0].startswith("ppm") and any(isinstance(a, int) and a > 255 for a in arguments):  # its largest value
            return True
    return False


def pixels_of(path: Path, fitting: Fitting) -> np.ndarray:
    """uint8 [3, size, size]: red, green and blue of a picture file. Raises PictureError."""
    return np.ascontiguousarray(np.asarray(fitting.of(read_picture(path))).transpose(2, 0, 1))
