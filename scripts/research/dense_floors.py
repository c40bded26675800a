#!/usr/bin/env python3
"""Times a step of dense models on one GPU and prints it beside its floor, with the energy of a token.

    scripts/research/dense_floors.py build/cuda/parka OUT [--models llama2-7b olmo-1b llama3-8b llama3-8b.32k] [--steps 8]

Each model is timed by `parka bench --roofline` while nvidia-smi samples the power of the first GPU. OUT gets MODEL.json of each, and its
MODEL.power, watts of all samples. The floor of an op is its arithmetic at the rate of the datasheet or its bytes at the copy bandwidth
(step_parts.py), the roofline what it reaches alone. A token's energy is the time of a step times the median power near the highest, where
steps are timed, over its tokens.
"""
import json
import statistics
import subprocess
from pathlib import Path

from measured_runs import ScriptParser, fail, positive, run_main
from step_parts import parts_of

ROOT = Path(__file__).resolve().parents[2]
SHARED = {"precision.recipe": "parka", "training.eval_interval": 0, "distributed.zero_stage": 0}
MODELS = {
    "llama2-7b": ("llama2-7b-bench.json", {}),
    "olmo-1b": ("olmo-1b-bench.json", {}),
    "llama3-8b": ("llama3-8b-bench.json", {}),
    "llama3-8b.32k": ("llama3-8b-bench.json", {"data.sequence_length": 32768, "training.global_batch_size": 1}),
}
NEAR_HIGHEST = 0.85  # of the power while steps are timed, and not while the program starts


def measure(parka, out, name, steps):
    """The figures of `parka bench`, and watts."""
    config, keys = MODELS[name]
    path, power = out / f"{name}.json", out / f"{name}.power"
    settings = [f"--set={key}={value}" for key, value in {**SHARED, **keys}.items()]
    with power.open("w", encoding="utf-8") as file:
        query = ["nvidia-smi", "--id=0", "--query-gpu=power.draw.instant", "--format=csv,noheader,nounits", "--loop-ms=100"]
        with subprocess.Popen(query, stdout=file) as sampler:
            try:
                command = [parka, "bench", ROOT / "configs" / config, "--steps", str(steps), "--roofline", "--json", path, *settings]
                result = subprocess.run(command, capture_output=True, text=True, check=False)
            finally:
                sampler.terminate()
    if result.returncode != 0:
        fail(f"{name}: {result.stderr.strip()}", 1)
    watts = [float(line) for line in power.read_text(encoding="utf-8").split("\n") if line.strip()[:1].isdigit()]
    if not watts:
        fail(f"{power}: nvidia-smi has told no power; try `{' '.join(query)}`", 1)
    return json.loads(path.read_text(encoding="utf-8")), statistics.median(w for w in watts if w >= NEAR_HIGHEST * max(watts))


def row_of(name, bench, watts):
    seconds, tokens = statistics.median(bench["step_seconds"]), bench["tokens_per_step"]
    parts = [part for _, part in parts_of(bench)]
    timed, floor, roofline = (sum(part[i] for part in parts) for i in range(3))
    return [name, f"{tokens / seconds:,.0f}", f"{100 * floor / timed:.1f} %", f"{100 * roofline / timed:.1f} %", f"{watts:.0f}",
            f"{watts * seconds / tokens:.4f}"]


def main():
    parser = ScriptParser(__doc__)
    parser.add_argument("parka", metavar="PARKA")
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--steps", type=positive, default=8)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    print("| model, `parka` | tokens/s | floor / time | roofline / time | watts | joules per token |\n|---|---|---|---|---|---|", flush=True)
    for name in options.models:
        print("| " + " | ".join(row_of(name, *measure(options.parka, options.out, name, options.steps))) + " |", flush=True)


if __name__ == "__main__":
    run_main(main)
