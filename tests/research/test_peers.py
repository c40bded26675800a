#!/usr/bin/env python3
"""Tests of scripts/research/peers.py: the picture is of the data, and every bar of another program has a source."""
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import matplotlib
except ImportError:
    matplotlib = None

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/research"))
import peers  # noqa: E402


class Peers(unittest.TestCase):
    def test_every_bar_has_a_source_a_card_and_a_date(self):
        others = peers.read_lines("peers.jsonl")
        self.assertGreaterEqual(len(others), 4)
        for bar in others:
            with self.subTest(bar["name"]):
                self.assertRegex(bar["source"], r"^https://[\w.]+/")
                self.assertRegex(bar["card"], r"^NVIDIA H\d00$")
                self.assertRegex(bar["date"], r"^\d{4}-\d\d-\d\d$")
                self.assertTrue(bar["model"] and bar["batch"] and bar["how"])
                self.assertTrue(0 < bar["memory_gb"] < 141 and bar["tok_s"] > 0)

    def test_own_bars_are_figures(self):
        speeds = {line["name"]: line["value"] for line in peers.read_lines("figures.jsonl")}
        own = [bar for bar in peers.bars() if bar["source"] == "figures.jsonl"]
        self.assertEqual([bar["tok_s"] for bar in own], [speeds[f"{name}.tok_s_gpu"] for _, name, _ in peers.OWN])

    def script(self, out):
        return subprocess.run([sys.executable, ROOT / "scripts/research/peers.py", "--out", out], capture_output=True, text=True)

    @unittest.skipIf(matplotlib is None, "matplotlib is missing")
    def test_a_picture_that_cannot_be_written(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            for name, code, message in (("missing/peers.png", 4, "missing/peers.png: No such file or directory"),
                                        ("peers.xyz", 2, "peers.xyz: ends in no format that can be drawn")):
                with self.subTest(name):
                    result = self.script(f"{folder}/{name}")
                    self.assertEqual(result.returncode, code, result.stderr)
                    self.assertRegex(result.stderr, f"^peers.py: error: .*{message}.*\n$")

    @unittest.skipIf(matplotlib is None, "matplotlib is missing")
    def test_the_picture_has_a_bar_for_each(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            result = self.script(f"{folder}/peers.svg")
            self.assertEqual(result.returncode, 0, result.stderr)
            picture = Path(folder, "peers.svg").read_text(encoding="utf-8")
        # Texts of an SVG are drawn as glyphs, each under a comment.
        drawn = re.findall(r"<!--(.*?)-->", picture, re.DOTALL)
        for bar in peers.bars():
            self.assertTrue(any(f"{bar['tok_s']:,.0f}" in text for text in drawn), bar)
            self.assertTrue(any(bar["name"].replace("`", "") in text for text in drawn), bar)


if __name__ == "__main__":
    unittest.main()
