"""scripts/speedrun.sh with own text: from files to a score, and once more without making anything again."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = os.path.abspath(os.environ["PARKA_PROGRAM"])
TINY = {"model": {"d_model": 64, "num_layers": 2, "num_heads": 2, "d_ffn": 128, "norm": "rmsnorm"}}


class Speedrun(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="parka-test-")))

    def speedrun(self, *arguments, code=0):
        result = subprocess.run([ROOT / "scripts/speedrun.sh", "--out", self.folder / "out", *map(str, arguments)], capture_output=True, text=True,
                                env=os.environ | {"PARKA": PROGRAM, "PARKA_PYTHON": sys.executable}, timeout=600)
        self.assertEqual(result.returncode, code, result.stderr)
        return result

    def test_own_text_becomes_a_score(self):
        texts = self.folder / "texts"
        texts.mkdir()
        for number in range(120):
            lines = (f"line {line} of text {number} says {(line * 37 + number * 11) % 101} and {line % 7}" for line in range(300))
            (texts / f"{number}.txt").write_text("\n".join(lines), encoding="utf-8")
        for name, content in (("tiny", TINY), ("cpu", {"device": {"kind": "cpu"}, "training": {"steps": 6, "eval_interval": 3}, "checkpoint": {"interval": 0}})):
            (self.folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
        arguments = ("--model", self.folder / "tiny.json", "--tokens", "2e5", "--gpu", "h100", "--text", texts, "--vocab", "300", "--config", self.folder / "cpu.json")
        first = self.speedrun(*arguments)
        self.assertRegex(first.stdout, r"(?s)loss +\d.*lines +acc +0\.\d")
        run = self.folder / "out/runs/tiny-adamw-parka"
        self.assertTrue((run / "curves.png").exists())
        made = {path: path.stat().st_mtime_ns for path in (self.folder / "out").glob("*") if path.is_file()}
        self.assertIn("nothing to do", self.speedrun(*arguments).stderr)
        self.assertEqual({path: path.stat().st_mtime_ns for path in made}, made)
        self.speedrun(*arguments, "--optimizer", "muon")
        self.assertTrue((self.folder / "out/runs/tiny-muon-parka/step_00000006").is_dir())

    def test_mistakes_are_named(self):
        for arguments, named in ((("--modle", "1b"), "--modle"), (("--model",), "--model"), (("--text", "/nowhere"), "/nowhere")):
            self.assertIn(named, self.speedrun(*arguments, code=2).stderr)


if __name__ == "__main__":
    unittest.main()
