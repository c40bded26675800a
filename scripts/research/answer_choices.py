#!/usr/bin/env python3
"""How often a model that sees pictures chooses the right answer, for vision.sh beside this.

    scripts/research/answer_choices.py make DRAWN TOKENS OUT     DRAWN: of draw_pictures.py, TOKENS: its held-out questions' files
    scripts/research/answer_choices.py score PARKA RUN OUT --json FILE

`make` writes each held-out question with each possible answer as a token file of one sequence. `score` evaluates a run on all
of them with `parka eval`; the answer with the largest log-likelihood, its sum over the answer's tokens, is the model's. Prints
the share of right ones by question, beside that of the most frequent answer, and writes it with every answer.
"""
import argparse
import json
import subprocess
import sys
from pathlib import Path

from measured_runs import ScriptParser, error_line, fail, report_file, run_main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("numpy", "xxhash")
import numpy as np  # noqa: E402
from image_data.files import HEADER_BYTES, REFERENCE, write_references  # noqa: E402
from text_data.chat import MARK_DOCUMENT_START, MARK_TARGET  # noqa: E402

LENGTH = 80  # tokens of a sequence
SETS_AT_A_TIME = 400


def load(path):
    return json.loads(Path(path).read_text(encoding="utf-8"))


def sequence_of(question, answer, info):
    """(ids, marks) of the template vicuna_v1 in bytes, with the image before the question."""
    images = info["images"]
    begin = np.frombuffer(b"<s>USER: ", np.uint8)
    end = np.frombuffer(f"\n{question} ASSISTANT: {answer}</s>".encode(), np.uint8)
    targets = len(f" {answer}</s>")
    ids = np.concatenate([begin, np.full(images["slots"], images["token"]), end])
    marks = np.zeros(LENGTH, np.uint8)
    marks[len(ids) - targets:len(ids)] = MARK_TARGET
    marks[0] = MARK_DOCUMENT_START
    return np.concatenate([ids, np.full(LENGTH - len(ids), info["eos"])]).astype("<u2"), marks, len(begin)


def make(arguments):
    samples, choices = load(arguments.drawn / "questions.held_out.json"), load(arguments.drawn / "choices.json")
    info, out = load(arguments.tokens / "data.json"), arguments.out
    out.mkdir(parents=True, exist_ok=True)
    (name,) = info["images"]["files"]
    (out / name).write_bytes((arguments.tokens / name).read_bytes())
    references = np.fromfile(arguments.tokens / "train-00000.npy.images", np.uint8)
    references = {int(r["image"]): r for r in references[HEADER_BYTES:-8].view(REFERENCE)}
    questions = []
    for number, sample in enumerate(samples):
        asked, right = (turn["value"].removeprefix("<image>\n") for turn in sample["conversations"])
        for choice, answer in enumerate(choices[asked]):
            ids, marks, first = sequence_of(asked, answer, info)
            path = out / f"{number}.{choice}.npy"
            ids.tofile(path)
            marks.tofile(f"{path}.mask")
            reference = np.array([references[number]], REFERENCE)  # pictures are numbered as they come
            reference["first_token"], reference["slots"] = first, info["images"]["slots"]
            images = info["images"]
            write_references(Path(f"{path}.images"), reference, images["token"], images["slots"], images["size"])
        questions.append({"image": sample["image"], "question": asked, "answer": right, "choices": choices[asked]})
    (out / "questions.json").write_text(json.dumps(questions, indent=1) + "\n", encoding="utf-8")


def log_likelihoods(parka, run, out, names):
    """Of each of these token files: the sum over its targets."""
    found = {}
    for first in range(0, len(names), SETS_AT_A_TIME):
        sets = [f"{name}={out / name}.npy" for name in names[first:first + SETS_AT_A_TIME]]
        keys = {"data.sequence_length": LENGTH, "data.images_per_sequence": 1, "training.micro_batch_size": 1,
                "training.global_batch_size": 1}
        options = [word for key in keys.items() for word in ("--set", "{}={}".format(*key))]
        # A Path has lost the "./" of a name without folders, which would then be looked up in PATH.
        command = [parka.absolute(), "eval", run, "--json", *options, "--sets", *sets]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        if ended.returncode != 0:
            fail(f"{run}: {error_line(ended.stderr)}")
        found |= {name: -result["loss"] * result["num_targets"] for name, result in json.loads(ended.stdout)["sets"].items()}
    return found


def score(arguments):
    questions = load(arguments.out / "questions.json")
    names = [[f"{number}.{choice}" for choice in range(len(question["choices"]))] for number, question in enumerate(questions)]
    found = log_likelihoods(arguments.parka, arguments.run, arguments.out, [name for of_question in names for name in of_question])
    kinds = {}
    for question, of_question in zip(questions, names):
        values = [found[name] for name in of_question]
        question["said"] = question["choices"][values.index(max(values))]
        kinds.setdefault(question["question"], []).append(question)
    report = {"accuracy": accuracy(questions), "of_kinds": {kind: accuracy(asked) for kind, asked in kinds.items()},
              "most_frequent": sum(frequent(asked) for asked in kinds.values()) / len(questions), "questions": questions}
    for kind, asked in kinds.items():
        print(f"{kind:14} {accuracy(asked):.3f} of {len(asked)}; the most frequent answer: {frequent(asked) / len(asked):.3f}")
    print(f"{'all':14} {report['accuracy']:.3f} of {len(questions)}; the most frequent answers: {report['most_frequent']:.3f}")
    arguments.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def accuracy(questions):
    return sum(question["said"] == question["answer"] for question in questions) / len(questions)


def frequent(questions):
    answers = [question["answer"] for question in questions]
    return max(map(answers.count, answers))


def main():
    parser = ScriptParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True, parser_class=argparse.ArgumentParser)
    making = commands.add_parser("make")
    for name in ("drawn", "tokens", "out"):
        making.add_argument(name, type=Path)
    scoring = commands.add_parser("score")
    for name in ("parka", "run", "out"):
        scoring.add_argument(name, type=Path)
    scoring.add_argument("--json", type=report_file, required=True)
    arguments = parser.parse_args()
    {"make": make, "score": score}[arguments.command](arguments)


if __name__ == "__main__":
    run_main(main)
