"""Files that are no files, or larger than anyone expects, and numbers that overflow cost neither all memory nor all patience."""
import json
import os
import struct
import unittest

from parka_runs import FAULTY_FILES_LIBRARY, PROGRAM, RunFolder, metrics, tiny_config  # makes tests/support known

from measured import GIB, MIB, assert_bounded, run_measured
from refusals import assert_ended_well, assert_refused, error_lines, shown

IO_FAILED = 4
SECONDS = 20  # on a machine with other work; each of these commands has work for less than one
SANITIZED = FAULTY_FILES_LIBRARY == ""  # such a build takes memory of its own


def bounded(*arguments, seconds=SECONDS):
    return run_measured([PROGRAM, "--threads", "1", *arguments], seconds, address_space=None if SANITIZED else 4 * GIB)


class Metrics(RunFolder):
    """A run that resumes meets another metrics.jsonl than it left."""

    def setUp(self):
        super().setUp()
        self.settings = tiny_config(self.folder, "fp32")
        self.assert_exit(self.train(self.settings), 0)
        self.own = self.path("run/metrics.jsonl")
        with open(self.own, "rb") as file:
            self.records = file.read()
        self.settings["training"]["steps"] += 4

    def resume(self):
        return bounded("train", self.write_config(self.settings))

    def assert_told_or_resumed(self, result):
        assert_bounded(self, result, mib=None if SANITIZED else 200)
        if result.returncode == 0:
            self.assertEqual(error_lines(result), [], shown(result))
        else:
            self.assertIn(result.returncode, (2, IO_FAILED), shown(result))
            assert_refused(self, result, "metrics.jsonl", code=result.returncode)

    def test_what_is_no_file(self):
        elsewhere = self.path("elsewhere")
        os.mkfifo(elsewhere)
        for name, make in (
            ("link to a device without end", lambda: os.symlink("/dev/zero", self.own)),
            ("link to another one", lambda: os.symlink("/dev/urandom", self.own)),
            ("pipe that nobody writes into", lambda: os.mkfifo(self.own)),
            ("link to such a pipe", lambda: os.symlink(elsewhere, self.own)),
            ("folder", lambda: os.mkdir(self.own)),
        ):
            with self.subTest(name):
                if os.path.isdir(self.own):
                    os.rmdir(self.own)
                else:
                    os.remove(self.own)
                make()
                self.assert_told_or_resumed(self.resume())

    def test_a_folder_without_checkpoints(self):
        self.settings["checkpoint"]["folder"] = self.path("new")
        os.mkdir(self.path("new"))
        for target in ("/dev/zero", self.path("pipe")):
            with self.subTest(target):
                if not os.path.exists(target):
                    os.mkfifo(target)
                os.symlink(target, self.path("new/metrics.jsonl"))
                self.assert_told_or_resumed(self.resume())
                os.remove(self.path("new/metrics.jsonl"))

    def test_a_file_with_a_hole_of_gigabytes(self):
        for name, content in (("behind", self.records), ("alone", b"")):
            with self.subTest(name):
                with open(self.own, "wb") as file:
                    file.write(content)
                os.truncate(self.own, 100 * GIB)
                self.assert_told_or_resumed(self.resume())

    def test_a_long_file_takes_no_memory(self):
        first = next(line for line in self.records.splitlines(keepends=True) if json.loads(line)["kind"] == "train")
        with open(self.own, "wb") as file:
            count = 64 * MIB // len(first)
            for _ in range(16):
                file.write(first * (count // 16))
            file.write(self.records)
        size = os.path.getsize(self.own)
        result = self.resume()
        assert_bounded(self, result, mib=None if SANITIZED else 64)  # the run itself has about 12
        assert_ended_well(self, result)
        steps = [record["step"] for record in metrics(self.path("run"))]
        self.assertEqual((len(steps), steps[-12:]), (16 * (count // 16) + 12, list(range(1, 13))), "earlier records are kept")
        self.assertGreater(os.path.getsize(self.own), size)


def many(entry, count=40000):
    """The text of an object of so many objects."""
    return "{" + ",".join(f'"name.{number}":{entry}' for number in range(count)) + "}"


class ManyObjects(RunFolder):
    """JSON text of two megabytes, whose objects lie in one object."""
    TENSOR = '{"dtype":"U8","shape":[0],"data_offsets":[0,0]}'

    def setUp(self):
        super().setUp()
        os.mkdir(self.path("model"))
        self.write("config.json", json.dumps({
            "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "rms_norm_eps": 1e-6, "hidden_act": "silu",
            "max_position_embeddings": 64, "tie_word_embeddings": True}))

    def write(self, name, content):
        with open(self.path(f"model/{name}"), "wb") as file:
            file.write(content if isinstance(content, bytes) else content.encode())

    def write_header(self, text, name="model.safetensors"):
        self.write(name, struct.pack("<Q", len(text)) + text.encode())

    def refuse_soon(self, *words):
        result = bounded("import", self.path("model"), "--out", self.path("imported"))
        assert_bounded(self, result)
        assert_refused(self, result, *words)

    def test_a_header_of_many_tensors(self):
        self.write_header(many(self.TENSOR))
        self.refuse_soon(self.path("model"))

    def test_many_tensors_in_one_of_several_files(self):
        self.write("model.safetensors.index.json", json.dumps({"weight_map": {f"name.{number}": "model-00001-of-00001.safetensors"
                                                                              for number in range(40000)}}))
        self.write_header(many(self.TENSOR), "model-00001-of-00001.safetensors")
        self.refuse_soon(self.path("model"))

    def test_an_index_of_many_entries(self):
        for name, places in (("one file", lambda number: "model-1.safetensors"), ("as many files", lambda number: f"model-{number}.safetensors")):
            with self.subTest(name):
                self.write("model.safetensors.index.json", json.dumps({"weight_map": {f"name.{number}": places(number) for number in range(40000)}}))
                self.refuse_soon(self.path("model"))

    def test_metadata_with_many_objects(self):
        self.write_header('{"__metadata__":' + many("{}") + "}")
        self.refuse_soon("model.safetensors")

    def test_metadata_that_is_nested(self):
        for name, text in (("objects", '{"a":' * 100000 + '"b"' + "}" * 100000), ("arrays", "[" * 100000 + "]" * 100000)):
            with self.subTest(name):
                self.write_header('{"__metadata__":{"a":' + text + "}}")
                self.refuse_soon("model.safetensors")

    def test_a_config_of_many_objects(self):
        with open(self.path("model/config.json"), encoding="utf-8") as file:
            config = file.read()
        self.write("config.json", config[:-1] + ',"rope_parameters":' + many('{"rope_type":"default"}') + "}")
        self.refuse_soon(self.path("model"))

    def test_a_config_of_a_run(self):
        with open(self.path("config.json"), "w", encoding="utf-8") as file:
            file.write('{"model": ' + many('{"vocab_size": 64}') + "}")
        result = bounded("config", "check", self.path("config.json"))
        assert_bounded(self, result)
        assert_refused(self, result, "config.json")


class Plans(RunFolder):
    def plan(self, *overrides, gpus="1"):
        with open(self.path("empty.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        arguments = [word for override in overrides for word in ("--set", override)]
        return bounded("plan", self.path("empty.json"), "--gpus", gpus, *arguments, seconds=10)

    def test_micro_batches_of_more_tokens_than_a_number_holds(self):
        """With four sequences in a micro-batch, the default, but where another number is given."""
        for overrides in (
            ("data.sequence_length=536870912",),
            ("data.sequence_length=2147483647", "training.micro_batch_size=1"),
            ("data.sequence_length=1073741824", "training.micro_batch_size=2"),
            ("data.sequence_length=536870912", "precision.recompute=block"),
            ("data.sequence_length=536870912", "precision.recipe=fp32"),
            ("data.sequence_length=536870912", "finetune.method=lora"),
            ("training.micro_batch_size=1048576", "training.global_batch_size=1048576"),
            ("data.sequence_length=1048576", "training.micro_batch_size=2048", "training.global_batch_size=2048"),
        ):
            with self.subTest(overrides):
                result = self.plan(*overrides)
                assert_bounded(self, result)
                assert_refused(self, result, ("data.sequence_length", "training.micro_batch_size"))

    def test_over_several_ranks(self):
        result = self.plan("data.sequence_length=1073741824", "training.micro_batch_size=2", "distributed.context_parallel=2", gpus="2")
        assert_bounded(self, result)
        assert_refused(self, result, ("data.sequence_length", "training.micro_batch_size"))

    def test_other_large_numbers_name_their_key(self):
        most = 2**31 - 1
        for overrides, key in (((f"model.d_ffn={most}",), "d_ffn"), (("model.d_model=1073741824",), "model.d_model"),
                               ((f"training.micro_batch_size={most}", f"training.global_batch_size={most}"), "training.micro_batch_size")):
            with self.subTest(overrides):
                result = self.plan(*overrides)
                assert_bounded(self, result)
                assert_refused(self, result, key)

    def test_long_sequences_are_planned(self):
        result = self.plan("data.sequence_length=1048576", "training.micro_batch_size=1")
        assert_bounded(self, result)
        assert_ended_well(self, result)


if __name__ == "__main__":
    unittest.main()
