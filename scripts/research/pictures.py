#!/usr/bin/env python3
"""Draws the pictures of docs/results from figures.

    scripts/research/pictures.py peers --out docs/results/peers.png     a 7B model beside other programs, from peers.jsonl
    scripts/research/pictures.py loss --out docs/results/loss.png       what FP8 costs in loss, from figures.jsonl

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import save_picture  # noqa: E402

RESULTS = Path(__file__).resolve().parents[2] / "docs/results"
OWN, OTHER = "#2a6f97", "#b0b7bd"
# The models and runs of loss.png: loss_gap.MODEL.linux.RUN are their figures.
MODELS = (("110M parameters, text read once", "olmo-150m"), ("342M, text read 1.2 times", "olmo-350m"), ("OLMo-1B, text read once", "olmo-1b"))
RUNS = (("coat", "#e07b39"), ("parka", OWN), ("bf16_again", "#7d868c"))


def read_lines(name):
    with open(RESULTS / name, encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def pairs(model="Llama-2-7B", card="NVIDIA H200"):
    """One model on one card: each line is another program and Parka in one call with one batch."""
    return [line for line in read_lines("peers.jsonl") if line["model"] == model and line["card"] == card]


def draw_peers(plt):
    rows = pairs()
    figure, panels = plt.subplots(1, 2, figsize=(9, 0.9 * len(rows) + 1.4), sharey=True)
    for panel, key, title, form in ((panels[0], "tok_s", "tokens/s", "{:,.0f}"), (panels[1], "memory_gb", "memory in use, GB", "{:.0f}")):
        for i, row in enumerate(rows):
            for place, value, color in ((-i + 0.19, row[key], OTHER), (-i - 0.19, row["parka_" + key], OWN)):
                panel.barh(place, value, color=color, height=0.34)
                ratio = f"  ({row['parka_' + key] / row[key]:.2f} x)" if color == OWN else ""
                panel.text(value, place, " " + form.format(value) + ratio, va="center", fontsize=9)
        panel.set_xlabel(title)
        panel.set_xlim(0, 1.35 * max(max(row[key], row["parka_" + key]) for row in rows))
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks([-i for i in range(len(rows))], [f"{row['name']}\n{row['batch']} sequences, {row['date']}" for row in rows], fontsize=9)
    model, card = rows[0]["model"], rows[0]["card"].removeprefix("NVIDIA ")
    figure.suptitle(f"{model} on one {card}: another program (grey) and Parka (blue) in the same call", fontsize=10, x=0.01, ha="left")
    figure.tight_layout()
    return figure


def draw_loss(plt):
    figures = {line["name"]: line for line in read_lines("figures.jsonl")}
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.6), sharey=True, sharex=True)
    places, labels = [], []
    for panel, key, title in ((panels[0], "nats_per_token", "training, last twentieth of the steps"), (panels[1], "held_out.same", "held-out text")):
        place = 0
        for model_label, model in MODELS:
            if panel is panels[0]:
                places.append(place)
                labels.append(model_label)
            place -= 1
            for run, color in RUNS:
                name = f"loss_gap.{model}.linux.{run}.{key}"
                held_out = [f"held_out.{model}.linux.{each}.nats_per_token" for each in (run, "bf16")]
                if name in figures:
                    value, spread = figures[name]["value"], figures[name]["spread"]
                elif key == "held_out.same" and all(each in figures for each in held_out):  # of one seed
                    value = figures[held_out[0]]["value"] - figures[held_out[1]]["value"]
                    spread = (value, value)
                else:
                    continue
                panel.plot(spread, (place, place), color=color, linewidth=2)
                panel.plot([value], [place], "o", color=color)
                if panel is panels[0]:
                    places.append(place)
                    labels.append("bf16 again" if run == "bf16_again" else run)
                place -= 1
            place -= 0.4
        panel.axvline(0, color="#444444", linewidth=0.8)
        panel.set_title(title, fontsize=10)
        panel.set_xlabel("nats per token above bf16")
        panel.tick_params(axis="y", length=0)
        panel.set_xticks([-0.008, -0.004, 0, 0.004, 0.008])
        panel.grid(axis="x", linewidth=0.3)
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    panels[0].set_yticks(places, labels, fontsize=9)
    for label in panels[0].get_yticklabels():
        if label.get_text() in dict(MODELS):
            label.set_fontweight("bold")
    figure.tight_layout()
    return figure


def shrink(path):
    """Few colours make a PNG a third as large."""
    if path.lower().endswith(".png"):
        from PIL import Image  # comes with matplotlib
        with Image.open(path) as picture:
            small = picture.convert("RGB").quantize(32, dither=Image.Dither.NONE)
        small.save(path, optimize=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    pictures = {"peers": draw_peers, "loss": draw_loss}
    parser.add_argument("picture", choices=pictures)
    parser.add_argument("--out", required=True, help="its name ends in .png, .svg, .pdf or another format of matplotlib")
    options = parser.parse_args()
    save_picture(pictures[options.picture], options.out)
    shrink(options.out)


if __name__ == "__main__":
    main()
