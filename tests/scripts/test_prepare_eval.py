#!/usr/bin/env python3
"""Tests of what scripts/prepare_eval.py reads and refuses. Exits with 77 (skipped) where numpy is missing."""
import contextlib
import gzip
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

IMAGE_DOCUMENT = {"question": "1 + 1 =", "choices": ["1", "2"], "answer": 1}  # of image_choice, without a picture


def needs_pillow(test):
    try:
        import PIL  # noqa: F401
        import xxhash  # noqa: F401
    except ImportError as error:
        test.skipTest(f"{error.name} is missing")


class Documents(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.input, self.out = Path(temporary.name) / "in.jsonl", Path(temporary.name) / "out.jsonl"

    def call(self, *documents, task="text_choice", encoding="utf-8", options=()):
        """Returns (exit code, standard error), and leaves standard output in `printed`."""
        self.input.write_text("".join(json.dumps(document) + "\n" for document in documents), encoding=encoding)
        error, output = io.StringIO(), io.StringIO()
        tower = ["--tower", "clip"] if task == "image_choice" else []
        command = ["prepare_eval.py", str(self.input), "--task", task, *tower, *options, "--out", str(self.out)]
        streams = contextlib.redirect_stderr(error), contextlib.redirect_stdout(output)
        with mock.patch.object(sys, "argv", command), streams[0], streams[1]:
            code = prepare_eval.main()
        self.printed = output.getvalue()
        return code, error.getvalue()

    def test_a_byte_order_mark_is_no_text(self):
        self.assertEqual(self.call(DOCUMENT), (0, ""))
        made = self.out.read_bytes()
        self.assertEqual(self.call(DOCUMENT, encoding="utf-8-sig"), (0, ""))
        self.assertEqual(self.out.read_bytes(), made)

    def test_equal_choices(self):
        rows = [{**DOCUMENT, "choices": [" 1", " 2", f" {number}"], "answer": number % 3} for number in range(3, 400)]
        for equal in ([" 1", " 2", " 1"], [" a", " a"]):
            code, error = self.call(*rows[:20], {**DOCUMENT, "choices": equal})
            self.assertEqual(code, 2)
            self.assertRegex(error, r"\Aprepare_eval: error: .*in.jsonl: document 21 [^\n]*\n\Z")
            code, error = self.call(*rows, {**DOCUMENT, "choices": equal})
            self.assertEqual(code, 0)
            self.assertRegex(error, r"\Aprepare_eval: warning: .*in.jsonl: document 398 [^\n]*\n\Z")
        winogrande = {"sentence": "A met B, for _ was late", "option1": "A", "option2": "B", "answer": "1"}
        self.assertEqual(self.call(winogrande, task="winogrande"), (0, ""))
        self.assertEqual(self.call({**winogrande, "option2": "A"}, task="winogrande")[0], 2)

    def test_one_choice_that_is_always_right(self):
        for label in (0, 1):
            rows = [{**DOCUMENT, "context": str(number), "answer": label} for number in range(20)]
            code, error = self.call(*rows)
            self.assertEqual(code, 0)
            self.assertRegex(error, rf"\Aprepare_eval: warning: .*in.jsonl: choice {label + 1} [^\n]*\n\Z")
            self.assertEqual(self.call(*rows, {**DOCUMENT, "answer": 1 - label}), (0, ""))

    def test_what_is_no_list_of_texts_is_refused(self):
        hellaswag = {"activity_label": "a", "ctx_a": "a", "ctx_b": "b", "endings": "xyz", "label": 0}
        for task, document, message in (
            ("image_choice", {**IMAGE_DOCUMENT, "choices": "yes"}, "its choices are no list of texts"),
            ("image_choice", {**IMAGE_DOCUMENT, "choices": {"a": 1, "b": 2}}, "its choices are no list of texts"),
            ("image_choice", {**IMAGE_DOCUMENT, "image": [5]}, "its images are no list of texts"),
            ("image_choice", {**IMAGE_DOCUMENT, "image": {"path": "1.png"}}, "its images are no list of texts"),
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

    def test_an_image_without_a_name_is_refused_with_its_line(self):
        for image in ("", [""], ["1.png", ""]):
            with self.subTest(image=image):
                code, error = self.call(IMAGE_DOCUMENT, {**IMAGE_DOCUMENT, "image": image}, task="image_choice")
                self.assertEqual(code, 2)
                self.assertRegex(error, r"^prepare_eval: error: .*in.jsonl, line 2: is not a document of image_choice "
                                        r"\(a name of its images is empty\); .*\n$")

    def test_an_image_that_lies_elsewhere_is_refused_with_its_line(self):
        for name in ("/etc/passwd", "../1.png", "a/../../1.png"):
            code, error = self.call({**IMAGE_DOCUMENT, "image": name}, task="image_choice")
            self.assertEqual(code, 2)
            self.assertRegex(error, r"\Aprepare_eval: error: .*in.jsonl, line 1: [^\n]*does not lie in --image-folder[^\n]*\n\Z")

    def test_what_holds_no_documents_is_refused_by_what_it_is(self):
        line = (json.dumps(DOCUMENT) + "\n").encode()
        self.assertEqual(self.call(DOCUMENT), (0, ""))
        made = self.out.read_bytes()
        command = ["prepare_eval.py", str(self.input), "--task", "text_choice", "--out", str(self.out)]
        for content, word in ((gzip.compress(line), None), (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
                              (b"<!doctype html>", "web page"), (b"PAR1" + bytes(9), "Parquet"), (gzip.compress(line)[:-9], "cannot be read")):
            self.input.write_bytes(content)
            error = io.StringIO()
            with mock.patch.object(sys, "argv", command), contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
                code = prepare_eval.main()
            self.assertEqual(code, 0 if word is None else 2)
            self.assertIn(word or "", error.getvalue())
        self.assertEqual(self.out.read_bytes(), made)

    def test_text_that_is_not_unicode_is_refused_with_its_line(self):
        for key, value in (("context", "\ud800"), ("choices", [" a", " \udfff"])):
            code, error = self.call(DOCUMENT, {**DOCUMENT, key: value})
            self.assertEqual(code, 2)
            self.assertRegex(error, r"^prepare_eval: error: .*in.jsonl, line 2: holds text that is not Unicode .*; remove it\n$")

    def test_options_of_pictures_are_refused_where_there_are_none(self):
        for option, value in (("--prompt", "{question}"), ("--tower", "clip"), ("--image-folder", "."), ("--image-size", "336"),
                              ("--patch-size", "14"), ("--geometry", "pad"), ("--downsample", "1"), ("--image-token", "5")):
            with self.subTest(option):
                code, error = self.call(DOCUMENT, options=(option, value))
                self.assertEqual(code, 2)
                self.assertEqual(error, f"prepare_eval: error: {option} is of --task image_choice, and text_choice has no pictures; "
                                        "leave it out\n")
                self.assertFalse(self.out.exists())

    def test_a_task_with_pictures_needs_a_tower_and_sizes_that_fit(self):
        given = [str(self.input), "--task", "image_choice", "--out", str(self.out)]
        with self.assertRaisesRegex(prepare_eval.InputError, "^--task image_choice needs --tower; "):
            prepare_eval.parse_options(given)
        options = prepare_eval.parse_options([*given, "--tower", "clip"])
        self.assertEqual((options.prompt, options.image_folder, options.downsample), ("{question}\nAnswer:", Path("."), 1))
        needs_pillow(self)
        for option in ("--image-size", "--patch-size", "--downsample"):
            code, error = self.call(IMAGE_DOCUMENT, task="image_choice", options=(option, "0"))
            self.assertEqual(code, 2)
            self.assertRegex(error, rf"^prepare_eval: error: .*{option} 0.* fit no tower; change them\n$")

    def test_pictures_under_another_key_are_refused_and_not_left_out(self):
        for key, value in (("images", ["1.png"]), ("images", "1.png"), ("video", "1.mp4")):
            for document in ({**IMAGE_DOCUMENT, key: value}, {**IMAGE_DOCUMENT, key: value, "image": []}):
                with self.subTest(document=document):
                    code, error = self.call(IMAGE_DOCUMENT, document, task="image_choice")
                    self.assertEqual(code, 2)
                    self.assertIn(f"line 2: is not a document of image_choice (it has '{key}' and no 'image', which is the key", error)

    def test_the_summary_counts_pictures_of_tasks_that_have_them(self):
        needs_pillow(self)
        from PIL import Image

        Image.new("RGB", (9, 9)).save(self.input.with_name("1.png"))
        options = ("--image-folder", str(self.input.parent), "--image-size", "28")
        shown = {**IMAGE_DOCUMENT, "image": "1.png", "images": None, "video": []}  # tables have all keys in all rows
        self.assertEqual(self.call(shown, shown, IMAGE_DOCUMENT, task="image_choice", options=options), (0, ""))
        self.assertEqual(self.printed, f"{self.out}: 3 documents of image_choice, 1 pictures (crop), metric acc\n")
        self.assertEqual(self.call(DOCUMENT), (0, ""))
        self.assertEqual(self.printed, f"{self.out}: 1 documents of text_choice, metric acc\n")

    def test_labels_are_whole_numbers_or_their_digits(self):
        copa = {"premise": "It rained.", "question": "effect", "choice1": "A", "choice2": "B"}
        winogrande = {"sentence": "a _ b", "option1": "c", "option2": "d"}
        hellaswag = {"activity_label": "a", "ctx_a": "a", "ctx_b": "b", "endings": ["x", "y"]}
        piqa = {"goal": "a", "sol1": "b", "sol2": "c"}
        first = {key: value for key, value in DOCUMENT.items() if key != "answer"}
        for task, document, key in (("copa", copa, "label"), ("winogrande", winogrande, "answer"), ("hellaswag", hellaswag, "label"),
                                    ("piqa", piqa, "label"), ("text_choice", first, "answer"), ("image_choice", IMAGE_DOCUMENT, "answer")):
            for value in (0.9, 1.0, True, None, float("inf"), float("nan"), [1], "", "1.0", "-1", "\u00b2", "9" * 5000):
                with self.subTest(task=task, value=value):
                    code, error = self.call({**document, key: 1}, {**document, key: value}, task=task)
                    self.assertEqual(code, 2)
                    self.assertRegex(error, rf"^prepare_eval: error: .*in.jsonl, line 2: is not a document of {task} \(.*; give .*\n$")
                    self.assertFalse(self.out.exists())
            if task != "image_choice":
                self.assertEqual(self.call({**document, key: 1}, {**document, key: "1"}, task=task), (0, ""))
                first_label, second_label = (json.loads(line)["label"] for line in self.out.read_text().splitlines()[1:])
                self.assertEqual((first_label, second_label), (0, 0) if task == "winogrande" else (1, 1))
                self.out.unlink()

    def test_the_id_of_image_slots_is_in_no_text_that_is_written(self):
        needs_pillow(self)
        from PIL import Image

        Image.new("RGB", (9, 9)).save(self.input.with_name("1.png"))
        where = ("--image-folder", str(self.input.parent), "--image-size", "28", "--prompt", "{question}", "--image-token")
        shown = {**IMAGE_DOCUMENT, "image": "1.png"}
        for document in (IMAGE_DOCUMENT, shown):
            for change, token, metric in (({"question": "~"}, "126", "acc"), ({"choices": ["~", "2"]}, "126", "acc"),
                                          ({"choices": ["1", "2~"]}, "126", "acc"), ({}, str(ord("A")), "pmi_dc")):
                with self.subTest(document=document, change=change):
                    options = (*where, token, "--metric", metric)
                    code, error = self.call(shown, {**document, **change}, task="image_choice", options=options)
                    number = 1 if metric == "pmi_dc" else 2  # the domain "Answer:" is every document's
                    self.assertEqual(code, 2, error)
                    self.assertRegex(error, rf"^prepare_eval: error: document {number}: its text has id {token}, which marks images; .*\n$")
                    self.assertEqual([path.name for path in self.out.parent.glob("out*")], [])
        # Without pmi_dc the domain is not written.
        self.assertEqual(self.call(shown, IMAGE_DOCUMENT, task="image_choice", options=(*where, str(ord("A")))), (0, ""))


if __name__ == "__main__":
    unittest.main()
