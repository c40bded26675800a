#!/usr/bin/env python3
"""Prints what end_to_end.sh and per_layer.sh have planned and measured beside the figures of COAT's paper, as Markdown.

    scripts/research/paper_tables.py end_to_end OUT MODEL.GPUS...
    scripts/research/paper_tables.py per_layer OUT WIDTH.CONTEXT...

Recipes are those that OUT has plans of. Columns that nothing was measured for are left out.
"""
import json
import os
import statistics

from measured_runs import ScriptParser, fail, run_main

RECIPES = ("bf16", "fp8_linear", "coat", "parka")
# The paper's names of the same: fp8_linear is what Transformer Engine does.
PAPER_NAMES = {"bf16": "BF16", "fp8_linear": "TE", "coat": "COAT"}

# Table 7: optimizer and activations in 1000 MiB, peak in GB, largest batch per GPU, tokens/s per GPU; None: out of memory, or
# not printed.
END_TO_END = {
    "7b.1": {"bf16": (None, None, None, None, None), "fp8_linear": (None, None, None, None, None),
             "coat": (13.1, 8.1, 79.3, 1, 5906)},
    "7b.2": {"bf16": (None, None, None, 1, 6130), "fp8_linear": (None, None, None, 1, 6842), "coat": (6.5, 16.9, 52.8, 4, 11351)},
    "7b.4": {"bf16": (13.1, 25.8, 55.1, 2, 7730), "fp8_linear": (13.1, 21.9, 51.1, 2, 9577), "coat": (3.2, 16.9, 35.6, 4, 11257)},
    "7b.8": {"bf16": (6.5, 25.8, 41.2, 4, 8238), "fp8_linear": (6.5, 21.9, 37.2, 4, 11704), "coat": (1.6, 16.9, 27.0, 8, 11241)},
    "13b.2": {"bf16": (None, None, None, None, None), "fp8_linear": (None, None, None, None, None),
              "coat": (12.6, 10.1, 73.2, 1, 2137)},
    "13b.4": {"bf16": (25.1, 20.1, 76.1, 1, 2345), "fp8_linear": (25.1, 17.2, 73.0, 1, 2851), "coat": (6.3, 13.2, 49.1, 2, 5295)},
    "13b.8": {"bf16": (12.6, 20.1, 49.4, 2, 3907), "fp8_linear": (12.6, 17.2, 46.5, 2, 5604), "coat": (3.1, 13.2, 32.5, 4, 5650)},
    "30b.8": {"bf16": (None, None, None, None, None), "fp8_linear": (None, None, None, None, None),
              "coat": (7.8, 24.2, 70.5, 1, 1363)},
}

# Table 6: milliseconds of forward and backward, and MiB kept.
PER_LAYER = {
    "2048.2048": {"bf16": (3.36, 8.47, 1457), "fp8_linear": (2.96, 5.32, 1210), "coat": (2.88, 5.16, 883)},
    "2048.4096": {"bf16": (6.88, 17.24, 2914), "fp8_linear": (5.94, 11.29, 2420), "coat": (5.89, 10.82, 1766)},
    "4096.2048": {"bf16": (7.77, 18.78, 2914), "fp8_linear": (6.19, 11.79, 2420), "coat": (5.89, 10.96, 1766)},
    "4096.4096": {"bf16": (16.37, 38.43, 5828), "fp8_linear": (12.66, 24.58, 4840), "coat": (12.16, 23.44, 3533)},
}


def load(folder, name):
    """The JSON file of that name, or None where there is none."""
    path = os.path.join(folder, name + ".json")
    if not os.path.exists(path):
        return None
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def cell(value, text):
    return "-" if value is None else text.format(value)


def print_table(header, rows, measured):
    """`measured` are the columns that are left out where they hold nothing."""
    kept = [i for i in range(len(header)) if i not in measured or any(row[i] != "-" for row in rows)]
    header, *rows = ([row[i] for i in kept] for row in (header, *rows))
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def end_to_end_cells(folder, name):
    """Memory and speed of one row and recipe: of the plan, and measured where there is a measurement."""
    plan, speed_plan = load(folder, name + ".memory.plan"), load(folder, name + ".speed.plan")
    measured, speed = load(folder, name + ".memory"), load(folder, name + ".speed")
    largest = speed_plan and speed_plan["micro_batch_size"]
    return [cell(plan["bytes"]["optimizer states"] / 1e9, "{:.1f}"), cell(plan["bytes"]["saved activations"] / 1e9, "{:.1f}"),
            cell((plan["total_bytes"] + plan["context_bytes"]) / 1e9, "{:.1f}" if plan["fits"] else "{:.1f}, too much"),
            cell(measured and measured["used_bytes"] / 1e9, "{:.1f}"), cell(largest, "{}"),
            cell(speed and speed["tokens_per_step"] / statistics.median(speed["step_seconds"]) / speed["ranks"], "{:,.0f}")]


def end_to_end(folder, rows):
    mib = 1.048576  # GB in 1000 MiB
    lines = []
    for row in rows:
        model, gpus = row.split(".")
        for recipe in RECIPES:
            if load(folder, f"{row}.{recipe}.memory.plan") is None:
                continue
            ours = end_to_end_cells(folder, f"{row}.{recipe}")
            if recipe in PAPER_NAMES:
                optimizer, activations, peak, batch, speed = END_TO_END[row][recipe]
                paper = [PAPER_NAMES[recipe], cell(optimizer and optimizer * mib, "{:.1f}"),
                         cell(activations and activations * mib, "{:.1f}"), "out of memory" if peak is None else f"{peak:.1f}",
                         cell(batch, "{}"), cell(speed, "{:,}")]
            else:
                paper = [""] * 6
            lines.append([model.upper(), gpus, *paper, recipe, *ours])
    print_table(["model", "GPUs", "paper", "optimizer", "activations", "peak", "batch", "tok/s", "Parka", "optimizer", "activations",
                 "planned", "in use", "batch", "tok/s"], lines, measured=(12, 14))


def block_milliseconds(bench, section):
    config = bench["config"]
    micro_batches = config["training"]["global_batch_size"] // config["training"]["micro_batch_size"] // bench.get("ranks", 1)
    blocks = config["model"]["num_layers"] * micro_batches
    return 1e3 * sum(op["seconds"] for op in bench["ops"] if op["section"] == section) / blocks


def per_layer(folder, cases):
    lines = []
    for case in cases:
        width, context = case.split(".")
        for recipe in RECIPES:
            plan, bench = load(folder, f"{case}.{recipe}.plan"), load(folder, f"{case}.{recipe}")
            if plan is None:
                continue
            paper = [""] * 5
            if recipe in PAPER_NAMES:
                forward, backward, kept = PER_LAYER[case][recipe]
                paper = [PAPER_NAMES[recipe], f"{forward:.2f}", f"{backward:.2f}", f"{forward + backward:.2f}", f"{kept:,}"]
            times = [None] * 3
            if bench is not None:
                forward, backward = (block_milliseconds(bench, section) for section in ("block forward", "block backward"))
                times = [forward, backward, forward + backward]
            tokens = plan["micro_batch_size"] * int(context)
            kept = plan["saved_bytes_per_token_layer"] * tokens / 2**20
            lines.append([width, context, *paper, recipe, *(cell(time, "{:.2f}") for time in times), f"{kept:,.0f}"])
    print_table(["width", "context", "paper", "forward", "backward", "both", "MiB", "Parka", "forward", "backward", "both", "MiB"],
                lines, measured=(8, 9, 10))


def main():
    tables = {"end_to_end": (end_to_end, END_TO_END), "per_layer": (per_layer, PER_LAYER)}
    parser = ScriptParser(__doc__)
    parser.add_argument("table", choices=tables)
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("rows", nargs="+", metavar="ROW")
    arguments = parser.parse_args()
    table, known = tables[arguments.table]
    for row in arguments.rows:
        if row not in known:
            fail(f"no row {row}; there are: {', '.join(known)}")
    table(arguments.out, arguments.rows)


if __name__ == "__main__":
    run_main(main)
