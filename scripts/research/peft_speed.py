#!/usr/bin/env python3
"""Times fine-tuning with transformers, peft and bitsandbytes on one GPU: the programs beside which finetune_speed.py is read.

    scripts/research/peft_speed.py OUT [--runs METHOD.SEQUENCESxLENGTH...] [--steps 8]

Needs torch, transformers, peft and, for qlora, bitsandbytes. The model has the dimensions of Llama-2-7B and random weights, frozen, in
bf16 (lora) or NF4 with nested scales (qlora); adapters of rank 64 on all linear layers of the blocks are in fp32, as peft makes them, and
train with PyTorch's fused AdamW and its attention (SDPA). Methods with _recompute checkpoint each block. Those with _autocast run under
autocast to bf16, as transformers' Trainer does with bf16=True; without it adapters compute in fp32. A step is one micro-batch. GB (1e9
bytes) are in use on the device, torch's cache included. OUT gets a JSON file for each run.
"""
import argparse
import gc
import json
import re
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("torch", "transformers", "peft")
import peft  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402

METHODS = [method + cast for method in ("lora", "lora_recompute", "qlora", "qlora_recompute") for cast in ("", "_autocast")]
POINTS = ("qlora{}.4x384", "qlora{}.16x384", "qlora_recompute{}.16x384", "qlora_recompute{}.4x2048", "lora{}.4x384", "lora{}.4x2048",
          "lora_recompute{}.4x2048")
RUNS = [point.format(cast) for cast in ("", "_autocast") for point in POINTS]
LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WARMUPS = 3


def base_model(layers, quantized):
    """With random weights, built block by block, so that the device never holds a second copy."""
    config = transformers.LlamaConfig(vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers,
                                      num_attention_heads=32, max_position_embeddings=4096, use_cache=False)
    config._attn_implementation = "sdpa"
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**(config.to_dict() | {"num_hidden_layers": 0})))
        for index in range(layers):
            block = transformers.models.llama.modeling_llama.LlamaDecoderLayer(config, index)
            for weight in block.parameters():
                if weight.dim() == 2:
                    torch.nn.init.normal_(weight, std=0.02)
            if quantized:
                quantize(block)
            model.model.layers.append(block)
        torch.set_default_dtype(torch.float32)
    model.config.num_hidden_layers = layers
    return model


def quantize(block):
    import bitsandbytes
    for part in (block.self_attn, block.mlp):
        for name, linear in list(part.named_children()):
            if not isinstance(linear, torch.nn.Linear):
                continue
            coded = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                                               compress_statistics=True, quant_type="nf4", device="meta")
            coded.weight = bitsandbytes.nn.Params4bit(linear.weight.data.cpu(), requires_grad=False, compress_statistics=True,
                                                      quant_type="nf4")
            setattr(part, name, coded.to("cuda"))


def measure(run, steps, layers):
    method, sequences, length = re.fullmatch(r"(\w+)\.(\d+)x(\d+)", run).groups()
    shape = (int(sequences), int(length))
    torch.manual_seed(1)
    torch.cuda.reset_peak_memory_stats()
    model = base_model(layers, method.startswith("qlora"))
    model.requires_grad_(False)
    if "_recompute" in method:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    model = peft.get_peft_model(model, peft.LoraConfig(r=64, lora_alpha=16, target_modules=LAYERS))
    model.train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in trained:
        weight.data = weight.data.float()
    optimizer = torch.optim.AdamW(trained, lr=2e-4, fused=True)
    seconds = []
    for _ in range(WARMUPS + steps):
        tokens = torch.randint(0, 32000, shape, device="cuda")
        torch.cuda.synchronize()
        start = time.perf_counter()
        with torch.autocast("cuda", torch.bfloat16, enabled=method.endswith("_autocast")):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    of_step = shape[0] * shape[1]
    speeds = [of_step / second for second in seconds[WARMUPS:]]
    versions = {library.__name__: library.__version__ for library in (torch, transformers, peft)}
    return {"run": run, "tokens_per_second": of_step / statistics.median(seconds[WARMUPS:]), "least": min(speeds), "most": max(speeds),
            "used_bytes": total - free, "allocated_bytes": torch.cuda.max_memory_allocated(),
            "device": torch.cuda.get_device_name(), "versions": versions, "loss": loss.item()}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="RUN")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    for run in options.runs:
        if not re.fullmatch(rf"({'|'.join(METHODS)})\.\d+x\d+", run):
            parser.error(f"no run {run}; runs are METHOD.SEQUENCESxLENGTH, METHOD one of {', '.join(METHODS)}")
    if any(run.startswith("qlora") for run in options.runs):
        require("bitsandbytes")
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    for run in options.runs:
        result = measure(run, options.steps, options.layers)
        gc.collect()
        torch.cuda.empty_cache()
        (options.out / f"peft.{run}.json").write_text(json.dumps(result) + "\n")
        print(f"| {run} | {result['tokens_per_second']:,.0f} ({result['least']:,.0f} to {result['most']:,.0f}) tokens/s "
              f"| {result['used_bytes'] / 1e9:.2f} GB | loss {result['loss']:.3f}", flush=True)


if __name__ == "__main__":
    main()
