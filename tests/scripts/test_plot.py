#!/usr/bin/env python3
"""Tests of scripts/plot.py. Exits with 77 (skipped) where matplotlib is missing."""
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import matplotlib  # noqa: F401
except ImportError:
    print("skipped: matplotlib is missing")
    sys.exit(77)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "plot.py"


def train_record(step):
    return {"kind": "train", "step": step, "loss": 4.0 / step, "grad_norm": 1.0, "lr": 1e-3, "tokens_per_second": 100.0}


def quantization_record(step):
    def tensor(error):
        return {"error": [error, None], "saturated": [0.0, 0.0], "underflowed": [0.001, 0.0], "not_finite": [0.0, 0.0],
                "amax": [3.0, 0.0]}

    return {"kind": "quantization", "step": step, "sampled_tokens": 32,
            "tensors": {"product": tensor(0.026), "qkv.gradient": tensor(0.05)}}


def moments_record(step):
    k = {"min": [1.0, None], "lower_quartile": [2.0, None], "median": [3.0, None], "upper_quartile": [4.0, None],
         "max": [9.0, None], "mean": [3.1, None]}
    moments = {moment: {"k": k, "amax": {"min": [1e-6, 0.0], "max": [1e-3, 0.0]}} for moment in ("exp_avg", "exp_avg_sq")}
    return {"kind": "moments", "step": step, "parameters": {"qkv": moments}}


def attention_record(step):
    return {"kind": "attention", "step": step, "sampled_tokens": 32,
            "blocks": {"imbalance": [0.002, None], "score_rms": [3.0, 4.0]}}


class Plot(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def plot(self, records, *options, copies=1, tail="", **environment):
        path = os.path.join(self.folder, "metrics.jsonl")
        with open(path, "w", encoding="utf-8") as file:
            file.write("".join(json.dumps(record) + "\n" for record in records) + tail)
        self.picture = os.path.join(self.folder, "out.png")
        runs = [path, *(f"again{i}={path}" for i in range(1, copies))]
        return subprocess.run([sys.executable, SCRIPT, *runs, "--out", self.picture, *options],
                              capture_output=True, text=True, env={**os.environ, "MPLCONFIGDIR": self.folder, **environment})

    def assert_drawn(self, result):
        """Returns the height of the picture."""
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        with open(self.picture, "rb") as file:
            head = file.read(24)
        self.assertEqual(head[:8], b"\x89PNG\r\n\x1a\n")
        return int.from_bytes(head[20:24], "big")

    def test_a_run(self):
        records = [train_record(step) for step in range(1, 9)] + [{"kind": "eval", "step": 8, "loss": 1.0}]
        # What it does not draw does not disturb it.
        self.assert_drawn(self.plot(records + [quantization_record(8)]))

    def test_a_run_folder(self):
        self.assert_drawn(self.plot([train_record(step) for step in range(1, 9)]))
        os.remove(self.picture)
        self.assert_drawn(subprocess.run([sys.executable, SCRIPT, self.folder, "--out", self.picture], capture_output=True, text=True,
                                         env={**os.environ, "MPLCONFIGDIR": self.folder}))

    def test_telemetry_of_a_run_with_one_moment_in_fp8(self):
        records = [train_record(8), moments_record(8), attention_record(8)]
        del records[1]["parameters"]["qkv"]["exp_avg_sq"]
        self.assert_drawn(self.plot(records, "--telemetry"))

    def test_several_runs(self):
        self.assert_drawn(self.plot([train_record(step) for step in range(1, 9)], copies=2))

    def test_runs_have_names_of_their_own(self):
        runs = [Path(self.folder, parent, "a") for parent in ("x", "y")]
        for run in runs:
            run.mkdir(parents=True)
            (run / "metrics.jsonl").write_text(json.dumps(train_record(1)) + "\n", encoding="utf-8")
        picture = Path(self.folder, "out.svg")

        def plot(*arguments):
            return subprocess.run([sys.executable, SCRIPT, *arguments, "--out", picture], capture_output=True, text=True,
                                  env={**os.environ, "MPLCONFIGDIR": self.folder})

        refused = plot(*runs)
        self.assertEqual((refused.returncode, picture.exists()), (2, False))
        self.assertRegex(refused.stderr, "^plot.py: error: a: .*NAME=FOLDER\n$")
        drawn = plot(f"first={runs[0]}", f"second={runs[1]}")
        self.assertEqual((drawn.returncode, drawn.stderr), (0, ""))
        shown = re.findall(r"<!-- (.*?) -->", picture.read_text(encoding="utf-8"))
        self.assertEqual([text for text in shown if text in ("a", "first", "second")], ["first", "second"])

    def test_sets_and_tasks_have_panels_of_their_own(self):
        records = [train_record(step) for step in range(1, 9)]
        sets = [{"kind": "eval_set", "step": step, "set": name, "loss": 2.0} for step in (0, 8) for name in ("wiki", "code")]
        tasks = [{"kind": "task", "step": step, "task": "copa", "score": 0.5} for step in (0, 8)]
        height = self.assert_drawn(self.plot(records))
        for extra in (sets, tasks, sets + tasks):
            with self.subTest(len(extra)):
                self.assertGreater(self.assert_drawn(self.plot(records + extra, copies=2)), height)

    def test_gradient_norms_have_plain_numbers(self):
        for norms, expected in (((0.4, 6.0), ["0.5", "1", "2", "5"]), ((0.31, 0.45), ["0.4"]), ((20.0, 3000.0), ["20", "1000"])):
            with self.subTest(norms):
                picture = os.path.join(self.folder, "out.svg")
                records = [train_record(step) | {"grad_norm": norm} for step, norm in enumerate(norms, 1)]
                self.assertEqual(self.plot(records, "--out", picture).returncode, 0)
                with open(picture, encoding="utf-8") as file:
                    shown = re.findall(r"<!-- (.*?) -->", file.read())  # before the outlines of each text
                self.assertEqual([text for text in expected if text not in shown], [], shown)
                self.assertEqual([text for text in shown if "times" in text or "^" in text], [])

    def test_a_run_that_is_not_there(self):
        for records, message in (([], "metrics.jsonl: "), ([5, train_record(1)], "metrics.jsonl:1: ")):
            with self.subTest(message):
                result = self.plot(records)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"^plot.py: error: .*{message}.*\n$")

    def test_a_picture_that_cannot_be_written(self):
        for name, code, message in (("out.xyz", 2, "out.xyz: "), ("out", 2, "out: "), ("missing/out.png", 4, "missing/out.png: ")):
            with self.subTest(name):
                result = self.plot([train_record(1)], "--out", os.path.join(self.folder, name))
                self.assertEqual(result.returncode, code)
                self.assertRegex(result.stderr, f"^plot.py: error: .*{message}.*\n$")

    def test_a_python_without_matplotlib(self):
        Path(self.folder, "matplotlib.py").write_text("raise ImportError", encoding="utf-8")
        result = self.plot([train_record(1)], PYTHONPATH=self.folder)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"^plot\.py: error: matplotlib .*\n$")

    def test_a_line_that_is_being_written(self):
        self.assert_drawn(self.plot([train_record(1)], tail='{"kind": "tra'))

    def test_telemetry(self):
        quantization = [quantization_record(step) for step in (2, 4)]
        moments = [moments_record(step) for step in (2, 4)]
        attention = [attention_record(step) for step in (2, 4)]
        for records in (quantization + attention + moments, quantization, moments, attention):
            with self.subTest(len(records)):
                self.assert_drawn(self.plot([train_record(1), *records], "--telemetry"))

    def test_telemetry_that_is_not_there(self):
        result = self.plot([train_record(1)], "--telemetry")
        self.assertEqual(result.returncode, 2)
        self.assertIn("telemetry.interval", result.stderr)

    def test_telemetry_that_lacks_what_is_drawn(self):
        for record in ({"kind": "quantization", "tensors": {"a": {"error": [0.1]}}}, {"kind": "moments", "parameters": {"a": {"exp_avg": {}}}},
                       {"kind": "attention", "blocks": {}}):
            with self.subTest(kind=record["kind"]):
                result = self.plot([train_record(1), record | {"step": 1}], "--telemetry")
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, r"\Aplot.py: error: [^\n]*metrics.jsonl: its telemetry lacks [^\n]*\n\Z")

    def test_telemetry_of_two_runs(self):
        result = self.plot([train_record(1)], "--telemetry", copies=2)
        self.assertEqual(result.returncode, 2)
        self.assertIn("one run", result.stderr)


if __name__ == "__main__":
    unittest.main()
