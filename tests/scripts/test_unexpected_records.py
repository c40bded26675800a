#!/usr/bin/env python3
"""metrics.jsonl is anybody's file: the scripts that read it end with a documented code whatever types its records have, and still show
those that are sound. Exits with 77 (skipped) where a package is missing."""
import importlib.util
import json
import shutil
import sys
import unittest

from followed_run import train_record
from script_runs import ScriptTest, run_here

from refusals import error_lines, shown

if any(importlib.util.find_spec(package) is None for package in ("numpy", "matplotlib")):
    print("skipped: numpy or matplotlib is missing")
    sys.exit(77)


def record(kind, **more):
    return {"kind": kind, "step": 2, **more}


STRANGE = [
    *({**train_record(2), key: value} for key in ("loss", "lr", "tokens", "applied", "time", "wall_seconds", "source_epochs", "goodput")
      for value in ("x", None, [], {}, True)),
    {**train_record(2), "kind": []}, {**train_record(2), "kind": {}}, {**train_record(2), "kind": 7}, {**train_record(2), "step": True},
    {**train_record(2), "step": -1}, {**train_record(2), "step": 10**30}, {**train_record(2), "loss": 10**400}, {**train_record(2), "time": "2026-99-99"},
    {**train_record(2), "time": 5}, record("eval", loss="x"), record("eval", loss=[1]), record("eval_set", set={}, loss=1.0), record("eval_set", set=None, loss=1.0),
    record("eval_set", set="a", loss="x"), record("task", task=[], metric="acc", score=0.5), record("task", task="a", metric={}, score="x"),
    record("quantization", tensors=5), record("quantization", tensors={"a": 5}), record("quantization", tensors={"a": {"error": "x"}}),
    record("quantization", tensors={"a": {"error": ["x"]}}), record("quantization", tensors={"a": {"amax": [1.0]}}), record("quantization", tensors=[]),
    record("moments", parameters=5), record("moments", parameters={"a": {"b": {"k": 5}}}), record("moments", parameters={"a": {"b": {"k": {"median": "x"}}}}),
    record("attention", blocks=None), record("attention", blocks=[1]), record("attention", blocks={"imbalance": {}}),
    record("warning", about={}, raised=True), record("warning", about="a", raised="x"), record("warning", about=None, raised=None),
    record("start", host=[], ranks={}, device=5), record("start", earlier_seconds="x", time={}), record("start", commit=None, version=[1]),
]


def label(strange):
    """What makes a record strange, for the name of a test."""
    usual = {"step": 2, **train_record(2)}
    return ", ".join(f"{key}={value!r}"[:60] for key, value in strange.items() if key == "kind" or repr(value) != repr(usual.get(key)))


class Records(ScriptTest):
    def write_run(self, *strange):
        folder = self.folder / "run"
        folder.mkdir(exist_ok=True)
        sound = [{"kind": "start", "step": 0, "host": "node3"}, train_record(1)]
        lines = [json.dumps(one) for one in (*sound, *strange, train_record(3), train_record(4), record("eval", loss=3.0) | {"step": 4})]
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
        return folder

    def assert_said(self, result):
        self.assertNotIn("Traceback", result.stderr, shown(result))
        self.assertIn(result.returncode, (0, 2, 4), shown(result))
        if result.returncode != 0:
            self.assertEqual(len(error_lines(result)), 1, shown(result))

    def follow(self, run):
        """With all sinks that end, in the process of this test where it can be."""
        shutil.rmtree(self.folder / "board", ignore_errors=True)
        return run_here("follow", run, "--once", "--prometheus", self.folder / "a.prom", "--tensorboard", self.folder / "board")

    def test_followed(self):
        for strange in STRANGE:
            with self.subTest(label(strange)):
                result = self.follow(self.write_run(strange))
                self.assert_said(result)
                if result.returncode == 0:
                    self.assertIn("step", (self.folder / "a.prom").read_text(), "sound records are still shown")

    def test_compared(self):
        shutil.copytree(self.write_run(), self.folder / "other")
        for strange in STRANGE:
            with self.subTest(label(strange)):
                self.assert_said(run_here("compare", self.write_run(strange), self.folder / "other"))

    def test_plotted(self):
        """Pictures take long: of the values that stand for each other one."""
        for strange in (one for one in STRANGE if [] in one.values() or [1] in one.values() or one.get("loss") == 10**400):
            with self.subTest(label(strange)):
                self.assert_said(run_here("plot", self.write_run(strange), "--out", self.folder / "plot.png"))


if __name__ == "__main__":
    unittest.main()
