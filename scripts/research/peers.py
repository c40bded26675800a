#!/usr/bin/env python3
"""Draws speed and memory of a 7B model on one GPU beside other programs, and prints the table of docs/results/peers.md.

    scripts/research/peers.py --out docs/results/peers.png

Parka's bars are of docs/results/figures.jsonl, those of others of docs/results/peers.jsonl: each line there has a source, a
card and a date.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import json
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import save_picture  # noqa: E402

RESULTS = os.path.join(os.path.dirname(__file__), "..", "..", "docs", "results")
# The runs of Parka: label, name of the figures, sequences x micro-batches.
OWN = (("Parka, FP8 (`parka`)", "step.llama2-7b.parka.1gpu", "4 x 8"),
       ("Parka, FP8 (`coat`)", "step.llama2-7b.coat.1gpu", "4 x 8"),
       ("Parka, bf16", "step.llama2-7b.bf16.1gpu", "4 x 8"))


def read_lines(name):
    with open(os.path.join(RESULTS, name), encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def bars():
    """Parka's runs, then those of others, each with the keys of peers.jsonl."""
    figures = {figure["name"]: figure for figure in read_lines("figures.jsonl")}
    own = []
    for label, name, batch in OWN:
        speed, memory = figures[f"{name}.tok_s_gpu"], figures[f"{name}.peak_gb"]
        own.append({"name": label, "model": "Llama-2-7B", "batch": batch, "tok_s": speed["value"],
                    "memory_gb": memory["value"], "card": speed["card"], "date": speed["date"],
                    "commit": speed["commit"], "source": "figures.jsonl", "how": f"`{name}`", "parka_tok_s": None})
    return own + read_lines("peers.jsonl")


def table(rows):
    """The lines of a Markdown table."""
    yield "| program | model | batch | tokens/s | in use | `parka` beside it | card | date | source |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for row in rows:
        source = f"[{row['source'].split('://')[-1]}]({row['source']})"
        commit = f" {row['commit']}" if row["commit"] else ""
        beside = f"{row['parka_tok_s']:,} in {row['parka_memory_gb']} GB" if row["parka_tok_s"] else ""
        yield (f"| {row['name']} | {row['model']} | {row['batch']} | {row['tok_s']:,.0f} | {row['memory_gb']:.1f} GB "
               f"| {beside} | {row['card']} | {row['date']} | {source}{commit}; {row['how']} |")


def draw(plt, rows):
    figure, panels = plt.subplots(1, 2, figsize=(11, 0.42 * len(rows) + 1.3), sharey=True)
    places = range(len(rows), 0, -1)
    colors = ["#2a6f97" if row["name"].startswith("Parka") else "#b0b7bd" for row in rows]
    for panel, key, title, form in ((panels[0], "tok_s", "tokens/s on one GPU", "{:,.0f}"),
                                    (panels[1], "memory_gb", "GB in use", "{:.0f}")):
        values = [row[key] for row in rows]
        panel.barh(places, values, color=colors, height=0.72)
        for place, value in zip(places, values):
            panel.text(value, place, " " + form.format(value), va="center", fontsize=9)
        panel.set_title(title, loc="left", fontsize=11)
        panel.set_xlim(0, 1.15 * max(values))
        panel.set_xticks([])
        panel.tick_params(axis="y", length=0)
        for side in ("top", "right", "bottom"):
            panel.spines[side].set_visible(False)
    labels = [f"{row['name'].replace('`', '')}\n{row['model']}, {row['batch']}, {row['card'].removeprefix('NVIDIA ')}, "
              f"{row['date']}" for row in rows]
    panels[0].set_yticks(list(places), labels, fontsize=8)
    figure.tight_layout()
    return figure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="picture to write; its name ends in .png, .svg, .pdf or another format of matplotlib")
    options = parser.parse_args()
    rows = bars()
    print("\n".join(table(rows)))
    save_picture(lambda plt: draw(plt, rows), options.out)


if __name__ == "__main__":
    main()
