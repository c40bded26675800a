#!/usr/bin/env python3
"""scripts/research/vision.sh with few pictures and steps: what it draws, the answers that it scores, and its table. Exits with 77
(skipped) where a package is missing."""
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "commands"))
from parka_runs import PROGRAM, metrics  # noqa: E402

for package in ("numpy", "PIL", "xxhash", "transformers", "jinja2", "matplotlib"):
    if importlib.util.find_spec(package) is None:
        print(f"skipped: {package} is missing")
        sys.exit(77)

import numpy as np  # noqa: E402
from PIL import Image  # noqa: E402

FOLDER = ROOT / "scripts" / "research"
HELD_OUT, LENGTH, PADDING = 12, 80, 256
SMALL = {"PICTURES": "80", "HELD_OUT": str(HELD_OUT), "STEPS1": "10", "STEPS2": "4", "SEEDS": "1 2", "THREADS": "1"}


class Vision(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.out = f"{temporary.name}/out"

    def load(self, name):
        with open(f"{self.out}/{name}", encoding="utf-8") as file:
            return json.load(file)

    def script(self):
        environment = {**os.environ, **SMALL, "PARKA": os.path.abspath(PROGRAM), "PYTHON": sys.executable}
        result = subprocess.run([FOLDER / "vision.sh", self.out, "bf16", "parka"], capture_output=True, text=True, timeout=600,
                                env=environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_runs_and_their_table(self):
        table = self.script()
        figures = self.load("vision.json")["figures"]
        for recipe in ("bf16", "parka"):
            # Both stages learn, and the second begins with the weights of the first: captions still have a low loss.
            for seed in (1, 2):
                for stage in ("captions", "answers"):
                    losses = [record["loss"] for record in metrics(f"{self.out}/{recipe}.{seed}.{stage}", "eval")]
                    self.assertLess(losses[-1], losses[0])
            losses = [metrics(f"{self.out}/{recipe}.{seed}.captions", "eval")[-1]["loss"] for seed in (1, 2)]
            self.assertEqual(figures[f"tiny_llava.{recipe}.captions.nats"], statistics.mean(losses))
            self.assertIn(f"| `{recipe}` | {statistics.mean(losses):.5f} (", table)
        gaps = [metrics(f"{self.out}/parka.{seed}.captions", "eval")[-1]["loss"]
                - metrics(f"{self.out}/bf16.{seed}.captions", "eval")[-1]["loss"] for seed in (1, 2)]
        self.assertEqual(figures["tiny_llava.parka.captions.vs_bf16.nats"], statistics.mean(gaps))
        self.check_choices()
        self.check_scores(figures)
        self.assertGreater(os.path.getsize(f"{self.out}/vision.png"), 10000)
        self.assertEqual(self.script(), table)
        self.assertEqual(len(metrics(f"{self.out}/bf16.1.captions")), 10)

    def check_choices(self):
        """The right answers are the sequences that scripts/prepare_images.py makes of the questions."""
        stored = np.fromfile(f"{self.out}/tokens/questions.held_out/train-00000.npy", "<u2").tobytes()
        for number, question in enumerate(self.load("choices/questions.json")):
            path = f"{self.out}/choices/{number}.{question['choices'].index(question['answer'])}.npy"
            ids, marks = np.fromfile(path, "<u2"), np.fromfile(f"{path}.mask", np.uint8)
            self.assertEqual((len(ids), len(marks)), (LENGTH, LENGTH))
            self.assertIn(ids[ids != PADDING].tobytes(), stored)
            self.assertEqual(bytes(ids[marks == 1].astype(np.uint8)), f" {question['answer']}</s>".encode())
        right = subprocess.run([PROGRAM, "data", f"{self.out}/choices/0.0.npy", f"{self.out}/choices/1.1.npy"],
                               capture_output=True, text=True)
        self.assertEqual(right.returncode, 0, right.stderr)  # their pixels are read too

    def check_scores(self, figures):
        report = self.load("parka.2.json")
        said = [question["said"] == question["answer"] for question in report["questions"]]
        self.assertEqual(len(said), HELD_OUT)
        self.assertEqual(report["accuracy"], statistics.mean(said))
        percent = [100 * self.load(f"parka.{seed}.json")["accuracy"] for seed in (1, 2)]
        self.assertAlmostEqual(figures["tiny_llava.parka.answers.percent"], statistics.mean(percent))
        # The choice is that with the lowest loss, summed over its tokens.
        question, path = report["questions"][0], f"{self.out}/choices/0.{{}}.npy"
        sets = [f"{answer.replace(' ', '_')}={path.format(i)}" for i, answer in enumerate(question["choices"])]
        keys = (f"data.sequence_length={LENGTH}", "data.images_per_sequence=1", "training.micro_batch_size=1", "training.global_batch_size=1")
        shown = subprocess.run([PROGRAM, "eval", f"{self.out}/parka.2.answers", "--json", *(f"--{key}" for key in keys), "--sets", *sets],
                               capture_output=True, text=True)
        self.assertEqual(shown.returncode, 0, shown.stderr)
        totals = [result["loss"] * result["num_targets"] for result in json.loads(shown.stdout)["sets"].values()]
        self.assertEqual(question["choices"][totals.index(min(totals))], question["said"])

    def test_a_program_in_the_folder_that_it_is_called_from(self):
        os.makedirs(f"{self.out}/choices")
        asked = {"image": "0.png", "question": "How many?", "answer": "two", "choices": ["one", "two"]}
        Path(self.out, "choices/questions.json").write_text(json.dumps([asked]))
        losses = {"0.0": {"loss": 2.0, "num_targets": 4}, "0.1": {"loss": 1.0, "num_targets": 4}}
        Path(self.out, "parka").write_text(f"#!/bin/sh\necho '{json.dumps({'sets': losses})}'\n")
        os.chmod(f"{self.out}/parka", 0o755)
        command = [sys.executable, FOLDER / "answer_choices.py", "score", "./parka", "run", "choices", "--json", "out.json"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=self.out)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.load("out.json")["accuracy"], 1)

    def test_pictures_follow_from_the_seed(self):
        def drawn(folder, *options):
            subprocess.run([sys.executable, FOLDER / "draw_pictures.py", f"{self.out}/{folder}", "--pictures", "30", "--held-out", "5",
                            *options], check=True)
            pixels = [Image.open(path).tobytes() for path in sorted(Path(self.out, folder, "pictures").rglob("*.png"))]
            self.assertEqual(len(pixels), 35)
            return pixels, self.load(f"{folder}/questions.train.json"), self.load(f"{folder}/captions.held_out.json")

        first = drawn("a")
        self.assertEqual(drawn("b"), first)
        self.assertNotEqual(drawn("c", "--seed", "2"), first)
        self.assertEqual(len(first[1]), 60)
        self.assertNotIn(first[0][0], first[0][1:])


if __name__ == "__main__":
    unittest.main()
