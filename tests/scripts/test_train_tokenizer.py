#!/usr/bin/env python3
"""Tests of scripts/train_tokenizer.py. Exits with 77 (skipped) where tokenizers or numpy is missing."""
import gzip
import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    import numpy
    from tokenizers import Tokenizer
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)
try:
    import pyarrow.parquet
except ImportError:
    pyarrow = None

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import train_tokenizer  # noqa: E402
from text_data.readers import Reading  # noqa: E402

TEXT = "the loss of the model falls while the model learns the text\n" * 50


class TrainTokenizer(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        (self.folder / "text").mkdir()
        (self.folder / "text" / "a.txt").write_text(TEXT)

    def script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / "train_tokenizer.py", *map(str, arguments)], capture_output=True, text=True)

    def trained(self, name, *arguments):
        result = self.script(self.folder / "text", "--out", self.folder / name, *arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        return self.folder / name

    def test_ids_are_words_of_the_text_and_any_bytes_and_the_end_of_a_document(self):
        path = self.trained("t.json", "--vocab-size", "280")
        tokenizer = Tokenizer.from_file(str(path))
        self.assertEqual(tokenizer.get_vocab_size(), 280)
        self.assertEqual(tokenizer.token_to_id("<|endoftext|>"), 279)
        self.assertEqual(len(tokenizer.encode(" the the").ids), 2)
        for other in ("na\xefve \u6e2c \t\r\n  x", TEXT):
            self.assertEqual(tokenizer.decode(tokenizer.encode(other).ids), other)

    def test_equal_text_gives_an_equal_file(self):
        self.assertEqual(self.trained("a.json").read_bytes(), self.trained("b.json").read_bytes())

    def test_prepare_data_takes_it(self):
        path = self.trained("t.json", "--vocab-size", "280")
        made = subprocess.run([sys.executable, SCRIPTS / "prepare_data.py", self.folder / "text", "--tokenizer", path, "--out",
                               self.folder / "tokens"], capture_output=True, text=True)
        self.assertEqual(made.returncode, 0, made.stderr)
        info = json.loads((self.folder / "tokens" / "data.json").read_text())
        self.assertEqual((info["vocab_size"], info["eos"]), (280, 279))

    def test_more_text_than_wanted_is_thinned_evenly(self):
        files = []
        for number in range(90):
            files.append(self.folder / f"{number:02}.txt")
            files[-1].write_text(f"{number:02}" * 50)
        taken = [int(document[:2]) for document in train_tokenizer.sampled_documents(files, Reading(), 3000)]
        self.assertEqual(taken, [*range(0, 90, 3)])
        self.assertEqual(len(list(train_tokenizer.sampled_documents(files, Reading(), 9000))), 90)

    def test_of_few_long_documents_all_have_their_share(self):
        """A short or empty one before them is not all that is read."""
        for first in ("", "a few words"):
            files = [self.folder / "README"]
            files[0].write_text(first)
            for number in range(8):
                files.append(self.folder / f"{number}.txt")
                files[-1].write_text(f"{number}" * 2000)
            taken = [*train_tokenizer.sampled_documents(files, Reading(), 2000)][1 if first else 0:]
            self.assertEqual([document[0] for document in taken], list("01234567"))
            self.assertTrue(1900 < sum(map(len, taken)) <= 2000)
            self.assertTrue(all(200 < len(document) < 300 for document in taken))
        self.assertEqual("".join(train_tokenizer.sampled_documents(files[1:2], Reading(), 700)), "0" * 700)
        self.assertEqual(len("".join(train_tokenizer.sampled_documents(files, Reading(), 10**6))), 8 * 2000 + len(first))

    def test_compressed_text_is_thinned_by_what_it_holds(self):
        lines = "".join(json.dumps({"id": i, "text": f"{i} some words of a document"}) + "\n" for i in range(4000)).encode()
        plain, packed = self.folder / "a.jsonl", self.folder / "a.jsonl.gz"
        plain.write_bytes(lines)
        packed.write_bytes(gzip.compress(lines))
        whole = len("".join(json.loads(line)["text"] for line in lines.splitlines()))
        for limit in (whole // 10, 2 * whole):
            of_plain, of_packed = ([*train_tokenizer.sampled_documents([path], Reading("text"), limit)] for path in (plain, packed))
            self.assertEqual(of_packed, of_plain)
            taken = len("".join(of_plain))
            self.assertTrue(min(limit, whole) // 2 < taken <= min(limit, whole), taken)

    @unittest.skipIf(pyarrow is None, "pyarrow is missing")
    def test_tables_are_thinned_by_what_their_rows_hold(self):
        """Parquet is read ahead of its rows, and a large column beside the text is not read at all."""
        texts = [f"{i} " + "some words of a document " * 20 for i in range(8000)]
        whole = sum(map(len, texts))
        random = numpy.random.default_rng(1)
        columns = {"packed": {"text": texts}, "beside": {"text": texts, "image": [random.bytes(4000) for _ in texts]}}
        for name, content in columns.items():
            table = pyarrow.table(content)
            pyarrow.parquet.write_table(table, self.folder / f"{name}.parquet", compression="zstd")
            for kind, make in (("file", pyarrow.ipc.new_file), ("stream", pyarrow.ipc.new_stream)):
                with make(self.folder / f"{name}.{kind}.arrow", table.schema) as writer:
                    writer.write_table(table)
        with mock.patch.object(train_tokenizer, "MEASURED_BYTES", whole // 20):
            for path in [*self.folder.glob("*.parquet"), *self.folder.glob("*.arrow")]:
                with self.subTest(path.name):
                    self.assertAlmostEqual(train_tokenizer.text_bytes([path], Reading("text")) / whole, 1, delta=0.02)

    def test_the_fewest_ids_are_the_bytes_and_the_end(self):
        for number, options in enumerate((["--vocab-size", "257"], [])):
            (self.folder / "text" / "a.txt").write_text("hello\n" if number else TEXT)  # nothing in it is there twice
            tokenizer = Tokenizer.from_file(str(self.trained(f"{number}.json", *options)))
            self.assertEqual((tokenizer.get_vocab_size(), tokenizer.token_to_id("<|endoftext|>")), (257, 256))

    def test_bad_input(self):
        (self.folder / "empty.txt").touch()
        text, out = self.folder / "text", self.folder / "t.json"
        for message, code, *arguments in (
                ("no such file or folder", 2, self.folder / "nowhere", "--out", out),
                ("--vocab-size is 256; give at least 257", 2, text, "--out", out, "--vocab-size", 256),
                ("--vocab-size is 1000000000; give at least 257 and at most", 2, text, "--out", out, "--vocab-size", 10**9),
                ("--max-bytes is 0", 2, text, "--out", out, "--max-bytes", 0), ("no text in", 2, self.folder / "empty.txt", "--out", out),
                ("cannot be made", 2, text, "--out", self.folder / "empty.txt" / "t.json"),
                ("is the input .*, which it would replace", 2, text / "a.txt", "--out", text / "a.txt")):
            with self.subTest(message):
                result = self.script(*arguments)
                self.assertEqual(result.returncode, code)
                self.assertRegex(result.stderr, f"^train_tokenizer: error: .*{message}.*\n$")
        self.assertFalse(out.exists())
        self.assertEqual((text / "a.txt").read_text(), TEXT)

    def test_a_failed_write_leaves_the_file_that_was_there(self):
        out = self.trained("made/t.json")
        before = out.read_bytes()
        command = f"trap '' XFSZ; ulimit -f 1; exec '{sys.executable}' '{SCRIPTS}/train_tokenizer.py' '{self.folder}/text' --out '{out}'"
        result = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
        self.assertEqual(result.returncode, 4)
        self.assertRegex(result.stderr, "^train_tokenizer: error: .*File too large.*\n$")
        self.assertEqual((out.read_bytes(), os.listdir(out.parent)), (before, ["t.json"]))

    def test_what_cannot_be_written_is_refused_before_training(self):
        text = ("import sys, tokenizers, train_tokenizer\n"
                "tokenizers.Tokenizer.train_from_iterator = lambda *_: sys.exit('it trains')\nsys.exit(train_tokenizer.main())\n")
        (self.folder / "file").touch()
        result = subprocess.run([sys.executable, "-c", text, self.folder / "text", "--out", self.folder / "file" / "t.json"],
                                capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(SCRIPTS)})
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertRegex(result.stderr, "error: .*cannot be made .*\n$")

    def test_signals_end_it_at_once_and_without_a_word(self):
        text = ("import signal, sys, time, train_tokenizer\n"
                "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # which whoever runs the tests may ignore
                "def documents(*_):\n    print('training', flush=True)\n    time.sleep(60)\n    yield 'text'\n"
                "train_tokenizer.sampled_documents = documents\nsys.exit(train_tokenizer.main())\n")
        command = [sys.executable, "-c", text, str(self.folder / "text"), "--out", str(self.folder / "t.json")]
        for number in (signal.SIGINT, signal.SIGTERM):
            with self.subTest(number), subprocess.Popen(command, env=os.environ | {"PYTHONPATH": str(SCRIPTS)}, text=True,
                                                        stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
                self.assertEqual(process.stdout.readline(), "training\n")
                process.send_signal(number)
                self.assertEqual(process.communicate(timeout=30), ("", ""))
                self.assertEqual(process.returncode, -number)
        self.assertEqual(os.listdir(self.folder), ["text"])

    def test_a_linked_folder_of_text_is_named(self):
        (self.folder / "elsewhere").mkdir()
        (self.folder / "text" / "link").symlink_to("../elsewhere")
        result = self.script(self.folder / "text", "--out", self.folder / "t.json")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, r"^train_tokenizer: warning: \S+/text/link: links to folders are not followed; .*\n$")

    def test_what_it_wrote_among_the_text_is_no_text_the_next_time(self):
        first = self.trained("text/t.json").read_bytes()
        self.assertEqual(self.trained("text/t.json").read_bytes(), first)

    def test_a_link_among_the_text_may_lead_to_where_it_writes(self):
        (self.folder / "text" / "link").symlink_to("../made")
        self.trained("text/link")
        self.assertTrue((self.folder / "made").is_file())


if __name__ == "__main__":
    unittest.main()
