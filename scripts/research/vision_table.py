#!/usr/bin/env python3
"""The table, the figures and the picture of vision.sh beside this, which starts it.

    tiny_llava.RECIPE.captions.nats             loss of held-out captions after the first stage, nats per byte
    tiny_llava.RECIPE.captions.vs_bf16.nats     the same minus that of the first recipe, same seed
    tiny_llava.RECIPE.answers.percent           held-out questions answered right after the second stage
    tiny_llava.RECIPE.answers.vs_bf16.points    the same minus that of the first recipe
    tiny_llava.most_frequent.percent            right if each question got its most frequent answer

Each is the mean over the seeds, with the least and the most.
"""
import json
import statistics
from pathlib import Path

from measured_runs import ScriptParser, fail, report_file, run_main

SHOWN = 24


def caption_loss(folder, run):
    lines = (folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    losses = {record["step"]: record["loss"] for record in map(json.loads, lines) if record["kind"] == "eval"}
    if len(losses) < 2:
        fail(f"{folder / run}/metrics.jsonl: not evaluated before and after; train it to its end")
    return losses[max(losses)]


def figures_of(folder, recipes, seeds, scores):
    """{name: [value of each seed]}"""
    losses = {recipe: [caption_loss(folder, f"{recipe}.{seed}.captions") for seed in seeds] for recipe in recipes}
    percent = {recipe: [100 * scores[recipe, seed]["accuracy"] for seed in seeds] for recipe in recipes}
    values, base = {}, recipes[0]
    for recipe in recipes:
        for what, unit, of_recipe, gap_unit in (("captions", "nats", losses, "nats"), ("answers", "percent", percent, "points")):
            name = f"tiny_llava.{recipe}.{what}"
            values[f"{name}.{unit}"] = of_recipe[recipe]
            if recipe != base:
                values[f"{name}.vs_{base}.{gap_unit}"] = [mine - of_base for mine, of_base in zip(of_recipe[recipe], of_recipe[base])]
    values["tiny_llava.most_frequent.percent"] = [100 * scores[base, seeds[0]]["most_frequent"]]
    return values


def cell(values, form, end=""):
    return f"{statistics.mean(values):{form}}{end} ({min(values):{form}} to {max(values):{form}})"


def print_table(recipes, values):
    base = recipes[0]
    print(f"| | held-out captions, nats per byte | less `{base}` | right answers | less `{base}`, points | figures |")
    print("|---|---|---|---|---|---|")
    for recipe in recipes:
        names = {"captions.nats": ".5f", f"captions.vs_{base}.nats": "+.5f", "answers.percent": ".2f", f"answers.vs_{base}.points": "+.2f"}
        known = {name: values.get(f"tiny_llava.{recipe}.{name}") for name in names}
        cells = [cell(known[name], form, " %" if name == "answers.percent" else "") if known[name] else "" for name, form in names.items()]
        print(f"| `{recipe}` |", " | ".join(cells), f"| `tiny_llava.{recipe}.{{{','.join(name for name in names if known[name])}}}` |")
    print(f"| the most frequent answers | | | {values['tiny_llava.most_frequent.percent'][0]:.2f} % | | `tiny_llava.most_frequent.percent` |")


def draw(folder, questions, path):
    """Pictures with what was asked and said; answers that are wrong are red."""
    try:
        import matplotlib
        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError as error:
        fail(f"{error.name} is missing; run vision.sh with PYTHON=.venv/bin/python, which scripts/setup.sh makes, or install matplotlib")
    figure, axes = pyplot.subplots(3, SHOWN // 3, figsize=(12, 5.6), constrained_layout=True)
    for axis in axes.flat:
        axis.axis("off")
    for axis, question in zip(axes.flat, questions):
        axis.imshow(pyplot.imread(folder / "pictures" / question["image"]))
        right = question["said"] == question["answer"]
        axis.set_title(f"{question['question']}\n{question['said']}", fontsize=9, color="black" if right else "red")
    figure.savefig(path, dpi=80)


def read_arguments():
    parser = ScriptParser(__doc__)
    parser.add_argument("folder", type=Path, metavar="OUT")
    parser.add_argument("--seeds", nargs="+", required=True)
    parser.add_argument("--recipes", nargs="+", required=True)
    parser.add_argument("--json", type=report_file, required=True, metavar="FILE", help="for the figures")
    return parser.parse_args()


def main():
    arguments = read_arguments()
    scores = {(recipe, seed): json.loads((arguments.folder / f"{recipe}.{seed}.json").read_text(encoding="utf-8"))
              for recipe in arguments.recipes for seed in arguments.seeds}
    values = figures_of(arguments.folder, arguments.recipes, arguments.seeds, scores)
    print_table(arguments.recipes, values)
    report = {"figures": {name: statistics.mean(of_seeds) for name, of_seeds in values.items()}, "seeds": values}
    arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    draw(arguments.folder, scores[arguments.recipes[0], arguments.seeds[0]]["questions"][:SHOWN], arguments.folder / "vision.png")


if __name__ == "__main__":
    run_main(main)
