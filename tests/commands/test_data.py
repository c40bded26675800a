"""Mixtures, loss masks and documents in whole runs, and the data command.

test_data.py [RECIPE] [TEST...]: the recipe of the class OfRecipe.
"""
import array
import json
import os
import random
import shutil
import statistics
import struct
import sys
import unittest

from parka_runs import (PROGRAM, SEQUENCE, VOCAB, RunFolder, killed_in_save, learning_curve, metrics, parka, starters, tiny_config, tree_digest,
                        write_tokens)

STEPS = 24
RECIPE = "parka"


def write_marks(path, tokens, seed):
    """Marks of documents of all lengths, about a third of whose tokens are targets."""
    rng = random.Random(seed)
    marks = bytearray()
    while len(marks) < tokens:
        length = rng.choice((1, 2, 5, 9, 30))
        prompt = rng.randrange(length + 1)
        document = bytearray(b"\0" * prompt + b"\1" * (length - prompt))
        document[0] |= 2
        marks += document
    with open(path + ".mask", "wb") as file:
        file.write(marks[:tokens])


class DataFolder(RunFolder):
    def mark_files(self):
        write_marks(self.path("a.npy"), 21 * SEQUENCE + 5, seed=4)
        write_marks(self.path("b.npy"), 18 * SEQUENCE, seed=5)
        write_marks(self.path("held_out.npy"), 6 * SEQUENCE, seed=6)

    def copy_with_marks(self, name, to):
        """In reverse order: a copy would be refused as held out."""
        with open(self.path(name), "rb") as tokens, open(self.path(name + ".mask"), "rb") as marks:
            self.write_tokens_and_marks(to, array.array("H", tokens.read())[::-1], marks.read())

    def write_tokens_and_marks(self, name, ids, marks):
        for path, content in ((name, array.array("H", ids).tobytes()), (name + ".mask", marks)):
            with open(self.path(path), "wb") as file:
                file.write(content)

    def config(self, name, recipe, **data):
        config = tiny_config(self.folder, recipe, STEPS)
        config["optimizer"]["schedule"]["total_steps"] = STEPS
        config["data"].update(data)
        config["checkpoint"].update(folder=self.path(name), interval=10)
        return config

    def run_config(self, config, ranks=1):
        path = self.write_config(config)
        program = [PROGRAM, "--threads", "1", "train", path]
        result = starters.run(ranks, program)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def assert_resumes_exactly(self, config):
        name = config["checkpoint"]["folder"]
        self.run_config(config)
        os.rename(name, name + "-straight")
        killed = self.train(config, env=killed_in_save(20))
        self.assertEqual(killed.returncode, -9, killed.stderr)
        self.assertIn("resuming from", self.run_config(config))
        self.assertEqual(learning_curve(name), learning_curve(name + "-straight"))
        final = f"step_{STEPS:08}"
        self.assertEqual(tree_digest(f"{name}/{final}"), tree_digest(f"{name}-straight/{final}"))


class OfRecipe(DataFolder):
    def test_masked_documents_of_a_mixture_resume_exactly(self):
        self.mark_files()
        config = self.config("run", RECIPE, weights=[0.7, 0.3], loss_mask=True, documents="separate")
        self.assert_resumes_exactly(config)
        numbers = {record["targets"] for record in metrics(self.path("run"))}
        self.assertGreater(len(numbers), 5)
        self.assertLess(max(numbers), 4 * (SEQUENCE - 1))


class Data(DataFolder):
    def test_a_mixture_keeps_to_its_weights_and_resumes_exactly(self):
        config = self.config("run", "fp32", weights=[1, 3])
        self.assert_resumes_exactly(config)
        last = metrics(self.path("run"))[-1]
        # Before step 24 there were 92 sequences: 23 of the first file's 21, 69 of the second's 18.
        self.assertEqual(last["source_epochs"], [23 / 21, 69 / 18])
        self.assertEqual(last["targets"], 4 * (SEQUENCE - 1))

    def test_patterns_are_sources(self):
        shutil.copy(self.path("b.npy"), self.path("b2.npy"))
        config = self.config("run", "fp32", train=[self.path("a.npy"), self.path("b*.npy")], weights=[0.5, 0.5])
        log = self.run_config(config)
        self.assertIn("b*.npy, 36 sequences; 18 steps per epoch", log)

    def test_a_file_that_a_pattern_matches_more_or_less_is_named(self):
        os.mkdir(self.path("texts"))
        for name in ("a", "b"):
            shutil.copy(self.path(f"{name}.npy"), self.path(f"texts/{name}.npy"))
        config = self.config("run", "fp32", train=[self.path("texts/*.npy")])
        self.run_config(config)
        config["training"]["steps"] += 1
        shutil.copy(self.path("b.npy"), self.path("texts/c.npy"))
        self.assertIn('("c.npy" is new: there are 3 files, were 2)', self.train(config).stderr)
        os.remove(self.path("texts/c.npy"))
        os.remove(self.path("texts/b.npy"))
        self.assertIn('("b.npy" is missing: ', self.train(config).stderr)

    def test_a_file_that_moves_to_another_source_is_refused(self):
        for name in ("web", "code"):
            os.mkdir(self.path(name))
        shutil.copy(self.path("a.npy"), self.path("web/a.npy"))
        shutil.copy(self.path("b.npy"), self.path("web/b.npy"))
        shutil.copy(self.path("b.npy"), self.path("code/c.npy"))
        config = self.config("run", "fp32", train=[self.path("web/*.npy"), self.path("code/*.npy")], weights=[3, 1])
        self.run_config(config)
        os.rename(self.path("web/b.npy"), self.path("code/b.npy"))
        config["training"]["steps"] += 1
        refused = self.train(config)
        self.assert_exit(refused, 2)
        self.assertRegex(refused.stderr, r"have \[21,36\] sequences, and had \[39,18\] .*: a file has moved")

    def test_ranks_and_stages_train_on_the_same_targets(self):
        self.mark_files()
        self.copy_with_marks("b.npy", "copy.npy")
        data = {"weights": [0.7, 0.3], "loss_mask": True, "documents": "separate"}
        evaluation = {"sets": [f"b={self.path('copy.npy')}"]}
        self.run_config({**self.config("one", "fp32", **data), "evaluation": evaluation})
        one = metrics(self.path("one"))
        # The last are two groups of two ranks.
        for ranks, stage, shard_size in ((2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 3, 0), (4, 1, 2), (4, 3, 2)):
            with self.subTest(ranks=ranks, stage=stage, shard_size=shard_size):
                name = f"{ranks}-{stage}"
                config = {**self.config(name, "fp32", **data), "evaluation": evaluation}
                config["training"]["micro_batch_size"] = 4 // ranks
                config["distributed"] = {"zero_stage": stage, "shard_size": shard_size}
                self.run_config(config, ranks=ranks)
                for a, b in zip(metrics(self.path(name)), one, strict=True):
                    self.assertEqual(a["targets"], b["targets"])
                    self.assertLess(abs(a["loss"] - b["loss"]), 1e-5)
                for kind in ("eval", "eval_set"):
                    for a, b in zip(metrics(self.path(name), kind), metrics(self.path("one"), kind), strict=True):
                        self.assertEqual(a["num_targets"], b["num_targets"])
                        self.assertLess(abs(a["loss"] - b["loss"]), 1e-5)

    def test_eval_command_agrees_with_training(self):
        self.mark_files()
        self.run_config(self.config("run", "bf16", loss_mask=True, documents="separate"))
        result = parka("eval", self.path("run"), "--json")
        self.assert_exit(result, 0)
        logged = metrics(self.path("run"), "eval")[-1]
        self.assertIn(f'"loss":{logged["loss"]!r}', result.stdout)
        self.assertIn(f'"num_targets":{logged["num_targets"]}', result.stdout)

    def evaluated(self, *arguments):
        result = parka("eval", self.path("run"), "--json", *arguments)
        self.assert_exit(result, 0)
        return json.loads(result.stdout)

    def test_sets_are_masked_as_the_training_data_is_and_tasks_are_not(self):
        self.mark_files()
        self.copy_with_marks("b.npy", "copy.npy")
        shutil.copy(self.path("b.npy"), self.path("plain.npy"))
        with open(self.path("task.jsonl"), "w", encoding="utf-8") as file:
            lines = [{"kind": "parka requests", "version": 1, "task": "made_up", "metric": "acc"}]
            for i in range(5):
                choices = [{"continuation": [i + j + 1, 7][: j + 1], "characters": 3, "bytes": 4} for j in range(2)]
                lines.append({"label": i % 2, "context": list(range(2 * i + 1)), "choices": choices})
            file.writelines(json.dumps(line) + "\n" for line in lines)
        config = self.config("run", "fp32", loss_mask=True, documents="separate")
        task = self.path("task.jsonl")
        config["evaluation"] = {"sets": [f"held={self.path('held_out.npy')}", f"b={self.path('copy.npy')}"], "tasks": [task]}
        self.run_config(config)
        logged = {record["set"]: record for record in metrics(self.path("run"), "eval_set")}
        result = self.evaluated()
        for name in ("held", "b"):
            self.assertEqual((logged[name]["loss"], logged[name]["num_targets"]),
                             (result["sets"][name]["loss"], result["sets"][name]["num_targets"]))
        self.assertEqual(result["sets"]["held"]["loss"], metrics(self.path("run"), "eval")[-1]["loss"])
        self.assertLess(result["sets"]["b"]["num_targets"], 18 * (SEQUENCE - 1))
        # A query is a document of its own.
        last = metrics(self.path("run"), "task")[-1]
        whole = self.evaluated("--tasks", task, "--set", "data.loss_mask=false", "--set", "data.documents=joined")
        for key in ("score", "bits_per_byte"):
            self.assertEqual(last[key], result["tasks"]["made_up"][key])
            self.assertEqual(last[key], whole["tasks"]["made_up"][key])
        # What has no mask is evaluated whole, where that is asked for.
        plain = ("--sets", f"plain={self.path('plain.npy')}")
        refused = parka("eval", self.path("run"), *plain)
        self.assert_exit(refused, 2)
        self.assertIn("plain.npy.mask: no such file", refused.stderr)
        joined = self.evaluated(*plain, "--set", "data.loss_mask=false", "--set", "data.documents=joined")
        self.assertEqual(joined["sets"]["plain"]["num_targets"], 18 * (SEQUENCE - 1))

    def test_the_way_that_tells_documents_apart_does_not_matter(self):
        # The same documents by id, by mask and by Megatron's index.
        tokens, marks, lengths = array.array("H"), bytearray(), []
        rng = random.Random(7)
        while len(tokens) < 40 * SEQUENCE:
            length = rng.choice((1, 3, 8, 20))
            lengths.append(length)
            tokens.extend([rng.randrange(1, VOCAB) for _ in range(length - 1)] + [0])
            marks += b"\3" + b"\1" * (length - 1)
        for name in ("id.npy", "mask.npy", "index.bin"):
            with open(self.path(name), "wb") as file:
                file.write(tokens.tobytes())
        with open(self.path("mask.npy.mask"), "wb") as file:
            file.write(marks)
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        count = len(lengths)
        with open(self.path("index.idx"), "wb") as file:
            file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
            file.write(struct.pack(f"<{count}i", *lengths) + struct.pack(f"<{count}q", *(2 * s for s in starts)))
            file.write(struct.pack(f"<{count + 1}q", *range(count + 1)))
        curves = []
        for name, data in (("id.npy", {"document_end": 0}), ("mask.npy", {}), ("index.bin", {})):
            config = self.config(name + "-run", "fp32", train=[self.path(name)], eval=[], documents="separate", **data)
            config["training"]["eval_interval"] = 0
            self.run_config(config)
            curves.append(learning_curve(self.path(name + "-run")))
        self.assertEqual(curves[0], curves[1])
        self.assertEqual(curves[0], curves[2])
        # And that documents are joined changes the loss.
        config = self.config("joined-run", "fp32", train=[self.path("id.npy")], eval=[])
        config["training"]["eval_interval"] = 0
        self.run_config(config)
        self.assertNotEqual(learning_curve(self.path("joined-run")), curves[0])

    def test_training_does_not_wait_for_data(self):
        self.mark_files()
        config = self.config("run", "fp32", weights=[0.7, 0.3], loss_mask=True, documents="separate")
        self.run_config(config)
        records = metrics(self.path("run"))[2:]  # the loader starts with the run
        # A machine with other work may keep the loader from a core for longer than a step.
        self.assertLess(statistics.median(record["data_wait_seconds"] / record["seconds"] for record in records), 0.1)

    def test_data_command(self):
        self.mark_files()
        result = parka("data", self.path("[ab].npy"), "--document-end", "5", "--json")
        self.assert_exit(result, 0)
        lines = [json.loads(line) for line in result.stdout.splitlines()]
        self.assertEqual([os.path.basename(line["file"]) for line in lines], ["a.npy", "b.npy"])
        for line in lines:
            with open(line["file"], "rb") as file:
                ids = array.array("H", file.read())
            with open(line["file"] + ".mask", "rb") as file:
                marks = file.read()
            expected = {"format": "raw", "token_dtype": "uint16", "tokens": len(ids), "min_id": min(ids),
                        "max_id": max(ids), "documents": ids.count(5), "targets": sum(mark & 1 for mark in marks)}
            self.assertEqual({key: line[key] for key in expected}, expected)
            self.assertRegex(line["checksum"], "^[0-9a-f]{32}$")
        self.assertNotEqual(lines[0]["checksum"], lines[1]["checksum"])

    def test_data_command_on_a_config(self):
        self.mark_files()
        self.copy_with_marks("b.npy", "copy.npy")
        config = self.config("run", "fp32", loss_mask=True)
        config["evaluation"] = {"sets": [f"b={self.path('c*.npy')}"]}
        result = parka("data", self.write_config(config))
        self.assert_exit(result, 0)
        self.assertIn(f"{63 * SEQUENCE + 5} tokens in 4 files", result.stdout)
        self.assertRegex(parka("data", self.path("a.npy")).stdout, r" tokens in 1 file\n\Z")
        # A document of one token that is no target cannot be told from padding.
        with open(self.path("a.npy.mask"), "rb") as file:
            marks = file.read() + b"\2"
        starts = sum((mark & 2) != 0 and (mark, after) not in ((2, 2), (2, 3)) for mark, after in zip(marks, marks[1:]))
        self.assertIn(f", {starts} documents", result.stdout.splitlines()[0])
        refused = parka("data", self.path("config.json"), "--set", "model.vocab_size=10")
        self.assert_exit(refused, 2)
        self.assertIn("but the vocabulary has 10 ids", refused.stderr)

    def test_padding_of_packed_conversations_is_no_document(self):
        prompt, padding = (2, 0, 0), 60
        ids, marks = [], bytearray()

        def add(tokens, of_tokens):
            ids.extend(tokens)
            marks.extend(of_tokens)

        def documents():
            self.write_tokens_and_marks("packed.npy", ids, marks)
            result = parka("data", self.path("packed.npy"), "--json")
            self.assert_exit(result, 0)
            return json.loads(result.stdout)["documents"]

        add((1, 2, 3, 4, 5), (*prompt, 1, 1))
        add([padding] * 11, (2, *[0] * 10))
        self.assertEqual(documents(), 1)
        add([padding] * 16, (*prompt, *[1] * 13))  # of that id, but with targets
        self.assertEqual(documents(), 2)
        add((1, *[padding] * 14), (2, *[0] * 14))  # without targets, but with another id
        self.assertEqual(documents(), 3)
        add((padding,), (2,))
        self.assertEqual(documents(), 3)
        # It may be longer than what is read at once.
        add((1, 2, 3), (2, 0, 1))
        add([padding] * (1 << 20), (2, *[0] * ((1 << 20) - 1)))
        add((1, 2, 3), (2, 0, 1))
        self.assertEqual(documents(), 5)
        # A mask without targets says where documents begin, and nothing else.
        marks[:] = (mark & 2 for mark in marks)
        self.assertEqual(documents(), sum(mark >> 1 for mark in marks))

    def test_data_command_on_a_config_refuses_short_files(self):
        config = self.write_config(tiny_config(self.folder))
        for which in ("train", "eval"):
            refused = parka("data", config, "--set", f'data.{which}=["{self.path("held_out.npy")}"]', "--set", "data.sequence_length=100000")
            self.assert_exit(refused, 2)
            self.assertIn("tokens are fewer than one sequence of 100000", refused.stderr)

    def test_data_command_on_a_config_refuses_files_without_targets(self):
        self.mark_files()
        with open(self.path("b.npy.mask"), "r+b") as file:
            file.write(bytes(os.path.getsize(self.path("b.npy.mask"))))
        refused = parka("data", self.write_config(tiny_config(self.folder)), "--set", "data.loss_mask=true")
        self.assert_exit(refused, 2)
        self.assertRegex(refused.stderr, "data.train: none of [0-9]+ sequences of .*b.npy has a target")

    def test_ids_are_read_as_data_json_says(self):
        tokens, described = self.path("wide.npy"), self.path("data.json")
        with open(tokens, "wb") as file:
            array.array("I", (random.Random(1).randrange(70000) for _ in range(40 * SEQUENCE))).tofile(file)
        with open(described, "w", encoding="utf-8") as file:
            json.dump({"dtype": "uint32", "tokenizer": None, "train": {"files": ["wide.npy"]}, "eval": {"files": []}}, file)
        config = tiny_config(self.folder, steps=1)
        config["optimizer"]["schedule"]["warmup_steps"] = 0
        config["model"]["vocab_size"] = 70016
        config["data"].update(train=[tokens], eval=[])
        config["training"]["eval_interval"] = 0
        says = "wide.npy: its ids are uint32, as .*data.json says, and would be read as uint16; set data.token_dtype"
        for refused in (self.train(config), parka("data", tokens), parka("data", self.path("config.json"))):
            self.assert_exit(refused, 2)
            self.assertRegex(refused.stderr, says)
        for sound in (parka("data", tokens, "--dtype", "uint32"), self.train(config, "--set", "data.token_dtype=uint32")):
            self.assert_exit(sound, 0)
        # Files that it does not name may be of another kind, and another data.json is none of ours.
        for text, code in (('{"dtype": "uint32", "train": {"files": ["other.npy"]}}', 0), ('{"dtype": 32}', 0), ("[1]", 0), ("{", 2), ("", 2)):
            with open(described, "w", encoding="utf-8") as file:
                file.write(text)
            said = parka("data", tokens)
            self.assert_exit(said, code)
            self.assertEqual("data.json" in said.stderr, code == 2, said.stderr)

    def test_a_file_that_is_not_all_there_is_warned_of(self):
        whole = 3 << 16  # bytes; a file system keeps less than some KiB in one piece
        write_tokens(self.path("part.npy"), whole // 4, seed=7)
        os.truncate(self.path("part.npy"), whole)
        with open(self.path("part.npy"), "rb") as file:
            gap = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        if gap == whole:
            self.skipTest("this file system does not tell what was never written")
        warning = f"part.npy: was never written at byte {gap}, and has id 0 there; wait until it is whole, or copy it again"
        config = self.config("run", "bf16", train=[self.path("a.npy"), self.path("part.npy")])
        config["training"]["steps"] = 4
        self.assertEqual(self.run_config(config, ranks=2).count(warning), 1)
        self.assertIn(warning, parka("eval", self.path("run"), "--data", self.path("part.npy")).stderr)
        self.assertIn(warning, parka("data", self.path("part.npy")).stderr)
        # Filled, it is other data.
        write_tokens(self.path("part.npy"), whole // 2, seed=7)
        config["training"]["steps"] = 8
        refused = self.train(config)
        self.assertEqual(refused.returncode, 2)
        self.assertIn('"part.npy" holds different bytes', refused.stderr)
        self.assertNotIn("never written", refused.stderr)

    def test_data_command_warns_of_several_tokenizers_and_templates(self):
        config = tiny_config(self.folder)
        paths = [self.path(name) for name in ("a.npy", "b.npy", "held_out.npy")]
        for number, path in enumerate(paths):  # each into a folder of its own
            folder = self.path(f"made{number}")
            os.makedirs(folder)
            os.rename(path, os.path.join(folder, "x.npy"))
            paths[number] = os.path.join(folder, "x.npy")
            with open(os.path.join(folder, "data.json"), "w", encoding="utf-8") as file:
                made = "22" if number == 2 else "11"
                json.dump({"dtype": "uint16", "tokenizer": "one.json", "tokenizer_sha256": made, "chat_template_sha256": made,
                           "train": {"files": ["x.npy"]}, "eval": {"files": []}}, file)
        config["data"].update(train=paths[:2], eval=paths[2:])
        for given in (paths, [self.write_config(config)]):
            result = parka("data", *given)
            self.assert_exit(result, 0)
            for what in ("tokenizer", "chat template"):
                says = f"{paths[2]} was made with another {what} than {paths[0]}: "
                self.assertEqual(result.stderr.count(says), 1, result.stderr)
        result = parka("data", *paths[:2])
        self.assert_exit(result, 0)
        self.assertEqual(result.stderr, "")

    def test_bad_input_is_named(self):
        self.mark_files()
        shutil.copy(self.path("b.npy"), self.path("plain.npy"))
        config = self.config("run", "fp32", loss_mask=True)
        train = config["data"]["train"]
        for data, message in (
            ({"weights": [1]}, "data.weights has 1 numbers, but data.train has 2 entries"),
            ({"weights": [1, 0]}, "data.weights holds 0"),
            ({"weights": [1, -1]}, "data.weights: entry 1: -1 is out of range"),
            ({"weights": 1}, "data.weights: expected an array of numbers"),
            ({"weights": ["1", 2]}, "data.weights: entry 0: expected a number"),
            ({"document_end": 5}, "data.document_end = 5 has no meaning with data.documents = joined"),
            ({"document_start": 5}, "data.document_start = 5 has no meaning with data.documents = joined"),
            ({"train": [self.path("no-*")]}, "no token file matches"),
            ({"train": [train[0], self.path("plain.npy")]}, "plain.npy.mask: no such file"),
        ):
            with self.subTest(data=data):
                result = self.train({**config, "data": {**config["data"], **data}})
                self.assert_exit(result, 2)
                self.assertIn(message, result.stderr)
                self.assertFalse(os.path.exists(self.path("run/metrics.jsonl")))
        for arguments, message in (
            ((self.path("a.npy"), "--set", "data.seed=1"), "--set: overrides keys of a config"),
            ((self.write_config(config), "--dtype", "uint16"), "--dtype, --document-start and --document-end are for token files"),
            ((self.path("missing.npy"),), "missing.npy: no such file"),
        ):
            with self.subTest(arguments=arguments):
                result = parka("data", *arguments)
                self.assert_exit(result, 2)
                self.assertIn(message, result.stderr)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1][0].islower():  # tests are named by their class
        RECIPE = sys.argv.pop(1)
    unittest.main()
