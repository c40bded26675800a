#!/usr/bin/env python3
"""Times finding max |x| of a bf16 matrix on one GPU: a pass of its own, the maxima of groups, and on the way.

    scripts/research/amax_vs_torch.py [--bench build/cuda/bench/bench_kernels] [--json FILE]

What the columns are is said in bench/amax_kernels.cpp; each is the difference of two timings, beside half the distance of
their quartiles. Where PyTorch is installed its x.abs().max() (two kernels) and its one-pass norm of infinite order are timed
too, on the same card: three sets of random tensors in turn, runs of about 10 ms, the median of 20 runs.
"""
import json

from measured_runs import ScriptParser, bench_lines, report_file

try:
    import torch
    from attention_vs_cudnn import median_seconds
except ImportError:
    torch = None

SETS = 3
COLUMNS = ["full", "groups", "attention", "norm_backward"]


def parka_lines(bench):
    return [line for line in bench_lines(bench, "amax") if line.get("op") == "amax"]


def torch_us(rows, cols):
    """Of the maximum as most write it, and of the fastest that PyTorch has for it."""
    sets = [torch.randn(rows, cols, device="cuda", dtype=torch.bfloat16) for _ in range(SETS)]
    result = {"torch_abs_max_us": 1e6 * median_seconds([lambda x=x: x.abs().max() for x in sets]),
              "torch_norm_us": 1e6 * median_seconds([lambda x=x: torch.linalg.vector_norm(x, float("inf")) for x in sets])}
    del sets
    torch.cuda.empty_cache()
    return result


def cell(line, column):
    if f"{column}_us" not in line:
        return "-"
    low, high = line[f"{column}_quartiles_us"]
    return f"{line[f'{column}_us']:.1f} +- {(high - low) / 2:.1f}"


def ratio(line, column):
    value = line.get(f"{column}_ratio")
    if value is None:
        return "-"
    return ("> " if line[f"{column}_ratio_is_bound"] else "") + f"{value:.0f}"


def main():
    parser = ScriptParser(__doc__)
    parser.add_argument("--bench", default="build/cuda/bench/bench_kernels")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="also write the figures, a JSON line for each matrix")
    options = parser.parse_args()
    with_torch = torch is not None and torch.cuda.is_available()
    if with_torch:
        print(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}; microseconds\n")
    else:
        print("without PyTorch; microseconds\n")
    lines = parka_lines(options.bench)
    print("| rows x columns | " + " | ".join(COLUMNS) + " | full / groups | full / attention | abs().max() | inf norm |")
    print("|---" * (len(COLUMNS) + 5) + "|")
    for line in lines:
        if with_torch:
            line.update(torch_us(line["rows"], line["cols"]))
        torch_cells = [f"{line[key]:.1f}" if key in line else "-" for key in ("torch_abs_max_us", "torch_norm_us")]
        cells = [f"{line['rows']} x {line['cols']}", *(cell(line, column) for column in COLUMNS),
                 ratio(line, "groups"), ratio(line, "attention"), *torch_cells]
        print("| " + " | ".join(cells) + " |", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


if __name__ == "__main__":
    main()
