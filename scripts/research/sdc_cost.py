#!/usr/bin/env python3
"""Measures what the checks for silent data corruption cost a training.

    scripts/research/sdc_cost.py PARKA CONFIG --steps 30 --interval 5 --json OUT

Trains in turns without checks, with each kind of check alone and with all of them, every INTERVAL steps. What one check
costs is told within one run, where clocks and neighbours are the same: a check of a step is felt in that step or in the one
after it (the state is compared before the next update), so its cost is what the medians of these two kinds of steps are above
the median of all others. Beside it the JSON has the plainer and noisier estimate, by the mean steps of whole runs.

    sdc.cost_percent    of the training time, with the config's own intervals (by default 500 and 100)

Trains on the config's token files, or on random tokens where these do not exist."""
import statistics
import tempfile
from pathlib import Path

from measured_runs import (SKIPPED_STEPS, RunParser, shared_options, positive, records, resolved_config, run_main, train,
                           write_report)

KINDS = ("replay", "state")


def variants():
    """Which checks are on, by the name of the kind of run."""
    return {"off": (), **{kind: (kind,) for kind in KINDS}, "all": KINDS}


def step_seconds(arguments, sets, checks, folder):
    """By step."""
    intervals = [f"reliability.{kind}_interval={arguments.interval if kind in checks else 0}" for kind in KINDS]
    train(arguments, [*sets, *intervals, f"checkpoint.folder={folder}", "checkpoint.interval=0", "checkpoint.save_final=false",
                      f"training.steps={arguments.steps}"], f"{folder}.log")
    return {record["step"]: record["seconds"] for record in records(folder)}


def cost_of_check(runs, interval):
    """Seconds, from runs with a check every `interval` steps."""
    classes = {}
    for run in runs:
        for step, seconds in run.items():
            if step > SKIPPED_STEPS:
                classes.setdefault(min(step % interval, 2), []).append(seconds)
    plain = statistics.median(classes[2])
    return sum(statistics.median(classes[place]) - plain for place in (0, 1))


def later_steps(runs):
    return [seconds for run in runs for step, seconds in run.items() if step > SKIPPED_STEPS]


def mean_step(runs):
    return statistics.mean(later_steps(runs))


def compare(runs, interval, configured):
    """Costs from lists of runs by kind. `configured` are the intervals of the config, by kind of check."""
    plain = statistics.median(later_steps(runs["off"]))
    costs = {kind: cost_of_check(runs[kind], interval) for kind in KINDS if kind in runs}
    return {
        "step_seconds": plain,
        "check_seconds": costs,
        "check_seconds_by_means": {kind: (mean_step(runs[kind]) - mean_step(runs["off"])) * interval
                                   for kind in runs if kind != "off"},
        "cost_percent_by_check": {kind: 100 * cost / configured[kind] / plain
                                  for kind, cost in costs.items() if configured[kind] > 0},
    }


def read_arguments():
    parser = RunParser(__doc__)
    parser.add_argument("--steps", type=positive, default=30)
    parser.add_argument("--interval", type=positive, default=5, help="steps between checks")
    parser.add_argument("--turns", type=positive, default=2, help="runs of each kind")
    arguments = parser.parse_args()
    if arguments.interval < 4 or arguments.steps < SKIPPED_STEPS + 2 * arguments.interval:
        parser.error(f"--interval must be at least 4, and --steps at least {SKIPPED_STEPS} and two intervals")
    return arguments


def main():
    arguments = read_arguments()
    config = resolved_config(arguments)
    kinds = variants()
    runs = {name: [] for name in kinds}
    with tempfile.TemporaryDirectory(prefix="parka-sdc-cost-") as folder:
        sets = shared_options(config, folder, arguments.steps)
        for turn in range(arguments.turns):
            for name, checks in kinds.items():
                runs[name].append(step_seconds(arguments, sets, checks, Path(folder) / f"{name}_{turn}"))
    configured = {kind: config["reliability"][f"{kind}_interval"] for kind in KINDS}
    result = compare(runs, arguments.interval, configured)
    print(f"a step: {1e3 * result['step_seconds']:.2f} ms by the median, without checks")
    for kind, cost in result["check_seconds"].items():
        print(f"a {kind} check: {1e3 * cost:.2f} ms ({1e3 * result['check_seconds_by_means'][kind]:.2f} ms by means of runs); "
              f"every {configured[kind]} steps: {result['cost_percent_by_check'].get(kind, 0.0):.4f} %")
    figures = {"sdc.cost_percent": sum(result["cost_percent_by_check"].values())}
    write_report(arguments, figures, {"intervals": configured, **result, "runs": runs})


if __name__ == "__main__":
    run_main(main)
