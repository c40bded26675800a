"""Conversations that scripts/prepare_data.py has packed need data.loss_mask and data.documents: a run without them is refused, or
warned of. Exits with 77 (skipped) where a package is missing."""
import json
import os
import subprocess
import sys
import tempfile
import unittest

try:
    import jinja2  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

from image_runs import ImageRuns
from parka_runs import metrics, parka
from refusals import assert_ended_well, assert_refused_or_told, shown
from token_runs import TokenRuns, random_ids

SCRIPT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "scripts", "prepare_data.py")
LENGTH, VOCAB = 128, 272
MASK, DOCUMENTS = "data.loss_mask", "data.documents"


def prepare(*arguments):
    result = subprocess.run([sys.executable, SCRIPT, *arguments], capture_output=True, text=True, timeout=200)
    if result.returncode != 0:
        raise AssertionError(shown(result))


class Conversations(TokenRuns):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        cls.addClassCleanup(temporary.cleanup)
        cls.packed, cls.text = (os.path.join(temporary.name, name) for name in ("packed", "text"))
        chats, texts = (os.path.join(temporary.name, name) for name in ("chats.jsonl", "texts.jsonl"))
        with open(chats, "w", encoding="utf-8") as file:
            for number in range(12):
                said = [{"role": "user", "content": f"question {number}, put at length"}, {"role": "assistant", "content": f"answer {number}"}]
                file.write(json.dumps({"messages": said}) + "\n")
        with open(texts, "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": f"a plain text, number {number}, of some words"}) + "\n" for number in range(12))
        prepare(chats, "--chat", "chatml", "--sequence-length", str(LENGTH), "--out", cls.packed)
        prepare(texts, "--jsonl-field", "text", "--out", cls.text)
        with open(f"{cls.packed}/data.json", encoding="utf-8") as file:
            cls.made = json.load(file)

    def of(self, folder, **data):
        return self.config([f"{folder}/train-00000.npy"], VOCAB, sequence_length=LENGTH, **data)

    def assert_told_of(self, config, folder, *words):
        self.forget_run()
        assert_refused_or_told(self, self.train(config), folder, *words)
        assert_refused_or_told(self, parka("data", self.write_config(config)), folder, *words)

    def test_without_both_keys(self):
        self.assert_told_of(self.of(self.packed), self.packed, MASK, DOCUMENTS)
        pattern = self.of(self.packed)
        pattern["data"]["train"] = [f"{self.packed}/train-*.npy"]
        self.assert_told_of(pattern, self.packed, MASK, DOCUMENTS)

    def test_without_one_of_them(self):
        self.assert_told_of(self.of(self.packed, documents="separate"), self.packed, MASK)
        self.assert_told_of(self.of(self.packed, loss_mask=True), self.packed, DOCUMENTS)

    def test_beside_plain_text(self):
        config = self.of(self.text)
        config["data"]["train"].append(f"{self.packed}/train-00000.npy")
        self.assert_told_of(config, self.packed, MASK, DOCUMENTS)

    def test_held_out(self):
        tokens = [f"{self.packed}/train-00000.npy"]
        self.assert_told_of(self.of(self.text, eval=tokens), self.packed, MASK, DOCUMENTS)
        self.assert_told_of({**self.of(self.text), "evaluation": {"sets": [f"chats={tokens[0]}"]}}, self.packed, MASK, DOCUMENTS)

    def test_evaluated_by_a_run_on_plain_text(self):
        config = self.of(self.text)
        config["checkpoint"]["save_final"] = True
        assert_ended_well(self, self.train(config))
        result = parka("eval", self.path("run"), "--data", f"{self.packed}/train-00000.npy")
        assert_refused_or_told(self, result, self.packed, MASK, DOCUMENTS)

    def test_with_both_keys_nothing_is_said(self):
        config = self.of(self.packed, loss_mask=True, documents="separate")
        config["training"].update(global_batch_size=1, micro_batch_size=1, steps=self.made["train"]["tokens"] // LENGTH)
        result = self.train(config)
        assert_ended_well(self, result)
        self.assertNotIn(MASK, result.stderr, shown(result))
        self.assertNotIn(DOCUMENTS, result.stderr, shown(result))
        self.assertEqual(sum(record["targets"] for record in metrics(self.path("run"))), self.made["train"]["targets"], "of one epoch")

    def test_plain_text_needs_neither(self):
        for config in (self.of(self.text), self.of(self.text, documents="separate", document_end=256),
                       self.config([self.write("ids.npy", random_ids(3000, 256))], VOCAB)):
            self.forget_run()
            result = self.train(config)
            assert_ended_well(self, result)
            self.assertNotIn(MASK, result.stderr, shown(result))
            self.assertNotIn(DOCUMENTS, result.stderr, shown(result))


class ConversationsAboutImages(ImageRuns):
    def test_without_the_keys(self):
        for left_out in (("loss_mask", "documents"), ("loss_mask",), ("documents",)):
            with self.subTest(left_out=left_out):
                config = self.config("run_without_" + "_".join(left_out), steps=1)
                for key in left_out:
                    del config["data"][key]
                words = [f"data.{key}" for key in left_out]
                assert_refused_or_told(self, self.run_config(config), self.path("data"), *words)

    def test_with_them_nothing_is_said(self):
        """And an epoch has the targets that were prepared."""
        with open(self.path("data/data.json"), encoding="utf-8") as file:
            made = json.load(file)["train"]
        config = self.config(steps=made["tokens"] // self.printed["data"]["sequence_length"])
        config["training"].update(global_batch_size=1, eval_interval=0)
        config["checkpoint"]["interval"] = 0
        config["optimizer"]["schedule"]["total_steps"] = config["training"]["steps"]
        said = self.run_to_the_end(config)
        self.assertNotIn(MASK, said)
        self.assertNotIn(DOCUMENTS, said)
        self.assertEqual(sum(record["targets"] for record in metrics(self.path("run"))), made["targets"])


if __name__ == "__main__":
    unittest.main()
