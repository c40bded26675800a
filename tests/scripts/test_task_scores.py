#!/usr/bin/env python3
"""Tests of scripts/task_scores.py. Exits with 77 (skipped) where numpy is missing."""
import json
import math
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import numpy  # noqa: F401
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def script(self, name, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / name, *map(str, arguments)], capture_output=True, text=True, timeout=120)


class Scores(Folder):
    def predictions(self, name, right, task="lines", labels=None):
        """A file of a run that answers `right` of the documents right."""
        path = self.folder / name
        with open(path, "w", encoding="utf-8") as file:
            for number, is_right in enumerate(right):
                label = number % 3
                scores = [-5.0, -5.0, -5.0]
                scores[label if is_right else (label + 1) % 3] = -1.0
                file.write(json.dumps({"task": task, "document": number, "label": label, "log_likelihood": scores}) + "\n")
        return path

    def test_scores_and_standard_errors(self):
        first = [1] * 60 + [0] * 40
        second = [1] * 50 + [0] * 10 + [1] * 5 + [0] * 35
        files = f"bf16.1={self.predictions('a', first)}", f"parka.1={self.predictions('b', second)}"
        result = self.script("task_scores.py", *files, "--json", "--model", "m")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        found = {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}
        self.assertEqual(list(found), ["tasks.m.bf16.1.lines.acc", "tasks.m.parka.1.lines.acc", "tasks.m.parka.1.lines.vs_bf16.1"])
        for name, share in (("bf16.1.lines.acc", 0.6), ("parka.1.lines.acc", 0.55)):
            error = math.sqrt(share * (1 - share) / 99)
            figure = found["tasks.m." + name]
            for value, wanted in zip((figure["value"], *figure["interval"]), (share, share - error, share + error)):
                self.assertAlmostEqual(value, wanted)
        difference = found["tasks.m.parka.1.lines.vs_bf16.1"]
        # 10 documents less and 5 more: the mean of the squares is 0.15.
        error = math.sqrt((0.15 - 0.05**2) / 99)
        for value, wanted in zip((difference["value"], *difference["interval"]), (-0.05, -0.05 - error, -0.05 + error)):
            self.assertAlmostEqual(value, wanted)
        table = self.script("task_scores.py", *files).stdout.splitlines()
        self.assertEqual(table[2].split(), ["lines", "parka.1", "100", "55.00%", f"{math.sqrt(0.55 * 0.45 / 99):.2%}", "-5.00%", f"{error:.2%}"])

    def test_bad_input(self):
        good, other = self.predictions("good", [1, 0, 1]), self.predictions("other", [1, 0])
        broken = self.folder / "broken"
        broken.write_text('{"task": "lines"}\n')
        for message, *arguments in (
                ("b: .*lines", f"a={good}", f"b={other}"), ("RUN=FILE", good), ("RUN", f"a={good}", f"a={other}"), ("broken:1: ", f"a={broken}"),
                ("absent", f"a={self.folder / 'absent'}"), ("--json", f"a={good}", "--json")):
            with self.subTest(message):
                result = self.script("task_scores.py", *arguments)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"^task_scores.py: error: .*{message}.*\n$")


if __name__ == "__main__":
    unittest.main()
