#!/usr/bin/env python3
"""Turns conversations about images into token files and files of pixels for Parka.

    parka prepare-images llava_v1_5_mix665k.json --image-folder images/ --chat vicuna_v1 --tower clip --geometry pad \\
      --tokenizer vicuna/tokenizer.json --sequence-length 2048 --workers 16 --out data/llava

Inputs are files in LLaVA's form, or folders of them: a JSON array or JSON Lines of {"id": ..., "image": NAME or [NAMES],
"conversations": [{"from": "human", "value": "<image>\\nWhat is this?"}, {"from": "gpt", "value": ...}, ...]}. Each <image>
of the text becomes as many image slots as the tower and its projector make tokens; a sample without images is text.
Replies are targets, with the token that ends them. Whole conversations are packed into sequences of --sequence-length
tokens; longer ones are cut there, also within an image.

Writes into the folder --out, which must not exist yet or be empty:
    train-00000.npy, ...   raw little-endian uint16 or uint32 ids; image slots have the id of --image-token
    train-00000.npy.mask   a byte per token: 1 for a target, plus 2 for the first of a conversation
    train-00000.npy.images which images there are in the token file, and where
    eval-00000.npy, ...    the same for held-out conversations, with --eval-fraction: all of those about one first image
    images-00000.pixels    the pixels of the images, each picture file once
    data.json              what was made: counts, vocabulary, tokenizer, image token, geometry, mean and deviation
    tokenizer/             a copy of the tokenizer.json and what lies beside it, with the template and the end of a turn of --chat;
                           and preprocessor_config.json, by which transformers makes such pixels

The folder appears whole or not at all. If a run is stopped, the same command continues: finished parts lie in the hidden
folder .NAME.partial beside it. A picture or a sample that cannot be used ends the run with its name, or is left out and
counted with --skip-bad. Identical conversations about the same images are kept once.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import collections
import functools
import json
import math
import sys
from pathlib import Path
from typing import Callable

sys.path.insert(0, str(Path(__file__).resolve().parent))
from python_packages import HelpFormatter, command_name, require  # noqa: E402

require("numpy", "pillow", "xxhash")
import numpy as np  # noqa: E402

from image_data.conversations import Conversion, Sample, read_records, sample_of  # noqa: E402
from image_data.output import ImageSplit, digest_of, write_samples  # noqa: E402
from image_data.pictures import GEOMETRIES, TOWERS, Fitting, colour_of, slots_of  # noqa: E402
from image_data.processor import processor_config  # noqa: E402
from image_data.samples import SampleMaker, Settings, groups_of_samples  # noqa: E402
from image_data.shards import (  # noqa: E402
    Images, PictureProgress, ShardMaker, groups_of_pictures, make_images, stat_picture
)
from script_exit import print_last, run_script  # noqa: E402
from text_data import chat, parts  # noqa: E402
from text_data.common import InputError, Parser, evaluating  # noqa: E402
from text_data.conversations import empty_answers  # noqa: E402
from text_data.partial import Partial, new_folder  # noqa: E402
from text_data.readers import find_files  # noqa: E402
from text_data.tokenizer import EOS_NAMES, padded_vocab_size, tokenizer_file  # noqa: E402
from tokenizer_files import copy_tokenizer, keep_chat, keep_end_of_turn, write_object  # noqa: E402


def print_line(text: str) -> None:
    print(f"{command_name().removesuffix('.py')}: {text}", file=sys.stderr, flush=True)


def read_samples(options: argparse.Namespace, left_out: collections.Counter, bad: list[str]) -> list[Sample]:
    """Distinct ones, in order. With --skip-bad `bad` gets what is wrong with the others."""
    conversion = Conversion(options.system, options.max_images, options.images_first)
    samples, seen = [], set()
    for path in find_files(options.input, options.include, options.out, print_line):
        for place, record in read_records(path):
            try:
                sample = sample_of(record, place, conversion)
            except InputError as error:
                if not options.skip_bad:
                    raise
                bad.append(str(error))
                continue
            if parts.is_new(digest_of(sample), seen):
                samples.append(sample)
                left_out["empty_answers"] += empty_answers(sample.document)
            else:
                left_out["duplicate_samples"] += 1
    if not samples and bad:
        raise InputError(f"no sample is left to train on{told_of_bad(len(bad), bad)}")
    if not samples:
        raise InputError(f"no sample in {', '.join(map(str, options.input))}; check the paths and --include")
    return samples


def make_with_progress(what: str, maker, groups: list[list], size_of: Callable, make: Callable):
    """The result of `make`, with reports of its progress in what size_of() counts of the elements of groups."""
    missing = [group for index, group in enumerate(groups) if not parts.is_made(maker.path(index, group))]
    if len(missing) < len(groups):
        print_line(f"continues: {len(groups) - len(missing)} of {len(groups)} parts of the {what} are there")
    stop_reports = maker.progress.report(sum(size_of(element) for group in missing for element in group), print_line)
    try:
        return make()
    finally:
        stop_reports.set()


def tokenize(samples: list[Sample], options: argparse.Namespace, partial: Partial) -> tuple[SampleMaker, list[str]]:
    """Makes all parts of the conversations, for write_samples(). For each conversation, why it cannot be used, or an empty
    text; without --skip-bad raises InputError for the first."""
    slots = slots_of(options.image_size, options.patch_size, options.downsample)
    settings = Settings(options.tokenizer, options.eos, options.chat, options.image_token, slots)
    maker = SampleMaker(settings, partial.path, parts.make_progress())
    for doubt in maker.template.doubts():
        print_line(f"warning: {doubt}")
    groups = groups_of_samples(samples)

    def make() -> list[str]:
        errors: list[str] = []
        for path in parts.make_parts(maker, groups, options.workers):
            with np.load(path.with_suffix(".npz")) as stored:
                reasons = stored["errors"].tolist()
            bad = next(filter(None, reasons), None)
            if bad is not None and not options.skip_bad:
                raise InputError(f"{bad}; --skip-bad leaves out such samples")
            errors += reasons
        return errors

    return maker, make_with_progress("text", maker, groups, lambda sample: len(sample.document), make)


def read_pictures(samples: list[Sample], options: argparse.Namespace, partial: Partial) -> tuple[dict[str, int], Images]:
    """The number of each picture by its name, and all pictures."""
    numbers: dict[str, int] = {}
    for sample in samples:
        for name in sample.images():
            numbers.setdefault(name, len(numbers))
    if numbers and options.image_folder is None:
        raise InputError("the samples have images; name their folder with --image-folder")
    pictures = [stat_picture(options.image_folder / name) for name in numbers]
    fitting = Fitting(options.geometry, options.image_size, colour_of(TOWERS[options.tower].mean))
    maker = ShardMaker(fitting, partial.path, parts.make_progress(PictureProgress))
    groups = groups_of_pictures(pictures, options.image_size)
    if tried := sum(maker.forget_mended(index, group) for index, group in enumerate(groups)):
        print_line(f"continues: tried {tried:,} pictures again that could not be used")
    make = functools.partial(make_images, maker, groups, options.workers, options.skip_bad)
    return numbers, make_with_progress("images", maker, groups, lambda picture: 1, make)


def prepare(options: argparse.Namespace, partial: Partial) -> dict:
    """Writes everything into the folder `partial.staging` and returns what data.json holds."""
    left_out, bad = collections.Counter(duplicate_samples=0, bad_samples=0, empty_answers=0), []
    samples = read_samples(options, left_out, bad)
    check_room(samples, options)
    maker, errors = tokenize(samples, options, partial)
    bad += filter(None, errors)
    left_out["bad_samples"] = len(bad)
    numbers, images = read_pictures([sample for sample, error in zip(samples, errors) if not error], options, partial)
    bad += [f"{name}: {reason}" for name, reason in zip(numbers, images.errors) if reason]
    left_out["bad_images"] = sum(reason != "" for reason in images.errors)
    splits = {split: ImageSplit(partial.staging, split, options, maker) for split in ("train", "eval")}
    left_out["samples_with_bad_images"] = write_samples(samples, numbers, images, splits, maker, options.eval_fraction)
    left_out["samples_without_targets"] = sum(split.without_targets for split in splits.values())
    check_splits(splits, options, left_out, bad)
    files = images.move_to(partial.staging)
    info = summary(options, maker, splits, images, files) | {"left_out": dict(left_out), "bad": bad}
    if options.tokenizer != "bytes":
        keep_files_of_model(options, maker, info["images"], partial.staging / "tokenizer")
    partial.describe(info)
    return info


def keep_files_of_model(options: argparse.Namespace, maker: SampleMaker, images: dict, folder: Path) -> None:
    """Makes `folder`, with what runs on the data keep for their checkpoints."""
    copy_tokenizer(maker.tokenizer, folder, named={})
    if images["count"] > 0:
        config = processor_config(images["geometry"], images["size"], images["mean"], images["deviation"])
        write_object(folder / "preprocessor_config.json", config)
    # Captions are no chats: a model whose projector learns from them keeps the template that it has.
    keep = keep_end_of_turn if options.chat == "plain" else keep_chat
    keep(maker.template, folder, maker.tokenizer)


def check_room(samples: list[Sample], options: argparse.Namespace) -> None:
    slots = slots_of(options.image_size, options.patch_size, options.downsample)
    if slots >= options.sequence_length and any(sample.images() for sample in samples):
        raise InputError(
            f"--sequence-length is {options.sequence_length}, and an image takes {slots} slots: text does not fit beside it; raise "
            "--sequence-length or --downsample"
        )


def check_splits(
    splits: dict[str, ImageSplit], options: argparse.Namespace, left_out: collections.Counter, bad: list[str]
) -> None:
    if splits["train"].tokens == 0:
        told = told_of_bad(left_out["bad_samples"] + left_out["samples_with_bad_images"], bad)
        if told and splits["eval"].tokens == 0 and left_out["samples_without_targets"] == 0:
            raise InputError(f"no sample is left to train on{told}")
        raise InputError(
            "no sample has a reply within --sequence-length to train on; raise it, give more samples, or lower --eval-fraction"
            f"{told}"
        )
    if options.eval_fraction > 0 and splits["eval"].tokens == 0:
        raise InputError("no sample is held out; raise --eval-fraction or give more samples")


def told_of_bad(count: int, bad: list[str]) -> str:
    """The end of a message where --skip-bad has left out samples, else nothing."""
    return f"; samples left out as bad: {count:,}, the first for this reason: {bad[0]}" if count else ""


def summary(
    options: argparse.Namespace, maker: SampleMaker, splits: dict[str, ImageSplit], images: Images, files: list[str]
) -> dict:
    """What data.json holds."""
    tokenizer, tower = maker.tokenizer, TOWERS[options.tower]
    return {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": maker.vocab_size,
        "padded_vocab_size": padded_vocab_size(maker.vocab_size),
        "eos": tokenizer.eos,
        "dtype": {"<u2": "uint16", "<u4": "uint32"}[maker.dtype],
        "chat": options.chat if options.chat in chat.MARKERS else Path(options.chat).name,
        "chat_template_sha256": maker.template.sha256,
        "sequence_length": options.sequence_length,
        "images": {
            "files": files,
            "count": int((images.places >= 0).sum()),
            "tower": options.tower,
            "size": options.image_size,
            "patch_size": options.patch_size,
            "geometry": options.geometry,
            "mean": tower.mean,
            "deviation": tower.deviation,
            "token": maker.image_token,
            "slots": maker.settings.slots,
        },
        "train": splits["train"].summary(),
        "eval": splits["eval"].summary(),
        "contents": splits["train"].contents() | splits["eval"].contents(),
    }


def print_summary(info: dict, out: Path) -> None:
    for split in ("train", "eval"):
        counts = info[split]
        print(
            f"{split}: {counts['documents']:,} samples with {counts['images']:,} images, {counts['tokens']:,} tokens, "
            f"{len(counts['files'])} files\n  {counts['targets']:,} targets, {counts['padding']:,} padding, "
            f"{counts['cut_conversations']:,} cut, at most {counts['most_images_of_a_sequence']} images in a sequence"
        )
    print("left out: " + ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in info["left_out"].items()))
    images = info["images"]
    print(f"images: {images['count']:,} of {images['size']} x {images['size']} pixels in {len(images['files'])} files")
    print(f"slots: {images['slots']} of id {images['token']} for each image")
    print("config:")
    paths = {split: [str(out / name) for name in info[split]["files"]] for split in ("train", "eval")}
    data = {"train": paths["train"], "eval": paths["eval"], "token_dtype": info["dtype"]}
    data |= {"sequence_length": info["sequence_length"], "loss_mask": True, "documents": "separate"}
    data["images_per_sequence"] = max(1, *(info[split]["most_images_of_a_sequence"] for split in ("train", "eval")))
    vision = {"tower": info["images"]["tower"], "image_size": images["size"], "patch_size": images["patch_size"]}
    vision |= {"pixel_mean": images["mean"], "pixel_deviation": images["deviation"], "image_token": images["token"]}
    config = {"model": {"vocab_size": info["padded_vocab_size"], "vision": vision}, "data": data}
    print(json.dumps(config | evaluating(paths["eval"]), indent=2))


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog=command_name(),
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("input", nargs="+", type=Path, help="files of samples, or folders of them")
    add("--out", required=True, type=Path, help="folder to create")
    add(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="take only files of folders whose name or relative path matches, as *.json; may be repeated",
    )
    add("--image-folder", type=Path, metavar="FOLDER", help="where the names of images begin")
    add("--tower", required=True, choices=TOWERS, help="whose mean, deviation and defaults of the following four to use")
    add("--image-size", type=int, metavar="PIXELS", help="side of the squares that the tower sees (default: 336; 384)")
    add("--patch-size", type=int, metavar="PIXELS", help="side of a patch (default: 14)")
    add("--geometry", choices=GEOMETRIES, help="crop to a square, pad to one, or stretch (default: crop; stretch)")
    add("--downsample", type=int, default=1, metavar="K", help="K x K patches become a token (default: 1)")
    add("--chat", required=True, metavar="TEMPLATE", help=f"{', '.join(chat.MARKERS)}, or a file or folder with one")
    add("--system", metavar="TEXT", help="system message of conversations that have none")
    add("--images-first", action="store_true", help="move the images of a turn to its front, as LLaVA does")
    add("--tokenizer", default="bytes", type=tokenizer_file, help="bytes, or a tokenizer.json or its folder (default: bytes)")
    add(
        "--eos",
        metavar="NAME",
        help="token of a tokenizer.json that pads sequences (default: eos_token of the tokenizer_config.json beside it, else "
        f"{', '.join(EOS_NAMES)})",
    )
    add(
        "--image-token",
        metavar="NAME",
        help="token, or id, that image slots have in the token files (default: <image>, else the first id that the "
        "tokenizer does not have)",
    )
    add("--sequence-length", required=True, type=int, metavar="S", help="tokens per sequence, as data.sequence_length")
    add("--max-images", type=int, default=math.inf, metavar="N", help="of a sequence, and of a sample (default: any number)")
    add("--skip-bad", action="store_true", help="leave out and count samples and images that cannot be used")
    add("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    add("--eval-fraction", type=float, default=0.0, metavar="F", help="hold out this fraction of the samples, by their first image")
    add("--tokens-per-file", type=int, default=512 * 2**20, metavar="N", help="start another file after N tokens")
    options = parser.parse_args(arguments)
    tower = TOWERS[options.tower]
    options.image_size = tower.size if options.image_size is None else options.image_size
    options.patch_size = tower.patch if options.patch_size is None else options.patch_size
    options.geometry = options.geometry or tower.geometry
    check_options(options)
    options.out = new_folder(options.out)
    return options


def check_options(options: argparse.Namespace) -> None:
    for name, least in (("image_size", 1), ("patch_size", 1), ("downsample", 1), ("max_images", 1), ("workers", 1), ("tokens_per_file", 1),
                        ("sequence_length", 2)):
        if getattr(options, name) < least:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least {least}")
    if options.patch_size > options.image_size:
        raise InputError(f"--patch-size {options.patch_size} is larger than --image-size {options.image_size}; change one")
    if options.chat == "plain" and options.system is not None:
        raise InputError("--chat plain has no system message; leave out --system or give another template")
    if not 0 <= options.eval_fraction < 1:
        raise InputError(f"--eval-fraction is {options.eval_fraction}; give a number from 0 to below 1")


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    with Partial(options.out, print_line) as partial:
        info = prepare(options, partial)
        partial.finish()
    print_last(lambda: print_summary(info, options.out))


def main() -> int:
    return run_script(run, print_line)


if __name__ == "__main__":
    sys.exit(main())
