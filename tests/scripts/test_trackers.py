#!/usr/bin/env python3
"""Tests of scripts/sinks/trackers.py: W&B and MLflow. What needs a package that is missing is skipped, but not in CI."""
import json
import os
import struct
import sys
import unittest
from pathlib import Path
from unittest import mock

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "support")]
from followed_run import FollowTest, has_package, start_record, train_record  # noqa: E402
from needed_tools import skip_without  # noqa: E402

import run_tail  # noqa: E402  in scripts/
from sinks import trackers  # noqa: E402


def records_of_wandb(path):
    """The records of a .wandb file: a header of 7 bytes, then LevelDB's log: blocks of 32 KiB with pieces of records."""
    data, record, at = path.read_bytes(), b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = struct.unpack("<HB", data[at + 4:at + 7])
        record += data[at + 7:at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last piece
            yield record
            record = b""


class FakeTracker(trackers.Tracker):
    title = "a tracker"

    def __init__(self, run):
        super().__init__(str(run), "a")
        self.events = []

    def start(self, identity):
        self.events.append("start")

    def last_sent(self, tag):
        return -1

    def send(self, step, time, points):
        self.events += [(step, value) for tag, value in points if tag == "train/loss"]

    def end(self):
        self.events.append("end")


class Trackers(FollowTest):
    """Without the packages: what is sent, and that it is sent once."""

    def setUp(self):
        super().setUp()
        self.tracker = FakeTracker(self.folder)

    def send(self, *records, anew=False):
        if anew:
            self.tracker.begin()
        self.tracker.add(records)

    def test_steps_that_a_resume_repeats_are_sent_once(self):
        start = start_record(time="2026-11-23T12:00:00+01:00")
        self.send(start, train_record(1), train_record(2), train_record(3), anew=True)
        self.send(start, train_record(1), start_record(1), train_record(2), anew=True)
        self.send(train_record(3), train_record(4))
        self.assertEqual(self.tracker.events, ["start", (1, 4.0), (2, 2.0), (3, 4.0 / 3), (4, 1.0)])

    def test_a_repeated_step_with_another_loss_is_warned_of_once(self):
        with mock.patch.object(trackers, "warn") as warn:
            self.send(start_record(), train_record(1), train_record(2), train_record(3), anew=True)
            self.send(start_record(), train_record(1), start_record(1), anew=True)
            warn.assert_not_called()
            self.send(train_record(2, loss=7.0), train_record(3, loss=7.0))
        warn.assert_called_once()
        self.assertIn("step 2 was repeated with another loss than a tracker was sent", warn.call_args[0][0])

    def test_a_run_begun_anew_is_another_run(self):
        self.send(start_record(time="2026-11-23T12:00:00+01:00"), train_record(1), anew=True)
        self.send(start_record(time="2026-11-23T13:00:00+01:00"), train_record(1, loss=5.0), anew=True)
        self.tracker.close()
        self.assertEqual(self.tracker.events, ["start", (1, 4.0), "end", "start", (1, 5.0), "end"])

    def test_a_run_whose_file_is_moved_away_between_two_resumes_is_the_same_run(self):
        run = self.make_run("a", [start_record(), *map(train_record, range(1, 6))])
        tail = run_tail.Tail(str(run.path))
        self.addCleanup(tail.close)

        def send_all():
            more = True
            while more:
                batch = tail.poll()
                self.send(*batch.records, anew=batch.anew)
                more = batch.more

        send_all()
        run.resume(3)
        run.add(train_record(4))
        send_all()
        start = run.path.read_text().splitlines()[-2]
        run.path.rename(run.path.with_suffix(".jsonl.1"))
        run.write(start + "\n")
        run.add(train_record(5), train_record(6))
        send_all()
        run.resume(5)
        run.add(train_record(6), train_record(7))
        send_all()
        self.assertEqual(self.tracker.events, ["start", *((step, 4.0 / step) for step in range(1, 8))])

    @skip_without(has_package("wandb"), "wandb")
    def test_wandb_offline(self):
        from wandb.proto.wandb_internal_pb2 import Record

        run = self.make_run("a", [start_record(), *map(train_record, range(1, 6))])
        (run.folder / "config.json").write_text('{"training": {"steps": 9}}')
        with self.following(run, "--wandb", "tests", "--prometheus", self.folder / "a.prom", WANDB_MODE="offline", WANDB_DIR=str(self.folder)):
            self.wait_for(lambda: (self.folder / "a.prom").exists())
            run.resume(3)
            run.add(*map(train_record, range(4, 8)))
        (file,) = self.folder.glob("wandb/offline-run-*/*.wandb")
        losses = []
        for record in map(Record.FromString, records_of_wandb(file)):
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            if "train/loss" in items:
                losses.append((items["_step"], items["train/loss"]))
        self.assertEqual(losses, [(step, 4.0 / step) for step in range(1, 8)])

    @skip_without(has_package("mlflow"), "mlflow")
    def test_mlflow(self):
        import mlflow

        uri = f"sqlite:///{self.folder}/mlflow.db"
        run = self.make_run("a", [start_record(), *map(train_record, range(1, 6)),
                                  {"kind": "eval_set", "set": "a=b", "step": 5, "loss": 3.0}])
        (run.folder / "config.json").write_text('{"training": {"steps": 9}, "data": {"train": ["a.npy"]}}')
        self.assert_followed(run, "--mlflow", "tests", MLFLOW_TRACKING_URI=uri)
        run.resume(3)
        run.add(*map(train_record, range(4, 8)))
        self.assert_followed(run, "--mlflow", "tests", MLFLOW_TRACKING_URI=uri)
        client = mlflow.MlflowClient(uri)
        (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
        self.assertEqual((found.info.run_name, found.info.status), ("a", "FINISHED"))
        self.assertEqual(found.data.params, {"training.steps": "9", "data.train": '["a.npy"]'})
        losses = [(metric.step, metric.value) for metric in client.get_metric_history(found.info.run_id, "train/loss")]
        self.assertEqual(sorted(losses), [(step, 4.0 / step) for step in range(1, 8)])
        (of_set,) = client.get_metric_history(found.info.run_id, "eval_sets/a_b/loss")
        self.assertEqual((of_set.step, of_set.timestamp), (5, 1795431606000))

    def test_a_package_that_is_missing(self):
        run = self.make_run("a", [train_record(1)])
        for name in ("wandb", "mlflow"):
            (self.folder / f"{name}.py").write_text("raise ImportError")
            self.assert_refused(f"--{name}: .*pip install {name}", run, f"--{name}", "x",
                                PYTHONPATH=str(self.folder))


# Instead of the package: a server whose points lie in a file, and which has the failures that FAILS names.
MADE_UP_MLFLOW = """
import collections, json, os, sys, types
class MlflowException(Exception):
    pass
entities = types.SimpleNamespace(Metric=collections.namedtuple("Metric", "key value timestamp step"),
                                 Param=collections.namedtuple("Param", "key value"))
exceptions = types.SimpleNamespace(MlflowException=MlflowException)
points = os.environ["POINTS"]
fails = os.environ["FAILS"].split()
def answer(request):
    if request in fails:
        if request + "-once" in fails:
            fails.remove(request)
        raise MlflowException(request + ": out of reach\\nmore")
class MlflowClient:
    def __init__(self):
        answer("open")
    def get_experiment_by_name(self, name):
        return types.SimpleNamespace(experiment_id="0")
    def search_runs(self, experiments, filter_string):
        run = types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))
        return [run] if os.path.exists(points) else []
    def update_run(self, run, status):
        pass
    def create_run(self, experiment, run_name, tags):
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id="1"))
    def get_metric_history(self, run, key):
        answer("history")
        with open(points) as file:
            metrics = [entities.Metric(*json.loads(line)) for line in file]
        return [metric for metric in metrics if metric.key == key]
    def log_batch(self, run, metrics=(), params=()):
        with open(points, "a") as file:
            file.writelines(json.dumps(metric) + "\\n" for metric in metrics)
    def set_terminated(self, run, status):
        answer("end")
"""


class MLflowOutOfReach(FollowTest):
    def setUp(self):
        super().setUp()
        (self.folder / "mlflow.py").write_text(MADE_UP_MLFLOW)
        self.points = self.folder / "points"
        self.run_file = self.make_run("a", [start_record(), train_record(1), train_record(2)])

    def environment(self, *fails):
        return {"PYTHONPATH": str(self.folder), "POINTS": str(self.points), "FAILS": " ".join(fails)}

    def losses(self):
        points = map(json.loads, self.points.read_text().splitlines())
        return [(step, value) for key, value, _, step in points if key == "train/loss"]

    def test_a_server_that_cannot_be_opened(self):
        self.assert_refused("MLflow: open: out of reach; is MLFLOW_TRACKING_URI right", self.run_file, "--once", "--mlflow", "x", code=4,
                            **self.environment("open"))
        self.assertFalse(self.points.exists())

    def test_a_server_that_is_away_at_the_end(self):
        self.assert_refused("MLflow: end: out of reach; all points were taken, but the run is not marked as finished", self.run_file, "--once",
                            "--mlflow", "x", code=4, **self.environment("end"))
        self.assertEqual(self.losses(), [(1, 4.0), (2, 2.0)])

    def test_what_a_server_has_cannot_be_asked(self):
        self.assert_followed(self.run_file, "--mlflow", "x", **self.environment())
        self.run_file.add(train_record(3))
        failed = self.follow(self.run_file, "--once", "--mlflow", "x", **self.environment("history"))
        self.assertEqual(failed.returncode, 4)
        self.assertRegex(failed.stderr, r"^(follow.py: warning: MLflow: history: out of reach.*\n)+follow.py: error: MLflow: \d+ points .*\n$")
        later = self.assert_followed(self.run_file, "--mlflow", "x", **self.environment("history", "history-once"))
        self.assertRegex(later.stderr, "^follow.py: warning: MLflow: history: out of reach.*\n$")
        self.assertEqual(self.losses(), [(1, 4.0), (2, 2.0), (3, 4.0 / 3)])

    @skip_without(has_package("mlflow"), "mlflow")
    def test_an_address_that_is_none(self):
        self.assert_refused("MLflow: .*; is MLFLOW_TRACKING_URI right", self.run_file, "--once", "--mlflow", "x", code=4,
                            MLFLOW_TRACKING_URI="nowhere://x")


if __name__ == "__main__":
    unittest.main()
