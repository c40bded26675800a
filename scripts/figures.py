#!/usr/bin/env python3
"""Turns files that `parka bench --json` wrote into lines of docs/results/figures.jsonl; a newer line replaces an older
one of its name.

    scripts/figures.py --commit COMMIT [--gpus N] MODEL.RECIPE.json...

The file's name gives model and recipe: olmo-1b.bf16.json.
"""
import argparse
import datetime
import json
import os
import statistics

FIGURES = os.path.join(os.path.dirname(__file__), "..", "docs", "results", "figures.jsonl")
# Ops of some size, under the names that the figures have.
KERNELS = ("norm_forward", "norm_backward", "rope_forward", "rope_backward", "swiglu_forward", "swiglu_backward",
           "cross_entropy", "embedding_forward", "embedding_backward", "sum_of_squares", "adamw_step")
CONTEXT_BYTES = 560_000_000  # as in src/engine/gpu_plan.h


def figures_of(bench, model, recipe, gpus):
    """Yields (name, value, unit, spread)."""
    speeds = [bench["tokens_per_step"] / seconds for seconds in bench["step_seconds"]]
    step = f"step.{model}.{recipe}.{gpus}gpu"
    yield f"{step}.tok_s_gpu", bench["tokens_per_second"], "tok/s", (min(speeds), max(speeds))
    used = bench["used_bytes"] / 1e9
    yield f"{step}.peak_gb", used, "GB", (used, used)
    error = 100 * ((bench["planned_bytes"] + CONTEXT_BYTES) / bench["used_bytes"] - 1)
    yield f"plan.{model}.{recipe}.error_percent", error, "%", (error, error)
    if "floor_seconds" in bench:
        fractions = [bench["floor_seconds"] / seconds for seconds in bench["step_seconds"]]
        yield (f"roofline.{model}.{recipe}.fraction", statistics.median(fractions), "1",
               (min(fractions), max(fractions)))
    for kernel in KERNELS:
        ops = [op for op in bench["ops"] if op["op"] == kernel]
        if not ops:
            continue
        rates = [op["bytes"] * op["runs"] / op["seconds"] / bench["copy_bandwidth"] for op in ops]
        together = (sum(op["bytes"] * op["runs"] for op in ops) / sum(op["seconds"] for op in ops)
                    / bench["copy_bandwidth"])
        yield f"kernel.{kernel}.{model}.copy_fraction", together, "1", (min(rates), max(rates))
    busy = sum(op["seconds"] for op in bench["ops"]) / bench["timed_step_seconds"]
    yield f"busy.{model}.{recipe}.fraction", busy, "1", (busy, busy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--command", default="scripts/reproduce/bf16.sh OUT")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    with open(FIGURES, encoding="utf-8") as file:
        figures = {line["name"]: line for line in map(json.loads, file)}
    for path in options.files:
        model, recipe = os.path.basename(path).removesuffix(".json").rsplit(".", 1)
        with open(path, encoding="utf-8") as file:
            bench = json.load(file)
        for name, value, unit, spread in figures_of(bench, model, recipe, options.gpus):
            figures[name] = {"name": name, "value": float(f"{value:.6g}"), "unit": unit,
                             "spread": [float(f"{x:.6g}") for x in spread], "command": options.command,
                             "commit": options.commit, "date": str(datetime.date.today()), "card": bench["device"]}
    with open(FIGURES, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(figure) + "\n" for figure in figures.values())


if __name__ == "__main__":
    main()
