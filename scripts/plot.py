#!/usr/bin/env python3
"""Plots the metrics of one or several runs into a picture.

    parka plot runs/a runs/b --out loss.png
    parka plot bf16=runs/a coat=runs/b --out loss.png
    parka plot runs/a --telemetry --out telemetry.png

A run is a run folder, its metrics.jsonl, or NAME= and one of these.

Panels: training loss (thin: every step, thick: means over centred windows) with held-out loss as dots, gradient norm,
learning rate, tokens per second; and where runs have them the losses of named evaluation sets and the scores of tasks
(docs/evaluation.md). Runs differ in color, sets and tasks in marker and dashes.

With --telemetry, of one run that was trained with telemetry.interval (docs/telemetry.md): relative error of each
quantized tensor and block in the last report, and its median over the blocks over the steps; share of elements that
became 0, likewise; the exponent k of each optimizer moment over the steps, as the median over all tensors of the
quartiles of each; and how far the score gradients of each block's attention are from adding up to zero. Medians of an even
number of values are the upper of the two in the middle.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import functools

from python_packages import HelpFormatter, command_name
from run_metrics import fail, median, metrics_path, named_runs, read_records, run_main, save_picture, smooth_curve
from sinks.scalars import as_double

MARKERS = "osv^D*P<>X"
DASHES = ("-", "--", ":", "-.")


def series(records, kind, key):
    points = [(r["step"], as_double(r[key])) for r in records if r.get("kind") == kind and r.get(key) is not None]
    return [p[0] for p in points], [p[1] for p in points]


def named(records, kind, name_key):
    """The records of a kind, by the name they have, in the order in which names come up."""
    result = {}
    for record in records:
        if record.get("kind") == kind:
            result.setdefault(record.get(name_key), []).append(record)
    return result


def numbers(values):
    """Numbers of a list that may hold nulls: what was not finite."""
    return [float("nan") if value is None else value for value in values]


def draw_heat_map(figure, axis, record, key, title):
    tensors = record["tensors"]
    rows = [numbers(tensor[key]) for tensor in tensors.values()]
    largest = max((value for row in rows for value in row if value == value), default=0.0)
    image = axis.imshow(rows, aspect="auto", interpolation="nearest", vmin=0.0, vmax=largest or 1.0)
    axis.set_yticks(range(len(tensors)), list(tensors), fontsize=7)
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_xlabel("block")
    axis.set_title(f"{title}, step {record['step']}")
    figure.colorbar(image, ax=axis)


def draw_medians(axis, records, key, title):
    for index, name in enumerate(records[-1]["tensors"]):
        points = [(r["step"], median(r["tensors"][name][key])) for r in records if name in r["tensors"]]
        axis.plot(*zip(*points), color=f"C{index % 10}", linestyle="-" if index < 10 else "--", linewidth=1, label=name)
    axis.set_title(f"{title}, median over blocks")
    axis.legend(fontsize=6, ncols=2)


def draw_exponents(axis, records, moment, color):
    """The quartiles of k over the groups of a tensor; of each the median over all tensors. Nothing of a moment without range
    expansion."""
    records = [record for record in records if any(moment in parameter for parameter in record["parameters"].values())]

    def over_tensors(record, quartile):
        return median([k for parameter in record["parameters"].values() if moment in parameter for k in parameter[moment]["k"][quartile]])

    steps = [record["step"] for record in records]
    lower, middle, upper = ([over_tensors(record, quartile) for record in records]
                            for quartile in ("lower_quartile", "median", "upper_quartile"))
    axis.fill_between(steps, lower, upper, color=color, alpha=0.25)
    axis.plot(steps, middle, color=color, marker=".", label=moment)


def draw_blocks(axis, records, key, title):
    """A curve for each block."""
    for block in range(len(records[-1]["blocks"][key]) if records else 0):
        values = numbers([record["blocks"][key][block] for record in records])
        axis.plot([record["step"] for record in records], values, color=f"C{block % 10}", linewidth=1)
    axis.set_title(title)


def draw_telemetry(plt, run):
    path = metrics_path(run)
    records = read_records(path)
    quantization = [record for record in records if record.get("kind") == "quantization"]
    moments = [record for record in records if record.get("kind") == "moments"]
    attention = [record for record in records if record.get("kind") == "attention"]
    if not quantization and not moments and not attention:
        fail(f"{path}: holds no telemetry; train with telemetry.interval set")
    try:
        return draw_reports(plt, quantization, moments, attention)
    except (IndexError, KeyError) as error:
        fail(f"{path}: its telemetry lacks what is drawn ({error}); give a run whose records are as it wrote them")


def draw_reports(plt, quantization, moments, attention):
    figure, axes = plt.subplots(4, 2, figsize=(14, 20), constrained_layout=True)
    if quantization:
        for row, (key, title) in zip(axes, (("error", "relative error"), ("underflowed", "share that became 0"))):
            draw_heat_map(figure, row[0], quantization[-1], key, title)
            draw_medians(row[1], quantization, key, title)
    for axis, moment, color in zip(axes[2], ("exp_avg", "exp_avg_sq"), ("C0", "C1")):
        if moments:
            draw_exponents(axis, moments, moment, color)
        axis.set_title(f"range expansion: k of {moment}, quartiles")
    draw_blocks(axes[3][0], attention, "imbalance", "attention: imbalance of each block")
    draw_blocks(axes[3][1], attention, "score_rms", "attention: scores of each block, root mean square")
    for axis in (axes[0][1], axes[1][1], *axes[2], *axes[3]):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    return figure


def draw_named(axis, names, runs, kind, name_key, value_key):
    """A curve for each run and each name, of `names` so that a name looks the same in all runs."""
    for index, (run, records) in enumerate(runs):
        for name, own in named(records, kind, name_key).items():
            place = names.index(name)
            axis.plot(*series(own, kind, value_key), color=f"C{index}", marker=MARKERS[place % len(MARKERS)], markersize=4,
                      linestyle=DASHES[place % len(DASHES)], linewidth=1, label=f"{run}, {name}")
    axis.legend(fontsize=7)


def draw_evaluations(axes, runs):
    """Named sets and tasks; returns the axes that something was drawn into."""
    drawn = []
    for axis, (kind, name_key, value_key, title) in zip(axes, (
            ("eval_set", "set", "loss", "loss of evaluation sets (nats per token)"),
            ("task", "task", "score", "scores of tasks"))):
        names = list(dict.fromkeys(name for _, records in runs for name in named(records, kind, name_key)))
        if names:
            draw_named(axis, names, runs, kind, name_key, value_key)
            axis.set_title(title)
            drawn.append(axis)
        else:
            axis.set_axis_off()
    return drawn


def draw_training(axes, runs, smooth):
    loss_axis, norm_axis, rate_axis, speed_axis = axes
    for index, (name, records) in enumerate(runs):
        color = f"C{index}"
        steps, losses = series(records, "train", "loss")
        loss_axis.plot(steps, losses, color=color, alpha=0.25, linewidth=0.7)
        loss_axis.plot(*smooth_curve(steps, losses, smooth), color=color, linewidth=1.6, label=name)
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
    for formatter in (norm_axis.yaxis.set_major_formatter, norm_axis.yaxis.set_minor_formatter):
        formatter(functools.partial(plain_number, norm_axis))
    rate_axis.set_title("learning rate")
    speed_axis.set_title("tokens per second")


def plain_number(axis, value, _):
    """Beside a tick of a logarithmic axis: 0.5, 1, 2, not a power of ten times something, and only so many that they have room."""
    least, most = axis.get_ylim()
    return f"{value:g}" if f"{value:e}"[0] in "125" or most < 4 * least else ""


def draw_runs(plt, given, smooth):
    runs = []
    for name, run in given:
        records = read_records(metrics_path(run))
        if not series(records, "train", "loss")[0]:
            fail(f"{metrics_path(run)}: holds no training steps")
        runs.append((name, records))
    evaluated = any(record.get("kind") in ("eval_set", "task") for _, records in runs for record in records)
    rows = 3 if evaluated else 2
    figure, axes = plt.subplots(rows, 2, figsize=(12, 4 * rows), constrained_layout=True)
    training_axes = list(axes.flat)[:4]
    draw_training(training_axes, runs, smooth)
    for axis in training_axes + (draw_evaluations(axes[2], runs) if evaluated else []):
        axis.set_xlabel("step")
        axis.grid(alpha=0.3)
    return figure


def main():
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("run", nargs="+", help="run folder, or NAME=FOLDER; several are drawn over each other")
    parser.add_argument("--out", required=True, help="picture to write; its name ends in .png, .svg, .pdf or another format of matplotlib")
    parser.add_argument("--smooth", type=int, default=25, help="width of the windows that the thick loss curve averages over, in steps")
    parser.add_argument("--telemetry", action="store_true", help="plot the telemetry of one run (telemetry.interval)")
    arguments = parser.parse_args()
    if arguments.smooth < 1:
        fail("--smooth: must be at least 1")
    if arguments.telemetry and len(arguments.run) > 1:
        fail("--telemetry: draws one run at a time")
    runs = named_runs(arguments.run)

    def draw(plt):
        return draw_telemetry(plt, runs[0][1]) if arguments.telemetry else draw_runs(plt, runs, arguments.smooth)

    save_picture(draw, arguments.out)


if __name__ == "__main__":
    run_main(main)
