#!/usr/bin/env python3
"""Tests of the scripts that measure saves, resuming and the checks for silent data corruption: their arithmetic with a made-up
program, and short runs of the tiny model on the CPU."""
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "commands"))
from parka_runs import FLIPPING_PROGRAM, PROGRAM, RunFolder, faulty_files, tiny_config  # noqa: E402

FOLDER = ROOT / "scripts" / "research"
SCRIPTS = ("checkpoint_cost.py", "resume_time.py", "flip_drill.py", "sdc_cost.py")

# `config` is left to the real program; `train` writes what the script of a test says.
MADE_UP_PROGRAM = f"""#!{sys.executable}
import json, os, pathlib, sys
if "config" in sys.argv:
    os.execv({os.path.abspath(PROGRAM)!r}, ["parka", *sys.argv[1:]])
sets = dict(sys.argv[i + 1].split("=", 1) for i, word in enumerate(sys.argv) if word == "--set")
steps = int(sets["training.steps"])
folder = pathlib.Path(sets["checkpoint.folder"])
folder.mkdir(parents=True, exist_ok=True)

def write_metrics(seconds_of_step):
    records, now = [dict(kind="start", wall_seconds=0.5)], 1.0
    for step in range(1, steps + 1):
        now += seconds_of_step(step)
        records.append(dict(kind="train", step=step, seconds=seconds_of_step(step), wall_seconds=now, save_wait_seconds=0.25))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\\n" for record in records))

def write_checkpoint(step, state):
    (folder / f"step_{{step:08}}").mkdir()
    manifest = dict(step=step, files=[dict(name="shard_0.safetensors", bytes=8, xxh3_128=state)])
    (folder / f"step_{{step:08}}" / "manifest.json").write_text(json.dumps(manifest))
"""


class Scripts(RunFolder):
    """Runs the scripts on a config whose token files do not exist."""

    def setUp(self):
        super().setUp()
        config = tiny_config(self.folder)
        config["data"]["train"] = ["not/there.npy"]
        config["training"]["steps"] = 1000
        self.config = self.write_config(config)

    def made_up(self, text):
        """A program whose `train` runs `text`."""
        with open(self.path("made_up"), "w", encoding="utf-8") as file:
            file.write(MADE_UP_PROGRAM + text)
        os.chmod(self.path("made_up"), 0o755)
        return self.path("made_up")

    def script(self, name, program, *arguments, code=0):
        """What the script has written, and its standard output."""
        command = [sys.executable, FOLDER / name, program, self.config, "--threads", "1", "--json", self.path("out.json"),
                   *arguments]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600)
        self.assertEqual(result.returncode, code, result.stdout + result.stderr)
        if code == 2:
            return result.stderr
        with open(self.path("out.json"), encoding="utf-8") as file:
            report = json.load(file)
        self.assertIn(name, report["command"])
        self.assertRegex(report["date"], r"^\d{4}-\d\d-\d\dT")
        for figure in report["figures"]:
            self.assertIn(figure, result.stdout)
        return report


class Arithmetic(Scripts):
    def test_cost_of_saves(self):
        # A save makes the step after it 0.5 s longer; the first steps are slow and do not count.
        program = self.made_up("""
interval = int(sets["checkpoint.interval"])
write_metrics(lambda step: 9.0 if step < 5 else 1.0 + 0.5 * (interval > 0 and step > 1 and step % interval == 1))
for step in range(interval, steps + 1, interval) if interval else ():
    print(f"12:00:00 saved {folder}/step_{step:08}: 41.2 GB in 40.{step} s")
""")
        report = self.script("checkpoint_cost.py", program, "--steps", "34", "--interval", "10", "--name", "tiny", "--folder",
                             self.path("runs"), "--turns", "2")
        self.assertAlmostEqual(report["figures"]["checkpoint.tiny.throughput_loss_percent"], 100 * (1 - 1 / 1.05))
        self.assertAlmostEqual(report["figures"]["checkpoint.tiny.longest_step_ratio"], 1.5)
        self.assertAlmostEqual(report["longest_step_ratio_without_saves"], 1.0)
        self.assertEqual(report["counted_steps"], [11, 30])
        self.assertEqual(report["save_seconds"], [[40.10, 40.20, 40.30]] * 2)
        self.assertEqual(report["save_wait_seconds"], [34 * 0.25] * 2)
        self.assertAlmostEqual(report["tokens_per_second_without"], 64)

    def test_checkpoints_are_dropped_before_the_next_save(self):
        """With a program that keeps none of them away itself."""
        program = self.made_up("""
import time
interval = int(sets["checkpoint.interval"])
write_metrics(lambda step: 1.0)
for step in range(interval, steps + 1, interval) if interval else ():
    before, begun = folder / f"step_{step - interval:08}", time.monotonic()
    while before.exists():
        if time.monotonic() > begun + 30:
            sys.exit(9)
        time.sleep(0.01)
    write_checkpoint(step, "good")
    print(f"12:00:00 saved {folder}/step_{step:08}: 1e-05 GB in 0.0 s", flush=True)
time.sleep(0.5 if interval else 0)  # in which the last one must stay
""")
        self.script("checkpoint_cost.py", program, "--steps", "15", "--interval", "5", "--folder", self.path("runs"), "--drop-older")
        self.assertEqual(os.listdir(self.path("runs/with")).count("step_00000015"), 1)

    def test_cost_of_checks(self):
        # A replay takes 2 s in its own step; the state is hashed in its step, and compared in the one after it.
        program = self.made_up("""
replay, state = (int(sets[f"reliability.{kind}_interval"]) for kind in ("replay", "state"))
def seconds(step):
    return (10 + 2 * (replay > 0 and step % replay == 0) + 0.5 * (state > 0 and step % state == 0)
            + 0.25 * (state > 0 and step % state == 1))
write_metrics(seconds)
""")
        report = self.script("sdc_cost.py", program, "--steps", "25", "--interval", "5")
        self.assertAlmostEqual(report["check_seconds"]["replay"], 2)
        self.assertAlmostEqual(report["check_seconds"]["state"], 0.75)
        self.assertAlmostEqual(report["check_seconds_by_means"]["all"], 2.75)
        self.assertAlmostEqual(report["figures"]["sdc.cost_percent"], 100 * (2 / 500 + 0.75 / 100) / 10)
        self.assertEqual({name: len(runs) for name, runs in report["runs"].items()},
                         {"off": 2, "replay": 2, "state": 2, "all": 2})

    def test_flips(self):
        """Of each target another outcome: found in time; found, but saved; missed; no bit of the state changed; failed."""
        program = self.made_up("""
flip = os.environ.get("FLIP", "none:0:0:0").split(":")
target, at = flip[0], int(flip[1])
for step in range(3, steps + 1, 3):
    if target == "weight" and step >= at:
        sys.exit(print(f"parka: error: silent data corruption in step {at + 1} on rank 0: x") or 6)
    write_checkpoint(step, "bad" if target in ("moment", "gradient") and step >= at else "good")
    if target == "moment" and step >= at:
        sys.exit(print(f"parka: error: silent data corruption by step {at + 2}: x") or 6)
""")
        report = self.script("flip_drill.py", program, "--flips", "8", "--jobs", "2", code=1)
        outcomes = [(flip["target"], flip["outcome"], bool(flip["bad_states"])) for flip in report["flips"]]
        self.assertEqual(outcomes, 2 * [("weight", "found", False), ("moment", "found", True), ("gradient", "missed", True),
                                        ("gemm", "no change", False)])
        self.assertEqual(report["figures"], {
            "sdc.found_percent": 100 * 4 / 6, "sdc.found_percent.weight": 100, "sdc.found_percent.moment": 100,
            "sdc.found_percent.gradient": 0, "sdc.bad_states_saved": 4, "sdc.false_alarms": 0})
        self.assertEqual(report["counted"], 6)
        report = self.script("flip_drill.py", program, "--flips", "3", "--targets", "weight,gemm")
        self.assertEqual(report["figures"]["sdc.found_percent"], 100)

    def test_flips_that_are_found_late_and_runs_that_fail(self):
        program = self.made_up("""
flip = os.environ.get("FLIP", "").split(":")
if flip[0] == "weight":
    sys.exit(print(f"parka: error: silent data corruption in step {int(flip[1]) + 3} on rank 0: x") or 6)
if flip[0]:
    sys.exit(print("parka: error: loss is not finite") or 3)
write_checkpoint(steps, "good")
""")
        report = self.script("flip_drill.py", program, "--flips", "2", "--targets", "weight,gemm", code=1)
        self.assertEqual([flip["outcome"] for flip in report["flips"]], ["found late", "failed"])
        self.assertEqual(report["flips"][1]["message"], "loss is not finite")
        self.assertEqual(report["figures"]["sdc.found_percent"], 0)
        report = self.script("flip_drill.py", program, "--flips", "2", "--targets", "weight", "--replay-interval", "2")
        self.assertEqual(report["figures"]["sdc.found_percent"], 100)

    def test_false_alarms(self):
        program = self.made_up("""
if steps == 500:
    write_metrics(lambda step: 1)
    sys.exit(print("parka: error: silent data corruption by step 500: x") or 6)
write_checkpoint(steps, "good")
""")
        report = self.script("flip_drill.py", program, "--flips", "1", "--quiet-steps", "500", code=1)
        self.assertEqual((report["figures"]["sdc.false_alarms"], report["quiet_steps"]), (1, 512))

    def test_bad_input_is_refused_in_one_line(self):
        folder = ("--folder", self.path("runs"))
        for name, arguments, word in [
                ("checkpoint_cost.py", (*folder, "--steps", "19", "--interval", "10"), "at least twice"),
                ("checkpoint_cost.py", (*folder, "--disk-rate", "1000"), "go together"),
                ("checkpoint_cost.py", (*folder, "--disk-rate", "1000", "--faulty-library", "not/there.so"), "does not exist"),
                ("resume_time.py", folder, "no complete checkpoint"), ("sdc_cost.py", ("--interval", "3"), "at least 4"),
                ("flip_drill.py", ("--targets", "weights"), "weight,moment"),
                ("flip_drill.py", ("--flips", "0"), "from 1, got 0"),
                ("flip_drill.py", ("--set", "training.stepz=1"), "training.stepz"),
                ("sdc_cost.py", ("--json", "not/there"), "no folder")]:
            with self.subTest(name, arguments=arguments):
                message = self.script(name, PROGRAM, *arguments, code=2)
                self.assertIn(word, message)
                self.assertEqual(message.count("\n"), 1, message)
        for name in SCRIPTS:
            needed = folder if name in ("checkpoint_cost.py", "resume_time.py") else ()
            self.assertIn("give the program", self.script(name, "not/there", *needed, code=2))


class OnTheCpu(Scripts):
    """Real runs: only that all that is measured can be read."""

    def test_saves_and_resuming(self):
        library = faulty_files()["LD_PRELOAD"]
        report = self.script("checkpoint_cost.py", PROGRAM, "--steps", "16", "--interval", "5", "--name", "tiny", "--folder",
                             self.path("runs"), "--drop-older", "--disk-rate", "1000000", "--faulty-library", library)
        self.assertEqual([save["step"] for save in report["runs"]["with"][0]["saves"]], [5, 10, 15])
        self.assertEqual(report["runs"]["without"][0]["saves"], [])
        # The writes are slow, not the training.
        written = report["runs"]["with"][0]["saves"][0]
        self.assertGreater(written["seconds"], 0.8 * written["bytes"] / 1e6)
        self.assertEqual(sorted(Path(self.path("runs/with")).glob("step_*")), [Path(self.path("runs/with/step_00000015"))])
        report = self.script("resume_time.py", PROGRAM, "--name", "tiny", "--folder", self.path("runs"))
        self.assertEqual(report["step"], 15)
        self.assertGreater(report["bytes"], 100000)
        self.assertGreater(report["seconds_to_first_step"], report["median_step_seconds"])
        self.assertAlmostEqual(report["figures"]["resume.tiny.seconds"], report["seconds_to_first_step"]
                               - report["median_step_seconds"] - report["disk_seconds"])

    def test_a_checkpoint_is_made_to_be_resumed(self):
        self.assertEqual(self.script("resume_time.py", PROGRAM, "--make", "--folder", self.path("runs"))["step"], 1)

    def test_flips(self):
        report = self.script("flip_drill.py", FLIPPING_PROGRAM, "--flips", "8", "--jobs", "2", "--steps", "6", "--quiet-steps", "50")
        self.assertEqual([flip["target"] for flip in report["flips"]], 2 * ["weight", "moment", "gradient", "gemm"])
        self.assertEqual((report["figures"]["sdc.found_percent"], report["figures"]["sdc.bad_states_saved"]), (100, 0))
        self.assertGreater(report["counted"], 0)
        self.assertEqual(report["quiet_steps"], 56)

    def test_cost_of_checks(self):
        report = self.script("sdc_cost.py", PROGRAM, "--steps", "20", "--interval", "5", "--turns", "1")
        self.assertEqual(report["intervals"], {"replay": 500, "state": 100})
        self.assertGreater(report["step_seconds"], 0)


if __name__ == "__main__":
    unittest.main()
