#!/usr/bin/env python3
"""Turns measurements into lines of docs/results/figures.jsonl; a newer line replaces an older one of its name.

    scripts/research/figures.py --commit COMMIT [--gpus N] MODEL.RECIPE.json... [--kernels FILE] [--attention FILE]
    scripts/research/figures.py --table OUT/MODEL.RECIPE...      prints a table of those runs instead

MODEL.RECIPE.json is what `parka bench --json` wrote, olmo-1b.bf16.json for example; the files are what bench_kernels printed
and what `scripts/research/attention_vs_cudnn.py --json` wrote.
"""
import argparse
import datetime
import json
import os
import statistics

FIGURES = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "results", "figures.jsonl")


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
    joules = bench.get("power", {}).get("joules_per_token")  # of all ranks together
    if joules is not None and gpus == 1:
        yield f"energy.{model}.{recipe}.joules_per_token", joules, "J", (joules, joules)


def kernel_figures(lines):
    """The same of kernels alone; rates vary as the times of their runs do."""
    for line in lines:
        if line["op"].startswith("attention_"):
            continue  # beside cuDNN's: attention_figures
        value = line["copy_fraction"]
        spread = tuple(value * line["us"] / line[time] for time in ("us_most", "us_least"))
        op = "optimizer.adamw_fp8" if line["op"] == "adamw_step.fp8" else f"kernel.{line['op']}.{line['model']}"
        yield f"{op}.copy_fraction", value, "1", spread


def attention_figures(lines):
    """Attention beside cuDNN; each line has two measurements of Parka's and one of cuDNN's."""
    for line in lines:
        for direction, key in (("fwd", "forward"), ("bwd", "backward")):
            name = f"attention.{direction}.d128.s{line['length']}"
            values, cudnn = line[key], line["cudnn_" + key]
            yield f"{name}.tflops", statistics.mean(values), "TFLOP/s", (min(values), max(values))
            yield (f"{name}.vs_cudnn", statistics.mean(values) / cudnn, "1",
                   (min(values) / cudnn, max(values) / cudnn))


def print_table(runs):
    print("| model | recipe | tokens/s (least to most) | TFLOP/s | in use | planned less used | floor / step |")
    print("|---|---|---|---|---|---|---|")
    for run in runs:
        model, recipe = os.path.basename(run).rsplit(".", 1)
        with open(run + ".json", encoding="utf-8") as file:
            bench = json.load(file)
        measured = {name: (value, spread) for name, value, _, spread in step_figures(bench, model, recipe, 1)}
        speed, (least, most) = measured[f"step.{model}.{recipe}.1gpu.tok_s_gpu"]
        floor = "not measured"  # without --roofline
        if "floor_seconds" in bench:
            floor = f"{statistics.median(bench['floor_seconds'] / s for s in bench['step_seconds']):.3f}"
        print(f"| {model} | {recipe} | {speed:,.0f} ({least:,.0f} to {most:,.0f}) | {1e-12 * bench['model_flops']:.0f} "
              f"| {bench['used_bytes'] / 1e9:.1f} GB "
              f"| {100 * ((bench['planned_bytes'] + bench['context_bytes']) / bench['used_bytes'] - 1):+.2f} % "
              f"| {floor} |")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--commit")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--kernels", metavar="FILE")
    parser.add_argument("--attention", metavar="FILE")
    parser.add_argument("files", nargs="*")
    options = parser.parse_args()
    if options.table:
        print_table(options.files)
        return
    if not options.commit:
        parser.error("--commit is wanted")
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
        add(step_figures(bench, model, recipe, options.gpus), f"scripts/research/one_gpu.sh OUT {model}.{recipe}",
            bench["device"])
    if options.kernels:
        with open(options.kernels, encoding="utf-8") as file:
            device, *lines = map(json.loads, file)
        add(kernel_figures(lines), "bench_kernels", device["device"])
    if options.attention:
        with open(options.attention, encoding="utf-8") as file:
            lines = list(map(json.loads, file))
        add(attention_figures(lines), "scripts/research/attention_vs_cudnn.py", lines[0]["card"])
    with open(FIGURES, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(figure) + "\n" for figure in figures.values())


if __name__ == "__main__":
    main()
