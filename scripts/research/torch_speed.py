#!/usr/bin/env python3
"""Times training by compiled PyTorch on one GPU, beside which `parka bench configs/llama2-7b-bench.json` or that of a mixture is read.

    scripts/research/torch_speed.py OUT [--model olmoe] [--batches 4 6 8] [--steps 8] [--sequence-length 4096]
    scripts/research/torch_speed.py OUT --model llama2-7b --batches 4 --sequence-length 2048

Needs torch. It is what a user would write today: the whole model compiled; weights and AdamW's states (fused, without a master) in bf16;
PyTorch's own attention. Linear layers of the blocks of a dense model are FP8 products with a scale for each tensor, E4M3 and for gradients
E5M2. Experts are dropless grouped products in bf16, for which slots are sorted by expert and each expert's rows padded to 16. Tokens are
random, and a step is one batch of sequences. GB (1e9 bytes) are in use on the device. OUT gets a JSON file for each batch.
"""
import argparse
import gc
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("torch")
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402

WARMUPS, ROWS = 4, 16
grouped_mm = getattr(F, "grouped_mm", None) or torch._grouped_mm

# width, layers, query heads, key heads, width of a head, vocabulary, experts, chosen, width of an expert, normalized weights; 0 experts
# are one feed-forward as wide
MODELS = {
    "llama2-7b": (4096, 32, 32, 32, 128, 32000, 0, 0, 11008, False),
    "olmo-1b": (2048, 16, 16, 16, 128, 50304, 0, 0, 8192, False),
    "olmoe": (2048, 16, 16, 16, 128, 50304, 64, 8, 1024, False),
    "qwen3-30b-a3b-8layers": (2048, 8, 32, 4, 128, 151936, 128, 8, 768, True),
}


def coded(x, dtype):
    """Codes of a matrix, and the scale of the tensor."""
    scale = x.abs().amax().float().clamp(min=1e-12) / torch.finfo(dtype).max
    return (x.float() / scale).to(dtype), scale


def product(a, b, fast):
    """[M, K] and [N, K] with their scales to [M, N]."""
    return torch._scaled_mm(a[0], b[0].t(), scale_a=a[1], scale_b=b[1], out_dtype=torch.bfloat16, use_fast_accum=fast)


def turned(a):
    return a[0].t().contiguous(), a[1]


class Float8Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        inputs, weights = coded(x, torch.float8_e4m3fn), coded(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(*inputs, *weights)
        return product(inputs, weights, fast=True)

    @staticmethod
    def backward(ctx, d_out):
        inputs, weights = ctx.saved_tensors[:2], ctx.saved_tensors[2:]
        gradients = coded(d_out, torch.float8_e5m2)
        return product(gradients, turned(weights), fast=True), product(turned(gradients), turned(inputs), fast=False)


class Float8Linear(nn.Linear):
    def forward(self, x):
        return Float8Product.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class FeedForward(nn.Module):
    def __init__(self, width, inner):
        super().__init__()
        self.up_gate = Float8Linear(width, 2 * inner, bias=False)
        self.down = Float8Linear(inner, width, bias=False)

    def forward(self, x):
        up, gate = self.up_gate(x).chunk(2, dim=-1)
        return self.down(up * F.silu(gate)), 0


class Experts(nn.Module):
    def __init__(self, width, experts, chosen, inner, normalizes):
        super().__init__()
        self.experts, self.chosen, self.normalizes = experts, chosen, normalizes
        self.router = nn.Linear(width, experts, bias=False)
        self.up_gate = nn.Parameter(torch.randn(experts, width, 2 * inner) * 0.02)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * 0.02)

    def forward(self, x):
        tokens = x.shape[0]
        scores = F.softmax(self.router(x).float(), dim=-1)
        weights, experts = scores.topk(self.chosen, dim=-1)
        if self.normalizes:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        order = experts.flatten().argsort(stable=True)
        of_row = experts.flatten()[order]
        counts = torch.zeros(self.experts, dtype=torch.int64, device=x.device).scatter_add_(0, of_row, torch.ones_like(of_row))
        padded = (counts + ROWS - 1) // ROWS * ROWS
        ends = padded.cumsum(0)
        slots = torch.arange(order.numel(), device=x.device)
        rows = slots - (counts.cumsum(0) - counts)[of_row] + (ends - padded)[of_row]
        room = order.numel() + self.experts * ROWS
        inputs = x.new_zeros(room, x.shape[1]).index_copy(0, rows, x[order // self.chosen])
        offsets = ends.to(torch.int32)
        up, gate = grouped_mm(inputs, self.up_gate, offs=offsets).chunk(2, dim=-1)
        outputs = grouped_mm(up * F.silu(gate), self.down, offs=offsets)[rows]
        outputs = outputs * weights.flatten()[order, None].to(outputs.dtype)
        balance = self.experts * (counts / order.numel() * scores.mean(dim=0)).sum()
        return x.new_zeros(tokens, x.shape[1]).index_add(0, order // self.chosen, outputs), balance


class Block(nn.Module):
    def __init__(self, width, heads, keys, head, experts, chosen, inner, normalizes):
        super().__init__()
        self.heads, self.keys, self.head = heads, keys, head
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        linear = nn.Linear if experts else Float8Linear
        self.query_norm, self.key_norm = (nn.RMSNorm(head) if experts else nn.Identity() for _ in range(2))
        self.qkv = linear(width, (heads + 2 * keys) * head, bias=False)
        self.out = linear(heads * head, width, bias=False)
        self.experts = Experts(width, experts, chosen, inner, normalizes) if experts else FeedForward(width, inner)

    def rotated(self, x, angles):
        first, second = x.chunk(2, dim=-1)
        cos, sin = angles
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)

    def forward(self, x, angles):
        batch, length, width = x.shape
        sizes = [self.heads * self.head, self.keys * self.head, self.keys * self.head]
        query, key, value = (part.view(batch, length, -1, self.head).transpose(1, 2)
                             for part in self.qkv(self.norms[0](x)).split(sizes, dim=-1))
        query, key = self.rotated(self.query_norm(query), angles), self.rotated(self.key_norm(key), angles)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=self.heads != self.keys)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        mixed, balance = self.experts(self.norms[1](x).view(-1, width))
        return x + mixed.view_as(x), balance


class Model(nn.Module):
    def __init__(self, width, layers, heads, keys, head, vocabulary, experts, chosen, inner, normalizes):
        super().__init__()
        self.head = head
        self.embedding = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, keys, head, experts, chosen, inner, normalizes) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.logits = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.embedding(tokens)
        frequencies = 10000.0 ** (-torch.arange(0, self.head, 2, device=x.device) / self.head)
        angles = torch.arange(tokens.shape[1], device=x.device)[:, None] * frequencies
        angles = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        losses = 0
        for block in self.blocks:
            x, balance = block(x, angles)
            losses = losses + balance
        logits = self.logits(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + 0.01 * losses


def measure(name, batch, length, steps):
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Model(*MODELS[name])
    torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, fused=True)
    compiled = torch.compile(model)
    seconds, losses = [], []
    for _ in range(WARMUPS + steps):
        tokens = torch.randint(0, MODELS[name][5], (batch, length + 1), device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        loss = compiled(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        losses.append(loss.item())
    free, total = torch.cuda.mem_get_info()
    rates = [batch * length / second for second in seconds[WARMUPS:]]
    return {"model": name, "batch": batch, "sequence_length": length, "parameters": sum(p.numel() for p in model.parameters()),
            "tokens_per_second": batch * length / statistics.median(seconds[WARMUPS:]), "least": min(rates), "most": max(rates),
            "losses": losses, "used_bytes": total - free, "device": torch.cuda.get_device_name(), "torch": torch.__version__}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--model", choices=MODELS, default="olmoe")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 6, 8])
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--sequence-length", type=int, default=4096)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    for batch in options.batches:
        result = measure(options.model, batch, options.sequence_length, options.steps)
        gc.collect()
        torch.cuda.empty_cache()
        (options.out / f"{options.model}-{batch}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(f"{options.model} {batch} x {options.sequence_length}: {result['tokens_per_second']:.0f} tok/s, "
              f"{1e-9 * result['used_bytes']:.1f} GB", flush=True)


if __name__ == "__main__":
    main()
