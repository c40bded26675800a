#!/usr/bin/env python3
"""Times Parka's attention beside cuDNN's (through PyTorch), length by length, on one GPU.

    scripts/research/attention_vs_cudnn.py [--bench build/cuda/bench/bench_kernels] [--lengths 1024,2048] [--json FILE]

bf16, causal, 16 heads of 128 columns, 32768 tokens. TFLOP/s count the causal half once and backward as 2.5 times forward.
Both are timed the same way: three sets of random tensors in turn, graphs of about 10 ms, the median of 20 replays.
"""
import json
import math
import statistics
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("torch")
import torch  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from measured_runs import ScriptParser, bench_lines, fail, report_file  # noqa: E402

TOKENS, HEADS, HEAD_DIM = 32768, 16, 128
SETS, RUNS, MOST_IN_A_ROW, RUN_SECONDS = 3, 20, 24, 0.01


def median_seconds(calls):
    """Of one call, the calls taken in turn, replayed from a graph."""
    def queue(count):
        for i in range(count):
            calls[i % len(calls)]()

    def seconds_each(count, queue_all):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        queue_all()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end) / count

    queue(len(calls))
    first = seconds_each(len(calls), lambda: queue(len(calls)))
    in_a_row = min(MOST_IN_A_ROW, len(calls) * math.ceil(RUN_SECONDS / (len(calls) * first)))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        queue(in_a_row)
    graph.replay()
    return statistics.median(seconds_each(in_a_row, graph.replay) for _ in range(RUNS))


def cudnn_tflops(length):
    """Forward and backward."""
    def tensors():
        shape = (TOKENS // length, HEADS, length, HEAD_DIM)
        return [torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    flop = 2.0 * TOKENS * length * HEADS * HEAD_DIM
    # One stream for all: backward runs on that of forward, and only another than the default one can be recorded.
    with sdpa_kernel(SDPBackend.CUDNN_ATTENTION), torch.cuda.stream(torch.cuda.Stream()):
        sets = [tensors() for _ in range(SETS)]

        def attend(qkv):
            return torch.nn.functional.scaled_dot_product_attention(*qkv, is_causal=True)

        forward = median_seconds([lambda qkv=qkv: attend(qkv) for qkv in sets])
        outs = [attend(qkv) for qkv in sets]
        d_out = torch.randn_like(outs[0])
        backward = median_seconds([lambda out=out, qkv=qkv: torch.autograd.grad(out, qkv, d_out, retain_graph=True)
                                   for out, qkv in zip(outs, sets)])
    return 1e-12 * flop / forward, 2.5e-12 * flop / backward


def parka_tflops(bench, length):
    ops = {line["op"]: line["tflops"] for line in bench_lines(bench, f"attention:{length}") if "op" in line}
    return ops["attention_forward"], ops["attention_backward"]


def main():
    parser = ScriptParser(__doc__)
    parser.add_argument("--bench", default="build/cuda/bench/bench_kernels")
    parser.add_argument("--lengths", default="1024,2048,4096,8192,16384,32768")
    parser.add_argument("--json", type=report_file, metavar="FILE", help="also write the figures, a JSON line for each length")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        fail("PyTorch finds no GPU")
    print(f"{torch.cuda.get_device_name()}, cuDNN {torch.backends.cudnn.version()}, PyTorch {torch.__version__}")
    print("| length | forward | cuDNN | ratio | backward | cuDNN | ratio |\n|---|---|---|---|---|---|---|")
    results = []
    for length in map(int, options.lengths.split(",")):
        # Parka before and after cuDNN, so that a card that warms up favours neither.
        first, cudnn, second = (parka_tflops(options.bench, length), cudnn_tflops(length),
                                parka_tflops(options.bench, length))
        forward, backward = ((a + b) / 2 for a, b in zip(first, second))
        print(f"| {length} | {forward:.0f} | {cudnn[0]:.0f} | {forward / cudnn[0]:.3f} "
              f"| {backward:.0f} | {cudnn[1]:.0f} | {backward / cudnn[1]:.3f} |", flush=True)
        results.append({"length": length, "forward": [first[0], second[0]], "backward": [first[1], second[1]],
                        "cudnn_forward": cudnn[0], "cudnn_backward": cudnn[1],
                        "card": torch.cuda.get_device_name()})
        torch.cuda.empty_cache()
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(result) + "\n" for result in results)


if __name__ == "__main__":
    main()
