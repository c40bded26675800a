"""Token files and masks that are not those which their data.json describes, and others that no one meant, are refused before a step.
Exits with 77 (skipped) where a package is missing."""
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import jinja2  # noqa: F401
    import tokenizers  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

from parka_runs import PROGRAM, parka, starters
from refusals import assert_ended_well, assert_refused, assert_told
from test_prepared_conversations import prepare
from token_runs import TokenRuns, np, random_ids

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from tiny_tokenizers import llama2_like, qwen_like  # noqa: E402

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures/huggingface/llama_mha"
LENGTH, VOCAB = 256, 272
CHAT = {"sequence_length": LENGTH, "loss_mask": True, "documents": "separate"}


class Files(TokenRuns):
    def pattern(self, pattern, **data):
        return self.config([self.path(pattern)], VOCAB, **data)

    def assert_refused_everywhere(self, config, *words, commands=(("config", "check"), ("data",), ("train",))):
        self.forget_run()
        path = self.write_config(config)
        for command in commands:
            with self.subTest(command=command):
                self.assert_not_trained(parka(*command, path), *words)

    def assert_told_everywhere(self, config, *words, untold=False):
        if config["data"].get("eval") or "evaluation" in config:
            config["training"]["eval_interval"] = config["training"]["steps"]
        self.forget_run()
        path = self.write_config(config)
        for command in (("config", "check"), ("data",), ("train",)):
            with self.subTest(command=command):
                result = parka(*command, path)
                if not untold:
                    assert_told(self, result, *words)
                    continue
                assert_ended_well(self, result)
                self.assertFalse([line for line in result.stderr.splitlines() if "warning" in line and all(word in line for word in words)], result.stderr)

    def assert_taken(self, config):
        self.forget_run()
        path = self.write_config(config)
        for command in (("config", "check"), ("data",), ("train",)):
            assert_ended_well(self, parka(*command, path))


class Prepared(Files):
    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        cls.addClassCleanup(temporary.cleanup)
        cls.made, chats = os.path.join(temporary.name, "made"), os.path.join(temporary.name, "chats.jsonl")
        with open(chats, "w", encoding="utf-8") as file:
            for number in range(400):
                said = [{"role": "user", "content": f"question {number} " + "why " * (number % 11)}, {"role": "assistant", "content": f"answer {number}"}]
                file.write(json.dumps({"messages": said}) + "\n")
        prepare(chats, "--chat", "chatml", "--sequence-length", str(LENGTH), "--tokens-per-file", "16384", "--out", cls.made)

    def setUp(self):
        super().setUp()
        self.folder_of_data = self.path("chats")
        shutil.copytree(self.made, self.folder_of_data)

    def of(self, number, suffix=""):
        return f"{self.folder_of_data}/train-{number:05}.npy{suffix}"

    def all(self, **data):
        return self.pattern("chats/train-*.npy", **{**CHAT, **data})

    def swap(self, one, other):
        os.rename(one, one + ".kept")
        os.rename(other, one)
        os.rename(one + ".kept", other)

    def flip_in_the_middle(self, path):
        with open(path, "r+b") as file:
            file.seek(os.path.getsize(path) // 2)
            byte = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte[0] ^ 1]))

    def test_what_was_prepared_is_taken(self):
        self.assertTrue(os.path.exists(self.of(2)))
        self.assert_taken(self.all(checksum=True))
        with open(f"{self.folder_of_data}/data.json", encoding="utf-8") as file:
            described = json.load(file)
        first = parka("data", self.of(0), "--json")
        assert_ended_well(self, first)
        self.assertEqual(described["contents"]["train-00000.npy"]["checksum"], json.loads(first.stdout)["checksum"])
        self.assertEqual(sorted(described["contents"]), sorted(name for name in os.listdir(self.folder_of_data) if name.startswith("train")))

    def test_a_file_that_is_cut_at_a_whole_sequence(self):
        os.truncate(self.of(1), os.path.getsize(self.of(1)) - 2 * LENGTH)
        os.truncate(self.of(1, ".mask"), os.path.getsize(self.of(1, ".mask")) - LENGTH)
        self.assert_refused_everywhere(self.all(), self.of(1))
        self.assert_refused_everywhere(self.config([self.of(1)], VOCAB, **CHAT), self.of(1))
        assert_refused(self, parka("data", self.of(1)), self.of(1))

    def test_files_and_masks_under_each_others_names(self):
        for suffix in ("", ".mask"):
            with self.subTest(suffix=suffix):
                self.swap(self.of(0, suffix), self.of(1, suffix))
                self.assert_refused_everywhere(self.all(), self.of(0, suffix))
                self.swap(self.of(0, suffix), self.of(1, suffix))
        self.assert_taken(self.all())

    def test_a_file_of_another_tokenization(self):
        ids = np.fromfile(self.of(0), "<u2")
        (ids ^ 1).tofile(self.of(0))
        self.assert_refused_everywhere(self.all(), self.of(0))

    def test_damage_that_only_a_checksum_tells(self):
        whole = (("config", "check"), ("data",))
        for suffix in ("", ".mask"):
            with self.subTest(suffix=suffix):
                self.assertGreater(os.path.getsize(self.of(0, suffix)), 2 * 4096 + 2)
                self.flip_in_the_middle(self.of(0, suffix))
                self.assert_refused_everywhere(self.all(), self.of(0, suffix), commands=whole)
                self.assert_refused_everywhere(self.all(checksum=True), self.of(0, suffix))
                assert_refused(self, parka("data", self.of(0)), self.of(0, suffix))
                self.flip_in_the_middle(self.of(0, suffix))

    def test_a_file_that_is_missing(self):
        for suffix in ("", ".mask"):
            os.remove(self.of(1, suffix))
        self.assert_refused_everywhere(self.all(), self.of(1))
        self.assert_taken(self.config([self.of(0), self.of(2)], VOCAB, **CHAT))  # as they are named

    def test_a_file_that_is_left_of_another_preparation(self):
        for suffix in ("", ".mask"):
            shutil.copy(self.of(0, suffix), self.of(9, suffix))
        self.assert_refused_everywhere(self.all(), self.of(9))
        self.assert_taken(self.config([self.of(0)], VOCAB, **CHAT))

    def test_a_description_of_something_else_is_told_and_a_damaged_one_refused(self):
        path = f"{self.folder_of_data}/data.json"
        with open(path, encoding="utf-8") as file:
            described = json.load(file)
        for other in ({}, [{"messages": []}], {"name": "chats"}, {"dtype": "uint16"}):
            with self.subTest(other):
                self.write("chats/data.json", json.dumps(other).encode())
                self.forget_run()
                result = self.train(self.all())
                assert_told(self, result, path)
                self.assertEqual(result.stderr.count(path), 1, result.stderr)
        for key, value in (("vocab_size", "272"), ("vocab_size", 272.5), ("eos", None), ("eos", [0]), ("sequence_length", "256"), ("bos", "0")):
            with self.subTest(key=key, value=value):
                self.write("chats/data.json", json.dumps({**described, key: value}).encode())
                self.assert_refused_everywhere(self.all(), path, key)
                assert_refused(self, parka("data", self.of(0)), path, key)

    def test_conversations_of_two_templates_are_told(self):
        other = self.path("other")
        shutil.copytree(self.made, other)
        with open(f"{other}/data.json", "r+", encoding="utf-8") as file:
            described = json.load(file)
            described["chat"] = "llama3"
            file.seek(0)
            file.truncate()
            json.dump(described, file)
        config = self.config([self.of(0), f"{other}/train-00001.npy"], VOCAB, **CHAT)
        assert_told(self, self.train(config), "llama3", "chatml", other)

    def test_an_older_description_does_not_tell(self):
        path = f"{self.folder_of_data}/data.json"
        with open(path, encoding="utf-8") as file:
            described = json.load(file)
        del described["contents"]
        self.flip_in_the_middle(self.of(0, ".mask"))
        for contents in ({}, {"contents": "of another program"}, {"contents": {"train-00000.npy": 1}}):
            with open(path, "w", encoding="utf-8") as file:
                json.dump({**described, **contents}, file)
            self.assert_taken(self.all(checksum=True))


    def test_a_mask_that_says_the_opposite(self):
        """Of conversations, without what describes them; and of documents that ids tell."""
        os.remove(f"{self.folder_of_data}/data.json")
        files = self.config([self.of(0)], VOCAB, **CHAT)
        self.assert_told_everywhere(files, "train-00000.npy.mask", untold=True)
        marks = np.fromfile(self.of(0, ".mask"), "u1")
        (marks ^ 1).tofile(self.of(0, ".mask"))
        self.assert_told_everywhere(files, "train-00000.npy.mask")

        ids = random_ids(64 * LENGTH, VOCAB - 2).reshape(-1, 32)
        ids[:, -1] = VOCAB - 1
        x = self.write("x/x.npy", ids)
        by_ids = self.config([x], VOCAB, loss_mask=True, documents="separate", document_end=VOCAB - 1, sequence_length=LENGTH)
        for first, last, is_told in ((0, 12, True), (0, 24, True), (12, 32, False), (24, 31, False), (0, 31, False)):
            mask = np.zeros(ids.shape, "u1")
            mask[:, first:last] = 1
            self.write("x/x.npy.mask", mask)
            with self.subTest(first=first, last=last):
                self.assert_told_everywhere(by_ids, "x.npy.mask", untold=not is_told)


    def masked(self, mask, **data):
        """Told by the mask of random ids alone, without what describes them."""
        ids = random_ids(mask.size, VOCAB)
        ids[mask >= 4] = 7
        x = self.write("y/y.npy", ids)
        self.write("y/y.npy.mask", (mask & 3).astype("u1"))
        return self.config([x], VOCAB, **{"loss_mask": True, "sequence_length": LENGTH, **data})

    def test_a_mask_with_too_few_targets(self):
        count = np.arange(64 * LENGTH)
        for mask, is_told in ((count % 100 == 7, True), (count % 200 < 3, True), (count % 30 < 3, False)):
            self.assert_told_everywhere(self.masked(mask.astype("u1")), "data.loss_mask", "targets", untold=not is_told)

    def test_a_part_of_a_mask_without_targets(self):
        count, half = np.arange(64 * LENGTH), 32 * LENGTH
        for without, is_told in ((count >= half, True), (count < half, True), (count // LENGTH % 3 == 1, True), (count // LENGTH % 8 == 1, False)):
            self.assert_told_everywhere(self.masked((~without & (count % 4 < 3)).astype("u1")), "data.loss_mask", "sequences", untold=not is_told)

    def test_targets_that_are_padding(self):
        count = np.arange(64 * LENGTH)
        for first, share, is_told in ((0, 0.5, True), (0.6, 1, True), (0, 0.1, False), (1, 1, False)):
            is_padding = (count % LENGTH >= first * LENGTH) & (count % LENGTH < share * LENGTH)
            mask = np.where(is_padding, 5, count % 4 < 3).astype("u1")
            self.assert_told_everywhere(self.masked(mask), "data.loss_mask", "id", untold=not is_told)
        is_padding = count % LENGTH >= LENGTH // 2  # which is no target
        self.assert_told_everywhere(self.masked(np.where(is_padding, 4, count % 4 < 3).astype("u1")), "data.loss_mask", "id", untold=True)

    def test_targets_of_a_mask_that_are_not_read(self):
        count = np.arange(64 * LENGTH)
        starts = np.where(count % 32 == 0, 2, 0)
        joined = {"loss_mask": False, "documents": "separate"}
        for targets, is_told in ((count % 3 == 0, True), (count % 32 > 20, True), (count < 0, False), (count >= 0, False)):
            self.assert_told_everywhere(self.masked(starts + targets, **joined), "y.npy.mask", "data.loss_mask", untold=not is_told)


class Tokenizers(Files):
    def setUp(self):
        super().setUp()
        self.write("text.txt", b"a plain text of some words\n" * 60)
        self.one, self.other = (str(make(Path(self.path(name)))) for make, name in ((qwen_like, "one"), (llama2_like, "other")))
        for name, tokenizer in (("a", self.one), ("b", self.other), ("c", self.one), ("d", "bytes")):
            prepare(self.path("text.txt"), "--tokenizer", tokenizer, "--out", self.path(name))

    def of(self, *folders, **data):
        return self.config([self.path(f"{folder}/train-00000.npy") for folder in folders], 1024, **data)

    def test_the_runs_tokenizer_is_that_of_the_data(self):
        self.assert_refused_everywhere(self.of("a", tokenizer=self.other), self.path("a/tokenizer"), os.path.dirname(self.other), "data.tokenizer")
        self.assert_refused_everywhere(self.of("d", tokenizer=self.other), self.path("d"), os.path.dirname(self.other), "data.tokenizer")
        self.assert_taken(self.of("a", tokenizer=self.one))

    def test_the_imported_models_tokenizer_is_that_of_the_data(self):
        model = shutil.copytree(FIXTURE, self.path("model"))
        for name in os.listdir(os.path.dirname(self.one)):
            shutil.copy(f"{os.path.dirname(self.one)}/{name}", model)
        for source, kept in ((FIXTURE, "without"), (model, "imported")):
            assert_ended_well(self, parka("import", source, "--out", self.path(kept)))

        def trained(data, base):
            folder = self.path("run")
            values = {"data.train": json.dumps([self.path(f"{data}/train-00000.npy")]), "data.sequence_length": 16, "training.steps": 1,
                      "training.global_batch_size": 1, "training.micro_batch_size": 1, "training.eval_interval": 0, "device.kind": "cpu",
                      "optimizer.schedule.warmup_steps": 0, "checkpoint.folder": folder}
            self.forget_run()
            return parka("train", f"{self.path(base)}/config.json", *(word for key, value in values.items() for word in ("--set", f"{key}={value}")))

        self.assert_not_trained(trained("d", "imported"), self.path("d"), self.path("imported"), "--tokenizer")
        self.assert_not_trained(trained("b", "imported"), self.path("b/tokenizer"))
        shutil.rmtree(self.path("b/tokenizer"))
        self.assert_not_trained(trained("b", "imported"), self.path("b/tokenizer"), self.path("imported"))
        self.assert_not_trained(trained("d", "without"), "model.vocab_size")  # which is read later

    def test_ids_of_text_that_end_documents(self):
        ids = np.fromfile(self.path("a/train-00000.npy"), "<u2")
        self.write("plain/x.npy", np.tile(ids, 5))
        with open(self.one, encoding="utf-8") as file:
            tokenizer = json.load(file)
        vocab, end = tokenizer["model"]["vocab"], int(ids[-1])
        for key in ("document_start", "document_end"):
            for number in (vocab["\u010a"], int(ids[0])):  # of a line end, byte by byte, and of the first word
                plain = self.config([self.path("plain/x.npy")], 1024, tokenizer=os.path.dirname(self.one), documents="separate", **{key: number})
                self.assert_told_everywhere(plain, f"data.{key}", str(number))
            plain["data"][key] = end
            self.assert_told_everywhere(plain, f"data.{key} =", untold=True)

    def test_data_without_the_copy_of_their_tokenizer(self):
        for folder in "ab":
            shutil.rmtree(self.path(f"{folder}/tokenizer"))
        for tokenizer in (self.one, self.other):
            self.assert_refused_everywhere(self.of("a", tokenizer=tokenizer), self.path("a/tokenizer"), os.path.dirname(tokenizer))
        self.assert_refused_everywhere(self.of("a", "b"), self.path("a"), self.path("b"))
        self.assert_refused_everywhere(self.of("b", "c"), self.path("b"), self.path("c"))
        self.assert_taken(self.of("a", "c"))  # one checksum
        self.assert_taken(self.of("a"))

    def test_folders_of_several_tokenizers(self):
        for other in "bd":
            self.assert_refused_everywhere(self.of("a", other), self.path("a"), self.path(other))
        os.remove(self.path("c/train-00000.npy"))
        shutil.copy(self.path("a/train-00000.npy"), self.path("c"))
        self.assert_taken(self.of("a", "c"))


class Taken(Files):
    """What patterns and lists take beside token files."""

    def write_ids(self, name, seed=1):
        return self.write(name, random_ids(64 * 32, VOCAB, seed=seed))

    def test_masks_under_names_of_token_files(self):
        marks = np.random.default_rng(1).integers(0, 2, 4000).astype("u1")
        for name in ("labels_mask_part_0.npy", "x_mask.bin", "y.npy"):
            with self.subTest(name):
                self.write_ids("sft/token_ids_part_0.npy")
                path = self.write(f"sft/{name}", marks)
                self.assert_refused_everywhere({**self.pattern("sft/*"), "model": {**self.pattern("")["model"], "vocab_size": 50304}}, path, "mask")
                os.remove(path)
        path = self.write("sft/labels_mask_part_0.npy", b"\1" * 4096)
        self.assert_refused_everywhere({**self.pattern("sft/*"), "model": {**self.pattern("")["model"], "vocab_size": 50304}}, path, "mask")

    def test_a_mask_without_the_ending_of_its_file(self):
        self.write_ids("m/train-0.npy")
        mask = self.write("m/train-0.mask", b"\1" * 2048)
        for pattern in ("m/train-*", "m/*.npy", "m/train-0.npy"):
            self.assert_refused_everywhere(self.pattern(pattern), mask)

    def test_leftovers_by_patterns(self):
        for end in ("~", ".bak", ".tmp", ".part", ".crdownload"):
            with self.subTest(end):
                self.write_ids("left/x.npy")
                path = self.write_ids(f"left/x.npy{end}", seed=2)
                self.assert_refused_everywhere(self.pattern("left/*"), path)
                assert_refused(self, parka("data", self.path("left/*")), path)
                self.assert_taken(self.pattern(f"left/x.npy{end}"))  # as it is named
                os.remove(path)

    def test_a_file_by_several_names(self):
        one = self.write_ids("twice/one.npy")
        self.write_ids("twice/two.npy", seed=2)
        self.assert_refused_everywhere(self.config([self.path("twice/*.npy"), one], VOCAB), "one.npy")
        self.assert_refused_everywhere(self.config([self.path("twice/o*.npy"), self.path("twice/*e.npy")], VOCAB), "one.npy")
        os.symlink(one, self.path("twice/link.npy"))
        self.assert_refused_everywhere(self.pattern("twice/*"), "link.npy", "one.npy")
        self.assert_refused_everywhere(self.config([one, self.path("twice/link.npy")], VOCAB), "link.npy", "one.npy")
        os.remove(self.path("twice/link.npy"))
        shutil.copy(one, self.path("twice/one (1).npy"))
        for config in (self.pattern("twice/*"), self.config([one, one], VOCAB)):
            self.forget_run()
            assert_told(self, self.train(config), "one.npy", "twice")


    def test_labels_beside_inputs(self):
        ids = random_ids(64 * 32 + 2, VOCAB)
        for name, first in (("x", 0), ("y", 1)):
            self.write(f"{name}/{name}.bin", ids[first:first + 64 * 32])
        for files in (["x/x.bin", "y/y.bin"], ["y/*.bin", "x/x.bin"], ["[xy]/*.bin"]):
            self.assert_refused_everywhere(self.config([self.path(name) for name in files], VOCAB), "x.bin", "y.bin", "data.train")
        self.write("y/y.bin", ids[2:])
        self.assert_taken(self.config([self.path("[xy]/*.bin")], VOCAB))

    def test_a_part_of_training_data_that_is_held_out(self):
        ids = random_ids(400 * 32, VOCAB)
        train = self.write("train.bin", ids)
        for part in (ids[-100 * 32:], ids[:100 * 32], ids[777:9000], ids[5000:5200]):
            held_out = self.write("val.bin", part)
            self.assert_told_everywhere(self.config([train], VOCAB, eval=[held_out]), train, held_out)
        self.write("sets/x.bin", np.concatenate((np.zeros(600, "<u2"), ids[1001:3001], np.zeros(600, "<u2"))))
        self.assert_told_everywhere(self.config([train], VOCAB) | {"evaluation": {"sets": [f"x={self.path('sets/*.bin')}"]}}, train, "x.bin")
        # Its documents in another order, or some of them among others.
        documents, others = (random_ids(120 * 100, VOCAB - 1, seed=seed).reshape(120, 100) for seed in (5, 6))
        documents[:, -1] = others[:, -1] = VOCAB - 1
        train = self.write("train.bin", documents)
        apart = {"documents": "separate", "document_end": VOCAB - 1}
        for part in (documents[::-1], documents[7:60:3], np.concatenate((others[:50], documents[20:90:2]))):
            held_out = self.write("val.bin", part)
            self.assert_told_everywhere(self.config([train], VOCAB, eval=[held_out], **apart), train, held_out)
        held_out = self.write("val.bin", others)
        self.assert_told_everywhere(self.config([train], VOCAB, eval=[held_out], **apart), train, held_out, untold=True)
        # What made the data tells where documents end, too.
        with open(self.path("texts.jsonl"), "w", encoding="utf-8") as file:
            file.writelines(json.dumps({"text": " ".join(str((number + 7) ** power) for power in range(2, 16))}) + "\n" for number in range(200))
        prepare(self.path("texts.jsonl"), "--jsonl-field", "text", "--out", self.path("prepared"))
        made = self.path("prepared/train-00000.npy")
        documents = np.split(found := np.fromfile(made, "<u2"), np.flatnonzero(found == 256) + 1)[:-1]
        for part in (documents[::-1], documents[3::2]):
            held_out = self.write("val.bin", np.concatenate(part))
            self.assert_told_everywhere(self.config([made], VOCAB, eval=[held_out]), made, held_out)
        train, copy = self.write("train.bin", ids), self.write("val.bin", ids)
        self.assert_refused_everywhere(self.config([train], VOCAB, eval=[copy]), train, copy)
        self.assert_refused_everywhere(self.config([self.path("t*.bin")], VOCAB, eval=[train]), train)
        padding = np.zeros(2200, "<u2")
        self.write("train.bin", np.concatenate((ids, padding)))
        self.write("val.bin", np.concatenate((random_ids(12000, VOCAB, seed=1), padding)))
        self.forget_run()
        result = self.train(self.config([train], VOCAB, eval=[held_out]))
        assert_ended_well(self, result)
        self.assertFalse([line for line in result.stderr.splitlines() if train in line and held_out in line])

    def test_a_mask_that_says_one_thing_alone(self):
        path = self.write_ids("m/x.npy")
        for marks, is_told in ((b"\1" * 2048, True), (b"\3" + b"\1" * 2047, True), (b"\0\1" * 1024, False)):
            self.write("m/x.npy.mask", marks)
            self.forget_run()
            result = self.train(self.pattern("m/x.npy", loss_mask=True))
            assert_ended_well(self, result)
            self.assertEqual("warning" in result.stderr, is_told, result.stderr)
            self.assertEqual(f"{path}.mask" in result.stderr, is_told, result.stderr)
            self.assertRegex(result.stderr, "100 %|97 %" if is_told else " [45][0-9] %")


    def test_files_named_for_the_other_use(self):
        for number, name in enumerate(("train_0.bin", "val_0.bin", "b.bin", "c.bin", "validate.bin")):
            self.write(f"n/{name}", random_ids(64 * 32, VOCAB, seed=number))
        for name in ("val_0", "corpus-test.000", "Dev", "x.valid"):
            os.rename(self.path("n/val_0.bin"), self.path(f"n/{name}.bin"))
            self.assert_told_everywhere(self.pattern("n/*.bin"), "data.train", f"{name}.bin")
            self.assert_told_everywhere(self.config([self.path(f"n/{name}.bin")], VOCAB), "data.train", "named", untold=True)
            self.assert_told_everywhere(self.pattern("n/[bc].bin"), "data.train", "named", untold=True)
            os.rename(self.path(f"n/{name}.bin"), self.path("n/val_0.bin"))
        for name, is_told in (("train_0", True), ("x.Train", True), ("trainer", False), ("val_0", False)):
            self.write(f"n/{name}.bin", random_ids(64 * 32, VOCAB, seed=9))
            self.assert_told_everywhere(self.config([self.path("n/b.bin")], VOCAB, eval=[self.path(f"n/{name}.bin")]), "data.eval", "named", untold=not is_told)


class Starts(Files):
    def test_rows_that_no_token_has(self):
        self.write("few/x.npy", random_ids(64 * 256, 500))
        for vocab, is_told in ((2000, True), (50304, True), (1900, False), (512, False)):
            with self.subTest(vocab):
                self.assert_told_everywhere(self.config([self.path("few/x.npy")], vocab), "model.vocab_size", str(vocab), untold=not is_told)

    def test_a_start_from_another_model_or_a_shorter_one(self):
        assert_ended_well(self, parka("import", FIXTURE, "--out", self.path("model")))
        with open(self.path("model/config.json"), encoding="utf-8") as file:
            model = json.loads(file.read().split("\n", 1)[1])["model"]  # behind a comment
        path = self.write("x.npy", random_ids(64 * 256, 83))

        def config(length=64, source="model", **changes):
            made = self.config([path], 83, sequence_length=length)
            made["model"] = model | changes
            made["checkpoint"].update(init_from=self.path(source), folder=self.path("run"))
            made["checkpoint"]["save_final"] = source == "model"
            return made

        self.assert_told_everywhere(config(), "data.sequence_length", untold=True)
        os.rename(self.path("run"), self.path("first"))  # it is of 64 positions, too
        for source in ("model", "first"):
            for length, changes, is_told in ((65, {}, True), (256, {}, True), (32, {}, False), (256, {"rope_theta": 1e6}, False),
                                             (256, {"rope_scaling": {"kind": "linear", "factor": 4}}, False)):
                with self.subTest(source=source, length=length, **changes):
                    self.assert_told_everywhere(config(length, source, **changes), "data.sequence_length", untold=not is_told)
            for key, value in (("num_heads", 2), ("num_heads", 8)):
                self.assert_refused_everywhere(config(source=source, head_dim=0, num_kv_heads=0, **{key: value}), f"model.{key}", "checkpoint.init_from")
            self.assert_refused_everywhere(config(source=source, num_heads=4, num_kv_heads=2, head_dim=8), "model.num_kv_heads", "checkpoint.init_from")

    def test_copies_of_ranks_that_differ(self):
        for host in ("one", "two"):
            for number in range(2):
                self.write(f"{host}/{number}.npy", random_ids(64 * 256, VOCAB, seed=number))
        config = self.config(["0.npy", "1.npy"], VOCAB, checksum=True)
        config["training"]["micro_batch_size"] = 1
        path = self.write_config(config)

        def results():
            self.forget_run()
            with socket.create_server(("127.0.0.1", 0)) as server:
                port = str(server.getsockname()[1])
            processes = []
            for rank, host in enumerate(("one", "two")):
                variables = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
                processes.append(subprocess.Popen([os.path.abspath(PROGRAM), "--threads", "1", "train", path], cwd=self.path(host), text=True,
                                                  stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=starters.environment(**variables)))
            said = [process.communicate(timeout=100)[1] for process in processes]
            return [process.returncode for process in processes], "".join(said)

        codes, said = results()
        self.assertEqual(codes, [0, 0], said)
        for damaged in ("one/0.npy", "one/1.npy", "two/0.npy", "two/1.npy"):
            with self.subTest(damaged):
                with open(self.path(damaged), "r+b") as file:
                    file.seek(16000)
                    file.write(b"\1\0\2\0")
                codes, said = results()
                self.assertEqual(codes, [2, 2], said)
                self.assertIn(os.path.basename(damaged), said)
                self.write(damaged, random_ids(64 * 256, VOCAB, seed=int(damaged[4])))


class Documents(Files):
    def test_short_documents_are_told(self):
        for length, is_told in ((4, True), (12, True), (24, False), (100, False)):
            ids = random_ids(64 * 256, VOCAB - 2)
            ids[::length] = VOCAB - 1
            self.write("x.npy", ids)
            self.forget_run()
            result = self.train(self.config([self.path("x.npy")], VOCAB, documents="separate", document_end=VOCAB - 1, sequence_length=256))
            assert_ended_well(self, result)
            self.assertEqual("data.document_end" in result.stderr, is_told, result.stderr)
            self.assertRegex(result.stderr, f"of about {length}\\b")

    def test_files_in_which_no_document_begins(self):
        path = self.write("x.npy", random_ids(64 * 32, 200))
        for key in ("document_end", "document_start"):
            self.assert_refused_everywhere(self.pattern("x.npy", documents="separate", **{key: 256}), path, f"data.{key}", "data.documents=joined")
        self.assert_taken(self.pattern("x.npy", documents="separate", document_end=7))
        mask = self.write("x.npy.mask", np.random.default_rng(1).integers(0, 2, 64 * 32).astype("u1"))
        self.assert_refused_everywhere(self.pattern("x.npy", documents="separate", loss_mask=True), path, "data.documents=joined")
        os.remove(mask)

    def test_a_document_may_be_a_file_beside_others(self):
        self.write("one.npy", random_ids(64 * 32, 200))
        self.write("many.npy", random_ids(64 * 32, 200, seed=2) % 100)
        self.write("long.npy", random_ids(1 << 17, 200) % 100)
        files = lambda *names: self.config([self.path(name) for name in names], VOCAB, documents="separate", document_end=150)  # noqa: E731
        self.assert_taken(files("one.npy", "many.npy"))
        self.assert_refused_everywhere(files("one.npy", "long.npy"), "long.npy", "data.document_end")


if __name__ == "__main__":
    unittest.main()
