#!/usr/bin/env python3
"""Makes parts of large groups in two processes, of which the first fails: failing_parts.py FOLDER. Prints its error."""
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
from text_data import parts  # noqa: E402
from text_data.common import InputError  # noqa: E402


class Maker:
    def __init__(self, settings, folder, progress):
        self.settings, self.folder, self.progress = settings, folder, progress

    def path(self, index, group):
        return self.folder / str(index)

    def make(self, index, group):
        if index == 0:
            raise InputError(f"a group of {len(group)} fails")
        time.sleep(0.1)
        self.path(index, group).with_suffix(".npz").touch()


def main():
    maker = Maker(None, Path(sys.argv[1]), parts.make_progress())
    try:
        for _ in parts.make_parts(maker, [[f"file {i} of a group" for i in range(10000)]] * 12, 2):
            pass
    except InputError as error:
        print(error)


if __name__ == "__main__":
    main()
