"""scripts/research/step_parts.py sorts the ops of a measured step into parts and gives each its floor."""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts/research/step_parts.py"


def printed(path):
    return subprocess.run([sys.executable, SCRIPT, path], capture_output=True, text=True, check=False)


class Speed(unittest.TestCase):
    def test_floors_are_arithmetic_or_bytes(self):
        ops = [("block forward", "gemm", "64 x 32 x 16 e4m3 NN bf16", 2, 4e-3, 1e6, 1979e9),
               ("block backward", "gemm", "32 x 16 x 64 e5m2 NN bf16 +=", 1, 2e-3, 1e6, 1979e9),
               ("block backward", "gemm", "64 x 16 x 32 e5m2 NN bf16", 1, 2e-3, 1e6, 1979e9),
               ("block forward", "attention_forward", "64 x 16", 1, 4e-3, 1e6, 989.5e9),
               ("block forward", "norm_forward", "64 x 16", 4, 1e-3, 1e9, 0)]
        names = ("section", "op", "shape", "runs", "seconds", "bytes", "flop")
        bench = {"config": {"training": {"micro_batch_size": 2}, "data": {"sequence_length": 32}}, "copy_bandwidth": 8e12,
                 "ops": [dict(zip(names, op)) for op in ops]}
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "bench.json"
            path.write_text(json.dumps(bench), encoding="utf-8")
            rows = {line.split(" | ")[0].strip("| "): line for line in printed(path).stdout.splitlines()}
            self.assertIn("| 4.0 | 30.8 % | 990 TFLOP/s | 2.0 | 50.0 % |", rows["blocks: products of forward"])
            self.assertIn("| 2.0 | 15.4 % | 990 TFLOP/s | 1.0 | 50.0 % |", rows["blocks: products for weight gradients"])
            self.assertIn("| 2.0 | 15.4 % | 990 TFLOP/s | 1.0 | 50.0 % |", rows["blocks: products for input gradients"])
            self.assertIn("| 4.0 | 30.8 % | 247 TFLOP/s | 1.0 | 25.0 % |", rows["blocks: attention forward"])
            self.assertIn("| 1.0 | 7.7 % | 4.00 TB/s | 0.5 | 50.0 % |", rows["blocks: norms"])
            self.assertIn("| 13.0 | 100.0 % |  | 5.5 | 42.3 % |", rows["all"])
            path.write_text("{}", encoding="utf-8")
            self.assertIn("no times of ops", printed(path).stderr)


if __name__ == "__main__":
    unittest.main()
