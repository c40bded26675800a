"""Messages that name what is wrong and what helps: names of Megatron's files, and warnings that can be found in a log."""
import array
import json
import os
import random
import re
import shutil
import struct
import sys
import unittest
from pathlib import Path

from parka_runs import parka, tiny_config, write_tokens
from refusals import assert_ended_well, assert_refused, assert_told, shown
from token_runs import BATCH, SEQUENCE, TokenRuns, np, random_ids

try:
    import tokenizers  # noqa: F401
except ImportError:
    print("skipped: tokenizers is missing")
    sys.exit(77)

sys.path.append(str(Path(__file__).resolve().parents[1] / "scripts"))
from tiny_tokenizers import qwen_like  # noqa: E402

COUNT = 40 * SEQUENCE


class Megatron(TokenRuns):
    def write_megatron(self, name, modes=b""):
        """Sequences of ten ids, each a document of its own."""
        count = COUNT // 10
        self.write(f"{name}.bin", random_ids(COUNT, 1000))
        self.write(f"{name}.idx", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1) + np.full(count, 10, "<i4").tobytes()
                   + np.arange(0, 20 * count, 20, dtype="<i8").tobytes() + np.arange(count + 1, dtype="<i8").tobytes() + modes)
        return self.path(name)

    def test_a_prefix_as_megatron_takes_it(self):
        """It is read, or the message says which file it stands for."""
        for name in ("gpt2_text_document", "corpus.v2_text_document", "deep/er_text_document"):
            prefix = self.write_megatron(name)
            for command, data in (("train", {}), ("data", {}), ("eval", {"eval": [prefix]})):
                with self.subTest(name, command=command):
                    config = self.config([prefix if command != "eval" else prefix + ".bin"], 1024, **data)
                    self.forget_run()
                    result = parka("data", prefix) if command == "data" else self.train(config)
                    if result.returncode != 0:
                        assert_refused(self, result, prefix + ".bin")
                    elif command == "data":
                        assert_ended_well(self, result)
                        self.assertEqual([(one["format"], one["tokens"]) for one in self.data_of(prefix)], [("Megatron", COUNT)])
                    else:
                        self.assertEqual(self.targets_of_first_step(config), BATCH * (SEQUENCE - 1))

    def test_an_index_with_modes_of_sequences(self):
        """As Megatron writes them for data of several modes, behind the documents, a byte for each sequence."""
        for name, modes in (("all_text", bytes(COUNT // 10)), ("every_second", bytes([0, 1]) * (COUNT // 20))):
            prefix = self.write_megatron(name, modes)
            with self.subTest(name):
                result = parka("data", prefix + ".bin", "--json")
                if result.returncode != 0:
                    line = assert_refused(self, result, f"{name}.idx", "mode")
                    self.assertNotIn("copy it again", line)
                else:
                    self.assertEqual(json.loads(result.stdout)["tokens"], COUNT, shown(result))

    def test_an_index_that_is_cut_or_too_long_is_still_refused(self):
        count = COUNT // 10
        for name, modes in (("too_long", bytes(count + 1)), ("few_more", bytes(3)), ("twice", bytes(2 * count))):
            with self.subTest(name):
                prefix = self.write_megatron(name, modes)
                assert_refused(self, parka("data", prefix + ".bin"), f"{name}.idx")


class Warnings(TokenRuns):
    """Every line that warns says so, so that it is found among the lines of the start."""

    def small(self, **data):
        config = tiny_config(self.folder, "fp32", steps=2)
        config["optimizer"]["schedule"] = {"kind": "constant"}
        config["training"]["eval_interval"] = 0
        config["data"].update(eval=[], **data)
        return config

    def tokens_in(self, folder, **info):
        os.makedirs(self.path(folder))
        write_tokens(self.path(f"{folder}/x.npy"), 2000, seed=len(folder))
        if info:
            with open(self.path(f"{folder}/data.json"), "w", encoding="utf-8") as file:
                json.dump({"dtype": "uint16", "tokenizer": "tokenizer.json", "train": {"files": ["x.npy"]}, "eval": {"files": []}, **info}, file)
        return self.path(f"{folder}/x.npy")

    def test_a_file_with_a_part_that_was_never_written(self):
        path = self.write("part.npy", random_ids(1 << 16, 64))
        os.truncate(path, 3 << 17)
        with open(path, "rb") as file:
            if os.lseek(file.fileno(), 0, os.SEEK_HOLE) == 3 << 17:
                self.skipTest("this file system does not tell what was never written")
        assert_told(self, self.train(self.small(train=[path])), "part.npy")
        assert_told(self, parka("data", path), "part.npy")

    def test_data_of_several_tokenizers(self):
        paths = [self.tokens_in(name, tokenizer_sha256=digest) for name, digest in (("one", "11" * 32), ("two", "22" * 32))]
        assert_refused(self, self.train(self.small(train=paths)), paths[1], paths[0])
        assert_told(self, parka("data", *paths), paths[1], paths[0])

    def test_a_tokenizer_that_is_not_that_of_the_model(self):
        """The example of a warning that nobody found."""
        model = shutil.copytree(Path(__file__).resolve().parents[1] / "fixtures/huggingface/llama_mha", self.path("model"))
        qwen_like(Path(model), ("<|endoftext|>", "<|a|>"))
        qwen_like(Path(self.path("data/tokenizer")), ("<|endoftext|>", "<|b|>"))
        imported = parka("import", model, "--out", self.path("imported"))
        assert_ended_well(self, imported)
        tokens = array.array("H", (random.Random(1).randrange(83) for _ in range(2000)))
        path = self.write("data/x.npy", tokens.tobytes())
        overrides = {"data.train": json.dumps([path]), "data.sequence_length": 16, "training.steps": 1, "training.global_batch_size": 2,
                     "training.micro_batch_size": 2, "training.eval_interval": 0, "checkpoint.folder": self.path("run"), "device.kind": "cpu",
                     "optimizer.schedule.warmup_steps": 0}
        arguments = [word for key, value in overrides.items() for word in ("--set", f"{key}={value}")]
        result = parka("train", f"{self.path('imported')}/config.json", *arguments)
        assert_ended_well(self, result)
        lines = [line for line in result.stderr.splitlines() if re.search("data/tokenizer.*differs|differs.*data/tokenizer", line)]
        self.assertTrue(lines, "the two tokenizers are not compared" + shown(result))
        assert_told(self, result, "data/tokenizer")

    def test_a_sound_run_warns_of_nothing(self):
        config = self.small(train=[self.tokens_in("sound")])
        config["checkpoint"].update(interval=1)
        result = self.train(config)
        assert_ended_well(self, result)
        self.assertNotIn("warning", result.stderr.lower(), shown(result))


if __name__ == "__main__":
    unittest.main()
