#!/usr/bin/env python3
"""Scripts end with one line, and never with a traceback, for tokenizers that panic, templates without bounds, and output that nobody takes.
Exits with 77 (skipped) where a package is missing."""
import json
import os
import subprocess
import sys
import unittest

from chat_data import ChatData, assistant, user
from followed_run import train_record
from script_runs import ROOT, SCRIPTS, run_here, run_script
from tiny_tokenizers import qwen_like

from measured import GIB, assert_bounded, run_measured
from refusals import assert_refused, error_lines, shown

PROGRAM = os.environ.get("PARKA_PROGRAM", "build/release/parka")
MODEL = ROOT / "tests/fixtures/text/llama3"


def post_processor(of):
    """With a token that the tokenizer does not have."""
    of["post_processor"] = {"type": "TemplateProcessing", "special_tokens": {},
                            "single": [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]}


def growing_normalizer(of):
    of["normalizer"] = {"type": "Replace", "pattern": {"String": ""}, "content": "y"}


def empty_pieces(of):
    of["pre_tokenizer"] = {"type": "FixedLength", "length": 0}


def long_prefix(of):
    of["model"]["continuing_subword_prefix"] = "##"


def strip(of):
    of["decoder"] = {"type": "Strip", "content": "s", "start": 2**40, "stop": 2**40}


PANICS = (post_processor, growing_normalizer, empty_pieces, long_prefix)  # where text becomes tokens, or before


class Tokenizers(ChatData):
    """What makes the tokenizers library panic: its PanicException is no Exception. Versions may differ in what does."""

    def damaged(self, damage, path):
        content = json.loads(path.read_text())
        damage(content)
        path.write_text(json.dumps(content))
        return path

    def assert_no_traceback(self, result, *words):
        self.assertNotIn("Traceback", result.stderr, shown(result))
        if result.returncode != 0:
            assert_refused(self, result, *words)

    def test_plain_text(self):
        texts = self.write("texts.jsonl", "".join(json.dumps({"text": f"some text {number}"}) + "\n" for number in range(3)))
        for damage in PANICS:
            with self.subTest(damage.__name__):
                path = self.damaged(damage, qwen_like(self.folder / damage.__name__))
                result = run_here("prepare_data", texts, "--jsonl-field", "text", "--tokenizer", path, "--out", self.new_out())
                self.assert_no_traceback(result, "tokenizer.json")

    def test_in_another_process(self):
        for number in range(4):
            self.write(f"many/{number}.jsonl", json.dumps({"text": f"some text {number}" * 200000}) + "\n")
        path = self.damaged(growing_normalizer, qwen_like(self.folder / "growing"))
        result = run_script("prepare_data", self.folder / "many", "--jsonl-field", "text", "--tokenizer", path, "--workers", 2, "--out", self.new_out())
        self.assert_no_traceback(result, "tokenizer.json")

    def test_conversations(self):
        chats = self.write_chats([[user("hi"), assistant("hello")]])
        for damage in PANICS:
            with self.subTest(damage.__name__):
                path = self.damaged(damage, qwen_like(self.folder / damage.__name__))
                result = run_here("prepare_data", chats, "--chat", "chatml", "--tokenizer", path, "--sequence-length", 64, "--out", self.new_out())
                self.assert_no_traceback(result, "tokenizer.json")

    def test_questions(self):
        questions = self.write("questions.jsonl", json.dumps({"context": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}) + "\n")
        for damage in PANICS:
            with self.subTest(damage.__name__):
                path = self.damaged(damage, qwen_like(self.folder / damage.__name__))
                result = run_here("prepare_eval", questions, "--task", "text_choice", "--tokenizer", path, "--out", self.folder / "requests.jsonl")
                self.assert_no_traceback(result, "tokenizer.json")

    def test_generated_text(self):
        """By the process that reads the tokenizer for `parka generate`."""
        model = self.folder / "model"
        imported = subprocess.run([PROGRAM, "import", str(MODEL), "--out", str(model)], capture_output=True, text=True, timeout=60)
        self.assertEqual(imported.returncode, 0, shown(imported))
        kept = {place: place.read_bytes() for place in model.rglob("tokenizer.json")}
        for damage in (*PANICS, strip):
            with self.subTest(damage.__name__):
                for place, content in kept.items():
                    place.write_bytes(content)
                    self.damaged(damage, place)
                result = subprocess.run([PROGRAM, "--threads", "1", "generate", str(model), "--prompt", "a", "--tokens", "3", "--set", "device.kind=cpu"],
                                        capture_output=True, text=True, timeout=100, env={**os.environ, "PARKA_PYTHON": sys.executable})
                self.assert_no_traceback(result, "tokenizer.json")


class Templates(ChatData):
    CHAT = [user("hi"), assistant("hello")]

    def refuse(self, template):
        path = self.write_chats([self.CHAT])
        template = self.write("tokenizer/template.jinja", template)
        result = run_measured([sys.executable, SCRIPTS / "prepare_data.py", path, "--chat", template, "--tokenizer", self.tokenizer, "--sequence-length", 64,
                               "--out", self.new_out()], 60, address_space=6 * GIB)
        assert_bounded(self, result, mib=3000)
        line = assert_refused(self, result, ("chats.jsonl:1", "template.jinja"))
        self.assertNotIn("()", line, "the reason is empty")
        self.assertNotIn("( )", line, "the reason is empty")

    def test_a_text_of_a_terabyte(self):
        self.refuse("{{ 'x' * 10 ** 12 }}")

    def test_a_list_of_a_terabyte(self):
        self.refuse("{{ [1, 2] * 10 ** 12 }}")

    def test_errors_without_words(self):
        self.refuse("{{ raise_exception('') }}")
        self.refuse("{{ messages['none'].content.words }}{{ {}[messages] }}")


class Streams(ChatData):
    """The data are made whether or not anybody reads what is said of them."""

    def arguments(self):
        return [str(SCRIPTS / "prepare_data.py"), str(self.write("a.txt", "some text")), "--out", str(self.new_out())]

    def shell(self, redirected, *arguments):
        return subprocess.run(["sh", "-c", f'exec "$@" {redirected}', "sh", sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=100)

    def test_standard_output_that_is_closed(self):
        result = self.shell(">&-", *self.arguments())
        self.assertNotIn("Traceback", result.stderr, shown(result))
        self.assertIn(result.returncode, (0, 4), shown(result))
        self.assertTrue((self.out / "data.json").exists())

    def test_standard_output_that_is_full(self):
        result = self.shell(">/dev/full", *self.arguments())
        self.assertNotIn("Traceback", result.stderr, shown(result))
        self.assertEqual((result.returncode, len(error_lines(result))), (4, 1), shown(result))

    def run_folder(self):
        folder = self.folder / "run"
        folder.mkdir(exist_ok=True)
        (folder / "metrics.jsonl").write_text("".join(json.dumps(train_record(step)) + "\n" for step in range(1, 30)))
        return folder

    def test_other_scripts(self):
        run = self.run_folder()
        for name, arguments in (("compare", (run, f"other={run}")), ("train_tokenizer", (self.write("t.txt", "text " * 50), "--vocab-size", 300, "--out",
                                                                                      self.folder / "t.json"))):
            for redirected in (">&-", ">/dev/full"):
                with self.subTest(name, redirected=redirected):
                    result = self.shell(redirected, SCRIPTS / f"{name}.py", *arguments)
                    self.assertNotIn("Traceback", result.stderr, shown(result))
                    self.assertIn(result.returncode, (0, 4), shown(result))

    def test_help_that_nobody_takes(self):
        for name in ("prepare_data", "compare", "follow", "train_tokenizer", "prepare_images"):
            for redirected in (">&-", ">/dev/full"):
                with self.subTest(name, redirected=redirected):
                    result = self.shell(redirected, SCRIPTS / f"{name}.py", "--help")
                    self.assertNotIn("Traceback", result.stderr, shown(result))
                    self.assertIn(result.returncode, (0, 2, 4), shown(result))


if __name__ == "__main__":
    unittest.main()
