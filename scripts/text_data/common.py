"""Errors, options and durable files."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import BinaryIO, Iterable


class InputError(Exception):
    """The user can fix it. One line: what, where, what to do."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; see --help")

    def parse_args(self, *arguments):
        options = super().parse_args(*arguments)
        for value in vars(options).values():
            if isinstance(value, Path):
                refuse_address(value)
        return options


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def refuse_address(path: Path) -> None:
    """Raises an InputError for "s3://bucket/x", which would be a folder "s3:"."""
    if re.match(r"[a-z][a-z0-9+.-]+:/", str(path)) and not os.path.exists(path):  # a Path has lost one of two slashes
        address = str(path).replace(":/", "://", 1)
        raise InputError(f"{address}: is the address of an object store or a site; mount the store, or copy from and to it")


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
    """The file appears whole or not at all; an existing one is replaced."""
    staging = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(staging, "wb")
    except OSError as error:
        raise InputError(f"{path}: cannot be made ({error.strerror}); give --out a place that you may write to")
    try:
        with file:
            for part in parts:
                file.write(part)
            sync(file)
        staging.rename(path)
        sync_folder(path.parent)
    finally:
        staging.unlink(missing_ok=True)
