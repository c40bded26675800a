#!/usr/bin/env python3
"""Files that are not what their name says, columns that are there twice, and tokenizers that are named by their folder: they are refused
by name, or read as they are meant. Exits with 77 (skipped) where a package is missing."""
import json
import os
import shutil
import unittest

from chat_data import ChatData, assistant, pyarrow, user
from chat_tokenizers import make_chat_tokenizer
from script_runs import run_here
from tiny_tokenizers import llama2_like, qwen_like

from refusals import FETCH_IT, LFS_POINTER, assert_ended_well, assert_refused

import pyarrow.ipc  # noqa: E402

FIELD = ("--jsonl-field", "text")
PAGE = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head><body>Access denied.</body></html>\n"


class Files(ChatData):
    def prepare_text(self, *arguments):
        return run_here("prepare_data", *arguments, "--out", self.new_out())

    def refuse(self, words, *arguments):
        line = assert_refused(self, self.prepare_text(*arguments), *words)
        self.assertFalse(self.out.exists(), line)
        return line

    def documents(self, *arguments):
        assert_ended_well(self, self.prepare_text(*arguments))
        return json.loads((self.out / "data.json").read_text())["train"]["documents"]


class Pointers(Files):
    def test_whatever_the_name(self):
        for name in ("pointer.parquet", "pointer.arrow", "pointer.txt", "pointer.jsonl", "pointer.json", "pointer", "pointer.md"):
            path = self.write(name, LFS_POINTER)
            with self.subTest(name):
                self.refuse([name, FETCH_IT], path)
                self.refuse([name, FETCH_IT], path, *FIELD)
                self.refuse([name, FETCH_IT], path, "--chat", "chatml", "--sequence-length", 64)

    def test_with_the_name_of_what_is_compressed(self):
        for name in ("pointer.jsonl.gz", "pointer.json.zst"):
            with self.subTest(name):
                self.refuse([name, FETCH_IT], self.write(name, LFS_POINTER), *FIELD)

    def test_among_sound_files(self):
        for number in range(3):
            self.write(f"corpus/{number}.txt", f"text number {number}")
        self.write("corpus/b.txt", LFS_POINTER)
        self.refuse(["b.txt", FETCH_IT], self.folder / "corpus")
        (self.folder / "corpus/b.txt").write_bytes(LFS_POINTER.replace(b"\n", b"\r\n"))
        self.refuse(["b.txt", FETCH_IT], self.folder / "corpus")

    def test_a_table_of_a_data_set(self):
        self.write("saved/state.json", json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
        self.write("saved/dataset_info.json", '{"features": {}}')
        self.write("saved/data-00000-of-00001.arrow", LFS_POINTER)
        self.refuse(["data-00000-of-00001.arrow", FETCH_IT], self.folder / "saved", *FIELD)

    def test_in_place_of_a_tokenizer(self):
        texts = self.write("a.txt", "some text")
        self.tokenizer.write_bytes(LFS_POINTER)
        self.refuse(["tokenizer.json", FETCH_IT], texts, "--tokenizer", self.tokenizer)

    def test_for_a_tokenizer_of_ones_own(self):
        for name in ("a.txt", "a.parquet", "a.jsonl"):
            path = self.write(name, LFS_POINTER)
            with self.subTest(name):
                assert_refused(self, run_here("train_tokenizer", path, *(() if name == "a.txt" else FIELD), "--vocab-size", 300, "--out", self.folder / "t.json"),
                               name, FETCH_IT)

    def test_a_text_about_pointers_is_a_text(self):
        about = b"A pointer of Git LFS begins with\n" + LFS_POINTER
        self.assertEqual(self.documents(self.write("about.txt", about)), 1)
        self.assertEqual(self.documents(self.write("versions.txt", b"version https://example.org is the newest\n")), 1)


class NoTables(Files):
    def test_other_content_named_as_a_table(self):
        for form in ("parquet", "arrow"):
            for name, content in (("page", PAGE), ("text", b"a plain text\n"), ("json", b'{"text": "a"}\n'), ("empty", b"")):
                path = self.write(f"{name}.{form}", content)
                for options in ((), FIELD):
                    with self.subTest(path.name, options=options):
                        line = self.refuse([path.name], path, *options)
                        if not content:
                            continue  # whatever it was to be
                        self.assertIn(form, line.replace(path.name, "").replace(str(self.folder), "").lower())

    def test_a_page_of_an_error_as_json_lines(self):
        path = self.write("page.jsonl", PAGE)
        self.refuse(["page.jsonl"], path, *FIELD)
        self.refuse(["page.jsonl"], path)

    def test_tables_with_other_names_are_read(self):
        table = pyarrow.table({"text": ["one", "two"]})
        pyarrow.parquet.write_table(table, self.folder / "0000")
        pyarrow.parquet.write_table(table, self.folder / "table.txt")
        with pyarrow.ipc.new_file(self.folder / "file", table.schema) as writer:
            writer.write_table(table)
        for name in ("0000", "table.txt", "file"):
            with self.subTest(name):
                self.assertEqual(self.documents(self.folder / name, *FIELD), 2)


class TwoColumns(Files):
    """Of the same name, as a join makes them."""

    def write_table(self, table, form):
        """As a file of that form. Returns what to give to the script."""
        path = self.folder / f"table.{form}"
        if form == "parquet":
            pyarrow.parquet.write_table(table, path)
        elif form == "arrow":
            with pyarrow.ipc.new_file(path, table.schema) as writer:
                writer.write_table(table)
        else:
            path = self.folder / "saved"
            shutil.rmtree(path, ignore_errors=True)
            self.write("saved/state.json", json.dumps({"_data_files": [{"filename": "data.arrow"}]}))
            self.write("saved/dataset_info.json", '{"features": {}}')
            with pyarrow.ipc.new_stream(path / "data.arrow", table.schema) as writer:
                writer.write_table(table)
        return path

    FORMS = ("parquet", "arrow", "data set")

    def test_the_column_of_the_text(self):
        table = pyarrow.Table.from_arrays([pyarrow.array(["one"]), pyarrow.array(["two"])], names=["text", "text"])
        for form in self.FORMS:
            with self.subTest(form):
                self.refuse(["arrow" if form != "parquet" else "table.parquet", "text"], self.write_table(table, form), *FIELD)

    def test_of_other_types(self):
        table = pyarrow.Table.from_arrays([pyarrow.array([1, 2]), pyarrow.array(["a", "b"]), pyarrow.array([None, "c"])], names=["id", "body", "body"])
        for form in self.FORMS:
            with self.subTest(form):
                self.refuse(["body"], self.write_table(table, form), "--jsonl-field", "body")

    def test_the_columns_of_conversations(self):
        messages = pyarrow.array([[user("hi"), assistant("hello")]])
        tools = pyarrow.array([None], pyarrow.string())
        for names, columns in ((["messages", "messages"], [messages, messages]), (["messages", "tools", "tools"], [messages, tools, tools])):
            for form in self.FORMS:
                with self.subTest(names=names, form=form):
                    path = self.write_table(pyarrow.Table.from_arrays(columns, names=names), form)
                    self.refuse([names[-1]], path, "--chat", "chatml", "--sequence-length", 64)

    def test_for_a_tokenizer_of_ones_own(self):
        table = pyarrow.Table.from_arrays([pyarrow.array(["one"]), pyarrow.array(["two"])], names=["text", "text"])
        path = self.write_table(table, "parquet")
        assert_refused(self, run_here("train_tokenizer", path, *FIELD, "--vocab-size", 300, "--out", self.folder / "t.json"), "table.parquet", "text")

    def test_another_column_twice_is_no_hindrance(self):
        table = pyarrow.Table.from_arrays([pyarrow.array(["a", "b"]), pyarrow.array(["one", "two"]), pyarrow.array([1, 2])], names=["id", "text", "id"])
        for form in self.FORMS:
            with self.subTest(form):
                self.assertEqual(self.documents(self.write_table(table, form), *FIELD), 2)


class Tokenizers(Files):
    def setUp(self):
        super().setUp()
        self.texts = self.write("texts.jsonl", "".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(4)))

    def all_that_is_made(self, *arguments):
        """Files, and what is printed, without the name of the output."""
        result = self.prepare_text(self.texts, *FIELD, *arguments)
        assert_ended_well(self, result)
        files = {str(path.relative_to(self.out)): path.read_bytes() for path in sorted(self.out.rglob("*")) if path.is_file()}
        return files, result.stdout.replace(str(self.out), "OUT")

    def test_a_folder_stands_for_its_tokenizer_json(self):
        for name, make in (("qwen", qwen_like), ("llama2", llama2_like)):
            path = make(self.folder / name)
            with self.subTest(name):
                want = self.all_that_is_made("--tokenizer", path)
                for folder in (path.parent, f"{path.parent}/", os.path.relpath(path.parent)):
                    self.assertEqual(self.all_that_is_made("--tokenizer", folder), want)

    def test_the_folder_of_an_imported_model(self):
        """Its config has the size of the vocabulary, so none is printed."""
        path = qwen_like(self.folder / "imported/huggingface")
        self.write("imported/config.json", "{}")
        want = self.all_that_is_made("--tokenizer", path)
        self.assertNotIn("vocab_size", want[1])
        self.assertEqual(self.all_that_is_made("--tokenizer", path.parent), want)

    def test_a_folder_of_conversations_and_of_questions(self):
        path = make_chat_tokenizer("chatml", self.folder / "chatml")
        chats = self.write_chats([[user("hi"), assistant("hello")]])
        options = ("--chat", "chatml", "--sequence-length", 64)
        assert_ended_well(self, self.prepare_text(chats, *options, "--tokenizer", path.parent))
        questions = self.write("questions.jsonl", json.dumps({"context": "1 + 1 =", "choices": [" 2", " 3"], "answer": 0}) + "\n")
        for name, given in (("file", path), ("folder", path.parent)):
            assert_ended_well(self, run_here("prepare_eval", questions, "--task", "text_choice", "--tokenizer", given, "--out", self.folder / name))
        of_file, of_folder = ((self.folder / name).read_text().splitlines()[1:] for name in ("file", "folder"))
        self.assertEqual(of_file, of_folder)

    def test_a_folder_without_one(self):
        (self.folder / "empty").mkdir()
        self.refuse([str(self.folder / "empty"), "tokenizer.json"], self.texts, *FIELD, "--tokenizer", self.folder / "empty")
        self.write("pieces/tokenizer.model", b"\n\x0e\n\x05<unk>")
        self.refuse([str(self.folder / "pieces"), "tokenizer.json"], self.texts, *FIELD, "--tokenizer", self.folder / "pieces")

    def test_a_tokenizer_of_sentencepiece(self):
        """What is needed, and what makes one."""
        for name, content in (("tokenizer.model", b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02\n\x0c\n\x03<s>\x15\x00\x00\x00\x00\x18\x03"),
                              ("spiece.model", b"\n\x0e\n\x05<unk>\x15\x00\x00\x00\x00\x18\x02"), ("tiktoken/tokenizer.model", b"IQ== 0\nIg== 1\n")):
            path = self.write(name, content)
            with self.subTest(name):
                line = self.refuse([name, "tokenizer.json"], self.texts, *FIELD, "--tokenizer", path)
                self.assertTrue("transformers" in line or "convert" in line or "save_pretrained" in line, f"what makes one is not said: {line}")


class Parts(Files):
    TEXT = {"type": "text", "text": "hi there"}

    def assert_joined_or_refused(self, messages, *texts):
        for form in ("jsonl",) if any("image" in str(m) for m in messages) else ("jsonl", "parquet"):
            with self.subTest(form):
                path = self.write_chats([messages], form) if form == "jsonl" else self.write_parts(messages)
                result = self.prepare(path)
                if result.returncode != 0:
                    assert_refused(self, result, path.name, "list")
                else:
                    text, _ = self.text_and_targets(result)
                    for one in texts:
                        self.assertIn(one, text)

    def write_parts(self, messages):
        """A table has one type for all contents: lists."""
        listed = [{**m, "content": m["content"] if isinstance(m["content"], list) else [{"type": "text", "text": m["content"]}]} for m in messages]
        return self.write_chats([listed], "parquet")

    def test_one_part(self):
        self.assert_joined_or_refused([user([self.TEXT]), assistant("hello")], "user\nhi there<|im_end|>")

    def test_several_parts_and_those_of_the_assistant(self):
        self.assert_joined_or_refused([user([self.TEXT, {"type": "text", "text": ", and good day"}]), assistant("hello")], "hi there", ", and good day")
        self.assert_joined_or_refused([user("hi"), assistant([{"type": "text", "text": "good day"}])], "good day<|im_end|>")

    def test_what_is_no_text_is_refused(self):
        for part in ({"type": "image_url", "image_url": {"url": "a.png"}}, {"type": "image"}, {"type": "text"}, "hi", 7):
            path = self.write_chats([[user([self.TEXT, part]), assistant("hello")]])
            with self.subTest(part=part):
                if part == "hi" and self.prepare(path).returncode == 0:
                    continue  # a string among them is a text
                assert_refused(self, self.prepare(path), "chats.jsonl:1")


if __name__ == "__main__":
    unittest.main()
