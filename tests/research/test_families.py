#!/usr/bin/env python3
"""scripts/research/families.py: tiny models of each family learn real text with `coat` and `parka` as they do with bf16. Exits
with 77 (skipped) where numpy is missing."""
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "commands"))
from parka_runs import PROGRAM  # noqa: E402

if importlib.util.find_spec("numpy") is None:
    print("skipped: numpy is missing")
    sys.exit(77)

SCRIPT = ROOT / "scripts" / "research" / "families.py"
LEARNT, LARGEST_GAP = 2.0, 0.05  # nats per byte


class Families(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def script(self, *arguments):
        command = [sys.executable, SCRIPT, os.path.abspath(PROGRAM), "--folder", f"{self.folder}/runs", "--json",
                   f"{self.folder}/out.json", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=1200)

    def test_fp8_learns_as_bf16_does_in_every_family(self):
        result = self.script("--steps", "100", "--seeds", "1", "--tokens", "400000", "--jobs", "2")
        self.assertEqual(result.returncode, 0, result.stderr)
        with open(f"{self.folder}/out.json", encoding="utf-8") as file:
            report = json.load(file)
        self.assertEqual(set(report["losses"]), {"llama3", "qwen2", "qwen3", "olmo2", "olmo3", "mistral", "gemma3"})
        for family, losses in report["losses"].items():
            ((start, end),) = losses["bf16"]
            self.assertLess(end, start - LEARNT)
            for recipe in ("coat", "parka"):
                with self.subTest(family=family, recipe=recipe):
                    ((_, of_recipe),) = losses[recipe]
                    self.assertNotEqual(of_recipe, end)
                    self.assertLess(abs(of_recipe - end), LARGEST_GAP)
                    name = f"loss_gap.tiny.{family}.{recipe}.nats"
                    self.assertEqual(report["figures"][name], of_recipe - end)
                    self.assertEqual(report["spread"][name], [of_recipe - end] * 2)
                    self.assertIn(f"{of_recipe - end:+.4f}", result.stdout)

    def test_finished_runs_are_not_trained_again(self):
        arguments = ("--steps", "2", "--seeds", "2", "--tokens", "100000", "--family", "olmo3")
        first = self.script(*arguments)
        self.assertEqual(first.returncode, 0, first.stderr)
        second = self.script(*arguments)
        self.assertEqual(second.stdout, first.stdout)
        with open(f"{self.folder}/runs/olmo3.coat.2/metrics.jsonl", encoding="utf-8") as file:
            steps = [record["step"] for record in map(json.loads, file) if record["kind"] == "train"]
        self.assertEqual(steps, [1, 2])

    def test_what_is_wrong_is_said_in_one_line(self):
        for arguments, words in ((("--text", "/nowhere"), "/nowhere"),
                                 (("--family", "gpt2"), "gpt2"),
                                 (("--width", "40"), "--width"),
                                 (("--tokens", "100000", "--jobs", "2", "--lr=-1"), "parka train")):
            with self.subTest(arguments):
                result = self.script(*arguments)
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(words, result.stderr)
                self.assertEqual(result.stderr.count("families.py: error:"), 1, result.stderr)


if __name__ == "__main__":
    unittest.main()
