#!/usr/bin/env python3
"""Tests of scripts/research/tokens_saved.sh with a made-up program. Exits with 77 (skipped) where numpy is missing."""
import json
import math
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import numpy  # noqa: F401
    import tokenizers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/research"
STEPS = 40

# Instead of `parka train`: losses fall with the logarithm of the steps. Muon's are lower as if it had 1.25 times the steps, and lowest
# at 8e-3; AdamW's at 2e-3.
MADE_UP_PROGRAM = f"""#!{sys.executable}
import json, math, pathlib, sys
sets = dict(sys.argv[i + 1].split("=", 1) for i, word in enumerate(sys.argv) if word == "--set")
steps, kind, lr = int(sets["training.steps"]), sets["optimizer.kind"], float(sets["optimizer.lr"])
assert int(sets["optimizer.schedule.total_steps"]) == steps == int(sets["training.eval_interval"])
loss = 4 - 0.5 * math.log(steps * (1.25 if kind == "muon" else 1)) + abs(math.log(lr / (8e-3 if kind == "muon" else 2e-3)))
loss += 0.1 * int(sets["training.seed"]) + (0.0625 if sets.get("optimizer.states") == "fp8" else 0)
folder = pathlib.Path(sets["checkpoint.folder"])
folder.mkdir(parents=True)
(folder / "config.json").touch()
(folder / "metrics.jsonl").write_text(json.dumps(dict(kind="eval", step=steps, loss=loss)) + "\\n")
"""


class TokensSaved(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def run_script(self, **environment):
        text, program, out = self.folder / "text", self.folder / "parka", self.folder / "out"
        text.mkdir()
        for i in range(200):
            (text / f"{i}.txt").write_text(f"text number {i}, words and more words\n" * 20)
        program.write_text(MADE_UP_PROGRAM)
        program.chmod(0o755)
        result = subprocess.run([SCRIPTS / "tokens_saved.sh", out, text], capture_output=True, text=True, env={
            **os.environ, "PARKA": str(program), "PYTHON": sys.executable, "TOKENS": str(STEPS * 64 * 16), "LENGTH": "16",
            "VOCABULARY": "300", "HELD_OUT": "0.1", **environment})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return {figure["name"]: figure for figure in map(json.loads, (out / "tokens_saved.jsonl").read_text().splitlines())}

    def test_the_ratio_of_tokens_is_that_of_the_runs(self):
        figures = self.run_script()
        self.assertAlmostEqual(figures["muon.olmo-150m.tokens_saved"]["value"], 1.25, 3)
        self.assertAlmostEqual(figures["muon.olmo-150m.fp8_gap"]["value"], 0.0625, 6)
        self.assertAlmostEqual(figures["muon.olmo-150m.adamw.held_out"]["value"], 4.15 - 0.5 * math.log(STEPS), 5)

    def test_a_loss_beyond_the_shares_is_extended_to(self):
        figures = self.run_script(SHARES="0.9", NAME="tiny")
        self.assertAlmostEqual(figures["muon.tiny.tokens_saved"]["value"], 1.25, 3)


if __name__ == "__main__":
    unittest.main()
