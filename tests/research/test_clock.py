#!/usr/bin/env python3
"""Tests of scripts/research/clock.sh with a made-up program. Exits with 77 (skipped) where numpy is missing."""
import json
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

# Instead of `parka train`: losses fall with the logarithm of the steps, as if Muon had 1.25 times and a mixture twice the steps. A
# step of a mixture takes 1.5 times as long, and its first ones much longer. Each optimizer has its best rate.
MADE_UP_PROGRAM = f"""#!{sys.executable}
import json, math, pathlib, sys
sets = dict(sys.argv[i + 1].split("=", 1) for i, word in enumerate(sys.argv) if word == "--set")
steps, is_muon, is_mixture = int(sets["training.steps"]), sets["optimizer.kind"] == "muon", "model.moe.num_experts" in sets
assert int(sets["optimizer.schedule.total_steps"]) == steps == int(sets["training.eval_interval"])
assert sets["precision.recipe"] == "parka"
best = 8e-3 if is_muon else 2e-3
loss = 4 - 0.5 * math.log(steps * (1.25 if is_muon else 1) * (2 if is_mixture else 1)) + abs(math.log(float(sets["optimizer.lr"]) / best))
loss += 0.1 * int(sets["training.seed"])
folder = pathlib.Path(sets["checkpoint.folder"])
folder.mkdir(parents=True)
(folder / "config.json").touch()
records = [dict(kind="train", step=i + 1, seconds=(0.015 if is_mixture else 0.01) * (5 if 3 * i < steps else 1)) for i in range(steps)]
(folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\\n" for r in records + [dict(kind="eval", step=steps, loss=loss)]))
"""


class Clock(unittest.TestCase):
    def test_speeds_are_those_of_the_runs(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            text, program, out = Path(folder) / "text", Path(folder) / "parka", Path(folder) / "out"
            text.mkdir()
            for i in range(200):
                (text / f"{i}.txt").write_text(f"text number {i}, words and more words\n" * 20)
            program.write_text(MADE_UP_PROGRAM)
            program.chmod(0o755)
            result = subprocess.run([SCRIPTS / "clock.sh", out, text], capture_output=True, text=True, env={
                **os.environ, "PARKA": str(program), "PYTHON": sys.executable, "TOKENS": "20000", "LENGTH": "16",
                "LIMIT": "30", "VOCABULARY": "300", "HELD_OUT": "0.1"})
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            figures = {figure["name"]: figure["value"] for figure in map(json.loads, (out / "clock.jsonl").read_text().splitlines())}
        self.assertAlmostEqual(figures["clock.110m.mixture_adamw.tax"], 1.5, 6)
        self.assertAlmostEqual(figures["clock.110m.mixture_adamw.gain"], 2, 2)
        self.assertAlmostEqual(figures["clock.110m.dense_muon.net_speedup"], 1.25, 2)
        self.assertAlmostEqual(figures["clock.110m.net_speedup"], 2 * 1.25 / 1.5, 2)


if __name__ == "__main__":
    unittest.main()
