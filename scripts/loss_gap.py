#!/usr/bin/env python3
"""The difference between training losses of runs over the same batches, averaged over the end of the runs.

    scripts/loss_gap.py bf16=runs/bf16/metrics.jsonl coat=runs/coat/metrics.jsonl parka=... [--last 0.05]

The first run is what the others are compared with. Prints one JSON line for each other run: the mean of its loss less the
first's in nats per token, and the standard error of that mean, from the steps' differences.
"""
import argparse
import json
import math
import statistics
import sys


def losses(path):
    with open(path, encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    return {record["step"]: record["loss"] for record in records if record.get("kind") == "train"}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=METRICS")
    parser.add_argument("--last", type=float, default=0.05, help="share of the steps to average over")
    options = parser.parse_args()
    (base_name, base), *others = [(name, losses(path)) for name, path in (run.split("=", 1) for run in options.runs)]
    for name, run in others:
        if run.keys() != base.keys():
            print(f"loss_gap.py: error: {name} and {base_name} have different steps", file=sys.stderr)
            sys.exit(2)
        steps = sorted(base)
        last = steps[-max(2, round(options.last * len(steps))):]
        gaps = [run[step] - base[step] for step in last]
        print(json.dumps({"recipe": name, "against": base_name, "nats": statistics.mean(gaps),
                          "standard_error": statistics.stdev(gaps) / math.sqrt(len(gaps)),
                          "loss": statistics.mean(run[step] for step in last),
                          "steps": [last[0], last[-1]]}))


if __name__ == "__main__":
    main()
