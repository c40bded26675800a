#!/usr/bin/env python3
"""scripts/research/finetune_methods.sh with a few steps: every method starts from the base of its seed, and the table says what
the runs do. Exits with 77 (skipped) where numpy is missing."""
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "commands"))
from parka_runs import PROGRAM, metrics  # noqa: E402

if importlib.util.find_spec("numpy") is None:
    print("skipped: numpy is missing")
    sys.exit(77)

SCRIPT = ROOT / "scripts" / "research" / "finetune_methods.sh"
METHODS = ("full", "lora", "qlora_nf4", "qlora_fp8", "qst_adapter", "qst_linear", "qst_lora", "qst_avg_pool", "qst_max_pool", "qst_paper")
SMALL = {"BASE_STEPS": "30", "STEPS": "4", "SEEDS": "1 2", "THREADS": "1",
         "KEYS": "model.d_model=32 model.num_layers=2 model.num_heads=2 model.d_ffn=64 data.sequence_length=32 training.eval_sequences=16"}


class FinetuneMethods(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        for name, line in (("a.h", "int value_{} = {};\n"), ("b.py", "value_{} = print({})\n")):
            os.mkdir(f"{self.folder}/{name[-1]}")
            with open(f"{self.folder}/{name[-1]}/{name}", "w", encoding="utf-8") as file:
                file.writelines(line.format(i, i * i) for i in range(8000))

    def script(self, *methods, **environment):
        result = subprocess.run(
            [SCRIPT, f"{self.folder}/out", *methods], capture_output=True, text=True, timeout=600,
            env={**os.environ, **SMALL, "PARKA": os.path.abspath(PROGRAM), "PYTHON": sys.executable,
                 "BASE_TEXT": f"{self.folder}/h", "TEXT": f"{self.folder}/y", **environment})
        return result

    def held_out(self, run):
        return [record["loss"] for record in metrics(f"{self.folder}/out/{run}", "eval")]

    def test_every_method_starts_from_the_base_of_its_seed(self):
        first = self.script()
        self.assertEqual(first.returncode, 0, first.stderr)
        with open(f"{self.folder}/out/finetune_methods.json", encoding="utf-8") as file:
            report = json.load(file)
        full = [self.held_out(f"full.{seed}") for seed in (1, 2)]
        self.assertEqual(report["seeds"]["finetuning.tiny.base.nats"], [losses[0] for losses in full])
        self.assertNotEqual(full[0][0], full[1][0])
        for method in METHODS:
            with self.subTest(method):
                losses = [self.held_out(f"{method}.{seed}") for seed in (1, 2)]
                for (before, after), (of_base, of_full) in zip(losses, full):
                    self.assertLess(after, before)
                    self.assertLess(abs(before - of_base), 0.05)  # what 4 and 8 bits change
                    # Adapters begin as zeros beside the base itself; full fine-tuning ends elsewhere.
                    if method == "lora":
                        self.assertEqual(before, of_base)
                    self.assertEqual(after == of_full, method == "full")
                mean = statistics.mean(after for _, after in losses)
                self.assertEqual(report["figures"][f"finetuning.tiny.{method}.nats"], mean)
                self.assertIn(f"| `{method}` | {mean:.4f} (", first.stdout)
        again = self.script()
        self.assertEqual(again.stdout, first.stdout)  # of the same runs
        self.assertEqual([len(metrics(f"{self.folder}/out/{run}.1")) for run in ("base", "lora")], [30, 4])

    def test_a_method_of_ones_own(self):
        result = self.script("rank1=finetune.method=lora,finetune.rank=1", SEEDS="3")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual([line.split(" ")[1] for line in result.stdout.splitlines()[2:]], ["`base`", "`rank1`"])
        result = self.script("wrong=finetune.method=none", SEEDS="3")
        self.assertEqual(result.returncode, 1)
        self.assertRegex(result.stderr, "wrong.3: ended with 2: .*finetune.method")


if __name__ == "__main__":
    unittest.main()
