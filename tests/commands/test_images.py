"""Training on images from the command line, on the CPU and, where there is one, on the GPU: resumed, in all forms of memory, what is
refused. test_image_ranks.py has several ranks. Exits with 77 (skipped) where a package of scripts/prepare_images.py is missing."""
import json
import os
import shutil
import signal
import unittest
from pathlib import Path

from image_runs import STEPS, ImageRuns, np
from parka_runs import checkpoints, has_gpu, killed_in_save, learning_curve, metrics, parka


class Images(ImageRuns):
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
                killed = parka("train", self.write_config(resumed, names[1] + ".json"), env=killed_in_save(4))
                self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
                self.assertIn("step_00000002", checkpoints(resumed["checkpoint"]["folder"]))
                self.assertIn("resuming from", self.run_to_the_end(resumed))
                self.assertEqual(*(learning_curve(self.path(name)) for name in names))
                self.assertEqual(*(self.final_files(name) for name in names))

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

    def test_data_of_another_geometry_are_warned_of(self):
        described = self.path("data/data.json")
        with open(described, encoding="utf-8") as file:
            info = json.load(file)
        self.assertNotIn("pictures of", self.run_to_the_end(self.config("as-the-model", steps=2)))
        info["images"].update(geometry="pad", mean=[0.5, 0.5, 0.5])
        with open(described, "w", encoding="utf-8") as file:
            json.dump(info, file)
        said = self.run_to_the_end(self.config("other", steps=2), ranks=2)
        self.assertEqual(said.count("made with --geometry pad, and the model's processor says crop; give --geometry pad to parka generate"), 1, said)
        self.assertEqual(said.count("made for pixels of mean [0.5,0.5,0.5], and model.vision.pixel_mean is [0.48"), 1, said)

    def test_every_folder_of_a_source_is_looked_at_once(self):
        shutil.copytree(self.path("data"), self.path("data_2"))
        described = Path(self.path("data_2/data.json"))
        info = json.loads(described.read_text())
        info["images"]["geometry"] = "pad"
        described.write_text(json.dumps(info))
        config = self.config(steps=2)
        config["data"]["train"] = [self.path("data*/train-*.npy")] * 2
        said = self.run_to_the_end(config)
        self.assertEqual(said.count("the pictures of"), 1, said)
        self.assertIn(f"the pictures of {self.path('data_2/train-00000.npy')} were made with --geometry pad", said)

    def test_data_without_pictures_have_no_geometry_to_warn_of(self):
        described = Path(self.path("data/data.json"))
        info = json.loads(described.read_text())
        info["images"].update(geometry="pad", count=0)
        described.write_text(json.dumps(info))
        self.assertNotIn("pictures of", self.run_to_the_end(self.config(steps=2)))

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
        with open(self.path("usual/config.json"), encoding="utf-8") as file:
            described = json.load(file)
        described["image_token_index"] += 1
        with open(self.path("usual/config.json"), "w", encoding="utf-8") as file:
            json.dump(described, file)
        refused = parka("export", self.path("other"), "--out", self.path("unlike"), "--like", self.path("usual"))
        self.assertEqual(refused.returncode, 2, refused.stdout)
        self.assertIn("give the folder of a model that sees as this one does", refused.stderr)


@unittest.skipUnless(has_gpu(), "no GPU")
class ImagesOnTheGpu(Images):
    device = "cuda"


if __name__ == "__main__":
    unittest.main()
