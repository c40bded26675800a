"""Writes token files."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .common import sync, sync_and_close

# A last file with fewer tokens joins the one before, because Parka refuses a file shorter than one sequence.
MIN_LAST_FILE_TOKENS = 2**20


class TokenWriter:
    """Writes ids into <split>-00000.npy, <split>-00001.npy, ... of a folder; whatever else has one byte per token goes
    into files of the same names with a suffix, through a writer of its own."""

    def __init__(self, folder: Path, split: str, tokens_per_file: int, suffix: str = ""):
        self._folder, self._split, self._tokens_per_file = folder, split, tokens_per_file
        self._suffix = suffix
        self._file: BinaryIO | None = None
        self._counts: list[int] = []  # tokens of each file
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
                self._file = open(self._path(len(self._counts) - 1), "wb")
            part = ids[: self._tokens_per_file - self._counts[-1]]
            self._file.write(part.data)
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
                shutil.copyfileobj(source, target)
                sync(target)
            last.unlink()
            joined = self._counts.pop()
            self._counts[-1] += joined

    def summary(self) -> dict:
        files = [self._path(i).name for i in range(len(self._counts))]
        return {"files": files, "documents": self.documents, "tokens": self.tokens}
