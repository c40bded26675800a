#!/usr/bin/env python3
"""Tests of scripts/image_helper.py. Exits with 77 (skipped) where pillow or numpy is missing."""

import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import numpy as np
    from PIL import Image
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "image_helper.py"
LLAVA = ROOT / "tests" / "fixtures" / "llava"

sys.path.insert(0, str(ROOT / "scripts"))
from image_data.processor import geometry_of  # noqa: E402


class ImageHelper(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def geometry(self, **config):
        (self.folder / "preprocessor_config.json").write_text(json.dumps(config))
        return geometry_of(self.folder)

    def ask(self, *requests, tower="clip", arguments=()):
        command = [sys.executable, str(SCRIPT), "--tower", tower, "--size", "8", "--mean", "0.5,0.25,0.75", *arguments]
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        result = subprocess.run(command, input=lines, capture_output=True, text=True, timeout=60)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def test_the_geometry_is_that_of_the_processor(self):
        self.assertIsNone(geometry_of(self.folder))
        square = {"height": 14, "width": 14}
        self.assertEqual(self.geometry(size={"shortest_edge": 14}, do_center_crop=True), "crop")
        self.assertEqual(self.geometry(size=square), "stretch")
        self.assertEqual(self.geometry(size={"shortest_edge": 14}, do_center_crop=True, do_pad=True), "pad")
        self.assertIsNone(self.geometry(size={"longest_edge": 14}))
        self.assertIsNone(self.geometry(size=14))
        self.assertEqual(geometry_of(LLAVA / "clip_llama"), "crop")
        self.assertEqual(geometry_of(LLAVA / "siglip_qwen2"), "stretch")

    def test_without_a_processor_it_is_the_usual_one_of_the_tower(self):
        self.assertEqual(self.ask(), [{"geometry": "crop"}])
        self.assertEqual(self.ask(tower="siglip"), [{"geometry": "stretch"}])
        self.assertEqual(self.ask(arguments=("--geometry", "pad", "--processor", str(LLAVA / "clip_llama"))), [{"geometry": "pad"}])
        self.assertEqual(self.ask(arguments=("--processor", str(LLAVA / "siglip_qwen2"))), [{"geometry": "stretch"}])

    def test_pixels_are_planes_and_padding_has_the_colour_of_the_mean(self):
        Image.fromarray(np.full((8, 16, 3), (1, 2, 3), np.uint8)).save(self.folder / "wide.png")
        path = str(self.folder / "wide.png")
        _, cropped = self.ask({"image": path})
        self.assertEqual(cropped["pixels"], [1] * 64 + [2] * 64 + [3] * 64)
        _, padded = self.ask({"image": path}, arguments=("--geometry", "pad"))
        pixels = np.array(padded["pixels"], np.uint8).reshape(3, 8, 8)
        off = pixels[:, 0, 0].astype(int) - [127, 63, 191]  # the filter swings over near the picture
        self.assertLess(abs(off).max(), 4)

    def test_a_picture_that_cannot_be_used_is_named_and_the_next_one_is_read(self):
        (self.folder / "empty.png").touch()
        Image.new("RGB", (8, 8)).save(self.folder / "black.png")
        _, error, black = self.ask(*({"image": str(self.folder / name)} for name in ("empty.png", "black.png")))
        self.assertIn("empty.png: is empty", error["error"])
        self.assertEqual(black["pixels"], [0] * 192)


if __name__ == "__main__":
    unittest.main()
