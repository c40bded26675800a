#!/usr/bin/env python3
"""The means that fork_gap.sh beside this prints, which starts it.

    fork_table.py DIFFERENCES OUT [--held-out]

DIFFERENCES has the lines of compare.py --json for each seed, OUT the runs' folders, RUN.SEED. It gets fork_gap.jsonl: these lines,
with --held-out each with held_out, the differences on held-out data in the numerics of training (same) and with linear layers in
bf16 (bf16), of held_out.json in the folders. Prints for each RUN its mean differences, with the least and the most of the seeds.
"""
import json
import sys
from pathlib import Path

from measured_runs import ScriptParser, run_main
from paired_losses import EVALUATIONS, HeldOut, check_targets

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import fail  # noqa: E402


def add_held_out(rows, out):
    evaluated = {name: HeldOut(out / name) for row in rows for name in (row["against"], row["run"])}
    check_targets(list(evaluated.values()))
    numerics = [name for name in EVALUATIONS if all(name in each.losses for each in evaluated.values())]
    for row in rows:
        of_run, of_base = evaluated[row["run"]].losses, evaluated[row["against"]].losses
        row["held_out"] = {name: of_run[name] - of_base[name] for name in numerics}


def is_difference(row):
    """Whether it is a line of compare.py --json."""
    return (isinstance(row, dict) and all(isinstance(row.get(key), str) for key in ("run", "against"))
            and type(row.get("nats")) in (int, float))


def read_differences(path):
    try:
        rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except OSError as error:
        fail(f"{path}: {error.strerror}; give the lines of compare.py --json")
    except ValueError:
        rows = []
    if not rows or not all(map(is_difference, rows)):
        fail(f"{path}: not the lines of compare.py --json")
    return rows


def told(values, unit=""):
    return f"{sum(values) / len(values):+.5f}{unit} ({min(values):+.5f} to {max(values):+.5f})"


def main():
    parser = ScriptParser(__doc__)
    parser.add_argument("differences", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--held-out", action="store_true", help="add differences of the runs' held_out.json")
    options = parser.parse_args()
    rows = read_differences(options.differences)
    if options.held_out:
        add_held_out(rows, options.out)
    (options.out / "fork_gap.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    of_recipes = {}
    for row in rows:
        of_recipes.setdefault(row["run"].rpartition(".")[0], []).append(row)
    for name, of_seeds in of_recipes.items():
        line = f"{name}: {told([row['nats'] for row in of_seeds], ' nats per token')}"
        if options.held_out:
            line += "; held out: " + ", ".join(f"{each} {told([row['held_out'][each] for row in of_seeds])}" for each in of_seeds[0]["held_out"])
        print(line)


if __name__ == "__main__":
    run_main(main)
