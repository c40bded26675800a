#!/usr/bin/env python3
"""Tests of scripts/research/make_questions.py. Exits with 77 (skipped) where numpy is missing."""
import hashlib
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import numpy  # noqa: F401
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))
from text_data.parts import is_held_out  # noqa: E402


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def script(self, name, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / name, *map(str, arguments)], capture_output=True, text=True, timeout=120)


class Questions(Folder):
    CONTEXT = 8

    def documents(self, count):
        """{name: text} of files in self.folder / "text"."""
        texts = {}
        (self.folder / "text").mkdir()
        for number in range(count):
            lines = [f"  value_{number}_{i} = compute_{i % 5}(input_{i}, scale_{number % 7});" for i in range(30)]
            texts[f"{number:03}.c"] = "\n".join(lines) + "\n"
            (self.folder / "text" / f"{number:03}.c").write_text(texts[f"{number:03}.c"])
        return texts

    def questions(self, kind, *options, out="out.jsonl"):
        path = self.folder / out
        result = self.script("research/make_questions.py", self.folder / "text", "--kind", kind, "--out", path, "--context-lines", self.CONTEXT, *options)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return [json.loads(line) for line in path.read_text().splitlines()]

    def test_the_right_choice_is_what_the_document_goes_on_with(self):
        texts = self.documents(40)
        for kind in ("lines", "identifiers"):
            made = self.questions(kind)
            self.assertEqual(len(made), 40)
            answers = set()
            for question, text in zip(made, texts.values()):
                self.assertEqual(len(set(question["choices"])), 4)
                right = question["choices"][question["answer"]]
                self.assertIn(question["context"] + right, text)
                self.assertEqual(question["context"].count("\n"), self.CONTEXT - (kind == "lines"))
                for choice in question["choices"]:
                    if kind == "lines":
                        self.assertIn(choice + "\n", "\n" + text)
                        self.assertTrue(0.8 * len(right) <= len(choice) <= 1.25 * len(right) + 1)
                    else:
                        self.assertTrue(choice.startswith(" "))
                        self.assertIn(choice.split()[0].split("(")[0].split(",")[0].split(")")[0], question["context"])
                answers.add(question["answer"])
            self.assertEqual(answers, {0, 1, 2, 3})

    def test_only_documents_that_are_held_out_and_each_once(self):
        texts = self.documents(40)
        (self.folder / "text" / "copy.c").write_text(texts["003.c"])
        every, held_out = self.questions("lines"), self.questions("lines", "--eval-fraction", "0.3")
        self.assertEqual(len(every), 40)
        wanted = [is_held_out(hashlib.blake2b(text.encode(), digest_size=16).digest(), 0.3) for text in texts.values()]
        self.assertTrue(3 < sum(wanted) < 25)
        # What a document is asked does not depend on the others.
        self.assertEqual(held_out, [question for question, take in zip(every, wanted) if take])

    def test_what_gives_no_question_is_left_out(self):
        (self.folder / "text").mkdir()
        for name, content in (("short.c", b"a line that is long enough\n" * 3), ("same.c", b"int one_and_the_same_line;\n" * 50),
                              ("latin.c", b"caf\xe9 au lait, s'il vous plait\n" * 50), ("empty.c", b"")):
            (self.folder / "text" / name).write_bytes(content)
        for kind in ("lines", "identifiers"):
            result = self.script("research/make_questions.py", self.folder / "text", "--kind", kind, "--out", self.folder / "out")
            self.assertEqual(result.returncode, 2)
            self.assertRegex(result.stderr, r"^make_questions: error: no document gives a question of .*\n$")
        result = self.script("research/make_questions.py", self.folder / "text", "--kind", "lines", "--out", self.folder / "no" / "out",
                             "--eval-fraction", "1.5")
        self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1))

    def test_an_input_is_not_replaced(self):
        text = "".join(f"int line_{i} = {i};\n" for i in range(90))
        (self.folder / "a.c").write_text(text)
        for name, *options in (("research/make_questions.py", "--kind", "lines"), ("prepare_eval.py", "--task", "text_choice"), ("research/make_instructions.py",)):
            result = self.script(name, self.folder / "a.c", "--out", self.folder / "a.c", *options)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertRegex(result.stderr, r"^[a-z_]+: error: --out .*a\.c: is the input .*, which it would replace; give another file\n$")
        self.assertEqual((self.folder / "a.c").read_text(), text)


    def test_a_linked_folder_of_text_is_named(self):
        (self.folder / "elsewhere").mkdir()
        (self.folder / "text").mkdir()
        (self.folder / "text" / "link").symlink_to("../elsewhere")
        body = "".join(f"    the_line_of_number_{i} = {i}\n" for i in range(40))
        (self.folder / "text" / "a.py").write_text(f'def f():\n    """Sets them."""\n{body}')
        for name, *options in (("research/make_questions.py", "--kind", "lines"), ("research/make_instructions.py",)):
            result = self.script(name, self.folder / "text", "--out", self.folder / "out.jsonl", *options)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertRegex(result.stderr, r"^[a-z_]+: warning: \S+/text/link: links to folders are not followed; .*\n$")


if __name__ == "__main__":
    unittest.main()
