"""Every line of docs/results/figures.jsonl is a whole figure with a name of its own."""
import json
import unittest
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[2] / "docs/results/figures.jsonl"


class Figures(unittest.TestCase):
    def test_figures_are_complete(self):
        figures = [json.loads(line) for line in FIGURES.read_text(encoding="utf-8").splitlines()]
        names = [figure["name"] for figure in figures]
        self.assertEqual(len(names), len(set(names)))
        for figure in figures:
            with self.subTest(figure["name"]):
                self.assertEqual(set(figure), {"name", "value", "unit", "spread", "command", "commit", "date", "card"})
                least, most = figure["spread"]
                self.assertLessEqual(least, figure["value"])
                self.assertLessEqual(figure["value"], most)


if __name__ == "__main__":
    unittest.main()
