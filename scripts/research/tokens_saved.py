#!/usr/bin/env python3
"""How many tokens Muon needs for the loss that AdamW reaches, of the runs of tokens_saved.sh.

    scripts/research/tokens_saved.py OUT --model olmo-150m --tokens 300000000

Runs are the folders KIND_LR.SEED in OUT, of kinds adamw, muon, muon_fp8 and muon_shareX, which was trained on the share X of the
tokens. A run's loss is that of its last evaluation. Muon's tokens to AdamW's loss come from its losses at all shares of one seed,
linear in the logarithm of the tokens; beyond them the nearest two are extended. --best KIND prints the rate with the lowest loss;
--json prints figures: muon.MODEL.tokens_saved, the ratio of tokens by seed, and muon.MODEL.fp8_gap, in nats per token.

Exit codes: 0 done, 2 something is wrong with the runs or the options, 4 writing failed.
"""
import argparse
import json
import math
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import fail, metrics_path, read_records, run_main  # noqa: E402

NAME = re.compile(r"(?P<kind>adamw|muon|muon_fp8|muon_share(?P<share>[0-9.]+))_(?P<lr>[0-9.e-]+)\.(?P<seed>\d+)")


def last_loss(folder):
    path = metrics_path(str(folder))
    losses = [record["loss"] for record in read_records(path) if record.get("kind") == "eval" and record.get("loss") is not None]
    if not losses:
        fail(f"{path}: has no evaluation; let tokens_saved.sh train it to the end")
    return losses[-1]


def read_runs(out):
    """{kind: {(lr, seed): loss}}; shares have their number as kind."""
    runs = {}
    for folder in sorted(Path(out).iterdir()):
        name = NAME.fullmatch(folder.name)
        if name and folder.is_dir():
            kind = float(name["share"]) if name["share"] else name["kind"]
            runs.setdefault(kind, {})[name["lr"], int(name["seed"])] = last_loss(folder)
    return runs


def best_rate(runs, kind):
    if not runs.get(kind):
        fail(f"there is no run of {kind}; let tokens_saved.sh train it")
    first = min(seed for _, seed in runs[kind])
    return min((loss, lr) for (lr, seed), loss in runs[kind].items() if seed == first)[1]


def share_for(loss, curve):
    """The share of the tokens at which a curve {share: loss} has the loss."""
    if len(curve) < 2:
        fail("there is a loss of one share alone; two are needed")
    points = sorted((math.log(share), of_share) for share, of_share in curve.items())
    pairs = list(zip(points, points[1:]))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if pair[0][1] >= loss >= pair[1][1]),
                              pairs[0] if loss > points[0][1] else pairs[-1])
    if y1 >= y0:
        fail("the loss does not fall with the share; train longer")
    return math.exp(x0 + (x1 - x0) * (y0 - loss) / (y0 - y1))


def figures_of(model, tokens, runs):
    adamw, muon = best_rate(runs, "adamw"), best_rate(runs, "muon")
    seeds = sorted(seed for lr, seed in runs["muon"] if lr == muon and (adamw, seed) in runs["adamw"])
    first = seeds[0]
    curve = {share: of_share[muon, first] for share, of_share in runs.items() if isinstance(share, float)}
    at_all = {seed: runs["muon"][muon, seed] for seed in seeds}
    saved = []
    for seed in seeds:  # other seeds' curves are the first one's, moved to their own loss
        moved = {share: loss + at_all[seed] - at_all[first] for share, loss in {**curve, 1.0: at_all[first]}.items()}
        saved.append(1 / share_for(runs["adamw"][adamw, seed], moved))
    figures = [(f"muon.{model}.tokens_saved", saved, "1")]
    for kind, rate in (("adamw", adamw), ("muon", muon)):
        figures.append((f"muon.{model}.{kind}.held_out", [runs[kind][rate, seed] for seed in seeds], "nats/token"))
    gaps = [loss - at_all[seed] for (lr, seed), loss in runs.get("muon_fp8", {}).items() if lr == muon and seed in at_all]
    if gaps:
        figures.append((f"muon.{model}.fp8_gap", gaps, "nats/token"))
    return adamw, muon, figures


def print_figures(figures, as_json):
    """(name, values by seed, unit) each, in the form of docs/results/figures.jsonl or as a table."""
    for name, values, unit in figures:
        mean = sum(values) / len(values)
        if as_json:
            print(json.dumps({"name": name, "value": round(mean, 6), "unit": unit,
                              "spread": [round(min(values), 6), round(max(values), 6)]}))
        else:
            print(f"{name:<40} {mean:.4f} ({min(values):.4f} to {max(values):.4f}) {unit}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", metavar="OUT", help="the folder of tokens_saved.sh")
    parser.add_argument("--model", required=True, help="its name in figures")
    parser.add_argument("--tokens", type=int, required=True, help="that each run was trained on")
    parser.add_argument("--best", metavar="KIND", choices=("adamw", "muon"), help="print the best learning rate alone")
    parser.add_argument("--json", action="store_true", help="print figures, one a line")
    arguments = parser.parse_args()
    runs = read_runs(arguments.out)
    if arguments.best:
        print(best_rate(runs, arguments.best))
        return
    adamw, muon, figures = figures_of(arguments.model, arguments.tokens, runs)
    if not arguments.json:
        print(f"{arguments.tokens} tokens; best learning rates: adamw {adamw}, muon {muon}")
    print_figures(figures, arguments.json)


if __name__ == "__main__":
    run_main(main)
