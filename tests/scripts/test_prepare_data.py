#!/usr/bin/env python3
"""Tests of scripts/prepare_data.py. Exits with 77 (skipped) where numpy is missing."""

import gzip
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

try:
    import tokenizers
except ImportError:
    tokenizers = None

from preparation import SCRIPT, Preparation  # noqa: E402

EOS = 256


def ids_of(*texts):
    """What the byte tokenizer makes of these documents."""
    ids = []
    for text in texts:
        ids += [*text.encode(), EOS]
    return ids


def is_held_out(text, fraction):
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


class PrepareDataTest(Preparation):
    # --- documents

    def test_folder_in_sorted_order(self):
        self.write("in/b.txt", "second")
        self.write("in/a.txt", "first é")
        self.write("in/sub/c.md", "third\n")
        self.write("in/.hidden", "not this")
        self.write("in/.git/config", "nor this")
        info = self.prepare(self.folder / "in")
        self.assertEqual(self.ids(), ids_of("first é", "second", "third\n"))
        self.assertEqual(info["train"], {"files": ["train-00000.npy"], "documents": 3, "tokens": len(self.ids())})
        self.assertEqual(info["eval"], {"files": [], "documents": 0, "tokens": 0})
        self.assertEqual((info["vocab_size"], info["padded_vocab_size"], info["eos"]), (257, 272, EOS))
        self.assertEqual((info["tokenizer"], info["dtype"]), ("bytes", "uint16"))

    def test_links_to_folders_are_not_followed_and_those_that_lead_elsewhere_are_named(self):
        self.write("in/a/a.txt", "first")
        self.write("in/.hidden/b.txt", "second")
        self.write("elsewhere/c.txt", "third")
        for name, target in (("in/again", "a"), ("in/a/circle", ".."), ("in/.link", "../elsewhere")):
            (self.folder / name).symlink_to(target)
        result = self.call(self.folder / "in")
        self.assertEqual((result.returncode, result.stderr), (0, ""))  # what these lead to is read, or hidden
        self.assertEqual(self.ids(), ids_of("first"))
        advice = ": links to folders are not followed; to have their files, give these folders, too\n"
        (self.folder / "in/b").symlink_to("../elsewhere")
        self.out = self.folder / "one"
        self.assertEqual(self.call(self.folder / "in").stderr, f"prepare_data: warning: {self.folder}/in/b{advice}")
        self.assertEqual(self.ids(), ids_of("first"))
        (self.folder / "in/c").symlink_to(".hidden")
        self.out = self.folder / "two"
        self.assertEqual(self.call(self.folder / "in").stderr, f"prepare_data: warning: {self.folder}/in/b and 1 more{advice}")
        self.out = self.folder / "given"
        result = self.call(self.folder / "in", self.folder / "in/b", self.folder / "in/c")
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(self.ids(), ids_of("first", "third", "second"))

    def test_what_editors_and_downloads_leave_in_a_folder_is_left_out_and_named(self):
        self.write("in/a.txt", "first")
        for end in ("~", ".part"):
            left = self.write(f"in/a.txt{end}", "second")
            with self.subTest(end):
                self.out = self.folder / f"folder{end}"
                result = self.call(self.folder / "in")
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertIn(str(left), result.stderr)
                self.assertEqual(self.ids(), ids_of("first"))
                for number, place in enumerate((self.folder / "in", left)):
                    self.out = self.folder / f"given{end}{number}"
                    self.assertEqual(self.call(place, "--include", f"*{end}").stderr, "")
                    self.assertEqual(self.ids(), ids_of("second"))
            left.unlink()

    def test_a_link_to_a_file_that_is_not_there_is_named(self):
        self.write("in/a.txt", "first")
        self.write("blob", "second")
        for name, target in (("in/b.txt", "../blob"), ("in/.c.txt", "nowhere"), ("in/d.bin", "nowhere")):
            (self.folder / name).symlink_to(target)
        os.mkfifo(self.folder / "in/pipe")
        self.refuse(f"{self.folder}/in/d.bin: is a link to nowhere, which is not there or cannot be reached", self.folder / "in")
        self.prepare(self.folder / "in", "--include", "*.txt")
        self.assertEqual(self.ids(), ids_of("first", "second"))
        (self.folder / "in/d.bin").unlink()
        (self.folder / "in/d.bin").symlink_to("d.bin")  # a circle
        self.out = self.folder / "other"
        self.refuse(f"{self.folder}/in/d.bin: is a link to d.bin, which is not there or cannot be reached", self.folder / "in")

    def test_the_summary_counts_in_words(self):
        for name, text in (("a", "first"), ("b", "first"), ("c", "second\n"), ("d", "")):
            self.write(f"in/{name}.txt", text)
        lines = self.call(self.folder / "in", "--tokens-per-file", "7").stdout.splitlines()
        self.assertRegex(lines[0], r"^train: 2 documents, 14 tokens, 2 files$")
        self.assertEqual(lines[2], "left out: 1 duplicate document, 1 empty document, 0 binary files")
        self.write("one/a.txt", "text")
        self.out = self.folder / "other"
        self.assertEqual(self.call(self.folder / "one").stdout.splitlines()[0], "train: 1 document, 5 tokens, 1 file")

    def test_a_summary_that_nobody_reads_is_no_error(self):
        self.write("in/a.txt", "text")
        read_end, write_end = os.pipe()
        os.close(read_end)
        command = [sys.executable, str(SCRIPT), str(self.folder / "in"), "--out", str(self.out)]
        result = subprocess.run(command, stdout=write_end, stderr=subprocess.PIPE, text=True, timeout=300, check=False)
        os.close(write_end)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual(self.ids(), ids_of("text"))

    def test_config_snippet_names_the_files(self):
        self.write("in/a.txt", "text")
        result = self.call(self.folder / "in")
        config = json.loads("{" + result.stdout.split("\n{", 1)[1])
        self.assertEqual(config["model"], {"vocab_size": 272})
        self.assertEqual(config["data"]["train"], [str(self.out.resolve() / "train-00000.npy")])
        self.assertEqual(config["data"]["token_dtype"], "uint16")
        self.assertNotIn("training", config)

    def test_config_snippet_evaluates_on_what_is_held_out(self):
        for number in range(20):
            self.write(f"in/{number}.txt", f"text {number}")
        for options in (("--eval-fraction", "0.5"), ("--chat", "chatml", "--sequence-length", "64", "--eval-fraction", "0.5")):
            with self.subTest(options):
                self.out = self.folder / options[0]
                chats = "".join(f'{{"messages": [{{"role": "user", "content": "{i}"}}, {{"role": "assistant", "content": "a"}}]}}\n' for i in range(20))
                source = self.write("chats.jsonl", chats) if "--chat" in options else self.folder / "in"
                config = json.loads("{" + self.call(source, *options).stdout.split("\n{", 1)[1])
                self.assertTrue(config["data"]["eval"])
                self.assertGreater(config["training"]["eval_interval"], 0)

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_config_snippet_leaves_an_imported_model_as_it_is(self):
        text = self.write("a.txt", "a")
        path = self.word_tokenizer(["[UNK]", "a", "</s>"])
        for place, model in (("huggingface/tokenizer.json", {"model": {"vocab_size": 16}}), ("model/huggingface/tokenizer.json", {})):
            with self.subTest(place=place):
                self.write("model/config.json", '// Goes on\n{"model": {"vocab_size": 64}}')
                result = self.call(text, "--tokenizer", self.write(place, path.read_bytes()))
                summary, config = result.stdout.split("\n{", 1)
                config = json.loads("{" + config)
                self.assertEqual(config.pop("data")["token_dtype"], "uint16")
                self.assertEqual(config, model)
                self.assertIn(f"vocabulary: 3 ids, in the config{'' if model else ' of a new model'} 16\n", summary)
                shutil.rmtree(self.out)

    def test_include_matches_names_and_relative_paths(self):
        self.write("in/a.txt", "a")
        self.write("in/b.py", "b")
        self.write("in/docs/c.rst", "c")
        self.write("in/other/d.rst", "d")
        self.prepare(self.folder / "in", "--include", "*.txt", "--include", "docs/*")
        self.assertEqual(self.ids(), ids_of("a", "c"))

    def test_output_inside_of_the_input(self):
        self.write("in/a.txt", "a")
        self.out = self.folder / "in" / "out"
        self.prepare(self.folder / "in")
        self.assertEqual(self.ids(), ids_of("a"))
        self.out.rename(self.folder / "in" / "z")  # not the output folder any more: token files are binary
        self.out.mkdir()
        self.write("in/out/data.txt", "made")
        self.refuse_existing()

    def refuse_existing(self):
        result = self.call(self.folder / "in")
        self.assertEqual((result.returncode, len(result.stderr.splitlines())), (2, 1))
        self.assertIn("is not an empty folder", result.stderr)

    def test_nothing_is_overwritten(self):
        self.write("in/a.txt", "a")
        kept = self.write("out/train-00000.npy", "precious")
        self.refuse_existing()
        self.assertEqual(kept.read_text(), "precious")

    def test_a_mounted_file_system_is_refused_before_the_work(self):
        self.write("in/a.txt", "a")
        self.out.mkdir()
        with mock.patch("os.path.ismount", lambda path: Path(path) == self.out.resolve()):
            code, error = self.call_in_this_process(self.folder / "in")
        self.assertEqual((code, list(self.out.iterdir())), (2, []))
        self.assertIn("is where a file system is mounted", error)

    def test_empty_output_folder_is_used(self):
        self.write("in/a.txt", "a")
        self.out.mkdir()
        self.prepare(self.folder / "in")
        self.assertEqual(self.ids(), ids_of("a"))

    def test_jsonl_plain_and_gzip(self):
        plain = self.write_jsonl("a.jsonl", ["one\ntwo", "three"], field="content")
        zipped = self.folder / "b.json.gz"
        zipped.write_bytes(gzip.compress(b'{"content": "four \\ud83d\\ude00"}\n\n{"content": "half \\ud83d"}\n'))
        self.prepare(plain, zipped, "--jsonl-field", "content")
        self.assertEqual(self.ids(), ids_of("one\ntwo", "three", "four \U0001f600", "half ?"))

    def test_duplicates_blank_and_binary_are_left_out_and_counted(self):
        self.write("in/a.txt", "same")
        self.write("in/b.txt", "same")
        self.write("in/c.txt", "")
        self.write("in/d.txt", " \n")
        self.write("in/e.png", b"\x89PNG\0\0")
        info = self.prepare(self.folder / "in")
        self.assertEqual(self.ids(), ids_of("same"))
        self.assertEqual(info["left_out"], {"duplicate_documents": 1, "empty_documents": 2, "binary_files": 1})

    def test_what_is_not_utf8_is_left_out_where_asked(self):
        self.write("in/a.txt", "caf\xe9".encode("latin-1"))
        self.write("in/b.txt", "caf\xe9")
        info = self.prepare(self.folder / "in", "--utf8-only")
        self.assertEqual(self.ids(), ids_of("caf\xe9"))
        self.assertEqual(info["left_out"]["not_utf8_documents"], 1)

    def test_keep_duplicates(self):
        self.write("in/a.txt", "same")
        self.write("in/b.txt", "same")
        self.prepare(self.folder / "in", "--keep-duplicates")
        self.assertEqual(self.ids(), ids_of("same", "same"))

    def test_split_bytes_cuts_at_line_ends_and_loses_nothing(self):
        lines = [f"line {i} " + "é" * (i % 7) + "\n" for i in range(200)] + ["no newline at the end"]
        text = "".join(lines)
        info = self.prepare(self.write("a.txt", text), "--split-bytes", "100")
        documents = bytes(i if i != EOS else 0 for i in self.ids()).split(b"\0")[:-1]
        self.assertEqual(b"".join(documents).decode(), text)
        self.assertEqual(len(documents), info["train"]["documents"])
        self.assertGreater(len(documents), 20)
        self.assertTrue(all(d.endswith(b"\n") and len(d) >= 100 for d in documents[:-1]))

    # --- splits and files

    def test_held_out_documents_depend_on_content_alone(self):
        texts = [f"document {i}" for i in range(400)]
        self.write_jsonl("in/a.jsonl", texts[:200] + texts[50:60])
        self.write_jsonl("in/b.jsonl", texts[200:] + texts[:20])
        info = self.prepare(self.folder / "in", "--jsonl-field", "text", "--eval-fraction", "0.1")
        held_out = [t for t in texts if is_held_out(t, 0.1)]
        self.assertEqual(self.ids("eval-00000.npy"), ids_of(*held_out))
        self.assertEqual(self.ids(), ids_of(*(t for t in texts if t not in held_out)))
        self.assertEqual(info["eval"]["documents"], len(held_out))
        self.assertTrue(20 < len(held_out) < 60)

        self.out = self.folder / "out2"  # reversed, split otherwise, duplicates kept
        self.write_jsonl("more.jsonl", texts[::-1])
        self.prepare(
            self.folder / "more.jsonl", "--jsonl-field", "text", "--eval-fraction", "0.1", "--keep-duplicates"
        )
        self.assertEqual(self.ids("eval-00000.npy"), ids_of(*held_out[::-1]))

    def test_few_held_out_tokens_are_warned_of(self):
        path = self.write_jsonl("a.jsonl", [f"text {number} " + "word " * 20 for number in range(300)])
        for fraction, is_warned in (("0.02", True), ("0.3", False), ("0", False)):
            with self.subTest(fraction=fraction):
                self.out = self.folder / f"of_{fraction}"
                result = self.call(path, "--jsonl-field", "text", "--eval-fraction", fraction)
                self.assertEqual(result.returncode, 0, result.stderr)
                self.assertEqual("--eval-fraction" in result.stderr, is_warned, result.stderr)
                self.assertEqual(result.stderr.count("prepare_data: warning: "), is_warned)

    def test_files_of_limited_length(self):
        text = "0123456789" * 10  # 101 tokens
        self.write("a.txt", text)
        for limit, lengths in ((40, [40, 40, 21]), (45, [45, 56]), (101, [101]), (100, [101])):
            with self.subTest(limit=limit):
                self.out = self.folder / f"out{limit}"
                info = self.prepare(self.folder / "a.txt", "--tokens-per-file", limit)
                names = [f"train-{i:05d}.npy" for i in range(len(lengths))]
                self.assertEqual([len(self.ids(name)) for name in names], lengths)
                self.assertEqual(info["train"]["files"], names)
                self.assertEqual(sorted(p.name for p in self.out.iterdir()), ["data.json", *names])
                self.assertEqual(sum((self.ids(name) for name in names), []), ids_of(text))

    def test_max_tokens_is_exact_over_both_splits(self):
        texts = [f"document {i}" for i in range(400)]
        path = self.write_jsonl("a.jsonl", texts)
        info = self.prepare(path, "--jsonl-field", "text", "--eval-fraction", "0.2", "--max-tokens", "1003")
        self.assertEqual(info["train"]["tokens"] + info["eval"]["tokens"], 1003)
        everything = ids_of(*(t for t in texts if not is_held_out(t, 0.2)))
        self.assertEqual(self.ids(), everything[: info["train"]["tokens"]])

    def test_many_batches(self):
        texts = [f"{i} " + "x" * 3_000_000 for i in range(5)]  # three and two
        self.prepare(self.write_jsonl("a.jsonl", texts), "--jsonl-field", "text")
        want = np.frombuffer("".join(text + "\0" for text in texts).encode(), np.uint8).astype("<u2")
        want[want == 0] = EOS
        self.assertTrue(np.array_equal(np.fromfile(self.out / "train-00000.npy", "<u2"), want))

    # --- errors

    def test_bad_options(self):
        path = self.write("a.txt", "text")
        for message, options in (
            ("--eval-fraction is 1.0", ["--eval-fraction", "1"]),
            ("--eval-fraction is -0.1", ["--eval-fraction", "-0.1"]),
            ("--max-tokens is 0", ["--max-tokens", "0"]),
            ("--tokens-per-file is -5", ["--tokens-per-file", "-5"]),
            ("--split-bytes is 99999999999", ["--split-bytes", "99999999999"]),
            ("cannot be used with --jsonl-field", ["--split-bytes", "9", "--jsonl-field", "text"]),
            ("--eos names a token", ["--eos", "</s>"]),
            ("unrecognized arguments: --eval", ["--eval", "0.1"]),
            ("invalid int value", ["--max-tokens", "many"]),
            ("none of the 1 documents is held out", ["--eval-fraction", "1e-9"]),
            ("every document is held out", ["--eval-fraction", "0.99999999"]),
        ):
            with self.subTest(options=options):
                self.refuse(message, path, *options)

    def test_bad_inputs(self):
        self.write("empty/a.txt", "")
        self.write("binary/a.bin", b"\0")
        self.write("bad.gz", b"not gzip")
        self.write("cut.gz", gzip.compress(b"text " * 1000)[:40])
        for name in ("none.gz", "none.jsonl.zst", "none.parquet"):
            self.write(name, b"")
        self.write("a.jsonl", '{"text": "a"}')
        self.write("number.json", '{"text": "a"}\n{"text": 7}\n')
        self.write("list.json", "[1]\n")
        self.write("broken.json", '\n{"text": "a"}\n{"text": \n')
        self.write("wide.jsonl", '{"text": "a"}\n'.encode("utf-16"))
        self.write("wide.jsonl.gz", gzip.compress('{"text": "a"}\n'.encode("utf-16")))
        field = ["--jsonl-field", "text"]
        for message, name, options in (
            ("missing: no such file or folder", "missing", []),
            ("0 of them binary; check the paths", "empty", []),
            ("1 files matched, 1 of them binary", "binary", []),
            ("0 files matched", "empty", ["--include", "*.md"]),
            ("bad.gz: ends in .gz, but is text", "bad.gz", []),
            ("cut.gz: cannot be read", "cut.gz", []),
            ("none.gz: has no bytes", "none.gz", []),
            ("none.jsonl.zst: has no bytes", "none.jsonl.zst", ["--jsonl-field", "text"]),
            ("none.parquet: has no bytes", "none.parquet", ["--jsonl-field", "text"]),
            ("a.jsonl: is JSON, not plain text; name the field", "a.jsonl", []),
            ('number.json:2: the field "text" is a number, not text', "number.json", field),
            ("list.json:1: is an array, not an object; give JSON Lines", "list.json", field),
            ("broken.json:3: is not JSON", "broken.json", field),
            ("wide.jsonl: is in UTF-16; make it UTF-8", "wide.jsonl", field),
            ("wide.jsonl.gz: is in UTF-16; make it UTF-8", "wide.jsonl.gz", field),
            ('a.jsonl: all of its 1 records lack "body"', "a.jsonl", ["--jsonl-field", "body"]),
        ):
            with self.subTest(name=name, options=options):
                self.refuse(message, self.folder / name, *options)
        self.refuse("s3://bucket/x.jsonl: is the address of an object store or a site; mount the store, or copy", "s3://bucket/x.jsonl")

    def test_an_address_is_no_place_for_output(self):
        command = [sys.executable, SCRIPT, self.write("in.txt", "text"), "--out", "s3://bucket/out"]
        result = subprocess.run(command, capture_output=True, text=True, cwd=self.folder)
        self.assertEqual((result.returncode, os.listdir(self.folder)), (2, ["in.txt"]), result.stderr)
        self.assertIn("s3://bucket/out: is the address of an object store", result.stderr)

    def test_huge_documents_are_refused_before_they_fill_the_memory(self):
        path = self.write("huge.txt", "start\n" * 2000)
        os.truncate(path, 3 * 2**30)  # sparse: zeros up to 3 GiB
        self.refuse("huge.txt: a document of more than 64 MiB", path)
        self.refuse("huge.txt: a document of more than 64 MiB", path, "--split-bytes", "100000")
        self.refuse("huge.txt:1: a document of more than 64 MiB", self.sparse_json(), "--jsonl-field", "text")

    def sparse_json(self):
        path = self.write("json/huge.txt", '{"text": "' + "a" * 2000)
        os.truncate(path, 3 * 2**30)
        return path

    def test_unwritable_place(self):
        self.write("a.txt", "text")
        self.write("file", "in the way")
        self.out = self.folder / "file" / "out"
        self.refuse("cannot be made", self.folder / "a.txt")

    def test_failed_write_leaves_nothing(self):
        path = self.write("a.txt", "text " * 1000)
        limit = (4096, 4096)  # bytes that a file may have, as on a full disk
        result = self.call(path, preexec=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, limit))
        self.assertEqual(result.returncode, 4)
        self.assertRegex(result.stderr, r"\Aprepare_data: error: writing failed: [^\n]+\n\Z")
        self.assertFalse(self.out.exists())
        self.assertEqual(self.leftovers(), [])

    # --- a tokenizer.json

    def word_tokenizer(self, names, **more):
        """Words as tokens, ids in the order of `names`; truncation and padding are set, and must be ignored."""
        model = {"type": "WordLevel", "vocab": {n: i for i, n in enumerate(names)}, "unk_token": "[UNK]"}
        settings = {
            "version": "1.0",
            "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
            "padding": {
                "strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": None,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "[UNK]",
            },
            "added_tokens": [], "normalizer": None, "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None, "decoder": None, "model": model, **more,
        }  # fmt: skip
        return self.write("tokenizer.json", json.dumps(settings))

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_tokenizer_json(self):
        path = self.word_tokenizer(["[UNK]", "a", "b", "c", "</s>"])
        self.write("in/1.txt", "a b c a")
        self.write("in/2.txt", "b what")
        info = self.prepare(self.folder / "in", "--tokenizer", path)
        self.assertEqual(self.ids(), [1, 2, 3, 1, 4, 2, 0, 4])
        self.assertEqual((info["vocab_size"], info["padded_vocab_size"], info["eos"]), (5, 16, 4))
        self.assertEqual(info["tokenizer"], "tokenizer.json")
        self.assertEqual(info["tokenizer_sha256"], hashlib.sha256(path.read_bytes()).hexdigest())

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_a_text_that_a_tokenizer_cannot_encode_is_told(self):
        path = self.word_tokenizer(["a", "</s>"])
        code, error = self.call_in_this_process(self.write("a.txt", "a zebra"), "--tokenizer", path)
        self.assertEqual(code, 2, error)
        self.assertRegex(error, rf"error: {path}: cannot tokenize a text \([^\n]*\); give a tokenizer with an unknown token or with bytes\n\Z")

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_the_tokenizer_is_kept_with_the_data(self):
        path = self.word_tokenizer(["[UNK]", "a", "</s>"]).rename(self.folder / "words.json")
        (self.folder / "chat_template.jinja").write_text("{{ messages }}")
        self.prepare(self.write("a.txt", "a"), "--tokenizer", path)
        kept = self.out / "tokenizer"
        self.assertEqual(sorted(p.name for p in kept.iterdir()), ["chat_template.jinja", "tokenizer.json", "tokenizer_config.json"])
        self.assertEqual((kept / "tokenizer.json").read_bytes(), path.read_bytes())
        # No tokenizer_config.json lay beside it: what ends a document is said all the same.
        config = json.loads((kept / "tokenizer_config.json").read_text())
        self.assertEqual((config["eos_token"], config["add_bos_token"], "bos_token" in config), ("</s>", False, False))

        shutil.rmtree(self.out)
        self.write("tokenizer_config.json", '{"eos_token": "a", "bos_token": "[UNK]", "add_bos_token": true}')
        self.assertEqual(self.prepare(self.folder / "a.txt", "--tokenizer", path)["eos"], 1)
        self.assertEqual((kept / "tokenizer_config.json").read_bytes(), (self.folder / "tokenizer_config.json").read_bytes())

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_a_token_that_begins_documents_is_kept_with_the_data(self):
        path = self.word_tokenizer(["[UNK]", "a", "<s>", "</s>"])
        self.prepare(self.write("a.txt", "a"), "--tokenizer", path, "--bos", "<s>")
        config = json.loads((self.out / "tokenizer/tokenizer_config.json").read_text())
        self.assertEqual((config["bos_token"], config["eos_token"], config["add_bos_token"]), ("<s>", "</s>", True))

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_tokens_that_options_name_are_those_of_the_kept_tokenizer(self):
        path = self.word_tokenizer(["[UNK]", "a", "<s>", "</s>", "<end>"])
        self.write("tokenizer_config.json", '{"eos_token": "</s>", "model_max_length": 9}')
        self.write("special_tokens_map.json", '{"eos_token": {"content": "</s>"}, "unk_token": "[UNK]"}')
        self.write("generation_config.json", '{"bos_token_id": 0, "eos_token_id": 3, "top_k": 5}')
        self.prepare(self.write("a.txt", "a"), "--tokenizer", path, "--bos", "<s>", "--eos", "<end>")
        self.assertEqual(self.ids(), [2, 1, 4])
        kept = {name: json.loads((self.out / f"tokenizer/{name}.json").read_text())
                for name in ("tokenizer_config", "special_tokens_map", "generation_config")}
        tokens = {"bos_token": "<s>", "eos_token": "<end>"}
        self.assertEqual(kept["tokenizer_config"], {**tokens, "add_bos_token": True, "model_max_length": 9})
        self.assertEqual(kept["special_tokens_map"], {**tokens, "unk_token": "[UNK]"})
        self.assertEqual(kept["generation_config"], {"bos_token_id": 2, "eos_token_id": [4, 3], "top_k": 5})
        # A file that says where texts end is made, too: else a model's config.json counts more.
        shutil.rmtree(self.out)
        (self.folder / "generation_config.json").unlink()
        self.prepare(self.folder / "a.txt", "--tokenizer", path, "--eos", "<end>")
        self.assertEqual(json.loads((self.out / "tokenizer/generation_config.json").read_text()), {"eos_token_id": [4]})
        self.write("generation_config.json", '{"eos_token_id": 3, "top_k": 5}')
        # Only what they name.
        shutil.rmtree(self.out)
        self.prepare(self.folder / "a.txt", "--tokenizer", path, "--bos", "none")
        config = json.loads((self.out / "tokenizer/tokenizer_config.json").read_text())
        self.assertEqual(config, {"eos_token": "</s>", "add_bos_token": False, "model_max_length": 9})
        self.assertEqual(json.loads((self.out / "tokenizer/generation_config.json").read_text())["eos_token_id"], 3)

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_large_vocabulary_makes_uint32(self):
        names = ["[UNK]", *(f"w{i}" for i in range(70000)), "<end>"]
        path = self.word_tokenizer(names)
        info = self.prepare(self.write("a.txt", "w0 w69999"), "--tokenizer", path, "--eos", "<end>")
        self.assertEqual(self.ids(dtype="<u4"), [1, 70000, 70001])
        self.assertEqual((info["dtype"], info["vocab_size"], info["padded_vocab_size"]), ("uint32", 70002, 70016))

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_bad_tokenizers(self):
        text = self.write("a.txt", "a")
        latin = self.write("latin.txt", "caf\xe9".encode("latin-1"))
        good = self.word_tokenizer(["[UNK]", "a", "</s>"])
        no_eos = self.folder / "no_eos.json"
        no_eos.write_text(good.read_text().replace("</s>", "end"))
        for message, *arguments in (
            ("no_eos.json: has none of <|endoftext|>", text, "--tokenizer", no_eos),
            ("tokenizer.json: has no token <eos>", text, "--tokenizer", good, "--eos", "<eos>"),
            ("a.txt: is not a tokenizer.json", text, "--tokenizer", text),
            ("missing.json: no such tokenizer file", text, "--tokenizer", self.folder / "missing.json"),
            ("latin.txt: is not UTF-8 (byte 3", latin, "--tokenizer", good),
        ):
            with self.subTest(message=message):
                self.refuse(message, *arguments)


if __name__ == "__main__":
    unittest.main()
