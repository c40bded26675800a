#!/usr/bin/env python3
"""Tests of scripts/follow.py: TensorBoard, Prometheus, options and a real run. test_run_tail.py has what it reads, test_trackers.py
W&B and MLflow. What needs a package that is missing is skipped, but not in CI."""
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), *(str(ROOT / "tests" / folder) for folder in ("commands", "support"))]
from followed_run import (SCRIPTS, FollowTest, attention_record, has_package, moments_record, quantization_record,  # noqa: E402
                          routing_record, start_record, train_record, updates_record, warning_record)
from needed_tools import skip_without  # noqa: E402
from parka_runs import RunFolder, killed_in_save, tiny_config  # noqa: E402

import follow  # noqa: E402
import run_tail  # noqa: E402


def crc32c(data):
    """Bit by bit, as RFC 3720 defines it."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17 & 0xFFFFFFFF) + 0xA282EAD8) & 0xFFFFFFFF


def fields_of(message):
    """(number, value) of the fields of a message in protobuf's encoding: integers, or bytes."""
    at, fields = 0, []

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte, at = message[at], at + 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        if key & 7 == 0:
            value = varint()
        else:
            size = {1: 8, 2: None, 5: 4}[key & 7]
            size = varint() if size is None else size
            value, at = message[at:at + size], at + size
        fields.append((key >> 3, value))
    assert at == len(message)
    return fields


class Event:
    """wall_time, step, version, restarted, points: {tag: value}"""

    def __init__(self, message):
        fields = dict(fields_of(message))
        (self.wall_time,), self.step = struct.unpack("<d", fields.get(1, bytes(8))), fields.get(2, 0)
        self.version, self.restarted = fields.get(3), 7 in fields and dict(fields_of(fields[7])) == {1: 1}
        values = [dict(fields_of(value)) for number, value in fields_of(fields.get(5, b"")) if number == 1]
        self.points = {value[1].decode(): struct.unpack("<f", value[2])[0] for value in values}
        assert len(self.points) == len(values)


def events_of(path, grows=False):
    """The events of a file, whose frames are length, its checksum, data, its checksum. If it grows the last may be cut."""
    data, events = path.read_bytes(), []
    while data:
        if grows and (len(data) < 12 or len(data) < 16 + struct.unpack("<Q", data[:8])[0]):
            break
        (length,), (checksum,) = struct.unpack("<Q", data[:8]), struct.unpack("<I", data[8:12])
        body, tail = data[12:12 + length], data[12 + length:16 + length]
        assert (checksum, struct.unpack("<I", tail)[0]) == (masked(data[:8]), masked(body))
        events.append(Event(body))
        data = data[16 + length:]
    return events


def events_that_grow(folder):
    """Of the event file of a folder, while it is written and replaced; none where there is not one."""
    files = list(folder.glob("*tfevents*"))
    try:
        return events_of(files[0], grows=True) if len(files) == 1 else []
    except FileNotFoundError:
        return []


class TensorBoard(FollowTest):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "tensorboard"

    def export(self, run):
        self.assert_followed(run, "--tensorboard", self.out)

    def files(self, name="a"):
        return list((self.out / name).glob("*tfevents*"))

    def events(self, name="a"):
        (file,) = self.files(name)
        return events_of(file)

    def curves(self, name="a"):
        """{tag: {step: value}}"""
        curves = {}
        for event in self.events(name):
            for tag, value in event.points.items():
                curve = curves.setdefault(tag, {})
                self.assertNotIn(event.step, curve)
                curve[event.step] = value
        return curves

    def assert_curve(self, curve, expected):
        self.assertEqual(list(curve), list(expected))
        for step, value in expected.items():
            self.assertTrue(math.isclose(curve[step], value, rel_tol=1e-6), (step, curve[step], value))

    def test_training(self):
        self.export(self.make_run("a", [start_record(), *(train_record(step, source_epochs=[0.5, 2.0 * step]) for step in (1, 2, 300))]))
        curves = self.curves()
        expected = {"loss": {1: 4.0, 2: 2.0, 300: 4.0 / 300}, "grad_norm": {1: 0.5, 2: 0.5, 300: 0.5},
                    "lr": dict.fromkeys((1, 2, 300), 1e-3), "tokens_per_second": dict.fromkeys((1, 2, 300), 100.0),
                    "tokens": {1: 64, 2: 128, 300: 19200}, "source_epochs/1": {1: 2.0, 2: 4.0, 300: 600.0}}
        for key, curve in expected.items():
            with self.subTest(key):
                self.assert_curve(curves[f"train/{key}"], curve)
        self.assertNotIn("train/step", curves)

    def test_evaluations(self):
        task = {"kind": "task", "step": 2, "task": "copa", "metric": "acc", "score": 0.75, "acc": 0.5, "documents": 4}
        records = [{"kind": "eval", "step": 0, "loss": 6.0, "num_targets": 64}, train_record(1), train_record(2),
                   {"kind": "eval", "step": 2, "loss": 3.0, "num_targets": 64},
                   {"kind": "eval_set", "step": 2, "set": "wiki", "loss": 2.5, "num_targets": 64}, task]
        self.export(self.make_run("a", records))
        curves = self.curves()
        self.assert_curve(curves["eval/loss"], {0: 6.0, 2: 3.0})
        self.assert_curve(curves["eval_sets/wiki/loss"], {2: 2.5})
        self.assert_curve(curves["tasks/copa/score"], {2: 0.75})
        self.assert_curve(curves["tasks/copa/acc"], {2: 0.5})
        self.assertNotIn("tasks/copa/metric", curves)

    def test_telemetry(self):
        self.export(self.make_run("a", [train_record(1), quantization_record(1), moments_record(1), attention_record(1),
                                         routing_record(1), updates_record(1)]))
        telemetry = {tag: curve[1] for tag, curve in self.curves().items() if tag.startswith("telemetry/")}
        expected = {"qkv.weight/error/median": 0.03, "qkv.weight/error/max": 0.05, "qkv.weight/amax/median": 2.0,
                    "qkv.weight/amax/max": 3.0, "qkv/exp_avg/k/median": 5.0, "qkv/exp_avg/amax/max": 2e-3,
                    "attention_backward/imbalance/median": 0.002, "attention_backward/imbalance/max": 0.03,
                    "routing/expert_load/median": 1.5, "routing/expert_load/max": 2.0,
                    "qkv/update/rms/median": 0.2, "qkv/update/rms/max": 0.2,
                    "qkv/update/singular_value/median": 1.0, "qkv/update/singular_value/max": 1.1}
        self.assert_curve(telemetry, {f"telemetry/{tag}": value for tag, value in expected.items()})

    def test_a_step_that_was_not_finite(self):
        skipped = train_record(2, loss=None, grad_norm=None, applied=False, culprit="blocks.0.qkv")
        self.export(self.make_run("a", [train_record(1), skipped, train_record(3)]))
        curves = self.curves()
        self.assert_curve(curves["train/loss"], {1: 4.0, 3: 4.0 / 3})
        self.assertEqual(curves["train/applied"], {1: 1.0, 2: 0.0, 3: 1.0})

    def test_what_is_too_large_for_fp32_is_infinite(self):
        """Also whole numbers, and those that are too large for a double."""
        losses = (1e39, 10**39, 10**400, -1e39, -10**400, 3e38, 2.0)
        self.export(self.make_run("a", [train_record(step, loss=loss) for step, loss in enumerate(losses, 1)]))
        self.assert_curve(self.curves()["train/loss"], dict(enumerate([math.inf] * 3 + [-math.inf] * 2 + [3e38, 2.0], 1)))

    def test_wall_time_is_that_of_the_record(self):
        self.export(self.make_run("a", [start_record(), train_record(1), train_record(2)]))
        version, restarted, *points = self.events()
        self.assertEqual((version.version, version.restarted), (b"brain.Event:2", False))
        self.assertTrue(restarted.restarted)
        begin = 1795431600.0  # 2026-11-23 12:00 in a zone that is an hour before UTC
        self.assertEqual([event.wall_time for event in (version, restarted, *points)], [begin, begin, begin + 1, begin + 2])

    def test_records_of_older_versions_have_no_time(self):
        run = self.make_run("a")
        run.write("".join(json.dumps(train_record(step)) + "\n" for step in (1, 2, 3)))
        self.export(run)
        self.assertEqual([event.wall_time for event in self.events() if event.points], [2.0, 4.0, 6.0])

    def test_again(self):
        self.export(self.make_run("a", [train_record(1), train_record(2, loss=9.0)]))
        (first,) = self.files()
        self.export(self.make_run("a", [train_record(1), train_record(2), train_record(3)]))
        self.assert_curve(self.curves()["train/loss"], {1: 4.0, 2: 2.0, 3: 4.0 / 3})
        self.assertFalse(first.exists())  # under the same name a TensorBoard that is running would read on in the old file

    def test_files_of_others_stay(self):
        other = self.out / "a" / "events.out.tfevents.1.somewhere"
        other.parent.mkdir(parents=True)
        other.write_bytes(b"theirs")
        run = self.make_run("a", [train_record(1)])
        self.export(run)
        self.export(run)
        self.assertEqual(other.read_bytes(), b"theirs")
        self.assertEqual(len(self.files()), 2)

    def test_a_folder_of_another_run_is_refused(self):
        first, second = (self.make_run(f"{folder}/a", [train_record(1, loss=loss)]) for folder, loss in (("x", 2.0), ("y", 3.0)))
        self.export(first)
        self.assert_refused("--tensorboard: .*/tensorboard/a is of the run .*/x/a; give another --name or another DIR; if that run was moved "
                            "to .*/y/a, remove .*/a/run.parka", second, "--once", "--tensorboard", self.out)
        self.assert_curve(self.curves()["train/loss"], {1: 2.0})
        self.assert_followed(second, "--tensorboard", self.out, "--name", "b")
        self.assert_curve(self.curves("b")["train/loss"], {1: 3.0})
        link = self.folder / "link"
        link.symlink_to(first.folder)
        self.assert_followed(link, "--tensorboard", self.out, "--name", "a")
        (self.out / "a/run.parka").unlink()  # as older versions left it
        self.export(second)
        self.assert_curve(self.curves()["train/loss"], {1: 3.0})

    def test_a_run_that_is_resumed_while_it_is_followed(self):
        run = self.make_run("a", [start_record(), *map(train_record, range(1, 8))])

        def shows(losses):
            return [event.points.get("train/loss") for event in events_that_grow(self.out / "a") if event.points] == losses

        with self.following(run, "--tensorboard", self.out):
            self.wait_for(lambda: shows([struct.unpack("<f", struct.pack("<f", 4.0 / step))[0] for step in range(1, 8)]))
            run.resume(4)
            run.add(*(train_record(step, loss=0.5) for step in range(5, 9)))
            self.wait_for(lambda: shows([struct.unpack("<f", struct.pack("<f", 4.0 / step))[0] for step in range(1, 5)] + [0.5] * 4))
            run.add(train_record(9, loss=0.25))
        self.assert_curve(self.curves()["train/loss"], {1: 4.0, 2: 2.0, 3: 4.0 / 3, 4: 1.0, 5: 0.5, 6: 0.5, 7: 0.5, 8: 0.5, 9: 0.25})

    def test_two_that_write_one_file_are_refused(self):
        run = self.make_run("a", [train_record(1)])
        with self.following(run, "--tensorboard", self.out):
            self.wait_for(lambda: len(self.files()) == 1)
            self.assert_refused("--tensorboard: another .* writes .*/tensorboard/a; end that one, or give another --name or another "
                                "DIR", run, "--once", "--tensorboard", self.out)
            self.assert_followed(run, "--tensorboard", self.out, "--name", "b")
            run.add(train_record(2))
            self.wait_for(lambda: [event.step for event in events_that_grow(self.out / "a") if event.points] == [1, 2])
        self.export(run)

    def test_a_file_that_is_removed_while_it_is_written_is_told(self):
        run = self.make_run("a", [train_record(1)])
        with self.assertRaises(AssertionError) as ended, self.following(run, "--tensorboard", self.out) as process:
            self.wait_for(lambda: len(self.files()) == 1)
            shutil.rmtree(self.out)
            run.add(train_record(2))
            self.assertEqual(process.wait(60), 4)
        self.assertIn("a: the file was removed while it was written; start again; nothing more is written", str(ended.exception))

    def test_a_run_whose_file_is_moved_away_before_it_is_resumed(self):
        run = self.make_run("a", [start_record(), *map(train_record, range(1, 21))])

        def shows(*steps):
            return [event.step for event in events_that_grow(self.out / "a") if event.points] == list(range(*steps))

        with self.following(run, "--tensorboard", self.out):
            self.wait_for(lambda: shows(1, 21))
            start = run.path.read_text().split("\n", 1)[0]
            run.path.rename(run.path.with_suffix(".jsonl.1"))
            run.write(start + "\n")
            run.add(*map(train_record, range(21, 37)))
            self.wait_for(lambda: shows(1, 37))
            run.resume(30)
            run.add(train_record(31))
            self.wait_for(lambda: shows(1, 32))
        self.assert_curve(self.curves()["train/loss"], {step: 4.0 / step for step in range(1, 32)})

    @skip_without(has_package("tensorboard"), "tensorboard")
    def test_tensorboard_reads_it(self):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        self.export(self.make_run("a", [start_record(), *map(train_record, range(1, 6)), {"kind": "eval", "step": 5, "loss": 2.5}]))
        accumulator = EventAccumulator(str(self.out / "a")).Reload()
        self.assertIn("eval/loss", accumulator.Tags()["scalars"])
        self.assertEqual([(point.step, round(point.value, 4)) for point in accumulator.Scalars("train/loss")],
                         [(step, round(4.0 / step, 4)) for step in range(1, 6)])


SAMPLE = re.compile(r'(?P<metric>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (?P<value>NaN|[+-]Inf|-?[0-9][-+.0-9e]*)')


def samples_of(text):
    """{(metric, labels): value} of a Prometheus text file, by the rules of its format: HELP and TYPE before the samples of a
    metric, once, and no sample twice."""
    samples, described = {}, []
    assert text.endswith("\n")
    for line in text[:-1].split("\n"):
        if line.startswith("# "):
            _, keyword, metric, rest = line.split(" ", 3)
            assert keyword in ("HELP", "TYPE") and rest and (keyword, metric) not in described
            assert keyword == "HELP" or rest == "gauge"
            described.append((keyword, metric))
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        assert described[-2:] == [("HELP", match["metric"]), ("TYPE", match["metric"])], line
        labels = tuple(sorted(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match["labels"])))
        assert (match["metric"], labels) not in samples, line
        samples[match["metric"], labels] = float(match["value"])
    return samples


class Prometheus(FollowTest):
    records = [start_record(), train_record(1), train_record(2, loss=None, applied=False, entropy=1.5), {"kind": "eval", "step": 2, "loss": 3.0},
               {"kind": "eval_set", "step": 2, "set": 'a"b\\c', "loss": 2.5}, {"kind": "eval_set", "step": 2, "set": "wiki", "loss": 2.0},
               {"kind": "task", "step": 2, "task": "copa", "metric": "acc", "score": 0.75}, quantization_record(2),
               warning_record(2, raised=False), warning_record(2)]

    def setUp(self):
        super().setUp()
        self.out = self.folder / "a.prom"

    def samples(self):
        return samples_of(self.out.read_text())

    def test_a_text_file(self):
        run = self.make_run("a", self.records)
        self.assert_followed(run, "--prometheus", self.out)
        samples = self.samples()
        name = ("run", "a")
        info = (name, ("host", "node3"), ("device", "NVIDIA H200"), ("ranks", "8"), ("version", "0.2.0"), ("commit", "0123456789ab"))
        expected = {("parka_info", info): 1, ("parka_step", (name,)): 2, ("parka_tokens", (name,)): 128, ("parka_starts", (name,)): 1,
                    ("parka_skipped_steps", (name,)): 1, ("parka_goodput_ratio", (name,)): 0.5, ("parka_learning_rate", (name,)): 1e-3,
                    ("parka_start_time_seconds", (name,)): 1795431600, ("parka_last_record_time_seconds", (name,)): 1795431609,
                    ("parka_held_out_loss", (name,)): 3, ("parka_eval_set_loss", (name, ("set", r"a\"b\\c"))): 2.5,
                    ("parka_eval_set_loss", (name, ("set", "wiki"))): 2, ("parka_task_score", (name, ("task", "copa"), ("metric", "acc"))): 0.75,
                    ("parka_quantization_error", (name, ("tensor", "qkv.weight"))): 0.03, ("parka_warning", (name, ("about", "attention"))): 1,
                    ("parka_scalar", (name, ("name", "entropy"))): 1.5}
        expected = {(metric, tuple(sorted(labels))): value for (metric, labels), value in expected.items()}
        self.assertEqual({key: samples.get(key) for key in expected}, expected)
        self.assertTrue(math.isnan(samples["parka_loss", (name,)]))
        self.assertEqual([file.name for file in self.folder.iterdir() if file.name != "a"], ["a.prom"])

    def test_what_is_too_large_for_a_double_is_infinite(self):
        for loss, expected in ((10**400, math.inf), (-10**400, -math.inf), (1e39, 1e39), (10**39, 1e39)):
            self.assert_followed(self.make_run("a", [train_record(1, loss=loss)]), "--prometheus", self.out)
            self.assertEqual(self.samples()["parka_loss", (("run", "a"),)], expected)

    def test_it_is_replaced_as_the_run_goes_on_and_is_resumed(self):
        run = self.make_run("a", [start_record(), train_record(1), train_record(2)])

        def is_at(step, starts):
            return self.out.exists() and [self.samples()[f"parka_{key}", (("run", "a"),)] for key in ("step", "starts")] == [step, starts]

        with self.following(run, "--prometheus", self.out):
            self.wait_for(lambda: is_at(2, 1))
            run.add(train_record(3))
            self.wait_for(lambda: is_at(3, 1))
            run.resume(1)
            self.wait_for(lambda: is_at(1, 2))

    def test_a_start_lifts_the_warnings_of_the_one_before(self):
        warning = ("parka_warning", (("about", "attention"), ("run", "a")))
        run = self.make_run("a", [start_record(), train_record(1), warning_record(1)])
        for records, raised in (((), 1), ((start_record(1), train_record(2)), 0), ((warning_record(2),), 1)):
            run.add(*records)
            self.assert_followed(run, "--prometheus", self.out)
            self.assertEqual(self.samples()[warning], raised)

    @skip_without(has_package("prometheus_client"), "prometheus_client")
    def test_prometheus_client_reads_it(self):
        from prometheus_client.parser import text_string_to_metric_families

        self.assert_followed(self.make_run("a", self.records), "--prometheus", self.out)
        families = {family.name: family for family in text_string_to_metric_families(self.out.read_text())}
        self.assertEqual(families["parka_eval_set_loss"].samples[0].labels, {"run": "a", "set": 'a"b\\c'})
        self.assertEqual(families["parka_step"].samples[0].value, 2)


class Options(FollowTest):
    def test_bad_input(self):
        good, out = self.make_run("a", [train_record(1)]), self.folder / "a.prom"
        prometheus = ("--prometheus", out, "--once")
        self.assert_refused("metrics.jsonl: is not there; give a run that has begun", self.folder / "nowhere", *prometheus)
        self.assert_refused("Not a directory; give a run folder", good.path, *prometheus)
        self.assert_refused("holds no metrics yet", self.make_run("empty"), *prometheus)
        self.assert_refused("metrics.jsonl: not a record of a run", self.make_run("text", tail="text\n"), *prometheus)
        self.assert_refused("nothing to do; give --tensorboard", good)
        self.assert_refused("--once: ends before", good, "--once", "--http", "0")
        self.assert_refused("a.txt: the node exporter reads files alone", good, "--prometheus", self.folder / "a.txt")
        for seconds in ("0", "-1", "nan", "inf"):
            self.assert_refused("--interval: ", good, f"--interval={seconds}", "--prometheus", out)
        self.assertFalse(out.exists())

    def test_what_cannot_be_written(self):
        run = self.make_run("a", [train_record(1)])
        self.assert_refused("nowhere/a.prom.*: No such file or directory", run, "--once", "--prometheus", self.folder / "nowhere/a.prom", code=4)
        (self.folder / "file").write_text("a file")
        self.assert_refused("file/a: Not a directory", run, "--once", "--tensorboard", self.folder / "file", code=4)

    def test_damaged_lines_are_warned_of_when_there_are_more(self):
        run = self.make_run("a", [start_record(), train_record(1)])
        run.write('{"kind": "tra\n')
        with self.following(run, "--prometheus", self.folder / "a.prom") as process:
            self.assertRegex(process.stderr.readline(), "^follow.py: warning: .*/a/metrics.jsonl: 1 damaged line left out so far\n$")
            run.add(train_record(2))
            run.write("{}\n")
            self.assertRegex(process.stderr.readline(), "^follow.py: warning: .*/a/metrics.jsonl: 2 damaged lines left out so far\n$")
            os.replace(shutil.copy(run.path, self.folder / "copy"), run.path)  # all is read again, which is no news
            run.add(train_record(3))
            self.wait_for(lambda: samples_of((self.folder / "a.prom").read_text())["parka_step", (("run", "a"),)] == 3)
            process.send_signal(signal.SIGTERM)
            self.assertEqual(process.stderr.read(), "")

    def test_records_of_other_types_are_left_out_and_counted(self):
        good = [start_record(), train_record(1, time="2026-01-01T00:00:00Z")]
        bad = [train_record(2, loss="x"), train_record(2, loss=[1]), train_record(2, time="x"), train_record(2, time=5), train_record(2, time=None),
               train_record(2, seconds="x"), train_record(2, seconds=10**400),
               train_record(2, seconds=-1.0), train_record(2, wall_seconds=None), train_record(2, kind=[]), train_record(2, kind={}),
               train_record(True), train_record(-2), train_record(2**63), train_record(2.5), train_record(2, goodput={}),
               {"kind": "eval", "step": 2, "loss": "x"}, {"kind": "eval_set", "step": 2, "set": {}, "loss": 1.0},
               {"kind": "eval_set", "step": 2, "set": "\ud800", "loss": 1.0}, {"kind": "task", "step": 2, "task": 1, "metric": "acc", "score": 1},
               {"kind": "task", "step": 2, "task": "a", "metric": [], "score": 1}, {"kind": "task", "step": 2, "task": "a", "metric": "acc", "score": "x"},
               *({"kind": "quantization", "step": 2, "tensors": tensors} for tensors in (5, [], {"a": 5}, {"a": {}}, {"a": {"error": 5}}, {"a": {"error": ["x"]}})),
               *({"kind": "moments", "step": 2, "parameters": each} for each in (5, {"a": 5}, {"a": {"b": {"k": {"median": None}}}})),
               *({"kind": "updates", "step": 2, "parameters": each} for each in (5, {"a": 5}, {"a": {"rms": None}}, {"a": {"rms": [5]}}, {"a": {"rms": [["x"]]}})),
               *({"kind": kind, "step": 2, "blocks": blocks} for kind in ("attention", "routing") for blocks in (None, 5, {"imbalance": None}, {"imbalance": [[]]})),
               {"kind": "warning", "step": 2, "about": {}, "raised": True}, {"kind": "warning", "step": 2, "about": "a", "raised": "x"},
               start_record(2, host=5), start_record(2, ranks=[]), start_record(2, earlier_seconds="x"), [2], 5, None]
        lines = ["".join(f"{json.dumps(record)}\n" for record in records) for records in (good[:1], bad, [*good[1:], train_record(3)])]
        run = self.make_run("a", tail=lines[0] + lines[1] + "[" * 5000 + "\n" + lines[2])
        out = self.folder / "a.prom"
        result = subprocess.run([sys.executable, SCRIPTS / "follow.py", run.folder, "--once", "--tensorboard", self.folder / "boards", "--prometheus", out],
                                capture_output=True, text=True, timeout=60)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, rf"\Afollow.py: warning: [^\n]*metrics.jsonl: {len(bad) + 1} damaged lines left out so far\n\Z")
        self.assertEqual(samples_of(out.read_text())["parka_step", (("run", "a"),)], 3)
        (file,) = (self.folder / "boards/a").glob("*tfevents*")
        self.assertEqual([event.step for event in events_of(file) if event.points], [1, 3])
        # One of them before all others is no reason to think that it is no run.
        first = self.make_run("b", tail=json.dumps(bad[0]) + "\n" + lines[2])
        self.assert_followed(first, "--prometheus", out)
        self.assertEqual(samples_of(out.read_text())["parka_step", (("run", "b"),)], 3)

    def test_what_was_not_finite_is_no_number(self):
        run = self.make_run("a", tail='{"kind": "train", "step": 1, "loss": NaN, "grad_norm": Infinity, "lr": 0.5}\n')
        self.assert_followed(run, "--prometheus", self.folder / "a.prom")
        samples = samples_of((self.folder / "a.prom").read_text())
        self.assertEqual(samples["parka_learning_rate", (("run", "a"),)], 0.5)
        self.assertTrue(math.isnan(samples["parka_loss", (("run", "a"),)]))

    def test_a_folder_that_is_not_there_is_told_once(self):
        tail, sinks, stop = run_tail.Tail(str(self.folder / "nope/metrics.jsonl")), [], threading.Event()
        told = []
        with mock.patch.object(follow, "warn", told.append), mock.patch.object(follow, "PATIENCE", 0.05):
            thread = threading.Thread(target=follow.follow, args=([follow.Followed(tail, sinks)], False, stop, 0.01))
            thread.start()
            self.wait_for(lambda: told)
            time.sleep(0.1)
            stop.set()
            thread.join()
        self.assertEqual(len(told), 1)
        self.assertIn(f"{self.folder}/nope: there is no such folder", told[0])

    def test_what_is_no_file_is_not_read(self):
        (self.folder / "a").mkdir()
        for name in ("pipe", "device"):
            path = self.folder / "a/metrics.jsonl"
            os.mkfifo(path) if name == "pipe" else path.symlink_to("/dev/zero")
            self.assert_refused("metrics.jsonl: is no file", self.folder / "a", "--once", "--prometheus", self.folder / "a.prom")
            path.unlink()

    def test_a_run_that_has_not_begun_is_waited_for(self):
        out = self.folder / "a.prom"
        with self.following(self.folder / "a", "--prometheus", out, "--name", "other") as process:
            self.assertRegex(process.stderr.readline(), "waiting for the first record in .*/a/metrics.jsonl")
            self.make_run("a", [train_record(1)])
            self.wait_for(out.exists)
        self.assertIn(("parka_step", (("run", "other"),)), samples_of(out.read_text()))


class RealRun(RunFolder):
    def test_a_run_that_is_killed_and_resumed_while_it_is_followed(self):
        config = tiny_config(self.folder, steps=60)
        config["checkpoint"]["interval"] = 10
        out, run = Path(self.path("tensorboard")), Path(self.path("run"))
        follower = subprocess.Popen([sys.executable, SCRIPTS / "follow.py", run, "--tensorboard", out, "--interval", "0.02"],
                                    stderr=subprocess.DEVNULL)
        try:
            killed = self.train(config, env=killed_in_save(30))
            self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
            until = time.monotonic() + 30
            while time.monotonic() < until and all(event.step <= 20 for event in events_that_grow(out / "run")):
                time.sleep(0.05)
            self.assert_exit(self.train(config), 0)
        finally:
            follower.send_signal(signal.SIGTERM)
            follower.wait(timeout=30)
        self.assertEqual(follower.returncode, 0)
        (file,) = (out / "run").glob("*tfevents*")
        followed = [(event.step, event.points["train/loss"]) for event in events_of(file) if "train/loss" in event.points]
        with open(run / "metrics.jsonl", encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        self.assertEqual([record["step"] for record in records if record["kind"] == "start"], [0, 20])
        self.assertEqual(followed, [(record["step"], struct.unpack("<f", struct.pack("<f", record["loss"]))[0])
                                    for record in records if record["kind"] == "train"])
        self.assertEqual([step for step, _ in followed], list(range(1, 61)))


if __name__ == "__main__":
    unittest.main()
