"""Writes token files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import numpy as np
import xxhash

from .common import sync, sync_and_close

# A last file with fewer tokens joins the one before, because Parka refuses a file shorter than one sequence.
MIN_LAST_FILE_TOKENS = 2**20
# Bytes of the beginning and of the end of a file, by which a run tells it from others without reading all of it.
END_BYTES = 4096
COPIED_BYTES = 2**22


class TokenWriter:
    """Writes ids into <split>-00000.npy, <split>-00001.npy, ... of a folder; whatever else has one byte per token goes
    into files of the same names with a suffix, through a writer of its own."""

    def __init__(self, folder: Path, split: str, tokens_per_file: int, suffix: str = ""):
        self._folder, self._split, self._tokens_per_file = folder, split, tokens_per_file
        self._suffix = suffix
        self._file: BinaryIO | None = None
        self._counts: list[int] = []  # tokens of each file
        self._checksums: list[xxhash.xxh3_128] = []
        self.documents = 0

    @property
    def tokens(self) -> int:
        return sum(self._counts)

    @property
    def tokens_of_files(self) -> list[int]:
        return list(self._counts)

    def _path(self, index: int) -> Path:
        return self._folder / f"{self._split}-{index:05d}.npy{self._suffix}"

    def write(self, ids: np.ndarray) -> None:
        while len(ids) > 0:
            if self._file is None or self._counts[-1] == self._tokens_per_file:
                self._close()
                self._counts.append(0)
                self._checksums.append(xxhash.xxh3_128())
                self._file = open(self._path(len(self._counts) - 1), "wb")
            part = ids[: self._tokens_per_file - self._counts[-1]]
            self._file.write(part.data)
            self._checksums[-1].update(part.data)
            self._counts[-1] += len(part)
            ids = ids[len(part) :]

    def _close(self) -> None:
        if self._file is not None:
            sync_and_close(self._file)
            self._file = None

    def finish(self) -> None:
        self._close()
        least = min(MIN_LAST_FILE_TOKENS, self._tokens_per_file // 2)
        if len(self._counts) > 1 and self._counts[-1] < least:
            last = self._path(len(self._counts) - 1)
            with open(last, "rb") as source, open(self._path(len(self._counts) - 2), "ab") as target:
                while part := source.read(COPIED_BYTES):
                    target.write(part)
                    self._checksums[-2].update(part)
                sync(target)
            last.unlink()
            self._checksums.pop()
            joined = self._counts.pop()
            self._counts[-1] += joined

    def summary(self) -> dict:
        files = [self._path(i).name for i in range(len(self._counts))]
        return {"files": files, "documents": self.documents, "tokens": self.tokens}

    def contents(self) -> dict[str, dict]:
        """By the name of each file what tells whether it is whole, and this one."""
        return {
            self._path(i).name: {"tokens": count, "bytes": self._path(i).stat().st_size, "ends": checksum_of_ends(self._path(i)),
                                 "checksum": checksum.hexdigest()}
            for i, (count, checksum) in enumerate(zip(self._counts, self._checksums))
        }


def checksum_of_ends(path: Path) -> str:
    """XXH3-64 of the first bytes and then the last ones."""
    size = min(END_BYTES, path.stat().st_size)
    with open(path, "rb") as file:
        first = file.read(size)
        file.seek(-size, os.SEEK_END)
        return xxhash.xxh3_64_hexdigest(first + file.read())
