"""Silent data corruption: one flipped bit (tests/support/flipping_parka.cpp) ends the run with a message that names it, before it
is saved; and the checks themselves change nothing."""
import json
import os
import re
import shutil
import socket
import unittest

from parka_runs import (FLIPPING_PROGRAM, PROGRAM, SEQUENCE, VOCAB, RunFolder, checkpoints, learning_curve, metrics, starters, tiny_config,
                        tree_digest, write_tokens)

CORRUPTED = 6
NEVER = {"replay_interval": 0, "state_interval": 0}
ALWAYS = {"replay_interval": 1, "state_interval": 1}
FLIP_STEP = 3
TARGETS = ("weight", "moment", "gradient", "gemm")


class Corruption(RunFolder):
    def config(self, recipe, checks, steps=8, **distributed):
        config = tiny_config(self.folder, recipe, steps=steps)
        config["training"].update(eval_interval=0, global_batch_size=12, micro_batch_size=1)
        config["optimizer"]["schedule"] = {"kind": "constant"}
        config["checkpoint"].update(interval=1)
        config["reliability"] = checks
        config["distributed"] = distributed
        return config

    def train_ranks(self, config, ranks, flip=None):
        program = [FLIPPING_PROGRAM if flip else PROGRAM, "--threads", "1", "train", self.write_config(config)]
        return starters.run(ranks, program, variables={"FLIP": flip} if flip else {})

    def message(self, result):
        """The line that says what was found, without the rank that says it: of several that do, they say the same."""
        self.assertEqual(result.returncode, CORRUPTED, result.stderr)
        said = re.findall(r"^parka: error: (?:rank \d+ \([^)]*\): )?(silent data corruption .*)$", result.stderr, re.MULTILINE)
        self.assertEqual(len(set(said)), 1, result.stderr)
        return said[0]

    def flip(self, config, ranks, target, rank, seed, saved=None):
        """Trains with a flip: what was saved is from before it. Returns the message."""
        result = self.train_ranks(config, ranks, f"{target}:{FLIP_STEP}:{rank}:{seed}")
        with self.subTest(f"{target}, {ranks} ranks, rank {rank}, seed {seed}"):
            message = self.message(result)
            self.assertIn(socket.gethostname(), message)
            self.assertIn("CPU", message)
            # What is flipped after an update is read by a save of that step and before the update of the next.
            found = FLIP_STEP if target in ("gradient", "gemm") else rf"({FLIP_STEP}|{FLIP_STEP + 1})"
            self.assertRegex(message, rf"(in|by) step {found}\b")
            expected = [f"step_{step:08}" for step in range(1, FLIP_STEP)]
            self.assertEqual(checkpoints(self.path("run")), expected if saved is None else saved)
            shutil.rmtree(self.path("run"))
            return message
        shutil.rmtree(self.path("run"), ignore_errors=True)
        return ""

    def assert_checks_change_nothing(self, config, ranks=1):
        folders = []
        for name, checks in (("off", NEVER), ("on", ALWAYS)):
            config["reliability"] = checks
            config["checkpoint"].update(interval=2, folder=self.path(name))
            result = self.train_ranks(config, ranks)
            self.assert_exit(result, 0)
            folders.append(self.path(name))
        digests = [tree_digest(folder, only=lambda path: path.endswith(".safetensors")) for folder in folders]
        self.assertGreaterEqual(len(digests[0]), 3)
        self.assertEqual(*digests)
        self.assertEqual(*map(learning_curve, folders))
        for folder in folders:
            shutil.rmtree(folder)


class OneRank(Corruption):
    def test_a_flip_is_found_named_and_not_saved(self):
        for recipe, targets in (("fp32", TARGETS), ("parka", TARGETS), ("coat", TARGETS)):
            for target in targets:
                for seed in (1, 2):
                    message = self.flip(self.config(recipe, ALWAYS), 1, target, 0, seed)
                    wanted = r"\S+ (has changed since|is not what its update left)" if target in ("weight", "moment") else r"(\S+\.gradient|the loss) differs when"
                    self.assertRegex(message, wanted)

    def test_the_tensor_that_is_named_is_the_one_that_was_flipped(self):
        for target in ("weight", "moment", "gradient"):
            result = self.train_ranks(self.config("fp32", ALWAYS), 1, f"{target}:{FLIP_STEP}:0:5")
            message = self.message(result)
            flipped = re.search(r"flipping bit \d of byte \d+ of (.*)", result.stderr)
            self.assertIsNotNone(flipped, result.stderr)
            self.assertIn(f" {flipped[1]} ", message)
            shutil.rmtree(self.path("run"))

    def test_a_flip_of_a_state_is_found_before_a_save_between_checks(self):
        checks = dict(NEVER, state_interval=100)
        for target in ("weight", "moment"):
            self.flip(self.config("fp32", checks), 1, target, 0, 3)

    def test_a_flip_of_a_state_in_host_memory_is_found(self):
        for checks in (ALWAYS, dict(NEVER, state_interval=100)):
            config = self.config("parka", checks)
            config["optimizer"]["offload"] = True
            self.assertRegex(self.flip(config, 1, "moment", 0, 3), r"\S+ (has changed since|is not what its update left)")

    def test_a_flip_is_found_between_saves_and_after_the_last_step(self):
        config = self.config("fp32", ALWAYS)
        config["checkpoint"].update(interval=100)
        for target in TARGETS:
            self.flip(config, 1, target, 0, 4, saved=[])
        config["training"]["steps"] = FLIP_STEP
        for target in ("weight", "moment"):
            self.flip(config, 1, target, 0, 4, saved=[])

    def test_the_same_command_goes_on_from_the_last_good_checkpoint(self):
        config = self.config("fp32", ALWAYS)
        self.message(self.train_ranks(config, 1, f"weight:{FLIP_STEP}:0:0"))
        again = self.train_ranks(config, 1)
        self.assert_exit(again, 0)
        self.assertIn(f"step_{FLIP_STEP - 1:08} (step {FLIP_STEP - 1})", again.stderr)
        disturbed = tree_digest(self.path("run/step_00000008"), only=lambda path: path.endswith(".safetensors"))
        curve = learning_curve(self.path("run"))
        shutil.rmtree(self.path("run"))
        self.assert_exit(self.train_ranks(config, 1), 0)
        self.assertEqual(tree_digest(self.path("run/step_00000008"), only=lambda path: path.endswith(".safetensors")), disturbed)
        self.assertEqual(learning_curve(self.path("run")), curve)

    def test_without_checks_a_flip_is_not_seen(self):
        """So that what the others find is what was flipped."""
        curves = []
        for flip in (None, f"weight:{FLIP_STEP}:0:1"):
            self.assert_exit(self.train_ranks(self.config("fp32", NEVER), 1, flip), 0)
            curves.append(learning_curve(self.path("run")))
            shutil.rmtree(self.path("run"))
        self.assertNotEqual(*curves)

    def test_the_checks_change_no_bit(self):
        for recipe in ("fp32", "coat", "parka"):
            with self.subTest(recipe):
                config = self.config(recipe, NEVER, steps=6)
                config["training"].update(micro_batch_size=4)
                config["telemetry"] = {"interval": 2}
                self.assert_checks_change_nothing(config)

    def test_the_checks_change_no_bit_where_targets_are_masked(self):
        config = self.config("fp32", NEVER, steps=6)
        config["training"].update(micro_batch_size=4)
        for name in ("a.npy", "b.npy", "held_out.npy"):
            with open(self.path(name + ".mask"), "wb") as file:
                file.write(bytes(i * i // 7 % 3 % 2 for i in range(os.path.getsize(self.path(name)) // 2)))
        config["data"]["loss_mask"] = True
        self.assert_checks_change_nothing(config)

    def test_telemetry_is_the_same_with_checks(self):
        records = []
        for name, checks in (("off", NEVER), ("on", ALWAYS)):
            config = self.config("parka", checks, steps=4)
            config["checkpoint"]["folder"] = self.path(name)
            config["telemetry"] = {"interval": 1}
            self.assert_exit(self.train_ranks(config, 1), 0)
            with open(self.path(name + "/metrics.jsonl"), encoding="utf-8") as file:
                found = [record for record in map(json.loads, file) if record["kind"] not in ("train", "start")]
            for record in found:
                del record["time"], record["wall_seconds"]
            records.append(found)
        self.assertTrue(records[0])
        self.assertEqual(*records)


class Ranks(Corruption):
    def setUp(self):
        super().setUp()
        if not starters.is_available():
            self.skipTest("mpirun is not on PATH")

    def test_a_flip_on_one_rank_is_found_named_and_not_saved(self):
        for stage, shard_size, ranks in ((0, 0, 2), (1, 0, 2), (3, 0, 2), (3, 2, 4)):
            for target in TARGETS:
                rank = ranks - 1
                config = self.config("fp32", ALWAYS, zero_stage=stage, shard_size=shard_size)
                with self.subTest(f"stage {stage}"):
                    message = self.flip(config, ranks, target, rank, 1)
                    self.assertIn(f"rank {rank} (", message)

    def test_a_flip_is_found_where_gradients_are_released(self):
        for stage in (0, 3):
            for target in TARGETS:
                config = self.config("fp32", ALWAYS, zero_stage=stage)
                config["training"].update(micro_batch_size=6)
                config["optimizer"]["release_gradients"] = True
                with self.subTest(f"stage {stage}"):
                    self.assertIn("rank 1 (", self.flip(config, 2, target, 1, 1))

    def test_ranks_that_compare_find_a_weight_that_differs(self):
        """What is flipped between checks of the state differs in the next one."""
        for ranks, named in ((2, ["0", "1"]), (3, ["1"])):
            config = self.config("fp32", dict(NEVER, state_interval=FLIP_STEP + 1), zero_stage=0)
            config["checkpoint"].update(interval=100)
            message = self.message(self.train_ranks(config, ranks, f"weight:{FLIP_STEP}:1:0"))
            self.assertRegex(message, rf"by step {FLIP_STEP + 1}: \S+ differs between ranks that must hold the same: ")
            self.assertEqual(re.findall(r"rank (\d) \(", message), named)
            self.assertEqual(checkpoints(self.path("run")), [])
            shutil.rmtree(self.path("run"))

    def test_ranks_that_divide_experts_find_a_flip(self):
        """Every second rank has the same experts, and all have the rest."""
        def with_experts(checks, stage):
            config = self.config("fp32", checks, zero_stage=stage, expert_parallel=2)
            config["model"].update(norm="rmsnorm", moe={"num_experts": 8, "experts_per_token": 2})
            return config

        for stage in (0, 1):
            for target in TARGETS:
                with self.subTest(f"stage {stage}"):
                    message = self.flip(with_experts(ALWAYS, stage), 4, target, 3, 1)
                    # Tokens carry what a product has computed to the other rank's experts, whose gradients differ, too.
                    self.assertRegex(message, r"rank [23] \(" if target == "gemm" else r"rank 3 \(")
        held = set()
        for seed in range(4):
            config = with_experts(dict(NEVER, state_interval=FLIP_STEP + 1), 0)
            config["checkpoint"].update(interval=100)
            message = self.message(self.train_ranks(config, 4, f"weight:{FLIP_STEP}:1:{seed}"))
            tensor = re.search(r": (\S+) differs between ranks that must hold the same: ", message)[1]
            held.add(".experts." in tensor)
            self.assertEqual(re.findall(r"rank (\d) \(", message), ["1", "3"] if ".experts." in tensor else ["1"], message)
            shutil.rmtree(self.path("run"))
        self.assertIn(True, held)

    def test_the_checks_change_no_bit_of_several_ranks(self):
        for recipe, stage in (("fp32", 0), ("parka", 3), ("coat", 1)):
            with self.subTest(f"{recipe}, stage {stage}"):
                config = self.config(recipe, NEVER, steps=6, zero_stage=stage)
                config["training"].update(micro_batch_size=2)
                self.assert_checks_change_nothing(config, ranks=2)


if __name__ == "__main__":
    unittest.main()
