#!/usr/bin/env python3
"""Tests of scripts/follow.py: what it reads, TensorBoard, Prometheus, W&B and MLflow. What needs a package that is missing is
skipped, but not in CI."""
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), *(str(ROOT / "tests" / folder) for folder in ("commands", "support"))]
from followed_run import (SCRIPTS, FollowTest, RunFile, attention_record, moments_record, quantization_record,  # noqa: E402
                          start_record, train_record, warning_record)
from needed_tools import skip_without  # noqa: E402
from parka_runs import PROGRAM, RunFolder, tiny_config  # noqa: E402

import run_tail  # noqa: E402  in scripts/
from sinks import trackers  # noqa: E402


def has_package(name):
    return importlib.util.find_spec(name) is not None


class Tail(FollowTest):
    def setUp(self):
        super().setUp()
        self.run_file = self.make_run("a", [start_record(), train_record(1)])
        self.tail = run_tail.Tail(str(self.run_file.path))
        self.addCleanup(self.tail.close)

    def poll(self):
        """(anew, [(kind, step), ...])"""
        batch = self.tail.poll()
        self.assertFalse(batch.more)
        return batch.anew, [(record["kind"], record["step"]) for record in batch.records]

    def test_a_growing_file(self):
        self.assertEqual(self.poll(), (True, [("start", 0), ("train", 1)]))
        self.assertEqual(self.poll(), (False, []))
        self.run_file.add(train_record(2))
        self.assertEqual(self.poll(), (False, [("train", 2)]))

    def test_a_line_that_is_being_written(self):
        line = json.dumps(train_record(2)) + "\n"
        self.run_file.write(line[:20])
        self.assertEqual(self.poll(), (True, [("start", 0), ("train", 1)]))
        self.run_file.write(line[20:-1])
        self.assertEqual(self.poll(), (False, []))
        self.run_file.write("\n")
        self.assertEqual(self.poll(), (False, [("train", 2)]))

    def test_a_resume_brings_all_records_again(self):
        self.run_file.add(train_record(2), train_record(3))
        self.poll()
        self.run_file.add(train_record(4))
        self.run_file.resume(2)
        kept = [("start", 0), ("train", 1), ("train", 2), ("start", 2)]
        self.assertEqual(self.poll(), (True, kept))
        self.run_file.add(train_record(3))
        self.assertEqual(self.poll(), (False, [("train", 3)]))

    def test_two_resumes_between_two_polls(self):
        self.run_file.add(train_record(2), train_record(3))
        self.poll()
        for _ in range(2):
            self.run_file.resume(2)
        self.run_file.add(train_record(3))
        self.assertEqual(self.poll()[0], True)
        self.assertEqual(self.poll(), (False, []))

    def test_a_file_that_was_made_shorter_in_place(self):
        self.run_file.add(train_record(2))
        self.poll()
        self.run_file.path.write_text(json.dumps(start_record()) + "\n")
        self.assertEqual(self.poll(), (True, [("start", 0)]))

    def test_a_run_begun_anew(self):
        self.poll()
        self.run_file.path.rename(self.run_file.path.with_suffix(".jsonl.1"))
        self.assertEqual(self.poll(), (False, []))
        RunFile(self.run_file.folder, [start_record(), train_record(1)])
        self.assertEqual(self.poll(), (True, [("start", 0), ("train", 1)]))

    def test_a_file_that_is_moved_away_during_a_look_at_it(self):
        self.poll()
        self.run_file.resume(1)
        with mock.patch("builtins.open", side_effect=FileNotFoundError):
            self.assertEqual(self.poll(), (False, []))
        self.assertEqual(self.poll(), (True, [("start", 0), ("train", 1), ("start", 1)]))

    def test_a_file_that_was_rotated_away_goes_on_in_the_new_one(self):
        self.poll()
        self.run_file.add(train_record(2))
        self.run_file.path.rename(self.run_file.path.with_suffix(".jsonl.old"))
        line = json.dumps(train_record(3)) + "\n"
        new = RunFile(self.run_file.folder)
        self.assertEqual(self.poll(), (False, [("train", 2)]))
        new.write(line[:9])
        self.assertEqual(self.poll(), (False, []))
        new.write(line[9:])
        self.assertEqual(self.poll(), (False, [("train", 3)]))
        self.run_file.add(train_record(4))
        self.assertEqual(self.poll(), (False, [("train", 4)]))

    def test_a_rotated_file_begins_with_the_start_once_more(self):
        self.poll()
        self.run_file.path.rename(self.run_file.path.with_suffix(".jsonl.old"))
        new = RunFile(self.run_file.folder)
        new.add(start_record())
        self.assertEqual(self.poll(), (False, []))
        new.add(train_record(2))
        self.assertEqual(self.poll(), (False, [("train", 2)]))
        new.add(train_record(3))
        self.assertEqual(self.poll(), (False, [("train", 3)]))

    def rotate(self, *records):
        """Moves the file away; the run goes on in a new one, which begins with the newest record of a start."""
        starts = [json.loads(line) for line in self.run_file.path.read_text().splitlines() if '"start"' in line]
        self.run_file.path.rename(self.run_file.path.with_suffix(f".jsonl.{len(list(self.run_file.folder.iterdir()))}"))
        self.run_file.path.write_text(json.dumps(starts[-1]) + "\n")
        self.run_file.add(*records)

    def poll_all(self):
        """The same as poll(), with all that is there."""
        batches = [self.tail.poll()]
        while batches[-1].more:
            batches.append(self.tail.poll())
        self.assertFalse(any(batch.anew for batch in batches[1:]))
        return batches[0].anew, [(record["kind"], record["step"]) for batch in batches for record in batch.records]

    def steps(self, first, last):
        return [("train", step) for step in range(first, last + 1)]

    def test_a_resume_after_the_file_was_rotated_away_keeps_the_earlier_records(self):
        self.run_file.add(*map(train_record, range(2, 21)))
        self.poll()
        self.rotate(*map(train_record, range(21, 37)))
        self.assertEqual(self.poll(), (False, self.steps(21, 36)))
        self.run_file.resume(30)
        self.run_file.add(train_record(31))
        for _ in range(2):  # and again when the file is replaced by one that is the same
            self.assertEqual(self.poll_all(), (True, [("start", 0), *self.steps(1, 30), ("start", 30), ("train", 31)]))
            os.replace(shutil.copy(self.run_file.path, self.folder / "copy"), self.run_file.path)
        self.poll_all()
        self.rotate(train_record(32))
        self.assertEqual(self.poll(), (False, self.steps(32, 32)))
        self.run_file.resume(32)
        self.assertEqual(self.poll_all(), (True, [("start", 0), *self.steps(1, 30), ("start", 30), *self.steps(31, 32), ("start", 32)]))

    def test_a_resume_from_before_the_rotation_removes_what_came_after_it(self):
        self.run_file.add(*map(train_record, range(2, 21)))
        self.poll()
        self.rotate(train_record(21))
        self.poll()
        self.run_file.resume(10)
        expected = [("start", 0), *self.steps(1, 10), ("start", 10)]
        self.assertEqual(self.poll_all(), (True, expected))
        self.run_file.add(train_record(11))
        self.assertEqual(self.poll(), (False, self.steps(11, 11)))

    def test_a_resume_whose_file_is_gone_keeps_the_earlier_records(self):
        self.run_file.add(*map(train_record, range(2, 37)))
        self.poll()
        self.run_file.path.rename(self.run_file.path.with_suffix(".jsonl.1"))
        self.run_file.add(start_record(30), train_record(31))
        with mock.patch.object(run_tail, "CHUNK", 500):
            self.assertEqual(self.poll_all(), (True, [("start", 0), *self.steps(1, 30), ("start", 30), ("train", 31)]))

    def test_a_run_begun_anew_after_the_file_was_rotated_away_is_another(self):
        self.run_file.add(train_record(2))
        self.poll()
        self.rotate(train_record(3))
        self.poll()
        self.run_file.path.rename(self.run_file.path.with_suffix(".jsonl.old"))
        self.run_file.add(start_record(), train_record(1))
        self.assertEqual(self.poll_all(), (True, [("start", 0), ("train", 1)]))

    def test_a_file_that_is_rotated_away_between_the_evaluations_of_a_step(self):
        def evaluation(name):
            return {"kind": "eval_set", "step": 2, "set": name, "loss": 2.0}

        self.run_file.add(train_record(2), evaluation("wiki"))
        self.poll()
        self.rotate(evaluation("code"), train_record(3))
        self.assertEqual(self.poll(), (False, [("eval_set", 2), ("train", 3)]))
        self.run_file.add(train_record(4))
        self.run_file.resume(3)
        self.assertEqual(self.poll_all(), (True, [("start", 0), *self.steps(1, 2), ("eval_set", 2), ("eval_set", 2), *self.steps(3, 3),
                                                  ("start", 3)]))

    def test_no_file_yet(self):
        tail = run_tail.Tail(str(self.folder / "later.jsonl"))
        self.assertEqual((tail.poll().anew, tail.poll().records), (False, []))

    def test_a_large_file_comes_in_parts(self):
        self.run_file.add(*map(train_record, range(2, 40)))
        with mock.patch.object(run_tail, "CHUNK", 500):
            batches = [self.tail.poll()]
            while batches[-1].more:
                batches.append(self.tail.poll())
        self.assertGreater(len(batches), 5)
        self.assertEqual([batch.anew for batch in batches], [True] + [False] * (len(batches) - 1))
        steps = [record["step"] for batch in batches for record in batch.records]
        self.assertEqual(steps, list(range(40)))

    def test_lines_that_are_no_records(self):
        self.run_file.write('{"kind": "tra{"kind": "train", "step": 2}\n{"kind": "task", "step": 2}\n')
        self.run_file.add(train_record(3))
        self.assertEqual(self.poll(), (True, [("start", 0), ("train", 1), ("train", 3)]))
        self.assertEqual(self.tail.unreadable, 2)


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
        (self.wall_time,), self.step = struct.unpack("<d", fields[1]), fields[2]
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

    def test_the_checksum_is_crc_32c(self):
        from sinks import event_file

        self.assertEqual(crc32c(b"123456789"), 0xE3069283)  # the check value of its definition
        for data in (b"", b"\0" * 32, bytes(range(256))):
            self.assertEqual(event_file.masked_crc32c(data), masked(data))

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
        self.export(self.make_run("a", [train_record(1), quantization_record(1), moments_record(1), attention_record(1)]))
        telemetry = {tag: curve[1] for tag, curve in self.curves().items() if tag.startswith("telemetry/")}
        expected = {"qkv.weight/error/median": 0.03, "qkv.weight/error/max": 0.05, "qkv.weight/amax/median": 2.0,
                    "qkv.weight/amax/max": 3.0, "qkv/exp_avg/k/median": 5.0, "qkv/exp_avg/amax/max": 2e-3,
                    "attention_backward/imbalance/median": 0.002, "attention_backward/imbalance/max": 0.03}
        self.assert_curve(telemetry, {f"telemetry/{tag}": value for tag, value in expected.items()})

    def test_a_step_that_was_not_finite(self):
        skipped = train_record(2, loss=None, grad_norm=None, applied=False, culprit="blocks.0.qkv")
        self.export(self.make_run("a", [train_record(1), skipped, train_record(3)]))
        curves = self.curves()
        self.assert_curve(curves["train/loss"], {1: 4.0, 3: 4.0 / 3})
        self.assertEqual(curves["train/applied"], {1: 1.0, 2: 0.0, 3: 1.0})

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


SAMPLE = re.compile(r'(?P<metric>[a-z_]+)\{(?P<labels>(?:[a-z_]+="(?:[^"\\\n]|\\[\\"n])*",?)*)\} (?P<value>NaN|-?[0-9][-+.0-9e]*)')


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
        labels = tuple(re.findall(r'([a-z_]+)="((?:[^"\\]|\\.)*)"', match["labels"]))
        assert (match["metric"], labels) not in samples, line
        samples[match["metric"], labels] = float(match["value"])
    return samples


class Prometheus(FollowTest):
    records = [start_record(), train_record(1), train_record(2, loss=None, applied=False), {"kind": "eval", "step": 2, "loss": 3.0},
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
                    ("parka_quantization_error", (name, ("tensor", "qkv.weight"))): 0.03, ("parka_warning", (name, ("about", "attention"))): 1}
        self.assertEqual({key: samples.get(key) for key in expected}, expected)
        self.assertTrue(math.isnan(samples["parka_loss", (name,)]))
        self.assertEqual([file.name for file in self.folder.iterdir() if file.name != "a"], ["a.prom"])

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
        warning = ("parka_warning", (("run", "a"), ("about", "attention")))
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
            self.assert_refused(f"--{name}: {name} is missing; run .venv/bin/python -m pip install {name}, ", run, f"--{name}", "x",
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
        self.assertRegex(failed.stderr, r"^(follow.py: warning: MLflow: history: out of reach; trying again later\n)+"
                         r"follow.py: error: MLflow: \d+ points were not taken; follow the run again to send them\n$")
        later = self.assert_followed(self.run_file, "--mlflow", "x", **self.environment("history", "history-once"))
        self.assertEqual(later.stderr, "follow.py: warning: MLflow: history: out of reach; trying again later\n")
        self.assertEqual(self.losses(), [(1, 4.0), (2, 2.0), (3, 4.0 / 3)])

    @skip_without(has_package("mlflow"), "mlflow")
    def test_an_address_that_is_none(self):
        self.assert_refused("MLflow: .*; is MLFLOW_TRACKING_URI right", self.run_file, "--once", "--mlflow", "x", code=4,
                            MLFLOW_TRACKING_URI="nowhere://x")


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
        self.assert_refused("--interval: must be above 0", good, "--interval", "0", "--prometheus", out)
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
            killed = self.train(config, "--drill-kill-in-save", "30:1")
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
