#!/usr/bin/env python3
"""Tests of what scripts/prepare_eval.py reads and refuses. Exits with 77 (skipped) where numpy is missing."""
import contextlib
import io
import json
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    import numpy  # noqa: F401
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))
import prepare_eval  # noqa: E402

DOCUMENT = {"context": "1 + 1 =", "choices": [" 1", " 2"], "answer": 1}  # of text_choice


class Documents(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.input, self.out = Path(temporary.name) / "in.jsonl", Path(temporary.name) / "out.jsonl"

    def call(self, *documents, task="text_choice", encoding="utf-8"):
        """Returns (exit code, standard error)."""
        self.input.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding=encoding)
        error = io.StringIO()
        tower = ["--tower", "clip"] if task == "image_choice" else []
        command = ["prepare_eval.py", str(self.input), "--task", task, *tower, "--out", str(self.out)]
        streams = contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO())
        with mock.patch.object(sys, "argv", command), streams[0], streams[1]:
            return prepare_eval.main(), error.getvalue()

    def test_a_byte_order_mark_is_no_text(self):
        self.assertEqual(self.call(DOCUMENT), (0, ""))
        made = self.out.read_bytes()
        self.assertEqual(self.call(DOCUMENT, encoding="utf-8-sig"), (0, ""))
        self.assertEqual(self.out.read_bytes(), made)

    def test_what_is_no_list_of_texts_is_refused(self):
        hellaswag = {"activity_label": "a", "ctx_a": "a", "ctx_b": "b", "endings": "xyz", "label": 0}
        image = {"question": "a", "choices": ["a", "b"], "answer": 1}
        for task, document, message in (
            ("image_choice", {**image, "choices": "yes"}, "its choices are no list of texts"),
            ("image_choice", {**image, "choices": {"a": 1, "b": 2}}, "its choices are no list of texts"),
            ("image_choice", {**image, "image": [5]}, "its images are no list of texts"),
            ("image_choice", {**image, "image": {"path": "1.png"}}, "its images are no list of texts"),
            ("text_choice", {**DOCUMENT, "choices": {" a": 1, " b": 2}}, "its choices are no list of texts"),
            ("text_choice", {**DOCUMENT, "context": 5}, "its context is no text"),
            ("hellaswag", hellaswag, "its endings are no list of texts"),
            ("arc_easy", {"question": "a", "choices": {"text": "abc"}, "answerKey": "A"}, "its choices are no list of texts"),
        ):
            with self.subTest(task=task, document=document):
                code, error = self.call(document, task=task)
                self.assertEqual(code, 2)
                self.assertRegex(error, rf"^prepare_eval: error: .*in.jsonl, line 1: is not a document of {task} \({message}\); .*\n$")
                self.assertFalse(self.out.exists())

    def test_text_that_is_not_unicode_is_refused_with_its_line(self):
        for key, value in (("context", "\ud800"), ("choices", [" a", " \udfff"])):
            code, error = self.call(DOCUMENT, {**DOCUMENT, key: value})
            self.assertEqual(code, 2)
            self.assertRegex(error, r"^prepare_eval: error: .*in.jsonl, line 2: holds text that is not Unicode .*; remove it\n$")


if __name__ == "__main__":
    unittest.main()
