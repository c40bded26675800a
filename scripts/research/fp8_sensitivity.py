#!/usr/bin/env python3
"""Says which FP8 operands, and in their place INT8 ones, cost a Hugging Face model how much of its loss, by an emulation in PyTorch.

    fp8_sensitivity.py MODEL_FOLDER TOKENS.npy... [--sequences 4] [--length 512]

All but the operands of the named products is fp32. Scales are those of docs/precision.md: one for a tensor of tokens, one for
q, k and v together, one for up and gate together. A line has the rise of the mean loss in nats, and of the perplexity.
Needs torch and transformers, and a model of the form of Llama.
"""
import argparse
import math

import numpy as np
import torch
from transformers import AutoModelForCausalLM

PRODUCTS = {"qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "attention_out": ("self_attn.o_proj",),
            "up_gate": ("mlp.up_proj", "mlp.gate_proj"), "down": ("mlp.down_proj",)}


def codes(x, dtype=torch.float8_e4m3fn):
    return x.to(dtype).float()


def per_tensor(x, amax=None, largest=448.0, dtype=torch.float8_e4m3fn):
    scale = (x.abs().max() if amax is None else amax) / largest
    return codes(x / scale, dtype) * scale


def per_group(x, size):
    """One scale for `size` numbers of a row; 0: for the row."""
    groups = x.reshape(*x.shape[:-1], -1, size or x.shape[-1])
    scale = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 448
    return (codes(groups / scale) * scale).reshape(x.shape)


def mantissa_alone(x):
    """Three bits, with as many powers of two as it takes."""
    m, e = torch.frexp(x)
    return torch.ldexp((m * 16).round() / 16, e)


def range_alone(x):
    """The whole mantissa, where E4M3 under one scale has a normal number; steps of its subnormals below."""
    step = x.abs().max() / 448 * 2.0 ** -9
    return torch.where(x.abs() < step * 8, (x / step).round() * step, x)


def pair(x):
    """Two codes for a number, the second of what the first leaves."""
    high = per_tensor(x)
    return high + per_tensor(x - high)


def int8_rows(x):
    """8-bit integers with a scale for each row: a token, or an output of the product."""
    scale = x.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (x / scale).round() * scale


def rotated(quantized, size=64):
    """`quantized` after `size` numbers of a row at a time are multiplied by a Hadamard matrix, which spreads outliers. The matrix is its
    own inverse, so a product of two operands that are both rotated needs nothing undone; here each is turned back."""
    hadamard = torch.ones(1, 1)
    while len(hadamard) < size:
        hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1))) / math.sqrt(2)

    def turn(x):
        return (x.reshape(*x.shape[:-1], -1, size) @ hadamard).reshape(x.shape)
    return lambda x: turn(quantized(turn(x)))


METHODS = {"one scale": per_tensor, "e5m2": lambda x: per_tensor(x, None, 57344.0, torch.float8_e5m2),
           "row": lambda x: per_group(x, 0), "1x16": lambda x: per_group(x, 16),
           "1x64": lambda x: per_group(x, 64), "mantissa alone": mantissa_alone, "range alone": range_alone, "pair": pair,
           "int8 rows": int8_rows, "int8 rows, rotated": rotated(int8_rows)}


class Emulation:
    def __init__(self, folder, files, sequences, length):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.blocks = len(self.model.model.layers)
        tokens = [np.fromfile(name, np.uint16) for name in files]
        starts = [(t, i * (len(t) // length) // sequences * length) for t in tokens for i in range(sequences)]
        self.batches = [torch.tensor(t[at:at + length].astype(np.int64))[None] for t, at in starts]
        self.layers = {(block, name): [self.model.get_submodule(f"model.layers.{block}.{part}") for part in parts]
                       for block in range(self.blocks) for name, parts in PRODUCTS.items()}
        self.layers[(self.blocks, "head")] = [self.model.lm_head]
        self.plain = self.loss({})

    def loss(self, wanted):
        """`wanted`: by block and name what makes the inputs and the weights, or None for those that stay."""
        undo = []
        for key, (of_input, of_weight) in wanted.items():
            layers = self.layers[key]
            weight = torch.cat([layer.weight for layer in layers])
            made = of_weight(weight).split([len(layer.weight) for layer in layers]) if of_weight else None
            for i, layer in enumerate(layers):
                def forward(x, w=made[i] if made else layer.weight):
                    return torch.nn.functional.linear(of_input(x) if of_input else x, w)
                layer.forward = forward
                undo.append(layer)
        with torch.inference_mode():
            losses = [float(self.model(b, labels=b).loss) for b in self.batches]
        for layer in undo:
            del layer.forward
        return sum(losses) / len(losses)

    def line(self, what, wanted):
        rise = self.loss(wanted) - self.plain
        print(f"| {what} | {rise:+.4f} | {100 * math.expm1(rise):+.2f} |", flush=True)

    def of(self, names, blocks, of_input=per_tensor, of_weight=per_tensor):
        return {key: (of_input, of_weight) for key in self.layers if key[1] in names and key[0] in blocks}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokens", nargs="+")
    parser.add_argument("--sequences", type=int, default=4, help="of each file")
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    with torch.inference_mode():
        e = Emulation(args.model, args.tokens, args.sequences, args.length)
        every, names, head = range(e.blocks), list(PRODUCTS), range(e.blocks + 1)
        print(f"loss {e.plain:.4f}\n\n| in FP8 | nats | % |\n|---|---|---|")
        e.line("all products of blocks", e.of(names, every))
        e.line("these and the head", e.of([*names, "head"], head))
        for name in [*names, "head"]:
            e.line(f"{name} alone", e.of([name], head))
            e.line(f"{name} alone, inputs", e.of([name], head, per_tensor, None))
            e.line(f"{name} alone, weights", e.of([name], head, None, per_tensor))
        for name in names:
            e.line(f"all but {name}", e.of([n for n in names if n != name], every))
        for method, f in METHODS.items():
            for what, of_input, of_weight in (("inputs", f, None), ("weights", None, f)):
                e.line(f"{what} of blocks, {method}", e.of(names, every, of_input, of_weight))
        for method in ("int8 rows", "int8 rows, rotated"):
            e.line(f"all products of blocks, {method}", e.of(names, every, METHODS[method], METHODS[method]))
            e.line(f"these and the head, {method}", e.of([*names, "head"], head, METHODS[method], METHODS[method]))
        for first in range(0, e.blocks, max(1, e.blocks // 5)):
            some = range(first, min(e.blocks, first + max(1, e.blocks // 5)))
            for name in names:
                e.line(f"{name} of blocks {some[0]} to {some[-1]}", e.of([name], some))


if __name__ == "__main__":
    main()
