#!/usr/bin/env python3
"""Runs the tests of several ranks under each of the starters of tests/support/starters.py, and compares what their runs compute.

    tests/equal_bits/compare_starters.py build/release --jobs 4                on CPUs
    tests/equal_bits/compare_starters.py build/cuda --device cuda --jobs 8     on GPUs: two do, four show all

These are the files tests/commands/test_ranks.py and tests/comm/test_collectives.py, and on CPUs also test_start.py and
test_watchdog.py. The programs in the build folder must be there; nothing else is needed but Python, and mpirun for the starter of
that name. Prints a line for each starter. Ends with 1 if a test fails or bits differ, with 2 if a starter or a GPU is missing."""
import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import time

TESTS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
sys.path[:0] = [TESTS, os.path.join(TESTS, "support"), os.path.join(TESTS, "commands")]
import starters  # noqa: E402
from list_tests import list_tests  # noqa: E402
from parka_runs import num_gpus  # noqa: E402

SKIPPED = 77


def commands(device, gpus):
    """Of each test its name, its file below tests/ and that file's arguments; those that take longest come first."""
    def each_of(file, *arguments):
        with open(os.path.join(TESTS, file), encoding="utf-8") as text:
            return [(test.split(".")[1], file, [*arguments, test]) for test in list_tests(text.read())]

    sizes = [size for size in (2, 3, 4) if device == "cpu" or size <= gpus]
    collectives = [(f"collectives of {size}", "comm/test_collectives.py", [str(size), *(["cuda"] if device == "cuda" else [])])
                   for size in sizes]
    others = [*each_of("comm/test_watchdog.py"), *each_of("comm/test_start.py")] if device == "cpu" else []
    return [*each_of("commands/test_ranks.py", device), *collectives, *others]


def run_test(file, arguments, environment):
    """Its exit code, and what it printed."""
    result = subprocess.run([sys.executable, os.path.join(TESTS, file), *arguments], env=environment, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)
    return result.returncode, result.stdout


def run_all(tests, starter, build, folder, jobs):
    """Runs all under one starter. Gives the names of those that fail and of those that are skipped, and prints their output."""
    programs = {"PARKA_PROGRAM": os.path.join(build, "parka"), "RANKS_PROGRAM": os.path.join(build, "tests", "ranks_program")}
    environment = {**os.environ, **{name: os.path.abspath(path) for name, path in programs.items()}, "RANKS_STARTER": starter}
    failed, skipped = [], []
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run_test, file, arguments, {**environment, "RANKS_BITS": os.path.join(folder, f"{name}.jsonl")}): name
                for name, file, arguments in tests}
        for run in concurrent.futures.as_completed(runs):
            code, output = run.result()
            if code == SKIPPED or code == 0 and "skipped=" in output:
                skipped.append(runs[run])
            elif code != 0:
                failed.append(runs[run])
                print(f"{output}\n{starter}: {runs[run]}: FAILED with {code}", flush=True)
    return failed, skipped


def read_bits(folder):
    """Every run of a starter, by its test and its place there: its name and what it computed."""
    bits = {}
    for name in sorted(os.listdir(folder)):
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            bits.update({(name.removesuffix(".jsonl"), place): json.loads(line) for place, line in enumerate(file)})
    return bits


def differences(bits):
    """Of {starter: read_bits}: a line for each run that is not as the first starter's."""
    first, *others = bits
    lines = []
    for other in others:
        for key in sorted({*bits[first], *bits[other]}):
            runs = [bits[starter].get(key) for starter in (first, other)]
            if runs[0] != runs[1]:
                what = "is missing under one" if None in runs else "differs"
                name = next(run["run"] for run in runs if run is not None)
                lines.append(f"{key[0]}: the run {name} {what}: {first}, {other}")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", help="a build folder with parka and tests/ranks_program")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, default=2, help="tests at a time (2)")
    parser.add_argument("--starters", default=",".join(starters.STARTERS), help="%(default)s")
    parser.add_argument("--only", default="", help="the tests whose name has this in it")
    options = parser.parse_args()
    gpus = num_gpus()
    if options.device == "cuda" and gpus < 2:
        parser.error(f"--device cuda: {gpus} GPUs are visible, two are needed")
    tests = [test for test in commands(options.device, gpus) if options.only in test[0]]
    if not tests:
        parser.error(f"--only {options.only}: no test has this in its name")
    chosen = options.starters.split(",")
    for starter in chosen:
        if starter not in starters.STARTERS or not starters.is_available(starter):
            parser.error(f"--starters: {starter} is not to be had here; choose of {', '.join(starters.STARTERS)}, of which mpirun "
                         "must be on PATH")

    passed, bits = True, {}
    with tempfile.TemporaryDirectory(prefix="parka-starters-") as folder:
        for starter in chosen:
            own = os.path.join(folder, starter)
            os.mkdir(own)
            began = time.monotonic()
            failed, skipped = run_all(tests, starter, options.build, own, options.jobs)
            bits[starter] = read_bits(own)
            passed = passed and not failed
            print(f"{starter}: {len(tests) - len(failed) - len(skipped)} of {len(tests)} tests passed, {len(skipped)} skipped, "
                  f"{len(bits[starter])} runs of several ranks, {time.monotonic() - began:.0f} s", flush=True)
            for kind, names in (("failed", failed), ("skipped", skipped)):
                if names:
                    print(f"  {kind}: {', '.join(sorted(names))}", flush=True)
    differ = differences(bits)
    runs = len(bits[chosen[0]])
    print("\n".join(differ) or (f"equal bits: {runs} runs under each of {', '.join(chosen)}" if runs else "no runs to compare"))
    sys.exit(0 if passed and not differ else 1)


if __name__ == "__main__":
    main()
