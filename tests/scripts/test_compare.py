#!/usr/bin/env python3
"""Tests of scripts/compare.py. Exits with 77 (skipped) where numpy or matplotlib is missing."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import matplotlib  # noqa: F401
    import numpy as np
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import compare  # noqa: E402
from run_metrics import centred_mean, smooth_curve  # noqa: E402


def correlated(generator, shape, phi):
    """AR(1) noise of variance 1 along the last axis."""
    noise = generator.standard_normal(shape)
    for i in range(1, shape[-1]):
        noise[..., i] = phi * noise[..., i - 1] + np.sqrt(1 - phi**2) * noise[..., i]
    return noise


def train_record(step, loss, tokens_per_step=64, seconds=2.0, **more):
    return {"kind": "train", "step": step, "tokens": tokens_per_step * step, "loss": loss, "seconds": seconds, **more}


class Statistics(unittest.TestCase):
    def test_the_interval_of_correlated_differences_covers_the_offset_at_its_rate(self):
        generator = np.random.default_rng(5)
        trials, steps, offset = 600, 500, 0.003
        for phi in (0.0, 0.5, 0.8):
            with self.subTest(phi=phi):
                covered = 0
                for gaps in offset + 0.01 * correlated(generator, (trials, steps), phi):
                    _, half = compare.interval(gaps, compare.block_length(gaps, len(gaps)), generator)
                    covered += abs(gaps.mean() - offset) <= half
                self.assertLessEqual(abs(covered / trials - 0.95), 0.03)

    def test_the_interval_is_as_wide_as_the_mean_varies(self):
        generator = np.random.default_rng(6)
        series = correlated(generator, (300, 2000), 0.6)
        errors = [compare.interval(gaps, compare.block_length(gaps, len(gaps)), generator)[0] for gaps in series]
        self.assertLess(abs(np.mean(errors) / series.mean(axis=1).std() - 1), 0.1)

    def test_blocks_grow_with_the_correlation_of_neighbours(self):
        noise = np.random.default_rng(1).standard_normal(3000)
        slow = np.convolve(noise, np.ones(40) / 40, "valid")
        self.assertEqual((compare.block_length(noise, 900), compare.block_length(slow, 900)), (30, 108))

    def test_differences_that_do_not_vary_have_an_interval_of_no_width(self):
        for count in (2, 3, 50):
            gaps = np.full(count, 0.25)
            self.assertEqual(compare.interval(gaps, compare.block_length(gaps, len(gaps)), np.random.default_rng(0)), (0.0, 0.0))

    def test_a_centred_mean_leaves_a_straight_line_as_it_is(self):
        line = [9.0 - 0.5 * i for i in range(20)]
        for width in (1, 2, 5, 8, 100):
            for smooth, value in zip(centred_mean(line, width), line):
                self.assertAlmostEqual(smooth, value)
        self.assertEqual(centred_mean([0.0, 3.0, 0.0, 3.0, 0.0], 3), [0.0, 1.0, 2.0, 1.0, 0.0])

    def test_a_smooth_curve_ends_before_its_windows_are_narrow(self):
        values = list(range(100))
        x, means = smooth_curve(values, values, 20)
        self.assertEqual((x, [round(mean) for mean in means]), (values[:95], values[:95]))
        self.assertEqual(smooth_curve([7], [1.0], 20), ([7], [1.0]))


class Compare(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        generator = np.random.default_rng(1)
        self.base = 3 + 4 / np.sqrt(np.arange(1, 601)) + 0.05 * correlated(generator, (600,), 0.3)
        self.noise = 0.002 * correlated(generator, (600,), 0.5)

    def make_run(self, name, records):
        run = self.folder / name
        run.mkdir()
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        return run

    def run_of(self, name, losses, **options):
        return self.make_run(name, [train_record(step, loss, **options) for step, loss in enumerate(losses, 1)])

    def compare(self, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / "compare.py", *map(str, arguments)], capture_output=True, text=True,
                              env={**os.environ, "MPLCONFIGDIR": str(self.folder)})

    def compared(self, *arguments):
        result = self.compare("--json", *arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return [json.loads(line) for line in result.stdout.splitlines()]

    def test_an_offset_is_found(self):
        a, b = self.run_of("a", self.base), self.run_of("b", self.base + self.noise + 0.01)
        (found,) = self.compared(f"bf16={a}", b, "--last", "0.5")
        self.assertEqual((found["run"], found["against"], found["steps"]), ("b", "bf16", [301, 600]))
        self.assertAlmostEqual(found["nats"], 0.01 + self.noise[300:].mean())
        self.assertAlmostEqual(found["loss"], (self.base + self.noise + 0.01)[300:].mean())
        low, high = found["interval"]
        self.assertTrue(low < 0.01 < high)
        self.assertAlmostEqual((low + high) / 2, found["nats"])
        self.assertTrue(2 * 0.0001 < high - low < 0.002)

    def test_few_steps_have_no_interval(self):
        a, b = self.run_of("a", self.base[:40]), self.run_of("b", (self.base + self.noise + 0.01)[:40])
        (found,) = self.compared(a, b)
        self.assertIsNone(found["interval"])
        self.assertAlmostEqual(found["nats"], 0.01 + self.noise[38:40].mean())
        printed = self.compare(a, b, "--out", self.folder / "few.png", "--smooth", "2")
        self.assertEqual((printed.returncode, printed.stderr), (0, ""))
        self.assertIn("too few steps", printed.stdout)
        self.assertNotEqual(self.compared(a, b, "--last", "1")[0]["interval"], None)

    def test_runs_that_are_not_there_are_named(self):
        for arguments in (("nope1", "nope2"), (self.run_of("a", self.base), "nope2"), ("x=nope1", "y=nope2")):
            result = self.compare(*arguments)
            self.assertEqual(result.returncode, 2)
            self.assertRegex(result.stderr, r"^compare.py: error: nope[12]: [^\n]*\n$")

    def test_runs_of_other_lengths_and_gaps_are_compared_where_both_have_records(self):
        records = [train_record(step, 2.5 if step != 199 else None) for step in range(101, 201)]
        b = self.make_run("b", records)
        a, c = self.run_of("a", np.full(600, 2.0)), self.run_of("c", np.full(20, 2.0))
        result = self.compare(a, b, "--last", "1", "--json")
        found = json.loads(result.stdout)
        self.assertEqual((found["steps"], found["nats"]), ([101, 200], 0.5))
        self.assertIn("1 of 100", result.stderr)
        result = self.compare(c, b)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, "\ncompare.py: error: .*b and c .*steps.*\n$")

    def test_tokens_compare_runs_of_other_batches(self):
        def curve(tokens):
            return 5 - tokens / 10000

        a = self.run_of("a", curve(64 * np.arange(1, 101)))
        b = self.run_of("b", 0.25 + curve(128 * np.arange(1, 41)), tokens_per_step=128)
        (found,) = self.compared(a, b, "--axis", "tokens", "--last", "1")
        self.assertEqual(found["tokens"], [128, 40 * 128])
        self.assertAlmostEqual(found["nats"], 0.25)

    def test_nothing_is_interpolated_over_missing_records(self):
        a = self.run_of("a", self.base)
        b = self.make_run("b", [train_record(step, loss + 0.25) for step, loss in enumerate(self.base, 1) if not 200 < step < 600])
        for axis in ("steps", "tokens"):
            (found,) = self.compared(a, b, "--axis", axis, "--last", "1")
            self.assertAlmostEqual(found["nats"], 0.25)
            (found,) = self.compared(a, b, "--axis", axis, "--last", "0.01")
            self.assertAlmostEqual(found["nats"], 0.25)

    def test_records_that_were_joined_twice_are_refused(self):
        a = self.run_of("a", self.base[:50])
        b = self.make_run("b", [train_record(step, 2.0) for step in (1, 2, 3, 2, 3, 4)])
        result = self.compare(a, b)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, "^compare.py: error: .*metrics.jsonl: .*\n$")

    def test_records_of_other_types_are_named(self):
        a = self.run_of("a", [4.0, 3.0])
        for number, record in enumerate(({"loss": "x"}, {"loss": [1]}, {"tokens": {}}, {"tokens": None}, {"seconds": "x"}, {"seconds": 10**400}, {"step": True},
                                         {"step": -1}, {"kind": []})):
            with self.subTest(record=record):
                bad = self.make_run(f"b{number}", [train_record(1, 4.0), train_record(2, 3.0) | record, train_record(3, 3.0)])
                result = self.compare(a, bad)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, rf"\Acompare.py: error: [^\n]*b{number}/metrics.jsonl:2: not a record of a run[^\n]*\n\Z")
        large = self.make_run("large", [train_record(step, 10**400) for step in (1, 2)])
        self.assertNotIn("Traceback", self.compare(a, large).stderr)

    def test_hours_count_all_starts(self):
        def records(seconds, losses):
            yield {"kind": "start", "step": 0, "earlier_seconds": 0.0, "wall_seconds": 1.0}
            for step in range(1, 51):
                yield train_record(step, losses(seconds * step), wall_seconds=seconds * step)
            yield {"kind": "start", "step": 50, "earlier_seconds": 100.0 * seconds, "wall_seconds": 1.0}
            for step in range(51, 101):
                yield train_record(step, losses(seconds * (step + 50)), wall_seconds=seconds * (step - 50))

        a = self.make_run("a", records(36.0, lambda seconds: 5 - seconds / 3600))
        b = self.make_run("b", records(72.0, lambda seconds: 5.5 - seconds / 3600))
        (found,) = self.compared(a, b, "--axis", "hours", "--last", "1")
        self.assertAlmostEqual(found["nats"], 0.5)
        self.assertAlmostEqual(found["hours"][1], 1.5)

    def test_hours_of_a_file_that_was_moved_away_go_on(self):
        """A start after that knows only of the file that is there, and a file that is moved during a start begins with it again."""
        def start(step, time, earlier):
            return {"kind": "start", "step": step, "time": time, "earlier_seconds": earlier, "wall_seconds": 0.0}

        def steps(first, behind, wall=36.0):
            return [train_record(step, 4.0, wall_seconds=wall * (step - first + 1)) for step in range(first, behind)]

        moved = [start(0, "a", 0.0), *steps(1, 51), start(50, "b", 0.0), *steps(51, 101), start(100, "c", 50 * 36.0), *steps(101, 151)]
        again = [start(0, "a", 0.0), *steps(1, 151)[:50], start(0, "a", 0.0), *steps(1, 151)[50:]]
        for name, records in (("moved", moved), ("again", again)):
            with self.subTest(name):
                run = compare.Run(name, str(self.make_run(name, records)))
                np.testing.assert_allclose(run.hours, run.steps * 36 / 3600)

    def test_steps_without_a_finite_loss_make_no_difference(self):
        losses = 5 - np.arange(1, 161) / 100
        base = self.make_run("base", [train_record(step, loss) for step, loss in enumerate(losses, 1)])
        skips = self.make_run("skips", [train_record(step, None if step in (100, 160) else loss) for step, loss in enumerate(losses, 1)])
        result = self.compare(base, skips, "--last", "1")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, "^compare.py: warning: .*skips.*: 2 of 160 .*\n$")
        row = result.stdout.splitlines()[2].split()
        self.assertEqual((row[1:3], row[5]), (["160", "10,240"], "+0.0000"))

    def test_the_table_has_final_losses_and_differences(self):
        a = self.make_run("a", [train_record(1, 4.0), train_record(2, 2.0), {"kind": "eval", "step": 2, "loss": 2.125}])
        b = self.run_of("b", [4.5, 2.5, 1.5])
        result = self.compare(a, b, "--last", "0.5")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        header, first, second = [line.split("  ") for line in result.stdout.splitlines()]
        cells = [[cell.strip() for cell in line if cell.strip()] for line in (header, first, second)]
        self.assertEqual(cells[0], ["run", "steps", "tokens", "hours", "loss, own last 50 %", "held out", "difference", "95 % interval",
                                    "over steps"])
        self.assertEqual(cells[1], ["a", "2", "128", "0.00111", "2.0000", "2.1250"])
        self.assertEqual(cells[2], ["b", "3", "192", "0.00167", "2.0000", "+0.5000", "+0.5000 to +0.5000", "1 to 2"])

    def test_a_held_out_loss_of_an_earlier_step_is_told(self):
        stopped = self.make_run("stopped", [{"kind": "eval", "step": 0, "loss": 11.0}, *(train_record(step, 2.0) for step in (1, 2, 3))])
        result = self.compare(stopped, self.run_of("b", [2.0, 2.0, 2.0]))
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertRegex(result.stdout.splitlines()[1], "^stopped .* 11.0000 at 0$")

    def test_the_picture(self):
        runs = [self.run_of("a", self.base), self.run_of("b", self.base + self.noise), self.run_of("c", self.base[:40])]
        for axis in compare.AXES:
            with self.subTest(axis):
                picture = self.folder / f"{axis}.png"
                result = self.compare(*runs, "--axis", axis, "--out", picture)
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                self.assertEqual(picture.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")

    def test_differences_of_the_picture_are_means_with_intervals(self):
        runs = [compare.Run("a", str(self.run_of("a", self.base))), compare.Run("b", str(self.run_of("b", self.base + self.noise + 0.01)))]
        x, of_base, of_run = compare.differences(*runs, "steps")
        middle, gap, half = compare.band(x, of_run - of_base, 101, np.random.default_rng(0))
        self.assertEqual((middle[0], middle[-1], len(middle)), (51, 550, compare.BAND_POINTS))
        self.assertAlmostEqual(gap[-1], (self.noise + 0.01)[-101:].mean())
        self.assertGreater(np.mean(np.abs(gap - 0.01) < half), 0.85)
        self.assertLess(half.max(), 0.003)

    def test_bad_input(self):
        a, b = self.run_of("a", [4.0, 3.0]), self.run_of("b", [4.0, 3.0])
        empty = self.make_run("empty", [])
        for message, *arguments in (
                ("two", a), ("a: ", a, a), ("--last", a, b, "--last", "0"), ("--smooth", a, b, "--smooth", "1"), ("empty/", a, empty),
                ("nowhere", a, self.folder / "nowhere"), ("x.xyz", a, b, "--out", self.folder / "x.xyz")):
            with self.subTest(message):
                result = self.compare(*arguments)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"^compare.py: error: .*{message}.*\n$")
        result = self.compare(a, b, "--out", self.folder / "nowhere/x.png")
        self.assertEqual(result.returncode, 4)
        self.assertRegex(result.stderr, "^compare.py: error: .*nowhere/x.png.*\n$")


if __name__ == "__main__":
    unittest.main()
