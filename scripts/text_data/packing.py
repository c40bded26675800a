"""Packs conversations into sequences."""

from __future__ import annotations

import math
from typing import Callable, Sequence

import numpy as np

from .chat import MARK_DOCUMENT_START, MARK_TARGET
from .token_writer import TokenWriter

# Sequences that are filled at the same time. More waste less space at their ends, and move conversations further.
OPEN_SEQUENCES = 256


# An image of a conversation: its first token, counted from that of the conversation, and which image it is.
Place = tuple[int, int]


class Packer:
    """Puts conversations into sequences of one length, each where it leaves the least space. None is cut in two.

    `write` is given the tokens and marks of each full sequence, and the images in it in order, with their first tokens in
    the sequence. No sequence has more than `most_images`, nor may a conversation."""

    def __init__(
        self, length: int, padding: int, write: Callable[[np.ndarray, np.ndarray, list[Place]], None],
        most_images: float = math.inf
    ):
        self._length, self._padding, self._write, self._most_images = length, padding, write, most_images
        self._open: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self._images: list[list[Place]] = []
        self._free: list[int] = []
        self.padding_tokens = 0

    def add(self, tokens: np.ndarray, marks: np.ndarray, images: Sequence[Place] = ()) -> None:
        """Of at most `length` tokens."""
        room = self._most_images - len(images)
        fitting = [i for i, free in enumerate(self._free) if free >= len(tokens) and len(self._images[i]) <= room]
        if fitting:
            place = min(fitting, key=lambda i: self._free[i])
        else:
            if len(self._open) == OPEN_SEQUENCES:
                self._close(min(range(len(self._free)), key=lambda i: self._free[i]))
            place = len(self._open)
            self._open.append([])
            self._images.append([])
            self._free.append(self._length)
        first = self._length - self._free[place]
        self._open[place].append((tokens, marks))
        self._images[place] += [(first + offset, image) for offset, image in images]
        self._free[place] -= len(tokens)
        if self._free[place] == 0:
            self._close(place)

    def finish(self) -> None:
        while self._open:
            self._close(0)

    def _close(self, place: int) -> None:
        parts, images, free = self._open.pop(place), self._images.pop(place), self._free.pop(place)
        self.padding_tokens += free
        if free > 0:
            marks = np.zeros(free, np.uint8)
            marks[0] = MARK_DOCUMENT_START
            parts.append((np.full(free, self._padding, np.uint32), marks))
        self._write(*(np.concatenate(arrays) for arrays in zip(*parts)), images)


class ChatSplit:
    """The packed conversations of a split, in token files and mask files, each through a writer that the script makes."""

    def __init__(self, token_writer, mask_writer, length: int, padding: int, dtype: str, most_images: float = math.inf):
        self._tokens, self._marks = token_writer, mask_writer
        self._length, self._dtype = length, dtype
        self._packer = Packer(length, padding, self._write, most_images)
        self._targets = self._cut = 0
        self.without_targets = 0
        self.images: list[Place] = []  # by their first tokens in the split

    def _write(self, tokens: np.ndarray, marks: np.ndarray, images: list[Place]) -> None:
        self.images += [(self._tokens.tokens + offset, image) for offset, image in images]
        self._targets += int((marks & MARK_TARGET).sum())
        self._tokens.write(tokens.astype(self._dtype))
        self._marks.write(marks)

    def add(self, tokens: np.ndarray, marks: np.ndarray, images: Sequence[Place] = ()) -> None:
        cut = len(tokens) > self._length
        tokens, marks = tokens[: self._length], marks[: self._length]
        if not (marks & MARK_TARGET).any():
            self.without_targets += 1
            return
        self._cut += cut
        self._tokens.documents += 1
        self._packer.add(tokens, marks, [place for place in images if place[0] < len(tokens)])

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

    def contents(self) -> dict[str, dict]:
        return self._tokens.contents() | self._marks.contents()

    def summary(self) -> dict:
        counts = {"targets": self._targets, "padding": self._packer.padding_tokens, "cut_conversations": self._cut}
        return self._tokens.summary() | counts
