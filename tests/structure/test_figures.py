"""Every line of docs/results/figures.jsonl is a whole figure with a name of its own, and tables of pages are what is written of them."""
import json
import os
import re
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

    def test_speeds_of_cards_are_figures(self):
        text = (ROOT / "src/engine/planning/card_speed.cpp").read_text(encoding="utf-8")
        figures = {f["name"]: f["value"] for f in map(json.loads, (ROOT / "docs/results/figures.jsonl").read_text(encoding="utf-8").splitlines())}
        rows = re.findall(r'\{[\d.e]+, (\d+), "(h[12]00)", "([\w-]+)", Recipe::k(\w+)', text)
        self.assertGreater(len(rows), 10)
        names = {"OLMo-1B": "olmo-1b", "Llama-2-7B": "llama2-7b", "Llama-3-8B": "llama3-8b", "OLMoE-1B-7B": "olmoe", "150m": "150m", "moe": "moe"}
        for speed, card, model, recipe in rows:
            recipe = {"Bf16": "bf16", "Fp8Linear": "fp8_linear"}.get(recipe, recipe.lower())
            shape = ".4x4" if model.startswith("OLMoE") else ""
            name = f"step.{names[model]}.{recipe}{shape}.{'1gpu' if card == 'h200' else '1xh100'}.tok_s_gpu"
            with self.subTest(name):
                self.assertEqual(round(figures[name]), int(speed))

    @unittest.skipUnless("PARKA_PROGRAM" in os.environ, "ctest says which program makes plans; a commit does not wait for it")
    def test_tables_of_pages_are_written(self):
        program = os.path.abspath(os.environ["PARKA_PROGRAM"])
        result = subprocess.run([sys.executable, ROOT / "scripts/research/figures.py", "tables", "--check", "--parka", program],
                                capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)


if __name__ == "__main__":
    unittest.main()
