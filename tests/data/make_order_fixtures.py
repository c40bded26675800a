#!/usr/bin/env python3
"""Prints the fixtures of test_sample_order.cpp: what numpy's shuffle, and so OLMo's trainer, makes of each case.

    python3 -m venv /tmp/venv && /tmp/venv/bin/pip install numpy
    /tmp/venv/bin/python tests/data/make_order_fixtures.py

numpy 1.26.4 and 2.4.6 print the same.
A row: number of sequences, seed, first and last (up to) four values, FNV-1a (64 bits) over all of them as
little-endian uint32.
"""

import numpy as np


def fnv1a(data: bytes) -> int:
    value = 0xCBF29CE484222325
    for byte in data:
        value = ((value ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return value


def braces(values) -> str:
    return "{" + ", ".join(str(v) for v in values) + "}"


for n in (1, 2, 3, 10, 1000, 70001):
    for seed in (0, 6198, 6199, 2**40 + 3):
        order = np.arange(n, dtype=np.uint32)
        np.random.Generator(np.random.PCG64(seed=seed)).shuffle(order)
        digest = fnv1a(order.astype("<u4").tobytes())
        print(f"{{{n}, {seed}, {braces(order[:4])}, {braces(order[-4:])}, 0x{digest:016x}}},")
