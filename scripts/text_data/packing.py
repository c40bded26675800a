"""Packs conversations into sequences."""

from __future__ import annotations

from typing import Callable

import numpy as np

from .chat import MARK_DOCUMENT_START, MARK_TARGET
from .token_writer import TokenWriter

# Sequences that are filled at the same time. More waste less space at their ends, and move conversations further.
OPEN_SEQUENCES = 256


class Packer:
    """Puts conversations into sequences of one length, each where it leaves the least space. None is cut in two."""

    def __init__(self, length: int, padding: int, write: Callable[[np.ndarray, np.ndarray], None]):
        self._length, self._padding, self._write = length, padding, write
        self._open: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self._free: list[int] = []
        self.padding_tokens = 0

    def add(self, tokens: np.ndarray, marks: np.ndarray) -> None:
        """Of at most `length` tokens."""
        fitting = [i for i, free in enumerate(self._free) if free >= len(tokens)]
        if fitting:
            place = min(fitting, key=lambda i: self._free[i])
        else:
            if len(self._open) == OPEN_SEQUENCES:
                self._close(min(range(len(self._free)), key=lambda i: self._free[i]))
            place = len(self._open)
            self._open.append([])
            self._free.append(self._length)
        self._open[place].append((tokens, marks))
        self._free[place] -= len(tokens)
        if self._free[place] == 0:
            self._close(place)

    def finish(self) -> None:
        while self._open:
            self._close(0)

    def _close(self, place: int) -> None:
        parts, free = self._open.pop(place), self._free.pop(place)
        self.padding_tokens += free
        if free > 0:
            marks = np.zeros(free, np.uint8)
            marks[0] = MARK_DOCUMENT_START
            parts.append((np.full(free, self._padding, np.uint32), marks))
        self._write(np.concatenate([tokens for tokens, _ in parts]), np.concatenate([marks for _, marks in parts]))


class ChatSplit:
    """The packed conversations of a split, in token files and mask files, each through a writer that prepare_data
    makes."""

    def __init__(self, token_writer, mask_writer, length: int, padding: int, dtype: str):
        self._tokens, self._marks = token_writer, mask_writer
        self._length, self._dtype = length, dtype
        self._packer = Packer(length, padding, self._write)
        self._targets = self._cut = 0
        self.without_targets = 0

    def _write(self, tokens: np.ndarray, marks: np.ndarray) -> None:
        self._targets += int((marks & MARK_TARGET).sum())
        self._tokens.write(tokens.astype(self._dtype))
        self._marks.write(marks)

    def add(self, tokens: np.ndarray, marks: np.ndarray) -> None:
        cut = len(tokens) > self._length
        tokens, marks = tokens[: self._length], marks[: self._length]
        if not (marks & MARK_TARGET).any():
            self.without_targets += 1
            return
        self._cut += cut
        self._tokens.documents += 1
        self._packer.add(tokens, marks)

    def finish(self) -> None:
        self._packer.finish()
        self._tokens.finish()
        self._marks.finish()

    @property
    def tokens(self) -> int:
        return self._tokens.tokens

    @property
    def documents(self) -> int:
        return self._tokens.documents

    def summary(self) -> dict:
        counts = {"targets": self._targets, "padding": self._packer.padding_tokens, "cut_conversations": self._cut}
        return self._tokens.summary() | counts
