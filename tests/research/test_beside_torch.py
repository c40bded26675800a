"""The scripts that time PyTorch beside Parka say before they measure anything that their file cannot be written."""
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts/research"
# What the scripts import, and look at before they measure.
PRETENDED_TORCH = {
    "torch/__init__.py": "class cuda:\n    is_available = lambda: True\n    get_device_name = lambda: 'none'\n"
                         "class backends:\n    class cudnn:\n        version = lambda: 0\n__version__ = '0'\n",
    "torch/nn/__init__.py": "",
    "torch/nn/attention.py": "SDPBackend = sdpa_kernel = None\n",
}


class BesideTorch(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        for name, text in PRETENDED_TORCH.items():
            path = self.folder / "packages" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        self.bench = self.folder / "bench"  # fails where it is to measure lengths
        self.bench.write_text(f'#!/bin/sh\ntouch "{self.folder}/measured"\n[ "$1" = amax ]\n', encoding="utf-8")
        self.bench.chmod(0o755)

    def call(self, script, json_file):
        environment = {**os.environ, "PYTHONPATH": str(self.folder / "packages")}
        return subprocess.run([sys.executable, SCRIPTS / script, "--bench", self.bench, "--json", json_file], capture_output=True,
                              text=True, env=environment, check=False)

    def test_a_missing_folder_is_named_before_anything_is_measured(self):
        missing = self.folder / "not there"
        for script in ("amax_vs_torch.py", "attention_vs_cudnn.py"):
            with self.subTest(script):
                result = self.call(script, missing / "figures.json")
                self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
                self.assertRegex(result.stderr, f"^{script}: error: .*--json: .*{missing}.*\n$")
                self.assertFalse((self.folder / "measured").exists())

    def test_what_is_lacking_is_named(self):
        json_file = self.folder / "figures.json"
        for script in ("amax_vs_torch.py", "attention_vs_cudnn.py"):
            result = self.call(script, json_file)
            with self.subTest(script):
                if script == "attention_vs_cudnn.py":
                    self.assertRegex(result.stderr, f"^{script}: error: {self.bench} attention:1024 .*\n$")
                    self.assertEqual(result.returncode, 1)
                self.bench.rename(self.folder / "elsewhere")
                result = self.call(script, json_file)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"^{script}: error: {self.bench}: .*--bench\n$")
                (self.folder / "elsewhere").rename(self.bench)
        torch = self.folder / "packages/torch/__init__.py"
        torch.write_text(torch.read_text().replace("True", "False"), encoding="utf-8")
        result = self.call("attention_vs_cudnn.py", json_file)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, "^attention_vs_cudnn.py: error: .*GPU.*\n$")

    def test_where_the_folder_is_there_they_measure(self):
        for script in ("amax_vs_torch.py", "attention_vs_cudnn.py"):
            with self.subTest(script):
                self.call(script, self.folder / f"{script}.json")
                self.assertTrue((self.folder / "measured").exists())
                (self.folder / "measured").unlink()
        self.assertTrue((self.folder / "amax_vs_torch.py.json").exists())


if __name__ == "__main__":
    unittest.main()
