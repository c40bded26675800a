#!/usr/bin/env python3
"""Losses after equal time, of the runs of clock.sh.

    scripts/research/clock.py OUT --model 110m --limit 600 --share 0.3

Runs are the folders in OUT: trial.KIND, which has the speed, sweep.KIND_LR.SEED, which had the share of the time, and KIND_LR.SEED. A
KIND is dense or mixture and adamw or muon. A run's loss is that of its last evaluation, its time that of its steps. For each
kind: the loss with its best rate. Beside dense AdamW each other kind has a tax, the time that it takes for a token, and a net speed:
the time in which dense AdamW reaches its loss, over that in which this kind reaches it, from its losses with the share and all of the
time, linear in the logarithm of the time. Its gain is the same in tokens, net speed times tax. --steps KIND prints the steps that fit
into the time, or the share --of of it, and --best KIND the rate with the lowest loss in the sweep. --json prints figures:
clock.MODEL.KIND.held_out, .tax, .gain, .net_speedup by seed, and clock.MODEL.net_speedup, of the best kind.

Exit codes: 0 done, 2 something is wrong with the runs or the options, 4 writing failed.
"""
import argparse
import re
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import fail, metrics_path, read_records, run_main  # noqa: E402
from tokens_saved import last_loss, print_figures, share_for  # noqa: E402

RUN = re.compile(r"(?P<sweep>sweep\.)?(?P<kind>(dense|mixture)_(adamw|muon))_(?P<lr>[0-9.e-]+)\.(?P<seed>\d+)")
BASE = "dense_adamw"


def step_seconds(folder):
    """The median over the second half of a run's steps: routers have learned to share by then."""
    steps = [record["seconds"] for record in read_records(metrics_path(str(folder))) if record.get("kind") == "train"]
    if not steps:
        fail(f"{folder}: has no step; let clock.sh train it")
    return statistics.median(steps[len(steps) // 2:])


def run_seconds(folder):
    return sum(record["seconds"] for record in read_records(metrics_path(str(folder))) if record.get("kind") == "train")


def read_runs(out):
    """({kind: {(lr, seed): loss}} of the sweep, the same of whole runs, {kind: [seconds of whole runs]})."""
    sweep, whole, seconds = {}, {}, {}
    for folder in sorted(Path(out).iterdir()):
        name = RUN.fullmatch(folder.name)
        if not name or not folder.is_dir():
            continue
        (sweep if name["sweep"] else whole).setdefault(name["kind"], {})[name["lr"], int(name["seed"])] = last_loss(folder)
        if not name["sweep"]:
            seconds.setdefault(name["kind"], []).append(run_seconds(folder))
    return sweep, whole, seconds


def best_rate(sweep, kind):
    if not sweep.get(kind):
        fail(f"there is no sweep of {kind}; let clock.sh train it")
    return min((loss, lr) for (lr, _), loss in sweep[kind].items())[1]


def figures_of(args, step_of, sweep, whole, seconds):
    model = f"clock.{args.model}"
    base = {seed: loss for (_, seed), loss in whole.get(BASE, {}).items()}
    if not base:
        fail(f"there is no run of {BASE}; let clock.sh train it")
    figures, speeds = [], {}
    for kind, runs in whole.items():
        losses = {seed: loss for (_, seed), loss in runs.items()}
        figures.append((f"{model}.{kind}.held_out", list(losses.values()), "nats/token"))
        figures.append((f"{model}.{kind}.seconds", seconds[kind], "s"))
        if kind == BASE:
            continue
        tax = step_of(kind) / step_of(BASE)
        lr = best_rate(sweep, kind)
        first = min(seed for of_lr, seed in sweep[kind] if of_lr == lr)
        if first not in losses:
            fail(f"{kind} has no whole run of seed {first}; let clock.sh train it")
        fall = sweep[kind][lr, first] - losses[first]  # other seeds' curves are the first one's, moved to their own loss
        net = [1 / share_for(base[seed], {args.share: loss + fall, 1.0: loss}) for seed, loss in losses.items() if seed in base]
        speeds[kind] = net
        figures += [(f"{model}.{kind}.tax", [tax], "1"), (f"{model}.{kind}.gain", [speed * tax for speed in net], "1"),
                    (f"{model}.{kind}.net_speedup", net, "1")]
    if speeds:
        best = max(speeds, key=lambda kind: statistics.mean(speeds[kind]))
        figures.append((f"{model}.net_speedup", speeds[best], "1"))
    return figures


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="the folder of clock.sh")
    parser.add_argument("--model", required=True, help="its name in figures")
    parser.add_argument("--limit", type=float, required=True, help="seconds of a run")
    parser.add_argument("--share", type=float, required=True, help="of the seconds, in the sweep")
    parser.add_argument("--steps", metavar="KIND", help="print the steps that fit into the time")
    parser.add_argument("--of", type=float, default=1, help="a share of the time (default 1)")
    parser.add_argument("--best", metavar="KIND", help="print the best learning rate alone")
    parser.add_argument("--json", action="store_true", help="print figures, one a line")
    args = parser.parse_args()

    def step_of(kind):
        return step_seconds(Path(args.out) / f"trial.{kind}")

    if args.steps:
        print(max(10, round(args.limit * args.of / step_of(args.steps))))
        return
    sweep, whole, seconds = read_runs(args.out)
    if args.best:
        print(best_rate(sweep, args.best))
        return
    print_figures(figures_of(args, step_of, sweep, whole, seconds), args.json)


if __name__ == "__main__":
    run_main(main)
