#!/usr/bin/env python3
"""Tests of scripts/tensorboard.py: event files are read back. Exits with 77 (skipped) where tensorboardX is missing."""
import json
import math
import os
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.record_writer import masked_crc32c
except ImportError:
    print("skipped: tensorboardX is missing")
    sys.exit(77)

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "tensorboard.py"


def train_record(step, **more):
    return {"kind": "train", "step": step, "tokens": 64 * step, "epoch": 0, "loss": 4.0 / step, "grad_norm": 0.5, "lr": 1e-3,
            "applied": True, "tokens_per_second": 100.0, "seconds": 2.0} | more


def quantization_record(step):
    tensor = {"error": [0.02, None, 0.03, 0.05], "amax": [0.0, 3.0, 2.0, 1.0]}
    return {"kind": "quantization", "step": step, "sampled_tokens": 32, "tensors": {"qkv.weight": tensor}}


def moments_record(step):
    ranges = {"k": {"median": [3.0, 5.0, None], "min": [None, None, None]}, "amax": {"max": [1e-3, 2e-3, 4e-3]}}
    return {"kind": "moments", "step": step, "parameters": {"qkv": {"exp_avg": ranges}}}


def events_of(path):
    """The events of a file, whose frames are length, its checksum, data, its checksum."""
    data, events = path.read_bytes(), []
    while data:
        (length,), (checksum,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        body, tail = data[12:12 + length], data[12 + length:16 + length]
        assert (checksum, struct.unpack("<I", tail)[0]) == (masked_crc32c(data[:8]), masked_crc32c(body))
        events.append(Event.FromString(body))
        data = data[16 + length:]
    return events


class TensorBoard(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.out = self.folder / "tensorboard"

    def make_run(self, name, records, tail=""):
        run = self.folder / name
        run.mkdir(parents=True, exist_ok=True)
        (run / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
        return run

    def export(self, *runs):
        return subprocess.run([sys.executable, SCRIPT, *runs, "--out", self.out], capture_output=True, text=True)

    def assert_exported(self, *runs):
        result = self.export(*runs)
        self.assertEqual((result.returncode, result.stderr), (0, ""))

    def assert_refused(self, message, *runs):
        result = self.export(*runs)
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, f"^tensorboard.py: error: .*{message}.*\n$")

    def events(self, name):
        files = list((self.out / name).iterdir())
        self.assertEqual(len(files), 1)
        self.assertIn("tfevents", files[0].name)
        return events_of(files[0])

    def curves(self, name):
        """{tag: {step: value}}"""
        curves = {}
        for event in self.events(name):
            for value in event.summary.value:
                curve = curves.setdefault(value.tag, {})
                self.assertNotIn(event.step, curve)
                curve[event.step] = value.simple_value
        return curves

    def assert_curve(self, curve, expected):
        self.assertEqual(curve.keys(), expected.keys())
        for step, value in expected.items():
            self.assertTrue(math.isclose(curve[step], value, rel_tol=1e-6), (step, curve[step], value))

    def test_training(self):
        self.assert_exported(self.make_run("a", [train_record(step, source_epochs=[0.5, 2.0 * step]) for step in (1, 2, 3)]))
        curves = self.curves("a")
        expected = {"loss": {1: 4.0, 2: 2.0, 3: 4.0 / 3}, "grad_norm": {1: 0.5, 2: 0.5, 3: 0.5}, "lr": dict.fromkeys((1, 2, 3), 1e-3),
                    "tokens_per_second": dict.fromkeys((1, 2, 3), 100.0), "tokens": {1: 64, 2: 128, 3: 192},
                    "source_epochs/1": {1: 2.0, 2: 4.0, 3: 6.0}}
        for key, curve in expected.items():
            with self.subTest(key):
                self.assert_curve(curves[f"train/{key}"], curve)
        self.assertNotIn("train/step", curves)

    def test_evaluations(self):
        task = {"kind": "task", "step": 2, "task": "copa", "metric": "acc", "score": 0.75, "acc": 0.5, "documents": 4}
        records = [{"kind": "eval", "step": 0, "loss": 6.0, "num_targets": 64}, train_record(1), train_record(2),
                   {"kind": "eval", "step": 2, "loss": 3.0, "num_targets": 64},
                   {"kind": "eval_set", "step": 2, "set": "wiki", "loss": 2.5, "num_targets": 64}, task]
        self.assert_exported(self.make_run("a", records))
        curves = self.curves("a")
        self.assert_curve(curves["eval/loss"], {0: 6.0, 2: 3.0})
        self.assert_curve(curves["eval_sets/wiki/loss"], {2: 2.5})
        self.assert_curve(curves["tasks/copa/score"], {2: 0.75})
        self.assert_curve(curves["tasks/copa/acc"], {2: 0.5})
        self.assertNotIn("tasks/copa/metric", curves)

    def test_telemetry(self):
        records = [train_record(1), quantization_record(1), moments_record(1)]
        self.assert_exported(self.make_run("a", records))
        telemetry = {tag: curve[1] for tag, curve in self.curves("a").items() if tag.startswith("telemetry/")}
        expected = {"qkv.weight/error/median": 0.03, "qkv.weight/error/max": 0.05, "qkv.weight/amax/median": 2.0,
                    "qkv.weight/amax/max": 3.0, "qkv/exp_avg/k/median": 5.0, "qkv/exp_avg/amax/max": 2e-3}
        self.assert_curve(telemetry, {f"telemetry/{tag}": value for tag, value in expected.items()})

    def test_a_step_that_was_not_finite(self):
        skipped = train_record(2, loss=None, grad_norm=None, applied=False, culprit="blocks.0.qkv")
        self.assert_exported(self.make_run("a", [train_record(1), skipped, train_record(3)]))
        curves = self.curves("a")
        self.assert_curve(curves["train/loss"], {1: 4.0, 3: 4.0 / 3})
        self.assertEqual(curves["train/applied"], {1: 1.0, 2: 0.0, 3: 1.0})

    def test_wall_time_is_training_time(self):
        run = self.make_run("a", [train_record(1), train_record(2), train_record(3, seconds=5.0)])
        os.utime(run / "metrics.jsonl", (2000000000, 2000000000))
        self.assert_exported(run)
        version, *points = self.events("a")
        self.assertEqual(version.file_version, "brain.Event:2")
        self.assertEqual([point.wall_time for point in points], [1999999993.0, 1999999995.0, 2000000000.0])

    def test_again(self):
        self.assert_exported(self.make_run("a", [train_record(1), train_record(2, loss=9.0)]))
        (first,) = (self.out / "a").iterdir()
        self.assert_exported(self.make_run("a", [train_record(1), train_record(2), train_record(3)]))
        self.assert_curve(self.curves("a")["train/loss"], {1: 4.0, 2: 2.0, 3: 4.0 / 3})
        self.assertFalse(first.exists())  # under the same name a TensorBoard that is running would read on in the old file

    def test_files_of_others_stay(self):
        other = self.out / "a" / "events.out.tfevents.1.somewhere"
        other.parent.mkdir(parents=True)
        other.write_bytes(b"theirs")
        run = self.make_run("a", [train_record(1)])
        self.assert_exported(run)
        self.assert_exported(run)
        self.assertEqual(other.read_bytes(), b"theirs")
        self.assertEqual(len(list(other.parent.iterdir())), 2)

    def test_several_runs(self):
        self.assert_exported(self.make_run("a", [train_record(1)]), self.make_run("b", [train_record(1, loss=7.0)]))
        self.assertEqual(self.curves("a")["train/loss"], {1: 4.0})
        self.assertEqual(self.curves("b")["train/loss"], {1: 7.0})

    def test_a_line_that_is_being_written(self):
        self.assert_exported(self.make_run("a", [train_record(1)], tail='{"kind": "tra'))
        self.assertEqual(self.curves("a")["train/loss"], {1: 4.0})

    def test_bad_input(self):
        good = self.make_run("a", [train_record(1)])
        self.assert_refused("metrics.jsonl: No such file", self.folder / "nowhere")
        self.assert_refused("Not a directory; give", good / "metrics.jsonl")
        self.assert_refused("holds no metrics yet", self.make_run("empty", []))
        self.assert_refused("metrics.jsonl:2: not a record of a run", self.make_run("text", [train_record(1), 5, train_record(2)]))
        self.assert_refused("metrics.jsonl:1: not a record of kind task", self.make_run("task", [{"kind": "task", "step": 1}]))
        self.assert_refused("a: the name of several runs", good, self.make_run("elsewhere/a", [train_record(1)]))
        self.out.write_text("a file")
        self.assert_refused("cannot be written", good)


if __name__ == "__main__":
    unittest.main()
