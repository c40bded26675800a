#!/usr/bin/env python3
"""Prints what takes memory in COAT's paper (https://arxiv.org/abs/2410.19313) and by `parka plan`, as Markdown.

    scripts/research/paper_memory.py figure1     a model of 13 billion parameters on each of 8 GPUs, by what takes it
    scripts/research/paper_memory.py table2      what one block keeps for backward, by operator

Needs no GPU. PARKA names the program, default build/cuda/parka, else build/release/parka.
"""
import json
import os
import subprocess
from pathlib import Path

from measured_runs import ScriptParser, error_line, fail

ROOT = Path(__file__).resolve().parents[2]
RECIPES = ("bf16", "fp8_linear", "coat", "parka")

# Figure 1: weights, gradients, activations, optimizer, all, in 1000 MiB, at context 2048 and two sequences on each GPU. Its
# activations are twice those of table 7.
FIGURE_1 = {"BF16": (6.3, 6.3, 40.2, 12.6, 65.4), "TE": (6.3, 6.3, 36.9, 12.6, 62.1), "FP8-LM": (3.2, 6.3, 36.9, 4.8, 51.2),
            "COAT": (6.3, 6.3, 26.4, 3.2, 42.2)}
MIB_1000 = 1.048576  # GB
# In which of these columns a category of the plan counts; others are in the total alone.
COLUMNS = {"weights": 0, "master weights": 0, "fp8 weights": 0, "gradients": 1, "saved activations": 2, "optimizer states": 3}

# Table 2: norms, activation function, rotation and attention, linear layers, all, in U = 2 x width bytes per token, and BF16's over that.
TABLE_2 = {"BF16": (4, 8, 5, 5.66, 22.66, "1.00"), "TE": (2, 8, 5, 3.33, 18.33, 1.23), "COAT": (1, 4, 5, 3.33, 13.33, 1.69)}
WIDTH, FFN, HEADS = 3072, 8192, 24  # 8 / 3 of the width, as the paper has it


def program():
    for path in filter(None, (os.environ.get("PARKA"), ROOT / "build/cuda/parka", ROOT / "build/release/parka")):
        if os.access(path, os.X_OK):
            return str(path)
    fail("neither build/cuda/parka nor build/release/parka is there: build one (README.md), or set PARKA to the program")


def plan(config, *options):
    arguments = [word for option in options for word in (("--set", option) if "=" in option else option.split())]
    result = subprocess.run([program(), "plan", str(ROOT / "configs" / config), *arguments, "--json"], capture_output=True, text=True,
                            check=False)
    if result.returncode != 0:
        fail(error_line(result.stderr))
    return json.loads(result.stdout)


def recipe_options(recipe):
    """As end_to_end.sh has them."""
    words = subprocess.run(["bash", "-c", '. "$0"; recipe_options "$1"; printf "%s\n" "${options[@]}"',
                            str(ROOT / "scripts/research/recipe_options.sh"), recipe], capture_output=True, text=True, check=True).stdout
    return [word for word in words.split() if word != "--set"]


def print_table(header, rows):
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


def figure_1():
    rows = [[name, *(f"`{value * MIB_1000:.1f}`" for value in values)] for name, values in FIGURE_1.items()]
    runs = {recipe: recipe_options(recipe) for recipe in RECIPES}
    for name, options in runs.items():
        planned = plan("llama2-13b.json", *options, "model.vocab_size=50304", "model.norm=layernorm",
                       "distributed.zero_stage=3", "training.micro_batch_size=2", "training.global_batch_size=128", "--gpus 8")
        columns = [0.0] * 4
        for category, size in planned["bytes"].items():
            if category in COLUMNS:
                columns[COLUMNS[category]] += size / 1e9
        total = (planned["total_bytes"] + planned["context_bytes"]) / 1e9
        rows.append([name, *(f"{value:.1f}" for value in columns), f"{total:.1f}"])
    print_table(["13B on 8 GPUs", "weights", "gradients", "activations", "optimizer", "all"], rows)


def kept_by_operator(recipe):
    """Bytes per token of a block: norms, activation function, rotation and attention, linear layers. In groups of 16 with scales."""
    d, f, group = WIDTH, FFN, 1 + 2 / 16
    return {"bf16": (2 * 2 * d, 2 * 2 * f, 3 * 2 * d, 3 * 2 * d + 2 * f),
            "fp8_linear": (2 * 2 * d, 2 * 2 * f, 3 * 2 * d, 2 * d + 2 * d + f),
            "coat": (2 * group * d, 3 * group * f, 3 * 2 * d, 2 * d + 2 * d + f),
            "parka": (2 * group * d, 2 * group * f, 3 * group * d, 2 * d)}[recipe]


def table_2():
    rows = [[name, *(f"`{value}`" for value in values)] for name, values in TABLE_2.items()]
    bf16 = sum(kept_by_operator("bf16"))
    for recipe in RECIPES:
        kept = kept_by_operator(recipe)
        planned = plan("olmo-7b.json", f"precision.recipe={recipe}", f"model.d_model={WIDTH}", f"model.d_ffn={FFN}",
                       f"model.num_heads={HEADS}", "training.micro_batch_size=1")["saved_bytes_per_token_layer"]
        statistics = planned - sum(kept)  # log-sum-exp of the heads, of norms mean and 1 / deviation, and scales of tensors
        if not 0 <= statistics - 4 * HEADS - 16 < 1:
            fail(f"a block of {recipe} keeps {planned} bytes per token, of which operators take {sum(kept)}", 1)
        rows.append([recipe, *(f"{size / (2 * WIDTH):.2f}" for size in (*kept, sum(kept))), f"{bf16 / sum(kept):.2f}"])
    print_table(["in U", "norms", "act", "RoPE, attention", "linear", "all", "less"], rows)


def main():
    tables = {"figure1": figure_1, "table2": table_2}
    parser = ScriptParser(__doc__)
    parser.add_argument("table", choices=tables)
    tables[parser.parse_args().table]()


if __name__ == "__main__":
    main()
