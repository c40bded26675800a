#!/usr/bin/env python3
"""Times instruction tuning of LLaVA-1.5-7B with transformers on one GPU, beside which `parka bench configs/llava-1.5-7b-bench.json` is read.

    scripts/research/llava_peer_speed.py OUT [--batches 4 8 16] [--steps 6]

Needs torch and transformers. Weights are random and, as the optimizer's states, in bf16: no fp32 master. The tower is frozen; projector and
decoder train with PyTorch's fused AdamW; layers of the decoder are compiled. A sequence is an image of 336 pixels (576 tokens) and 512
tokens of text; a step is one batch. GB (1e9 bytes) are in use on the device. OUT gets a JSON file for each batch.
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

require("torch", "transformers")
import torch  # noqa: E402
import transformers  # noqa: E402

WARMUPS, IMAGE_TOKENS, TEXT_TOKENS, IMAGE_TOKEN = 3, 576, 512, 32000


def make_model(layers):
    text = transformers.LlamaConfig(vocab_size=32064, hidden_size=4096, intermediate_size=11008, num_hidden_layers=layers,
                                    num_attention_heads=32, max_position_embeddings=4096, use_cache=False)
    vision = transformers.CLIPVisionConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=24, num_attention_heads=16,
                                           image_size=336, patch_size=14, projection_dim=768)
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, image_seq_length=IMAGE_TOKENS)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = transformers.LlavaForConditionalGeneration(config)
    torch.set_default_dtype(torch.float32)
    model.model.vision_tower.requires_grad_(False)
    for layer in model.model.language_model.layers:
        layer.compile()
    return model.train()


def measure(model, batch, steps):
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=2e-5, fused=True)
    seconds = []
    for _ in range(WARMUPS + steps):
        tokens = torch.randint(0, IMAGE_TOKEN, (batch, IMAGE_TOKENS + TEXT_TOKENS), device="cuda")
        tokens[:, :IMAGE_TOKENS] = IMAGE_TOKEN
        labels = tokens.masked_fill(tokens == IMAGE_TOKEN, -100)
        pixels = torch.randn(batch, 3, 336, 336, device="cuda", dtype=torch.bfloat16)
        torch.cuda.synchronize()
        start = time.perf_counter()
        model(input_ids=tokens, pixel_values=pixels, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    free, total = torch.cuda.mem_get_info()
    rates = [batch / second for second in seconds[WARMUPS:]]
    return {"batch": batch, "samples_per_second": batch / statistics.median(seconds[WARMUPS:]), "least": min(rates), "most": max(rates),
            "used_bytes": total - free, "device": torch.cuda.get_device_name(),
            "versions": {library.__name__: library.__version__ for library in (torch, transformers)}}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--batches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--layers", type=int, default=32)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("PyTorch finds no GPU")
    options.out.mkdir(parents=True, exist_ok=True)
    model = make_model(options.layers)
    for batch in options.batches:
        result = measure(model, batch, options.steps)
        gc.collect()
        torch.cuda.empty_cache()
        (options.out / f"llava.{batch}.json").write_text(json.dumps(result) + "\n")
        print(f"| batch {batch} | {result['samples_per_second']:.2f} ({result['least']:.2f} to {result['most']:.2f}) samples/s "
              f"| {result['used_bytes'] / 1e9:.2f} GB", flush=True)


if __name__ == "__main__":
    main()
