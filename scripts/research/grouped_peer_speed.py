#!/usr/bin/env python3
"""Times PyTorch's grouped FP8 products on one GPU, beside which `bench_kernels moe-products` is read.

    scripts/research/grouped_peer_speed.py OUT.jsonl

Needs torch. The shapes and the spread of rows over experts are those of bench/moe_products.cpp. A product is what torch has: codes in
E4M3 with a scale per row, bf16 out, without adding to what the output held. One line per shape: microseconds (median of 20) and TFLOP/s
of the rows in use.
"""
import json
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("torch")
import torch  # noqa: E402

SLOTS = 16384 * 8
SHAPES = {"olmoe": (64, 2048, 1024), "qwen3-30b-a3b": (128, 2048, 768)}  # experts, width, width of an expert
PRODUCTS = {"up_gate": lambda d, f: (2 * f, d), "down": lambda d, f: (d, f)}  # N, K of an expert's weight


def codes(*shape):
    return torch.randn(*shape, device="cuda").to(torch.float8_e4m3fn)


def ends_of(experts):
    """Ends of the experts' rows, each a multiple of 16 of them."""
    counts = torch.randn(experts, generator=torch.Generator().manual_seed(9)) * (SLOTS / experts) ** 0.5 + SLOTS / experts
    return (counts / 16).round().int().mul(16).cumsum(0).to(device="cuda", dtype=torch.int32)


def microseconds(product):
    for _ in range(5):
        product()
    times = []
    for _ in range(20):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        product()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def main():
    if len(sys.argv) != 2:
        sys.exit(f"usage: {Path(__file__).name} OUT.jsonl")
    lines = []
    for model, (experts, width, inner) in SHAPES.items():
        ends = ends_of(experts)
        rows = int(ends[-1])
        for name, shape in PRODUCTS.items():
            n, k = shape(width, inner)
            a, w, y = codes(rows, k), codes(experts, n, k), codes(n, rows)
            x = codes(k, rows)
            ones = torch.ones(max(rows, experts * max(n, k)), device="cuda")
            forward = microseconds(lambda: torch._scaled_grouped_mm(
                a, w.transpose(-2, -1), ones[:rows], ones[:experts * n].view(experts, n), offs=ends, out_dtype=torch.bfloat16,
                use_fast_accum=True))
            gradient = {fast: microseconds(lambda: torch._scaled_grouped_mm(
                y, x.t(), ones[:experts * n], ones[:experts * k], offs=ends, out_dtype=torch.bfloat16, use_fast_accum=fast))
                for fast in (False, True)}
            for op, us in (("forward", forward), ("weight_gradient", gradient[False]), ("weight_gradient.fast", gradient[True])):
                lines.append({"model": model, "op": f"torch.fp8.{name}.{op}", "us": round(us, 2),
                              "tflops": round(2e-6 * rows * n * k / us, 1), "torch": torch.__version__})
                print(json.dumps(lines[-1]))
    Path(sys.argv[1]).write_text("".join(json.dumps(line) + "\n" for line in lines))


if __name__ == "__main__":
    main()
