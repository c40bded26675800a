"""The tables of docs/memory.md: the ladder is what `parka plan --fit` chooses, with speeds from figures.jsonl; the paper's figures and
those beside them are those of docs/results/end_to_end.md."""
import json
import re
import shlex
import unittest
from pathlib import Path

from parka_runs import parka

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
LADDER = ["configs/llama3-8b.json", "--set", "data.sequence_length=4096", "--fit", "--host-memory", "2000", "--json"]


def rows_after(heading, page=PAGE):
    """Cells of the first table below a heading, without its header."""
    table = re.search(r"(?:^\|.*\n)+", page[page.index(f"\n## {heading}\n"):], re.MULTILINE)[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


def code(cell):
    return re.findall(r"`([^`]+)`", cell)


def planned_cells(arguments):
    """In use, in host memory, and changes, as a row has them."""
    result = parka("plan", *LADDER, *shlex.split(arguments), cwd=ROOT)
    if result.returncode == 2:
        fewest = re.search(r"use at least (\d+) GPUs", result.stderr)
        return ["does not fit", "-", f"at least {fewest[1]} GPUs" if fewest else "-"]
    fit = json.loads(result.stdout)
    changes = " ".join(f"`{change['set']}`" for change in fit["changes"])
    return [f"{(fit['total_bytes'] + fit['context_bytes']) / 1e9:.1f}", f"{fit['host_bytes'] / 1e9:.1f}", changes or "none"]


class MemoryPage(unittest.TestCase):
    maxDiff = None

    def test_the_ladder_is_what_fits(self):
        rows = rows_after("The ladder of Llama-3-8B")
        limits = set()
        for number, run, *cells in rows:
            with self.subTest(run):
                (arguments,) = code(run)
                limits |= set(re.findall(r"--gpus 1 --memory-limit (\d+)", arguments))
                self.assertEqual(cells[:3], planned_cells(arguments))
        self.assertEqual([row[0] for row in rows], [str(i + 1) for i in range(len(rows))])
        self.assertGreaterEqual(limits, {"141", "80", "48", "24"})

    def test_speeds_of_the_ladder_are_measured(self):
        with open(ROOT / "docs/results/figures.jsonl", encoding="utf-8") as file:
            figures = {figure["name"]: figure for figure in map(json.loads, file)}
        for _, run, in_use, _, _, speed, names in rows_after("The ladder of Llama-3-8B"):
            with self.subTest(run):
                without = "-" if in_use == "does not fit" else "not measured"
                self.assertEqual(speed, f"{figures[code(names)[0]]['value']:,.0f}" if code(names) else without)

    def test_the_paper_and_what_is_beside_it_are_those_of_the_results(self):
        results = {}
        model_rows = rows_after("End to end", (ROOT / "docs/results/end_to_end.md").read_text(encoding="utf-8"))
        for model, gpus, paper, _, _, peak, _, speed, recipe, _, _, planned, _, _, our_speed in model_rows:
            results[model, gpus, paper] = [peak, speed]
            results[model, gpus, recipe] = [planned, our_speed]
        rows = rows_after("Beside the paper's table 7")
        for model, gpus, *cells in rows:
            with self.subTest(model=model, gpus=gpus):
                self.assertEqual(cells, [cell for run in ("BF16", "COAT", "bf16", "parka") for cell in results[model, gpus, run]])
        self.assertEqual({(row[0], row[1]) for row in rows}, {key[:2] for key in results})


if __name__ == "__main__":
    unittest.main()
