"""Small runs of the parka program for the command line tests: tiny token files, a tiny model, a temporary folder."""
import array
import fcntl
import hashlib
import json
import os
import random
import struct
import subprocess
import sys
import tempfile
import termios
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import starters  # noqa: E402, F401

PROGRAM = os.environ.get("PARKA_PROGRAM", "build/release/parka")
FAULTY_FILES_LIBRARY = os.environ.get("FAULTY_FILES_LIBRARY",
                                      os.path.join(os.path.dirname(os.path.abspath(PROGRAM)), "tests", "libfaulty_files.so"))
# tests/support/flipping_parka.cpp
FLIPPING_PROGRAM = os.environ.get("FLIPPING_PROGRAM", os.path.join(os.path.dirname(os.path.abspath(PROGRAM)), "tests", "flipping_parka"))
VOCAB = 64
SEQUENCE = 16
STOPPED = 75  # the exit code of a run that a signal asked to save and stop


def write_tokens(path, count, seed, vocab=VOCAB):
    rng = random.Random(seed)
    tokens = array.array("H", (rng.randrange(vocab) for _ in range(count)))
    with open(path, "wb") as file:
        file.write(tokens.tobytes())


def num_gpus():
    """Of the GPUs here, those that CUDA_VISIBLE_DEVICES leaves."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([gpu for gpu in visible.split(",") if gpu])
    try:
        listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    except OSError:
        return 0
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def run_rank_tests(module):
    """The main program of a file of tests of ranks: `FILE [cpu|cuda] [unittest's options]` sets the module's DEVICE and RANKS_OPTION.
    Exits with 77 (skipped) without what starts the ranks, or on GPUs with fewer than two."""
    starters.skip_without_starter()
    if len(sys.argv) > 1:
        module.DEVICE = sys.argv.pop(1)
        module.RANKS_OPTION = {"cpu": "--ranks", "cuda": "--gpus"}[module.DEVICE]
    if module.DEVICE == "cuda" and num_gpus() < 2:
        print("skipped: fewer than two GPUs")
        sys.exit(77)
    unittest.main()


def has_gpu():
    return num_gpus() > 0


def tiny_config(folder, recipe="bf16", steps=8, device="cpu", **optimizer):
    """A two-block model on two token files; an epoch is 9 steps, each of two micro-batches."""
    return {
        "device": {"kind": device},
        "model": {"vocab_size": VOCAB, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ffn": 64},
        "precision": {"recipe": recipe},
        "optimizer": {"lr": 3e-3, "schedule": {"kind": "cosine", "warmup_steps": 5}, **optimizer},
        "data": {
            "train": [f"{folder}/a.npy", f"{folder}/b.npy"],
            "eval": [f"{folder}/held_out.npy"],
            "sequence_length": SEQUENCE,
        },
        "training": {"steps": steps, "global_batch_size": 4, "micro_batch_size": 2, "eval_interval": 4},
        "checkpoint": {"folder": f"{folder}/run", "interval": 4, "keep": 0},
    }


def parka(*arguments, **options):
    return subprocess.run([PROGRAM, "--threads", "1", *arguments], capture_output=True, text=True, timeout=300, **options)


def faulty_files(*rules, slow_glob=None, bytes_per_second=None):
    """The environment of a program whose file operations fail by rules OPERATION:GLOB:ERROR:FROM:COUNT, and whose writes
    to files that match slow_glob are slow: see tests/support/faulty_files.cpp. Skips the test where it cannot be preloaded."""
    if not os.path.exists(FAULTY_FILES_LIBRARY):
        raise unittest.SkipTest("faulty_files is not built, or this build has a sanitizer")
    environment = dict(os.environ, LD_PRELOAD=os.path.abspath(FAULTY_FILES_LIBRARY), FAULTY_FILES=";".join(rules))
    if slow_glob is not None:
        environment.update(FAULTY_WRITE_GLOB=slow_glob, FAULTY_WRITE_BYTES_PER_SECOND=str(bytes_per_second))
    return environment


def killed_in_save(step, operation="write", nth=1):
    """The environment of a program that SIGKILL ends at the nth operation of this kind on the checkpoint of a step."""
    return faulty_files(f"{operation}:*/step_{step:08}*:KILL:{nth}:1")


class RunFolder(unittest.TestCase):
    """A test with a temporary folder that holds token files and configs."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        write_tokens(self.path("a.npy"), 21 * SEQUENCE + 5, seed=1)
        write_tokens(self.path("b.npy"), 18 * SEQUENCE, seed=2)
        write_tokens(self.path("held_out.npy"), 6 * SEQUENCE, seed=3)

    def path(self, name):
        return os.path.join(self.folder, name)

    def write_config(self, config, name="config.json"):
        with open(self.path(name), "w", encoding="utf-8") as file:
            json.dump(config, file)
        return self.path(name)

    def train(self, config, *arguments, **options):
        return parka("train", self.write_config(config), *arguments, **options)

    def assert_exit(self, result, code):
        self.assertEqual(result.returncode, code, result.stderr)


def metrics(folder, kind="train"):
    with open(os.path.join(folder, "metrics.jsonl"), encoding="utf-8") as file:
        # A run that goes on may be about to write the last line.
        lines = [line for line in file if line.endswith("\n")]
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def learning_curve(folder):
    """What a step computed, without what it took: the same for equal runs to the last bit."""
    fields = ("step", "tokens", "epoch", "loss", "grad_norm", "lr", "applied")
    steps = [tuple(record[field] for field in fields) for record in metrics(folder)]
    evaluations = [(record["step"], record["loss"]) for record in metrics(folder, "eval")]
    return steps, evaluations


def tree_digest(folder, only=lambda path: True):
    """Names and contents of all files below a folder."""
    digest = {}
    for root, _, names in os.walk(folder):
        for name in names:
            path = os.path.join(root, name)
            relative = os.path.relpath(path, folder)
            if only(relative):
                with open(path, "rb") as file:
                    digest[relative] = hashlib.sha256(file.read()).hexdigest()
    return digest


def checkpoints(folder):
    return sorted(name for name in os.listdir(folder) if name.startswith("step_") and name[5:].isdigit())


def on_terminal(columns, folder, *arguments, **environment):
    """The exit code of the program on a terminal of so many columns, and all that it writes there."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    process = subprocess.Popen([os.path.abspath(PROGRAM), *arguments], stdout=theirs, stderr=theirs, cwd=folder, env=os.environ | {"TERM": "xterm"} | environment)
    os.close(theirs)
    text = b""
    with open(ours, "rb", buffering=0) as terminal:
        while True:
            try:
                part = terminal.read(4096)
            except OSError:  # nobody has the other end any more
                break
            if not part:
                break
            text += part
    return process.wait(), text.decode().replace("\r\n", "\n")
