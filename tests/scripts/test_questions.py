#!/usr/bin/env python3
"""Tests of scripts/make_questions.py and scripts/task_scores.py. Exits with 77 (skipped) where numpy is missing."""
import hashlib
import json
import math
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
        result = self.script("make_questions.py", self.folder / "text", "--kind", kind, "--out", path, "--context-lines", self.CONTEXT, *options)
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
            result = self.script("make_questions.py", self.folder / "text", "--kind", kind, "--out", self.folder / "out")
            self.assertEqual(result.returncode, 2)
            self.assertRegex(result.stderr, r"^make_questions: error: no document gives a question of .*\n$")
        result = self.script("make_questions.py", self.folder / "text", "--kind", "lines", "--out", self.folder / "no" / "out",
                             "--eval-fraction", "1.5")
        self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1))

    def test_an_input_is_not_replaced(self):
        text = "".join(f"int line_{i} = {i};\n" for i in range(90))
        (self.folder / "a.c").write_text(text)
        for name, *options in (("make_questions.py", "--kind", "lines"), ("prepare_eval.py", "--task", "text_choice"), ("make_instructions.py",)):
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
        for name, *options in (("make_questions.py", "--kind", "lines"), ("make_instructions.py",)):
            result = self.script(name, self.folder / "text", "--out", self.folder / "out.jsonl", *options)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertRegex(result.stderr, r"^[a-z_]+: \S+/text/link: links to folders are not followed; .*\n$")


class Scores(Folder):
    def predictions(self, name, right, task="lines", labels=None):
        """A file of a run that answers `right` of the documents right."""
        path = self.folder / name
        with open(path, "w", encoding="utf-8") as file:
            for number, is_right in enumerate(right):
                label = number % 3
                scores = [-5.0, -5.0, -5.0]
                scores[label if is_right else (label + 1) % 3] = -1.0
                file.write(json.dumps({"task": task, "document": number, "label": label, "log_likelihood": scores}) + "\n")
        return path

    def test_scores_and_standard_errors(self):
        first = [1] * 60 + [0] * 40
        second = [1] * 50 + [0] * 10 + [1] * 5 + [0] * 35
        files = f"bf16.1={self.predictions('a', first)}", f"parka.1={self.predictions('b', second)}"
        result = self.script("task_scores.py", *files, "--json", "--model", "m")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        found = {line["name"]: line for line in map(json.loads, result.stdout.splitlines())}
        self.assertEqual(list(found), ["tasks.m.bf16.1.lines.acc", "tasks.m.parka.1.lines.acc", "tasks.m.parka.1.lines.vs_bf16.1"])
        for name, share in (("bf16.1.lines.acc", 0.6), ("parka.1.lines.acc", 0.55)):
            error = math.sqrt(share * (1 - share) / 99)
            figure = found["tasks.m." + name]
            for value, wanted in zip((figure["value"], *figure["interval"]), (share, share - error, share + error)):
                self.assertAlmostEqual(value, wanted)
        difference = found["tasks.m.parka.1.lines.vs_bf16.1"]
        # 10 documents less and 5 more: the mean of the squares is 0.15.
        error = math.sqrt((0.15 - 0.05**2) / 99)
        for value, wanted in zip((difference["value"], *difference["interval"]), (-0.05, -0.05 - error, -0.05 + error)):
            self.assertAlmostEqual(value, wanted)
        table = self.script("task_scores.py", *files).stdout.splitlines()
        self.assertEqual(table[2].split(), ["lines", "parka.1", "100", "55.00%", f"{math.sqrt(0.55 * 0.45 / 99):.2%}", "-5.00%", f"{error:.2%}"])

    def test_bad_input(self):
        good, other = self.predictions("good", [1, 0, 1]), self.predictions("other", [1, 0])
        broken = self.folder / "broken"
        broken.write_text('{"task": "lines"}\n')
        for message, *arguments in (
                ("has answered other documents of lines than a", f"a={good}", f"b={other}"), ("expected RUN=FILE", good),
                ("each RUN once", f"a={good}", f"a={other}"), (":1: is no prediction", f"a={broken}"),
                ("cannot be read", f"a={self.folder / 'absent'}"), ("--json: the names", f"a={good}", "--json")):
            with self.subTest(message):
                result = self.script("task_scores.py", *arguments)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"^task_scores.py: error: .*{message}.*\n$")


if __name__ == "__main__":
    unittest.main()
