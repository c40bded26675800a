#!/usr/bin/env python3
"""Scores of runs in multiple-choice tasks side by side, with standard errors.

    parka eval RUN --tasks lines.requests.jsonl --predictions RUN.predictions.jsonl      of each run
    parka scores bf16.1=bf16.1.predictions.jsonl parka.1=parka.1.predictions.jsonl

All runs have answered the same documents. A run answers with the choice of the largest log-likelihood, the first of equal ones
(the metric `acc` of docs/evaluation.md). With n documents and a share p of right answers

    standard error      sqrt(p (1 - p) / (n - 1))
    of a difference     that of the mean over the documents of (right in this run) - (right in the first run)

The second is smaller, since runs mostly err in the same documents. Both are about other documents, not about other seeds.
Prints a table, or with --json lines of figures: tasks.MODEL.RUN.TASK.acc, and .vs_FIRST of differences, with `interval`, one
standard error to either side.

Exit codes: 0 done, 2 something is wrong with the input or the options.
"""
import argparse
import json
from pathlib import Path

from python_packages import HelpFormatter, command_name, require

require("numpy")
import numpy as np  # noqa: E402

from compare import print_rows  # noqa: E402
from run_metrics import fail, run_main  # noqa: E402


def read_answers(path):
    """{task: {document: whether it is answered right}}"""
    answers = {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        fail(f"{path}: cannot be read ({error}); give a file that parka eval --predictions has written")
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
            right = int(np.argmax(record["log_likelihood"])) == record["label"]
            answers.setdefault(record["task"], {})[record["document"]] = right
        except (ValueError, TypeError, KeyError):
            fail(f"{path}:{number}: is no prediction; give a file that parka eval --predictions has written")
    return answers


def mean_and_error(values):
    """Standard error of the mean, 0 of a single value."""
    return values.mean(), values.std(ddof=1) / np.sqrt(len(values)) if len(values) > 1 else 0.0


def figure(name, mean, error):
    return {"name": name, "value": mean, "unit": "1", "interval": [mean - error, mean + error]}


def main():
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("run", nargs="+", help="RUN=FILE, a file that parka eval --predictions has written")
    parser.add_argument("--model", metavar="NAME", help="in the names of figures; --json needs it")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    options = parser.parse_args()
    if options.json and not options.model:
        fail("--json: the names of figures have the model's; give it with --model")
    runs = {}
    for argument in options.run:
        name, separator, path = argument.partition("=")
        if not separator or not name or name in runs:
            fail(f"{argument}: expected RUN=FILE, each RUN once")
        runs[name] = read_answers(path)
    first = next(iter(runs))
    rows, figures = [["task", "run", "documents", "right", "standard error", f"less {first}", "standard error"]], []
    for task, of_first in runs[first].items():
        for name, answers in runs.items():
            if set(answers.get(task, {})) != set(of_first):
                fail(f"{name}: has answered other documents of {task} than {first}; evaluate all runs on the same file")
            right = np.array([answers[task][document] for document in of_first], float)
            mean, error = mean_and_error(right)
            prefix = f"tasks.{options.model}.{name}.{task}"
            figures.append(figure(f"{prefix}.acc", mean, error))
            row = [task, name, f"{len(right):,}", f"{mean:.2%}", f"{error:.2%}", "", ""]
            if name != first:
                difference, of_difference = mean_and_error(right - np.array(list(of_first.values()), float))
                figures.append(figure(f"{prefix}.vs_{first}", difference, of_difference))
                row[5:] = [f"{difference:+.2%}", f"{of_difference:.2%}"]
            rows.append(row)
    if options.json:
        for each in figures:
            print(json.dumps(each))
    else:
        print_rows(rows)


if __name__ == "__main__":
    run_main(main)
