"""Runs whose ranks share each sequence (distributed.context_parallel): as one rank trains, the same again, resumed on other
numbers of ranks, planned exactly, refused where they cannot be. On CPUs, or as test_context_parallel.py cuda on GPUs; exits with
77 (skipped) without mpirun or with fewer than two GPUs. unittest's options come after cpu or cuda."""
import json
import os
import statistics
import sys
import unittest

from parka_runs import (FLIPPING_PROGRAM, PROGRAM, RunFolder, learning_curve, num_gpus, parka, run_rank_tests, starters, tiny_config, tree_digest,
                        write_tokens)

STEPS = 6
SEQUENCE = 64
DEVICE, RANKS_OPTION = "cpu", "--ranks"


class ContextParallel(RunFolder):
    def setUp(self):
        super().setUp()
        write_tokens(self.path("long.npy"), 40 * SEQUENCE, seed=4)
        write_tokens(self.path("held_out.npy"), 5 * SEQUENCE, seed=3)  # 5 sequences do not divide over two groups

    def fit(self, cases):
        """Those that the machine has the GPUs for; the first of a case is its number of ranks."""
        return [case for case in cases if DEVICE == "cpu" or case[0] <= num_gpus()]

    def config(self, name, shared_by, recipe="fp32", stage=0, shard_size=0, steps=STEPS, **sections):
        config = tiny_config(self.folder, recipe, STEPS, device=DEVICE)
        config["model"].update(d_model=64, num_heads=4)
        config["data"].update(train=[self.path("long.npy")], sequence_length=SEQUENCE)
        config["optimizer"]["schedule"]["total_steps"] = STEPS
        config["training"].update(steps=steps, global_batch_size=4, micro_batch_size=1, eval_interval=3)
        config["checkpoint"].update(folder=self.path(name), interval=2)
        config["distributed"] = {"zero_stage": stage, "shard_size": shard_size, "context_parallel": shared_by}
        config["evaluation"] = {"sets": [f"held={self.path('held_out.npy')}"]}
        for section, keys in sections.items():
            config.setdefault(section, {}).update(keys)
        path = self.path(name + ".json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
        return path

    def start(self, name, ranks, shared_by, starter=starters.STARTER, **options):
        program = [PROGRAM, "--threads", "1", "train", self.config(name, shared_by, **options)]
        return starters.run(ranks, program, starter, RANKS_OPTION)

    def run_ranks(self, name, ranks, shared_by, **options):
        result = self.start(name, ranks, shared_by, **options)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def records(self, name, kind):
        with open(os.path.join(self.path(name), "metrics.jsonl"), encoding="utf-8") as file:
            return [record for record in map(json.loads, file) if record["kind"] == kind]

    def assert_near(self, name, other, bound):
        """Losses relative to one another; numbers of tokens and targets to the last."""
        for kind in ("train", "eval", "eval_set"):
            records, wanted = ({record["step"]: record for record in self.records(n, kind)} for n in (name, other))
            self.assertTrue(wanted)
            self.assertLessEqual(wanted.keys(), records.keys())  # a run that is resumed evaluates where it stopped, too
            for step, record in wanted.items():
                self.assertLess(abs(records[step]["loss"] / record["loss"] - 1), bound, (name, kind, step))
                for key in ("tokens", "targets", "sequences", "epoch"):
                    self.assertEqual(records[step].get(key), record.get(key), (name, kind, step, key))

    def final_files(self, name):
        return tree_digest(os.path.join(self.path(name), f"step_{STEPS:08}"), only=lambda file: file.endswith(".safetensors"))

    def test_ranks_that_share_sequences_train_as_one(self):
        # Sums over tokens are made in another order; FP8 has a scale for each rank's slice, which is a code here or there.
        for recipe, bound in (("fp32", 1e-6 if DEVICE == "cpu" else 1e-4), ("parka", 2e-2)):
            self.run_ranks(f"{recipe}-one", 1, 1, recipe=recipe)
            cases = self.fit(((2, 2, 0, 0), (2, 2, 3, 0), (4, 2, 1, 0), (4, 2, 3, 2), (4, 4, 2, 0)))
            for ranks, shared_by, stage, shard_size in cases:
                with self.subTest(recipe=recipe, ranks=ranks, shared_by=shared_by, stage=stage, shard_size=shard_size):
                    name = f"{recipe}-{ranks}-{shared_by}-{stage}"
                    log = self.run_ranks(name, ranks, shared_by, recipe=recipe, stage=stage, shard_size=shard_size)
                    self.assertIn(f"of which {shared_by} share each sequence", log)
                    self.assert_near(name, f"{recipe}-one", bound)

    def test_every_kind_of_attention_can_be_shared(self):
        cases = {"documents": {"data": {"documents": "separate", "document_end": 3}},
                 "window": {"model": {"sliding_window": 20, "qk_norm": "per_head"}},
                 "grouped": {"model": {"num_kv_heads": 2, "qkv_bias": True}, "precision": {"recompute": "block"}},
                 "released": {"optimizer": {"release_gradients": True, "clip_norm": 0},
                              "training": {"global_batch_size": 2, "micro_batch_size": 2}}}
        bound = 1e-6 if DEVICE == "cpu" else 1e-4
        for name, sections in cases.items():
            with self.subTest(name):
                self.run_ranks(f"{name}-one", 1, 1, **sections)
                self.run_ranks(name, 2, 2, stage=1, **sections)
                self.assert_near(name, f"{name}-one", bound)

    def test_equal_runs_give_equal_bits_also_when_resumed(self):
        options = {"recipe": "parka", "stage": 3, "reliability": {"replay_interval": 1, "state_interval": 1}}
        self.run_ranks("straight", 2, 2, **options)
        self.run_ranks("resumed", 2, 2, steps=4, **options)
        self.assertIn("resuming from", self.run_ranks("resumed", 2, 2, **options))
        self.run_ranks("unchecked", 2, 2, recipe="parka", stage=3)
        for name in ("resumed", "unchecked"):
            self.assertEqual(*(learning_curve(self.path(run))[0] for run in (name, "straight")))
            self.assertEqual(self.final_files(name), self.final_files("straight"))

    def test_a_run_goes_on_whatever_number_of_ranks_share_its_sequences(self):
        self.run_ranks("one", 1, 1)
        moves = ((1, 1, 0, 0, 2), (2, 2, 1, 0, 3), (4, 2, 3, 2, 4), (4, 4, 0, 0, 5), (2, 1, 2, 0, 6), (1, 1, 0, 0, 6))
        for ranks, shared_by, stage, shard_size, steps in self.fit(moves):
            self.run_ranks("moved", ranks, shared_by, stage=stage, shard_size=shard_size, steps=steps)
        self.assert_near("moved", "one", 1e-6 if DEVICE == "cpu" else 1e-4)
        evaluated = parka("eval", self.path("one"), "--json")
        self.assert_exit(evaluated, 0)

    def test_a_shared_run_is_evaluated_by_one_rank(self):
        self.run_ranks("shared", 2, 2)
        result = parka("eval", self.path("shared"), "--json")
        self.assert_exit(result, 0)
        loss = json.loads(result.stdout.splitlines()[0])["loss"]
        self.assertLess(abs(loss / self.records("shared", "eval")[-1]["loss"] - 1), 1e-6 if DEVICE == "cpu" else 1e-4)

    def test_the_plan_says_what_sharing_saves(self):
        planned = {}
        for shared_by in (1, 2):
            result = parka("plan", self.config(f"plan-{shared_by}", shared_by, recipe="parka"), "--json", "--gpus", "2")
            self.assert_exit(result, 0)
            planned[shared_by] = json.loads(result.stdout)
        kept = {shared_by: plan["bytes"]["saved activations"] for shared_by, plan in planned.items()}
        self.assertLess(abs(2 * kept[2] / kept[1] - 1), 0.1)  # but for the rounding of small tensors
        self.assertLess(planned[2]["total_bytes"], planned[1]["total_bytes"])
        text = parka("plan", self.path("plan-2.json"), "--gpus", "4").stdout
        self.assertIn("each of 4 GPUs, of which 2 share each sequence, ZeRO stage 0", text)

    def test_bench_counts_whole_sequences(self):
        rates = {}
        for ranks, shared_by in ((1, 1), (2, 2)):
            config, output = self.config(f"bench-{ranks}", shared_by), self.path(f"bench-{ranks}.out")
            program = [PROGRAM, "--threads", "1", "bench", config, "--steps", "3", "--json", output]
            result = starters.run(ranks, program, "ranks", RANKS_OPTION)
            self.assertEqual(result.returncode, 0, result.stderr)
            with open(output, encoding="utf-8") as file:
                line = json.load(file)
            rates[ranks] = line["tokens_per_second"] * statistics.median(line["step_seconds"])
            self.assertEqual(line["ranks"], ranks)
        self.assertAlmostEqual(rates[1], rates[2], delta=1)
        self.assertAlmostEqual(rates[1], 4 * SEQUENCE, delta=1)

    def test_a_wrong_bit_of_one_rank_is_noticed(self):
        checks = {"replay_interval": 1, "state_interval": 1}
        if DEVICE == "cuda":
            self.skipTest("bits are flipped in the memory of a CPU")
        for target in ("gemm", "gradient", "weight"):
            with self.subTest(target):
                program = [FLIPPING_PROGRAM, "--threads", "1", "train", self.config(target, 2, stage=1, reliability=checks)]
                result = starters.run(2, program, option=RANKS_OPTION, variables={"FLIP": f"{target}:3:1:0"})
                self.assertEqual(result.returncode, 6, result.stdout + result.stderr)
                self.assertIn("silent data corruption in step", result.stdout + result.stderr)

    def test_the_time_of_a_step_is_predicted_from_one_rank(self):
        one, measured = self.config("one", 1), self.path("one.measured")
        self.assert_exit(parka("bench", one, "--steps", "2", "--json", measured), 0)
        result = parka("plan", self.config("shared", 2), "--gpus", "4", "--measured", measured, "--json")
        self.assert_exit(result, 0)
        step = json.loads(result.stdout)["step"]
        self.assertEqual(step["micro_batches"], 2)  # of 4 sequences for two groups
        # In each micro-batch two blocks exchange q, k and v, and what attention makes of them, three times each; a half goes
        # to the other rank. What a rank sends beside that are gradients and sums of numbers.
        exchanged = 2 * 2 * 3 * (3 * 64 + 64) * 4 * (SEQUENCE // 2) // 2
        parameters = 64 * 64 + 2 * (4 * 64 * 64 + 3 * 64 * 64)
        self.assertGreater(step["communicated_bytes"], exchanged)
        self.assertLess(step["communicated_bytes"], exchanged + 2 * 4 * parameters)

    def test_what_cannot_be_shared_is_refused_once_by_name(self):
        cases = ((2, 4, {}, "distributed.context_parallel = 4 does not divide the 2 ranks of the run"),
                 (2, 3, {}, "data.sequence_length = 64"),
                 (2, 2, {"model": {"num_heads": 1}}, "model.num_heads = 1"),
                 (2, 2, {"training": {"global_batch_size": 4, "micro_batch_size": 4}, "evaluation": {"tasks": ["x.jsonl"]}},
                  "evaluation.tasks"))
        for ranks, shared_by, sections, message in self.fit(cases):
            with self.subTest(message):
                result = self.start("refused", ranks, shared_by, starter="ranks", **sections)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertEqual(result.stderr.count(message), 1, result.stderr)
                self.assertFalse(os.path.exists(self.path("refused/step_00000002")))


if __name__ == "__main__":
    run_rank_tests(sys.modules[__name__])
