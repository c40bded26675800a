"""Mixtures of experts in whole runs: every recipe learns; what saves memory, several ranks, and a kill change no bit; routing
that sends all tokens to one expert takes the memory that was planned; what does not go with experts is refused."""
import array
import json
import os
import shutil
import signal
import sys
import unittest

from parka_runs import PROGRAM, SEQUENCE, RunFolder, killed_in_save, metrics, parka, starters, tiny_config, write_tokens
from refusals import assert_ended_well, assert_refused

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "equal_bits"))
from hash_runs import hash_checkpoints, read_tensors  # noqa: E402

STEPS = 6
BATCH = 8
EXPERTS = {"num_experts": 8, "experts_per_token": 2}
DEEPSEEK = {**EXPERTS, "score": "sigmoid", "normalize_weights": True, "weight_scaling": 2.5, "groups": 4, "groups_kept": 2,
            "correction_bias": True, "shared_width": 48, "dense_layers": 1, "dense_width": 80}
RECIPES = ("fp32", "bf16", "fp8_linear", "coat", "parka")


class Moe(RunFolder):
    def setUp(self):
        super().setUp()
        write_tokens(self.path("a.npy"), 10 * BATCH * SEQUENCE, seed=1)

    def config(self, name, recipe="parka", moe=None, split=(1, 0, 0), **sections):
        config = tiny_config(self.folder, recipe, STEPS)
        config["model"].update(num_layers=3, norm="rmsnorm", moe=dict(moe or EXPERTS))
        config["optimizer"]["schedule"]["total_steps"] = STEPS
        config["data"].update(train=[self.path("a.npy")], eval=[], shuffle=False)
        config["training"].update(global_batch_size=BATCH, micro_batch_size=2, eval_interval=0, balance_loss=0.01,
                                  router_z_loss=1e-3)
        config["checkpoint"].update(folder=self.path(name), interval=STEPS)
        config["distributed"] = dict(zip(("zero_stage", "shard_size"), split[1:]))
        if config["model"]["moe"].get("correction_bias"):
            config["training"]["router_bias_rate"] = 0.01
        for section, keys in sections.items():
            config.setdefault(section, {}).update(keys)
        return config

    def run_ok(self, config, *arguments, ranks=1, **options):
        path = self.write_config(config, os.path.basename(config["checkpoint"]["folder"]) + ".json")
        result = starters.run(ranks, [PROGRAM, "--threads", "1", "train", path, *arguments], starter="ranks", **options)
        assert_ended_well(self, result)
        return result

    def bits(self, config):
        return hash_checkpoints(config["checkpoint"]["folder"])[1]

    def router_biases(self, config):
        folder = os.path.join(config["checkpoint"]["folder"], f"step_{STEPS:08}")
        biases = {}
        for file in sorted(os.listdir(folder)):
            if file.endswith(".safetensors"):
                for tensor, dtype, *_, data in read_tensors(os.path.join(folder, file)):
                    if tensor.endswith("router_bias"):
                        self.assertEqual(dtype, "F32")
                        biases.setdefault(tensor, []).extend(array.array("f", data))
        return biases

    def losses(self, config):
        return [record["loss"] for record in metrics(config["checkpoint"]["folder"], "train")]

    def test_every_recipe_learns(self):
        for moe in (EXPERTS, DEEPSEEK):
            for recipe in RECIPES:
                with self.subTest(recipe=recipe, moe=moe):
                    config = self.config(f"{recipe}-{moe['score'] if 'score' in moe else 'softmax'}", recipe, moe)
                    config["training"]["steps"] = config["optimizer"]["schedule"]["total_steps"] = 30
                    config["optimizer"]["lr"] = 1e-2
                    self.run_ok(config)
                    losses = self.losses(config)
                    self.assertLess(losses[-1], losses[0] - 0.1)

    def test_what_saves_memory_changes_no_bit(self):
        changes = ({"precision": {"recompute": "block"}}, {"precision": {"offload_blocks": 1}},
                   {"precision": {"save_norm_output": True, "save_product": True}}, {"precision": {"weight_copies": "rows"}},
                   {"precision": {"weight_copies": "none"}}, {"optimizer": {"offload": True}})
        for moe in (EXPERTS, DEEPSEEK):
            plain = self.config(f"plain-{len(moe)}", moe=moe)
            self.run_ok(plain)
            for number, sections in enumerate(changes):
                with self.subTest(sections=sections, moe=moe):
                    changed = self.config(f"changed-{len(moe)}-{number}", moe=moe, **sections)
                    self.run_ok(changed)
                    self.assertEqual(self.losses(changed), self.losses(plain))
                    self.assertEqual(self.bits(changed), self.bits(plain))

    def test_the_correction_bias_moves_by_its_rate_on_any_number_of_ranks(self):
        moved = []
        for ranks in (1, 2, 4):
            config = self.config(f"bias-{ranks}", "bf16", DEEPSEEK, split=(ranks, 1 if ranks > 1 else 0, 0))
            self.run_ok(config, ranks=ranks)
            moved.append(self.router_biases(config))
        for biases in moved:
            self.assertEqual(biases.keys(), {"blocks.1.router_bias", "blocks.2.router_bias"})
            for values in biases.values():
                steps = [value / 0.01 for value in values]
                self.assertTrue(any(steps))
                for step in steps:
                    self.assertAlmostEqual(step, round(step), places=3)
                    self.assertLessEqual(abs(step), STEPS + 0.01)

    def test_ranks_train_as_one(self):
        """To the order of sums. A micro-batch of one sequence has the same balance loss on any rank."""
        one = self.config("one", "fp32", training={"micro_batch_size": 1})
        self.run_ok(one)
        for ranks, stage, size in ((2, 0, 0), (2, 1, 0), (4, 2, 0), (4, 2, 2)):
            with self.subTest(ranks=ranks, stage=stage, size=size):
                config = self.config(f"ranks-{ranks}-{stage}-{size}", "fp32", split=(ranks, stage, size), training={"micro_batch_size": 1})
                self.run_ok(config, ranks=ranks)
                for loss, wanted in zip(self.losses(config), self.losses(one)):
                    self.assertAlmostEqual(loss, wanted, places=5)

    def test_a_killed_run_goes_on_with_the_same_bits_also_on_other_ranks(self):
        straight, killed, moved = (self.config(name, moe=DEEPSEEK, training={"micro_batch_size": 1})
                                   for name in ("straight", "killed", "moved"))
        straight["checkpoint"]["interval"] = killed["checkpoint"]["interval"] = 2
        self.run_ok(straight)
        path = self.write_config(killed, "killed.json")
        self.assertEqual(parka("train", path, env=killed_in_save(4)).returncode, -signal.SIGKILL)
        self.run_ok(killed)
        self.assertEqual(self.losses(killed), self.losses(straight))
        self.assertEqual(self.bits(killed), self.bits(straight))
        # From its middle on two ranks: to the order of sums.
        os.makedirs(moved["checkpoint"]["folder"])
        shutil.copytree(os.path.join(killed["checkpoint"]["folder"], "step_00000004"),
                        os.path.join(moved["checkpoint"]["folder"], "step_00000004"))
        moved["distributed"]["zero_stage"] = 2
        self.run_ok(moved, ranks=2)
        self.assertAlmostEqual(self.losses(moved)[-1], self.losses(straight)[-1], places=3)

    def test_muon_takes_each_expert_and_lora_leaves_them(self):
        muon = self.config("muon", optimizer={"kind": "muon"})
        log = self.run_ok(muon).stderr
        self.assertIn("experts", log)
        self.assertTrue(all(loss < 20 for loss in self.losses(muon)))
        lora = self.config("lora", "bf16", finetune={"method": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]},
                           training={"balance_loss": 0, "router_z_loss": 0})
        lora["checkpoint"]["init_from"] = muon["checkpoint"]["folder"]
        self.run_ok(lora)

    def test_memory_depends_on_no_routing(self):
        """A router of zeros gives every token to the first two experts."""
        spread, skewed = self.config("spread"), self.config("skewed")
        plans = []
        for config in (spread, skewed):
            path = self.write_config(config, "plan.json")
            plans.append(json.loads(parka("plan", path, "--json").stdout)["total_bytes"])
        self.assertEqual(*plans)
        skewed["optimizer"]["lr_patterns"], skewed["optimizer"]["lr_factors"] = ["*router"], [0.0]
        skewed["model"].update(init="normal", init_std=1e-30)
        self.run_ok(skewed)
        self.assertTrue(all(loss < 20 for loss in self.losses(skewed)))

    def test_evaluation_and_generation_read_the_experts(self):
        config = self.config("run", "bf16", training={"eval_interval": 3}, data={"eval": [self.path("held_out.npy")]})
        config["model"]["vocab_size"] = 272  # a byte vocabulary
        self.run_ok(config)
        evaluated = metrics(self.path("run"), "eval")[-1]
        result = parka("eval", self.path("run"), "--json")
        self.assert_exit(result, 0)
        self.assertEqual(json.loads(result.stdout)["loss"], evaluated["loss"])
        greedy = ("--prompt-tokens", "1,2,3", "--temperature", "0", "--tokens")
        longer, shorter = (parka("generate", self.path("run"), *greedy, count).stdout for count in ("12", "6"))
        self.assertTrue(longer.startswith(shorter.strip() + ","))

    def test_what_does_not_go_with_experts_is_refused_by_its_key(self):
        for key, sections in (("model.moe.experts_per_token", {"model": {"moe": {"num_experts": 8}}}),
                              ("model.moe.experts_per_token", {"model": {"moe": {"num_experts": 4, "experts_per_token": 5}}}),
                              ("model.moe.num_experts", {"model": {"moe": {"experts_per_token": 2}}}),
                              ("model.moe.groups", {"model": {"moe": {**EXPERTS, "groups": 3}}}),
                              ("model.moe.dense_width", {"model": {"moe": {**EXPERTS, "dense_layers": 1}}}),
                              ("model.moe.normalize_weights",
                               {"model": {"moe": {"num_experts": 8, "experts_per_token": 1, "normalize_weights": True}}}),
                              ("precision.gemm", {"precision": {"gemm": "fp8_block"}}),
                              ("distributed.zero_stage", {"distributed": {"zero_stage": 3}}),
                              ("precision.offload_weights", {"precision": {"offload_weights": True}, "optimizer": {"offload": True}}),
                              ("training.balance_form", {"training": {"balance_loss": 0, "balance_form": "pooled"}}),
                              ("training.balance_loss", {"model": {"moe": {}}})):
            with self.subTest(key=key, sections=sections):
                config = self.config("refused", **sections)
                result = parka("config", "check", self.write_config(config, "refused.json"))
                assert_refused(self, result, key)


if __name__ == "__main__":
    unittest.main()
