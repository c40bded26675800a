"""evaluation.prompts: what a run writes at its evaluations."""
import json
import os
import subprocess
import unittest

from parka_runs import PROGRAM
from test_new_config import TINY, Folder

PROMPTS = ["Text", "4"]


class Prompts(Folder):
    def setUp(self):
        super().setUp()
        self.prepared()
        self.config = {"model": TINY | {"vocab_size": 272}, "data": {"sequence_length": 32}, "device": {"kind": "cpu"},
                       "training": {"steps": 12, "global_batch_size": 4, "micro_batch_size": 2, "eval_interval": 6, "eval_sequences": 4}, "evaluation": {"prompts": PROMPTS}}
        self.write("a.json", self.config)

    def train(self, run, *arguments):
        self.parka("train", "a.json", "--data", "data", "--set", f"checkpoint.folder={run}", *arguments)
        return [json.loads(line) for line in (self.folder / run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]

    def samples(self, records):
        return {(record["step"], record["prompt"]): record["text"] for record in records if record["kind"] == "sample"}

    def test_every_evaluation_goes_on_with_them(self):
        records = self.train("a")
        found = self.samples(records)
        self.assertEqual(list(found), [(step, prompt) for step in (0, 6, 12) for prompt in PROMPTS])
        for text in found.values():
            self.assertLessEqual(len(text), 64)  # a byte is a character here, or half of one
        self.assertNotEqual(found[0, "Text"], found[12, "Text"])
        self.assertEqual(self.samples(self.train("b")), found)

    def test_they_are_the_same_on_several_ranks_and_change_nothing(self):
        def losses(records):
            return [record["loss"] for record in records if record["kind"] in ("train", "eval")]
        one, without = self.train("a", "--set", "distributed.zero_stage=3"), self.train("b", "--set", "evaluation.prompts=[]")
        self.assertEqual(losses(one), losses(without))
        two = self.samples(self.train("c", "--ranks", "2", "--set", "distributed.zero_stage=3"))
        self.assertEqual(list(two), list(self.samples(one)))
        self.assertEqual(two[0, "Text"], self.samples(one)[0, "Text"])

    def test_a_resumed_run_has_each_once(self):
        self.train("a")
        records = self.train("a", "--set", "training.steps=18")
        self.assertEqual([step for step, _ in self.samples(records)][::2], [0, 6, 12, 18])
        self.assertEqual(sum(record["kind"] == "sample" for record in records), 8)

    def test_eval_goes_by_its_own_files(self):
        self.train("a")
        self.assertIn("loss", self.parka("eval", "a"))

    def test_what_cannot_be_is_refused(self):
        for override, named in (("model.vocab_size=4096", "evaluation.prompts"), ("distributed.context_parallel=2", "evaluation.prompts"), ("evaluation.prompts=x", "evaluation.prompts")):
            with self.subTest(override):
                result = subprocess.run([os.path.abspath(PROGRAM), "train", "a.json", "--data", "data", "--set", override], capture_output=True, text=True, cwd=self.folder)
                self.assertEqual(result.returncode, 2)
                self.assertIn(named, result.stderr.splitlines()[-1])


if __name__ == "__main__":
    unittest.main()
