#!/usr/bin/env python3
"""From files as other projects have them, by the recipes of docs/data.md, to two steps of training: the right words are learnt, and the
right number of tokens. Exits with 77 (skipped) where a package is missing."""
import json
import os
import re
import shutil
import subprocess
import unittest

from chat_data import ChatData, assistant, np, user
from chat_tokenizers import make_chat_tokenizer
from script_runs import ROOT, run_here
from tiny_tokenizers import llama2_like, llama3_like, qwen_like

from refusals import assert_ended_well, shown

PROGRAM = os.environ.get("PARKA_PROGRAM", "build/release/parka")


def recipes():
    """The jq commands of docs/data.md, by the file that each reads."""
    text = (ROOT / "docs/data.md").read_text()
    found = re.findall(r"^    (jq (?:.|\n(?=    ))*? (\S+\.json) > chats\.jsonl)$", text, re.MULTILINE)
    return {name: command for command, name in found}


class Trained(ChatData):
    def parka(self, command, config, *arguments):
        path = self.write("config.json", json.dumps(config))
        return subprocess.run([PROGRAM, "--threads", "1", command, str(path), *arguments], capture_output=True, text=True, timeout=200)

    def config(self, data, vocab, steps=2):
        return {"device": {"kind": "cpu"}, "model": {"vocab_size": vocab, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ffn": 64},
                "precision": {"recipe": "fp32"}, "optimizer": {"schedule": {"warmup_steps": 0}}, "data": data,
                "training": {"steps": steps, "global_batch_size": 1, "micro_batch_size": 1},
                "checkpoint": {"folder": str(self.folder / "run"), "save_final": False}}

    def targets(self, config):
        """Of each step of a run that ends well."""
        shutil.rmtree(self.folder / "run", ignore_errors=True)
        result = self.parka("train", config)
        assert_ended_well(self, result)
        records = map(json.loads, (self.folder / "run/metrics.jsonl").read_text().splitlines())
        return [record["targets"] for record in records if record["kind"] == "train"]


@unittest.skipUnless(shutil.which("jq"), "jq is not on PATH")
class Conversations(Trained):
    def converted(self, name, records):
        """The conversations that a recipe makes."""
        self.write(name, json.dumps(records, indent=1))
        command = recipes()[name]
        result = subprocess.run(["bash", "-euc", command], cwd=self.folder, capture_output=True, text=True, timeout=60)
        self.assertEqual((result.returncode, result.stderr), (0, ""), shown(result))
        return [json.loads(line)["messages"] for line in (self.folder / "chats.jsonl").read_text().splitlines()]

    def assert_trained(self, path, replies):
        """An epoch of what prepare_data.py makes of them, whose targets are the replies and the token that ends each."""
        length = 256
        text, targets = self.text_and_targets(self.prepare(path, length=length))
        self.assertEqual(sorted(targets.split("<|im_end|>")), sorted(["", *replies]))
        info = json.loads((self.out / "data.json").read_text())
        data = {"train": [str(self.out / "train-00000.npy")], "sequence_length": length, "loss_mask": True, "documents": "separate"}
        config = self.config(data, info["padded_vocab_size"], steps=info["train"]["tokens"] // length)
        self.assertEqual(sum(self.targets(config)), info["train"]["targets"])
        return text

    def test_alpaca_with_and_without_input(self):
        rows = [{"instruction": "Say hi.", "output": "Hi."}, {"instruction": "Say ho.", "input": None, "output": "Ho."},
                {"instruction": "Say hu.", "input": "", "output": "Hu."}, {"instruction": "Add.", "input": "1 and 2", "output": "3"}]
        chats = self.converted("alpaca_data.json", rows)
        self.assertEqual([chat[0]["content"] for chat in chats], ["Say hi.", "Say ho.", "Say hu.", "Add.\n\n1 and 2"])
        self.assertEqual([chat[1] for chat in chats], [assistant(row["output"]) for row in rows])
        text = self.assert_trained(self.folder / "chats.jsonl", ["Hi.", "Ho.", "Hu.", "3"])
        self.assertIn("user\nSay hi.<|im_end|>", text)

    def test_alpaca_with_other_keys_and_line_ends(self):
        """Text columns beside, as in alpaca-cleaned, and an instruction that has line ends of its own."""
        rows = [{"instruction": "List:\n- one", "input": None, "output": "- two", "text": "whole"}, {"input": "the input", "instruction": "", "output": "yes"}]
        chats = self.converted("alpaca_data.json", rows)
        self.assertEqual([chat[0]["content"] for chat in chats], ["List:\n- one", "the input"])

    def test_sharegpt(self):
        rows = [{"id": "1", "conversations": [{"from": "system", "value": "Be kind."}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"},
                                              {"from": "human", "value": "bye"}, {"from": "gpt", "value": "see you"}]},
                {"id": "2", "conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}]
        chats = self.converted("sharegpt.json", rows)
        self.assertEqual([len(chat) for chat in chats], [5, 2])
        self.assert_trained(self.folder / "chats.jsonl", ["hello", "see you", "4"])

    def test_messages_as_axolotl_and_llama_factory_have_them(self):
        path = self.write_chats([{"messages": [{"role": "system", "content": "Be kind."}, user("hi"), assistant("hello")]},
                                 {"messages": [user("2 + 2?"), assistant("4")], "id": 7, "source": "a"}])
        self.assert_trained(path, ["hello", "4"])


class Documents(Trained):
    """What the script prints is enough to tell documents apart."""
    TEXTS = ("document one", "document two", "document six")

    def printed(self, tokenizer, texts=TEXTS):
        path = self.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts))
        result = run_here("prepare_data", path, "--jsonl-field", "text", "--tokenizer", tokenizer, "--out", self.new_out())
        assert_ended_well(self, result)
        return result.stdout

    def separate(self, printed):
        """The config that it prints, with documents that are separate, and the ids that it names."""
        info = json.loads((self.out / "data.json").read_text())
        tokens = info["train"]["tokens"]
        data = {"train": [str(self.out / "train-00000.npy")], "sequence_length": tokens, "documents": "separate", "document_end": info["eos"]}
        if start := re.search(r"document_start\W+(\d+)", printed):
            data["document_start"] = int(start[1])
        return self.config(data, info["padded_vocab_size"], steps=1), tokens

    def assert_told_apart(self, tokenizer, texts=TEXTS):
        config, tokens = self.separate(self.printed(tokenizer, texts))
        told = self.parka("data", config, "--json")
        assert_ended_well(self, told)
        self.assertEqual(json.loads(told.stdout.splitlines()[0])["documents"], len(texts), shown(told))
        self.assertEqual(self.targets(config), [tokens - len(texts)])

    def one_token(self, name, make, token, **config):
        return make(self.folder / name, (token, "<|other|>"), bos_token=token, eos_token=token, **config)

    def test_one_token_begins_and_ends_documents(self):
        tokenizer = self.one_token("one", qwen_like, "<|endoftext|>", add_bos_token=True)
        self.assertIn("document_start", self.printed(tokenizer))
        self.assert_told_apart(tokenizer)
        self.assert_told_apart(tokenizer, ("a", "a longer one of several words", "b", "c"))

    def test_a_post_processor_puts_it_there(self):
        tokenizer = self.one_token("front", llama3_like, "<|begin_of_text|>")
        self.assertIn("document_start", self.printed(tokenizer))
        self.assert_told_apart(tokenizer)

    def test_it_is_named_by_options(self):
        tokenizer = make_chat_tokenizer("chatml", self.folder / "named")
        path = self.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in self.TEXTS))
        result = run_here("prepare_data", path, "--jsonl-field", "text", "--tokenizer", tokenizer, "--bos", "<|im_start|>", "--eos", "<|im_start|>",
                          "--out", self.new_out())
        assert_ended_well(self, result)
        self.assertIn("document_start", result.stdout)
        config, tokens = self.separate(result.stdout)
        self.assertEqual(self.targets(config), [tokens - 3])

    def test_two_tokens_and_one_that_ends_alone(self):
        for name, make in (("llama2", llama2_like), ("llama3", llama3_like), ("qwen", qwen_like)):
            with self.subTest(name):
                self.assert_told_apart(make(self.folder / name))

    def test_raw_bytes(self):
        path = self.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in self.TEXTS))
        assert_ended_well(self, run_here("prepare_data", path, "--jsonl-field", "text", "--out", self.new_out()))
        ids = np.fromfile(self.out / "train-00000.npy", "<u2")
        config, tokens = self.separate("")
        self.assertEqual((tokens, self.targets(config)), (len(ids), [len(ids) - 3]))


if __name__ == "__main__":
    unittest.main()
