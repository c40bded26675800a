#!/usr/bin/env python3
"""Tests of scripts/research/equal_loss.py on made-up losses, and of scripts/research/equal_loss.sh with a tiny model. Exits with 77
(skipped) where numpy, matplotlib or tokenizers is missing."""
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path
from types import SimpleNamespace

try:
    import matplotlib  # noqa: F401
    import numpy as np
    import tokenizers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts/research"
sys.path[:0] = [str(ROOT / "tests" / "commands"), str(SCRIPTS)]
import equal_loss  # noqa: E402
from parka_runs import PROGRAM  # noqa: E402

STEPS, TOKENS_PER_STEP = 1000, 64
SLOPE = 0.4


def logarithm(n, _share):
    """Losses after n tokens, of which falls what the slope says."""
    return 9 - SLOPE * np.log(n)


def power_law(n, _share):
    return 1.7 + 60 * n**-0.3


def annealed(n, share):
    """As `logarithm`, and more towards the end of a schedule."""
    return logarithm(n, share) - 0.2 * np.maximum(0, share - 0.5)


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.environment = {**os.environ, "MPLCONFIGDIR": temporary.name}


class Parts(unittest.TestCase):
    """Of the scripts, called as functions."""

    def test_the_slope_is_the_mean_over_seeds(self):
        def run(name, losses, tokens):
            return SimpleNamespace(name=name, loss=np.array(losses), tokens=np.array(tokens))

        base = {0: run("a", [4.0, 2.0], [500, 1000]), 1: run("b", [4.0, 3.0], [500, 1000])}
        shorter = [(0, run("c", [5.0, 4.0], [250, 500])), (1, run("d", [5.0, 4.0], [250, 500]))]
        # Over twice the tokens by 2 and by 1 nats between the runs, and likewise within them.
        self.assertAlmostEqual(equal_loss.slope_between(base, shorter, lambda run: equal_loss.last_mean(run.loss, 0.5)), 1.5 / np.log(2))
        self.assertAlmostEqual(equal_loss.fitted_slope(base), 1.5 / np.log(2))

    def test_runs_over_other_tokens_are_not_compared(self):
        def run(tokens):
            return SimpleNamespace(name="b.1", end=(2, tokens, 1.0))

        equal_loss.check_pairs({1: run(64.0)}, {"b": {1: run(64.0)}})
        with self.assertRaises(SystemExit):
            equal_loss.check_pairs({1: run(64.0)}, {"b": {1: run(128.0)}})


class EqualLoss(Folder):
    def make_run(self, name, law, ratio=1.0, steps=STEPS, speed=100.0, seed=0, device=None, noise=0.03):
        """A run that needs `ratio` times the tokens for what the law says. Equal seeds have equal noise of batches."""
        noise = noise * np.random.default_rng(seed).standard_normal(steps)
        count = np.arange(1, steps + 1)
        losses = law(count * TOKENS_PER_STEP / ratio, count / steps) + noise
        run = self.folder / name
        run.mkdir()
        with open(run / "metrics.jsonl", "w", encoding="utf-8") as file:
            if device:
                print(json.dumps({"kind": "start", "step": 0, "device": device}), file=file)
            for step, loss in enumerate(losses.tolist(), 1):
                print(json.dumps({"kind": "train", "step": step, "tokens": TOKENS_PER_STEP * step, "loss": loss, "seconds": 1.0,
                                  "tokens_per_second": speed if step > 5 else 1.0}), file=file)
        return run

    def script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / "equal_loss.py", *map(str, arguments)], capture_output=True, text=True,
                              env=self.environment)

    def figures(self, *arguments):
        result = self.script("--json", "--model", "m", *arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}

    def test_the_tokens_that_a_recipe_needs_are_found(self):
        for law, tolerance in ((logarithm, 0.03), (annealed, 0.03), (power_law, 0.15)):
            with self.subTest(law.__name__):
                name = law.__name__
                base, half = self.make_run(f"{name}.1", law), self.make_run(f"{name}_half.1", law, steps=STEPS // 2)
                for ratio in (1.02, 0.99):
                    # As a run of fewer tokens that ends its schedule as the others do.
                    other = self.make_run(f"{name}_{ratio}.1", law, ratio)
                    found = self.figures(f"bf16.1={base}", f"fp8.1={other}", "--shorter", half)["equal_loss.m.fp8.token_ratio"]
                    self.assertAlmostEqual((found["value"] - 1) / (ratio - 1), 1, delta=tolerance)

    def test_without_a_shorter_run_the_slope_is_that_of_the_curve(self):
        runs = [f"{recipe}.{seed}={self.make_run(f'{recipe}.{seed}', logarithm, ratio, seed=seed)}"
                for recipe, ratio in (("bf16", 1), ("fp8", 1.02)) for seed in (1, 2)]
        found = self.figures(*runs)
        self.assertAlmostEqual(found["equal_loss.m.bf16.slope"]["value"], SLOPE, delta=0.02)
        self.assertEqual(found["equal_loss.m.bf16.slope"]["of"], "its own curves")
        self.assertAlmostEqual(found["equal_loss.m.fp8.token_ratio"]["value"], 1.02, delta=0.002)
        # The learning rate's share of the fall is taken for that of more tokens.
        runs = [f"{recipe}.1={self.make_run(f'annealed_{recipe}.1', annealed, ratio)}" for recipe, ratio in (("bf16", 1), ("fp8", 1.02))]
        self.assertLess(self.figures(*runs)["equal_loss.m.fp8.token_ratio"]["value"], 1.017)

    def test_figures_of_several_seeds(self):
        ratios = {"1": 1.01, "2": 1.02, "3": 1.04}
        bases = [self.make_run(f"bf16.{seed}", logarithm, speed=100 + int(seed), seed=int(seed)) for seed in ratios]
        runs = [self.make_run(f"fp8.{seed}", logarithm, ratio, speed=150 + int(seed), seed=int(seed)) for seed, ratio in ratios.items()]
        half = self.make_run("half.1", logarithm, steps=STEPS // 2, seed=1)
        found = self.figures(*bases, *runs, "--shorter", half, "--out", self.folder / "x.png")
        self.assertEqual(set(found), {"equal_loss.m.bf16.slope", "loss_gap.m.fp8.nats_per_token", "equal_loss.m.fp8.token_ratio",
                                      "equal_loss.m.fp8.raw_speedup", "equal_loss.m.fp8.speedup"})
        slope = found["equal_loss.m.bf16.slope"]["value"]
        self.assertAlmostEqual(slope, SLOPE, delta=0.03)
        gap, ratio = found["loss_gap.m.fp8.nats_per_token"], found["equal_loss.m.fp8.token_ratio"]
        gaps = SLOPE * np.log(list(ratios.values()))
        self.assertEqual(list(gap["seeds"]), list(ratios))
        np.testing.assert_allclose(list(gap["seeds"].values()), gaps)
        np.testing.assert_allclose([gap["value"], *gap["spread"]], [gaps.mean(), gaps.min(), gaps.max()])
        half_width = 4.303 * gaps.std(ddof=1) / np.sqrt(3)  # Student's t with two degrees of freedom
        np.testing.assert_allclose(gap["interval"], [gaps.mean() - half_width, gaps.mean() + half_width])
        np.testing.assert_allclose([ratio["value"], *ratio["interval"]], np.exp(np.array([gap["value"], *gap["interval"]]) / slope))
        raw, speed = found["equal_loss.m.fp8.raw_speedup"], found["equal_loss.m.fp8.speedup"]
        np.testing.assert_allclose(list(raw["seeds"].values()), [151 / 101, 152 / 102, 153 / 103])
        for seed in ratios:
            self.assertAlmostEqual(speed["seeds"][seed], raw["seeds"][seed] / ratio["seeds"][seed])
        self.assertGreater((self.folder / "x.png").stat().st_size, 10000)
        given = self.figures(*bases, *runs, "--shorter", half, "--speedup", "fp8=1.5")
        self.assertAlmostEqual(given["equal_loss.m.fp8.speedup"]["value"], 1.5 / 1.02, delta=0.002)

    def test_speeds_of_other_devices_are_not_compared(self):
        base = self.make_run("bf16.1", logarithm, device="a card")
        run = self.make_run("fp8.1", logarithm, 1.02, speed=150.0, device="another")
        self.assertEqual(set(self.figures(base, run)), {"equal_loss.m.bf16.slope", "loss_gap.m.fp8.nats_per_token",
                                                        "equal_loss.m.fp8.token_ratio"})
        self.assertIn("equal_loss.m.fp8.speedup", self.figures(base, run, "--speedup", "fp8=1.5"))

    def test_the_table_has_what_the_figures_have(self):
        base, run = self.make_run("bf16.1", logarithm), self.make_run("fp8.1", logarithm, 1.02, speed=150.0)
        half = self.make_run("half.1", logarithm, steps=STEPS // 2)
        result = self.script(base, run, "--shorter", half)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        found = self.figures(base, run, "--shorter", half)
        row = result.stdout.splitlines()[-1].split()
        gap, ratio = found["loss_gap.m.fp8.nats_per_token"], found["equal_loss.m.fp8.token_ratio"]["value"]
        self.assertEqual(row, ["fp8", "1", f"{gap['value']:+.4f}", f"{gap['interval'][0]:+.4f}", "to", f"{gap['interval'][1]:+.4f}",
                               f"{ratio:.4f}", f"{ratio:.4f}", "to", f"{ratio:.4f}", "1.500", f"{1.5 / ratio:.3f}"])

    def test_too_few_steps_of_one_seed_have_no_interval(self):
        runs = [self.make_run(name, logarithm, ratio, steps=40, seed=seed) for seed, (name, ratio) in
                enumerate((("bf16.1", 1.0), ("fp8.1", 1.02)))]
        found = self.figures(*runs)
        self.assertIsNone(found["loss_gap.m.fp8.nats_per_token"]["interval"])
        self.assertIsNone(found["equal_loss.m.fp8.token_ratio"]["interval"])
        self.assertIn("fp8", self.script(*runs).stdout)

    def make_evaluated(self, name, same, bf16, loss=2.0, steps=40, **other):
        """A run whose loss never changes, with a held_out.json. `other` replaces values in its evaluation in bf16."""
        run = self.make_run(name, lambda n, _share: loss + 0 * n, steps=steps, noise=0.0)
        evaluation = {"checkpoint": "x", "step": steps, "data": ["y"], "loss": same, "perplexity": 1.0, "num_targets": 5000}
        (run / "held_out.json").write_text(json.dumps({"same": evaluation, "bf16": {**evaluation, "loss": bf16, **other}}))
        return run

    def make_pairs(self):
        """Two seeds, and a base run of half the tokens that ends 0.3 nats higher, and 0.4 held out: t = 2^(gap / 0.4)."""
        runs = [self.make_evaluated("bf16.1", 3.0, 2.5), self.make_evaluated("bf16.2", 3.2, 2.6),
                self.make_evaluated("fp8.1", 3.01, 2.504), self.make_evaluated("fp8.2", 3.23, 2.596)]
        return [*runs, "--shorter", self.make_evaluated("half.1", 3.4, 9.0, loss=2.3, steps=20)]

    def test_figures_of_held_out_losses(self):
        runs = self.make_pairs()
        without, found = self.figures(*runs), self.figures(*runs, "--held-out")
        names = [f"{name}.held_out.{numerics}" for name in ("loss_gap.m.fp8", "equal_loss.m.fp8.token_ratio") for numerics in ("same", "bf16")]
        self.assertEqual(set(found), set(without) | set(names) | {"equal_loss.m.bf16.slope.held_out"})
        self.assertAlmostEqual(found["equal_loss.m.bf16.slope.held_out"]["value"], 0.4 / np.log(2))
        self.assertEqual({name: found[name] for name in without}, without)
        # Means 0.02 and 0; half widths of the intervals 12.706 (Student's t) x 0.02 / 2 and x 0.008 / 2.
        for numerics, gaps, mean, half in (("same", (0.01, 0.03), 0.02, 0.12706), ("bf16", (0.004, -0.004), 0.0, 0.050824)):
            gap, ratio = found[f"loss_gap.m.fp8.held_out.{numerics}"], found[f"equal_loss.m.fp8.token_ratio.held_out.{numerics}"]
            self.assertEqual((gap["unit"], ratio["unit"], list(gap["seeds"])), ("nats/token", "1", ["1", "2"]))
            np.testing.assert_allclose([gap["value"], *gap["seeds"].values(), *gap["spread"], *gap["interval"]],
                                       [mean, *gaps, min(gaps), max(gaps), mean - half, mean + half], atol=1e-9)
            np.testing.assert_allclose([ratio["value"], *ratio["seeds"].values(), *ratio["spread"], *ratio["interval"]],
                                       [2**(each / 0.4) for each in (mean, *gaps, min(gaps), max(gaps), mean - half, mean + half)])

    def test_the_table_of_held_out_losses(self):
        runs = self.make_pairs()
        without, result = self.script(*runs), self.script(*runs, "--held-out")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertTrue(result.stdout.startswith(without.stdout))
        # 2^0.05, 2^0.025, 2^0.075 and 2^0.01.
        self.assertIn(f"; slope {0.4 / np.log(2):.4f} of held-out losses\n", result.stdout)
        self.assertEqual([line.split() for line in result.stdout.splitlines()[-2:]],
                         ["fp8 same +0.0200 +0.0100 to +0.0300 -0.1071 to +0.1471 1.0353 1.0175 to 1.0534".split(),
                          "fp8 bf16 +0.0000 -0.0040 to +0.0040 -0.0508 to +0.0508 1.0000 0.9931 to 1.0070".split()])

    def test_one_seed_of_held_out_losses_has_no_interval(self):
        half = self.make_evaluated("half.1", 3.4, 2.9, loss=2.4, steps=20)
        runs = [self.make_evaluated("bf16.1", 3.0, 2.5), self.make_evaluated("fp8.1", 3.01, 2.504), "--shorter", half]
        found = self.figures(*runs, "--held-out")
        gap, ratio = found["loss_gap.m.fp8.held_out.same"], found["equal_loss.m.fp8.token_ratio.held_out.same"]
        self.assertEqual((gap["interval"], ratio["interval"]), (None, None))
        self.assertAlmostEqual(gap["value"], 0.01)
        self.assertAlmostEqual(ratio["value"], 2**0.025)
        self.assertIn("one seed", self.script(*runs, "--held-out").stdout)

    def test_held_out_losses_that_cannot_be_compared(self):
        base = self.make_evaluated("bf16.1", 3.0, 2.5)
        file = self.folder / "fp8.1" / "held_out.json"
        other, step = self.make_evaluated("other.1", 3.0, 2.5, num_targets=4000), self.make_evaluated("step.1", 3.0, 2.5, step=39)
        fewer, early = self.make_evaluated("fewer.1", 3.0, 2.5), self.make_evaluated("early.1", 3.0, 2.5)
        for run, old, new in ((fewer, "5000", "4000"), (early, '"step": 40', '"step": 30')):
            path = run / "held_out.json"
            path.write_text(path.read_text().replace(old, new))
        again = "delete it and evaluate the run again"
        for run, message in ((other, f"other.1/held_out.json: is of 5,000 targets at step 40 and of 4,000 targets at step 40; {again}"),
                             (step, f"step.1/held_out.json: is of 5,000 targets at step 40 and of 5,000 targets at step 39; {again}"),
                             (fewer, "fewer.1/held_out.json: is of 4,000 targets, .*/bf16.1/held_out.json of 5,000; evaluate the runs on the same data"),
                             (early, "early.1/held_out.json: is of step 30, and the run ends at 40; evaluate the run there, into a new held_out.json")):
            with self.subTest(message):
                self.assert_refused(message, base, run, "--held-out")
        run = self.make_evaluated("fp8.1", 3.0, 2.5)
        whole = json.loads(file.read_text())
        damaged = [{"bf16": whole["bf16"]}, {**whole, "bf16": None}, [1], *({**whole, "same": {**whole["same"], **change}} for change in
                                                   ({"loss": None}, {"loss": float("nan")}, {"num_targets": "5000"}, {"num_targets": 0}, {"step": 4.5}))]
        for text in ("", file.read_text()[:-2], *map(json.dumps, damaged)):
            with self.subTest(text):
                file.write_text(text)
                self.assert_refused(f"fp8.1/held_out.json: not losses on held-out data; {again}", base, run, "--held-out")
        file.unlink()
        self.assert_refused("fp8.1/metrics.jsonl: its last evaluation has no loss on held-out data; evaluate the run: what `parka eval RUN --json` "
                            "prints goes into held_out.json beside it as \"same\", and with --set precision.eval=bf16 as \"bf16\"",
                            base, run, "--held-out")
        self.evaluate_in_metrics(run, (30, 3.0))
        self.assert_refused("fp8.1/metrics.jsonl: is of step 30, and the run ends at 40; evaluate the run there, into a new held_out.json", base, run, "--held-out")

    def evaluate_in_metrics(self, run, *losses):
        """Instead of in a file: (step, loss)."""
        (run / "held_out.json").unlink(missing_ok=True)
        with open(run / "metrics.jsonl", "a", encoding="utf-8") as file:
            for step, loss in losses:
                file.write(json.dumps({"kind": "eval", "step": step, "loss": loss, "num_targets": 5000}) + "\n")

    def leave_out_bf16(self, run):
        path = run / "held_out.json"
        path.write_text(json.dumps({"same": json.loads(path.read_text())["same"]}))

    def test_runs_that_lack_an_evaluation(self):
        runs = [self.make_evaluated(f"{recipe}.{seed}", 3.0 - 0.01 * seed, 2.5) for recipe in ("bf16", "fp8", "fp32") for seed in (1, 2)]
        shorter = ["--shorter", self.make_evaluated("half.1", 3.4, 9.0, loss=2.3, steps=20)]
        for run in runs[4:]:
            self.leave_out_bf16(run)

        def compared_in_bf16(*named):
            result = self.script(*named, *shorter, "--held-out", "--json", "--model", "m")
            self.assertEqual(result.returncode, 0, result.stderr)
            names = [json.loads(line)["name"] for line in result.stdout.splitlines()]
            self.assertTrue(all(f"loss_gap.m.{run.name[:-2]}.held_out.same" in names for run in named[2:]))
            return [name.split(".")[2] for name in names if name.startswith("loss_gap") and name.endswith("held_out.bf16")], result.stderr

        warning = "equal_loss.py: warning: fp8: not all of its runs and those of the base are evaluated in bf16, and so none are compared in it\n"
        self.assertEqual(compared_in_bf16(*runs), (["fp8"], warning.replace("fp8", "fp32")))
        self.assertEqual(compared_in_bf16(*runs[4:], *runs[:2]), ([], warning.replace("fp8", "bf16", 1)))
        for lacking in (runs[3], runs[1]):  # of the recipe, of its base
            whole = (lacking / "held_out.json").read_text()
            self.leave_out_bf16(lacking)
            self.assertEqual(compared_in_bf16(*runs[:4]), ([], warning))
            (lacking / "held_out.json").write_text(whole)
        self.evaluate_in_metrics(runs[2], (40, 3.05))  # the only run of the recipe
        self.assertEqual(compared_in_bf16(*runs[:3]), ([], warning))

    def test_without_a_shorter_run_the_slope_of_held_out_losses_is_not_measured(self):
        runs = [self.make_run(name, logarithm) for name in ("bf16.1", "fp8.1")]
        for run in runs:
            self.evaluate_in_metrics(run, (STEPS, 3.0))
        found = self.figures(*runs, "--held-out")
        self.assertIn("loss_gap.m.fp8.held_out.same", found)
        self.assertNotIn("equal_loss.m.bf16.slope.held_out", found)
        self.assertRegex(self.script(*runs, "--held-out").stdout, r"; slope 0\.\d{4} of training losses\n")

    def test_a_loss_that_falls_by_rounding_alone_is_refused(self):
        flat = [self.make_run(name, lambda n, _share: 2.0 - 1e-12 * np.log(n), noise=0.0) for name in ("flat.1", "fp8.1")]
        self.assert_refused("the loss of flat does not fall with more tokens \\(its own curves\\); train longer runs", *flat)
        runs = [self.make_evaluated(f"{recipe}.1", 3.0, 2.5) for recipe in ("bf16", "other")]
        half = self.make_evaluated("half.1", 3.0 + 1e-12, 2.5, loss=2.3, steps=20)
        self.assert_refused("bf16", *runs, "--shorter", half, "--held-out")

    def test_held_out_losses_of_metrics_are_in_the_numerics_of_training(self):
        runs = self.make_pairs()
        alone = runs[2]
        self.evaluate_in_metrics(alone, (0, 9.0), (40, 3.05))
        result = self.script(*runs, "--held-out", "--json", "--model", "m")
        self.assertRegex(result.stderr, r"^equal_loss\.py: warning: fp8: not all of its runs [^\n]+\n$")
        found = {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}
        self.assertFalse([name for name in found if name.endswith("bf16") and "held_out" in name])
        np.testing.assert_allclose(list(found["loss_gap.m.fp8.held_out.same"]["seeds"].values()), [0.05, 0.03], atol=1e-9)

    def test_losses_up_to_some_tokens(self):
        """The gap is 0.01 in the first half of the steps and 0.03 in the second."""
        runs = [self.make_run("bf16.1", lambda n, _share: 3.0 - 1e-6 * n, steps=40, noise=0.0),
                self.make_run("fp8.1", lambda n, share: 3.0 - 1e-6 * n + np.where(share <= 0.5, 0.01, 0.03), steps=40, noise=0.0)]
        half = json.loads((runs[0] / "metrics.jsonl").read_text().splitlines()[19])["tokens"]
        for options, gap in (((), 0.03), (("--until", half), 0.01)):
            self.assertAlmostEqual(self.figures(*runs, *map(str, options))["loss_gap.m.fp8.nats_per_token"]["value"], gap)
        self.assert_refused("--until: fp8.1 .*64", *runs, "--until", "64")
        self.assert_refused("--until", *runs, "--until", "0")
        self.assert_refused("--until: fp8.1 .*2,560", *runs, "--until", "2561")
        self.assertTrue(self.script(*runs, "--until", half).stdout.startswith("training losses up to 1,280 tokens; the slope is"))

    def assert_refused(self, message, *arguments):
        result = self.script(*arguments)
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertRegex(result.stderr, f"^equal_loss.py: error: .*{message}.*\n$")

    def test_bad_input(self):
        base, run = self.make_run("bf16.1", logarithm), self.make_run("fp8.1", logarithm)
        second, short = self.make_run("fp8.2", logarithm), self.make_run("short.1", logarithm, steps=10)
        rising = [self.make_run(name, lambda n, share: -logarithm(n, share)) for name in ("rising.1", "fast.1")]
        for message, *arguments in (
                ("bf16", base), ("RECIPE.SEED=FOLDER", base, f"fp8={run}"), ("fp8.2: ", base, run, second), ("short.1: .*640", base, short),
                ("fp8.1: ", base, run, "--shorter", run), ("other.3: ", base, run, "--shorter", f"other.3={short}"),
                ("RECIPE=RATIO", base, run, "--speedup", "fp8=0"), ("--speedup: coat", base, run, "--speedup", "coat=2"),
                ("rising", *rising), ("--json", base, run, "--json"), ("--last", base, run, "--last", "0")):
            with self.subTest(message):
                result = self.script(*arguments)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"equal_loss.py: error: .*{message}.*\n$")


class Script(Folder):
    def stop_in_first_run(self, command, environment, run):
        """Sends SIGTERM to all processes of a script once the run has made steps. When the script has ended, the run has saved."""
        process = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL,
                                   stderr=subprocess.DEVNULL)
        metrics, deadline = run / "metrics.jsonl", time.monotonic() + 120
        while process.poll() is None and not (metrics.exists() and metrics.read_text().count("\n") > 5):
            self.assertLess(time.monotonic(), deadline, "the first run makes no steps")
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGTERM)
        self.assertEqual(process.wait(60), 143)
        self.assertEqual(len(list(run.glob("step_*"))), 1)

    def write_pages(self, folder):
        """Made up, so that losses do not depend on what the project says: sentences of words that follow one another in few ways."""
        choose = random.Random(3)
        words = ["".join(choose.choice("bdfgklmnprstvz") + choose.choice("aeiou") for _ in range(choose.randint(1, 4))) for _ in range(150)]
        followers = {word: [choose.choice(words) for _ in range(4)] for word in words}
        for page in range(40):
            lines = []
            for _ in range(60):
                line = [choose.choice(words)]
                while len(line) < 9:
                    line.append(choose.choice(followers[line[-1]]))
                line[4] = f"{line[4]}_{line[5]}"
                lines.append(" ".join(line).capitalize() + ".")
            (folder / f"page_{page}.md").write_text("\n".join(lines) + "\n")

    def test_a_tiny_model_from_text_to_figures_and_again_without_training(self):
        text, out = self.folder / "text", self.folder / "out"
        text.mkdir()
        self.write_pages(text)
        (text / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
        environment = {**self.environment, "PARKA": os.path.abspath(PROGRAM), "PYTHON": sys.executable,
                       "CONFIG": "configs/tiny-olmo.json", "TOKENS": str(60 * 2 * 128), "BATCH": "2", "LENGTH": "128", "SEEDS": "1 2", "VOCABULARY": "512",
                       "HELD_OUT": "0.3",
                       "SPEEDUPS": "lean=1.4", "MODEL": "device.kind=cpu training.micro_batch_size=2 optimizer.lr=3e-3"}

        def script(run):
            return subprocess.run([SCRIPTS / "equal_loss.sh", out, text, run], capture_output=True, text=True,
                                  env=environment)

        lean = "lean=parka,optimizer.master=fp32"
        self.stop_in_first_run([SCRIPTS / "equal_loss.sh", out, text, lean], environment, out / "work" / "bf16.1")

        def run():
            result = script(lean)
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            return (out / "equal_loss.jsonl").read_text()

        first = run()
        found = {line["name"]: line for line in map(json.loads, first.splitlines())}
        gap, ratio = found["loss_gap.tiny-olmo.lean.nats_per_token"], found["equal_loss.tiny-olmo.lean.token_ratio"]
        self.assertEqual(list(gap["seeds"]), ["1", "2"])
        slope = found["equal_loss.tiny-olmo.bf16.slope"]
        self.assertEqual(slope["of"], "complete runs")
        self.assertTrue(0.1 < slope["value"] < 2)
        for seed, value in gap["seeds"].items():
            self.assertTrue(0 < abs(value) < 0.1)
            self.assertAlmostEqual(ratio["seeds"][seed], np.exp(value / slope["value"]))
        self.assertAlmostEqual(found["equal_loss.tiny-olmo.lean.raw_speedup"]["value"], 1.4)
        self.check_held_out(out, found, found["equal_loss.tiny-olmo.bf16.slope.held_out"]["value"])
        evaluated = {path: path.stat().st_mtime_ns for path in out.glob("*/held_out.json")}
        scores = {line["name"]: line for line in map(json.loads, (out / "tasks.jsonl").read_text().splitlines())}
        for kind in ("lines", "identifiers"):
            for name in ("bf16.1.{}.acc", "lean.2.{}.acc", "lean.2.{}.vs_bf16.1"):
                self.assertTrue(-1 <= scores["tasks.tiny-olmo." + name.format(kind)]["value"] <= 1)
        for name in ("equal_loss.png", "runs.png", "equal_loss.txt", "tasks.txt", "lean.2/config.json", "lean.2/metrics.jsonl", "bf16_half.1/metrics.jsonl"):
            self.assertTrue((out / name).exists(), name)

        def losses(name):
            records = map(json.loads, (out / name / "metrics.jsonl").read_text().splitlines())
            return [record["loss"] for record in records if record["kind"] == "train"]

        # Batches and weights are those of the seed, up to rounding; the run of half the steps ends its schedule.
        self.assertAlmostEqual(losses("bf16.1")[0], losses("lean.1")[0], delta=0.05)
        self.assertNotEqual(losses("bf16.1")[0], losses("bf16.2")[0])
        self.assertEqual((len(losses("bf16.1")), len(losses("bf16_half.1"))), (60, 30))
        self.assertEqual(losses("bf16.1")[0], losses("bf16_half.1")[0])
        # Nothing is trained, tokenized, evaluated or asked again.
        self.assertEqual(run(), first)
        self.assertEqual({path: path.stat().st_mtime_ns for path in out.glob("*/held_out.json")}, evaluated)
        result = script("lean=parka,precision.group_size=0")
        self.assertNotEqual(result.returncode, 0)
        self.assertIn("lean.1: ended with 2: parka: error: ", result.stderr)

    def check_held_out(self, out, found, slope):
        """What equal_loss.sh found of two seeds of `lean` beside bf16."""
        losses = {path.parent.name: json.loads(path.read_text()) for path in out.glob("*/held_out.json")}
        self.assertEqual(set(losses), {"bf16.1", "bf16.2", "lean.1", "lean.2", "bf16_half.1"})
        del losses["bf16_half.1"]
        for name, held_out in losses.items():
            records = map(json.loads, (out / name / "metrics.jsonl").read_text().splitlines())
            last = [record for record in records if record["kind"] == "eval"][-1]
            self.assertEqual((held_out["same"]["step"], last["step"]), (60, 60))
            self.assertAlmostEqual(held_out["same"]["loss"], last["loss"], places=5)
            of_fp8 = abs(held_out["bf16"]["loss"] - held_out["same"]["loss"])
            self.assertTrue(0 < of_fp8 < 0.1 if name.startswith("lean") else of_fp8 == 0, f"{name}: {of_fp8}")
        for numerics in ("same", "bf16"):
            gaps = {seed: losses[f"lean.{seed}"][numerics]["loss"] - losses[f"bf16.{seed}"][numerics]["loss"] for seed in ("1", "2")}
            gap = found[f"loss_gap.tiny-olmo.lean.held_out.{numerics}"]
            self.assertEqual(gap["seeds"], gaps)
            ratio = found[f"equal_loss.tiny-olmo.lean.token_ratio.held_out.{numerics}"]["value"]
            self.assertAlmostEqual(ratio, np.exp(gap["value"] / slope))
            self.assertIn(["lean", numerics, f"{gap['value']:+.4f}"], [line.split()[:3] for line in (out / "equal_loss.txt").read_text().splitlines()])


if __name__ == "__main__":
    unittest.main()
