#!/usr/bin/env python3
"""Prints README.md's table of what fits on GPUs of 24, 48, 80 and 141 GB, as `parka plan` says it.

    scripts/research/fits_table.py [--parka build/release/parka]

Exit codes: 0 done, 2 a plan cannot be made.
"""
import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import fail  # noqa: E402

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
MEMORY = (24, 48, 80, 141)
MODELS = (("Qwen3-0.6B", "qwen3-0.6b"), ("OLMo-1B", "olmo-1b"), ("Llama-3.2-1B", "llama3.2-1b"),
          ("Llama-2-7B", "llama2-7b"), ("Mistral-7B", "mistral-7b"), ("Llama-3-8B", "llama3-8b"), ("Qwen3-8B", "qwen3-8b"), ("Llama-2-13B", "llama2-13b"), ("a Llama of 32B", "llama-30b"))


def plan(parka, config, gigabytes):
    command = [parka, "plan", f"configs/{config}.json", "--json", "--memory-limit", str(gigabytes), "--set", "precision.recipe=parka"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if result.returncode != 0 and result.stderr.strip():
            fail(result.stderr.strip())
        return json.loads(result.stdout)
    except OSError as error:
        fail(f"{parka}: cannot be run ({error.strerror}); build it, or name the program with --parka")
    except ValueError:  # no text, or no JSON
        fail(f"{parka}: prints no plan; build parka, or name the program with --parka")


def cell(plan):
    """What it takes to fit: nothing, changes of the config, or more GPUs."""
    if plan["fits"]:
        return "yes"
    if "fits_with" in plan:
        changes = len(plan["fits_with"]["changes"])
        return f"{changes} change{'s' if changes > 1 else ''}"
    return f"{plan['fits_on']['gpus']} GPUs" if "fits_on" in plan else "no"


def table(parka):
    yield "| model | context | " + " | ".join(f"{gigabytes} GB" for gigabytes in MEMORY) + " |"
    yield "|---|---|" + "---|" * len(MEMORY)
    for name, config in MODELS:
        with open(os.path.join(ROOT, f"configs/{config}.json"), encoding="utf-8") as file:
            context = next(line.split(":")[1].strip(" ,\n") for line in file if "sequence_length" in line)
        yield f"| {name} | {context} | " + " | ".join(cell(plan(parka, config, gigabytes)) for gigabytes in MEMORY) + " |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parka", default=os.path.join(ROOT, "build/release/parka"), metavar="PROGRAM")
    for line in table(os.path.abspath(parser.parse_args().parka)):
        print(line)


if __name__ == "__main__":
    main()
