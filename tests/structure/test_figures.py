"""Every measured number on a page of docs/results is in figures.jsonl under the name beside it, and every figure is on a page.

A table with measured numbers has a last column `figures`: names between backticks, where {a,b} stands for either and * for
anything. The first column is what was measured. Numbers with a unit in the text are figures named in the same paragraph, or
stand in a table of the page too.
"""
import fnmatch
import json
import math
import re
import unittest
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
NUMBER = r"[-+]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?"
# With a unit of what is measured. Settings and sizes of cards are written as code: `80` GB.
WITH_UNIT = re.compile(rf"(?<![\w.`/-])({NUMBER}) (GB|tokens/s|tok/s|TFLOP/s|GB/s|ms|us|s|%|nats)(?![\w-])")
NAME = re.compile(r"`([a-z][\w.*{},-]*)`")
# Tables that other tests check: tests/scripts/test_reproduce.py, test_peers.py; tests/structure/test_fidelity.py, test_speed.py.
CHECKED_ELSEWHERE = {"end_to_end.md": ("| model | GPUs | paper |", "| width | context | paper |"), "peers.md": ("| program |",),
                     "fidelity.md": ("| width, context | paper, ms |", "| model, GPUs | paper, GB |", "| model, GPUs | paper, tokens/s |",
                                     "| 13B on 8 GPUs |", "| in U |"),
                     "speed.md": ("| part | ms |",)}


def read_figures():
    with open(RESULTS / "figures.jsonl", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


FIRST_PARTS = {figure["name"].split(".")[0] for figure in read_figures()}


def expand(name):
    """The patterns that {a,b} stands for."""
    braces = re.search(r"\{([^{}]*)\}", name)
    if not braces:
        return [name]
    return [expanded for part in braces[1].split(",")
            for expanded in expand(name[:braces.start()] + part + name[braces.end():])]


def named(text, figures):
    """The figures that the names in a text mean; raises where a name means none."""
    result = []
    for name in NAME.findall(text):
        for pattern in expand(name):
            found = [figure for figure in figures if fnmatch.fnmatchcase(figure["name"], pattern)]
            if not found:
                raise KeyError(pattern)
            result += found
    return result


def is_value(text, value, percent):
    """Whether a printed number is this value, to its last digit."""
    number = text.replace(",", "")
    digits = len(number.split("e")[0].partition(".")[2])
    value = 100 * value if percent else value
    if "e" in number:
        return f"{value:.{digits}e}".replace("e-0", "e-") == number.replace("e-0", "e-")
    # Half a digit, and what the figure itself is rounded by.
    return abs(value - float(number)) <= 0.5 * 10 ** -digits * 1.02 + 1e-6 * abs(value)


def matching(number, unit, figures):
    """The figures one of whose values this number is; those without a unit are also printed in per cent."""
    return [figure for figure in figures
            if any(is_value(number, value, unit == "%" and figure["unit"] == "1") for value in (figure["value"], *figure["spread"]))]


def tables_of(page):
    """Lists of rows of cells, without the line below the header."""
    for block in re.findall(r"(?:^\|.*\n)+", page, re.MULTILINE):
        rows = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()]
        yield block, [row for i, row in enumerate(rows) if i != 1]


def problems_of_row(row, figures):
    try:
        of_row = named(row[-1], figures)
    except KeyError as error:
        return [f"no figure {error} ({row[0]})"], []
    cells = re.sub(r"`[^`]*`", "", " | ".join(row[1:-1]))
    numbers = re.findall(rf"(?<![\w.])({NUMBER})( %)?", cells)
    problems = [f"{row[0]}: {number} is none of its figures" for number, percent in numbers
                if not matching(number, percent.strip(), of_row)]
    shown = {id(figure) for number, percent in numbers for figure in of_row
             if is_value(number, figure["value"], percent and figure["unit"] == "1")}
    problems += [f"{row[0]}: {figure['name']} = {figure['value']} is not there" for figure in of_row if id(figure) not in shown]
    return problems, of_row


def problems_of_text(page, figures, of_tables):
    prose = re.sub(r"(?:^\|.*\n)+|^    .*\n|^```[\s\S]*?^```", "\n\n", page, flags=re.MULTILINE)
    used, problems = [], []
    for paragraph in re.split(r"\n\s*\n", prose):
        try:
            here = named(" ".join(f"`{name}`" for name in NAME.findall(paragraph) if is_figure_name(name)), figures)
        except KeyError as error:
            problems.append(f"no figure {error}")
            continue
        used += here
        problems += [f"\"{number} {unit}\" is no figure named beside it" for number, unit in WITH_UNIT.findall(paragraph)
                     if not matching(number, unit, here + of_tables)]
    return problems, used


def is_figure_name(name):
    """As against `optimizer.gradient`, a key, and `block.WIDTH`, a pattern for readers."""
    return "." in name and name == name.lower() and name.split(".")[0] in FIRST_PARTS


def problems_of_page(name, page, figures):
    problems, used = [], []
    for block, (header, *rows) in tables_of(page):
        if block.startswith(CHECKED_ELSEWHERE.get(name, ())):
            continue
        if header[-1] != "figures":
            if any(re.search(r"\d", cell) for row in rows for cell in row[1:]):
                problems.append(f"a table without the column `figures`: {' | '.join(header)}")
            continue
        for row in rows:
            of_row = problems_of_row(row, figures)
            problems += of_row[0]
            used += of_row[1]
    in_text, named_in_text = problems_of_text(page, figures, used)
    return problems + in_text, used + named_in_text


class Figures(unittest.TestCase):
    maxDiff = None

    def test_pages_and_figures_say_the_same(self):
        figures = read_figures()
        problems, used = {}, set()
        for path in sorted(RESULTS.glob("*.md")):
            page = path.read_text(encoding="utf-8")
            problems[path.name], of_page = problems_of_page(path.name, page, figures)
            used |= {figure["name"] for figure in of_page}
        self.assertEqual({page: found for page, found in problems.items() if found}, {})
        # The tables of end_to_end.md, whose names are their first columns.
        (_, models), (_, blocks) = tables_of((RESULTS / "end_to_end.md").read_text(encoding="utf-8"))
        printed = {f"end_to_end.{row[0].lower()}.{row[1]}.{row[8]}.tok_s_gpu": row[14] for row in models[1:] if row[14] != "-"}
        printed |= {f"end_to_end.{row[0].lower()}.{row[1]}.{row[8]}.peak_gb": row[12] for row in models[1:] if row[12] not in ("-", "")}
        printed |= {f"block.{row[0]}.{row[1]}.{row[7]}.{what}_ms": row[8 + i] for row in blocks[1:]
                    for i, what in enumerate(("forward", "backward", "both"))}
        values = {figure["name"]: figure["value"] for figure in figures}
        wrong = {name: number for name, number in printed.items() if not is_value(number, values.get(name, math.nan), False)}
        self.assertEqual(wrong, {})
        self.assertEqual(sorted(set(values) - used - set(printed)), [])

    def test_the_front_page_quotes_figures(self):
        page = (RESULTS.parents[1] / "README.md").read_text(encoding="utf-8")
        quotes = {"step.llama2-7b.parka.1gpu.tok_s_gpu": r"Llama-2-7B at ([\d,]+)\s+tokens/s", "step.llama2-7b.parka.1gpu.peak_gb": r"in ([\d.]+)\s+GB",
                  "step.olmo-1b.parka.1gpu.tok_s_gpu": r"OLMo-1B at ([\d,]+)\s+tokens/s",
                  "step.olmo-1b.parka.1gpu.peak_gb": r"tokens/s in ([\d.]+)\s+GB,\s+\[`configs/olmo-1b-bench",
                  "loss_gap.olmo-150m.coat": r"([\d.]+) \(`coat`\)", "loss_gap.olmo-150m.parka": r"([\d.]+) nats per byte \(`parka`\)",
                  "step.llama2-7b.parka.both.zero1.2gpu.tok_s_gpu": r"([\d,]+)\s+tokens/s per GPU with stage 1",
                  "step.llama2-7b.parka.both.2gpu.tok_s_gpu": r"and ([\d,]+)\s+with\s+stage 3",
                  "step.llama2-7b.parka.gathered2.2gpu.tok_s_gpu": r"makes ([\d,]+)\s+with\s+stage 3",
                  "loss_gap.olmo-150m.linux.rate_x4.parka.nats_per_token": r"`parka` ended ([\d.]+) above it, mean",
                  "loss_gap.olmo-350m.linux.coat.nats_per_token": r"with 342M, mean of two seeds, ([\d.]+)",
                  "loss_gap.olmo-350m.linux.quarter.coat.nats_per_token": r"`coat` ([\d.]+) after a quarter",
                  "loss_gap.olmo-350m.linux.parka.nats_per_token": r"with 342M, mean of two seeds, [\d.]+ and ([\d.]+)",
                  "loss_gap.olmo-350m.linux.bf16_again.nats_per_token": r"and with 342M ([\d.]+), one seed",
                  "loss_gap.olmo-350m.linux.coat.held_out.same": r"and ([\d.]+) and [\d.]+ on held-out text, though",
                  "loss_gap.olmo-350m.linux.parka.held_out.same": r"and [\d.]+ and ([\d.]+) on held-out text, though",
                  "loss_gap.olmo-350m.linux.bf16_again.held_out.same": r"one seed, ([\d.]+) on held-out text",
                  "step.llama2-7b.parka.gathered32.2gpu.tok_s_gpu": r"or ([\d,]+) with all blocks gathered ahead",
                  "quickstart.minutes": r"took ([\d.]+)\s+minutes"}
        values = {figure["name"]: figure["value"] for figure in read_figures()}
        for name, pattern in quotes.items():
            with self.subTest(name):
                found = re.search(pattern, page)
                self.assertIsNotNone(found, pattern)
                self.assertTrue(is_value(found[1], values[name], False), f"{found[1]}, not {values[name]}")

    def test_figures_are_complete(self):
        names = [figure["name"] for figure in read_figures()]
        self.assertEqual(len(names), len(set(names)))
        for figure in read_figures():
            with self.subTest(figure["name"]):
                self.assertEqual(set(figure), {"name", "value", "unit", "spread", "command", "commit", "date", "card"})
                least, most = figure["spread"]
                self.assertLessEqual(least, figure["value"])
                self.assertLessEqual(figure["value"], most)

    def test_wrong_numbers_and_names_are_found(self):
        figures = [{"name": "step.a.tok_s", "value": 23808.8, "spread": [23772.9, 23838.6], "unit": "tok/s"},
                   {"name": "step.a.share", "value": 0.9529, "spread": [0.952, 0.953], "unit": "1"}]
        header = "| what | speed | share | figures |\n|---|---|---|---|\n"
        right = header + "| 4 x 8 | 23,809 (23,773 to 23,839) | 95.3 % | `step.a.{tok_s,share}` |\n"
        self.assertEqual(problems_of_page("x.md", right, figures)[0], [])
        for wrong in (right.replace("23,809", "23,810"), right.replace("95.3", "95.4"), right.replace("{tok_s,share}", "tok_s"),
                      right.replace("step.a.{", "step.b.{"), right.replace("95.3 %", ""), right.replace("figures", "source"),
                      right + "\nIt takes 12.5 GB.\n"):
            self.assertNotEqual(problems_of_page("x.md", wrong, figures)[0], [], wrong)


if __name__ == "__main__":
    unittest.main()
