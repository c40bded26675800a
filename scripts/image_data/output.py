"""Writes conversations and says which images they have."""

from __future__ import annotations

import argparse
import collections
import hashlib
from pathlib import Path

import numpy as np

from text_data.packing import ChatSplit
from text_data.parts import is_held_out, make_parts, token_array
from text_data.token_writer import TokenWriter

from .conversations import Sample
from .files import REFERENCE, write_references
from .samples import SampleMaker, groups_of_samples
from .shards import Images


def digest_of(sample: Sample) -> bytes:
    return hashlib.blake2b(sample.document, digest_size=16).digest()


def split_of(sample: Sample, eval_fraction: float) -> str:
    """Of all conversations about one first image alike, so that what is held out is about images that training does not see."""
    images = sample.images()
    decides = images[0].encode(errors="surrogatepass") if images else sample.document
    return "eval" if is_held_out(hashlib.blake2b(decides, digest_size=16).digest(), eval_fraction) else "train"


class ImageSplit(ChatSplit):
    """The packed conversations of a split with their images."""

    def __init__(self, folder: Path, split: str, options: argparse.Namespace, maker: SampleMaker):
        self._folder, self._sequence_length, self._image_size = folder, options.sequence_length, options.image_size
        tokens_per_file = max(options.tokens_per_file // options.sequence_length, 1) * options.sequence_length
        self._token_writer = TokenWriter(folder, split, tokens_per_file)
        mask_writer = TokenWriter(folder, split, tokens_per_file, ".mask")
        length, eos = options.sequence_length, maker.tokenizer.eos
        super().__init__(self._token_writer, mask_writer, length, eos, maker.dtype, options.max_images)

    def write_references(self, images: Images, maker: SampleMaker) -> None:
        """Once all is finished: which images each token file has."""
        first_tokens = np.array([first for first, _ in self.images], np.int64)
        numbers = np.array([number for _, number in self.images], np.int64)
        all_references = np.zeros(len(numbers), REFERENCE)
        all_references["checksum"] = images.checksums[numbers]
        all_references["shard"] = images.shards[numbers]
        all_references["image"] = images.places[numbers]
        left = self._sequence_length - first_tokens % self._sequence_length
        all_references["slots"] = np.minimum(maker.settings.slots, left)
        begin = 0
        for name, tokens in zip(self._token_writer.summary()["files"], self._token_writer.tokens_of_files):
            inside = (first_tokens >= begin) & (first_tokens < begin + tokens)
            references = all_references[inside]
            references["first_token"] = first_tokens[inside] - begin
            path = self._folder / f"{name}.images"
            write_references(path, references, maker.image_token, maker.settings.slots, self._image_size)
            begin += tokens

    def summary(self) -> dict:
        of_sequences = collections.Counter(first // self._sequence_length for first, _ in self.images)
        most = max(of_sequences.values(), default=0)
        return super().summary() | {"images": len(self.images), "most_images_of_a_sequence": most}


def write_samples(
    samples: list[Sample], numbers: dict[str, int], images: Images, splits: dict[str, ImageSplit], maker: SampleMaker,
    eval_fraction: float
) -> int:
    """Writes the conversations, in order, that can be used and whose images all can. Returns the number of those with other
    images. `numbers` has the number of each image by its name; the maker has made all parts."""
    groups, left_out = groups_of_samples(samples), 0
    for group, path in zip(groups, make_parts(maker, groups, 1)):
        ids, marks = token_array(path.with_suffix(".ids"), maker.dtype), token_array(path.with_suffix(".marks"), "u1")
        with np.load(path.with_suffix(".npz")) as stored:
            lengths, errors, offsets = stored["lengths"].tolist(), stored["errors"].tolist(), iter(stored["offsets"].tolist())
        last = 0
        for sample, length, error in zip(group, lengths, errors):
            if error:
                continue
            first, last = last, last + length
            own = [(next(offsets), numbers[name]) for name in sample.images()]
            if any(images.errors[number] for _, number in own):
                left_out += 1
                continue
            splits[split_of(sample, eval_fraction)].add(ids[first:last], marks[first:last], own)
    for split in splits.values():
        split.finish()
        split.write_references(images, maker)
    return left_out
