"""Makes ids of conversations about images, with slots where the images are, a group of conversations at a time."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Iterator, NamedTuple

import numpy as np

from text_data.chat import MARK_DOCUMENT_START, MARK_TARGET, ChatError, ChatTemplate
from text_data.common import InputError, sync
from text_data.parts import Progress, finish_part
from text_data.tokenizer import Span, make_tokenizer

from .conversations import PLACEHOLDER, Sample

# Counts changes of what a part holds.
VERSION = 3
# Conversations of a part.
GROUP_SAMPLES = 2048


@dataclass(frozen=True)
class Settings:
    """What decides which ids the conversations have."""

    tokenizer: str  # bytes, or the path of a tokenizer.json
    eos: str | None
    chat: str
    image_token: str | None  # a name, an id, or None for what image_token_of chooses
    slots: int  # per image


def image_token_of(name: str | None, tokenizer) -> int:
    """The id of image slots: that of the token or number that --image-token gives; else of the token <image>, or, if the
    tokenizer has none, the first id after its vocabulary."""
    found = tokenizer.id_of(PLACEHOLDER if name is None else name)
    if found is None and name is None:
        found = tokenizer.vocab_size
    if found is None and name.isdecimal():
        found = int(name)
    if found is None or found >= 2**31:
        raise InputError(f"--image-token {name}: is neither a token of the tokenizer nor an id below 2^31; give another")
    if found == tokenizer.eos:
        raise InputError(f"--image-token {found}: is also the id that ends documents and pads; give another")
    return found


class Encoded(NamedTuple):
    """A conversation: its ids, a byte of marks for each, and the first slot of each image; or why it cannot be used."""

    ids: np.ndarray = np.zeros(0, np.int64)
    marks: np.ndarray = np.zeros(0, np.uint8)
    offsets: list[int] = []
    error: str = ""


class SampleMaker:
    """Makes parts in a folder, each of a group of conversations: KEY.ids (ids one after the other), KEY.marks (a byte per
    id), and KEY.npz, whose presence says that the part is complete:

    lengths  int64 [conversations]: their ids, 0 for those that cannot be used
    errors   why those cannot be used, empty for the others
    offsets  int64 [images of all conversations]: the first slot of each, counted from the first id of its conversation
    """

    def __init__(self, settings: Settings, folder: Path, progress: Progress):
        self.settings, self.folder, self.progress = settings, folder, progress
        self.tokenizer = make_tokenizer(settings.tokenizer, None, settings.eos)
        self.template = ChatTemplate(settings.chat, self.tokenizer)
        self.image_token = image_token_of(settings.image_token, self.tokenizer)
        self.vocab_size = max(self.tokenizer.vocab_size, self.image_token + 1)
        self.dtype = "<u2" if self.vocab_size <= 2**16 else "<u4"
        known = [VERSION, asdict(settings), self.tokenizer.sha256, self.tokenizer.eos, self.image_token, self.template.known()]
        self._fingerprint = json.dumps(known).encode()

    def path(self, index: int, group: list[Sample]) -> Path:
        key = hashlib.blake2b(self._fingerprint, digest_size=12)
        for sample in group:
            key.update(hashlib.blake2b(sample.document).digest())
        return self.folder / f"samples-{index:05d}-{key.hexdigest()}"

    def make(self, index: int, group: list[Sample]) -> None:
        path = self.path(index, group)
        lengths, errors, all_offsets = [], [], []
        with open(path.with_suffix(".ids"), "wb") as ids_file, open(path.with_suffix(".marks"), "wb") as marks_file:
            for encoded in self.encode(group):
                ids_file.write(encoded.ids.astype(self.dtype).data)
                marks_file.write(encoded.marks.data)
                lengths.append(len(encoded.ids))
                errors.append(encoded.error)
                all_offsets += encoded.offsets
            sync(ids_file)
            sync(marks_file)
        stored = {"lengths": np.array(lengths, np.int64), "offsets": np.array(all_offsets, np.int64), "errors": np.array(errors)}
        finish_part(path, **stored)
        self.progress.add(sum(len(sample.document) for sample in group), sum(lengths))

    def encode(self, group: list[Sample]) -> Iterator[Encoded]:
        """The text between images is tokenized piece by piece, as in LLaVA: a tokenizer of SentencePiece makes other ids
        of the whole."""
        texts: list[str] = []
        spans: list[list[Span]] = []
        pieces_of = []
        for sample in group:
            try:
                pieces = self._pieces(sample)
            except InputError as error:
                pieces_of.append((0, str(error)))
                continue
            pieces_of.append((len(pieces), ""))
            texts += [text for text, _ in pieces]
            spans += [marked for _, marked in pieces]
        encoded = iter(self.tokenizer.encode_marked(texts, spans))
        for sample, (count, error) in zip(group, pieces_of):
            yield Encoded(error=error) if error else self._with_slots(sample, [next(encoded) for _ in range(count)])

    def _pieces(self, sample: Sample) -> list[tuple[str, list[Span]]]:
        """The text between images, with its targets."""
        content = json.loads(sample.document)
        try:
            text, spans = self.template.text_and_spans(content["messages"])
        except ChatError as error:
            raise InputError(f"{sample.place}: {error}")
        found, images = text.count(PLACEHOLDER), len(content["images"])
        if found != images:
            raise InputError(
                f"{sample.place}: the chat template makes {found} {PLACEHOLDER} of {images}; give --chat another one"
            )
        pieces, first = [], 0
        for piece in text.split(PLACEHOLDER):
            last = first + len(piece)
            inside = [(max(begin, first) - first, min(end, last) - first) for begin, end in spans]
            pieces.append((piece, [(begin, end) for begin, end in inside if begin < end]))
            first = last + len(PLACEHOLDER)
        return pieces

    def _with_slots(self, sample: Sample, pieces: list[tuple[np.ndarray, np.ndarray]]) -> Encoded:
        slots = np.full(self.settings.slots, self.image_token, np.uint32)
        ids, targets, offsets = [pieces[0][0]], [pieces[0][1]], []
        length = len(pieces[0][0])
        for piece, marked in pieces[1:]:
            offsets.append(length)
            length += len(slots) + len(piece)
            ids += [slots, piece]
            targets += [np.zeros(len(slots), bool), marked]
        if any((piece == self.image_token).any() for piece, _ in pieces):
            of_images = f"its text has id {self.image_token}, which marks images; give --image-token another"
            return Encoded(error=f"{sample.place}: {of_images}")
        marks = np.where(np.concatenate(targets), MARK_TARGET, 0).astype(np.uint8)
        marks[:1] = MARK_DOCUMENT_START  # nothing predicts the first token of a document
        return Encoded(np.concatenate(ids), marks, offsets)


def groups_of_samples(samples: list[Sample]) -> list[list[Sample]]:
    return [samples[first : first + GROUP_SAMPLES] for first in range(0, len(samples), GROUP_SAMPLES)]
