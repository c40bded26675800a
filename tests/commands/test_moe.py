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

    def tensors(self, config, ending, step=STEPS):
        """The names of a checkpoint's tensors that end like this, their formats and bytes."""
        folder = os.path.join(config["checkpoint"]["folder"], f"step_{step:08}")
        found = {}
        for file in sorted(os.listdir(folder)):
            if file.endswith(".safetensors"):
                for tensor, dtype, *_, data in read_tensors(os.path.join(folder, file)):
                    if tensor.endswith(ending):
                        found[tensor] = dtype, found.get(tensor, (dtype, b""))[1] + data
        return found

    def router_biases(self, config, step=STEPS):
        found = self.tensors(config, "router_bias", step)
        self.assertEqual({dtype for dtype, _ in found.values()}, {"F32"})
        return {tensor: list(array.array("f", data)) for tensor, (_, data) in found.items()}

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
                   {"precision": {"weight_copies": "none"}}, {"optimizer": {"offload": True}},
                   {"precision": {"recompute": "block", "offload_blocks": 1}})
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
        for ranks, stage, size in ((2, 0, 0), (2, 1, 0), (4, 2, 0), (4, 2, 2), (2, 3, 0), (4, 3, 2)):
            with self.subTest(ranks=ranks, stage=stage, size=size):
                config = self.config(f"ranks-{ranks}-{stage}-{size}", "fp32", split=(ranks, stage, size), training={"micro_batch_size": 1})
                self.run_ok(config, ranks=ranks)
                for loss, wanted in zip(self.losses(config), self.losses(one)):
                    self.assertAlmostEqual(loss, wanted, places=5)

    def test_weights_divided_by_flat_pieces_are_quantized_as_whole_experts(self):
        """Pieces of ranks end within experts; each expert has its scale."""
        for ranks in (2, 3):
            curves = []
            for stage in (0, 3):
                config = self.config(f"parka-{ranks}-{stage}", split=(ranks, stage, 0), training={"global_batch_size": 6, "micro_batch_size": 1})
                self.run_ok(config, ranks=ranks)
                curves.append(self.losses(config))
            self.assertEqual(*curves)

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

    def test_divided_experts_go_on_after_a_kill_with_the_same_bits_and_on_other_ranks(self):
        split = {"distributed": {"expert_parallel": 2}, "training": {"micro_batch_size": 1}}
        straight, killed = (self.config(name, "fp32", split=(2, 1, 0), **split) for name in ("straight", "killed"))
        one = self.config("one", "fp32", training={"micro_batch_size": 1})
        for config in (straight, killed, one):
            config["checkpoint"]["interval"] = 2
        self.run_ok(straight, ranks=2)
        self.run_ok(one)
        path = self.write_config(killed, "killed.json")
        result = starters.run(2, [PROGRAM, "--threads", "1", "train", path], starter="ranks", variables=killed_in_save(4))
        self.assertNotEqual(result.returncode, 0)
        self.run_ok(killed, ranks=2)
        self.assertEqual(self.losses(killed), self.losses(straight))
        self.assertEqual(self.bits(killed), self.bits(straight))
        # Two ranks, then one, then four.
        for step, ranks, stage, experts in ((2, 1, 0, 1), (4, 4, 2, 4)):
            moved = self.config(f"moved-{ranks}", "fp32", split=(ranks, stage, 0), training={"micro_batch_size": 1},
                                distributed={"expert_parallel": experts})
            source = straight if ranks == 1 else self.config("moved-1")
            os.makedirs(moved["checkpoint"]["folder"])
            name = f"step_{step:08}"
            shutil.copytree(os.path.join(source["checkpoint"]["folder"], name), os.path.join(moved["checkpoint"]["folder"], name))
            moved["checkpoint"]["interval"] = 2
            self.run_ok(moved, ranks=ranks)
        for name in ("moved-1", "moved-4"):
            self.assertAlmostEqual(self.losses(self.config(name))[-1], self.losses(one)[-1], places=4)

    def test_held_out_losses_of_divided_experts_count_each_sequence_once(self):
        """Of 6 sequences one rank has four and the other two."""
        evaluated = []
        for name, ranks in (("one", 1), ("two", 2)):
            config = self.config(name, "fp32", split=(ranks, ranks - 1, 0), distributed={"expert_parallel": ranks},
                                 training={"micro_batch_size": 4, "eval_interval": 3, "balance_loss": 0},
                                 data={"eval": [self.path("held_out.npy")]})
            self.run_ok(config, ranks=ranks)
            evaluated.append(metrics(config["checkpoint"]["folder"], "eval"))
        for one, two in zip(*evaluated, strict=True):
            self.assertAlmostEqual(one["loss"], two["loss"], places=5)

    def test_divided_experts_are_watched_without_changing_a_bit(self):
        for stage in (0, 2):
            split = {"split": (4, stage, 0), "moe": DEEPSEEK, "training": {"micro_batch_size": 1}}
            plain = self.config(f"plain-{stage}", **split, distributed={"expert_parallel": 2})
            watched = self.config(f"watched-{stage}", **split, distributed={"expert_parallel": 2}, telemetry={"interval": 1},
                                  reliability={"replay_interval": 1, "state_interval": 1})
            for config in (plain, watched):
                self.run_ok(config, ranks=4)
            self.assertEqual(self.losses(watched), self.losses(plain))
            self.assertEqual(self.bits(watched), self.bits(plain))
            for record in metrics(watched["checkpoint"]["folder"], "train"):
                self.assertTrue(1 <= record["rank_load"] <= 2, record)

    def test_muon_takes_each_expert_and_lora_leaves_them(self):
        muon = self.config("muon", optimizer={"kind": "muon"})
        log = self.run_ok(muon).stderr
        self.assertIn("experts", log)
        self.assertTrue(all(loss < 20 for loss in self.losses(muon)))
        # Experts divided over ranks are orthogonalized each for itself, too: to the order of sums.
        for name, ranks in (("muon-1", 1), ("muon-2", 2)):
            self.run_ok(self.config(name, "fp32", optimizer={"kind": "muon"}, split=(ranks, ranks, 0) if ranks > 1 else (1, 0, 0),
                                    training={"micro_batch_size": 1}), ranks=ranks)
        for loss, wanted in zip(*([record["loss"] for record in metrics(self.path(name), "train")] for name in ("muon-1", "muon-2"))):
            self.assertAlmostEqual(loss, wanted, places=3)
        # Each rank reports its own experts' updates, and one rank those of all.
        reported = []
        for ranks, stage, experts in ((1, 0, 1), (2, 0, 2), (4, 1, 2)):
            watched = self.config(f"watched-{stage}-{experts}", "fp32", optimizer={"kind": "muon"}, split=(ranks, stage, 0),
                                  training={"micro_batch_size": 1, "steps": 1}, distributed={"expert_parallel": experts},
                                  telemetry={"interval": 1})
            self.run_ok(watched, ranks=ranks)
            reported.append(metrics(watched["checkpoint"]["folder"], "updates")[0]["parameters"])
        for parameters in reported[1:]:
            for parameter, numbers in parameters.items():
                for key, blocks in numbers.items():
                    for values, wanted in zip(blocks, reported[0][parameter][key], strict=True):
                        for value, one in zip(values, wanted, strict=True):
                            self.assertAlmostEqual(value, one, delta=0.02, msg=f"{parameter} {key}")
        lora = self.config("lora", "bf16", finetune={"method": "lora", "rank": 4, "targets": ["q_proj", "v_proj"]},
                           training={"balance_loss": 0, "router_z_loss": 0})
        lora["checkpoint"]["init_from"] = muon["checkpoint"]["folder"]
        self.run_ok(lora)

    def test_what_watches_a_run_changes_no_bit(self):
        for ranks in (1, 2):
            split = (ranks, 2 if ranks > 1 else 0, 0)
            plain = self.config(f"plain-{ranks}", moe=DEEPSEEK, split=split)
            watched = self.config(f"watched-{ranks}", moe=DEEPSEEK, split=split, telemetry={"interval": 1},
                                  reliability={"replay_interval": 1, "state_interval": 1})
            for config in (plain, watched):
                self.run_ok(config, ranks=ranks)
            self.assertEqual(self.losses(watched), self.losses(plain))
            self.assertEqual(self.bits(watched), self.bits(plain))

    def test_loads_are_exact_on_any_split(self):
        keys, loads = ("expert_load", "idle_experts", "expert_entropy"), []
        for number, (size, ranks, experts) in enumerate(((1, 1, 1), (2, 1, 1), (8, 1, 1), (1, 2, 1), (2, 4, 1), (1, 2, 2), (2, 4, 2))):
            config = self.config(f"load-{number}", "fp32", DEEPSEEK, split=(ranks, 1 if ranks > 1 else 0, 0),
                                 training={"micro_batch_size": size, "balance_loss": 0, "steps": 2},
                                 distributed={"expert_parallel": experts})
            self.run_ok(config, ranks=ranks)
            records = metrics(config["checkpoint"]["folder"], "train")
            loads.append([[record[key] for key in keys] for record in records])
            for record in records:
                self.assertAlmostEqual(record["balance_loss"], 1, delta=0.2)
        for others in loads[1:]:
            self.assertEqual(others, loads[0])

    def test_a_skipped_step_moves_no_bias(self):
        overflow = self.config("overflow", "bf16", DEEPSEEK, training={"non_finite": "skip"},
                               optimizer={"lr": 1e30, "schedule": {"kind": "constant"}})
        spikes = self.config("spikes", "bf16", DEEPSEEK, training={"spike_window": 2},
                             optimizer={"lr": 1.0, "schedule": {"kind": "constant"}})
        for config in (overflow, spikes):
            config["checkpoint"].update(interval=1, keep=0)
            self.run_ok(config)
            applied = [record["applied"] for record in metrics(config["checkpoint"]["folder"], "train")]
            self.assertTrue(applied[0] and not all(applied), applied)
            for step in range(2, STEPS + 1):
                moved = self.router_biases(config, step) != self.router_biases(config, step - 1)
                self.assertEqual(moved, applied[step - 1], (step, applied))

    def test_what_is_frozen_stays_and_the_rest_moves(self):
        weights = (".router", ".experts.up_gate", ".experts.down", ".shared.down", ".qkv")
        for recipe in ("bf16", "parka"):
            for number, (still, optimizer) in enumerate((([".router"], {"frozen": ["*.router"]}),
                                                         ([".router"], {"lr_patterns": ["*.router"], "lr_factors": [0.0]}),
                                                         ([".experts.up_gate", ".experts.down"], {"frozen": ["*.experts.*"]}),
                                                         ([".experts.down"], {"frozen": ["*.experts.down"]}),
                                                         ([".experts.up_gate"], {"frozen": ["*.experts.up_gate"]}))):
                with self.subTest(recipe=recipe, optimizer=optimizer):
                    config = self.config(f"{recipe}-{number}", recipe, DEEPSEEK, optimizer=optimizer)
                    config["checkpoint"]["interval"] = 1
                    self.run_ok(config)
                    for name in weights:
                        first, last = (self.tensors(config, name, step) for step in (1, STEPS))
                        self.assertTrue(first)
                        for tensor, value in first.items():
                            if "blocks.0." not in tensor:
                                self.assertEqual(value == last[tensor], name in still, tensor)

    def test_idle_experts_decay_as_all_weights_do(self):
        """A router of zeros gives every token to the first two experts; the moments of the others stay zeros in any format."""
        for recipe, states in (("fp32", "fp32"), ("bf16", "fp8"), ("parka", "fp8_expanded"), ("coat", "fp8_expanded")):
            with self.subTest(recipe=recipe, states=states):
                config = self.config(f"{recipe}-{states}", recipe, training={"balance_loss": 0, "router_z_loss": 0},
                                     optimizer={"states": states, "weight_decay": 0.5, "lr": 0.1, "schedule": {"kind": "constant"},
                                                "lr_patterns": ["*.router"], "lr_factors": [0.0]})
                config["model"].update(init="normal", init_std=1e-30)
                config["checkpoint"].update(interval=1)
                self.run_ok(config)
                self.assertEqual({record["idle_experts"] for record in metrics(config["checkpoint"]["folder"], "train")}, {0.75})
                for moment in ("exp_avg", "exp_avg_sq"):
                    (_, data), = self.tensors(config, f"blocks.0.experts.down.{moment}").values()
                    self.assertFalse(any(data[len(data) // 4:]), moment)
                if recipe != "fp32":
                    continue
                first, last = (self.tensors(config, "blocks.0.experts.down", step)["blocks.0.experts.down"][1] for step in (1, STEPS))
                first, last = array.array("f", first), array.array("f", last)
                idle = len(first) // 4
                for before, after in zip(first[idle:], last[idle:]):
                    self.assertAlmostEqual(after / before, (1 - 0.1 * 0.5)**(STEPS - 1), places=5)

    def test_a_run_goes_on_with_other_ranks_and_recipes(self):
        straight, moved = (self.config(name, "bf16", DEEPSEEK, training={"micro_batch_size": 1}) for name in ("straight", "moved"))
        self.run_ok(straight)
        for number, ranks in enumerate((2, 1, 4)):
            moved["training"]["steps"] = 2 * (number + 1)
            moved["distributed"] = {"zero_stage": (2, 0, 1)[number]}
            self.run_ok(moved, ranks=ranks)
        for loss, wanted in zip(self.losses(moved), self.losses(straight), strict=True):
            self.assertAlmostEqual(loss, wanted, places=4)
        self.assertEqual(self.router_biases(moved), self.router_biases(straight))
        recipes = self.config("recipes", "parka", DEEPSEEK)
        for number, recipe in enumerate(("parka", "bf16", "coat", "fp8_linear", "parka", "bf16")):
            recipes["precision"] = {"recipe": recipe}
            recipes["training"]["steps"] = number + 1
            self.run_ok(recipes, "--convert-states")
        for loss, wanted in zip(self.losses(recipes), self.losses(straight), strict=True):
            self.assertAlmostEqual(loss, wanted, delta=0.1)

    def test_gradients_that_are_released_give_the_same_bits(self):
        for recipe in ("bf16", "parka"):
            kept, released = (self.config(f"{recipe}-{name}", recipe, DEEPSEEK, training={"micro_batch_size": BATCH, "router_bias_rate": 0},
                                          optimizer={"clip_norm": 0, "release_gradients": releases})
                              for name, releases in (("kept", False), ("released", True)))
            for config in (kept, released):
                self.run_ok(config)
            self.assertEqual(self.losses(released), self.losses(kept))
            self.assertEqual(self.bits(released), self.bits(kept))

    def test_masks_and_documents_train_on_ranks_as_on_one(self):
        losses = []
        for ranks in (1, 2):
            config = self.config(f"documents-{ranks}", "fp32", DEEPSEEK, split=(ranks, ranks, 0) if ranks > 1 else (1, 0, 0),
                                 training={"micro_batch_size": 1}, data={"documents": "separate", "document_start": 3})
            self.run_ok(config, ranks=ranks)
            losses.append(self.losses(config))
        for loss, wanted in zip(*losses, strict=True):
            self.assertAlmostEqual(loss, wanted, places=5)

    def test_an_export_comes_back_with_the_same_loss(self):
        divided = {**EXPERTS, "normalize_weights": True}
        for family, moe, qk_norm in (("olmoe", EXPERTS, "full"), ("qwen3_moe", divided, "per_head"), ("mixtral", divided, "none"),
                                     ("dots1", {**DEEPSEEK, "shared_width": 64}, "per_head")):
            with self.subTest(family=family):
                config = self.config(family, "bf16", moe)
                config["model"].update(qk_norm=qk_norm, tie_embeddings=False)
                self.run_ok(config)
                self.assert_exit(parka("export", self.path(family), "--family", family, "--out", self.path(family + "-hf")), 0)
                self.assert_exit(parka("import", self.path(family + "-hf"), "--out", self.path(family + "-in")), 0)
                losses = []
                for model in (family, family + "-in"):
                    result = parka("eval", self.path(model), "--data", self.path("held_out.npy"), "--set", f"data.sequence_length={SEQUENCE}",
                                   "--json")
                    self.assert_exit(result, 0)
                    losses.append(json.loads(result.stdout)["loss"])
                self.assertEqual(*losses)

    def with_adapters(self, name, start, base, recipe="parka", **sections):
        targets = ["q_proj", "v_proj", "down_proj"] + (["experts.gate_proj", "experts.down_proj"] if recipe in ("fp32", "bf16") else [])
        config = self.config(name, recipe, DEEPSEEK, finetune={"method": "lora", "rank": 4, "targets": targets, "base": base}, **sections)
        config["training"].update(router_bias_rate=0)
        config["checkpoint"].update(init_from=start["checkpoint"]["folder"], interval=3)
        return config

    def test_adapters_go_on_beside_experts_of_any_base(self):
        """Of a stopped run, with the same bits; the router is frozen with the rest, and what saves memory changes nothing."""
        start = self.config("start", moe=DEEPSEEK)
        self.run_ok(start)
        for recipe, base in (("parka", "compute"), ("parka", "fp8"), ("parka", "nf4"), ("bf16", "nf4")):
            with self.subTest(recipe=recipe, base=base):
                runs = []
                for name, sections in (("straight", {}), ("stopped", {}), ("recomputed", {"precision": {"recompute": "block"}}),
                                       ("offloaded", {"precision": {"offload_blocks": 1}, "optimizer": {"offload": True}})):
                    config = self.with_adapters(f"{recipe}-{base}-{name}", start, base, recipe, **sections)
                    for steps in (3, STEPS) if name == "stopped" else (STEPS,):
                        config["training"]["steps"] = steps
                        self.run_ok(config)
                    self.assertTrue(self.tensors(config, ".lora_A"))
                    self.assertFalse({name for name in self.tensors(config, "") if "lora" not in name})
                    runs.append((self.losses(config), self.bits(config)))
                for run in runs[1:]:
                    self.assertEqual(run, runs[0])

    def test_adapters_beside_experts_are_the_same_on_ranks(self):
        """Two micro-batches on one rank, or one on each of two: a sum of two numbers has one order."""
        for recipe, base in (("fp32", "nf4"), ("fp32", "compute"), ("parka", "fp8")):
            with self.subTest(recipe=recipe, base=base):
                start = self.config(f"{recipe}-start", recipe, DEEPSEEK)
                self.run_ok(start)
                runs = []
                for ranks, stage in ((1, 0), (2, 0), (2, 1), (2, 2)):
                    config = self.with_adapters(f"{recipe}-{base}-{ranks}-{stage}", start, base, recipe, split=(ranks, stage, 0),
                                                training={"global_batch_size": 2, "micro_batch_size": 1}, optimizer={"clip_norm": 0})
                    self.run_ok(config, ranks=ranks)
                    runs.append((self.losses(config), self.bits(config)))
                for losses, bits in runs[1:]:
                    self.assertEqual(bits, runs[0][1])
                    for loss, wanted in zip(losses, runs[0][0], strict=True):
                        self.assertAlmostEqual(loss, wanted, places=5)

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

    def test_telemetry_has_the_loads_of_each_block(self):
        config = self.config("loads", moe=DEEPSEEK, telemetry={"interval": 3})
        self.run_ok(config)
        steps = {record["step"]: record for record in metrics(self.path("loads"), "train")}
        records = metrics(self.path("loads"), "routing")
        self.assertEqual([record["step"] for record in records], [3, 6])
        for record in records:
            self.assertEqual(set(record["blocks"]), {"expert_load", "idle_experts", "expert_entropy"})
            dense, *loads = record["loads"]
            self.assertEqual((dense, len(loads)), ([], 2))
            for block, busiest in zip(loads, record["blocks"]["expert_load"][1:]):
                self.assertAlmostEqual(sum(block) / len(block), 1, places=3)
                self.assertAlmostEqual(max(block), busiest, places=3)
            for key, (dense, *blocks) in record["blocks"].items():
                self.assertIsNone(dense)
                self.assertEqual(len(blocks), 2)
                self.assertAlmostEqual(sum(blocks) / 2, steps[record["step"]][key], places=3)

    def test_a_collapse_is_warned_of_once_and_a_sound_run_is_silent(self):
        """A router of zeros gives every token to the first two experts."""
        steps = {"training": {"steps": 60, "log_interval": 60}, "checkpoint": {"interval": 60}}
        sound, collapsed = (self.config(name, **steps) for name in ("sound", "collapsed"))
        for config in (sound, collapsed):
            config["optimizer"]["schedule"].update(total_steps=60, warmup_steps=5)
        collapsed["optimizer"]["frozen"] = ["*router"]
        collapsed["model"].update(init="normal", init_std=1e-30)
        self.assertNotIn("routing collapses", self.run_ok(sound).stderr)
        self.assertEqual(metrics(self.path("sound"), "warning"), [])
        lines = [line for line in self.run_ok(collapsed).stderr.splitlines() if "routing collapses" in line]
        self.assertEqual(len(lines), 2)
        for line, record, (key, value) in zip(lines, metrics(self.path("collapsed"), "warning"),
                                              (("expert_load", 4), ("idle_experts", 0.75)), strict=True):
            self.assertIn("training.balance_loss", line)
            self.assertIn(f"in block {record['block']} ", line)
            self.assertEqual((record["about"], record["step"], record["raised"], record[key]), (key, 55, True, value))

    def test_a_plan_tells_what_a_token_uses(self):
        result = parka("plan", os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "configs", "olmoe-1b-7b.json"))
        self.assert_exit(result, 0)
        self.assertRegex(result.stdout, r"(?m)^6\.92B .* 1\.28B$")

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
                              ("distributed.zero_stage", {"model": {"moe": DEEPSEEK}, "distributed": {"zero_stage": 3}}),
                              ("precision.offload_weights", {"precision": {"offload_weights": True}, "optimizer": {"offload": True}}),
                              ("training.balance_form", {"training": {"balance_loss": 0, "balance_form": "pooled"}}),
                              ("finetune.targets", {"finetune": {"method": "lora"}}),
                              ("finetune.targets", {"finetune": {"method": "lora", "targets": ["experts.up_proj"]}}),
                              ("finetune.dropout", {"finetune": {"method": "lora", "targets": ["experts.up_proj"], "dropout": 0.1},
                                                    "precision": {"recipe": "bf16"}}),
                              ("training.balance_loss", {"finetune": {"method": "qst"}}),
                              ("finetune.method", {"finetune": {"method": "lora", "targets": ["q_proj"]}, "distributed": {"expert_parallel": 2}}),
                              ("training.router_bias_rate",
                               {"model": {"moe": DEEPSEEK}, "finetune": {"method": "lora"}, "training": {"router_bias_rate": 0.01}}),
                              ("training.balance_loss", {"model": {"moe": {}}})):
            with self.subTest(key=key, sections=sections):
                config = self.config("refused", **sections)
                result = parka("config", "check", self.write_config(config, "refused.json"))
                assert_refused(self, result, key)


if __name__ == "__main__":
    unittest.main()
