#!/usr/bin/env python3
"""Tests of scripts/research/speed_ratio.py: with programs that say what they were asked, and with parka itself."""
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

SCRIPT = ROOT / "scripts/research/speed_ratio.py"
# Writes its arguments to the file CALLS, and the next of its speeds to the file behind --json.
PRETENDED = """#!/usr/bin/env python3
import json, os, sys
calls, name, speeds, device = {calls!r}, {name!r}, {speeds}, {device!r}
with open(calls, "a", encoding="utf-8") as file:
    print(name, *sys.argv[1:], file=file)
if sys.argv[1] == "tune":
    open(sys.argv[sys.argv.index("--output") + 1], "w").write("{{}}")
    sys.exit(0)
mine = sum(line.startswith(name + " bench") for line in open(calls, encoding="utf-8"))
if mine > len(speeds):
    print("parka: error: not enough memory", file=sys.stderr)
    sys.exit(2)
result = {{"device": device, "tokens_per_second": speeds[mine - 1], "step_seconds": [100 / speeds[mine - 1]], "planned_bytes": 7}}
open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(result))
"""


class SpeedRatio(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.calls = self.folder / "calls"
        self.out = self.folder / "out"

    def pretended(self, name, speeds, device="A card"):
        path = self.folder / name
        path.write_text(PRETENDED.format(calls=str(self.calls), name=name, speeds=speeds, device=device), encoding="utf-8")
        path.chmod(0o755)
        return path

    def call(self, *arguments, code=0):
        result = subprocess.run([sys.executable, SCRIPT, "a.json", self.out, *map(str, arguments)], capture_output=True, text=True,
                                timeout=120, check=False)
        self.assertEqual(result.returncode, code, result.stderr)
        return result

    def called(self):
        return [line.split() for line in self.calls.read_text(encoding="utf-8").splitlines()]

    def report(self):
        return json.loads((self.out / "speed_ratio.json").read_text(encoding="utf-8"))

    def test_both_are_tuned_and_then_take_turns(self):
        programs = ("--old", self.pretended("old", [100, 200, 400]), "--parka", self.pretended("new", [110, 240, 480]))
        options = (*programs, "--old-config", "b.json", "--set", "x=1", "--new-set", "y=2", "--turns", "3")
        result = self.call(*options)
        called = self.called()
        self.assertEqual([words[:3] for words in called],
                         [["old", "tune", "b.json"], ["new", "tune", "a.json"], *[["old", "bench", "b.json"], ["new", "bench", "a.json"]] * 3])
        for name, *words in called:
            self.assertIn("x=1", words)
            self.assertEqual("y=2" in words, name == "new")
            if words[0] == "bench":
                self.assertIn(f"device.gemm_tuning={self.out}/{name}.tuning.json", words)
        self.assertEqual(self.report()["ratios"], [1.1, 1.2, 1.2])
        self.assertEqual(self.report()["figures"], {"ratio": 1.2, "old.tokens_per_second": 200, "new.tokens_per_second": 240})
        self.assertEqual(self.report()["device"], "A card")
        self.assertIn("--new-set y=2", self.report()["command"])
        self.assertIn("| 2 | 200 | 240 | 1.2000 |", result.stdout)

        # Nothing is measured twice, and more turns may follow.
        self.assertEqual(self.call(*options).stdout, result.stdout)
        self.assertEqual(self.called(), called)
        failed = self.call(*options[:-1], "4", code=1)
        self.assertIn("not enough memory", failed.stderr)
        self.assertEqual(failed.stderr.count("error:"), 1)
        self.assertEqual(len(self.called()), len(called) + 1)
        # Another comparison is not mixed with it.
        self.assertEqual(self.call(*programs, code=2).stderr.count("\n"), 1)

    def test_more_settings_in_the_same_turns(self):
        programs = ("--old", self.pretended("old", [100, 200]), "--parka", self.pretended("new", [110, 130, 230, 250]))
        result = self.call(*programs, "--new-set", "y=2", "--also", "more=y=3,z=4", "--turns", "2")
        called = self.called()
        self.assertEqual([words[:2] for words in called[2:]], [["old", "bench"], ["new", "bench"], ["new", "bench"]] * 2)
        for words in called[4::3]:  # the last of several counts
            self.assertLess(words.index("y=2"), words.index("y=3"))
            self.assertIn("z=4", words)
            self.assertIn(f"device.gemm_tuning={self.out}/new.tuning.json", words)
        self.assertEqual(self.report()["ratios"], [1.1, 1.15])
        self.assertEqual(self.report()["also"]["more"]["ratios"], [1.3, 1.25])
        self.assertEqual(self.report()["figures"]["more.ratio"], 1.275)
        self.assertIn("| 2 | 200 | 230 | 250 | 1.1500 | 1.2500 |", result.stdout)

    def test_settings_without_a_name_of_their_own(self):
        for also in ("x", "x=", "new=y=2", "../x=y=2"):
            with self.subTest(also):
                self.assertIn("argument --also", self.call("--also", also, code=2).stderr)

    def test_cards_are_not_mixed(self):
        programs = ("--old", self.pretended("old", [1]), "--parka", self.pretended("new", [1], "Another"), "--tune", "0", "--turns", "1")
        self.assertIn("A card and of Another", self.call(*programs, code=1).stderr)

    def test_a_program_that_is_not_there(self):
        self.assertIn("none: ", self.call("--parka", self.folder / "none", code=2).stderr)

    def test_two_settings_of_parka(self):
        config = ROOT / "configs/tiny-olmo.json"
        result = subprocess.run([sys.executable, SCRIPT, config, self.out, "--parka", os.path.abspath(PROGRAM), "--set", "device.kind=cpu",
                                 "--new-set", "precision.recipe=fp32", "--tune", "0", "--steps", "1", "--turns", "1"],
                                capture_output=True, text=True, timeout=120, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)
        for side, compute in (("old", "bf16"), ("new", "fp32")):
            bench = json.loads((self.out / f"{side}.1.json").read_text(encoding="utf-8"))
            self.assertEqual(bench["config"]["precision"]["compute"], compute)
            self.assertEqual(self.report()[side]["step_seconds"], bench["step_seconds"])


if __name__ == "__main__":
    unittest.main()
