"""Every line of docs/results/figures.jsonl is a whole figure with a name of its own, and tables of pages are what is written of them."""
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


class Figures(unittest.TestCase):
    def test_figures_are_complete(self):
        figures = [json.loads(line) for line in (ROOT / "docs/results/figures.jsonl").read_text(encoding="utf-8").splitlines()]
        names = [figure["name"] for figure in figures]
        self.assertEqual(len(names), len(set(names)))
        for figure in figures:
            with self.subTest(figure["name"]):
                self.assertEqual(set(figure), {"name", "value", "unit", "spread", "command", "commit", "date", "card"})
                least, most = figure["spread"]
                self.assertLessEqual(least, figure["value"])
                self.assertLessEqual(figure["value"], most)

    @unittest.skipUnless("PARKA_PROGRAM" in os.environ, "ctest says which program makes plans; a commit does not wait for it")
    def test_tables_of_pages_are_written(self):
        program = os.path.abspath(os.environ["PARKA_PROGRAM"])
        result = subprocess.run([sys.executable, ROOT / "scripts/research/figures.py", "tables", "--check", "--parka", program],
                                capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
    unittest.main()
