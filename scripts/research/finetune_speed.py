#!/usr/bin/env python3
"""Times ways of fine-tuning a model on one GPU, and says what memory they take: `parka bench` of each method at each point.

    scripts/research/finetune_speed.py PARKA OUT [--config configs/llama2-7b.json] [--runs METHOD.SEQUENCESxLENGTH...]
    scripts/research/finetune_speed.py --figures COMMIT OUT      writes what OUT has into docs/results/figures.jsonl, and ratios

OUT may have what peft_speed.py left there, too.

A step is one micro-batch. Adapters of rank 64 are on all linear layers of the blocks, side networks are 16 times narrower, gradients are
bf16. OUT gets a JSON file for each
run; one that is there already is not run again. Runs that do not fit the card are left out, with a line. Methods:
"""
import argparse
import datetime
import json
import re
import subprocess
import sys
from pathlib import Path

FIGURES = Path(__file__).resolve().parents[2] / "docs/results/figures.jsonl"
ALL = ["distributed.zero_stage=0", "training.eval_interval=0", "optimizer.gradient=bf16"]
ADAPTERS = ["finetune.method=lora", "finetune.rank=64"]
QST = ["finetune.method=qst", "finetune.base=nf4"]
# The head as it was when the figures were measured; methods that end in _head have it in FP8.
FP8 = ["precision.recipe=parka", "precision.group_size=32", "precision.head=compute"]
RECOMPUTE = ["precision.recompute=block"]
METHODS = {
    "full": ["optimizer.master=fp32", "optimizer.states=bf16"],
    "full_fp8": ["optimizer.master=fp32", "optimizer.states=fp8_expanded", "precision.weight_copies=rows"] + FP8,
    "lora": ADAPTERS,
    "lora_recompute": ADAPTERS + RECOMPUTE,
    "lora_fp8": ADAPTERS + FP8 + ["finetune.base=fp8"],
    "lora_fp8_both": ADAPTERS + FP8 + ["finetune.base=fp8", "precision.weight_copies=both"],
    "lora_fp8_recompute": ADAPTERS + FP8 + RECOMPUTE + ["finetune.base=fp8"],
    "lora_fp8_offload": ADAPTERS + FP8 + ["finetune.base=fp8", "precision.offload_blocks=15"],
    "lora_fp8_head": ADAPTERS + FP8 + ["finetune.base=fp8", "precision.head=fp8"],
    "lora_fp8_offload_head": ADAPTERS + FP8 + ["finetune.base=fp8", "precision.offload_blocks=15", "precision.head=fp8"],
    "lora_fp8_20gb": ADAPTERS + FP8 + ["finetune.base=fp8", "precision.offload_blocks=9"],
    "lora_fp8_20gb_head": ADAPTERS + FP8 + ["finetune.base=fp8", "precision.offload_blocks=10", "precision.head=fp8"],
    "qlora": ADAPTERS + ["finetune.base=nf4"],
    "qlora_fp8": ADAPTERS + FP8 + ["finetune.base=nf4"],
    "qlora_fp8_recompute": ADAPTERS + FP8 + RECOMPUTE + ["finetune.base=nf4"],
    "qlora_recompute": ADAPTERS + RECOMPUTE + ["finetune.base=nf4"],
    "qst": QST,
    "qst_recompute": QST + RECOMPUTE,
    "qst_lean": QST + RECOMPUTE + ["finetune.kept=fp8"],
    "qst_avg_pool": QST + ["finetune.downsample=avg_pool"],
    "qst_fp8_lean": QST + FP8 + RECOMPUTE + ["finetune.kept=fp8"],
    "qst_fp8": QST + FP8,
    "qst_fp8_base": QST + FP8 + ["finetune.base=fp8"],
}
RUNS = [f"{method}.{point}" for point in ("4x384", "16x384", "4x2048", "16x2048") for method in METHODS]


def autocast(point):
    """peft's run under autocast."""
    method, shape = point.format("peft.qlora").rsplit(".", 1)
    return f"{method}_autocast.{shape}"


POINTS = ("{}.4x384", "{}.16x384", "{}_recompute.16x384", "{}_recompute.4x2048")  # those of peft that are compared
RATIOS = {
    "qlora.llama2-7b.vs_peft": [(point.format("qlora"), point.format("peft.qlora")) for point in POINTS],
    "qlora.llama2-7b.vs_peft_autocast": [(point.format("qlora"), autocast(point)) for point in POINTS],
    "qlora_fp8.llama2-7b.vs_peft": [(point.format("qlora_fp8"), point.format("peft.qlora")) for point in POINTS],
    "qlora_fp8.llama2-7b.vs_peft_autocast": [(point.format("qlora_fp8"), autocast(point)) for point in POINTS],
    "lora_fp8.llama2-7b.vs_peft": [("lora_fp8_20gb.4x2048", "peft.lora.4x2048")],
    "lora_fp8_head.llama2-7b.vs_peft": [("lora_fp8_20gb_head.4x2048", "peft.lora.4x2048")],
    "lora_fp8.llama2-7b.vs_peft_recompute": [("lora_fp8_20gb.4x2048", "peft.lora_recompute.4x2048")],
    "qst.llama2-7b.vs_qlora": [("qst_lean.4x384", "qlora.4x384")],
}
KEPT = ("device", "tokens_per_step", "tokens_per_second", "step_seconds", "used_bytes", "planned_bytes", "context_bytes")


def options_of(run):
    method, sequences, length = re.fullmatch(r"(\w+)\.(\d+)x(\d+)", run).groups()
    return METHODS[method] + ALL + [f"training.micro_batch_size={sequences}", f"training.global_batch_size={sequences}",
                                    f"data.sequence_length={length}"]


def command_of(parka, config, run, steps):
    sets = [word for option in options_of(run) for word in ("--set", option)]
    # A Path has lost the "./" of a name without folders, which would then be looked up in PATH.
    return [str(parka.absolute()), "bench", str(config), *sets, "--steps", str(steps)]


def measure(parka, config, run, steps, out):
    report = out / f"{config.stem}.{run}.json"
    if report.exists():
        return
    partial = report.with_suffix(".partial")
    result = subprocess.run(command_of(parka, config, run, steps) + ["--json", str(partial)], capture_output=True, text=True)
    report.with_suffix(".txt").write_text(result.stdout + result.stderr)
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()[-1]
        print(f"{run}: left out, parka exited with {result.returncode}: {last}", flush=True)
        return
    bench = json.loads(partial.read_text())
    report.write_text(json.dumps({key: bench[key] for key in KEPT} | {"config": config.stem, "run": run, "steps": steps}) + "\n")
    partial.unlink()
    print(row(json.loads(report.read_text())), flush=True)


def numbers(bench):
    speeds = [bench["tokens_per_step"] / seconds for seconds in bench["step_seconds"]]
    planned = bench["planned_bytes"] + bench["context_bytes"]
    used = bench["used_bytes"] or planned  # a CPU does not say
    return bench["tokens_per_second"], min(speeds), max(speeds), used / 1e9, 100 * (planned / used - 1)


def row(bench):
    speed, least, most, used, error = numbers(bench)
    method, point = bench["run"].split(".")
    return (f"| {bench['config']} | {method} | {point} | {speed:,.0f} ({least:,.0f} to {most:,.0f}) | {used:.2f} GB "
            f"| {error:+.2f} % |")


def reports_in(out):
    reports = [json.loads(path.read_text()) for path in sorted(out.glob("*.json")) if not path.name.startswith("peft.")]
    return sorted(reports, key=lambda bench: (bench["config"], bench["run"].split(".")[1], bench["run"]))


def speed_of(figures, key):
    figure = figures[f"finetune.llama2-7b.{key}.tok_s"]
    return figure["value"], *figure["spread"]


def ratio(figures, name, pairs):
    """The least ratio of speeds of pairs of runs, and as spread the least and most of their steps."""
    ratios = [tuple(a / b for a, b in zip((ours, low, high), (theirs, their_high, their_low)))
              for (ours, low, high), (theirs, their_low, their_high) in
              ((speed_of(figures, mine), speed_of(figures, other)) for mine, other in pairs)]
    add(figures, name, min(ratios)[0], "1", (min(r[1] for r in ratios), max(r[2] for r in ratios)),
        command="finetune_speed.py --figures COMMIT OUT: " + ", ".join(f"{mine} / {other}" for mine, other in pairs),
        **{key: figures[f"finetune.llama2-7b.{pairs[0][0]}.tok_s"][key] for key in ("commit", "date", "card")})


def add(figures, name, value, unit, spread, **source):
    figures[name] = {"name": name, "value": float(f"{value:.6g}"), "unit": unit, "spread": [float(f"{x:.6g}") for x in spread], **source}


def write_figures(commit, out):
    figures = {line["name"]: line for line in map(json.loads, FIGURES.read_text().splitlines())}
    today = str(datetime.date.today())
    for bench in reports_in(out):
        speed, least, most, used, _ = numbers(bench)
        source = {"command": f"scripts/research/finetune_speed.py PARKA OUT --config configs/{bench['config']}.json --runs {bench['run']}",
                  "commit": commit, "date": today, "card": bench["device"]}
        name = f"finetune.{bench['config']}.{bench['run']}"
        add(figures, f"{name}.tok_s", speed, "tok/s", (least, most), **source)
        add(figures, f"{name}.peak_gb", used, "GB", (used, used), **source)
    for path in sorted(out.glob("peft.*.json")):
        peer = json.loads(path.read_text())
        source = {"command": f"scripts/research/peft_speed.py OUT --runs {peer['run']}", "date": today, "card": peer["device"],
                  "commit": ", ".join(f"{library} {version}" for library, version in peer["versions"].items())}
        name = f"finetune.llama2-7b.peft.{peer['run']}"
        add(figures, f"{name}.tok_s", peer["tokens_per_second"], "tok/s", (peer["least"], peer["most"]), **source)
        add(figures, f"{name}.peak_gb", peer["used_bytes"] / 1e9, "GB", (peer["used_bytes"] / 1e9,) * 2, **source)
    for name, pairs in RATIOS.items():
        if all(f"finetune.llama2-7b.{run}.tok_s" in figures for pair in pairs for run in pair):
            ratio(figures, name, pairs)
    FIGURES.write_text("".join(json.dumps(figure) + "\n" for figure in figures.values()))


def main():
    listing = "\n".join(f"  {name}: {' '.join(options)}" for name, options in METHODS.items())
    parser = argparse.ArgumentParser(description=__doc__ + listing, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="PARKA and OUT; with --figures OUT alone")
    parser.add_argument("--config", type=Path, default=Path("configs/llama2-7b.json"))
    parser.add_argument("--runs", nargs="+", default=RUNS, metavar="RUN")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--figures", metavar="COMMIT")
    options = parser.parse_args()
    if len(options.paths) != (1 if options.figures else 2):
        parser.error("--figures wants OUT alone" if options.figures else "PARKA and OUT are wanted")
    out = options.paths[-1]
    if options.figures:
        write_figures(options.figures, out)
        return
    for run in options.runs:
        if not re.fullmatch(rf"({'|'.join(METHODS)})\.\d+x\d+", run):
            parser.error(f"no run {run}; runs are METHOD.SEQUENCESxLENGTH, see --help")
    out.mkdir(parents=True, exist_ok=True)
    for run in options.runs:
        measure(options.paths[0], options.config, run, options.steps, out)
    reports = reports_in(out)
    print("| model | method | sequences x length | tokens/s (least to most) | in use | planned less used |\n|---|---|---|---|---|---|")
    for bench in reports:
        print(row(bench))
    sys.exit(0 if reports else 1)


if __name__ == "__main__":
    main()
