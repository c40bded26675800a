"""Tests of scripts/research/figures.py: what stands for braces of tables.md, and what a bench becomes."""
import contextlib
import io
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts/research"))
import figures  # noqa: E402

KNOWN = {"step.a.tok_s": {"value": 23808.8, "spread": [23772.9, 23838.6], "unit": "tok/s"}, "step.a.share": {"value": 0.9529, "spread": [0.952, 0.953], "unit": "1"},
         "step.b.tok_s": {"value": 11904.4, "spread": [1, 2e6], "unit": "tok/s"}, "step.c.error": {"value": -0.002, "spread": [-0.002, -0.002], "unit": "%"}}


class MadeUpPlans(figures.Plans):
    def plan(self, config, *words):
        self.asked = (config, words)
        return {"total_bytes": 12e9, "context_bytes": 0.34e9}


class Cells(unittest.TestCase):
    def test_values_spreads_ratios_and_differences(self):
        for text, expected in (("{step.a.tok_s}", "23,809"), ("{step.a.tok_s~}", "23,809 (23,773 to 23,839)"), ("{step.a.share:.1%}", "95.3 %"), ("{step.c.error:+.2f}", "+0.00"),
                               ("{step.a.tok_s / step.b.tok_s}", "2.00"), ("{step.a.tok_s - step.b.tok_s:.0f}", "11904"), ("{a}", None)):
            with self.subTest(text):
                match = figures.CELL.fullmatch(text)
                if expected is None:
                    with contextlib.redirect_stderr(io.StringIO()) as errors, self.assertRaises(SystemExit):
                        figures.cell(match, KNOWN)
                    self.assertIn(text, errors.getvalue())
                else:
                    self.assertEqual(figures.cell(match, KNOWN), expected)

    def test_plans_of_rows(self):
        plans = MadeUpPlans("parka")
        rows = list(figures.planned("plan: llama2-7b a.b=1\n| settings | GB |\n|---|---|\n| 4 x 384 tokens, `c.d=2` | {plan} |\n", plans))
        self.assertEqual(rows, ["| settings | GB |", "|---|---|", "| 4 x 384 tokens, `c.d=2` | 12.34 |"])
        self.assertEqual(plans.asked, ("llama2-7b", ("--set", "a.b=1", "--set", "training.micro_batch_size=4", "--set", "data.sequence_length=384",
                                                     "--set", "c.d=2")))

    def test_a_page_that_differs_is_named_and_written(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            root = Path(folder)
            (root / "docs").mkdir()
            (root / "README.md").write_text("nothing\n")
            (root / "tables.md").write_text("## speed\n\n| {step.a.tok_s} |\n")
            page = root / "docs/a.md"
            page.write_text("before\n\n<!-- table: speed -->\n<!-- end -->\n\nbehind\n")
            with mock.patch.multiple(figures, ROOT=root, TEMPLATES=root / "tables.md", read_figures=lambda: KNOWN):
                for arguments, code, said in ((["--check"], 1, "docs/a.md"), ([], 0, "docs/a.md"), (["--check"], 0, "")):
                    with mock.patch.object(sys, "argv", ["figures.py", "tables", *arguments]), contextlib.redirect_stdout(io.StringIO()) as output, \
                         self.assertRaises(SystemExit) as ended:
                        figures.main()
                    self.assertEqual(ended.exception.code, code)
                    self.assertIn(said, output.getvalue())
            self.assertEqual(page.read_text(), "before\n\n<!-- table: speed -->\n\n| 23,809 |\n\n<!-- end -->\n\nbehind\n")

    def test_a_bench_becomes_figures(self):
        bench = {"tokens_per_step": 1000, "step_seconds": [1.0, 2.0], "tokens_per_second": 700, "used_bytes": 2e9, "planned_bytes": 1.5e9,
                 "context_bytes": 0.5e9, "ops": [{"seconds": 0.5}], "timed_step_seconds": 1.0}
        found = {name: (value, unit, spread) for name, value, unit, spread in figures.step_figures(bench, "m", "parka", 2)}
        self.assertEqual(found["step.m.parka.2gpu.tok_s_gpu"], (700, "tok/s", (500, 1000)))
        self.assertEqual(found["plan.m.parka.error_percent"][0], 0)


if __name__ == "__main__":
    unittest.main()
