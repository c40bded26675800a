#!/usr/bin/env python3
"""Tests of scripts/research/held_out.py. Exits with 77 (skipped) where numpy or matplotlib is missing."""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import matplotlib  # noqa: F401
    import numpy  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/research"


class HeldOut(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def make_run(self, name, losses, records=()):
        """A run folder evaluated each 10 steps."""
        lines = [{"kind": "train", "step": 1, "loss": 9.0}, *({"kind": "eval", "step": 10 * i, "loss": loss} for i, loss in enumerate(losses)),
                 {"kind": "eval_set", "step": 0, "set": "other", "loss": 1.0}, *records]
        (self.folder / name).mkdir()
        (self.folder / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return self.folder / name

    def script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / "held_out.py", *map(str, arguments)], capture_output=True, text=True, timeout=120)

    def test_table_figures_and_picture(self):
        runs = [self.make_run("bf16.1", (3.0, 2.0, 2.1)), self.make_run("bf16.2", (3.2, 2.4, 2.2)),
                # What a resumed run writes again counts, and the last value once.
                self.make_run("fp8.1", (3.1, 2.2, 5.0), [{"kind": "eval", "step": 20, "loss": 2.2}]), self.make_run("fp8.2", (3.3, 2.5, 2.5))]
        picture = self.folder / "out.png"
        result = self.script(*runs, "--out", picture)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertTrue(picture.read_bytes().startswith(b"\x89PNG"))
        _, base, fp8 = (line.split() for line in result.stdout.splitlines())
        self.assertEqual(base, ["bf16", "2", "3.1000", "2.1000", "2.1500", "2.1000", "to", "2.2000"])
        # Gaps of 0.1 and 0.3: 0.2 +- 12.706 x 0.1414 / sqrt(2).
        self.assertEqual(fp8, ["fp8", "2", "3.2000", "2.3500", "2.3500", "2.2000", "to", "2.5000",
                               "+0.2000", "+0.1000", "to", "+0.3000", "-1.0706", "to", "+1.4706"])
        result = self.script(*runs, "--json", "--model", "m")
        figures = {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}
        self.assertEqual(set(figures), {"held_out.m.bf16.nats_per_token", "held_out.m.fp8.nats_per_token", "held_out.m.fp8.vs_bf16"})
        gap = figures["held_out.m.fp8.vs_bf16"]
        self.assertAlmostEqual(gap["value"], 0.2)
        self.assertEqual({seed: round(value, 9) for seed, value in gap["seeds"].items()}, {"1": 0.1, "2": 0.3})
        self.assertAlmostEqual(gap["interval"][1], 1.4706)

    def test_one_seed_has_no_interval(self):
        runs = [self.make_run("bf16.1", (3.0, 2.0)), self.make_run("fp8.1", (3.1, 2.2))]
        self.assertIn("one seed", self.script(*runs).stdout)
        lines = self.script(*runs, "--json", "--model", "m").stdout.splitlines()
        self.assertIsNone(json.loads(lines[-1])["interval"])

    def test_bad_input(self):
        base, run = self.make_run("bf16.1", (3.0, 2.0)), self.make_run("fp8.1", (3.0, 2.0))
        for message, *arguments in (
                ("RECIPE.SEED=FOLDER", base, f"fp8={run}"), ("fp8.2: ", base, f"fp8.2={run}"), ("short.1", base, self.make_run("short.1", (3.0,))),
                ("long.1: .*bf16.1", base, self.make_run("long.1", (3.0, 2.0, 1.0))),
                ("--json", base, run, "--json"), ("out.xyz", base, run, "--out", self.folder / "out.xyz")):
            with self.subTest(message):
                result = self.script(*arguments)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"held_out.py: error: .*{message}.*\n$")


if __name__ == "__main__":
    unittest.main()
