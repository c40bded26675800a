"""Errors, options and durable files."""

from __future__ import annotations

import argparse
import collections
import contextlib
import errno
import json
import os
import re
import stat
import sys
from pathlib import Path
from typing import BinaryIO, Iterable, Iterator


MOST_QUOTED = 400  # characters of what a library says


def evaluating(held_out: list[str]) -> dict:
    """What a config needs beside data.eval, which no run looks at by default."""
    return {"training": {"eval_interval": 500}} if held_out else {}


class InputError(Exception):
    """The user can fix it. One line: what, where, what to do."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; see --help")

    def print_help(self, file=None):
        with contextlib.suppress(BrokenPipeError):  # nobody reads it to its end
            super().print_help(file)

    def parse_args(self, *arguments):
        options = super().parse_args(*arguments)
        for value in vars(options).values():
            if isinstance(value, Path):
                refuse_address(value)
        return options


def one_line(error: BaseException) -> str:
    """What a library says, which may quote the bytes of a file and be long."""
    text = printable(" ".join(str(error).split())) or type(error).__name__
    return text if len(text) <= MOST_QUOTED else f"{text[:MOST_QUOTED]}..."


def printable(text: object) -> str:
    """In one line that a terminal takes no commands from: control characters, as names of files may have, are spelled out."""
    line = " ".join(str(text).splitlines())
    return re.sub(r"[\0-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", lambda found: f"\\x{ord(found[0]):02x}", line)


def tell(told: collections.Counter, of: str, what: str, place: str) -> None:
    """Counts one more of the conversations, say, that a warning at the end is about, under the place of the first."""
    key = f"doubt {of}\n{what}\n"
    told[next((name for name in told if name.startswith(key)), key + place)] += 1


@contextlib.contextmanager
def telling_failures(what: str, advice: str) -> Iterator[None]:
    """Of a library that has no class of its own for its errors, and whose panics are no Exception, as those of Rust."""
    try:
        yield
    except InputError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise InputError(f"{what} ({one_line(error)}); {advice}")


def real_path(path: Path) -> Path:
    """Without links. Of a loop of links, for which Path.resolve() raises an error of its own, it is the path of one of them."""
    return Path(os.path.realpath(path))


def refuse_address(path: Path) -> None:
    """Raises an InputError for "s3://bucket/x", which would be a folder "s3:"."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)) and not os.path.exists(path):  # a Path has lost one of two slashes
        address = str(path).replace(":/", "://", 1)
        raise InputError(f"{address}: is the address of an object store or a site; mount the store, or copy from and to it")


def hub_advice(name: str, what: str, option: str = "") -> str:
    """How to fetch what Hugging Face's hub has under the name of something that is not there; nothing if it is no such name."""
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name) or re.search(r"\.[a-z]+$", name):
        return ""
    folder = name.split("/")[-1]
    return f"if the hub of Hugging Face has it: hf download {name} {what} --local-dir {folder}, and then give {option}{folder}"


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_and_close(file: BinaryIO) -> None:
    with file:
        sync(file)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def refuse_to_replace(given: Path, out: Path) -> None:
    """Raises an InputError if writing `out` would replace the input file `given`."""
    if os.path.exists(given) and os.path.exists(out) and os.path.samefile(given, out):
        raise InputError(f"--out {out}: is the input {given}, which it would replace; give another file")


def write_lines(path: Path, lines: list[dict]) -> None:
    """JSON Lines, as write_file() writes."""
    write_file(path, ((json.dumps(line, separators=(",", ":")) + "\n").encode() for line in lines))


def write_file(path: Path, parts: Iterable[bytes]) -> None:
    """A file appears whole or not at all, and an existing one is replaced, also one that a symbolic link leads to. A device or
    a pipe, as /dev/stdout, is written into."""
    with refusing(path):
        target = file_behind(path)
        file = open_in_place(path) if target is None else open_staging(target)
    if target is None:
        with file:
            file.writelines(parts)
        return
    staging = Path(file.name)
    try:
        with file:
            file.writelines(parts)
            sync(file)
        staging.rename(target)
        sync_folder(target.parent)
    finally:
        staging.unlink(missing_ok=True)


def require_writable(path: Path) -> None:
    """Refuses what write_file() would refuse to make, before the work for it is done."""
    with refusing(path):
        target = file_behind(path)
        if target is None:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            return
        with open_staging(target) as file:
            os.unlink(file.name)


@contextlib.contextmanager
def refusing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{path}: cannot be made ({error.strerror}); give --out a place that you may write to")


def file_behind(path: Path) -> Path | None:
    """The path without symbolic links of a regular file, or of one that is not there yet. None of anything else, which no file
    may replace, and of standard output, which may be behind other text of its file."""
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return Path(os.path.realpath(path))
    if stat.S_ISBLK(mode) or stat.S_ISSOCK(mode):
        raise InputError(f"{path}: is a socket or a disk, which is not written into; give --out another name")
    is_file = stat.S_ISREG(mode) and not is_stdout(path)
    return Path(os.path.realpath(path)) if is_file else None


def open_staging(path: Path) -> BinaryIO:
    """Where the file lies until it is whole; its folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return open(path.with_name(f".{path.name}.tmp-{os.getpid()}"), "wb")


def open_in_place(path: Path) -> BinaryIO:
    if not is_stdout(path):
        return open(path, "wb")
    sys.stdout.flush()
    return open(os.dup(sys.stdout.fileno()), "wb")  # opened by its name, a file behind it would be written from its beginning


def is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(sys.stdout.fileno()))
    except (AttributeError, OSError):  # there is no such file, or no standard output
        return False


def print_made(path: Path, what: str) -> None:
    """Says what was written, and not in the midst of it."""
    print(f"{path}: {what}", file=sys.stderr if is_stdout(path) else sys.stdout)
