"""Tests of compare_starters.py: it passes where starters give the same bits, and says which test fails and which run differs."""
import os
import subprocess
import sys
import tempfile
import unittest

import compare_starters
from compare_starters import starters

PROGRAM = os.environ.get("PARKA_PROGRAM", "build/release/parka")


def compare(build, *options):
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare_starters.py")
    environment = {key: value for key, value in os.environ.items() if key != "RANKS_STARTER"}
    result = subprocess.run([sys.executable, script, build, *options], capture_output=True, text=True, env=environment)
    return result.returncode, result.stdout + result.stderr


class CompareStarters(unittest.TestCase):
    def test_starters_give_the_same_bits(self):
        code, output = compare(os.path.dirname(PROGRAM), "--starters", "ranks,variables", "--only", "released_gradients_change_no_bit")
        self.assertEqual(code, 0, output)
        for starter in ("ranks", "variables"):
            self.assertRegex(output, rf"(?m)^{starter}: 1 of 1 tests passed, 0 skipped, 8 runs of several ranks, \d+ s$")
        self.assertIn("\nequal bits: 8 runs under each of ranks, variables\n", output)

    def test_a_test_that_fails_is_named(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as build:
            with open(os.path.join(build, "parka"), "w", encoding="utf-8") as program:
                program.write("#!/bin/sh\necho no; exit 3\n")
            os.chmod(os.path.join(build, "parka"), 0o755)
            code, output = compare(build, "--starters", "ranks", "--only", "equal_runs")
        self.assertEqual(code, 1, output)
        self.assertIn("\nranks: test_equal_runs_give_equal_bits_also_when_resumed: FAILED with 1\n", output)
        self.assertIn("\nranks: 0 of 1 tests passed, 0 skipped, 0 runs", output)

    def test_runs_that_differ_or_are_missing_are_named(self):
        run = {"run": "a", "curve": [[1, 2.5]], "checkpoints": {"x": "12"}}
        bits = {"mpirun": {("one", 0): run, ("one", 1): dict(run, run="b"), ("two", 0): dict(run, run="c")},
                "ranks": {("one", 0): run, ("one", 1): dict(run, run="b", curve=[[1, 2.500001]])},
                "variables": {("one", 0): dict(run, checkpoints={"x": "13"}), ("one", 1): dict(run, run="b"), ("two", 0): dict(run, run="c")}}
        self.assertEqual(compare_starters.differences(bits), [
            "one: the run b differs: mpirun, ranks", "two: the run c is missing under one: mpirun, ranks",
            "one: the run a differs: mpirun, variables"])
        self.assertEqual(compare_starters.differences({"mpirun": bits["mpirun"]}), [])

    def test_what_cannot_be_run_is_refused(self):
        for options, message in ((("--starters", "torch"), "torch is not to be had here"), (("--only", "nothing"), "no test has this"),
                                 (("--device", "cuda"), "GPUs are visible, two are needed")):
            with self.subTest(options):
                if options[1] == "cuda" and compare_starters.num_gpus() > 1:
                    self.skipTest("GPUs are here")
                code, output = compare(".", *options)
                self.assertEqual(code, 2, output)
                self.assertIn(message, output)
        self.assertEqual(starters.STARTERS, ("ranks", "mpirun", "variables"))


if __name__ == "__main__":
    unittest.main()
