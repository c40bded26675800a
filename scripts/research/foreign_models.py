#!/usr/bin/env python3
"""Measures what FP8 costs a model that others have trained, and what `parka tune-precision` leaves of that.

    foreign_models.py OUT --name smollm2-135m --model IMPORTED --train TOKENS.npy --text licences=FILE --text docs=FILE

IMPORTED is a folder of `parka import`. Tuning measures on TOKENS, perplexity is that of the texts, which it has not seen. Fine-tuning runs 300
steps of all weights, and of adapters over a base in FP8, for each seed. It is compared in the run's own numerics, and in bf16, in which an
export is used. `parka bench` of BENCH at its widths, with as many of its blocks' products of each kind in bf16, says how much of FP8's gain in
time is left. Appends lines in the form of docs/results/figures.jsonl to OUT/figures.jsonl: perplexity rises over bf16 in percent, gaps to bf16's
held-out loss in nats, the share of FP8's gain.
"""
import argparse
import datetime
import fnmatch
import json
import math
import os
import statistics
import subprocess
import sys

RECIPES = ("fp8_linear", "fp8_block", "coat", "parka")
LORA = {"finetune.method": "lora", "finetune.rank": 16, "finetune.alpha": 32, "optimizer.weight_decay": 0}


class Measurement:
    def __init__(self, args):
        self.args = args
        os.makedirs(args.out, exist_ok=True)
        with open(os.path.join(args.model, "config.json"), encoding="utf-8") as file:
            text = "\n".join(line for line in file if not line.startswith("//"))
        self.model = json.loads(text)["model"]
        self.shape = {"data.sequence_length": args.length, "training.micro_batch_size": args.micro_batch}

    def parka(self, *command, **keys):
        settings = [f"--set={key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in keys.items()]
        result = subprocess.run([self.args.parka, *command, *settings], capture_output=True, text=True)
        if result.returncode != 0:
            sys.exit(f"parka {' '.join(command)}: {result.stderr.strip()}")
        return result.stdout

    def figure(self, name, values, unit, command):
        line = {"name": f"real.{name}", "value": float(f"{statistics.mean(values):.6g}"), "unit": unit,
                "spread": [float(f"{x:.6g}") for x in (min(values), max(values))], "command": command, "commit": self.args.commit,
                "date": str(datetime.date.today()), "card": self.args.card}
        print(line["name"], line["value"], line["spread"], flush=True)
        with open(os.path.join(self.args.out, "figures.jsonl"), "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def losses(self, checkpoint, precision):
        out = self.parka("eval", checkpoint, "--sets", *self.args.text, "--json", **self.shape, **precision)
        return {name: of_set["loss"] for name, of_set in json.loads(out)["sets"].items()}

    def rises(self, name, plain, precision):
        losses = self.losses(self.args.model, precision)
        self.figure(f"{self.args.name}.{name}.perplexity_rise_percent", [100 * math.expm1(losses[s] - plain[s]) for s in plain], "%",
                    f"parka eval MODEL, {self.args.micro_batch} x {self.args.length} tokens at a time; spread: of the texts")

    def tuned(self):
        """The keys of `precision` that tune-precision has written for its recipe."""
        path = os.path.join(self.args.out, "tuned.json")
        if not os.path.exists(path):
            batch = {"training.global_batch_size": self.args.micro_batch}
            print(self.parka("tune-precision", os.path.join(self.args.model, "config.json"), "--rise", self.args.rise, "--sequences",
                             str(self.args.sequences), "--write", path,
                             **{"checkpoint.init_from": self.args.model, "data.train": json.dumps([self.args.train]),
                                "precision.recipe": self.args.recipe}, **self.shape, **batch), flush=True)
        with open(path, encoding="utf-8") as file:
            text = "\n".join(line for line in file if not line.startswith("//"))
        return {f"precision.{key}": value for key, value in json.loads(text)["precision"].items()}

    def finetuned(self, name, seed, precision, keys):
        """Held-out losses after the run, in its own numerics and in bf16."""
        run = os.path.join(self.args.out, f"{name}.{seed}")
        if not os.path.exists(os.path.join(run, "done")):
            self.parka("train", os.path.join(self.args.model, "config.json"),
                       **{"checkpoint.init_from": self.args.model, "checkpoint.folder": run, "checkpoint.interval": 0,
                          "data.train": json.dumps([self.args.train]), "training.seed": seed, "data.seed": seed, "training.steps": self.args.steps,
                          "training.global_batch_size": self.args.batch, "training.eval_interval": 0, "optimizer.lr": 2e-5,
                          "optimizer.schedule.warmup_steps": self.args.steps // 10, **self.shape, **precision, **keys})
            open(os.path.join(run, "done"), "w", encoding="utf-8").close()
        own = self.losses(run, {"precision.eval": "same"})
        return {"same": own, "bf16": own if precision["precision.recipe"] == "bf16" else self.losses(run, {"precision.eval": "bf16"})}

    def gaps(self, tuned):
        methods = {"finetune": {}, "lora": {**LORA, "optimizer.lr": 2e-4}}
        runs = {"tuned": tuned, "coat": {"precision.recipe": "coat"}, "parka": {"precision.recipe": "parka"}}
        for method, keys in methods.items():
            plain = {seed: self.finetuned(f"{method}.bf16", seed, {"precision.recipe": "bf16"}, keys) for seed in self.args.seeds}
            for name, precision in runs.items():
                base = {"finetune.base": "fp8"} if method == "lora" else {}
                losses = {seed: self.finetuned(f"{method}.{name}", seed, precision, {**keys, **base}) for seed in self.args.seeds}
                for numerics, suffix in (("same", "own_numerics_gap"), ("bf16", "gap")):
                    gaps = [statistics.mean(loss - plain[seed][numerics][text] for text, loss in losses[seed][numerics].items())
                            for seed in self.args.seeds]
                    self.figure(f"{self.args.name}.{name}.{method}_{suffix}", gaps, "nats/token",
                                f"parka train MODEL, {self.args.steps} steps of {self.args.batch} x {self.args.length} tokens, "
                                f"{len(gaps)} seeds, both texts, precision.eval={numerics}")

    def step_seconds(self, precision):
        path = os.path.join(self.args.out, "bench.json")
        self.parka("bench", self.args.bench, "--steps", "8", "--json", path,
                   **{"model.num_layers": self.args.bench_layers, "training.eval_interval": 0, "distributed.zero_stage": 0, **precision})
        with open(path, encoding="utf-8") as file:
            return statistics.median(json.load(file)["step_seconds"])

    def gain(self, tuned):
        """With the share of blocks of which each kind of product is in bf16, beginning with the first ones."""
        blocks, unquantized = self.model["num_layers"], tuned.get("precision.unquantized", [])
        names, counts = [name for name in unquantized if name == "head"], {}
        for kind in ("qkv", "attention_out", "up_gate", "down"):
            for suffix in (kind, f"{kind}.forward"):
                counts[suffix] = sum(any(fnmatch.fnmatch(f"blocks.{block}.{suffix}", name) for name in unquantized) for block in range(blocks))
                names += [f"blocks.{block}.{suffix}" for block in range(round(counts[suffix] / blocks * self.args.bench_layers))]
        of_bench = {**tuned, "precision.unquantized": names}
        seconds = [self.step_seconds(keys) for keys in ({"precision.recipe": "bf16"}, {"precision.recipe": self.args.recipe}, of_bench)]
        self.figure("tuned.of_fp8_gain", [(seconds[0] - seconds[2]) / (seconds[0] - seconds[1])], "1",
                    f"parka bench {os.path.basename(self.args.bench)}, {self.args.bench_layers} blocks, of which "
                    f"{counts} of {blocks} as in {self.args.name}; step {seconds[0]:.4f} s in bf16, {seconds[1]:.4f} s in {self.args.recipe}, "
                    f"{seconds[2]:.4f} s tuned")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--name", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--train", required=True)
    parser.add_argument("--text", action="append", required=True, metavar="NAME=FILE")
    parser.add_argument("--parka", default=os.environ.get("PARKA", "build/cuda/parka"))
    parser.add_argument("--recipe", default="parka", help="to tune (default %(default)s)")
    parser.add_argument("--rise", default="0.8%")
    parser.add_argument("--sequences", type=int, default=512, help="to tune on (default %(default)s)")
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step of fine-tuning (default %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2], help="of fine-tuning; none: do not")
    parser.add_argument("--bench", default="configs/llama2-7b-bench.json", help="'' for none")
    parser.add_argument("--bench-layers", type=int, default=32)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--card", default="unknown")
    args = parser.parse_args()
    args.model, args.train = os.path.abspath(args.model), os.path.abspath(args.train)
    m = Measurement(args)
    plain = m.losses(args.model, {"precision.recipe": "bf16"})
    for recipe in RECIPES:
        m.rises(recipe, plain, {"precision.recipe": recipe})
    tuned = m.tuned()
    m.rises("tuned", plain, tuned)
    if args.seeds:
        m.gaps(tuned)
    if args.bench:
        m.gain(tuned)


if __name__ == "__main__":
    main()
