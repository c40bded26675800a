"""Errors, options and durable files."""

from __future__ import annotations

import argparse
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
