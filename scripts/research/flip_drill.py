#!/usr/bin/env python3
"""Flips one bit in each of many short runs and counts how often Parka's checks for silent data corruption find it.

    scripts/research/flip_drill.py FLIPPING_PARKA CONFIG --flips 100 [--ranks 2] [--jobs 4] [--quiet-steps 100000] --json OUT

FLIPPING_PARKA is tests/flipping_parka of a build folder: `parka` whose environment names a bit to flip, in the memory of a CPU
(tests/support/flipping_parka.cpp). A reference run without a flip comes first. Each other run has one flip, of each target in turn, in a step,
on a rank and by a seed that --seed decides. All runs save every few steps, and checkpoints are compared with those of the
reference by the checksums of their files. A run in which the flip was not found and whose checkpoints are all those of the
reference does not count: no bit of a saved state was changed. --quiet-steps trains for so long without a flip, with all checks.

    sdc.found_percent[.TARGET]    of the runs that count, those that ended with exit code 6, in time
    sdc.bad_states_saved          runs that have left a checkpoint that differs from the reference's; must be 0
    sdc.false_alarms              runs without a flip that ended with exit code 6; must be 0

In time: within two intervals of the checks. Exit codes: 0 as it must be, 1 a flip was missed, a bad state saved, a false alarm or
a run that failed otherwise, 2 bad input."""
import argparse
import concurrent.futures
import json
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from measured_runs import (RunParser, at_least, checkpoints, shared_options, error_line, fail, positive, records,
                           require_success, resolved_config, run_main, training, write_report)

TARGETS = ("weight", "moment", "gradient", "gemm")
CORRUPTED = 6  # exit code of parka train
FOUND = re.compile(r"silent data corruption (?:in|by) step (\d+).*")
OUTCOMES = ("found", "found late", "missed", "no change", "failed")


def checksums(checkpoint):
    """Of a checkpoint's files, by name."""
    manifest = json.loads((checkpoint / "manifest.json").read_text(encoding="utf-8"))
    return {file["name"]: file["xxh3_128"] for file in manifest["files"]}


def states(folder):
    """What each checkpoint of a run holds, by step."""
    return {step: checksums(path) for step, path in checkpoints(folder).items()}


def intervals(arguments):
    return [f"reliability.{kind}_interval={getattr(arguments, f'{kind}_interval')}" for kind in ("replay", "state")]


def run(arguments, sets, folder, environment=None):
    """Exit code and messages of a run; None for one that has not ended in time."""
    folder.mkdir()
    log = folder / "log"
    with training(arguments, [*intervals(arguments), *sets, f"checkpoint.folder={folder / 'run'}"], log, environment=environment) as process:
        try:
            code = process.wait(arguments.timeout)
        except subprocess.TimeoutExpired:
            code = None
    return code, log.read_text(encoding="utf-8", errors="replace")


def short_run(arguments):
    """Saves every few steps, and all checkpoints stay."""
    return [f"training.steps={arguments.steps}", f"checkpoint.interval={arguments.save_interval}", "checkpoint.keep=0",
            "checkpoint.save_final=true"]


def choose_flips(arguments):
    generator = random.Random(arguments.seed)
    return [{"target": arguments.targets[i % len(arguments.targets)], "step": generator.randint(1, arguments.steps),
             "rank": generator.randrange(arguments.ranks), "seed": generator.getrandbits(32)} for i in range(arguments.flips)]


def judge(flip, code, messages, left, reference, latest):
    """What became of a flip. `left` and `reference` are states(); `latest` is how many steps a check may come after it."""
    bad_states = sorted(step for step, state in left.items() if state != reference.get(step))
    result = {**flip, "exit_code": code, "bad_states": bad_states}
    found = FOUND.search(messages)
    if code == CORRUPTED and found:
        result["found_after_steps"] = int(found[1]) - flip["step"]
        result["outcome"] = "found" if 0 <= result["found_after_steps"] <= latest else "found late"
    elif code == 0 and left.keys() == reference.keys():
        result["outcome"] = "missed" if bad_states else "no change"
    else:
        result["outcome"] = "failed"
    if code != 0:
        result["message"] = error_line(messages)
    return result


def drill(arguments, sets, reference, number, flip):
    """One run with a flip; its folder is deleted."""
    with tempfile.TemporaryDirectory(prefix=f"flip_{number}_", dir=arguments.temporary) as folder:
        variables = {"FLIP": f"{flip['target']}:{flip['step']}:{flip['rank']}:{flip['seed']}"}
        code, messages = run(arguments, [*sets, *short_run(arguments)], Path(folder) / "drill", variables)
        left = states(Path(folder) / "drill" / "run")
    latest = 2 * max(arguments.replay_interval, arguments.state_interval)
    return judge(flip, code, messages, left, reference, latest)


def quiet_run(arguments, sets):
    """Steps that a long run without a flip has done, and whether it found something nevertheless."""
    if arguments.quiet_steps == 0:
        return 0, False
    folder = arguments.temporary / "quiet"
    code, messages = run(arguments, [*sets, f"training.steps={arguments.quiet_steps}", "training.log_interval=1000",
                                     "checkpoint.interval=0", "checkpoint.save_final=false"], folder)
    if code == CORRUPTED:
        print(f"false alarm: {error_line(messages)}")
        return records(folder / "run")[-1]["step"], True
    require_success(code, folder / "log")
    return arguments.quiet_steps, False


def figures_of(results, alarms):
    """The figures; a target of which no run counts has none."""
    def found_percent(chosen):
        counted = [result for result in chosen if result["outcome"] != "no change"]
        return 100 * sum(result["outcome"] == "found" for result in counted) / len(counted) if counted else None

    of_targets = {target: found_percent([result for result in results if result["target"] == target]) for target in TARGETS}
    figures = {"sdc.found_percent": found_percent(results), **{f"sdc.found_percent.{key}": of for key, of in of_targets.items()}}
    figures = {name: value for name, value in figures.items() if value is not None}
    return {**figures, "sdc.bad_states_saved": sum(bool(result["bad_states"]) for result in results), "sdc.false_alarms": alarms}


def print_outcomes(results):
    print(f"{'target':10}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES))
    for target in TARGETS:
        outcomes = [result["outcome"] for result in results if result["target"] == target]
        if outcomes:
            print(f"{target:10}" + "".join(f"{outcomes.count(outcome):12}" for outcome in OUTCOMES))
    for result in results:
        if result["outcome"] not in ("found", "no change") or result["bad_states"]:
            print(f"flip:{result['target']}:{result['step']}:{result['rank']}:{result['seed']}: {result['outcome']}, exit code "
                  f"{result['exit_code']}, bad states {result['bad_states']}: {result.get('message', '')}")


def target_list(text):
    targets = text.split(",")
    if not set(targets) <= set(TARGETS):
        raise argparse.ArgumentTypeError(f"expected some of {','.join(TARGETS)}, got {text}")
    return targets


def read_arguments():
    parser = RunParser(__doc__)
    parser.add_argument("--flips", type=positive, default=100, help="runs with a flip (default 100)")
    parser.add_argument("--targets", type=target_list, default=list(TARGETS), help=f"by default {','.join(TARGETS)}")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at the same time (default 1)")
    parser.add_argument("--steps", type=positive, default=12, help="steps of a run with a flip (default 12)")
    parser.add_argument("--save-interval", type=positive, default=3, help="steps between saves (default 3)")
    for kind in ("replay", "state"):
        parser.add_argument(f"--{kind}-interval", type=at_least(0), default=1, help="steps between checks, 0: off (default 1)")
    parser.add_argument("--quiet-steps", type=at_least(0), default=0, help="steps of a run without a flip (default: no such run)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the places of flips (default 1)")
    parser.add_argument("--timeout", type=positive, help="seconds after which a run is killed and counts as failed (default: never)")
    return parser.parse_args()


def measure(arguments):
    """Results of all flips, and what became of the runs without any."""
    config = resolved_config(arguments)
    sets = shared_options(config, arguments.temporary, max(arguments.steps, arguments.quiet_steps))
    reference_folder = arguments.temporary / "reference"
    code, messages = run(arguments, [*sets, *short_run(arguments)], reference_folder)
    if code != 0:
        fail(f"the reference run ended with {code}: {error_line(messages)}", 1)
    reference = states(reference_folder / "run")
    flips = choose_flips(arguments)
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        quiet = pool.submit(quiet_run, arguments, sets)
        under_way = [pool.submit(drill, arguments, sets, reference, number, flip) for number, flip in enumerate(flips)]
        results = [run.result() for run in under_way]
        return results, *quiet.result()


def main():
    arguments = read_arguments()
    with tempfile.TemporaryDirectory(prefix="parka-flip-drill-") as temporary:
        arguments.temporary = Path(temporary)
        results, quiet_steps, alarm = measure(arguments)
    print_outcomes(results)
    print(f"without a flip: {quiet_steps + arguments.steps} steps with checks, {int(alarm)} false alarms")
    figures = figures_of(results, int(alarm))
    write_report(arguments, figures, {"quiet_steps": quiet_steps + arguments.steps, "counted": sum(
        result["outcome"] != "no change" for result in results), "flips": results})
    sys.exit(int(any(result["outcome"] not in ("found", "no change") or result["bad_states"] for result in results) or alarm))


if __name__ == "__main__":
    run_main(main)
