#!/usr/bin/env python3
"""Makes multiple-choice questions of text, source code above all, for prepare_eval.py --task text_choice.

    make_questions.py corpus/ --kind lines --eval-fraction 0.02 --out lines.jsonl
    make_questions.py corpus/ --kind identifiers --eval-fraction 0.02 --out identifiers.jsonl

    lines         which line comes next? The wrong ones are three other lines of the document, about as long
    identifiers   a cloze: which identifier stands here, before the rest of the line (60 characters at most)? The right
                  one and three wrong ones occur in the lines before

Each document gives one question at most, if it has --context-lines lines (default 30) to begin with: they are the context.
With --eval-fraction only documents give questions that prepare_data.py holds out with the same option. Identical documents count
once. Inputs are read as prepare_data.py reads them. Equal documents give equal questions, whatever else there is.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
from pathlib import Path
from typing import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("numpy")
from script_exit import run_script  # noqa: E402
from text_data.common import InputError, Parser, print_made, real_path, write_lines  # noqa: E402
from text_data.parts import is_held_out, is_new  # noqa: E402
from text_data.readers import InputFile, Reading, find_files  # noqa: E402

WRONG_CHOICES = 3
IDENTIFIER = re.compile(r"\b[A-Za-z_]\w{3,}\b")
IDENTIFIER_BEHIND_SPACE = re.compile(r"(?<=\S) ([A-Za-z_]\w{3,})\b")
LINE_CHARACTERS = range(20, 121)  # of a line to be told from others
MOST_PLACES = 100  # of a document that are tried, each in time of its length
REST_CHARACTERS = 60  # of a line after an identifier


def print_line(text: str) -> None:
    print(f"make_questions: {text}", file=sys.stderr, flush=True)


def is_telling(line: str) -> bool:
    return len(line.strip()) in LINE_CHARACTERS and any(map(str.isalpha, line))


def question_of_line(lines: list[str], number: int, context_lines: int, rng: random.Random) -> dict | None:
    right = lines[number].rstrip()
    if not is_telling(right):
        return None
    others = {line.rstrip() for line in lines if is_telling(line)}
    wrong = sorted(other for other in others
                   if other.strip() != right.strip() and 0.8 * len(right) <= len(other) <= 1.25 * len(right))
    if len(wrong) < WRONG_CHOICES:
        return None
    choices = ["\n" + line for line in (right, *rng.sample(wrong, WRONG_CHOICES))]
    return question("\n".join(lines[number - context_lines : number]), choices, rng)


def question_of_identifier(lines: list[str], number: int, context_lines: int, rng: random.Random) -> dict | None:
    before, line = "\n".join(lines[number - context_lines : number]), lines[number].rstrip()
    known = set(IDENTIFIER.findall(before))
    places = [match for match in IDENTIFIER_BEHIND_SPACE.finditer(line) if match[1] in known]
    if not places or len(known) <= WRONG_CHOICES:
        return None
    place = rng.choice(places)
    wrong = rng.sample(sorted(known - {place[1]}), WRONG_CHOICES)
    rest = line[place.end() :][:REST_CHARACTERS]
    choices = [f" {identifier}{rest}" for identifier in (place[1], *wrong)]
    return question(f"{before}\n{line[:place.start()]}", choices, rng)


KINDS: dict[str, Callable] = {"lines": question_of_line, "identifiers": question_of_identifier}


def question(context: str, choices: list[str], rng: random.Random) -> dict:
    """The first choice is the right one; they are shuffled."""
    right = choices[0]
    rng.shuffle(choices)
    return {"context": context, "choices": choices, "answer": choices.index(right)}


def question_of(text: str, digest: bytes, options: argparse.Namespace) -> dict | None:
    """From a place of the document that its digest decides; None where none of those tried has one."""
    lines = text.split("\n")
    rng = random.Random(digest)
    numbers = list(range(options.context_lines, len(lines)))
    rng.shuffle(numbers)
    for number in numbers[:MOST_PLACES]:
        context = lines[number - options.context_lines : number]
        if not any(map(str.strip, context)):
            continue
        if made := KINDS[options.kind](lines, number, options.context_lines, rng):
            return made
    return None


def questions(options: argparse.Namespace) -> Iterator[dict]:
    reading, seen = Reading(options.jsonl_field, split_bytes=options.split_bytes), set()
    for path in find_files(options.input, options.include, real_path(options.out), print_line):
        for document in InputFile(path, reading).documents():
            digest = hashlib.blake2b(document, digest_size=16).digest()
            if options.eval_fraction > 0 and not is_held_out(digest, options.eval_fraction):
                continue
            if not is_new(digest, seen):
                continue
            try:
                text = document.decode()
            except UnicodeDecodeError:
                continue
            if made := question_of(text, digest, options):
                yield made


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="make_questions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    add = parser.add_argument
    add("input", nargs="+", type=Path, help="text files, or folders of them")
    add("--out", required=True, type=Path, help="JSON Lines file to create; an existing one is replaced")
    add("--kind", required=True, choices=sorted(KINDS), help="of questions")
    add("--eval-fraction", type=float, default=0.0, metavar="F", help="only of the documents that prepare_data.py holds out (default: of all)")
    add("--context-lines", type=int, default=30, metavar="N", help="before the place that is asked for (default: 30)")
    add("--include", action="append", default=[], metavar="PATTERN", help="only files whose name or path matches; may be repeated")
    add("--jsonl-field", metavar="NAME", help="inputs are JSON Lines, the text is in this field")
    add("--split-bytes", type=int, metavar="N", help="cut text files into documents of about N bytes")
    options = parser.parse_args(arguments)
    if not 0 <= options.eval_fraction < 1:
        raise InputError(f"--eval-fraction is {options.eval_fraction}; give a number from 0 to below 1")
    for name in ("context_lines", "split_bytes"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give a positive number")
    return options


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    made = list(questions(options))
    if not made:
        raise InputError(f"no document gives a question of {options.kind}; give more text, a larger --eval-fraction, or fewer --context-lines")
    write_lines(options.out, made)
    print_made(options.out, f"{len(made):,} questions of {options.kind}")


def main() -> int:
    return run_script(run, print_line)


if __name__ == "__main__":
    sys.exit(main())
