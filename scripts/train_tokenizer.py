#!/usr/bin/env python3
"""Trains a byte-level BPE tokenizer on text, for parka prepare --tokenizer.

    parka tokenizer corpus/ --vocab-size 32768 --out tokenizer.json
    parka tokenizer dolma/*.json.gz --jsonl-field text --max-bytes 200000000 --out tokenizer.json

Inputs are read as parka prepare reads them. Documents of more than --max-bytes in all are thinned evenly, so that all parts of
the text have their share: of many short ones some are taken whole, of few long ones the beginnings. Words are split as GPT-2
splits them; no text is unknown, because every byte is a token. The last id, <|endoftext|>, ends documents. Equal text gives an
equal file.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import signal
import sys
import time
from pathlib import Path
from typing import Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from python_packages import HelpFormatter, command_name, require  # noqa: E402

require("numpy", "tokenizers")
from script_exit import run_script  # noqa: E402
from text_data.common import InputError, Parser, print_made, real_path, require_writable, write_file  # noqa: E402
from text_data.parts import REPORT_SECONDS, time_left  # noqa: E402
from text_data.readers import InputFile, Reading, find_files  # noqa: E402
from text_data.tokenizer import EOS_NAMES  # noqa: E402

SMALLEST_VOCABULARY = 256 + 1  # the bytes and the end of a document
LARGEST_VOCABULARY = 2**24  # for which training takes a gigabyte before it begins
MEASURED_FILES, MEASURED_BYTES = 16, 2**23  # of text in each, to know how much there is


def print_line(text: str) -> None:
    print(f"{command_name().removesuffix('.py')}: {text}", file=sys.stderr, flush=True)


def text_bytes(files: list[Path], reading: Reading) -> int:
    """About how much text the files hold, which may be compressed: what some of them have in each byte that is stored."""
    text = stored = 0
    for file in files[:: max(1, len(files) // MEASURED_FILES)]:
        input_file = InputFile(file, reading)
        own, end = 0, file.stat().st_size
        for document in input_file.documents():
            own += len(document)
            if own >= MEASURED_BYTES:
                end = input_file.position or end
                break
        if own > 0:
            text += own
            stored += end
    of_all = sum(file.stat().st_size for file in files)
    return of_all if stored == 0 else round(of_all * text / stored)


def sampled_documents(files: list[Path], reading: Reading, max_bytes: int) -> Iterator[str]:
    """Every n-th document, where the files have n times as many bytes of text as are wanted. Of one with more than a sixteenth of
    max_bytes, of which there may be less than n, what fits into the share of the text so far."""
    text = text_bytes(files, reading)
    every = max(1, -(-text // max_bytes))
    passed = taken = number = 0
    begun = told = time.monotonic()
    for file in files:
        for document in InputFile(file, reading).documents():
            passed += len(document)
            if (now := time.monotonic()) - told > REPORT_SECONDS:
                told = now
                print_line(f"read {100 * min(1, passed / text):.0f} %, {time_left(min(passed, text), text, now - begun)}")
            if every > 1 and len(document) > max_bytes // 16:
                document = document[: max(0, passed * max_bytes // text - taken)]
            elif number % every != 0:
                document = b""
            number += 1
            if document:
                taken += len(document)
                yield document.decode("utf-8", "ignore")


def telling_end(documents: Iterator[str]) -> Iterator[str]:
    """What follows says nothing where there is no terminal."""
    begun = time.monotonic()
    yield from documents
    if time.monotonic() - begun > REPORT_SECONDS:
        print_line("all is read; merging pairs takes a few times as long")


def train(options: argparse.Namespace):
    """A tokenizers.Tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    files = list(find_files(options.input, options.include, real_path(options.out), print_line, options.jsonl_field is None))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=options.vocab_size - 1,
        min_frequency=2,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=sys.stderr.isatty(),  # of the library's own
    )
    documents = sampled_documents(files, Reading(options.jsonl_field, split_bytes=options.split_bytes), options.max_bytes)
    first = next(documents, None)
    if first is None:
        raise InputError(f"no text in {', '.join(map(str, options.input))}; check the paths and --include")
    require_writable(options.out)
    tokenizer.train_from_iterator(itertools.chain([first], telling_end(documents)), trainer)
    tokenizer.add_special_tokens([EOS_NAMES[0]])
    return tokenizer


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog=command_name(),
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("input", nargs="+", type=Path, help="files of text or records, or folders of them")
    add("--out", required=True, type=Path, help="the tokenizer.json to write")
    add("--vocab-size", type=int, default=32768, metavar="N", help="ids at most; less text has fewer (default: 32768)")
    add("--max-bytes", type=int, default=10**9, metavar="N", help="about how much text to read (default: 1000000000)")
    add("--include", action="append", default=[], metavar="GLOB", help="as for parka prepare")
    add("--jsonl-field", metavar="NAME", help="as for parka prepare")
    add("--split-bytes", type=int, metavar="N", help="as for parka prepare")
    options = parser.parse_args(arguments)
    if not SMALLEST_VOCABULARY <= options.vocab_size <= LARGEST_VOCABULARY:
        raise InputError(f"--vocab-size is {options.vocab_size}; give at least {SMALLEST_VOCABULARY} and at most {LARGEST_VOCABULARY}")
    for name in ("max_bytes", "split_bytes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give a positive number")
    return options


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Python sees no signal while the library counts and merges, for minutes. They end the process, which has nothing to put in
    order then."""
    numbers = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    handlers = [signal.signal(number, signal.SIG_DFL) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, handlers):
            signal.signal(number, handler)


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    with ended_by_signals():
        tokenizer = train(options)
    write_file(options.out, [tokenizer.to_str(pretty=True).encode()])
    print_made(options.out, f"{tokenizer.get_vocab_size():,} ids")


def main() -> int:
    return run_script(run, print_line)


if __name__ == "__main__":
    sys.exit(main())
