"""optimizer.kind = muon in whole runs: the bits of one rank on any number of ranks, wherever AdamW has them; killed, resumed,
continued after AdamW and before it; refused beside adapters; and its memory plan. The ranks are started by the program itself."""
import array
import json
import os
import random
import shutil
import signal
import sys
import unittest

from parka_runs import PROGRAM, SEQUENCE, RunFolder, killed_in_save, learning_curve, metrics, parka, starters, tiny_config, write_tokens
from refusals import assert_ended_well, assert_refused, shown

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "equal_bits"))
from hash_runs import hash_checkpoints, read_tensors  # noqa: E402

STEPS = 6
BATCH = 12
# Ranks, ZeRO stage, shard size.
SPLITS = (*((ranks, stage, 0) for ranks in (2, 4) for stage in range(4)), *((4, stage, 2) for stage in (1, 2, 3)), (3, 1, 0), (3, 3, 0))
STATES_OF_RULES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum",)}


def state_of(tensor):
    """What a rule keeps: "momentum" of "blocks.0.qkv.momentum.amax"; nothing of a weight or master."""
    return next((part for part in tensor.split(".") if any(part in names for names in STATES_OF_RULES.values())), "")


class Muon(RunFolder):
    def setUp(self):
        super().setUp()
        write_tokens(self.path("a.npy"), 10 * BATCH * SEQUENCE, seed=1)
        # Two sequences of a batch have targets, so that sums over ranks have two terms, in whichever order.
        with open(self.path("a.npy.mask"), "wb") as file:
            file.write(b"".join(bytes([i % BATCH in (0, BATCH - 1)]) * SEQUENCE for i in range(10 * BATCH)))

    def config(self, name, kind="muon", states="fp32", steps=STEPS, split=(1, 0, 0), recipe="fp32", **optimizer):
        config = tiny_config(self.folder, recipe, steps, kind=kind, states=states, clip_norm=0, **optimizer)
        # Matrices of several shapes, of which neither 2 ranks nor 4 have equally many.
        config["model"].update(num_layers=3, num_kv_heads=1, tie_embeddings=False)
        config["optimizer"]["schedule"]["total_steps"] = STEPS
        config["data"].update(train=[self.path("a.npy")], eval=[], loss_mask=True, shuffle=False)
        config["training"].update(global_batch_size=BATCH, micro_batch_size=1, eval_interval=0)
        config["checkpoint"].update(folder=self.path(name), interval=STEPS)
        config["distributed"] = dict(zip(("zero_stage", "shard_size"), split[1:]))
        return config

    def start(self, config, *arguments, ranks=1, **options):
        path = self.write_config(config, os.path.basename(config["checkpoint"]["folder"]) + ".json")
        program = [PROGRAM, "--threads", "1", "train", path, *arguments]
        return starters.run(ranks, program, starter="ranks", **options)

    def run_ok(self, config, *arguments, ranks=1):
        result = self.start(config, *arguments, ranks=ranks)
        assert_ended_well(self, result)
        return result.stderr

    def bits(self, config):
        """A hash of all tensors of all checkpoints, however they are divided over files."""
        return hash_checkpoints(config["checkpoint"]["folder"])[1]

    def assert_near(self, config, other):
        """Losses and norms, whose sums ranks divide: no gradient depends on these."""
        curves = [learning_curve(one["checkpoint"]["folder"])[0] for one in (config, other)]
        self.assertEqual(*([step[:3] for step in curve] for curve in curves))
        for steps in zip(*curves):
            for values in zip(*(step[3:] for step in steps)):
                self.assertAlmostEqual(*values, places=5)

    def tensors(self, config, step):
        """Names of those in a checkpoint, with their bytes."""
        folder = os.path.join(config["checkpoint"]["folder"], f"step_{step:08}")
        sizes = {}
        for file in sorted(os.listdir(folder)):
            if file.endswith(".safetensors"):
                for tensor, _, _, _, _, data in read_tensors(os.path.join(folder, file)):
                    sizes[tensor] = sizes.get(tensor, 0) + len(data)
        return sizes

    def splits_of_equal_bits(self, kind, recipe, states):
        one = self.config(f"{kind}-{states}", kind, states, recipe=recipe)
        self.run_ok(one)
        wanted = self.bits(one)
        equal = []
        for split in SPLITS:
            config = self.config(f"{kind}-{states}-" + "-".join(map(str, split)), kind, states, split=split, recipe=recipe)
            self.run_ok(config, ranks=split[0])
            self.assert_near(config, one)
            if self.bits(config) == wanted:
                equal.append(split)
        return equal

    def test_splits_have_the_bits_of_one_rank_wherever_they_have_them_with_adamw(self):
        for recipe, states in (("fp32", "fp32"), ("parka", "fp8")):
            equal = {kind: self.splits_of_equal_bits(kind, recipe, states) for kind in ("adamw", "muon")}
            with self.subTest(recipe=recipe, states=states, equal=equal):
                self.assertEqual(equal["adamw"], list(SPLITS))
                self.assertEqual(equal["muon"], list(SPLITS))

    def test_host_memory_released_gradients_and_recipes_change_no_bit_over_ranks(self):
        for recipe, states, changes in (("bf16", "bf16", {"offload": True}), ("parka", "fp8_expanded", {"release_gradients": True}),
                                        ("parka", "fp8", {"offload": True, "release_gradients": True})):
            plain = self.config(f"plain-{recipe}-{states}", states=states, recipe=recipe)
            if "release_gradients" in changes:
                plain["training"]["micro_batch_size"] = BATCH
            for ranks, stage in ((1, 0), (2, 1), (4, 3)):
                with self.subTest(recipe=recipe, states=states, changes=changes, ranks=ranks, stage=stage):
                    pair = []
                    for name, keys in (("plain", {}), ("changed", changes)):
                        config = json.loads(json.dumps(plain))
                        config["checkpoint"]["folder"] = self.path(f"{recipe}-{states}-{ranks}-{name}")
                        config["distributed"]["zero_stage"] = stage
                        config["optimizer"].update(keys)
                        if "release_gradients" in changes:
                            config["training"]["micro_batch_size"] = BATCH // ranks
                        self.run_ok(config, ranks=ranks)
                        pair.append(self.bits(config))
                    self.assertEqual(*pair)

    def test_telemetry_of_updates_is_that_of_one_rank_and_changes_no_bit(self):
        plain = self.config("unwatched")
        self.run_ok(plain)
        wanted = None
        # Of 6 ranks some own no matrix of a shape.
        for split, releases in (((1, 0, 0), False), ((2, 0, 0), False), ((2, 1, 0), True), ((4, 2, 0), False), ((4, 1, 2), False), ((6, 1, 0), True)):
            with self.subTest(split=split):
                config = self.config("watched-" + "-".join(map(str, split)), split=split, release_gradients=releases)
                config["telemetry"] = {"interval": 2}
                if releases:
                    config["training"]["micro_batch_size"] = BATCH // split[0]
                self.run_ok(config, ranks=split[0])
                self.assertEqual(self.bits(config), self.bits(plain))
                records = metrics(config["checkpoint"]["folder"], "updates")
                updates = [(record["step"], record["parameters"]) for record in records]
                self.assertEqual([step for step, _ in updates], [2, 4, 6])
                wanted = wanted or updates
                self.assertEqual(updates, wanted)
        for _, parameters in wanted:
            self.assertEqual([len(of_block) for of_block in parameters["qkv"]["rms"]], 3 * [3])
            for numbers in parameters.values():
                for rms in sum(numbers["rms"], []):
                    self.assertTrue(0.1 < rms < 0.25, rms)
                for largest in sum(numbers["singular_value"], []):
                    self.assertTrue(0.6 < largest < 1.25, largest)

    def test_killed_and_resumed_on_other_numbers_of_ranks(self):
        for states in ("fp32", "fp8"):
            straight = self.config(f"straight-{states}", states=states)
            self.run_ok(straight)
            config = self.config(f"moved-{states}", states=states)
            config["checkpoint"]["interval"] = 2
            killed = self.start(config, variables=killed_in_save(4))
            self.assertEqual(killed.returncode, -signal.SIGKILL, shown(killed))
            for split, steps in (((2, 3, 0), 4), ((4, 1, 0), 5), ((4, 3, 2), STEPS)):
                config = self.config(f"moved-{states}", states=states, split=split, steps=steps)
                self.assertIn("resuming from", self.run_ok(config, ranks=split[0]))
            with self.subTest(states=states):
                for step in (2, 4, 5):  # the straight run has saved none
                    shutil.rmtree(self.path(f"moved-{states}/step_{step:08}"))
                self.assertEqual(self.bits(config), self.bits(straight))
                self.assert_near(config, straight)

    def test_a_run_changes_its_optimizer_where_that_is_asked_for(self):
        for before, after, states in (("adamw", "muon", "fp32"), ("muon", "adamw", "fp32"), ("adamw", "muon", "fp8")):
            with self.subTest(before=before, after=after, states=states):
                name = f"{before}-{after}-{states}"
                self.run_ok(self.config(name, before, steps=4))
                shutil.copytree(self.path(name), self.path(f"{name}-divided"))
                begun = self.tensors(self.config(name), 4)
                config = self.config(name, after, states)
                assert_refused(self, self.start(config), "optimizer.kind", "--convert-states")
                said = self.run_ok(config, "--convert-states")
                self.assertIn("optimizer.kind", said)
                for state in STATES_OF_RULES[after]:
                    self.assertRegex(said, rf"\b{state}\b")  # which begins at zero
                losses = [record["loss"] for record in metrics(config["checkpoint"]["folder"])]
                self.assertEqual(len(losses), STEPS)
                self.assertLess(max(losses[4:]), max(losses[:4]) + 0.5)
                # The new run's states are of its rule, and none of the other is left.
                ended = self.tensors(config, STEPS)
                for tensor in ended:
                    if tensor.startswith("blocks.0.qkv.") and state_of(tensor):
                        self.assertIn(state_of(tensor), STATES_OF_RULES[after])
                self.assertTrue(any(tensor.startswith("blocks.0.qkv.") and state_of(tensor) for tensor in ended))
                if states == "fp32":  # what AdamW updates all the time has the same states
                    kept = [tensor for tensor in begun if not tensor.startswith("blocks.") and state_of(tensor)]
                    self.assertTrue(kept)
                    self.assertEqual({tensor: begun[tensor] for tensor in kept}, {tensor: ended.get(tensor) for tensor in kept})

                divided = self.config(f"{name}-divided", after, states, split=(4, 3, 0))
                self.run_ok(divided, "--convert-states", ranks=4)
                self.assertEqual(self.bits(divided), self.bits(config))
                self.assertIn("nothing to do", self.run_ok(config))  # which asks for nothing

    def test_adapters_refuse_it(self):
        self.run_ok(self.config("base", "adamw", steps=2))
        config = self.config("lora")
        config["checkpoint"]["init_from"] = self.path("base")
        config["finetune"] = {"method": "lora", "rank": 2, "targets": ["q_proj", "v_proj"]}
        assert_refused(self, self.start(config), "optimizer.kind")
        assert_refused(self, parka("plan", self.path("lora.json")), "optimizer.kind")
        self.assertFalse(os.path.exists(self.path("lora/metrics.jsonl")))
        config["optimizer"]["kind"] = "adamw"
        self.run_ok(config)

    def test_loss_falls_about_as_with_adamw(self):
        rng = random.Random(5)
        words = ["".join(rng.choice("abcdefghijklmnop") for _ in range(rng.randrange(2, 7))) for _ in range(12)]
        text = " ".join(rng.choice(words) for _ in range(4000)).encode()
        with open(self.path("text.npy"), "wb") as file:
            file.write(array.array("H", (byte - 32 if byte == 32 else byte - 96 for byte in text)).tobytes())
        curves = {}
        for kind in ("adamw", "muon"):
            config = self.config(kind, kind, steps=60)
            config["optimizer"].update(lr=1e-2, clip_norm=1, schedule={"kind": "cosine", "warmup_steps": 5})
            config["data"].update(train=[self.path("text.npy")], sequence_length=32, loss_mask=False, shuffle=True)
            config["training"].update(global_batch_size=8, micro_batch_size=8)
            self.run_ok(config)
            curves[kind] = [record["loss"] for record in metrics(config["checkpoint"]["folder"])]
        ends = {kind: sum(curve[-5:]) / 5 for kind, curve in curves.items()}
        with self.subTest(ends=ends, begins={kind: curve[0] for kind, curve in curves.items()}):
            self.assertLess(ends["muon"], curves["muon"][0] - 1.5)
            self.assertLess(ends["muon"], ends["adamw"] + 0.2)

    def test_the_plan_is_what_a_run_has(self):
        def megabytes(count):
            return f"{1e-6 * count:.1f} MB"

        for kind, states in (("adamw", "fp32"), ("muon", "fp32"), ("muon", "bf16"), ("muon", "fp8"), ("muon", "fp8_expanded")):
            with self.subTest(kind=kind, states=states):
                config = self.config(f"{kind}-{states}", kind, states, steps=1, recipe="bf16")
                config["model"].update(d_model=256, num_heads=4, d_ffn=640)
                said = self.run_ok(config)
                result = parka("plan", self.path(f"{kind}-{states}.json"), "--json")
                self.assert_exit(result, 0)
                plan = json.loads(result.stdout)
                planned = plan["bytes"]
                self.assertEqual(plan["total_bytes"], sum(planned.values()))
                stored = sum(-(-size // 256) * 256 for tensor, size in self.tensors(config, 1).items() if state_of(tensor))
                self.assertEqual(planned["optimizer states"], stored)
                self.assertEqual("orthogonalization" in planned, kind == "muon")
                line = next(line for line in said.splitlines() if "memory plan: " in line).split("memory plan: ")[1]
                total, parts = line.split(": ")
                on_gpus = planned.pop("workspace of GPU kernels")
                self.assertEqual(total, megabytes(plan["total_bytes"] - on_gpus))
                self.assertIn("optimizer states " + megabytes(planned["optimizer states"]), parts.split(", "))
                for part in parts.split(", "):
                    category, size = part[:part.rindex(" ", 0, -3)], part[part.rindex(" ", 0, -3) + 1:]
                    self.assertEqual(size, megabytes(planned[category]), category)


if __name__ == "__main__":
    unittest.main()
