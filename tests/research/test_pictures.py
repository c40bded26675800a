#!/usr/bin/env python3
"""Tests of scripts/research/pictures.py: each other program has a source, and stands beside Parka. Exits with 77 (skipped) where
matplotlib is missing."""
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import matplotlib  # noqa: F401
except ImportError:
    print("skipped: matplotlib is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/research"))
import kernel_pictures  # noqa: E402
import pictures  # noqa: E402


class Pictures(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def script(self, picture, out):
        return subprocess.run([sys.executable, ROOT / "scripts/research/pictures.py", picture, "--out", out], capture_output=True, text=True)

    def test_every_program_has_a_source_a_card_and_a_date(self):
        for line in pictures.read_lines("peers.jsonl"):
            with self.subTest(line["name"]):
                self.assertRegex(line["source"], r"^https://[\w.]+/")
                self.assertRegex(line["card"], r"^NVIDIA H\d00$")
                self.assertRegex(line["date"], r"^\d{4}-\d\d-\d\d$")
                self.assertTrue(all(line[key] for key in ("model", "batch", "how", "recipe", "parka_commit", "parka_tok_s", "parka_memory_gb")))

    def test_the_picture_has_both_sides_of_each_pair(self):
        result = self.script("peers", f"{self.folder}/peers.svg")
        self.assertEqual(result.returncode, 0, result.stderr)
        # Texts of an SVG are drawn as glyphs, each under a comment.
        drawn = re.findall(r"<!--(.*?)-->", (self.folder / "peers.svg").read_text(encoding="utf-8"), re.DOTALL)
        self.assertGreater(len(pictures.pairs()), 1)
        for line in pictures.pairs():
            for wanted in (f"{line['tok_s']:,}", f"{line['parka_tok_s']:,}", line["name"]):
                self.assertTrue(any(wanted in text for text in drawn), wanted)

    def test_losses_are_drawn(self):
        result = self.script("loss", f"{self.folder}/loss.svg")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("342M", (self.folder / "loss.svg").read_text(encoding="utf-8"))

    def test_every_page_of_a_kernel_has_its_picture(self):
        pages = {path.stem: path.read_text(encoding="utf-8") for path in (ROOT / "docs/kernels").glob("*.md")}
        self.assertEqual(set(pages), set(kernel_pictures.KERNELS))
        for name, page in pages.items():
            with self.subTest(name):
                self.assertIn(f"]({name}.png)", page)
                self.assertTrue((ROOT / f"docs/kernels/{name}.png").exists())

    def test_kernels_are_drawn_and_fit_in_shared_memory(self):
        result = subprocess.run([sys.executable, ROOT / "scripts/research/kernel_pictures.py", "--out", self.folder], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        for name, kernel in kernel_pictures.KERNELS.items():
            with self.subTest(name):
                self.assertTrue((self.folder / f"{name}.png").exists())
                if "memory_title" not in kernel:
                    self.assertLessEqual(sum(size for _, size, _ in kernel["memory"]), kernel_pictures.MOST_SHARED)

    def test_a_picture_that_cannot_be_written(self):
        for name, code in (("missing/peers.png", 4), ("peers.xyz", 2)):
            with self.subTest(name):
                result = self.script("peers", f"{self.folder}/{name}")
                self.assertEqual((result.returncode, result.stderr.count("\n")), (code, 1), result.stderr)
                self.assertIn(name, result.stderr)


if __name__ == "__main__":
    unittest.main()
