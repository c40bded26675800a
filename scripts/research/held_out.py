#!/usr/bin/env python3
"""Losses on held-out data of runs with several recipes and seeds, side by side.

    scripts/research/held_out.py bf16.1 bf16.2 parka.1 parka.2 --model olmo-150m --out held_out.png

A run is a run folder named RECIPE.SEED, or RECIPE.SEED=FOLDER, that was evaluated on data.eval (training.eval_interval). The first
run's recipe is the base. Prints a table of each recipe, means over its seeds: the loss at the first evaluation and at the last, the
lowest, the last loss minus that of the base run with the same seed, and with several seeds the interval that covers the true
difference with 95 % (Student's t). With --json it prints lines of figures instead, with their values by seed:
held_out.MODEL.RECIPE.nats_per_token, the last, and held_out.MODEL.RECIPE.vs_BASE. The picture shows losses over steps, and
differences to the base: means over the seeds, with bands from the least to the most.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("numpy")
import numpy as np  # noqa: E402

from compare import print_rows  # noqa: E402
from equal_loss import draw_band, figure, student_interval  # noqa: E402
from paired_losses import runs_by_seed  # noqa: E402
from run_metrics import fail, metrics_path, read_records, run_main, save_picture  # noqa: E402


def read_curve(name, run):
    """(steps, losses) of the evaluations; of several at one step, as a resumed run may have, the last."""
    path = metrics_path(run)
    losses = {record["step"]: record["loss"] for record in read_records(path)
              if record.get("kind") == "eval" and record.get("loss") is not None}
    if len(losses) < 2:
        fail(f"{path}: {name} has {len(losses)} evaluations; two are needed, set training.eval_interval and data.eval")
    steps = sorted(losses)
    return np.array(steps, float), np.array([losses[step] for step in steps])


def read_runs(arguments):
    """{recipe: {seed: (steps, losses)}}, in the order in which recipes are named."""
    runs = {recipe: {seed: read_curve(*named) for seed, named in of_recipe.items()} for recipe, of_recipe in runs_by_seed(arguments).items()}
    base_name = next(iter(runs))
    for recipe, of_recipe in runs.items():
        for seed, (steps, _) in of_recipe.items():
            if seed not in runs[base_name]:
                fail(f"{recipe}.{seed}: there is no run of {base_name} with this seed; give one")
            if not np.array_equal(steps, runs[base_name][seed][0]):
                fail(f"{recipe}.{seed}: was evaluated at other steps than {base_name}.{seed}; train both alike, to the end")
    return runs


def gaps_of(runs, base_name, recipe):
    return {seed: losses - runs[base_name][seed][1] for seed, (_, losses) in runs[recipe].items()}


def figures_of(model, runs, base_name):
    for recipe, of_recipe in runs.items():
        last = {seed: losses[-1] for seed, (_, losses) in of_recipe.items()}
        yield figure(f"held_out.{model}.{recipe}.nats_per_token", np.mean(list(last.values())), "nats/token", last)
        if recipe == base_name:
            continue
        gaps = {seed: gap[-1] for seed, gap in gaps_of(runs, base_name, recipe).items()}
        values = list(gaps.values())
        yield figure(f"held_out.{model}.{recipe}.vs_{base_name}", np.mean(values), "nats/token", gaps, student_interval(values) if len(values) > 1 else None)


def print_table(runs, base_name):
    rows = [["recipe", "seeds", "first", "lowest", "last", "least to most", f"less {base_name}", "least to most", "95 % interval"]]
    for recipe, of_recipe in runs.items():
        curves = [losses for _, losses in of_recipe.values()]
        last = [losses[-1] for losses in curves]
        row = [recipe, str(len(curves)), f"{np.mean([c[0] for c in curves]):.4f}", f"{np.mean([c.min() for c in curves]):.4f}",
               f"{np.mean(last):.4f}", f"{min(last):.4f} to {max(last):.4f}"]
        if recipe != base_name:
            gaps = [gap[-1] for gap in gaps_of(runs, base_name, recipe).values()]
            limits = student_interval(gaps) if len(gaps) > 1 else None
            row += [f"{np.mean(gaps):+.4f}", f"{min(gaps):+.4f} to {max(gaps):+.4f}",
                    f"{limits[0]:+.4f} to {limits[1]:+.4f}" if limits else "one seed"]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    print_rows(rows)


def draw(plt, runs, base_name):
    picture, (loss_axis, gap_axis) = plt.subplots(2, 1, figsize=(10, 9), sharex=True, constrained_layout=True)
    for index, (recipe, of_recipe) in enumerate(runs.items()):
        draw_band(loss_axis, list(of_recipe.values()), f"C{index}", recipe)
        if recipe != base_name:
            gaps = [(of_recipe[seed][0], gap) for seed, gap in gaps_of(runs, base_name, recipe).items()]
            draw_band(gap_axis, gaps, f"C{index}", recipe)
    gap_axis.axhline(0, color="C0", linewidth=1)
    loss_axis.set_title("held-out loss (nats per token), mean of the seeds, least to most of the seeds")
    gap_axis.set_title(f"held-out loss minus that of {base_name} over the same batches")
    gap_axis.set_xlabel("steps")
    loss_axis.legend()
    if len(runs) > 1:
        gap_axis.legend()
    for each in (loss_axis, gap_axis):
        each.grid(alpha=0.3)
    return picture


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="RECIPE.SEED, a run folder, or RECIPE.SEED=FOLDER; the first is of the base")
    parser.add_argument("--model", metavar="NAME", help="in the names of figures; --json needs it")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    parser.add_argument("--out", metavar="PICTURE", help="its name ends in .png, .svg, .pdf or another format of matplotlib")
    options = parser.parse_args()
    if options.json and not options.model:
        fail("--json: the names of figures have the model's; give it with --model")
    return options


def main():
    options = read_options()
    runs = read_runs(options.run)
    base_name = next(iter(runs))
    if options.json:
        for each in figures_of(options.model, runs, base_name):
            print(json.dumps(each))
    else:
        print_table(runs, base_name)
    if options.out:
        save_picture(lambda plt: draw(plt, runs, base_name), options.out)


if __name__ == "__main__":
    run_main(main)
