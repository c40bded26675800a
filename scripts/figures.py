#!/usr/bin/env python3
"""Turns measurements into lines of docs/results/figures.jsonl; a newer line replaces an older one of its name.

    scripts/figures.py --commit COMMIT [--gpus N] MODEL.RECIPE.json... [--kernels FILE]

MODEL.RECIPE.json is what `parka bench --json` wrote, olmo-1b.bf16.json for example; FILE is the output of bench_kernels.
"""
import argparse
import datetime
import json
import os
import statistics

FIGURES = os.path.join(os.path.dirname(__file__), "..", "docs", "results", "figures.jsonl")


def step_figures(bench, model, recipe, gpus):
    """Yields (name, value, unit, (least, most)) of whole steps."""
    speeds = [bench["tokens_per_step"] / seconds for seconds in bench["step_seconds"]]
    step = f"step.{model}.{recipe}.{gpus}gpu"
    yield f"{step}.tok_s_gpu", bench["tokens_per_second"], "tok/s", (min(speeds), max(speeds))
    used = bench["used_bytes"] / 1e9
    yield f"{step}.peak_gb", used, "GB", (used, used)
    error = 100 * ((bench["planned_bytes"] + bench["context_bytes"]) / bench["used_bytes"] - 1)
    yield f"plan.{model}.{recipe}.error_percent", error, "%", (error, error)
    if "floor_seconds" in bench:
        fractions = [bench["floor_seconds"] / seconds for seconds in bench["step_seconds"]]
        yield (f"roofline.{model}.{recipe}.fraction", statistics.median(fractions), "1",
               (min(fractions), max(fractions)))
    busy = sum(op["seconds"] for op in bench["ops"]) / bench["timed_step_seconds"]
    yield f"busy.{model}.{recipe}.fraction", busy, "1", (busy, busy)


def kernel_figures(lines):
    """The same of kernels alone; rates vary as the times of their runs do."""
    for line in lines:
        is_attention = line["op"].startswith("attention_")
        value = line["tflops"] if is_attention else line["copy_fraction"]
        spread = tuple(value * line["us"] / line[time] for time in ("us_most", "us_least"))
        if not is_attention:
            yield f"kernel.{line['op']}.{line['model']}.copy_fraction", value, "1", spread
        elif line["model"] == "llama2-7b":
            direction = {"attention_forward": "fwd", "attention_backward": "bwd"}[line["op"]]
            yield f"attention.{direction}.d128.s2048.tflops", value, "TFLOP/s", spread


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit", required=True)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--kernels", metavar="FILE")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    with open(FIGURES, encoding="utf-8") as file:
        figures = {line["name"]: line for line in map(json.loads, file)}

    def add(measured, command, card):
        for name, value, unit, spread in measured:
            figures[name] = {"name": name, "value": float(f"{value:.6g}"), "unit": unit,
                             "spread": [float(f"{x:.6g}") for x in spread], "command": command,
                             "commit": options.commit, "date": str(datetime.date.today()), "card": card}

    for path in options.files:
        model, recipe = os.path.basename(path).removesuffix(".json").rsplit(".", 1)
        with open(path, encoding="utf-8") as file:
            bench = json.load(file)
        add(step_figures(bench, model, recipe, options.gpus), f"scripts/reproduce/{recipe}.sh OUT", bench["device"])
    if options.kernels:
        with open(options.kernels, encoding="utf-8") as file:
            device, *lines = map(json.loads, file)
        add(kernel_figures(lines), "bench_kernels", device["device"])
    with open(FIGURES, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(figure) + "\n" for figure in figures.values())


if __name__ == "__main__":
    main()
