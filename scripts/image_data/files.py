"""The files with images that lie beside token files (docs/vision.md).

images-00000.pixels, ... hold pixels: a header (HEADER_BYTES), and then 3 x height x width bytes for each image: red, green
and blue as planes, row by row. TOKENS.images says which images the token file TOKENS has, and where: a header, REFERENCE
for each in order, and the XXH3-64 of all before. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from text_data.common import sync

VERSION = 1
HEADER_BYTES = 64
PIXELS_MAGIC, REFERENCES_MAGIC = b"PARKAPIX", b"PARKAIMG"
# The image's first slot in the token file, XXH3-64 of its pixels, the file of its pixels, its place in that, and how many
# slots it has in the token file: fewer than others where a conversation is cut.
REFERENCE = np.dtype(
    [("first_token", "<u8"), ("checksum", "<u8"), ("shard", "<u4"), ("image", "<u4"), ("slots", "<u4"), ("zero", "<u4")]
)


def shard_name(number: int) -> str:
    return f"images-{number:05d}.pixels"


def pixels_header(size: int, count: int) -> bytes:
    """Magic, version, planes, height, width (uint32 each), images (uint64)."""
    return struct.pack("<8sIIIIQ", PIXELS_MAGIC, VERSION, 3, size, size, count).ljust(HEADER_BYTES, b"\0")


def write_references(path: Path, references: np.ndarray, image_token: int, slots: int, size: int) -> None:
    """Header: magic, version, id of the slots, slots per image, height, width, 0 (uint32 each), references (uint64)."""
    fields = REFERENCES_MAGIC, VERSION, image_token, slots, size, size, 0, len(references)
    content = struct.pack("<8sIIIIIIQ", *fields).ljust(HEADER_BYTES, b"\0") + references.astype(REFERENCE).tobytes()
    with open(path, "wb") as file:
        file.write(content + struct.pack("<Q", xxhash.xxh3_64_intdigest(content)))
        sync(file)


class PixelsWriter:
    """Writes a file of pixels, whose header is completed at the end."""

    def __init__(self, file: BinaryIO, size: int):
        self._file, self._size, self._count = file, size, 0
        file.write(bytes(HEADER_BYTES))

    def write(self, pixels: np.ndarray) -> tuple[int, int]:
        """Of uint8 [3, size, size]. Returns the image's place in the file, and the checksum of its pixels."""
        self._file.write(pixels.data)
        self._count += 1
        return self._count - 1, xxhash.xxh3_64_intdigest(pixels.data)

    def finish(self) -> None:
        self._file.seek(0)
        self._file.write(pixels_header(self._size, self._count))
        sync(self._file)
