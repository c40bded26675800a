#!/usr/bin/env python3
"""Tests of scripts/run_tail.py: what is read of a metrics.jsonl that goes on, is replaced, moved away or damaged."""
import json
import os
import shutil
import unittest
from unittest import mock

from followed_run import FollowTest, RunFile, start_record, train_record

import run_tail  # in scripts/


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

    def test_a_file_that_was_copied_and_cut_goes_on(self):
        self.run_file.add(train_record(2))
        self.poll()
        start = self.run_file.path.read_text().splitlines(keepends=True)[0]
        for step in (3, 7):  # shorter at the next look, and longer already
            self.run_file.path.write_text(start)
            self.run_file.add(*map(train_record, range(step, 2 * step)))
            self.assertEqual(self.poll(), (False, self.steps(step, 2 * step - 1)))
            self.run_file.add(train_record(2 * step))
            self.assertEqual(self.poll(), (False, self.steps(2 * step, 2 * step)))
            self.assertEqual(self.tail.unreadable, 0)

    def test_a_file_that_another_run_has_overwritten(self):
        self.poll()
        self.run_file.path.write_text("")
        self.run_file.add(start_record(host="node4"), *map(train_record, range(1, 9)))
        self.assertEqual(self.poll(), (True, [("start", 0), *self.steps(1, 8)]))
        self.assertEqual(self.tail.unreadable, 0)

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


if __name__ == "__main__":
    unittest.main()
