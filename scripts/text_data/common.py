"""Errors, options and durable files."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import BinaryIO


class InputError(Exception):
    """The user can fix it. One line: what, where, what to do."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; see --help")


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


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


def write_lines(path: Path, lines: list[dict]) -> None:
    """JSON Lines. The file appears whole or not at all; an existing one is replaced."""
    staging = path.with_name(f".{path.name}.tmp-{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(staging, "wb")
    except OSError as error:
        raise InputError(f"{path}: cannot be made ({error.strerror}); give --out a place that you may write to")
    try:
        for line in lines:
            file.write((json.dumps(line, separators=(",", ":")) + "\n").encode())
        sync_and_close(file)
        staging.rename(path)
        sync_folder(path.parent)
    finally:
        staging.unlink(missing_ok=True)
