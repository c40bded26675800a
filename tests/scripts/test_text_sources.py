#!/usr/bin/env python3
"""Tests of what scripts/prepare_data.py reads, in several processes and after a kill. Exits with 77 (skipped) where a
package is missing."""

import gzip
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest
from pathlib import Path

try:
    import numpy
    import pyarrow.parquet
    import tokenizers
except ImportError:
    print("skipped: numpy, pyarrow or tokenizers is missing")
    sys.exit(77)

from preparation import SCRIPT, Preparation, prepare_data  # noqa: E402

TEXTS = [f"document {i} " + "é<&>\n" * (i % 50) for i in range(700)]
FIELD = ["--jsonl-field", "text"]


def zstd(content):
    """Two frames, as tools that compress in parallel write them."""
    codec = pyarrow.Codec("zstd")
    half = len(content) // 2
    return b"".join(codec.compress(part, asbytes=True) for part in (content[:half], content[half:]))


def jsonl(texts, **more):
    return "".join(json.dumps({"id": i, "text": text, **more}) + "\n" for i, text in enumerate(texts)).encode()


def hashes_of(folder):
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


class Files(Preparation):
    def bytes_of(self, *arguments):
        """The files that it makes, by name, and data.json."""
        self.out = self.folder / f"out{len(list(self.folder.glob('out*')))}"
        code, error = self.call_in_this_process(*arguments)
        self.assertEqual(code, 0, error)
        return hashes_of(self.out)


class Sources(Files):
    def write_data_set(self, name, texts, tables=2):
        """As save_to_disk of Hugging Face's datasets library writes it; its tables are not in the order of their names."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        names = [f"data-{tables - 1 - i:05d}-of-{tables:05d}.arrow" for i in range(tables)]
        size = len(texts) // tables
        for i, file_name in enumerate(names):
            part = texts[i * size : (i + 1) * size if i < tables - 1 else None]
            table = pyarrow.table({"id": list(range(len(part))), "text": part})
            with pyarrow.ipc.new_stream(folder / file_name, table.schema) as writer:
                writer.write_table(table, max_chunksize=100)
        (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": n} for n in names]}))
        (folder / "dataset_info.json").write_text('{"features": {}}')
        return folder

    def test_the_same_corpus_in_every_form_gives_the_same_bytes(self):
        for i, text in enumerate(TEXTS):
            self.write(f"text/{i:05d}.txt", text)
        plain = jsonl(TEXTS)
        table = pyarrow.table({"id": list(range(len(TEXTS))), "text": TEXTS})
        pyarrow.parquet.write_table(table, self.folder / "a.parquet", row_group_size=300)
        pyarrow.parquet.write_table(table, self.folder / "large.parquet", compression="zstd")
        with pyarrow.ipc.new_file(self.folder / "file.arrow", table.schema) as writer:
            writer.write_table(table)
        options = ["--eval-fraction", "0.1"]
        want = self.bytes_of(self.folder / "text", *options)
        for path in (
            self.write("a.jsonl", plain),
            self.write("bom.jsonl", b"\xef\xbb\xbf" + plain),
            self.write("a.json.gz", gzip.compress(plain)),
            self.write("a.jsonl.zst", zstd(plain)),
            self.write("gzip_without_its_name", gzip.compress(plain)),
            self.write("zstd_without_its_name", zstd(plain)),
            self.folder / "a.parquet",
            self.folder / "large.parquet",
            self.folder / "file.arrow",
            self.write_data_set("saved", TEXTS),
        ):
            with self.subTest(path=path.name):
                self.assertEqual(self.bytes_of(path, *options, *FIELD), want)

    def test_text_may_be_compressed(self):
        want = self.bytes_of(self.write("a.txt", "some text\n"))
        self.assertEqual(self.bytes_of(self.write("a.txt.zst", zstd(b"some text\n"))), want)
        self.assertEqual(self.bytes_of(self.write("a.txt.gz", gzip.compress(b"some text\n"))), want)

    def test_json_is_never_read_as_plain_text(self):
        record = jsonl(["a", "b"])
        message = "is JSON, not plain text; name the field of its text with --jsonl-field"
        for name, content in (
            ("c4-train.00000-of-01024.json.gz", gzip.compress(record)),
            ("c4-train.00000-of-01024.json", record),
            ("dolma.json.zst", zstd(record)),
            ("records.txt", b"\n \n" + record),
            ("no_suffix", b"\xef\xbb\xbf" + record),
            ("array.txt", b'[{"text": "a"}, {"text": "b"}]'),
            ("alpaca_data.json", b'[\n    {\n        "instruction": "a"\n    }\n]\n'),
            ("pretty.json", b'{\n  "text": "a"\n}\n'),
            ("a.ndjson", b"null\n"),
        ):
            with self.subTest(name=name):
                self.refuse(message, self.write(f"json/{name}", content))
                self.refuse(message, self.folder / "json")
                (self.folder / "json" / name).unlink()
        # What only looks like JSON is text.
        self.write("text/a.txt", "[1] a list of references\n")
        self.write("text/b.txt", "{a set}\n")
        self.write("text/c.txt", "[1, 2]\n")
        self.assertEqual(self.prepare(self.folder / "text")["train"]["documents"], 3)

    def test_a_name_of_the_hub_gets_the_command_that_fetches_it(self):
        for name in ("HuggingFaceFW/fineweb-edu", "allenai/c4", "tatsu-lab/alpaca"):
            self.refuse(f"hf download {name} --repo-type dataset --local-dir {name.split('/')[1]}", name, *FIELD)
        for name in (self.folder / "none/texts", "none", "none/texts.jsonl"):
            _, error = self.call_in_this_process(name, *FIELD)
            self.assertNotIn("hf download", error)

    def test_json_gets_only_advice_that_the_script_can_follow(self):
        path = self.write("a.jsonl", '{"messages": []}\n')
        for name, takes_chat, *options in (
            ("prepare_data", True), ("train_tokenizer", False), ("research/make_questions", False, "--kind", "lines")
        ):
            with self.subTest(name):
                command = [sys.executable, SCRIPT.parent / f"{name}.py", path, "--out", self.folder / "out", *options]
                result = subprocess.run(command, capture_output=True, text=True, timeout=300)
                self.assertEqual(result.returncode, 2, result.stderr)
                for_chat = " use --chat for conversations," if takes_chat else ""
                advice = f"name the field of its text with --jsonl-field,{for_chat} or choose other files with --include"
                self.assertIn(f"a.jsonl: is JSON, not plain text; {advice}\n", result.stderr)

    def test_a_field_that_is_there_but_is_not_text(self):
        kinds = {"true or false": True, "a number": 0.5, "an array": ["a"], "an object": {}}
        for kind, value in kinds.items():
            with self.subTest(kind=kind):
                path = self.write("a.jsonl", jsonl(["a", value]))
                self.refuse(f'a.jsonl:2: the field "text" is {kind}, not text; leave such records out of the file', path, *FIELD)

    def test_bad_tables(self):
        table = pyarrow.table({"id": [1, 2], "text": ["a", None], "raw": [b"a", b"b"]})
        path = self.folder / "a.parquet"
        pyarrow.parquet.write_table(table, path)
        splits = self.folder / "splits"
        self.write_data_set("splits/train", TEXTS)
        (splits / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
        broken = self.write("broken/state.json", "{}").parent
        self.write("broken/dataset_info.json", "{}")
        cut = self.write("cut.parquet", path.read_bytes()[:-20])
        data_set = self.write_data_set("cut", TEXTS, tables=1)
        arrow = data_set / "data-00000-of-00001.arrow"
        arrow.write_bytes(arrow.read_bytes()[: 2 * arrow.stat().st_size // 3])
        for message, *arguments in (
            ("a.parquet: is a table; name the column of its text with --jsonl-field: it has id, text, raw", path),
            ("a.parquet: has no column body; it has id, text, raw", path, "--jsonl-field", "body"),
            ('a.parquet, row 1: the field "id" is a number, not text; leave such records out', path, "--jsonl-field", "id"),
            ('a.parquet, row 1: the field "raw" is of type bytes, not text', path, "--jsonl-field", "raw"),
            ("cut.parquet: ", cut, *FIELD),
            ("arrow: ", data_set, *FIELD),
            ("splits: is a data set with splits; give one or more of them: train, test", splits, *FIELD),
            ("broken: is a data set that cannot be read", broken, *FIELD),
            ("bad.zst: ends in .zst, but is text", self.write("bad.zst", b"not zstd")),
            ("cut.jsonl.zst: cannot be read (Truncated", self.write("cut.jsonl.zst", zstd(jsonl(TEXTS))[:-9]), *FIELD),
        ):
            with self.subTest(message=message):
                self.refuse(message, *arguments)

    def test_a_table_that_a_data_set_lacks_is_named(self):
        folder = self.write_data_set("saved", TEXTS)
        missing = folder / "data-00000-of-00002.arrow"
        missing.unlink()
        self.refuse(f"{missing}: is not there, but state.json beside it names it; fetch it", folder, *FIELD)
        self.refuse(f"{missing}: is not there", self.folder, *FIELD)
        missing.symlink_to("../blobs/of_00000")
        self.refuse(f"{missing}: is a link to ../blobs/of_00000, which is not there", folder, *FIELD)
        found = self.bytes_of(folder, *FIELD, "--include", "data-00001-*")  # the other one was not asked for
        self.assertEqual(found, self.bytes_of(folder / "data-00001-of-00002.arrow", *FIELD))

    def test_conversations_from_a_table(self):
        chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": "yes", "weight": 1}]
                 for i in range(20)]
        lines = self.write("chats.jsonl", "".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        pyarrow.parquet.write_table(pyarrow.table({"messages": chats}), self.folder / "chats.parquet")
        options = ["--chat", "chatml", "--sequence-length", "64"]
        self.assertEqual(self.bytes_of(lines, *options), self.bytes_of(self.folder / "chats.parquet", *options))


class NotUtf8(Files):
    """Text in Latin-1 among records."""
    texts = ["first", "caf\u00e9", "third \u00e9\u4e2d"]
    raw = [b"first", b"caf\xe9", "third \u00e9\u4e2d".encode()]

    def write_forms(self):
        """The records as JSON Lines and as tables of each type of text; of a dictionary of texts, too."""
        yield self.write("a.jsonl", b"".join(b'{"id": 1, "text": "' + text + b'"}\n' for text in self.raw))
        column = pyarrow.array(self.raw, pyarrow.binary())
        for kind in (pyarrow.string(), pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string())):
            text = column.cast(pyarrow.string(), safe=False)
            table = pyarrow.table({"text": text.dictionary_encode() if pyarrow.types.is_dictionary(kind) else text.cast(kind)})
            pyarrow.parquet.write_table(table, self.folder / f"{kind.id}.parquet")
            with pyarrow.ipc.new_file(self.folder / f"{kind.id}.arrow", table.schema) as writer:
                writer.write_table(table)
        yield from sorted([*self.folder.glob("*.parquet"), *self.folder.glob("*.arrow")])

    def test_records_are_judged_as_files_of_text_are(self):
        for number, text in enumerate(self.raw):
            self.write(f"text/{number}.txt", text)
        want = [self.bytes_of(self.folder / "text", *options) for options in ([], ["--utf8-only"])]
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"</s>": 0, "[UNK]": 1}, unk_token="[UNK]"))
        words.save(str(self.folder / "tokenizer.json"))
        for path in self.write_forms():
            with self.subTest(path.name):
                self.assertEqual([self.bytes_of(path, *FIELD, *options) for options in ([], ["--utf8-only"])], want)
                self.out = self.folder / "refused"
                place = f"{path}:2" if path.suffix == ".jsonl" else f"{path}, row 2"
                message = f"{place}: is not UTF-8 (byte 3 of a document); convert it, or leave it out with --utf8-only"
                self.refuse(message, path, *FIELD, "--tokenizer", self.folder / "tokenizer.json")
        info = json.loads((self.folder / "out1" / "data.json").read_text())
        self.assertEqual(info["left_out"]["not_utf8_documents"], 1)

    def test_conversations_are_text_with_every_tokenizer(self):
        chats = [[{"role": "user", "content": text}, {"role": "assistant", "content": "yes"}] for text in self.texts]
        lines = "".join(json.dumps({"messages": chat}, ensure_ascii=False) + "\n" for chat in chats).encode()
        column = pyarrow.array([text for raw in self.raw for text in (raw, b"yes")]).cast(pyarrow.string(), safe=False)
        roles = pyarrow.array(["user", "assistant"] * 3)
        messages = pyarrow.StructArray.from_arrays([roles, column], ["role", "content"])
        table = pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 2, 4, 6], messages)})
        pyarrow.parquet.write_table(table, self.folder / "a.parquet")
        good = self.write("good.jsonl", b"".join(lines.splitlines(keepends=True)[::2]))
        options = ["--chat", "chatml", "--sequence-length", "128", "--utf8-only"]
        self.bytes_of(good, *options)
        want = self.ids()
        for path, place in (
            (self.write("a.jsonl", lines.replace("caf\u00e9".encode(), b"caf\xe9")), "a.jsonl:2"),
            (self.folder / "a.parquet", "a.parquet, row 2"),
        ):
            with self.subTest(path.name):
                self.bytes_of(path, *options)
                self.assertEqual(self.ids(), want)
                info = json.loads((self.out / "data.json").read_text())
                self.assertEqual(info["left_out"]["not_utf8_documents"], 1)
                self.out = self.folder / "refused"
                self.refuse(f"{place}: is not UTF-8 (byte ", path, *options[:-1])

    def test_what_json_spells_is_no_bad_byte(self):
        """Halves of surrogate pairs are question marks, also beside bad bytes."""
        lines = rb'{"text": "\udce9 \ud83d\ude00"}', b'{"text": "\\ud83d caf\xe9"}', b'{"text": "a", "by": "\xe9"}'
        self.bytes_of(self.write("a.jsonl", b"\n".join(lines)), *FIELD)
        self.assertEqual(bytes(i for i in self.ids() if i < 256), "? \U0001f600? caf".encode() + b"\xe9a")
        self.out = self.folder / "refused"
        self.refuse("a.jsonl:1: is not JSON", self.write("a.jsonl", b'{"text": "caf\xe9\n'), *FIELD, "--utf8-only")
        self.refuse("a.txt: is JSON, not plain text", self.write("a.txt", b'{"text": "caf\xe9"}\n'))


class Workers(Files):
    options = ["--eval-fraction", "0.02", *FIELD]

    def slow_options(self):
        """With a tokenizer that takes about a second for a file."""
        words = {f"w{i}": i for i in range(2000)} | {"</s>": 2000, "[UNK]": 2001}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.save(str(self.folder / "tokenizer.json"))
        return [*self.options, "--tokenizer", self.folder / "tokenizer.json"]

    def write_corpus(self, files):
        """Files of more than 4 MiB, each a part of its own, with documents that are in several files or twice in one."""
        words = " ".join(f"w{i % 2000}" for i in range(0, 14000, 7))
        shared = [f"w{i} w1 shared" for i in range(50)]
        for number in range(files):
            texts = [f"w{number} w{i} {words}" for i in range(400)]
            self.write(f"corpus/{number}.jsonl", jsonl(texts + shared + texts[:5] + [""]))
        return self.folder / "corpus"

    def test_two_workers_give_the_bytes_of_one(self):
        corpus = self.write_corpus(3)
        want = self.bytes_of(corpus, *self.options)
        info = json.loads((self.out / "data.json").read_text())
        self.assertEqual(info["left_out"], {"duplicate_documents": 115, "empty_documents": 3, "binary_files": 0})
        self.assertEqual(self.bytes_of(corpus, *self.options, "--workers", "2"), want)
        limit = [*self.options, "--max-tokens", "1000001"]
        self.assertEqual(self.bytes_of(corpus, *limit, "--workers", "2"), self.bytes_of(corpus, *limit))
        info = json.loads((self.out / "data.json").read_text())
        self.assertEqual(info["train"]["tokens"] + info["eval"]["tokens"], 1000001)

    def test_an_error_in_a_worker_is_one_line(self):
        corpus = self.write_corpus(1)
        self.write("corpus/z.jsonl", jsonl(["a"]) + b"{\n")
        result = self.call(corpus, *self.options, "--workers", "2")
        self.assertEqual(result.returncode, 2)
        self.assertRegex(result.stderr, r"(?m)^prepare_data: error: [^\n]*z.jsonl:2: is not JSON[^\n]*\n\Z")
        self.assertNotIn("Traceback", result.stderr)

    def test_an_error_ends_workers_that_have_large_groups_before_them(self):
        result = subprocess.run([sys.executable, Path(__file__).with_name("failing_parts.py"), self.folder], capture_output=True,
                                text=True, timeout=60, check=False)
        self.assertEqual((result.stdout, result.stderr, result.returncode), ("a group of 10000 fails\n", "", 0))

    def test_a_killed_run_goes_on_where_it_was(self):
        corpus = self.write_corpus(3)
        options = self.slow_options()
        want = self.bytes_of(corpus, *options)
        self.out = self.folder / "killed"
        for workers in ("1", "2"):
            with self.subTest(workers=workers):
                command = [sys.executable, SCRIPT, corpus, *options, "--workers", workers, "--out", self.out]
                process = subprocess.Popen(list(map(str, command)), stderr=subprocess.DEVNULL)
                partial = self.folder / ".killed.partial"
                while not list(partial.glob("*.npz")):
                    self.assertIsNone(process.poll())
                    time.sleep(0.01)
                process.send_signal(signal.SIGKILL)
                process.wait()
                made = len(list(partial.glob("*.npz")))
                result = self.call(corpus, *options)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn(f"continues: {made} of 3 parts are there", result.stderr)
                got = hashes_of(self.out)
                self.assertEqual(got, want)
                self.assertFalse(partial.exists())
                shutil.rmtree(self.out)

    def test_a_killed_worker_ends_the_run_with_a_message(self):
        corpus = self.write_corpus(3)
        command = [sys.executable, SCRIPT, corpus, *self.slow_options(), "--workers", "2", "--out", self.folder / "out"]
        process = subprocess.Popen(list(map(str, command)), stderr=subprocess.PIPE, text=True)
        workers = []
        while not workers:
            self.assertIsNone(process.poll())
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            workers = [child for child in children if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]
        os.kill(int(workers[0]), signal.SIGKILL)
        _, error = process.communicate()
        self.assertEqual(process.returncode, 2, error)
        self.assertIn("error: a worker process died, perhaps because memory ran out; use fewer --workers\n", error)
        self.assertNotIn("Traceback", error)

    def test_parts_of_other_options_or_other_files_are_not_used(self):
        corpus = self.write_corpus(2)
        bad = self.write("corpus/z.jsonl", b"{\n")
        self.out = self.folder / "out"
        result = self.call(corpus, *self.options)
        self.assertEqual(result.returncode, 2)
        self.assertIn("out.partial: the command continues once what the error says is changed\n", result.stderr)
        self.assertEqual(len(list(self.folder.glob(".out.partial/*.npz"))), 2)
        bad.write_bytes(jsonl(["repaired"]))
        result = self.call(corpus, *self.options)  # the last part holds another file now
        self.assertIn("continues: 2 of 3 parts are there", result.stderr)
        self.assertEqual(result.returncode, 0, result.stderr)
        bad.write_bytes(b"{\n")
        self.out = self.folder / "out2"
        self.assertEqual(self.call(corpus, *self.options).returncode, 2)
        bad.write_bytes(jsonl(["repaired"]))
        result = self.call(corpus, *self.options, "--keep-duplicates")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertNotIn("continues", result.stderr)

    def test_one_run_at_a_time_makes_a_folder(self):
        with prepare_data.Partial(self.folder / "out", print):
            code, error = self.call_in_this_process(self.write("a.txt", "a"))
        self.assertEqual(code, 2)
        self.assertIn("out: another run is making it", error)

    def test_progress_has_rate_and_time_left(self):
        progress = prepare_data.parts.make_progress()
        progress.add(25_000_000, 1_000_000)
        self.assertEqual(
            progress.line(100_000_000, 2.0),
            "25.0 % of 0.100 GB read, 1,000,000 tokens, 500,000 tokens/s, 0:00:06 left",
        )


if __name__ == "__main__":
    unittest.main()
