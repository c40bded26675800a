#!/usr/bin/env python3
"""What FP8 costs in loss with the layers of each model family: tiny models on bytes of real text, on the CPU.

    scripts/research/families.py PARKA --folder RUNS --json OUT [--steps 400] [--seeds 5] [--jobs 2]

The text is the system's C headers; --text takes another folder. A model of each of FAMILIES is trained with each of RECIPES
over the same batches in the same order, and its loss on held-out text is compared with that of bf16. Prints a table, and
writes with the losses of every run

    loss_gap.tiny.FAMILY.RECIPE.nats    loss minus that of bf16, nats per byte: the mean over the seeds

Finished runs in RUNS are not trained again.
"""
import concurrent.futures
import json
import statistics
import subprocess
import sys
from pathlib import Path

from measured_runs import ScriptParser, error_line, fail, positive, report_file, require_success, run_main, write_report

# Keys in which the published models differ from a Llama; windows are shorter than sequences, and `parka` wants heads of
# a multiple of 16.
WINDOW, HEAD = 24, 16
POST_NORM = {"norm_placement": "after", "qk_norm": "full", "rope_theta": 500000.0}
FAMILIES = {
    "llama3": ("grouped queries", {"rope_theta": 500000.0}),
    "qwen2": ("biases of q, k, v", {"rope_theta": 1e6, "qkv_bias": True, "tie_embeddings": True}),
    "qwen3": ("QK-norm per head, wide heads",
              {"rope_theta": 1e6, "qk_norm": "per_head", "head_dim": 2 * HEAD, "tie_embeddings": True}),
    "olmo2": ("post-norms, QK-norm over all heads", POST_NORM),
    "olmo3": ("as OLMo 2, windows but in the last block", {**POST_NORM, "sliding_window": WINDOW}),
    "mistral": ("windows in all blocks", {"sliding_window": WINDOW}),
    "gemma3": ("pre-norms and post-norms, 1 + w, QK-norm, GELU, windows but in the last block",
               {"rope_theta": 1e6, "local_rope_theta": 1e4, "sliding_window": WINDOW, "norm_placement": "both", "norm_unit_offset": True,
                "qk_norm": "per_head", "head_dim": 2 * HEAD, "activation": "gelu_tanh", "embedding_scale": "sqrt_d_model",
                "tie_embeddings": True}),
}
RECIPES = {
    "bf16": {"recipe": "bf16"},
    "fp32": {"recipe": "fp32"},  # shows what bf16 itself costs
    "coat": {"recipe": "coat"},
    "parka": {"recipe": "parka"},
}
SEQUENCE, BATCH = 64, 8
EVAL_SEQUENCES = 256


def config_of(arguments, family, recipe, seed):
    heads = arguments.width // HEAD
    model = {"vocab_size": 272, "d_model": arguments.width, "num_layers": arguments.layers, "num_heads": heads,
             "num_kv_heads": heads if family in ("olmo2", "olmo3") else heads // 2, "d_ffn": 2 * arguments.width,
             "norm": "rmsnorm", "norm_eps": 1e-6, "tie_embeddings": False, **FAMILIES[family][1]}
    if family in ("olmo3", "gemma3"):
        model["full_attention_every"] = arguments.layers
    text = arguments.folder / "text"
    return {
        "device": {"kind": "cpu"},
        "model": model,
        "precision": RECIPES[recipe],
        "optimizer": {"lr": arguments.lr, "schedule": {"kind": "cosine", "warmup_steps": arguments.steps // 10}},
        "data": {"train": [str(text / "train-*.npy")], "eval": [str(text / "eval-*.npy")], "sequence_length": SEQUENCE, "seed": seed},
        "training": {"steps": arguments.steps, "global_batch_size": BATCH, "micro_batch_size": BATCH, "seed": seed,
                     "eval_interval": arguments.steps, "eval_sequences": EVAL_SEQUENCES},
        "checkpoint": {"folder": str(folder_of(arguments, family, recipe, seed))},
    }


def folder_of(arguments, family, recipe, seed):
    return arguments.folder / f"{family}.{recipe}.{seed}"


def write_text(arguments):
    out = arguments.folder / "text"
    if (out / "data.json").exists():
        return
    script = Path(__file__).resolve().parents[1] / "prepare_data.py"
    # Pieces of files, so that what is held out is like the rest.
    command = [sys.executable, script, arguments.text, "--include", "*.h", "--tokenizer", "bytes", "--split-bytes", "2000",
               "--eval-fraction", "0.1", "--max-tokens", str(arguments.tokens), "--out", out]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode != 0:
        fail(error_line(made.stderr).removeprefix("prepare_data: error: "))


def train(arguments, family, recipe, seed):
    """The exit code of one run, and the file of its messages."""
    folder = folder_of(arguments, family, recipe, seed)
    config, log = Path(f"{folder}.json"), Path(f"{folder}.log")
    config.write_text(json.dumps(config_of(arguments, family, recipe, seed)), encoding="utf-8")
    with open(log, "w", encoding="utf-8") as file:
        ended = subprocess.run([arguments.parka.resolve(), "--threads", "1", "train", config], stdout=file,
                               stderr=subprocess.STDOUT, check=False)
    return ended.returncode, log


def train_all(arguments, runs):
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        for started in [pool.submit(train, arguments, *run) for run in runs]:
            code, log = started.result()
            if code != 0:
                pool.shutdown(cancel_futures=True)
                require_success(code, log)


def losses_of(arguments, family, recipe, seed):
    """On held-out text: before the first step and after the last."""
    lines = (folder_of(arguments, family, recipe, seed) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {record["step"]: record["loss"] for record in map(json.loads, lines) if record["kind"] == "eval"}
    return losses[0], losses[arguments.steps]


def gaps(losses, family, recipe):
    """Of each seed: nats per byte more than bf16 at the end."""
    return [end - of_bf16 for (_, end), (_, of_bf16) in zip(losses[family][recipe], losses[family]["bf16"])]


def print_table(losses):
    print("| family | layers | at the start | bf16 |", " | ".join(f"`{recipe}`" for recipe in list(RECIPES)[1:]), "|")
    print("|---" * (3 + len(RECIPES)) + "|")
    for family, (layers, _) in FAMILIES.items():
        if family not in losses:
            continue
        start, end = (statistics.mean(pair[i] for pair in losses[family]["bf16"]) for i in (0, 1))
        cells = []
        for recipe in list(RECIPES)[1:]:
            of_seeds = gaps(losses, family, recipe)
            cells.append(f"{statistics.mean(of_seeds):+.4f} ({min(of_seeds):+.4f} to {max(of_seeds):+.4f})")
        print(f"| {family} | {layers} | {start:.3f} | {end:.3f} |", " | ".join(cells), "|")


def read_arguments():
    parser = ScriptParser(__doc__)
    parser.add_argument("parka", type=Path, metavar="PARKA", help="the program")
    parser.add_argument("--folder", type=Path, required=True, metavar="RUNS")
    parser.add_argument("--json", type=report_file, required=True, metavar="OUT", help="file for command, date and figures")
    parser.add_argument("--text", type=Path, default=Path("/usr/include"), help="folder of C headers (default /usr/include)")
    parser.add_argument("--tokens", type=positive, default=4000000, help="bytes of it at most (default 4 million)")
    parser.add_argument("--steps", type=positive, default=400, help=f"of {BATCH} sequences of {SEQUENCE} bytes (default 400)")
    parser.add_argument("--seeds", type=positive, default=5, help="runs of each kind (default 5)")
    parser.add_argument("--width", type=positive, default=32, help=f"model.d_model, a multiple of {2 * HEAD} (default 32)")
    parser.add_argument("--layers", type=positive, default=2, help="model.num_layers, at least 2 (default 2)")
    parser.add_argument("--lr", type=float, default=1e-2, help="peak learning rate (default 0.01)")
    parser.add_argument("--family", choices=FAMILIES, action="append", help="may be repeated (default: all)")
    parser.add_argument("--jobs", type=positive, default=1, help="runs at a time, of one thread each (default 1)")
    arguments = parser.parse_args()
    if arguments.width % (2 * HEAD) != 0:
        parser.error(f"--width is {arguments.width}; give a multiple of {2 * HEAD}")
    return arguments


def main():
    arguments = read_arguments()
    arguments.folder = arguments.folder.resolve()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    write_text(arguments)
    families, seeds = arguments.family or list(FAMILIES), range(1, arguments.seeds + 1)
    train_all(arguments, [(family, recipe, seed) for family in families for recipe in RECIPES for seed in seeds])
    losses = {family: {recipe: [losses_of(arguments, family, recipe, seed) for seed in seeds] for recipe in RECIPES}
              for family in families}
    print_table(losses)
    figures, spread = {}, {}
    for family in families:
        for recipe in list(RECIPES)[1:]:
            name, of_seeds = f"loss_gap.tiny.{family}.{recipe}.nats", gaps(losses, family, recipe)
            figures[name], spread[name] = statistics.mean(of_seeds), [min(of_seeds), max(of_seeds)]
    write_report(arguments, figures, {"spread": spread, "losses": losses})


if __name__ == "__main__":
    run_main(main)
