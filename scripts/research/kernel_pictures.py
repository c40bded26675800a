#!/usr/bin/env python3
"""Draws the pictures of docs/kernels: for each kernel who waits for whom, over time, and what lies in shared memory.

    scripts/research/kernel_pictures.py [KERNEL...] [--out docs/kernels]

Boxes are in the order of the code, not to scale in time; an arrow goes from what ends to what waited for it. Sizes of memory
are those of the constants in the kernel's headers, for heads of 128.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from pictures import shrink  # noqa: E402
from run_metrics import save_picture  # noqa: E402

COPY, PRODUCT, WORK, STORE, IDLE = "#b0b7bd", "#2a6f97", "#e07b39", "#6a994e", "#ececec"
KIB = 1024
MOST_SHARED = 227 * KIB
# KERNEL: (lanes from top to bottom, boxes (lane, begin, length, text, colour), arrows (lane, time, lane, time), memory (text, bytes, colour)).
# Without a map of shared memory, `memory` is of the GPU's and its title says so.
KERNELS = {
    "attention_forward": {
        "title": "a block: a tile of 128 queries over tiles of 128 keys",
        "lanes": ("producer", "consumer 0", "consumer 1"),
        "boxes": [(0, 0, 1, "Q K0", COPY), (0, 1, 1, "V0 K1", COPY), (0, 3, 1, "V1 K2", COPY), (0, 7, 1, "V2 K3", COPY),
                  (1, 1, 1, "Q K0", PRODUCT), (1, 2, 1.5, "softmax 0", WORK), (1, 3.5, 2, "Q K1, P0 V0", PRODUCT), (1, 5.5, 1.5, "softmax 1", WORK),
                  (1, 7, 2, "Q K2, P1 V1", PRODUCT),
                  (2, 2, 1, "Q K0", PRODUCT), (2, 3, 2.5, "softmax 0", WORK), (2, 5.5, 1.5, "Q K1, P0 V0", PRODUCT), (2, 7, 2, "softmax 1", WORK)],
        "arrows": [(0, 1, 1, 1), (1, 2, 2, 2), (1, 5.5, 2, 5.5), (2, 7, 1, 7)],
        "memory": [("Q", 32 * KIB, PRODUCT), ("K", 32 * KIB, COPY), ("K", 32 * KIB, COPY), ("V", 32 * KIB, COPY), ("V", 32 * KIB, COPY),
                   ("out", 32 * KIB, STORE)]},
    "attention_backward": {
        "title": "first kernel: a tile of 128 keys over tiles of 64 queries",
        "lanes": ("producer", "consumer 0", "consumer 1"),
        "boxes": [(0, 0, 1, "K V Q0 dO0", COPY), (0, 1, 1, "Q1 dO1", COPY), (0, 2, 1, "Q2 dO2", COPY), (0, 3, 1, "Q3 dO3", COPY), (0, 8.5, 1, "Q4 dO4", COPY),
                  (1, 1, 1.5, "K Q, V dO", PRODUCT), (1, 2.5, 1.5, "P, dS", WORK), (1, 4, 1.5, "dV += P dO", PRODUCT), (1, 5.5, 1.5, "dK += dS Q", PRODUCT),
                  (1, 7, 0.7, "keep", STORE),
                  (2, 2.5, 1.5, "K Q, V dO", PRODUCT), (2, 4, 1.5, "P, dS", WORK), (2, 5.5, 1.5, "dV += P dO", PRODUCT), (2, 7, 1.5, "dK += dS Q", PRODUCT),
                  (2, 8.5, 0.7, "keep", STORE)],
        "arrows": [(0, 1, 1, 1), (1, 2.5, 2, 2.5), (2, 8.5, 0, 8.5)],
        "memory": [("K", 32 * KIB, COPY), ("V", 32 * KIB, COPY), ("dK dV out", 32 * KIB, STORE)] + [("Q", 16 * KIB, PRODUCT)] * 4
                  + [("dO", 16 * KIB, WORK)] * 4 + [("", 2 * KIB, IDLE)]},
    "gemm": {
        "title": "a block of a cluster of two: tile after tile of 128 x 256",
        "lanes": ("producer", "consumers", "finishers"),
        "boxes": [(0, 0, 1, "steps 0-3", COPY), (0, 1.2, 3.3, "steps of tile 0", COPY), (0, 4.5, 4, "steps of tile 1", COPY),
                  (1, 1, 3.5, "products of tile 0", PRODUCT), (1, 4.5, 0.6, "half", STORE), (1, 5.1, 1.7, "tile 1", PRODUCT), (1, 6.8, 0.6, "half", STORE),
                  (1, 7.4, 1.8, "tile 1", PRODUCT),
                  (2, 5.1, 1.7, "epilogue, upper", WORK), (2, 7.4, 1.8, "epilogue, lower", WORK)],
        "arrows": [(0, 1, 1, 1), (1, 5.1, 2, 5.1), (2, 6.8, 1, 6.8), (1, 7.4, 2, 7.4)],
        "memory": [x for _ in range(4) for x in (("a", 16 * KIB, COPY), ("b", 32 * KIB, PRODUCT))] + [("half a tile", 32 * KIB, STORE)]},
    "adamw": {
        "title": "a warp: 512 elements after another, taken by a counter",
        "lanes": ("memory", "counter", "warp 0", "warp 1"),
        "boxes": [(0, 0, 1.2, "load 0", COPY), (2, 1.2, 1, "decode m v", WORK), (2, 2.2, 1.2, "m, v, w", PRODUCT), (0, 3.4, 0.6, "store w", STORE),
                  (0, 4, 1.2, "load next", COPY), (2, 3.4, 2.2, "encode m v", WORK), (0, 5.6, 0.8, "store m v", STORE), (2, 5.6, 1, "decode m v", WORK),
                  (2, 6.6, 1.2, "m, v, w", PRODUCT), (1, 1.2, 0.8, "ask", IDLE), (1, 5.6, 0.8, "ask", IDLE),
                  (3, 2, 1, "decode m v", WORK), (3, 3, 1.2, "m, v, w", PRODUCT), (3, 4.2, 2.2, "encode m v", WORK)],
        "arrows": [(0, 1.2, 2, 1.2), (2, 3.4, 0, 3.4), (1, 2, 2, 5.6), (0, 5.2, 2, 5.6)],
        "memory": [("roots, of 240 k and 128 codes", 120 * KIB, WORK)]},
    "norm": {
        "title": "FP8: a block has a row, then a tile",
        "lanes": ("norm_forward", "amax", "write_tiles"),
        "boxes": [(0, 0, 1, "load x, branch", COPY), (0, 1, 0.8, "sum", WORK), (0, 1.8, 0.8, "store", STORE), (0, 2.6, 1, "mean", WORK), (0, 3.6, 1, "rstd", WORK),
                  (0, 4.6, 1, "max |y|", WORK), (1, 5.6, 0.6, "raise", STORE),
                  (2, 6.2, 1, "load x again", COPY), (2, 7.2, 0.8, "y, code", WORK), (2, 8, 0.8, "y", STORE), (2, 8.8, 0.9, "y^T", STORE)],
        "arrows": [(0, 5.6, 1, 5.6), (1, 6.2, 2, 6.2)],
        "memory": [("codes of a tile, pieces swizzled", 16 * KIB, STORE)]},
    "quantize": {
        "title": "a block: a tile of 128 x 128, a thread 4 rows of 16 columns",
        "lanes": ("loads", "threads", "shared memory", "stores"),
        "boxes": [(0, 0, 0.8, "row 0", COPY), (0, 0.8, 0.8, "row 1", COPY), (0, 1.6, 0.8, "row 2", COPY), (0, 2.4, 0.8, "row 3", COPY),
                  (1, 0.8, 0.8, "code 0", WORK), (1, 1.6, 0.8, "code 1", WORK), (1, 2.4, 0.8, "code 2", WORK), (1, 3.2, 0.8, "code 3", WORK),
                  (3, 1.6, 0.8, "0", STORE), (3, 2.4, 0.8, "1", STORE), (3, 3.2, 0.8, "2", STORE), (3, 4, 0.8, "3", STORE),
                  (2, 1.6, 2.6, "codes, swizzled", IDLE), (2, 5, 1.4, "read columns", WORK), (3, 6.4, 1.6, "rows of the transpose", STORE)],
        "arrows": [(0, 0.8, 1, 0.8), (1, 4, 2, 5), (2, 6.4, 3, 6.4)],
        "memory": [("codes of a tile, pieces swizzled", 16 * KIB, STORE)]},
    "newton_schulz": {
        "title": "one of five steps: three products, each waits for the one before",
        "lanes": ("cuBLASLt", "result"),
        "boxes": [(0, 0, 2.2, "A = X X^T", PRODUCT), (1, 2.2, 0.6, "A", STORE), (0, 2.8, 2.2, "G = b A + c A A", PRODUCT), (1, 5, 0.6, "G", STORE),
                  (0, 5.6, 3, "X' = a X + G X", PRODUCT), (1, 8.6, 0.6, "X'", STORE)],
        "arrows": [(0, 2.2, 1, 2.2), (1, 2.8, 0, 2.8), (0, 5, 1, 5), (1, 5.6, 0, 5.6), (0, 8.6, 1, 8.6)],
        "memory_title": "memory of the GPU for one matrix of 4096 x 11008, bf16",
        "memory": [("X", 86 * KIB * KIB, PRODUCT), ("X'", 86 * KIB * KIB, STORE), ("A", 32 * KIB * KIB, WORK), ("G", 32 * KIB * KIB, WORK)]},
}


def draw(plt, kernel):
    lanes, rows = kernel["lanes"], len(kernel["lanes"])
    figure, (time, memory) = plt.subplots(2, 1, figsize=(9, 0.55 * rows + 2.1), height_ratios=(rows, 1.3))
    for lane, begin, length, text, colour in kernel["boxes"]:
        time.barh(-lane, length, left=begin, height=0.62, color=colour, edgecolor="white")
        time.text(begin + length / 2, -lane, text, ha="center", va="center", fontsize=7.5, color="white" if colour == PRODUCT else "black")
    for lane, begin, other, end in kernel["arrows"]:
        side = 0.31 if other > lane else -0.31
        time.annotate("", xy=(end, -other + side), xytext=(begin, -lane - side), arrowprops={"arrowstyle": "-|>", "color": "#222222", "lw": 1})
    time.set_yticks([-i for i in range(rows)], lanes, fontsize=9)
    time.set_xlim(0, max(begin + length for _, begin, length, _, _ in kernel["boxes"]))
    time.set_xlabel("time, not to scale", fontsize=8)
    time.set_title(kernel["title"], fontsize=10, loc="left")
    place = 0
    unit, name = (KIB, "KiB") if "memory_title" not in kernel else (KIB * KIB, "MiB")
    for text, size, colour in kernel["memory"]:
        memory.barh(0, size / unit, left=place, color=colour, edgecolor="white")
        beside = len(text) > 0.4 * size / unit  # text that its bar is too short for
        memory.text(place + size / unit * (1.1 if beside else 0.5), 0, text, ha="left" if beside else "center", va="center", fontsize=8,
                    color="white" if colour == PRODUCT else "black", zorder=3)
        place += size / unit
    most = place if "memory_title" in kernel else MOST_SHARED / unit
    memory.barh(0, most - place, left=place, color=IDLE)
    memory.set_xlim(0, most)
    memory.set_yticks([])
    memory.set_xlabel(f"{name}, {place:.0f} in all", fontsize=8)
    memory.set_title(kernel.get("memory_title", "shared memory of a block; a multiprocessor has 227 KiB for blocks"), fontsize=9, loc="left")
    for panel in (time, memory):
        panel.tick_params(axis="both", length=0, labelsize=8)
        for side in ("top", "right", "left", "bottom"):
            panel.spines[side].set_visible(False)
    time.set_xticks([])
    figure.tight_layout()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kernels", nargs="*", metavar="KERNEL", choices=[[], *KERNELS], help=", ".join(KERNELS) + ": all unless named")
    parser.add_argument("--out", default=str(Path(__file__).resolve().parents[2] / "docs/kernels"))
    options = parser.parse_args()
    for name in options.kernels or KERNELS:
        path = str(Path(options.out) / f"{name}.png")
        save_picture(lambda plt, name=name: draw(plt, KERNELS[name]), path)
        shrink(path)


if __name__ == "__main__":
    main()
