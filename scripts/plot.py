#!/usr/bin/env python3
"""Plots the metrics of one or several runs into a PNG.

    scripts/plot.py runs/a/metrics.jsonl runs/b/metrics.jsonl --out loss.png

Panels: training loss (thin: every step, thick: smoothed) with held-out loss as dots, gradient norm, learning rate,
tokens per second.
"""
import argparse
import json
import os
import sys


def fail(message):
    print(f"plot.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def read_records(path):
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().splitlines()
    except OSError as error:
        fail(f"{path}: {error.strerror}; give the metrics.jsonl of a run folder")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            if number != len(lines):  # a running training may be writing the last line
                fail(f"{path}:{number}: not a JSON record")
    return records


def series(records, kind, key):
    points = [(r["step"], r[key]) for r in records if r.get("kind") == kind and r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def smoothed(values, width):
    """Mean over the last `width` values."""
    result, total = [], 0.0
    for i, value in enumerate(values):
        total += value - (values[i - width] if i >= width else 0.0)
        result.append(total / min(i + 1, width))
    return result


def run_name(path):
    return os.path.basename(os.path.dirname(os.path.abspath(path))) or path


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("metrics", nargs="+", help="metrics.jsonl of a run; several are drawn over each other")
    parser.add_argument("--out", required=True, help="PNG to write")
    parser.add_argument("--smooth", type=int, default=25, help="steps that the thick loss curve averages over")
    arguments = parser.parse_args()
    if arguments.smooth < 1:
        fail("--smooth: must be at least 1")

    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(12, 8), constrained_layout=True)
    loss_axis, norm_axis, rate_axis, speed_axis = axes.flat
    for index, path in enumerate(arguments.metrics):
        records = read_records(path)
        color, name = f"C{index}", run_name(path)
        steps, losses = series(records, "train", "loss")
        if not steps:
            fail(f"{path}: holds no training steps")
        loss_axis.plot(steps, losses, color=color, alpha=0.25, linewidth=0.7)
        loss_axis.plot(steps, smoothed(losses, arguments.smooth), color=color, linewidth=1.6, label=name)
        held_out = series(records, "eval", "loss")
        if held_out[0]:
            loss_axis.plot(*held_out, "o", color=color, markersize=4, markeredgecolor="black", label=f"{name}, held out")
        norm_axis.plot(*series(records, "train", "grad_norm"), color=color, linewidth=0.8)
        rate_axis.plot(*series(records, "train", "lr"), color=color)
        speed_axis.plot(*series(records, "train", "tokens_per_second"), color=color, linewidth=0.8)
    loss_axis.set_title("loss (nats per token)")
    loss_axis.legend()
    norm_axis.set_title("gradient norm before clipping")
    norm_axis.set_yscale("log")
    rate_axis.set_title("learning rate")
    speed_axis.set_title("tokens per second")
    for axis in axes.flat:
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    try:
        figure.savefig(arguments.out, dpi=110)
    except OSError as error:
        fail(f"{arguments.out}: {error.strerror}")


if __name__ == "__main__":
    main()
