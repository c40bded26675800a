#!/usr/bin/env python3
"""Tests that scripts which prepare data refuse what is not what they read it as, by what it is. Exits with 77 (skipped) where a
package is missing."""

import bz2
import gzip
import io
import json
import lzma
import os
import resource
import socket
import subprocess
import sys
import unittest
import zipfile

try:
    import numpy
    import pyarrow.parquet
except ImportError:
    print("skipped: numpy or pyarrow is missing")
    sys.exit(77)

from preparation import SCRIPT, Preparation  # noqa: E402
from text_data import tables  # noqa: E402

FIELD = ["--jsonl-field", "text"]
LINES = b'{"text": "one"}\n{"text": "two"}\n'
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0123456789abcdef" * 4 + b"\nsize 123456789\n"
OLD_POINTER = POINTER.replace(b"git-lfs.github.com", b"hawser.github.com")
ANNEX = b"/annex/objects/SHA256E-s12--0123.parquet\n"
PAGE = b"\n<!DOCTYPE html><html><body>404 Not Found</body></html>\n"
ERROR = b'<?xml version="1.0" encoding="UTF-8"?>\n<Error><Code>AccessDenied</Code></Error>'
ZSTD_WITH_LONG_WINDOW = b"\x28\xb5\x2f\xfd" + bytes([0, (31 - 10) << 3]) + ((len(LINES) << 3) | 1).to_bytes(3, "little") + LINES


def parquet(columns):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), file)
    return file.getvalue()


def archive():
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as writer:
        writer.writestr("a.txt", "text")
    return file.getvalue()


def zstd(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


class Kinds(Preparation):
    def refuse_each(self, contents, names, word, *options):
        for content in contents:
            for name in names:
                with self.subTest(name=name, content=content[:20], options=options):
                    path = self.write(f"in/{name}", content)
                    self.refuse(word, self.folder / "in", *options)
                    self.refuse(name, path, *options)
                    path.unlink()

    def test_a_pointer_is_refused_by_every_name(self):
        names = ("a.parquet", "a.arrow", "a.jsonl", "a.json.gz", "a.txt.zst", "a.txt", "README", "a.html")
        for options in ([], FIELD, ["--chat", "chatml", "--sequence-length", "64"]):
            self.refuse_each((POINTER, OLD_POINTER), names, "git lfs pull", *options)
        self.refuse_each((ANNEX,), names, "git annex get")
        for number in range(5):
            self.write(f"in/{number}.txt", f"text {number}")
        self.refuse_each((POINTER,), ("3.txt",), "in/3.txt")
        # A text about pointers is text.
        self.write("about/a.md", POINTER + b"This is what a pointer looks like.\n" * 40)
        self.prepare(self.folder / "about")

    def test_a_pointer_is_no_tokenizer(self):
        for number, content in enumerate((POINTER, OLD_POINTER, ANNEX)):
            path = self.write(f"{number}/tokenizer.json", content)
            self.refuse(f"{number}/tokenizer.json: is a", self.write("a.txt", "text"), "--tokenizer", path)

    def test_what_lies_beside_a_tokenizer_is_refused_likewise(self):
        chats = self.write("chats.jsonl", '{"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]}')
        for name in ("a.jinja", "folder/chat_template.jinja", "other/tokenizer_config.json"):
            path = self.write(f"model/{name}", POINTER)
            given = path if name == "a.jinja" else path.parent
            options = ["--chat", given, "--sequence-length", "64"]
            with self.subTest(name):
                self.refuse(f"{path}: is a Git LFS pointer", chats, *options)
                path.write_text("[" * 100_000)
                if name.endswith(".json"):
                    self.refuse(f"{path}: is not JSON", chats, *options)
                path.unlink()
                os.mkfifo(path)
                if name != "folder/chat_template.jinja":  # where it is no file, the folder has none
                    self.refuse(f"{path}: is a pipe", chats, *options)

    def test_a_page_is_refused_where_a_table_or_records_are_meant(self):
        for options in ([], FIELD):
            self.refuse_each((PAGE, ERROR, b"\xef\xbb\xbf<html>"), ("a.parquet", "a.arrow", "a.json", "a.txt.gz", "a.zst"), "web page", *options)
        self.refuse_each((PAGE, ERROR), ("a.jsonl", "a.txt", "a"), "web page", *FIELD)
        self.refuse_each((gzip.compress(PAGE), zstd(ERROR)), ("a.json.gz", "a.txt.zst"), ": ", *FIELD)
        self.refuse("web page", self.write("b.json.gz", gzip.compress(PAGE)))

    def test_a_page_is_text_where_text_is_meant(self):
        for name, content in (("a.html", PAGE), ("b.xml", ERROR), ("c.html.gz", gzip.compress(PAGE + b" ")), ("d.txt", b"<p>a</p>"),
                              ("e.svg", b"<svg/>")):
            self.write(f"in/{name}", content)
        self.assertEqual(self.prepare(self.folder / "in")["train"]["documents"], 5)

    def test_names_that_promise_what_the_content_is_not(self):
        table = parquet({"text": ["one"]})
        for names, content in (
            (("a.parquet", "a.arrow"), LINES), (("a.parquet", "a.arrow"), b"plain"), (("a.parquet", "a.arrow"), gzip.compress(LINES)),
            (("a.gz",), LINES), (("a.gz",), zstd(LINES)), (("a.gz", "a.zst"), table), (("a.zst",), gzip.compress(LINES)), (("a.zst",), b"plain"),
        ):
            for options in ([], FIELD):
                self.refuse_each((content,), names, "ends in .", *options)
        # Inside of what is compressed there is no table and nothing that is compressed again.
        for content in (table, gzip.compress(LINES), zstd(LINES), lzma.compress(LINES), bz2.compress(LINES)):
            self.refuse_each((gzip.compress(content),), ("a.gz", "a.jsonl.gz", "a"), "ecompress", *FIELD)
        for content in (table, gzip.compress(LINES), zstd(LINES)):
            self.refuse_each((zstd(content),), ("a.zst", "a.jsonl.zst", "a"), "decompress")

    def test_a_table_is_read_by_any_name_that_promises_none(self):
        table = parquet({"text": ["one", "two"]})
        want = None
        for name in ("a.txt", "a.jsonl", "a", "a.arrow"):
            path = self.write(name, table)
            self.refuse(f"{name}: is a table; name the column", path)
            self.out = self.folder / f"of.{name}"
            self.prepare(path, *FIELD)
            want = want or self.ids()
            self.assertEqual(self.ids(), want)
            self.out = self.folder / "out"

    def test_what_has_to_be_decompressed_first(self):
        for content, word in ((lzma.compress(LINES), "xz -d"), (bz2.compress(LINES), "bzip2 -d"), (archive(), "unzip"),
                              (b"7z\xbc\xaf\x27\x1c" + bytes(50), "7z"), (b"\x04\x22\x4d\x18" + bytes(50), "lz4 -d"), (b"%PDF-1.7\n%", "PDF")):
            for options in ([], FIELD):
                self.refuse_each((content,), ("a.txt", "a.jsonl"), word, *options)
            self.refuse_each((content,), ("a", "a.zip"), word, *FIELD)
            self.refuse(word, self.write("given", content))
        # Text that is compressed is missed; of an archive among text it is not known, and it is left out as other binary files are.
        self.refuse_each((lzma.compress(b"text"), bz2.compress(b"text")), ("a", "a.log.xz", "a.bz2"), "decompress it")
        self.write("in/a.txt", "text")
        for name, content in (("b.zip", archive()), ("c.xz", lzma.compress(bytes(100))), ("d.pdf", b"%PDF-1.7\n%")):
            self.write(f"in/{name}", content)
        info = self.prepare(self.folder / "in")
        self.assertEqual((info["train"]["documents"], info["left_out"]["binary_files"]), (1, 3))

    def test_other_binary_files_hold_no_records(self):
        for content in (b"SQLite format 3\0", b"\x93NUMPY\1\0v\0", b"\x80\x04\x95\0\0\0"):
            self.refuse_each((content,), ("a.jsonl", "a", "a.npy"), "is binary", *FIELD)

    def test_a_large_window_of_zstandard_is_named(self):
        for name in ("a.zst", "a.jsonl.zst", "a"):
            self.refuse("zstd -d --long=31", self.write(name, ZSTD_WITH_LONG_WINDOW), *FIELD)


class NoFiles(Preparation):
    """Of every script that reads data."""

    def commands(self, path):
        yield SCRIPT, path
        yield SCRIPT, path, *FIELD
        yield SCRIPT.with_name("train_tokenizer.py"), path
        yield SCRIPT.with_name("prepare_eval.py"), path, "--task", "piqa"
        yield SCRIPT.with_name("prepare_images.py"), path, "--tower", "clip", "--chat", "plain", "--sequence-length", "2048"

    def assert_refused(self, path, word):
        for script, *arguments in self.commands(path):
            with self.subTest(script=script.name, path=path):
                command = [sys.executable, script, *arguments, "--out", self.folder / "out"]
                result = subprocess.run(command, capture_output=True, text=True, timeout=60)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertRegex(result.stderr, rf"\A[a-z_]+: error: [^\n]*{word}[^\n]*\n\Z")
                self.assertIn(str(path), result.stderr)

    def test_pipes_sockets_and_devices(self):
        os.mkfifo(self.folder / "pipe")
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self.folder / "socket"))
            for path in (self.folder / "pipe", self.folder / "socket", "/dev/zero"):
                self.assert_refused(path, "is a pipe, a socket or a device")

    def test_loops_of_links(self):
        for name, target in (("itself", "itself"), ("one", "two"), ("two", "one"), ("below", "below/a")):
            (self.folder / name).symlink_to(target)
        for name in ("itself", "one", "below"):
            self.assert_refused(self.folder / name, "")
            self.write("in/a.txt", "text")
            (self.folder / "in/link").unlink(missing_ok=True)
            (self.folder / "in/link").symlink_to(self.folder / name)
            self.refuse("in/link: is a link to", self.folder / "in")
        self.out = self.folder / "itself"
        code, error = self.call_in_this_process(self.folder / "in/a.txt")
        self.assertEqual(code, 2)
        self.assertIn("itself: exists and is not an empty folder", error)

    def test_a_data_set_has_its_tables_beside_it(self):
        for name in ("../a.arrow", "/etc/passwd", "..", "sub/a.arrow", 5, None):
            self.write("set/state.json", json.dumps({"_data_files": [{"filename": name}]}))
            self.write("set/dataset_info.json", "{}")
            self.refuse("set: is a data set that cannot be read", self.folder / "set", *FIELD)


class Tables(Preparation):
    def write_tables(self, table):
        pyarrow.parquet.write_table(table, self.folder / "a.parquet")
        with pyarrow.ipc.new_file(self.folder / "file.arrow", table.schema) as writer:
            writer.write_table(table)
        with pyarrow.ipc.new_stream(self.folder / "stream.arrow", table.schema) as writer:
            writer.write_table(table)
        return [self.folder / name for name in ("a.parquet", "file.arrow", "stream.arrow")]


class Names(Tables):
    def test_a_column_that_is_there_twice(self):
        columns = [pyarrow.array([[{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]]), pyarrow.array(["one"]),
                   pyarrow.array(["two"])]
        chat = ["--chat", "chatml", "--sequence-length", "64"]
        for names, options in ((("messages", "text", "text"), FIELD), (("messages", "messages", "text"), chat),
                               (("messages", "tools", "tools"), chat)):
            arrays = columns if names[1] != "messages" else [columns[0], columns[0], columns[2]]
            for path in self.write_tables(pyarrow.Table.from_arrays(arrays, names=list(names))):
                with self.subTest(path=path.name, names=names):
                    self.refuse("2 times", path, *options)
        for path in self.write_tables(pyarrow.Table.from_arrays(columns, names=["id", "text", "id"])):
            with self.subTest(path=path.name):
                self.out = self.folder / f"of_{path.name}"
                self.assertEqual(self.prepare(path, *FIELD)["train"]["documents"], 1)
                self.out = self.folder / "out"

    def test_a_part_of_a_message_that_is_there_twice(self):
        twice = pyarrow.StructArray.from_arrays([pyarrow.array(["user"]), pyarrow.array(["user"]), pyarrow.array(["?"])],
                                                ["role", "role", "content"])
        for path in self.write_tables(pyarrow.table({"messages": pyarrow.ListArray.from_arrays([0, 1], twice)})):
            self.refuse(path.name, path, "--chat", "chatml", "--sequence-length", "64")

    def test_a_key_of_json_that_is_there_twice(self):
        good = '{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}'
        chat = ["--chat", "chatml", "--sequence-length", "64"]
        for line, options in (
            ('{"text": "one", "text": "two"}', FIELD), (f'{{"messages": [], "messages": [{good}]}}', chat),
            ('{"messages": [{"role": "user", "content": "a", "content": "b"}]}', chat),
        ):
            with self.subTest(line=line):
                self.refuse("a.jsonl:1: the key", self.write("a.jsonl", line), *options)
        self.prepare(self.write("a.jsonl", '{"id": 1, "text": "one", "id": 2}'), *FIELD)

    def test_a_key_of_a_task_that_is_there_twice(self):
        for line in ('{"goal": "a", "goal": "b", "sol1": "c", "sol2": "d", "label": 0}',
                     '{"goal": "a", "sol1": "c", "sol2": "d", "label": 0, "label": 1}',
                     '{"goal": "a", "sol1": "c", "sol1": "c", "sol2": "d", "label": 0}'):
            command = [sys.executable, SCRIPT.with_name("prepare_eval.py"), self.write("a.jsonl", line), "--task", "piqa", "--out", self.out]
            result = subprocess.run(command, capture_output=True, text=True, timeout=60)
            self.assertEqual(result.returncode, 2)
            self.assertRegex(result.stderr, r"\Aprepare_eval: error: [^\n]*a.jsonl, line 1: [^\n]* several times[^\n]*\n\Z")


class Damaged(Tables):
    def test_an_arrow_table_that_leads_out_of_its_memory(self):
        """pyarrow would read there, and end without a word."""
        message = {"role": "user", "content": "?"}
        for column, name, offsets in (([17 * "a", 23 * "b"], "text", [0, 17, 40]), ([[message] * 5, [message] * 7], "messages", [0, 5, 12]),
                                      (pyarrow.array([17 * "a", 23 * "b"] * 9).dictionary_encode(), "text", [0, 17, 40])):
            options = FIELD if name == "text" else ["--chat", "chatml", "--sequence-length", "64"]
            for path in self.write_tables(pyarrow.table({name: column}))[1:]:
                whole, known = path.read_bytes(), numpy.array(offsets, "<i4").tobytes()
                self.assertIn(known, whole)
                for bad in ([0, 2**30, 2**30], [0, -5, offsets[2]], [0, offsets[2], offsets[1]]):
                    with self.subTest(path=path.name, name=name, bad=bad):
                        path.write_bytes(whole.replace(known, numpy.array(bad, "<i4").tobytes()))
                        self.refuse(f"{path.name}: cannot be read as an Arrow table", path, *options)


class Nulls(Tables):
    def test_records_without_text_are_left_out_and_counted(self):
        texts = ["one", None, "two", None, ""]
        forms = [self.write("a.jsonl", "".join(json.dumps({"text": text}) + "\n" for text in texts)),
                 self.write("b.jsonl", "".join(json.dumps({} if text is None else {"text": text}) + "\n" for text in texts)),
                 self.write("c.jsonl", '{"text": "one"}\nnull\n{"text": "two"}\nnull\n{"text": ""}\n'),
                 *self.write_tables(pyarrow.table({"text": texts}))]
        for path in forms:
            with self.subTest(path=path.name):
                self.out = self.folder / f"of_{path.name}"
                info = self.prepare(path, *FIELD)
                self.assertEqual((info["train"]["documents"], info["left_out"]["empty_documents"]), (2, 3))

    def test_a_file_of_such_records_alone_is_refused(self):
        for path in (self.write("a.jsonl", '{"text": null}\n' * 3), self.write("b.jsonl", '{"body": "a"}\n' * 3), self.write("c.jsonl", "null\n"),
                     *self.write_tables(pyarrow.table({"text": pyarrow.array([None] * 3, pyarrow.string())}))):
            with self.subTest(path=path.name):
                self.refuse(f'{path.name}: all of its {1 if path.name == "c.jsonl" else 3} records lack "text"', path, *FIELD)
                self.refuse(path.name, self.write("good.jsonl", LINES), path, *FIELD)

    def test_conversations(self):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"}]
        chat = ["--chat", "chatml", "--sequence-length", "64"]
        for path in (self.write("a.jsonl", json.dumps({"messages": messages}) + '\n{"messages": null}\n'),
                     *self.write_tables(pyarrow.table({"messages": [messages, None]}))):
            self.out = self.folder / f"of_{path.name}"
            self.assertEqual(self.prepare(path, *chat)["left_out"]["empty_documents"], 1)
        self.out = self.folder / "out"
        self.refuse("a.jsonl: all of its 1 records", self.write("a.jsonl", '{"messages": null}\n'), *chat)
        self.refuse('a.jsonl:1: has no list "messages"', self.write("a.jsonl", '{"conversations": []}\n'), *chat)


def limit_memory():
    # Address space counts what allocators reserve for each core of the machine, too.
    os.environ |= {"MALLOC_ARENA_MAX": "1", "ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    resource.setrlimit(resource.RLIMIT_AS, (1_000_000_000, 1_000_000_000))


class Sizes(Preparation):
    """Small files of much text."""

    def tables_of(self, column, name="text"):
        table = pyarrow.table({name: column})
        pyarrow.parquet.write_table(table, self.folder / "a.parquet", compression="zstd", store_schema=False)
        pyarrow.parquet.write_table(table, self.folder / "dictionary.parquet", compression="zstd")
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.ipc.new_file(self.folder / "a.arrow", table.schema, options=options) as writer:
            writer.write_table(table)
        return [self.folder / name for name in ("a.parquet", "dictionary.parquet", "a.arrow")]

    def repeated(self, text, count):
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count, pyarrow.int32()), pyarrow.array([text]))

    def test_many_rows_of_one_large_text(self):
        for path in self.tables_of(self.repeated("text " * 600_000, 300)):
            with self.subTest(path=path.name):
                self.assertLess(path.stat().st_size, 10_000)
                self.out = self.folder / f"of_{path.name}"
                result = self.call(path, *FIELD, preexec=limit_memory)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn("train: 1 document, 3,000,001 tokens", result.stdout)
                self.assertIn("299 duplicate documents", result.stdout)

    def test_a_row_that_is_larger_than_a_document_may_be(self):
        large = "a" * (tables.MAX_DOCUMENT_BYTES + 1)
        message = [{"role": "user", "content": large}]
        for column in (pyarrow.array(["a", large]), pyarrow.array(["a", large], pyarrow.large_string()),
                       pyarrow.array(["a", large]).dictionary_encode()):
            for path in self.tables_of(column):
                with self.subTest(path=path.name, type=str(column.type)):
                    self.refuse(f"{path.name}, row 2: a document of more than 64 MiB", path, *FIELD)
        for path in self.tables_of([[{"role": "user", "content": "?"}], message], "messages"):
            with self.subTest(path=path.name):
                self.refuse(f"{path.name}, row 2: a document of more than 64 MiB", path, "--chat", "chatml", "--sequence-length", "64")

    def test_the_size_of_rows_of_every_type(self):
        texts = ["a", None, "bcd", "", "ef"]
        plain = pyarrow.array(texts)
        nested = [["a", "bc"], None, [], ["def"]]
        for array, want in (
            (plain, [1, 0, 3, 0, 2]), (plain.cast(pyarrow.large_string()), [1, 0, 3, 0, 2]), (plain.cast(pyarrow.string_view()), [1, 0, 3, 0, 2]),
            (plain.dictionary_encode(), [1, 0, 3, 0, 2]), (pyarrow.compute.run_end_encode(pyarrow.array(["a", "a", "bc"])), [1, 1, 2]),
            (pyarrow.array(nested), [3, 0, 0, 3]), (pyarrow.array(nested, pyarrow.large_list(pyarrow.string())), [3, 0, 0, 3]),
            (pyarrow.array(nested, pyarrow.list_view(pyarrow.string())), [3, 0, 0, 3]),
            (pyarrow.array([["a", "bc"], ["", "d"]], pyarrow.list_(pyarrow.string(), 2)), [3, 1]),
            (pyarrow.array([{"a": "b", "c": "de"}, {"a": "f", "c": None}, {"a": "gh", "c": ""}]), [3, 1, 2]),
            (pyarrow.array([[("key", "value")], [], [("a", None)]], pyarrow.map_(pyarrow.string(), pyarrow.string())), [8, 0, 1]),
            (pyarrow.array([[{"role": "user", "content": "a"}], [{"role": "b", "content": None}] * 2]), [5, 2]), (pyarrow.array([1, 2]), [0, 0]),
        ):
            with self.subTest(type=str(array.type)):
                self.assertEqual(tables.bytes_of_rows(pyarrow, array).tolist(), want)
                self.assertEqual(tables.bytes_of_rows(pyarrow, array.slice(1, 2)).tolist(), want[1:3])

    def test_texts_of_every_type_give_the_same_bytes(self):
        texts = [f"text {number} é" * (number % 9) for number in range(600)]
        plain, want = pyarrow.array(texts), None
        for column in (plain, plain.cast(pyarrow.large_string()), plain.cast(pyarrow.string_view()), plain.dictionary_encode()):
            for path in self.tables_of(column):
                self.out = self.folder / f"of_{column.type.id}_{path.name}"
                self.assertEqual(self.call_in_this_process(path, *FIELD)[0], 0)
                want = want or self.ids()
                self.assertEqual(self.ids(), want)


if __name__ == "__main__":
    unittest.main()
