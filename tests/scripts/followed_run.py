"""A run's metrics.jsonl as `parka train` writes it, and scripts/follow.py following it, for the tests of follow.py."""
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
SECONDS = 30  # that anything may take


def has_package(name):
    return importlib.util.find_spec(name) is not None


def train_record(step, **more):
    return {"kind": "train", "step": step, "tokens": 64 * step, "epoch": 0, "loss": 4.0 / step, "grad_norm": 0.5, "lr": 1e-3,
            "applied": True, "tokens_per_second": 100.0, "wall_tokens_per_second": 90.0, "goodput": 0.5, "seconds": 2.0} | more


def start_record(step=0, **more):
    return {"kind": "start", "step": step, "host": "node3", "device": "NVIDIA H200", "ranks": 8, "version": "0.2.0",
            "commit": "0123456789ab", "command": "parka train a.json", "earlier_seconds": 0.0} | more


def quantization_record(step):
    tensor = {"error": [0.02, None, 0.03, 0.05], "amax": [0.0, 3.0, 2.0, 1.0]}
    return {"kind": "quantization", "step": step, "sampled_tokens": 32, "tensors": {"qkv.weight": tensor}}


def moments_record(step):
    ranges = {"k": {"median": [3.0, 5.0, None], "min": [None, None, None]}, "amax": {"max": [1e-3, 2e-3, 4e-3]}}
    return {"kind": "moments", "step": step, "parameters": {"qkv": {"exp_avg": ranges}}}


def updates_record(step):
    return {"kind": "updates", "step": step, "parameters": {"qkv": {"rms": [[], [0.1, 0.2]], "singular_value": [[1.1, None], [1.0, 0.9]]}}}


def attention_record(step):
    return {"kind": "attention", "step": step, "sampled_tokens": 32, "blocks": {"imbalance": [0.001, None, 0.03, 0.002]}}


def routing_record(step):
    return {"kind": "routing", "step": step, "blocks": {"expert_load": [None, 1.5, 1.25, 2.0]}}


def warning_record(step, raised=True):
    return {"kind": "warning", "step": step, "about": "attention", "raised": raised, "block": 2, "imbalance": 0.03, "limit": 0.01}


class RunFile:
    def __init__(self, folder, records=(), tail=""):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "metrics.jsonl"
        self.path.write_text("")
        self.seconds = 0
        self.add(*records)
        self.write(tail)

    def write(self, text):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(text)

    def add(self, *records):
        """Each is of a second of its own."""
        for record in records:
            time_of_day = {"time": f"2026-11-23T12:{self.seconds // 60:02}:{self.seconds % 60:02}.000+01:00",
                           "wall_seconds": float(self.seconds)}
            self.write(json.dumps(record | time_of_day) + "\n")
            self.seconds += 1

    def resume(self, step):
        """Replaces the file by one without records of later steps, and evaluations of this one."""
        records = [json.loads(line) for line in self.path.read_text().splitlines()]
        kept = [record for record in records if record["step"] < step or record["step"] == step and record["kind"] in ("train", "start")]
        draft = self.path.with_suffix(".draft")
        draft.write_text("".join(json.dumps(record) + "\n" for record in kept))
        os.replace(draft, self.path)
        self.add(start_record(step))


class FollowTest(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def make_run(self, name, records=(), tail=""):
        return RunFile(self.folder / name, records, tail)

    def follow(self, run, *arguments, **environment):
        folder = run.folder if isinstance(run, RunFile) else run
        return subprocess.run([sys.executable, SCRIPTS / "follow.py", folder, *arguments], capture_output=True, text=True,
                              timeout=10 * SECONDS, env={**os.environ, **environment})

    def assert_followed(self, run, *arguments, **environment):
        result = self.follow(run, "--once", *arguments, **environment)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result

    def assert_refused(self, message, run, *arguments, code=2, **environment):
        result = self.follow(run, *arguments, **environment)
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertRegex(result.stderr, f"^follow.py: error: .*{message}.*\n$")

    @contextlib.contextmanager
    def following(self, run, *arguments, **environment):
        """follow.py, while it runs; it ends by SIGTERM."""
        folder = run.folder if isinstance(run, RunFile) else run
        process = subprocess.Popen([sys.executable, SCRIPTS / "follow.py", folder, "--interval", "0.05", *arguments],
                                   stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, **environment})
        try:
            yield process
            process.send_signal(signal.SIGTERM)
            out, err = process.communicate(timeout=SECONDS)
            self.assertEqual(process.returncode, 0, out + err)
        finally:
            process.kill()
            process.communicate()

    def wait_for(self, condition):
        until = time.monotonic() + SECONDS
        while not condition():
            self.assertLess(time.monotonic(), until, "did not come about")
            time.sleep(0.02)
