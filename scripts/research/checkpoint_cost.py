#!/usr/bin/env python3
"""Measures what saving costs a training: the same run, in turns, without saves and with a save every so many steps.

    scripts/research/checkpoint_cost.py PARKA CONFIG --steps 150 --interval 50 --name 7b --folder RUNS --json OUT

Trains on the config's token files, or on random tokens where these do not exist. Steps are counted from the first save
on, so that each save has one interval of steps to be felt in: steps INTERVAL + 1 to the last multiple of INTERVAL, by the
wall clock, in both runs. The save after the last step is in nobody's way and not counted.

    checkpoint.NAME.throughput_loss_percent   of the tokens per second of the runs without saves
    checkpoint.NAME.longest_step_ratio        the longest step of a run with saves, in median steps of one without

RUNS keeps the last run with saves in RUNS/with, with its newest checkpoint, for resume_time.py."""
import os
import re
import shutil
import statistics
import threading
from pathlib import Path

from measured_runs import (SKIPPED_STEPS, RunParser, shared_options, fail, positive, records, require_success,
                           resolved_config, run_main, training, wall_seconds_of_steps, write_report)

SAVED = re.compile(r"\bsaved .+/step_(\d+): (\S+) GB in (\S+) s")


def saves_in(log):
    """What the program has told of the saves that are complete."""
    text = Path(log).read_text(encoding="utf-8", errors="replace")
    return [{"step": int(step), "bytes": 1e9 * float(size), "seconds": float(seconds)}
            for step, size, seconds in SAVED.findall(text)]


class Dropper(threading.Thread):
    """Deletes each checkpoint as soon as it is complete, but for the last, so that the disk need not hold two."""

    def __init__(self, folder, log, last_step):
        super().__init__(daemon=True)
        self.folder, self.log, self.last_step = folder, log, last_step
        self.ended = threading.Event()

    def run(self):
        while not self.ended.wait(0.05):
            for save in saves_in(self.log):
                path = self.folder / f"step_{save['step']:08}"
                if save["step"] < self.last_step and path.exists():
                    shutil.rmtree(path, ignore_errors=True)


def train_once(arguments, sets, with_saves):
    name = "with" if with_saves else "without"
    folder, log = arguments.folder.resolve() / name, arguments.folder / f"{name}.log"
    shutil.rmtree(folder, ignore_errors=True)
    interval = arguments.interval if with_saves else 0
    sets = [*sets, f"checkpoint.folder={folder}", f"checkpoint.interval={interval}", "checkpoint.keep=1",
            "checkpoint.save_final=false", f"training.steps={arguments.steps}"]
    environment = {}
    if arguments.disk_rate:
        environment = {"LD_PRELOAD": os.path.abspath(arguments.faulty_library), "FAULTY_WRITE_GLOB": f"{folder}/step_*",
                       "FAULTY_WRITE_BYTES_PER_SECOND": str(arguments.disk_rate)}
    log.touch()
    with training(arguments, sets, log, environment=environment) as process:
        dropper = Dropper(folder, log, arguments.steps // interval * interval if interval else 0)
        if with_saves and arguments.drop_older:
            dropper.start()
        try:
            require_success(process.wait(), log)
        finally:
            dropper.ended.set()
    return describe_run(folder, log)


def describe_run(folder, log):
    train_records = records(folder)
    return {"step_seconds": wall_seconds_of_steps(train_records), "saves": saves_in(log),
            "save_wait_seconds": sum(record.get("save_wait_seconds", 0.0) for record in train_records)}


def compare(without, with_saves, steps, interval):
    """The two figures and what stands beside them; each argument is a list of what describe_run() tells."""
    counted = range(interval + 1, steps // interval * interval + 1)

    def mean_step(runs):
        return statistics.mean(run["step_seconds"][step] for run in runs for step in counted)

    def all_steps(runs):
        return [seconds for run in runs for step, seconds in run["step_seconds"].items() if step > SKIPPED_STEPS]

    median = statistics.median(all_steps(without))
    plain, saving = mean_step(without), mean_step(with_saves)
    return {
        "throughput_loss_percent": 100 * (1 - plain / saving),
        "longest_step_ratio": max(all_steps(with_saves)) / median,
        "longest_step_ratio_without_saves": max(all_steps(without)) / median,
        "mean_step_seconds_without": plain, "mean_step_seconds_with": saving, "median_step_seconds_without": median,
        "counted_steps": [counted[0], counted[-1]],
        "save_wait_seconds": [run["save_wait_seconds"] for run in with_saves],
        "save_seconds": [[save["seconds"] for save in run["saves"]] for run in with_saves],
    }


def read_arguments():
    parser = RunParser(__doc__)
    parser.add_argument("--steps", type=positive, default=150)
    parser.add_argument("--interval", type=positive, default=50, help="steps between saves")
    parser.add_argument("--turns", type=positive, default=1, help="runs of each kind")
    parser.add_argument("--name", default="model", help="name of the model in the figures")
    parser.add_argument("--folder", type=Path, required=True, metavar="RUNS")
    parser.add_argument("--drop-older", action="store_true",
                        help="delete each checkpoint once it is complete, except the last")
    parser.add_argument("--disk-rate", type=positive, metavar="BYTES_PER_S", help="simulate a disk of this speed")
    parser.add_argument("--faulty-library", type=Path, metavar="PATH", help="libfaulty_files.so, for --disk-rate")
    arguments = parser.parse_args()
    if arguments.interval < SKIPPED_STEPS or arguments.steps < 2 * arguments.interval:
        parser.error(f"--interval must be at least {SKIPPED_STEPS}, and --steps at least twice as many")
    if (arguments.disk_rate is None) != (arguments.faulty_library is None):
        parser.error("--disk-rate and --faulty-library go together")
    if arguments.faulty_library and not arguments.faulty_library.exists():
        parser.error(f"--faulty-library: {arguments.faulty_library} does not exist; the target faulty_files makes it")
    return arguments


def main():
    arguments = read_arguments()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    config = resolved_config(arguments)
    sets = shared_options(config, arguments.folder, arguments.steps)
    runs = {False: [], True: []}
    for turn in range(arguments.turns):
        for with_saves in (False, True) if turn % 2 == 0 else (True, False):  # a drift of the clocks meets both alike
            runs[with_saves].append(train_once(arguments, sets, with_saves))
    if not all(run["saves"] for run in runs[True]):
        fail(f"{arguments.folder / 'with.log'}: names no complete save", 1)
    result = compare(runs[False], runs[True], arguments.steps, arguments.interval)
    tokens = config["training"]["global_batch_size"] * config["data"]["sequence_length"]
    for kind in ("without", "with"):
        result[f"tokens_per_second_{kind}"] = tokens / result[f"mean_step_seconds_{kind}"]
        print(f"{kind} saves: {result[f'tokens_per_second_{kind}']:,.0f} tokens/s by the wall clock")
    print(f"saves took {', '.join(f'{seconds:.1f}' for run in result['save_seconds'] for seconds in run)} s; "
          f"training waited for {sum(result['save_wait_seconds']):.3f} s")
    print(f"longest step without saves: {result['longest_step_ratio_without_saves']:.3f} median steps")
    figures = {f"checkpoint.{arguments.name}.{key}": result[key] for key in ("throughput_loss_percent", "longest_step_ratio")}
    write_report(arguments, figures, {**result, "runs": {"without": runs[False], "with": runs[True]}})


if __name__ == "__main__":
    run_main(main)
