#!/usr/bin/env python3
"""Tests that scripts end with one line and an exit code, whatever their input is and wherever their output goes. Exits with 77
(skipped) where a package is missing."""

import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    import numpy  # noqa: F401
    import tokenizers
except ImportError:
    print("skipped: numpy or tokenizers is missing")
    sys.exit(77)

from preparation import SCRIPT, Preparation  # noqa: E402

import script_exit  # noqa: E402
from text_data.common import MOST_QUOTED, InputError, one_line, printable  # noqa: E402

SCRIPTS = SCRIPT.parent
FOLLOWING = ("compare.py", "follow.py", "plot.py", "task_scores.py")
PREPARING = ("prepare_data.py", "prepare_eval.py", "prepare_images.py", "train_tokenizer.py")


class Endings(unittest.TestCase):
    def ended(self, run):
        """(exit code, lines)"""
        lines = []
        with mock.patch.object(sys, "argv", ["script"]):
            return script_exit.run_script(run, lines.append), lines

    def test_every_error_is_one_line(self):
        def raising(error):
            def run(arguments):
                raise error
            return run

        for error, code, word in (
            (InputError("a.txt: is bad;\nmend it"), 2, "a.txt"), (InputError(f"{'a' * 10_000}: is bad; mend it"), 2, "mend it"), (InputError("\x1b]0;title\x07"), 2, r"\x1b]0;title\x07"),
            (MemoryError("a.parquet: malloc"), 2, "a.parquet"), (MemoryError(), 2, "memory ran out"),
            (OSError(28, "No space left on device"), 4, "No space left"), (KeyError("text"), 1, "KeyError"),
            (RecursionError("a\nb"), 1, "a b"), (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates"), 1, "report"),
        ):
            with self.subTest(error=repr(error)):
                got, lines = self.ended(raising(error))
                self.assertEqual((got, len(lines)), (code, 1))
                self.assertRegex(lines[0], r"\Aerror: [^\n\x00-\x1f]{1,2000}\Z")
                self.assertIn(word, lines[0])
        self.assertEqual(self.ended(raising(SystemExit(4))), (4, []))
        self.assertEqual(self.ended(raising(SystemExit())), (0, []))
        self.assertEqual(self.ended(raising(KeyboardInterrupt())), (130, []))

    def test_a_defect_says_where_it_is(self):
        self.assertIn(f"({Path(__file__).name}:", self.ended(lambda arguments: {}["text"])[1][0])

    def test_what_libraries_quote_is_short_and_printable(self):
        for text in ("a" * 10_000, "b\0" * 5000, "\x9b31m\u202e\x7f"):
            got = one_line(ValueError(text))
            self.assertLessEqual(len(got), MOST_QUOTED + 3)
            self.assertTrue(got.isprintable(), got)
        self.assertEqual(printable("na\u00efve \u4e2d\nb\tc"), "na\u00efve \u4e2d b\\x09c")


class Streams(Preparation):
    def run_to(self, redirection, name, *arguments):
        command = f'exec "$@" {redirection}'
        return subprocess.run(["bash", "-c", command, "bash", sys.executable, SCRIPTS / name, *map(str, arguments)], capture_output=True,
                              text=True, timeout=60)

    def test_help_on_a_full_disk(self):
        for name in (*FOLLOWING, *PREPARING):
            with self.subTest(name):
                result = self.run_to(">/dev/full", name, "--help")
                if sys.version_info >= (3, 12) and result.returncode == 0:
                    self.assertEqual(result.stderr, "")  # argparse itself passes over it
                    continue
                self.assertEqual(result.returncode, 4, result.stderr)
                self.assertRegex(result.stderr, r"\A[a-z_.]+: error: writing failed: [^\n]*No space left[^\n]*\n\Z")

    def test_help_that_nobody_reads_to_its_end(self):
        for name in ("compare.py", "follow.py", "prepare_data.py"):
            result = self.run_to("| true", name, "--help")
            self.assertEqual(result.stderr, "")

    def test_closed_streams(self):
        text = self.write("a.txt", "text")
        for redirection in (">&-", "2>&-", "<&-", ">&- 2>&- <&-"):
            with self.subTest(redirection):
                out = self.folder / redirection.replace(" ", "")
                result = self.run_to(redirection, "prepare_data.py", text, "--out", out)
                self.assertEqual((result.returncode, result.stderr), (0, ""))
                self.assertTrue((out / "data.json").exists())
        result = self.run_to("2>&-", "prepare_data.py", self.folder / "none", "--out", self.folder / "refused")
        self.assertEqual((result.returncode, result.stdout), (2, ""))

    def test_output_on_a_full_disk(self):
        text = self.write("a.txt", "text")
        result = self.run_to(">/dev/full", "prepare_data.py", text, "--out", self.folder / "made")
        self.assertEqual(result.returncode, 4)
        self.assertRegex(result.stderr, r"\Aprepare_data: error: writing failed: [^\n]*\n\Z")
        self.write("runs/a/metrics.jsonl", "".join(json.dumps({"kind": "train", "step": n, "loss": 1.0}) + "\n" for n in range(1, 9)))
        runs = f"a={self.folder}/runs/a", f"b={self.folder}/runs/a"
        for more in ((), ("--json",)):
            result = self.run_to(">/dev/full", "compare.py", *runs, *more)
            self.assertEqual(result.returncode, 4)
            self.assertRegex(result.stderr, r"\Acompare.py: error: writing failed: [^\n]*\n\Z")


class Tokenizers(Preparation):
    """Files at which the library panics, which is no Exception."""

    def write_tokenizer(self, name, **changes):
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "[UNK]": 1}, unk_token="[UNK]"))
        content = json.loads(words.to_str()) | changes
        return self.write(f"{name}/tokenizer.json", json.dumps(content))

    def panicking(self):
        special = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        yield self.write_tokenizer("processor", post_processor={"type": "TemplateProcessing", "single": special, "pair": special, "special_tokens": {}})
        yield self.write_tokenizer("decoder", decoder={"type": "Strip", "content": " ", "start": 2**40, "stop": 0})
        yield self.write_tokenizer("pattern", pre_tokenizer={"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False})
        yield self.write_tokenizer("nothing", model={"type": "WordLevel", "vocab": {}, "unk_token": "[UNK]"})

    def test_a_panic_is_no_traceback(self):
        text = self.write("a.txt", "some text")
        for path in self.panicking():
            for workers in ("1", "2"):
                with self.subTest(path=path.parent.name, workers=workers):
                    self.out = self.folder / f"of_{path.parent.name}_{workers}"
                    result = self.call(text, "--tokenizer", path, "--workers", workers)
                    self.assertNotIn("most recent call", result.stderr)
                    self.assertIn(result.returncode, (0, 2), result.stderr)
                    if result.returncode == 2:
                        self.assertRegex(result.stderr, rf"(?m)^prepare_data: error: {path}: [^\n]*\n\Z")


if __name__ == "__main__":
    unittest.main()
