"""The tables of docs/results/fidelity.md that are end_to_end.md's in fewer rows say what is there."""
import re
import unittest
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
PARKA = ("bf16", "fp8_linear", "coat", "parka")
PAPER = PARKA[:3]


def tables(page):
    """The tables of a page, by the first cell of their headers and the second: rows of cells."""
    found = {}
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        header, _, *rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        found[header[0], header[1]] = rows
    return found


def number(cell):
    """What a cell holds, or None: "out of memory", "-", or memory that is too much."""
    return float(cell.replace(",", "")) if re.fullmatch(r"[\d,.]+", cell) else None


def ratio(first, second):
    first, second = number(first), number(second)
    return "-" if first is None or second is None else f"{first / second:.2f}"


def joined(cells):
    return " / ".join("-" if number(cell) is None and cell != "out of memory" else cell for cell in cells)


def code(text):
    return f"`{text}`"


def groups(rows, size, recipe):
    """Rows of one model or width and its column of GPUs or contexts: recipe -> row, in their order."""
    result = {}
    for row in rows:
        result.setdefault(f"{row[0]}, {row[1]}" if size is None else f"{row[0]}, {row[1]} {size}", {})[row[recipe]] = row
    return result


def block_rows(end_to_end):
    """Time of forward and backward and memory kept: the paper's (in code), ours, and what FP8 divides each by."""
    for name, of in groups(tables(end_to_end)["width", "context"], None, 7).items():
        paper_ms, ours_ms = [of[recipe][5] for recipe in PAPER], [of[recipe][10] for recipe in PARKA]
        paper_mib, ours_mib = [of[recipe][6] for recipe in PAPER], [of[recipe][11] for recipe in PARKA]
        yield [name, code(joined(paper_ms)), joined(ours_ms), code(ratio(paper_ms[0], paper_ms[2])),
               f"{ratio(ours_ms[0], ours_ms[2])} / {ratio(ours_ms[0], ours_ms[3])}", code(joined(paper_mib)), joined(ours_mib),
               code(ratio(paper_mib[0], paper_mib[2])), f"{ratio(ours_mib[0], ours_mib[2])} / {ratio(ours_mib[0], ours_mib[3])}"]


def model_rows(end_to_end, which):
    """Peak memory at the paper's batch (`which` = "memory"), or speed at the largest that fits ("speed"), and what FP8 gains."""
    theirs, ours, gain = (5, 11, ratio) if which == "memory" else (7, 14, lambda before, after: ratio(after, before))
    for name, of in groups(tables(end_to_end)["model", "GPUs"], "GPUs", 8).items():
        paper, parka = [of[recipe][theirs] for recipe in PAPER], [of[recipe][ours] for recipe in PARKA]
        cells = [name.replace("1 GPUs", "1 GPU"), code(joined(paper)), joined(parka), code(gain(paper[0], paper[2])),
                 f"{gain(parka[0], parka[2])} / {gain(parka[0], parka[3])}"]
        if which == "speed":
            cells[2:2] = [code(joined([of[recipe][6] for recipe in PAPER]))]
            cells[4:4] = [joined([of[recipe][13] for recipe in PARKA])]
        yield cells


class Fidelity(unittest.TestCase):
    maxDiff = None

    def test_tables_six_and_seven_are_those_of_end_to_end(self):
        page = tables((RESULTS / "fidelity.md").read_text(encoding="utf-8"))
        end_to_end = (RESULTS / "end_to_end.md").read_text(encoding="utf-8")
        self.assertEqual(page["width, context", "paper, ms"], list(block_rows(end_to_end)))
        self.assertEqual(page["model, GPUs", "paper, GB"], list(model_rows(end_to_end, "memory")))
        self.assertEqual(page["model, GPUs", "paper, tokens/s"], list(model_rows(end_to_end, "speed")))

    def test_a_ratio_needs_both_numbers(self):
        self.assertEqual(ratio("1,500", "1,000"), "1.50")
        self.assertEqual(ratio("out of memory", "79.3"), "-")
        self.assertEqual(ratio("89.8, too much", "66.3"), "-")
        self.assertEqual(joined(["-", "82.6, too much", "out of memory", "4"]), "- / - / out of memory / 4")


if __name__ == "__main__":
    unittest.main()
