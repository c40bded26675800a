#!/usr/bin/env python3
"""The table and the figures of finetune_methods.sh beside this, which starts it: held-out losses of runs OUT/METHOD.SEED.

    finetuning.tiny.base.nats             held-out loss of the second text before fine-tuning, nats per byte
    finetuning.tiny.METHOD.nats           after it
    finetuning.tiny.METHOD.vs_full.nats   the same minus that of full fine-tuning of the same base

Each is the mean over the seeds, with the least and the most.
"""
import json
import statistics
from pathlib import Path

from measured_runs import ScriptParser, fail, report_file, run_main

FULL = "full"


def losses_of(folder, method, seeds):
    """(before the first step, after the last) of each seed."""
    pairs = []
    for seed in seeds:
        lines = (folder / f"{method}.{seed}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        losses = {record["step"]: record["loss"] for record in map(json.loads, lines) if record["kind"] == "eval"}
        if len(losses) < 2:
            fail(f"{folder}/{method}.{seed}/metrics.jsonl: not evaluated before and after; train it to its end")
        pairs.append((losses[0], losses[max(losses)]))
    return pairs


def figures_of(losses):
    """{name: [value of each seed]}"""
    values = {"finetuning.tiny.base.nats": [before for before, _ in losses.get(FULL, next(iter(losses.values())))]}
    for method, pairs in losses.items():
        values[f"finetuning.tiny.{method}.nats"] = [after for _, after in pairs]
        if method != FULL and FULL in losses:
            values[f"finetuning.tiny.{method}.vs_full.nats"] = [
                after - of_full for (_, after), (_, of_full) in zip(pairs, losses[FULL])]
    return values


def cell(values, sign=""):
    return f"{statistics.mean(values):{sign}.4f} ({min(values):{sign}.4f} to {max(values):{sign}.4f})"


def print_table(losses, values):
    print(f"| | held-out loss | less `{FULL}`, same seed | figures |")
    print("|---|---|---|---|")
    for method in ("base", *losses):
        name, gap = f"finetuning.tiny.{method}.nats", values.get(f"finetuning.tiny.{method}.vs_full.nats")
        figures = f"`finetuning.tiny.{method}.{{nats,vs_full.nats}}`" if gap else f"`{name}`"
        print(f"| `{method}` | {cell(values[name])} | {cell(gap, '+') if gap else ''} | {figures} |")


def read_arguments():
    parser = ScriptParser(__doc__)
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--seeds", nargs="+", required=True)
    parser.add_argument("--methods", nargs="+", required=True)
    parser.add_argument("--json", type=report_file, required=True, metavar="FILE", help="for command, date and figures")
    return parser.parse_args()


def main():
    arguments = read_arguments()
    losses = {method: losses_of(arguments.folder, method, arguments.seeds) for method in arguments.methods}
    values = figures_of(losses)
    print_table(losses, values)
    report = {"figures": {name: statistics.mean(of_seeds) for name, of_seeds in values.items()}, "seeds": values}
    arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
