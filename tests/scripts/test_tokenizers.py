#!/usr/bin/env python3
"""Tests that the ids of prepare_data.py and prepare_eval.py are those of transformers. Exits with 77 (skipped) where a
package is missing."""

import os

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing

import json
import shutil
import subprocess
import sys
import unittest

try:
    import numpy as np
    import tokenizers
    from transformers import AutoTokenizer
except ImportError:
    print("skipped: numpy, tokenizers or transformers is missing")
    sys.exit(77)

from preparation import SCRIPT, Preparation  # noqa: E402
from tokenizer_helper import Text  # noqa: E402
from tiny_tokenizers import llama2_like, llama3_like, qwen_like  # noqa: E402

TEXTS = [
    "Hello there!  What is the answer?\n\nIt is 12345.",
    " leading space, then\ttabs and\r\n line ends \n \n",
    "émigré naïve 日本語 \U0001f600 e\u0301",
    "def main():\n    return 0\n",
    "a",
]
TOKENIZERS = {"llama3": llama3_like, "llama2": llama2_like, "qwen": qwen_like}
# Classes that the tokenizer_config.json of such models names.
CLASSES = (("llama3", "PreTrainedTokenizerFast"), ("llama2", "PreTrainedTokenizerFast"), ("llama2", "LlamaTokenizer"),
           ("qwen", "Qwen2Tokenizer"))


class Specials(Preparation):
    def documents(self, path, *options):
        """The ids of each of TEXTS, without the id that ends it."""
        lines = self.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        self.out = self.folder / f"out{len(list(self.folder.glob('out*')))}"
        command = [lines, "--jsonl-field", "text", "--tokenizer", path, *options]
        code, error = self.call_in_this_process(*command)
        self.assertEqual(code, 0, error)
        self.info = json.loads((self.out / "data.json").read_text())
        ids = self.ids()
        ends = [i for i, token in enumerate(ids) if token == self.info["eos"]]
        self.assertEqual(ends[-1], len(ids) - 1)
        return [ids[first:last] for first, last in zip([0, *(end + 1 for end in ends)], ends)]

    def test_documents_have_the_ids_of_transformers_with_its_specials(self):
        for name, kind in CLASSES:
            with self.subTest(name=name, kind=kind):
                path = TOKENIZERS[name](self.folder / name, tokenizer_class=kind)
                reference = AutoTokenizer.from_pretrained(path.parent)
                self.assertEqual(type(reference).__name__, kind if kind != "PreTrainedTokenizerFast" else "TokenizersBackend")
                for text, got in zip(TEXTS, self.documents(path)):
                    # The class of transformers 5 puts no space before a text that begins with one, SentencePiece does.
                    if kind != "LlamaTokenizer" or not text.startswith(" "):
                        self.assertEqual(got, reference(text)["input_ids"])
                self.assertEqual(self.info["eos"], reference.eos_token_id)
                self.assertEqual(self.info["bos"], [] if name == "qwen" else [reference.bos_token_id])

    def test_bos_by_option_and_by_config(self):
        for name, make in TOKENIZERS.items():
            plain = make(self.folder / "plain" / name)
            without = [tokenizers.Tokenizer.from_file(str(plain)).encode(t, add_special_tokens=False).ids for t in TEXTS]
            refused = make(self.folder / "refused" / name, add_bos_token=False)
            wanted = make(self.folder / "wanted" / name, add_bos_token=True)
            known = make(self.folder / "unknown" / name, add_bos_token=True, bos_token=None)
            with self.subTest(name=name):
                first = {"llama3": "<|begin_of_text|>", "llama2": "<s>", "qwen": "<|endoftext|>"}[name]
                self.assertEqual(self.documents(plain, "--bos", "none"), without)
                self.assertEqual(self.documents(refused), without)
                self.documents(wanted)
                self.assertEqual(len(self.info["bos"]), 0 if name == "qwen" else 1)
                if name != "qwen":  # there it is the token that ends documents, too
                    self.assertEqual(self.documents(plain, "--bos", first), self.documents(known))
        added = qwen_like(self.folder / "deepseek", add_bos_token=True, bos_token={"content": "<|im_start|>"})
        self.documents(added)
        self.assertEqual(self.info["bos"], [tokenizers.Tokenizer.from_file(str(added)).token_to_id("<|im_start|>")])

    def one_that_ends_texts(self):
        path = llama2_like(self.folder / "both")
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        ids = [(token, tokenizer.token_to_id(token)) for token in ("<s>", "</s>")]
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing("<s> $A </s>", special_tokens=ids)
        tokenizer.save(str(path))
        return path

    def test_the_kept_tokenizer_begins_texts_as_documents_begin(self):
        both = self.one_that_ends_texts()
        for path, *options in (
            (qwen_like(self.folder / "qwen"), "--bos", "<|im_start|>"),
            (qwen_like(self.folder / "said", add_bos_token=True, bos_token="<|im_start|>"),),
            (llama3_like(self.folder / "llama3"), "--bos", "none"),
            (llama3_like(self.folder / "refused", add_bos_token=False),),
            (llama2_like(self.folder / "llama2"), "--bos", "none"),
            (both, "--bos", "none"),
        ):
            with self.subTest(path=path, options=options):
                documents = self.documents(path, *options)
                kept = self.out / "tokenizer"
                behind = [self.info["eos"]] if path == both else []
                served = AutoTokenizer.from_pretrained(kept)
                self.assertEqual([served(text)["input_ids"] for text in TEXTS], [[*ids, *behind] for ids in documents])
                text = Text(kept)
                self.assertEqual([text.encode(t) for t in TEXTS], documents)
                old, new = (json.loads(p.read_text()) for p in (path, kept / "tokenizer.json"))
                self.assertEqual(old | {"post_processor": None}, new | {"post_processor": None})
                self.assertEqual("ByteLevel" in str(old["post_processor"]), "ByteLevel" in str(new["post_processor"]))
        path = llama3_like(self.folder / "same")
        self.documents(path, "--bos", "<|begin_of_text|>")
        self.assertEqual((self.out / "tokenizer/tokenizer.json").read_bytes(), path.read_bytes())

    def test_eos_by_option_and_by_config(self):
        path = qwen_like(self.folder / "instruct", eos_token="<|im_end|>")
        own = tokenizers.Tokenizer.from_file(str(path))
        self.documents(path)
        self.assertEqual(self.info["eos"], own.token_to_id("<|im_end|>"))
        self.documents(path, "--eos", "<|endoftext|>")
        self.assertEqual(self.info["eos"], own.token_to_id("<|endoftext|>"))
        path.with_name("special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_start|>"}}')
        self.documents(path)
        self.assertEqual(self.info["eos"], AutoTokenizer.from_pretrained(path.parent).eos_token_id)
        self.assertEqual(self.info["eos"], own.token_to_id("<|im_start|>"))
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            path.with_name(name).unlink()
        self.documents(path)
        self.assertEqual(self.info["eos"], own.token_to_id("<|endoftext|>"))

    def test_a_tokenizer_that_ends_texts_itself_does_not_end_documents_twice(self):
        path = self.one_that_ends_texts()
        reference = AutoTokenizer.from_pretrained(path.parent)
        self.assertEqual([[*ids, 2] for ids in self.documents(path)], [reference(text)["input_ids"] for text in TEXTS])

    def test_bad_names_and_configs(self):
        text = self.write("a.txt", "a")
        path = llama3_like(self.folder / "llama3")
        self.refuse("has no token <bos>; give --bos another name", text, "--tokenizer", path, "--bos", "<bos>")
        self.refuse("--bos names a token of a tokenizer.json", text, "--bos", "<s>")
        path.with_name("tokenizer_config.json").write_text("{")
        self.refuse("tokenizer_config.json: is not JSON", text, "--tokenizer", path)

    def test_the_keys_that_keep_documents_apart_are_printed(self):
        one = {"bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>", "add_bos_token": True}
        lines = self.write("texts.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        for path, both in ((qwen_like(self.folder / "one", **one), True), (llama3_like(self.folder / "two"), False),
                           (qwen_like(self.folder / "none"), False), ("bytes", False)):
            with self.subTest(path=path):
                result = self.call(lines, "--jsonl-field", "text", "--tokenizer", path)
                self.assertEqual(result.returncode, 0, result.stderr)
                (line,) = [line for line in result.stdout.splitlines() if '"documents"' in line]
                keys = json.loads("{" + line[line.index('"documents"') :] + "}")
                eos = json.loads((self.out / "data.json").read_text())["eos"]
                start = {"document_start": eos} if both else {}
                self.assertEqual(keys, {"documents": "separate", **start, "document_end": eos})
                shutil.rmtree(self.out)

    def test_a_folder_stands_for_its_tokenizer(self):
        for name, make in TOKENIZERS.items():
            path = make(self.folder / name)
            want = self.documents(path), self.info
            self.assertEqual((self.documents(path.parent), self.info), want)
            copied = (self.out / "tokenizer/tokenizer_config.json").read_bytes()
            self.assertEqual(copied, path.with_name("tokenizer_config.json").read_bytes())

    def test_what_is_no_tokenizer_file_gets_advice(self):
        text = self.write("a.txt", "a")
        self.write("old/vocab.json", "{}")
        self.write("models--a--b/snapshots/1/tokenizer.json", "{}")
        for name, *words in (
            ("gpt2", "hf download gpt2 tokenizer.json"),
            ("Qwen/Qwen2.5-0.5B", "hf download Qwen/Qwen2.5-0.5B tokenizer.json", "--tokenizer Qwen2.5-0.5B"),
            ("meta-llama/Llama-3.1-8B", "hf download meta-llama/Llama-3.1-8B "),
            ("none/tokenizer.json", "no such tokenizer file; give bytes"),
            (self.write("sp/tokenizer.model", b"\n\x0e"), "tokenizer.json is needed", "save_pretrained"),
            (self.folder / "old", "the folder has none", "save_pretrained"),
            (self.folder / "models--a--b", "models--a--b/snapshots/1/tokenizer.json"),
        ):
            for word in words:
                with self.subTest(name=name, word=word):
                    self.refuse(word, text, "--tokenizer", name)

    def test_a_prompt_and_its_continuation_have_the_ids_of_the_whole(self):
        docs = [{"goal": "boil an egg", "sol1": "Freeze it.", "sol2": "Heat it: 日本", "label": 1},
                {"goal": "x?\n", "sol1": "a b", "sol2": "the answer", "label": 0}]
        lines = self.write("piqa.jsonl", "".join(json.dumps(doc) + "\n" for doc in docs))
        for name, make in TOKENIZERS.items():
            with self.subTest(name=name):
                path = make(self.folder / name)
                reference = AutoTokenizer.from_pretrained(path.parent)
                for bos in ([], ["--bos", "none"]):
                    command = [SCRIPT.with_name("prepare_eval.py"), lines, "--task", "piqa", "--tokenizer", path,
                               "--metric", "pmi_dc", "--out", self.folder / "requests", *bos]
                    result = subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True)
                    self.assertEqual(result.returncode, 0, result.stderr)
                    made = list(map(json.loads, (self.folder / "requests").read_text().splitlines()))[1:]
                    specials = {"add_special_tokens": not bos}
                    for doc, line in zip(docs, made):
                        context = f"Question: {doc['goal']}\nAnswer:"
                        self.assertEqual(line["domain"], reference("Answer:", **specials)["input_ids"])
                        for choice, answer in zip(line["choices"], (doc["sol1"], doc["sol2"])):
                            whole = choice.get("context", line.get("context")) + choice["continuation"]
                            self.assertEqual(whole, reference(f"{context} {answer}", **specials)["input_ids"])
                            self.assertEqual(reference.decode(choice["continuation"]).strip(), answer)


if __name__ == "__main__":
    unittest.main()
