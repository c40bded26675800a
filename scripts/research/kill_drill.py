#!/usr/bin/env python3
"""Kills a rank of a run (kill -9), lets scripts/launch.sh start it again, and compares the losses of all steps with those
of a run that nobody disturbed: they have to be equal to the bit.

    scripts/research/kill_drill.py OUT --ranks 2 --program build/cuda/parka [--set KEY=VALUE ...]

Runs configs/olmo-150m.json with the recipe parka, ZeRO stage 3, on random tokens, one rank for each GPU. OUT gets both run
folders and launch.sh's messages. Needs numpy."""
import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("numpy")
import numpy  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
STEPS, INTERVAL, KILL_AFTER = 60, 20, 30  # steps in all, between checkpoints, done before the kill
NEAR = 0.02  # nats between losses of other numbers of ranks in FP8 (docs/distributed.md)


def records_by_step(folder):
    """(loss, targets) of each."""
    found = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # a rank is writing it
        if "loss" in record:
            found[record["step"]] = record["loss"], record["targets"]
    return found


def start(arguments, folder, log, ranks, steps):
    options = {
        "checkpoint.folder": folder, "checkpoint.interval": INTERVAL, "training.steps": steps,
        "training.eval_interval": 0, "data.train": json.dumps([str(arguments.out / "tokens.npy")]), "data.eval": "[]",
        "precision.recipe": "parka", "optimizer.states": "fp8_expanded", "optimizer.master": "fp32",
        "data.documents": "separate", "data.document_end": 5, "training.log_interval": 1,
        "distributed.zero_stage": 3, "training.micro_batch_size": 4, "training.global_batch_size": 64,
    }
    sets = [f"{key}={value}" for key, value in options.items()] + arguments.set
    # A Path has lost the "./" of a name without folders, which would then be looked up in PATH.
    command = ["bash", ROOT / "scripts/launch.sh", "-np", str(ranks), "--", arguments.program.absolute(), "train",
               ROOT / "configs/olmo-150m.json", *(word for pair in sets for word in ("--set", pair))]
    environment = dict(os.environ, PARKA_RESTART_SECONDS="1")
    return subprocess.Popen(list(map(str, command)), stdout=log, stderr=subprocess.STDOUT, env=environment)


def ranks_of(launcher):
    """Process ids of the program under launch.sh."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, rest = stat.read_text().split("(", 1)[1].rsplit(")", 1)
        except OSError:
            continue  # it has ended meanwhile
        parents[int(stat.parent.name)] = (int(rest.split()[1]), name)

    def is_below(process):
        while process in parents and process != launcher:
            process = parents[process][0]
        return process == launcher
    return sorted(process for process, (_, name) in parents.items() if name == "parka" and is_below(process))


def kill_one(launcher, folder):
    """Once KILL_AFTER steps are done. Returns the time of the kill."""
    while not (folder / "metrics.jsonl").exists() or max(records_by_step(folder), default=0) < KILL_AFTER:
        if launcher.poll() is not None:
            sys.exit(f"kill_drill.py: the run ended with {launcher.returncode} before the kill; see its log")
        time.sleep(0.02)
    os.kill(ranks_of(launcher.pid)[-1], signal.SIGKILL)
    return time.time()


def run(arguments, name, disturbed=False, ranks=None, steps=STEPS):
    folder = arguments.out / name
    with open(arguments.out / f"{name}.log", "a", encoding="utf-8") as log:
        launcher = start(arguments, folder, log, ranks or arguments.ranks, steps)
        killed = kill_one(launcher, folder) if disturbed else time.time()
        code = launcher.wait()
    if code != 0:
        sys.exit(f"kill_drill.py: {name}: launch.sh ended with {code}; see {arguments.out / name}.log")
    print(f"{name}: {time.time() - killed:.1f} s {'from the kill to' if disturbed else 'from start to'} end")
    return records_by_step(folder)


def check_moved(arguments, plain):
    for ranks, steps in ((arguments.ranks, INTERVAL), (arguments.move_to, 2 * INTERVAL), (arguments.ranks, STEPS)):
        moved = run(arguments, "moved", ranks=ranks, steps=steps)
    if len({targets for _, targets in plain.values()}) < 8:
        sys.exit("kill_drill.py: too few steps differ in their number of targets for it to show the order of data")
    if (arguments.out / "moved.log").read_text().count("resuming from") != 2:
        sys.exit("kill_drill.py: the moved run did not resume twice; see moved.log")
    for step, (loss, targets) in plain.items():
        moved_loss, moved_targets = moved.get(step, (float("nan"), 0))
        if moved_targets != targets:
            sys.exit(f"kill_drill.py: step {step} of the moved run has other data: {moved_targets} targets, not {targets}")
        if not (moved_loss == loss if step <= INTERVAL else abs(moved_loss - loss) < NEAR):
            sys.exit(f"kill_drill.py: step {step} of the moved run has the loss {moved_loss}, not {loss}")
    largest = max(abs(moved[step][0] - plain[step][0]) for step in plain)
    print(f"{arguments.ranks}, {arguments.move_to} and {arguments.ranks} ranks read the same data; losses differ by at most {largest:.2g}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--move-to", type=int, metavar="RANKS")
    parser.add_argument("--program", type=Path, default=ROOT / "build/cuda/parka")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    arguments = parser.parse_args()
    if arguments.out.exists():
        parser.error(f"{arguments.out}: is there already; give another OUT")
    arguments.out.mkdir(parents=True)
    tokens = numpy.random.default_rng(1).zipf(1.3, 1 << 22) % 50000
    tokens.astype(numpy.uint16).tofile(arguments.out / "tokens.npy")
    plain, killed = (run(arguments, name, disturbed=name == "killed") for name in ("plain", "killed"))
    starts = (arguments.out / "killed.log").read_text().count("launch.sh: starting")
    if starts != 2:
        sys.exit(f"kill_drill.py: launch.sh started the killed run {starts} times, not twice; see killed.log")
    different = [step for step in range(1, STEPS + 1) if step not in plain or killed.get(step) != plain[step]]
    if different:
        sys.exit(f"kill_drill.py: losses differ at steps {different}")
    print(f"losses of all {STEPS} steps are equal to the bit; the last is {plain[STEPS][0]:.6f}")
    if arguments.move_to:
        check_moved(arguments, plain)


main()
