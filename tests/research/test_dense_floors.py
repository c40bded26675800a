"""scripts/research/dense_floors.py prints speed, floor and energy of models that a program times while nvidia-smi tells the power."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/research/dense_floors.py"

# A step of a tenth of a second: a product at half of the datasheet's rate, and bytes at a quarter of the copy's.
BENCH = {"step_seconds": [0.1, 0.1, 0.4], "tokens_per_step": 1000, "copy_bandwidth": 4e12,
         "config": {"training": {"micro_batch_size": 2}, "data": {"sequence_length": 32}},
         "ops": [{"section": "block forward", "op": "gemm", "shape": "64 x 32 x 16 e4m3 NN bf16", "runs": 1, "seconds": 0.06, "bytes": 1e6,
                  "flop": 0.03 * 1979e12, "floor_seconds": 0.045},
                 {"section": "block forward", "op": "norm_forward", "shape": "64 x 16", "runs": 1, "seconds": 0.04, "bytes": 0.01 * 4e12, "flop": 0,
                  "floor_seconds": 0.03}]}


class DenseFloors(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def script(self, name, text):
        path = self.folder / name
        path.write_text(f"#!{sys.executable}\n{text}", encoding="utf-8")
        path.chmod(0o755)
        return path

    def run_script(self, watts, *options):
        self.script("nvidia-smi", f"import time\nfor watt in {watts}:\n    print(watt, flush=True)\ntime.sleep(60)\n")
        parka = self.script("parka", f"import sys, time\ntime.sleep(1)\nopen(sys.argv[sys.argv.index('--json') + 1], 'w').write('''{json.dumps(BENCH)}''')\n")
        path = f"{self.folder}:{os.environ['PATH']}"
        return subprocess.run([sys.executable, SCRIPT, parka, self.folder / "out", *options], capture_output=True, text=True, check=False,
                              env={**os.environ, "PATH": path})

    def test_a_row_for_each_model(self):
        result = self.run_script([70.0, 600.5, 700.0, 690.0, 120.0], "--models", "olmo-1b", "llama3-8b.32k")
        self.assertEqual(result.returncode, 0, result.stderr)
        rows = [line.strip("| ").split(" | ") for line in result.stdout.splitlines()[2:]]
        self.assertEqual([row[0] for row in rows], ["olmo-1b", "llama3-8b.32k"])
        for row in rows:
            self.assertEqual(row[1:], ["10,000", "40.0 %", "75.0 %", "690", "0.0690"])

    def test_no_power_is_an_error(self):
        result = self.run_script(["'[N/A]'"], "--models", "olmo-1b")
        self.assertEqual(result.returncode, 1)
        self.assertIn("olmo-1b.power", result.stderr)


if __name__ == "__main__":
    unittest.main()
