"""data.document_start: the id that begins documents, alone or beside the one that ends them."""
import os
import json
import subprocess
import sys
import unittest
from pathlib import Path

from parka_runs import metrics, parka
from refusals import assert_ended_well, assert_refused, shown
from token_runs import BATCH, TokenRuns, np

try:
    import tokenizers  # noqa: F401
except ImportError:
    print("skipped: tokenizers is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests" / "scripts"))
from tiny_tokenizers import qwen_like  # noqa: E402

START = "data.document_start"
VOCAB = 272
BEGIN, END = 256, 257
WORDS = [[*word.encode()] for word in ("document one", "the second", "a third one, longer", "x", "and the last of them")]


class Documents(TokenRuns):
    def documents(self, config):
        result = parka("data", self.write_config(config), "--json")
        assert_ended_well(self, result)
        return json.loads(result.stdout.splitlines()[0])["documents"]

    def one_sequence(self, path, tokens, **data):
        """All tokens are one sequence, and a batch has it alone."""
        config = self.config([path], VOCAB, sequence_length=tokens, documents="separate", **data)
        config["training"].update(global_batch_size=1, micro_batch_size=1)
        return config

    def write_documents(self, name, before, behind):
        ids = np.concatenate([[*before, *words, *behind] for words in WORDS]).astype("<u2")
        return self.write(name, ids), len(ids)

    def losses(self):
        return [record["loss"] for record in metrics(self.path("run"))]

    def test_one_id_that_begins_and_ends(self):
        path, tokens = self.write_documents("both.npy", [BEGIN], [BEGIN])
        config = self.one_sequence(path, tokens, document_start=BEGIN, document_end=BEGIN)
        self.assertEqual(self.documents(config), len(WORDS))
        self.assertEqual(self.targets_of_first_step(config), tokens - len(WORDS))

    def test_one_id_as_prepare_data_makes_it(self):
        """The config that has its end alone is refused, or understood: data.json knows what begins documents."""
        tokenizer = qwen_like(Path(self.path("one")), ("<|endoftext|>",), bos_token="<|endoftext|>", eos_token="<|endoftext|>", add_bos_token=True)
        for number, texts in enumerate((("document one", "document two", "document six"), ("a",), ("first", "then another", "the end", "or not"))):
            with self.subTest(texts=texts):
                source, out = self.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()), self.path(f"out{number}")
                made = subprocess.run([sys.executable, str(ROOT / "scripts/prepare_data.py"), source, "--jsonl-field", "text", "--tokenizer",
                                       str(tokenizer), "--out", out], capture_output=True, text=True, timeout=100)
                self.assertEqual(made.returncode, 0, shown(made))
                with open(f"{out}/data.json", encoding="utf-8") as file:
                    info = json.load(file)
                tokens, vocab = info["train"]["tokens"], info["padded_vocab_size"]
                config = self.one_sequence(f"{out}/train-00000.npy", tokens, document_end=info["eos"])
                config["model"]["vocab_size"] = vocab
                self.forget_run()
                result = self.train(config)
                if result.returncode != 0:
                    self.assert_not_trained(result, out, START)
                else:
                    self.assertEqual(metrics(self.path("run"))[0]["targets"], tokens - len(texts), shown(result))
                    self.assertEqual(self.documents(config), len(texts))
                config["data"]["document_start"] = info["bos"][0]
                self.assertEqual(self.documents(config), len(texts))
                self.assertEqual(self.targets_of_first_step(config), tokens - len(texts))

    def test_an_id_in_front_of_each_document_and_none_behind(self):
        """As files of llm.c and of nanochat have them."""
        for name, content in (("raw.npy", b""), ("llm_c.bin", None)):
            path, tokens = self.write_documents(name, [BEGIN], [])
            if content is None:
                header = np.zeros(256, "<i4")
                header[:3] = 20240520, 1, tokens
                with open(path, "rb") as file:
                    ids = file.read()
                self.write(name, header.tobytes() + ids)
            with self.subTest(name):
                config = self.one_sequence(path, tokens, document_start=BEGIN)
                self.assertEqual(self.documents(config), len(WORDS))
                self.assertEqual(self.targets_of_first_step(config), tokens - len(WORDS))

    def test_two_ids_give_the_same_documents_whichever_are_told(self):
        path, tokens = self.write_documents("two.npy", [BEGIN], [END])
        told = []
        for data in ({"document_start": BEGIN}, {"document_end": END}, {"document_start": BEGIN, "document_end": END}):
            with self.subTest(data=data):
                config = self.one_sequence(path, tokens, **data)
                self.assertEqual(self.documents(config), len(WORDS))
                self.assertEqual(self.targets_of_first_step(config), tokens - len(WORDS))
                told.append(self.losses())
        self.assertEqual(told, told[:1] * 3)

    def test_the_loss_is_that_of_documents_that_a_mask_tells_apart(self):
        """First words are predicted from what begins their document, and from nothing before it."""
        path, tokens = self.write_documents("both.npy", [BEGIN], [BEGIN])
        marks = b"".join(b"\3" + b"\1" * (len(words) + 1) for words in WORDS)
        self.write("both.npy.mask", marks)
        config = self.one_sequence(path, tokens)
        self.assertEqual(self.targets_of_first_step(config), tokens - len(WORDS))
        want = self.losses()
        os.remove(self.path("both.npy.mask"))  # one that is not read is refused
        config["data"].update(document_start=BEGIN, document_end=BEGIN)
        self.targets_of_first_step(config)
        self.assertEqual(self.losses(), want)

    def test_documents_that_sequences_cut(self):
        """The end and the next begin lie in two sequences, and a document goes on in the next one."""
        ids = np.array([BEGIN, 1, 2, 3, 4, 5, 6, BEGIN] + [BEGIN, 1, 2, BEGIN, BEGIN, 3, 4, 5] + [6, 7, BEGIN, BEGIN, 8, 9, 10, BEGIN], "<u2")
        config = self.config([self.write("cut.npy", ids)], VOCAB, sequence_length=8, documents="separate", document_start=BEGIN, document_end=BEGIN,
                             shuffle=False)
        config["training"].update(global_batch_size=3, micro_batch_size=3)
        self.assertEqual(self.documents(config), 4)
        self.assertEqual(self.targets_of_first_step(config), 7 + 6 + 6)

    def test_it_has_no_meaning_where_documents_are_joined(self):
        path, tokens = self.write_documents("two.npy", [BEGIN], [END])
        config = self.config([path], VOCAB, sequence_length=tokens // BATCH, documents="joined", document_start=BEGIN)
        self.assert_not_trained(self.train(config), START)
        config["data"].update(documents="separate", document_start=VOCAB)
        self.assert_not_trained(self.train(config), START)
        assert_refused(self, parka("config", "check", self.write_config({**config, "data": {**config["data"], "document_start": "<s>"}})), START)


if __name__ == "__main__":
    unittest.main()
