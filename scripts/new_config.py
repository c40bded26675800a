#!/usr/bin/env python3
"""Writes a config for a model, a number of tokens and a GPU.

    parka config new --model 150m --tokens 10e9 --gpu h100 --data data/fineweb
    parka config new --model configs/qwen3-0.6b.json --tokens 20e9 --gpu h200 --optimizer muon --out mine.json

Models are 150m, 350m and 1b (as Llama), moe (a mixture of experts of which a token uses 150m), olmoe (OLMoE-1B-7B), or a config
whose model is taken. --data is a folder of `parka prepare`: vocabulary, files, type and length are its own. Batch and learning rate
follow the fits of DeepSeek LLM (arXiv 2401.02954, formula 1), but a run has at least a thousand steps; the micro-batch is the largest
that `parka plan` says fits. The file has comments; change in it what you know better.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from python_packages import HelpFormatter, command_name  # noqa: E402
from script_exit import run_script  # noqa: E402
from text_data.common import InputError, Parser, require_writable, write_file  # noqa: E402

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
LLAMA = {"norm": "rmsnorm", "tie_embeddings": True, "rope_theta": 10000, "init": "mitchell"}
MODELS = {
    "150m": {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ffn": 2048} | LLAMA,
    "350m": {"d_model": 1024, "num_layers": 24, "num_heads": 16, "d_ffn": 2816} | LLAMA,
    "1b": {"d_model": 2048, "num_layers": 16, "num_heads": 16, "d_ffn": 8192} | LLAMA,
    "moe": {"d_model": 768, "num_layers": 12, "num_heads": 12, "d_ffn": 384, "qk_norm": "full",
            "moe": {"num_experts": 32, "experts_per_token": 8}} | LLAMA | {"tie_embeddings": False},
    "olmoe": CONFIGS / "olmoe-1b-7b.json",
}
VOCABULARY = 50304  # of the GPT-NeoX tokenizer, padded
LEAST_STEPS = 1000
WARMUP_STEPS = 100  # in short runs
MICRO_BATCHES = (32, 16, 8, 4, 2, 1)
MUON_RATE = 2  # over AdamW's: with 110M parameters 4e-3 was better than 8e-3, and 2e-3 the best of AdamW


def print_line(text: str) -> None:
    print(f"{command_name()}: {text}", file=sys.stderr, flush=True)


def parka(*arguments: str) -> str:
    program = os.environ.get("PARKA_PROGRAM", "parka")
    result = subprocess.run([program, *arguments], capture_output=True, text=True, env=os.environ | {"PARKA_COMMAND": ""})
    if result.returncode != 0:
        told = result.stderr.strip().removeprefix("parka: error: ").removeprefix("command line: ").replace("--card:", "--gpu:")
        raise InputError(told or f"{program} ended with exit code {result.returncode}")
    return result.stdout


def parka_on(config: dict, command: str, *options: str) -> dict:
    """The JSON that a command such as `plan` prints of the config."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        try:
            return json.loads(parka(*command.split(), file.name, *options))
        except InputError as error:
            raise InputError(str(error).replace(file.name, "the new config")) from error


def model_of(given: str) -> dict:
    model = MODELS.get(given, Path(given))
    if isinstance(model, dict):
        return json.loads(json.dumps(model))
    path = model / "config.json" if model.is_dir() else model
    if not path.exists():
        raise InputError(f"--model {given}: no such file; give {', '.join(MODELS)}, or a config whose model is to be taken")
    parka("config", "show", str(path))  # says what is wrong with it
    text = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*[\s\S]*?\*/', lambda match: match[1] or "", path.read_text(encoding="utf-8"))
    model = json.loads(text).get("model")
    if not model:
        raise InputError(f"--model {given}: has no section model; give a config with one")
    return model


def take_data(config: dict, folder: Path) -> None:
    """What --data sets, and the vocabulary of the folder."""
    data = parka_on(config, "config show", "--data", str(folder))["data"]
    config["data"] = {key: data[key] for key in config["data"]} | ({"loss_mask": True, "documents": data["documents"]} if data["loss_mask"] else {})
    description = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    config["model"]["vocab_size"] = description.get("padded_vocab_size", config["model"]["vocab_size"])


def plan(config: dict, options: argparse.Namespace) -> dict:
    return parka_on(config, "plan", "--gpus", str(options.gpus), "--card", options.gpu, "--json")


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is no number; give one such as 1e9") from None


def two_digits(value: float) -> float:
    return float(f"{value:.1e}")


def choose(config: dict, options: argparse.Namespace) -> dict:
    """Sets batch, steps and rates; returns the plan."""
    length = config["data"]["sequence_length"]

    def planned_with(micro: int) -> dict:
        config["training"] |= {"micro_batch_size": micro, "global_batch_size": micro * options.gpus}
        return plan(config, options)

    micro, planned = 1, planned_with(1)
    if planned["fits"]:
        micro = next((micro for micro in MICRO_BATCHES[:-1] if planned_with(micro)["fits"]), 1)
    compute = planned["card"]["flop_per_token"] * options.tokens
    sequences = max(1.0, 0.292 * compute**0.3271 / length)
    sequences = min(sequences, options.tokens / LEAST_STEPS / length)
    while micro > 1 and micro * options.gpus > sequences:
        micro //= 2
    at_once = micro * options.gpus
    batch = at_once * max(1, int(sequences // at_once))
    steps = max(1, round(options.tokens / (batch * length)))
    config["optimizer"]["lr"] = two_digits(0.3118 * compute**-0.125 * (MUON_RATE if options.optimizer == "muon" else 1))
    config["optimizer"]["schedule"]["warmup_steps"] = f"{min(10, max(2, round(100 * WARMUP_STEPS / steps)))}%"
    often = max(1, steps // 20)
    config["training"] |= {"steps": steps, "global_batch_size": batch, "micro_batch_size": micro, "log_interval": max(1, steps // 1000)}
    if config["data"]["eval"]:
        # Twenty evaluations shall take no more than a few percent of the run.
        config["training"] |= {"eval_interval": often, "eval_sequences": max(8, min(256, steps * batch // 200))}
        if not config["data"].get("loss_mask"):
            config["evaluation"] = {"prompts": ["The"]}
    config["checkpoint"]["interval"] = min(often, 1000)
    return plan(config, options)


COMMENTS = {
    "model.vocab_size": "of the data's tokenizer, padded to a multiple of 16",
    "model.moe.num_experts": "each with d_ffn",
    "precision.recipe": "formats of all tensors; bf16 is the one to compare with (docs/recipes.md)",
    "optimizer.lr": "0.3118 x FLOP^-0.125, the fit of DeepSeek LLM, and twice that for Muon",
    "optimizer.eps": "OLMo 2's (arXiv 2501.00656), which learns faster than with OLMo 1's 1e-5",
    "optimizer.schedule.warmup_steps": "of all steps: 2 %, or in a short run a hundred steps, but no more than 10 %",
    "data.train": "token files of `parka prepare`",
    "training.steps": "tokens / (global_batch_size x sequence_length)",
    "training.global_batch_size": "sequences of a step: 0.292 x FLOP^0.3271 tokens, or less to have a thousand steps",
    "training.micro_batch_size": "sequences at a time: the most that fit, in powers of two",
    "training.eval_interval": "steps from one evaluation on data.eval to the next",
    "evaluation.prompts": "texts that each evaluation goes on with, to see what the model writes",
    "checkpoint.interval": "steps; the same command goes on from the newest checkpoint",
    "training.balance_loss": "as OLMoE's: 0.01 over all blocks",
    "training.router_bias_rate": "as DeepSeek-V3's",
}


def commented(value: object, path: str = "", indent: str = "") -> str:
    if not isinstance(value, dict):
        return json.dumps(value)
    lines = []
    for key, inner in value.items():
        inner_path = f"{path}.{key}".lstrip(".")
        comma = "," if key != list(value)[-1] else ""
        text = f'{indent}  "{key}": {commented(inner, inner_path, indent + "  ")}{comma}'
        lines.append(text + (f"  // {COMMENTS[inner_path]}" if inner_path in COMMENTS else ""))
    return "{\n" + "\n".join(lines) + f"\n{indent}}}"


def make(options: argparse.Namespace) -> tuple[dict, dict]:
    """The config and what is planned for it."""
    model = model_of(options.model)
    model["vocab_size"] = model.get("vocab_size", VOCABULARY)
    config = {
        "model": model,
        "precision": {"recipe": options.recipe},
        "optimizer": {"kind": options.optimizer, "lr": 0.0, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1, "decay_embeddings": False, "clip_norm": 1.0,
                      "schedule": {"kind": "cosine"}},
        "data": {"train": [], "eval": [], "token_dtype": "uint16", "sequence_length": options.sequence_length},
        "training": {"steps": LEAST_STEPS, "global_batch_size": 1, "micro_batch_size": 1},
        "checkpoint": {"folder": f"runs/{options.out.stem}", "interval": 0, "keep": 3},
    }
    if "moe" in model and model["moe"].get("num_experts", 0) > 0:
        config["training"] |= {"balance_loss": two_digits(0.01 / model["num_layers"]), "router_z_loss": 0.001}
        if model["moe"].get("correction_bias"):
            config["training"]["router_bias_rate"] = 0.001
    if options.data:
        take_data(config, options.data)
    if options.gpus > 1:
        config["distributed"] = {"zero_stage": 1}
    return config, choose(config, options)


def print_needs(config: dict, planned: dict, options: argparse.Namespace) -> None:
    training, card = config["training"], planned["card"]
    length = config["data"]["sequence_length"]
    gigabytes = (planned["total_bytes"] + planned["context_bytes"]) / 1e9
    on = f"{'each of ' * (options.gpus > 1)}{options.gpus} {options.gpu}"
    print(f"{options.out}: {training['steps']:,} steps of {training['global_batch_size']} x {length} tokens, {training['micro_batch_size']} at a time")
    print(f"memory: {gigabytes:.1f} GB on {on}{'' if planned['fits'] else ', which is too much'}")
    if card["hours"] and planned["fits"]:
        print(f"time: {card['hours']:.3g} hours at {card['tokens_per_second_per_gpu']:,.0f} tokens/s on {on} ({card['source']})")
    elif planned["fits"]:
        print(f"time: unknown on {options.gpu}: {card['source']}; `parka bench {options.out}` measures it there")
    if not planned["fits"]:
        print(f"next: parka plan {options.out} --gpus {options.gpus} --card {options.gpu}    says what makes it fit")
    elif config["data"]["train"]:
        print(f"next: parka train {options.out}{f' --gpus {options.gpus}' if options.gpus > 1 else ''}")
    else:
        print(f"next: parka train {options.out} --data FOLDER    with a folder of parka prepare, whose vocabulary has to be {config['model']['vocab_size']}")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog=command_name(), description=__doc__, formatter_class=HelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--model", required=True, metavar="NAME", help=f"{', '.join(MODELS)}, or a config or its folder")
    add("--tokens", required=True, type=number, metavar="N", help="tokens to train on, such as 10e9")
    add("--gpu", required=True, metavar="CARD", help="the card to train on, such as h100: one that parka plan --card knows")
    add("--gpus", type=int, default=1, metavar="N", help="how many of them (default: 1)")
    add("--data", type=Path, metavar="FOLDER", help="folder of `parka prepare` (default: none yet)")
    add("--recipe", default="parka", help="number formats (default: parka)")
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="default: adamw")
    add("--sequence-length", type=int, default=2048, metavar="N", help="tokens of a sequence (default: 2048, or that of packed data)")
    add("--out", type=Path, metavar="FILE", help="config to write (default: MODEL.json)")
    options = parser.parse_args(arguments)
    if options.gpu == "cpu":
        raise InputError("--gpu cpu: memory and hours are planned for a card; to train on a CPU give any of them, such as h100")
    if options.out is None:
        options.out = Path(f"{re.sub(r'[.]json$', '', Path(options.model).name)}.json")
    for name, least in (("tokens", 1), ("gpus", 1), ("sequence_length", 2)):
        if not getattr(options, name) >= least:
            raise InputError(f"--{name.replace('_', '-')} is {getattr(options, name)}; give at least {least}")
    if options.out.exists():
        raise InputError(f"--out {options.out}: is there already; give another name")
    require_writable(options.out)
    return options


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    config, planned = make(options)
    given = f"{options.model}, {options.tokens:g} tokens, {options.gpus} {options.gpu}"
    write_file(options.out, [f"// By `parka config new` for {given}. docs/config.md has all keys.\n{commented(config)}\n".encode()])
    print_needs(config, planned, options)


def main() -> int:
    return run_script(run, print_line)


if __name__ == "__main__":
    sys.exit(main())
