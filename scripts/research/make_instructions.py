#!/usr/bin/env python3
"""Makes conversations of documented functions, for prepare_data.py --chat: an instruct data set that needs no download.

    make_instructions.py /usr/lib/python3 --out functions.jsonl
    prepare_data.py functions.jsonl --chat chatml --tokenizer tokenizer.json --sequence-length 1024 --eval-fraction 0.05 --out data/functions

The user gives the head of a Python function and its docstring, and asks for the rest; the assistant writes it. Taken are functions
and methods of files that Python's own parser accepts, with a docstring and after it a body of --least-characters (default 40)
to --most-characters (default 2000); none inside another, without decorators, and none with a string or comment further to the left than
itself. Equal functions count once. Folders are searched as prepare_data.py does, for *.py unless --include says otherwise. Each line of
--out is {"messages": [...]}.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import tokenize
import warnings
from pathlib import Path
from typing import Iterator

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from script_exit import run_script  # noqa: E402
from text_data.common import InputError, Parser, print_made, real_path, write_lines  # noqa: E402
from text_data.readers import find_files  # noqa: E402

REQUEST = "Write the rest of this Python function."
LINE_END = re.compile(r"\r\n|\r|\n")  # as Python's parser counts lines; str.splitlines() knows more ends
MOST_CHARACTERS = 4 * 2**20  # of a file: what is cut off there is no Python any more, and gives nothing


def print_line(text: str) -> None:
    print(f"make_instructions: {text}", file=sys.stderr, flush=True)


def parsed(source: str) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in what is not ours
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def is_function(node: ast.AST) -> bool:
    return isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))


def outer_functions(node: ast.Module | ast.ClassDef) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Functions and methods, but none inside another, which has it in what the assistant writes."""
    for child in node.body:
        if is_function(child):
            yield child
        elif isinstance(child, ast.ClassDef):
            yield from outer_functions(child)


def functions(source: str) -> Iterator[tuple[str, str]]:
    """(head with docstring, rest) of each documented function, as the source has them but for the indentation. The lines of a
    function begin after its decorators."""
    module = parsed(source)
    if module is None:
        return
    lines = LINE_END.split(source)
    for node in outer_functions(module):
        if ast.get_docstring(node) is None:
            continue
        last_of_head = node.body[0].end_lineno
        if len(node.body) == 1 or node.body[1].lineno <= last_of_head:  # on one line with the docstring
            continue
        # Every line loses as many columns, in strings, too, so that the rest keeps its place under the head.
        given = lines[node.lineno - 1 : node.end_lineno]
        if any(line[: node.col_offset].strip() for line in given):  # a string or comment would be cut
            continue
        whole = [line[node.col_offset :] for line in given]
        split = last_of_head - node.lineno + 1
        yield "\n".join(whole[:split]), "\n".join(whole[split:])


def read_source(path: Path) -> str | None:
    """As Python reads it: without a byte order mark, in the encoding that the file names. None where it cannot be decoded."""
    try:
        with tokenize.open(path) as file:
            return file.read(MOST_CHARACTERS)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})")
    except (SyntaxError, UnicodeError, LookupError):
        return None


def conversations(options: argparse.Namespace) -> Iterator[dict]:
    seen: set[tuple[str, str]] = set()
    left_out: list[Path] = []
    for path in find_files(options.input, options.include or ["*.py"], real_path(options.out), print_line):
        source = read_source(path)
        if source is None:
            left_out.append(path)
            continue
        for function in functions(source):
            head, rest = function
            if function in seen or not options.least_characters <= len(rest) <= options.most_characters:
                continue
            seen.add(function)
            yield {"messages": [{"role": "user", "content": f"{REQUEST}\n\n{head}"}, {"role": "assistant", "content": rest}]}
    if left_out:
        files = "1 file" if len(left_out) == 1 else f"{len(left_out):,} files"
        print_line(f"left out: {files} that Python cannot decode, beginning with {left_out[0]}")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="make_instructions", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                    allow_abbrev=False)
    add = parser.add_argument
    add("input", nargs="+", type=Path, help="Python files, or folders of them")
    add("--out", required=True, type=Path, help="JSON Lines file to create; an existing one is replaced")
    add("--include", action="append", default=[], metavar="GLOB", help="only files whose name or path matches (default: *.py); may be repeated")
    add("--least-characters", type=int, default=40, metavar="N", help="of what the assistant writes (default: 40)")
    add("--most-characters", type=int, default=2000, metavar="N", help="of what the assistant writes (default: 2000)")
    options = parser.parse_args(arguments)
    if not 1 <= options.least_characters <= options.most_characters:
        raise InputError(f"--least-characters is {options.least_characters} and --most-characters {options.most_characters}; give 1 or more, and no fewer at most")
    return options


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    made = list(conversations(options))
    if not made:
        raise InputError("no documented function of the wanted length; give more files, or other lengths")
    write_lines(options.out, made)
    print_made(options.out, f"{len(made):,} functions")


def main() -> int:
    return run_script(run, print_line)


if __name__ == "__main__":
    sys.exit(main())
