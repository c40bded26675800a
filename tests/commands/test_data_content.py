"""What token files hold and what lies beside them: what is refused, where documents begin, and what is shown."""
import array
import gzip
import io
import json
import os
import random
import shutil
import sys
import unittest
import zipfile

from parka_runs import SEQUENCE, VOCAB, RunFolder, metrics, parka, tiny_config, write_tokens

try:
    import tokenizers
except ImportError:
    tokenizers = None

IDS = 40 * SEQUENCE


def zipped(ids):
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("ids.npy", ids)
    return content.getvalue()


class DataFolder(RunFolder):
    def config(self, **data):
        config = tiny_config(self.folder, "fp32", steps=1)
        config["optimizer"]["schedule"]["warmup_steps"] = 0
        config["data"].update(data)
        return config

    def write(self, name, content):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "wb") as file:
            file.write(content if isinstance(content, bytes) else json.dumps(content).encode())
        return self.path(name)

    def describe(self, folder, files, eval=(), **about):
        """A data.json beside token files, which are made."""
        for seed, name in enumerate((*files, *eval)):
            self.write(f"{folder}/{name}", b"")
            write_tokens(self.path(f"{folder}/{name}"), IDS, seed=seed + 20)
        about = {"tokenizer": "t.json", "vocab_size": VOCAB, "bos": [], "eos": 0, "dtype": "uint16", **about}
        self.write(f"{folder}/data.json", {**about, "train": {"files": list(files)}, "eval": {"files": list(eval)}})
        return [self.path(f"{folder}/{name}") for name in files]

    def assert_refused(self, result, *words):
        self.assert_exit(result, 2)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for word in words:
            self.assertIn(word, result.stderr)

    def checked(self, config):
        """By each command that opens data, the cheap ones first."""
        path = self.write_config(config)
        for command in (("config", "check"), ("data",), ("train",)):
            yield parka(*command, path)

    def assert_all_refuse(self, config, *words):
        for result in self.checked(config):
            self.assert_refused(result, *words)
        self.assertFalse(os.path.exists(self.path("run/metrics.jsonl")))

    def assert_all_take(self, config):
        for result in self.checked(config):
            self.assert_exit(result, 0)
        shutil.rmtree(self.path("run"))


class Formats(DataFolder):
    def test_what_is_no_token_file_is_refused_wherever_it_is_named(self):
        ids = array.array("H", (random.Random(1).randrange(50000) for _ in range(IDS))).tobytes()
        lines = b'{"text": "one of many lines"}\n' * 100
        for name, content, words in (("x.jsonl", lines, ["JSON", "parka prepare"]), ("x.gz", gzip.compress(lines), ["gzip"]),
                                     ("x.npz", zipped(ids), ["ZIP"]), ("x.parquet", b"PAR1" + ids, ["Parquet", "parka prepare"]),
                                     ("x.npy", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", ["git lfs pull"])):
            path = self.write(f"texts/{name}", content)
            with self.subTest(name):
                self.assert_refused(parka("data", path), path, *words)
                for place in ({"data": {"train": [path]}}, {"data": {"eval": [path]}}, {"evaluation": {"sets": [f"x={path}"]}}):
                    config = self.config(**place.get("data", {}))
                    config["model"]["vocab_size"] = 50304
                    self.assert_all_refuse({**config, **({"evaluation": place["evaluation"]} if "evaluation" in place else {})}, path, *words)

    def test_ids_of_another_width_are_refused(self):
        draw = random.Random(2).randrange
        for code, vocab, dtype, words in (("I", 70000, "uint16", ["data.token_dtype=uint32"]), ("I", VOCAB, "uint16", ["data.token_dtype=uint32"]),
                                          ("Q", VOCAB, "uint16", ["64 bits"]), ("Q", 70000, "uint32", ["64 bits"]),
                                          ("H", VOCAB, "uint32", ["data.token_dtype", "model.vocab_size"]),
                                          ("H", 70000, "uint16", ["data.token_dtype=uint32", "model.vocab_size"])):
            path = self.write("ids/x.npy", array.array(code, (draw(min(vocab, 65536)) for _ in range(IDS))).tobytes())
            with self.subTest(code=code, vocab=vocab, dtype=dtype):
                config = self.config(train=[path], eval=[], token_dtype=dtype)
                config["model"]["vocab_size"] = vocab
                config["training"]["eval_interval"] = 0
                self.assert_all_refuse(config, path, *words)

    def test_a_config_is_checked_where_its_data_are_not(self):
        path = self.write_config(self.config(train=["/nowhere/a.npy", "/nowhere/*.npy"], eval=["/nowhere/b.npy"]))
        self.assert_exit(parka("config", "check", path), 0)
        refused = parka("config", "check", path, "--set", f'data.eval=["/nowhere/b.npy", "{self.write("x/y", b"some text " * 100)}"]')
        self.assert_refused(refused, "x/y", "text")


class Described(DataFolder):
    def test_conversations_need_their_mask_documents_and_length(self):
        about = {"chat": "chatml", "sequence_length": SEQUENCE}
        files = self.describe("chats", ["train-00000.npy"], **about)
        self.write("chats/train-00000.npy.mask", (b"\2" + b"\1" * (SEQUENCE - 1)) * 40)
        whole = {"loss_mask": True, "documents": "separate"}
        config = self.config(train=files, eval=[], **whole)
        config["training"]["eval_interval"] = 0
        self.assert_all_take(config)
        for change in ({"loss_mask": False}, {"documents": "joined"}, {"sequence_length": 2 * SEQUENCE}):
            with self.subTest(change):
                wanted = {**whole, "sequence_length": SEQUENCE}
                key, = change
                value = wanted[key] if isinstance(wanted[key], (str, int)) and wanted[key] is not True else "true"
                self.assert_all_refuse({**config, "data": {**config["data"], **change}}, files[0], f"data.{key}={value}")
        # Held-out data, too.
        plain = self.config(eval=files)
        self.assert_all_refuse(plain, files[0], "data.loss_mask=true", "data.documents=separate")
        self.assert_all_take(self.config())
        self.assert_exit(self.train(self.config()), 0)
        self.assert_refused(parka("eval", self.path("run"), "--data", *files), files[0], "data.loss_mask=true")
        settings = [word for key in ("loss_mask=true", "documents=separate") for word in ("--set", f"data.{key}")]
        self.assert_exit(parka("eval", self.path("run"), "--data", *files, *settings), 0)

    def test_a_vocabulary_that_the_model_does_not_have_is_warned_of_once(self):
        files = self.describe("made", ["train-00000.npy", "train-00001.npy"], vocab_size=VOCAB + 1)
        for result in self.checked(self.config(train=files)):
            self.assert_exit(result, 0)
            told = [line for line in (result.stdout + result.stderr).splitlines() if files[0] in line and "model.vocab_size" in line]
            self.assertEqual(len(told), 1, result.stdout + result.stderr)

    def test_ids_of_16_bits_are_taken_for_a_large_vocabulary_if_they_are_said_to_be(self):
        files = self.describe("made", ["train-00000.npy"])
        config = self.config(train=files, eval=[])
        config["training"]["eval_interval"] = 0
        config["model"]["vocab_size"] = 70000
        self.assert_all_take(config)

    def test_a_mask_that_is_not_read_is_refused(self):
        path = self.path("a.npy")
        config = self.config(train=[path], eval=[])
        config["training"]["eval_interval"] = 0
        self.write("a.npy.mask", b"\3" + b"\1" * (21 * SEQUENCE + 4))
        by_id = {"documents": "separate", "document_end": 1}
        for data in ({}, by_id):
            self.assert_all_refuse({**config, "data": {**config["data"], **data}}, "a.npy.mask", "data.loss_mask=true")
        # It may be there for the documents alone.
        for data in ({"loss_mask": True}, {"documents": "separate"}, {"loss_mask": True, **by_id}):
            self.assert_all_take({**config, "data": {**config["data"], **data}})


class HeldOut(DataFolder):
    def test_a_file_is_not_in_training_and_held_out(self):
        link, second = self.path("link.npy"), self.path("second.npy")
        os.symlink(self.path("a.npy"), link)
        os.link(self.path("b.npy"), second)
        for name, place in (("the same path", {"data": {"eval": [self.path("a.npy")]}}), ("a link", {"data": {"eval": [link]}}),
                            ("a hard link in a set", {"evaluation": {"sets": [f"s={second}"]}}),
                            ("a pattern", {"evaluation": {"sets": [f"s={self.path('b*.npy')}"]}})):
            with self.subTest(name):
                config = self.config(**place.get("data", {}))
                config.update({key: value for key, value in place.items() if key != "data"})
                self.assert_all_refuse(config, "data.train", "data.eval", "evaluation.sets")
        # What is not trained on may be evaluated on twice.
        shutil.copy(self.path("a.npy"), self.path("copy.npy"))
        self.assert_all_refuse(self.config(eval=[self.path("copy.npy")]), "copy.npy", "data.train", "data.eval")
        config = self.config(train=[self.path("b.npy")], eval=[self.path("copy.npy")])
        config["evaluation"] = {"sets": [f"s={self.path('copy.npy')}"]}
        self.assert_all_take(config)

    def test_a_pattern_does_not_take_what_was_held_out(self):
        self.describe("fw", ["train-00000.npy", "train-00001.npy"], eval=["eval-00000.npy"])
        for pattern in ("*.npy", "*-00000.npy", "[et]*"):
            self.assert_all_refuse(self.config(train=[self.path(f"fw/{pattern}")]), "eval-00000.npy", self.path("fw/train-*.npy"))
        self.assert_all_take(self.config(train=[self.path("fw/train-*.npy")], eval=[self.path("fw/eval-*.npy")]))
        # What was made for training is not held out, and files that are exchanged are not meant.
        for held_out in ("*.npy", "train-0000?.npy"):
            self.assert_all_refuse(self.config(eval=[self.path(f"fw/{held_out}")]), "data.eval", "train-00000.npy", self.path("fw/eval-*.npy"))
        exchanged = self.config(train=[self.path("fw/eval-00000.npy")], eval=[self.path("fw/train-00001.npy")])
        self.assert_all_refuse(exchanged, "data.eval", "train-00001.npy", self.path("fw/eval-*.npy"))
        self.assert_all_take(self.config(train=[self.path("fw/train-00000.npy")], eval=[self.path("fw/train-00001.npy")]))  # as they are named
        # By its own name it may be trained on.
        self.assert_all_take(self.config(train=[self.path("fw/train-*.npy"), self.path("fw/eval-00000.npy")]))


class Documents(DataFolder):
    ONE, BOTH = 5, {"documents": "separate", "document_start": 5, "document_end": 5}

    def write_documents(self, folder, **about):
        """Three documents of 14 tokens, each between two of one id."""
        files = self.describe(folder, ["train-00000.npy"], **about)
        ids = [self.ONE, *range(10, 22), self.ONE] * 3
        self.write(f"{folder}/train-00000.npy", array.array("H", ids).tobytes())
        return files

    def config(self, files, **data):
        config = super().config(train=files, eval=[], sequence_length=42, **data)
        config["training"].update(eval_interval=0, global_batch_size=1, micro_batch_size=1)
        return config

    def test_one_id_begins_and_ends_documents(self):
        files = self.write_documents("made", bos=[self.ONE], eos=self.ONE)
        for data in ({"document_end": 5}, {"document_start": 5}, {"document_end": 5, "document_start": 6}):
            self.assert_all_refuse(self.config(files, documents="separate", **data), files[0], "data.document_start=5", "data.document_end=5")
        config = self.config(files, **self.BOTH)
        path = self.write_config(config)
        self.assertIn(", 3 documents", parka("data", path).stdout)
        self.assertIn(", 3 documents", parka("data", files[0], "--document-start", "5", "--document-end", "5").stdout)
        self.assert_exit(parka("train", path), 0)
        self.assertEqual([record["targets"] for record in metrics(self.path("run"))], [39])
        shutil.rmtree(self.path("run"))
        self.assert_all_take(self.config(files))  # documents may be joined

    def test_ids_of_other_documents_are_refused(self):
        files = self.write_documents("made", bos=[], eos=self.ONE)
        for data in ({"document_end": 0}, {"document_start": 5}, {"document_start": 5, "document_end": 5}):
            self.assert_all_refuse(self.config(files, documents="separate", **data), files[0], "data.document_end=5")
        self.assert_all_take(self.config(files, documents="separate", document_end=5))

    def test_tokens_that_begin_documents_are_enough(self):
        files = self.describe("made", ["train-00000.npy"], bos=[self.ONE])
        self.write("made/train-00000.npy", array.array("H", [self.ONE, *range(10, 23)] * 3).tobytes())
        path = self.write_config(self.config(files, documents="separate", document_start=self.ONE))
        self.assertIn(", 3 documents", parka("data", path).stdout)
        self.assert_exit(parka("train", path), 0)
        self.assertEqual([record["targets"] for record in metrics(self.path("run"))], [39])
        refused = parka("train", path, "--set", "data.document_start=-1", "--set", "data.document_end=5", "--set", "training.steps=2")
        self.assert_exit(refused, 2)
        self.assertIn("data.document_start", refused.stderr)


class Shown(DataFolder):
    def shown(self, *arguments):
        result = parka("data", *arguments, env={**os.environ, "PARKA_PYTHON": sys.executable})
        self.assert_exit(result, 0)
        return result.stdout

    def test_targets_and_documents_are_shown_in_ids(self):
        path = self.write("ids/x.npy", array.array("H", [1, 2, 3, 4, 1, 2, 3, 4]).tobytes())
        self.write("ids/x.npy.mask", bytes([2, 0, 1, 1, 2, 1, 0, 1]))
        shown = [line.rstrip() for line in self.shown(path, "--show", "1").splitlines()]
        self.assertEqual(shown, [f"{path}, sequence 0: 8 tokens, 4 targets", "document | 1 2", "target   | 3 4", "document | 1",
                                 "target   | 2", "         | 3", "target   | 4", ""])
        shown = self.shown(path, "--show", "1", "--document-start", "3")
        self.assertIn("document | 3", shown)
        config = self.config(train=[path, self.path("a.npy")], eval=[], sequence_length=4, documents="separate", document_end=2)
        os.rename(path + ".mask", path + ".kept")
        config["training"]["eval_interval"] = 0
        shown = self.shown(self.write_config(config), "--show", "3")
        self.assertEqual(shown.count("sequence "), 3)
        self.assertEqual(shown.count(f"{path}, sequence "), 2)
        self.assertIn("document | 1 \ntarget   | 2 \ndocument | 3 \ntarget   | 4 \n", shown)

    def test_text_of_bytes_is_shown(self):
        files = self.describe("made", ["train-00000.npy"], tokenizer="bytes", tokenizer_sha256=None, vocab_size=257, eos=256)
        self.write("made/train-00000.npy", array.array("H", [*b"caf\xc3\xa9\n\tx", 256, 256]).tobytes())
        shown = self.shown(files[0], "--show", "1")
        self.assertIn("         | c\ntarget   | af\u00e9\\n\ntarget   | \\x09x<256>(x 2)\n", shown)

    @unittest.skipIf(tokenizers is None, "tokenizers is missing")
    def test_text_of_a_tokenizer_is_shown_with_its_special_tokens(self):
        model = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "text", "llama3")
        tokenizer = tokenizers.Tokenizer.from_file(os.path.join(model, "tokenizer.json"))
        begin, end = (tokenizer.token_to_id(token) for token in ("<|begin_of_text|>", "<|end_of_text|>"))
        asked, said = (tokenizer.encode(text, add_special_tokens=False).ids for text in ("The cat\nsat", " on the m\u00e4t"))
        ids = [begin, *asked, *said, end, end, end]
        path = self.write("made/x.npy", array.array("H", ids).tobytes())
        self.write("made/x.npy.mask", bytes([2, *[0] * len(asked), *[1] * (len(said) + 1), 2, 0]))
        lines = ["document | <|begin_of_text|>The cat\\n", "         | sat", "target   |  on the m\u00e4t<|end_of_text|>",
                 "document | <|end_of_text|>(x 2)"]
        given = self.shown(path, "--show", "1", "--tokenizer", model)
        self.assertEqual(given.splitlines()[1:5], lines)
        shutil.copytree(model, self.path("made/tokenizer"))
        self.assertEqual(self.shown(path, "--show", "1"), given)


if __name__ == "__main__":
    unittest.main()
