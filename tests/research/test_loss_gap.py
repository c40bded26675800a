#!/usr/bin/env python3
"""Tests of scripts/research/loss_gap.sh and master_gap.sh with a made-up program. Exits with 77 (skipped) where numpy or matplotlib is
missing."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import matplotlib  # noqa: F401
    import numpy  # noqa: F401
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/research"

# Instead of `parka train`: each recipe's loss lies at its place in a list.
MADE_UP_PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys
sets = dict(sys.argv[i + 1].split("=", 1) for i, word in enumerate(sys.argv) if word == "--set")
loss = 2 + 0.125 * ["bf16", "coat", "parka"].index(sets["precision.recipe"])
if sets.get("optimizer.master") == "fp24_split":
    assert sets["training.seed"] == sets["data.seed"]
    loss += 0.25 * int(sets["training.seed"])
folder = pathlib.Path(sets["checkpoint.folder"])
folder.mkdir(parents=True)
(folder / "config.json").touch()
(folder / "sets.json").write_text(json.dumps(sets))
(folder / "metrics.jsonl").write_text("".join(json.dumps(dict(
    kind="train", step=step, tokens=64 * step, loss=loss, grad_norm=1, lr=1, tokens_per_second=1)) + "\\n"
    for step in range(1, int(sets["training.steps"]) + 1)))
"""


class LossGap(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def run_gap_script(self, script, *arguments, **environment):
        """The gaps that a script reports of made-up runs."""
        text, program, out = self.folder / "text", self.folder / "parka", self.folder / "out"
        text.mkdir()
        for i in range(10):
            (text / f"{i}.txt").write_text(f"text {i}\n" * 100)
        program.write_text(MADE_UP_PROGRAM)
        program.chmod(0o755)
        result = subprocess.run([SCRIPTS / script, out, text, *arguments], capture_output=True, text=True, env={
            **os.environ, "PARKA": str(program), "PYTHON": sys.executable, "TOKENS": str(40 * 64 * 2048),
            "MPLCONFIGDIR": str(self.folder), **environment})
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        gaps = [json.loads(line) for line in (out / "loss_gap.jsonl").read_text().splitlines()]
        return [(gap["run"], gap["against"], gap["nats"], gap["steps"]) for gap in gaps]

    def test_the_script_that_measures_recipes_reports_their_gaps(self):
        self.assertEqual(self.run_gap_script("loss_gap.sh", "coat", "mine=parka,precision.group_size=32"),
                         [("coat", "bf16", 0.125, [39, 40]), ("mine", "bf16", 0.25, [39, 40])])
        for picture in ("loss_gap.png", "differences.png"):
            self.assertTrue((self.folder / "out" / picture).exists())

    def test_documents_are_held_out_of_bytes_and_evaluated_at_the_end(self):
        self.run_gap_script("loss_gap.sh", "coat", HELD_OUT="0.3")
        out = self.folder.resolve() / "out"
        sets = json.loads((out / "work/coat/sets.json").read_text())
        self.assertEqual(json.loads(sets["data.eval"]), [str(out / "work/tokens/eval-*.npy")])
        self.assertEqual(sets["training.eval_interval"], sets["training.steps"])
        self.assertTrue((out / "work/tokens/eval-00000.npy").exists())

    def test_the_script_that_measures_masters_reports_the_gap_of_each_seed(self):
        self.assertEqual(self.run_gap_script("master_gap.sh"), [("fp24_split.1", "fp32.1", 0.25, [39, 40]),
                                                                ("fp24_split.2", "fp32.2", 0.5, [39, 40])])
        tokens = [(self.folder / "out" / seed / "work" / "tokens").resolve() for seed in ("seed1", "seed2")]
        self.assertEqual(tokens[0], tokens[1])


if __name__ == "__main__":
    unittest.main()
