"""A folder of output that appears whole or not at all, and what a stopped run leaves for the next one."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from typing import BinaryIO, Callable

from .common import InputError, real_path, sync, sync_folder


def new_folder(out: Path) -> Path:
    """The absolute path of a folder that is not there yet, or is empty."""
    out = real_path(out)
    if os.path.lexists(out) and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(f"{out}: exists and is not an empty folder; give --out another name or remove it")
    if os.path.ismount(out):
        raise InputError(f"{out}: is where a file system is mounted, which no folder can replace; give --out a folder in it")
    return out


class Partial:
    """The hidden folder beside --out, where parts and unfinished output lie until all is done. One run at a time has it."""

    def __init__(self, out: Path, print_line: Callable[[str], None]):
        self._out, self._print_line = out, print_line
        # Hidden, so that a search of the inputs passes it by.
        self.path = out.with_name(f".{out.name}.partial")
        self.staging = self.path / "output"

    def __enter__(self) -> Partial:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock: BinaryIO = open(self.path / "lock", "wb")
        except OSError as error:
            raise InputError(f"{self.path}: cannot be made ({error.strerror}); give --out a place that you may write to")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._lock.close()
            raise InputError(f"{self._out}: another run is making it; wait for it, or give --out another name")
        shutil.rmtree(self.staging, ignore_errors=True)
        self.staging.mkdir()
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        """Keeps finished parts for the next run, unless the output is in its place. They took long, and are used once what is wrong
        with options or inputs is changed, too; before, the same command would fail again."""
        if not self.staging.exists() or not any(self.path.glob("*.npz")):
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            is_wrong = error is not None and issubclass(error, InputError)
            continues = "the command continues once what the error says is changed" if is_wrong else "the same command continues"
            self._print_line(f"finished files are kept in {self.path}: {continues}")
        self._lock.close()

    def forget(self) -> None:
        """Removes the finished parts, because the same command would fail again."""
        for part in self.path.glob("*.npz"):
            part.unlink()

    def describe(self, info: dict) -> None:
        """Writes data.json, the last file of the output."""
        with open(self.staging / "data.json", "wb") as file:
            file.write((json.dumps(info, indent=2) + "\n").encode())
            sync(file)
        sync_folder(self.staging)

    def finish(self) -> None:
        self.staging.rename(self._out)
        sync_folder(self._out.parent)
