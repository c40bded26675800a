"""Training on images from the command line: resumed, on several ranks, in all forms of state and memory. Exits with 77 (skipped)
where a package of scripts/prepare_images.py is missing."""
import json
import os
import random
import signal
import subprocess
import sys
import unittest
from pathlib import Path

try:
    import numpy as np
    import xxhash  # noqa: F401
    from PIL import Image
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

from parka_runs import PROGRAM, RunFolder, checkpoints, learning_curve, metrics, parka, starters, tree_digest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_images.py"
SIZE, SEQUENCE, STEPS = 8, 96, 8
NUM_SAMPLES = 60


class Images(RunFolder):
    def setUp(self):
        super().setUp()
        rng = random.Random(5)
        records = []
        for number in range(NUM_SAMPLES):
            count = rng.choice((0, 1, 1, 2))
            names = [f"{number}-{i}.png" for i in range(count)]
            for name in names:
                colours = np.random.default_rng(len(records)).integers(0, 256, (SIZE, SIZE, 3)).astype(np.uint8)
                Image.fromarray(colours).save(self.path(name))
            said = "<image>" * count + rng.choice(("What is it?", "Say more."))
            turns = [{"from": "human", "value": said}, {"from": "gpt", "value": f"It is {number % 7}."}]
            records.append({"id": str(number), "conversations": turns, **({"image": names} if names else {})})
        with open(self.path("samples.json"), "w", encoding="utf-8") as file:
            json.dump(records, file)
        options = {"--image-folder": self.folder, "--tower": "clip", "--image-size": SIZE, "--patch-size": 4, "--chat": "chatml",
                   "--sequence-length": SEQUENCE, "--max-images": 3, "--eval-fraction": 0.2, "--out": self.path("data")}
        command = [sys.executable, str(SCRIPT), self.path("samples.json"), *(str(x) for pair in options.items() for x in pair)]
        prepared = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(prepared.returncode, 0, prepared.stderr)
        self.printed = json.loads(prepared.stdout.split("config:\n")[1])  # what a config needs for this data

    def config(self, name="run", recipe="bf16", steps=STEPS, tower="compute", **optimizer):
        model = self.printed["model"]
        # Of a frozen tower it is refused.
        slow_tower = {} if "vision.*" in optimizer.get("frozen", []) else {"lr_patterns": ["vision.*"], "lr_factors": [0.2]}
        return {
            "device": {"kind": "cpu"},
            "model": {
                **model, "d_model": 32, "num_layers": 2, "num_heads": 2, "d_ffn": 64,
                "vision": {**model["vision"], "width": 32, "num_layers": 3, "num_heads": 2, "d_ffn": 48}},
            "precision": {"recipe": recipe, "tower": tower},
            "optimizer": {"lr": 3e-3, **slow_tower, **optimizer,
                          "schedule": {"kind": "cosine", "warmup_steps": 2, "total_steps": STEPS}},
            "data": dict(self.printed["data"]),
            "training": {"steps": steps, "global_batch_size": 4, "micro_batch_size": 1, "eval_interval": 4},
            "checkpoint": {"folder": self.path(name), "interval": 2, "keep": 0},
        }

    def run_config(self, config, ranks=1, *arguments):
        path = self.write_config(config, os.path.basename(config["checkpoint"]["folder"]) + ".json")
        program = [PROGRAM, "--threads", "1", "train", path, *arguments]
        return starters.run(ranks, program)

    def run_to_the_end(self, config, ranks=1):
        result = self.run_config(config, ranks)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def losses(self, name):
        return [record["loss"] for record in metrics(self.path(name))]

    def final_files(self, name):
        return tree_digest(self.path(f"{name}/step_{STEPS:08}"), lambda path: path.endswith(".safetensors"))

    def test_resumed_runs_end_with_the_same_bits(self):
        released = {"release_gradients": True, "clip_norm": 0.1}
        variants = (("bf16", {}), ("parka", {}), ("parka", {"tower": "fp8"}), ("fp8_block", {"tower": "fp8"}), ("coat", released))
        for number, (recipe, keys) in enumerate(variants):
            with self.subTest(recipe, keys=keys):
                names = [f"{number}-{kind}" for kind in ("straight", "resumed")]
                straight, resumed = (self.config(name, recipe, **keys) for name in names)
                for config in (straight, resumed):
                    if keys is released:
                        config["training"]["micro_batch_size"] = 4
                self.run_to_the_end(straight)
                killed = self.run_config(resumed, 1, "--drill-kill-in-save", "4:5")
                self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
                self.assertIn("step_00000002", checkpoints(resumed["checkpoint"]["folder"]))
                self.assertIn("resuming from", self.run_to_the_end(resumed))
                self.assertEqual(*(learning_curve(self.path(name)) for name in names))
                self.assertEqual(*(self.final_files(name) for name in names))

    def test_resumed_runs_of_several_ranks_end_with_the_same_bits(self):
        # Every number of ranks at every stage of ZeRO, and in turns what stages of training freeze.
        frozen = [[], ["vision.*"], ["vision.*", "embedding", "blocks.*", "head"]]
        cases = [(ranks, stage, "parka", "fp8") for ranks in (1, 2, 4) for stage in range(4)]
        cases += [(1, 0, "bf16", "compute"), (2, 3, "coat", "compute"), (4, 2, "bf16", "compute")]
        for number, (ranks, stage, recipe, tower) in enumerate(cases):
            with self.subTest(ranks=ranks, stage=stage, recipe=recipe, tower=tower):
                names = [f"{number}-{kind}" for kind in ("straight", "resumed")]
                for name, stops in zip(names, ((STEPS,), (4, STEPS)), strict=True):
                    for steps in stops:
                        config = self.config(name, recipe, steps, tower, frozen=frozen[number % len(frozen)])
                        config["model"]["tie_embeddings"] = False
                        config["distributed"] = {"zero_stage": stage}
                        log = self.run_to_the_end(config, ranks)
                self.assertIn("resuming from", log)
                self.assertEqual(*(self.losses(name) for name in names))
                self.assertEqual(*(self.final_files(name) for name in names))

    def test_an_fp8_tower_on_several_ranks_is_that_of_one(self):
        self.run_to_the_end(self.config("one", "parka", tower="fp8"))
        for ranks, stage in ((2, 1), (2, 3), (4, 3)):
            with self.subTest(ranks=ranks, stage=stage):
                config = self.config(f"{ranks}-{stage}", "parka", tower="fp8")
                config["distributed"] = {"zero_stage": stage}
                self.run_to_the_end(config, ranks)
                for got, want in zip(self.losses(f"{ranks}-{stage}"), self.losses("one"), strict=True):
                    self.assertLess(abs(got - want), 2e-2)  # as test_ranks.py has it for FP8 recipes

    def test_several_ranks_train_as_one(self):
        for tied in (True, False):
            config = self.config("one", "fp32")
            config["model"]["tie_embeddings"] = tied
            self.run_to_the_end(config)
            for ranks, stage in ((2, 0), (2, 1), (2, 2), (4, 3)):
                with self.subTest(ranks=ranks, stage=stage, tied=tied):
                    config["checkpoint"]["folder"] = self.path(f"{ranks}-{stage}-{tied}")
                    config["distributed"] = {"zero_stage": stage}
                    self.run_to_the_end(config, ranks)
                    for got, want in zip(self.losses(f"{ranks}-{stage}-{tied}"), self.losses("one"), strict=True):
                        self.assertLess(abs(got - want), 1e-5)
            subprocess.run(["rm", "-r", self.path("one")], check=True)

    def test_what_saves_memory_changes_no_bit(self):
        changes = {
            "plain": {},
            "recomputed": {"precision": {"recompute": "block"}},
            "kept": {"precision": {"save_norm_output": True, "save_product": True}},
            "in-host": {"optimizer": {"offload": True}, "precision": {"offload_weights": True}},
            "without-copies": {"precision": {"weight_copies": "none"}},
        }
        for tower in ("compute", "fp8"):
            for name, sections in changes.items():
                with self.subTest(name, tower=tower):
                    config = self.config(f"{name}-{tower}", "parka", tower=tower, master="fp32")
                    for section, keys in sections.items():
                        config[section].update(keys)
                    self.run_to_the_end(config)
                    self.assertEqual(self.losses(f"{name}-{tower}"), self.losses(f"plain-{tower}"))
        self.assertNotEqual(self.losses("plain-fp8"), self.losses("plain-compute"))

    def test_stages_train_what_is_not_frozen(self):
        decoder = ["embedding", "blocks.*", "head"]
        for name, frozen in {"align": [*decoder, "vision.*"], "instruct": ["vision.*"]}.items():
            with self.subTest(name):
                config = self.config(name, "parka", frozen=frozen)
                config["model"]["tie_embeddings"] = False
                self.run_to_the_end(config)
                losses = [record["loss"] for record in metrics(self.path(name), "eval")]
                self.assertLess(losses[-1], losses[0])

    def test_evaluation_sees_the_images(self):
        config = self.config()
        self.run_to_the_end(config)
        losses = {record["step"]: record["loss"] for record in metrics(self.path("run"), "eval")}
        self.assertLess(losses[STEPS], losses[4])
        again = parka("eval", self.path("run"), "--json")
        self.assert_exit(again, 0)
        self.assertAlmostEqual(json.loads(again.stdout)["loss"], losses[STEPS], places=6)

    def test_plan_and_bench_take_models_with_towers(self):
        config = self.write_config(self.config(recipe="parka"))
        plan = parka("plan", config, "--json")
        self.assert_exit(plan, 0)
        frozen = self.write_config(self.config(recipe="parka", frozen=["vision.*"]), "frozen.json")
        without = parka("plan", frozen, "--json")
        self.assert_exit(without, 0)
        self.assertLess(json.loads(without.stdout)["total_bytes"], json.loads(plan.stdout)["total_bytes"])
        bench = parka("bench", config, "--steps", "1")
        self.assert_exit(bench, 0)
        self.assertRegex(bench.stdout, r"sequences +[\d.]+ per s, each with 2 blank images")

    def test_bad_data_is_named(self):
        path = Path(self.path("data/images-00000.pixels"))
        path.write_bytes(path.read_bytes()[:64] + bytes(byte ^ 1 for byte in path.read_bytes()[64:]))
        result = self.run_config(self.config())
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("images-00000.pixels", result.stderr)
        crowded = self.config("crowded")
        crowded["data"]["images_per_sequence"] = 1
        result = self.run_config(crowded)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("more than data.images_per_sequence = 1", result.stderr)

    def test_slots_in_a_file_without_images_are_found_before_training(self):
        config = self.config()
        slot = self.printed["model"]["vision"]["image_token"]
        np.array([1] * 300 + [slot] + [1] * 300, dtype=np.uint16).tofile(self.path("text.npy"))
        np.ones(601, dtype=np.uint8).tofile(self.path("text.npy.mask"))
        config["data"]["eval"] = [self.path("text.npy")]
        result = parka("data", self.write_config(config, "slots.json"))
        self.assertEqual(result.returncode, 2, result.stdout)
        self.assertIn(f"text.npy: token 300 has the id of image slots, {slot}, and the file has no images", result.stderr)

    def test_pixels_that_an_export_would_scale_otherwise_are_refused(self):
        def exportable(name):
            config = self.config(name, steps=2)
            config["model"].update(norm="rmsnorm", tie_embeddings=False)
            return config

        self.run_to_the_end(exportable("run"))
        usual = parka("export", self.path("run"), "--out", self.path("usual"))
        self.assertEqual(usual.returncode, 0, usual.stderr)
        config = exportable("other")
        config["model"]["vision"]["pixel_mean"] = [0.3, 0.4, 0.6]
        self.run_to_the_end(config)
        refused = parka("export", self.path("other"), "--out", self.path("exported"))
        self.assertEqual(refused.returncode, 2, refused.stdout)
        self.assertIn("pixel_mean = [0.3, 0.4, 0.6]", refused.stderr)
        self.assertFalse(os.path.exists(self.path("exported")))
        with open(self.path("usual/preprocessor_config.json"), "w", encoding="utf-8") as file:
            json.dump({"image_mean": [0.3, 0.4, 0.6], "image_std": config["model"]["vision"].get("pixel_deviation", [0.26862954, 0.26130258, 0.27577711])}, file)
        allowed = parka("export", self.path("other"), "--out", self.path("exported"), "--like", self.path("usual"))
        self.assertEqual(allowed.returncode, 0, allowed.stderr)


if __name__ == "__main__":
    unittest.main()
