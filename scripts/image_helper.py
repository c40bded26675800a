#!/usr/bin/env python3
"""Makes pixels of pictures for `parka generate --image`, which starts it and ends it.

    image_helper.py --tower clip|siglip --size PIXELS --mean R,G,B [--geometry crop|pad|stretch] [--processor FOLDER]

Without --geometry it is that of preprocessor_config.json or processor_config.json in FOLDER, or else that with which towers of
the kind are trained (docs/vision.md). Requests and answers are lines of JSON on standard input and output. The first answer
comes unasked: {"geometry": NAME}. Then, for each request,
    {"image": PATH}     {"pixels": [NUMBER, ...]}: red, green and blue of the picture as planes of SIZE x SIZE bytes
or {"error": TEXT}: one line for the user. It ends with its input, or after an error at its start.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from image_data.processor import geometry_of  # noqa: E402
from text_data.common import InputError, one_line  # noqa: E402
from text_data.helper_process import advice_to_user, run, serve  # noqa: E402


class Helper:
    def __init__(self, options: argparse.Namespace):
        try:
            from image_data.pictures import TOWERS, Fitting, PictureError, colour_of, pixels_of
        except ImportError as error:
            raise InputError(
                f"--image needs Python's pillow and numpy packages ({one_line(error)}); "
                f"{advice_to_user('pillow numpy')}"
            )
        usual = geometry_of(Path(options.processor)) if options.processor else None
        self.geometry = options.geometry or usual or TOWERS[options.tower].geometry
        mean = tuple(float(value) for value in options.mean.split(","))
        self._fitting = Fitting(self.geometry, options.size, colour_of(mean))
        self._pixels_of, self._error = pixels_of, PictureError

    def answer(self, request: dict) -> dict:
        path = Path(request["image"])
        try:
            return {"pixels": self._pixels_of(path, self._fitting).ravel().tolist()}
        except self._error as error:
            raise InputError(f"{path}: {error}; give another picture")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower", choices=("clip", "siglip"), required=True)
    parser.add_argument("--size", type=int, required=True)
    parser.add_argument("--mean", required=True)
    parser.add_argument("--geometry", choices=("crop", "pad", "stretch"))
    parser.add_argument("--processor")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    return serve(options.processor or "the processor", lambda: Helper(options), lambda helper: {"geometry": helper.geometry})


if __name__ == "__main__":
    run(main)
