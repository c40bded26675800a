#!/usr/bin/env python3
"""Prints what the parts of a measured step take beside the least time they could take, as Markdown.

    scripts/research/step_parts.py BENCH.json

BENCH.json is of `parka bench CONFIG --json BENCH.json` on an H100 or H200. The floor of a GEMM and of attention is its
arithmetic at the rate of the card's datasheet, that of everything else its bytes at the copy bandwidth that was measured beside it. With
--roofline there is a column for the floors of that, too.
"""
import json
import re

from measured_runs import ScriptParser, fail, run_main

# Dense, TFLOP/s, of an H100 SXM and an H200: NVIDIA's datasheets.
PEAK = {"fp8": 1979.0, "bf16": 989.5}
PRODUCTS = ("gemm", "swiglu_projection", "rope_projection")
LINEAR = re.compile(r"(\d+) x (\d+) x (\d+) (\w+) ")  # rows, columns and terms of a product, format of its operands


def part_of(op, tokens):
    """Which part of a step an op is of; `tokens` are those of a micro-batch."""
    section, name = op["section"], op["op"]
    if section == "head":
        return "head: matrix products" if name == "gemm" else "head: loss and norm"
    if section in ("optimizer", "embedding"):
        return section
    if name == "gemm":
        if section == "block forward":
            return "blocks: products of forward"
        rows, _, terms = map(int, LINEAR.match(op["shape"]).groups()[:3])
        is_weight = terms == tokens and rows != tokens
        return "blocks: products for weight gradients" if is_weight else "blocks: products for input gradients"
    if name == "swiglu_projection":
        return "blocks: products of forward with SwiGLU"
    if name == "rope_projection":
        return "blocks: products of forward with rotation"
    if name.startswith("attention_"):
        return "blocks: attention " + name.removeprefix("attention_")
    for prefix, part in (("norm_", "norms"), ("swiglu_", "SwiGLU"), ("rope_", "rotation"), ("qk_norm_", "rotation"),
                         ("quantize", "quantizing and transposing")):
        if name.startswith(prefix):
            return "blocks: " + part
    return "blocks: other"


def floor_of(op, copy_bandwidth):
    """Seconds that all runs of an op take at least."""
    if op["op"] in PRODUCTS:
        operands = LINEAR.match(op["shape"])[4]
        return op["runs"] * op["flop"] / (PEAK["fp8" if operands.startswith("e") else "bf16"] * 1e12)
    if op["op"].startswith("attention_"):
        return op["runs"] * op["flop"] / (PEAK["bf16"] * 1e12)
    return op["runs"] * op["bytes"] / copy_bandwidth


def parts_of(bench):
    """Of each part, largest first: seconds, floor, roofline's floor, FLOP of products, bytes."""
    config = bench["config"]
    tokens = config["training"]["micro_batch_size"] * config["data"]["sequence_length"]
    parts = {}
    for op in bench["ops"]:
        part = parts.setdefault(part_of(op, tokens), [0.0] * 5)
        multiplies = op["op"] in PRODUCTS or op["op"].startswith("attention_")
        for i, value in enumerate((op["seconds"], floor_of(op, bench["copy_bandwidth"]), op.get("floor_seconds", 0.0),
                                   op["runs"] * op["flop"] if multiplies else 0.0, op["runs"] * op["bytes"])):
            part[i] += value
    return sorted(parts.items(), key=lambda item: -item[1][0])


def rows_of(bench):
    parts = parts_of(bench)
    total = [sum(part[i] for _, part in parts) for i in range(5)]
    has_roofline = "floor_seconds" in bench
    yield ["part", "ms", "of all", "rate", "floor, ms", "floor / time", *(["roofline / time"] if has_roofline else [])]
    for name, (seconds, floor, roofline, flop, size) in [*parts, ("all", total)]:
        rate = "" if name == "all" else f"{flop / seconds / 1e12:,.0f} TFLOP/s" if flop > 0 else f"{size / seconds / 1e12:.2f} TB/s"
        yield [name, f"{1e3 * seconds:,.1f}", f"{100 * seconds / total[0]:.1f} %", rate, f"{1e3 * floor:,.1f}", f"{100 * floor / seconds:.1f} %",
               *([f"{100 * roofline / seconds:.1f} %"] if has_roofline else [])]


def main():
    parser = ScriptParser(__doc__)
    parser.add_argument("bench", metavar="BENCH.json")
    path = parser.parse_args().bench
    try:
        with open(path, encoding="utf-8") as file:
            bench = json.load(file)
    except ValueError:
        bench = None
    if not isinstance(bench, dict) or "ops" not in bench:
        fail(f"{path} has no times of ops: it is not of parka bench --json")
    header, *rows = rows_of(bench)
    print("| " + " | ".join(header) + " |")
    print("|" + "---|" * len(header))
    for row in rows:
        print("| " + " | ".join(row) + " |")


if __name__ == "__main__":
    run_main(main)
