"""A run that was killed or stopped and continued ends with the same bits as one that never was.

test_resume.py VARIANT [DEVICE]: one of the recipes, or a name of VARIANTS below; cpu or cuda.
"""
import os
import shutil
import signal
import subprocess
import sys
import time
import unittest

from parka_runs import (PROGRAM, STOPPED, RunFolder, has_gpu, checkpoints, killed_in_save, learning_curve, metrics, parka, tiny_config,
                        tree_digest)

# Recipes as they are, and optimizer forms that no recipe has.
VARIANTS = {
    **{recipe: (recipe, {}) for recipe in
       ("fp32", "bf16", "fp8_linear", "fp8_block", "coat_activation", "coat_optimizer", "coat", "parka")},
    "bf16_sr": ("bf16", {"master": "bf16_sr", "states": "bf16"}),
    "fp24_split": ("parka", {"master": "fp24_split"}),
    "fp8_states": ("bf16", {"states": "fp8"}),
    "offloaded_states": ("parka", {"master": "fp32", "offload": True}),
    "norms_and_biases": ("parka", {}),
    "gemma": ("coat", {}),
    "released": ("coat", {"release_gradients": True, "clip_norm": 0.1}),  # every step clips the next one
    "bf16_in_host_memory": ("bf16", {"offload": True}),
    "parka_in_host_memory": ("parka", {"offload": True}),
}
# Keys of `model` that a variant has.
MODELS = {"norms_and_biases": {"norm": "rmsnorm", "norm_placement": "after", "qk_norm": "full", "qkv_bias": True},
          "gemma": {"norm": "rmsnorm", "norm_placement": "both", "qk_norm": "per_head", "norm_unit_offset": True,
                    "activation": "gelu_tanh", "embedding_scale": "sqrt_d_model", "query_pre_attn_scalar": 5}}
STEPS = 60
VARIANT = "coat"
DEVICE = "cpu"


class Resume(RunFolder):
    def config(self):
        recipe, optimizer = VARIANTS[VARIANT]
        config = tiny_config(self.folder, recipe, STEPS, DEVICE, **optimizer)
        config["model"].update(MODELS.get(VARIANT, {}))
        if optimizer.get("release_gradients"):
            config["training"]["micro_batch_size"] = config["training"]["global_batch_size"]
        config["precision"]["offload_weights"] = VARIANT.endswith("in_host_memory")
        config["checkpoint"]["interval"] = 10
        config["training"]["eval_interval"] = 15
        return config

    def straight_run(self):
        """The run that nothing happened to, moved to straight/."""
        self.assert_exit(self.train(self.config()), 0)
        os.rename(self.path("run"), self.path("straight"))

    def assert_same_as_straight(self):
        self.assertEqual(learning_curve(self.path("run")), learning_curve(self.path("straight")))
        final = f"step_{STEPS:08}"
        self.assertEqual(tree_digest(self.path(f"run/{final}")), tree_digest(self.path(f"straight/{final}")))
        epochs = {record["epoch"] for record in metrics(self.path("run"))}
        self.assertGreater(len(epochs), 5)  # the resumed part went over epoch borders, too

    def test_killed_while_saving(self):
        self.straight_run()
        # One variant goes through more moments of the save than the others.
        moments = (("mkdir", 1), ("open", 1), ("write", 1), ("write", 2), ("fsync", 1), ("fsync", 2), ("rename", 1)) if VARIANT == "coat" else (("write", 1),)
        for operation, nth in moments:
            with self.subTest(operation=operation, nth=nth):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                killed = self.train(self.config(), env=killed_in_save(30, operation, nth))
                self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
                self.assertIn("step_00000020", checkpoints(self.path("run")))
                self.assert_exit(self.train(self.config()), 0)
                self.assert_same_as_straight()

    def test_stopped_by_a_signal(self):
        self.straight_run()
        config_path = self.write_config(self.config())
        process = subprocess.Popen([PROGRAM, "--threads", "1", "train", config_path], stderr=subprocess.PIPE, text=True)
        metrics_path = self.path("run/metrics.jsonl")
        deadline = time.monotonic() + 120
        while time.monotonic() < deadline and process.poll() is None:
            if os.path.exists(metrics_path) and os.path.getsize(metrics_path) > 2000:
                break
            time.sleep(0.01)
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=120)
        reached = len(metrics(self.path("run")))
        self.assertIn(process.returncode, (STOPPED,) if reached < STEPS else (STOPPED, 0), log)  # the last step is evaluated
        if reached < STEPS:
            self.assertIn(f"saved step {reached}", log)
            self.assertIn(f"step_{reached:08}", checkpoints(self.path("run")))
        self.assert_exit(self.train(self.config()), 0)
        self.assert_same_as_straight()

    def test_a_finished_run_has_nothing_to_do(self):
        self.straight_run()
        os.rename(self.path("straight"), self.path("run"))
        before = tree_digest(self.path("run"), only=lambda path: path.startswith("step_"))
        again = self.train(self.config())
        self.assert_exit(again, 0)
        self.assertIn("nothing to do", again.stderr)
        self.assertEqual(tree_digest(self.path("run"), only=lambda path: path.startswith("step_")), before)

    def test_continues_for_more_steps(self):
        config = self.config()
        config["optimizer"]["schedule"] = {"kind": "constant"}
        config["training"]["steps"] = 20
        self.assert_exit(self.train(config), 0)
        config["training"]["steps"] = 25
        longer = self.train(config)
        self.assert_exit(longer, 0)
        self.assertEqual(len(metrics(self.path("run"))), 25)

    def test_eval_command_agrees_with_training(self):
        self.straight_run()
        result = parka("eval", self.path("straight"), "--json")
        self.assert_exit(result, 0)
        logged = metrics(self.path("straight"), "eval")[-1]
        self.assertIn(f'"loss":{logged["loss"]!r}', result.stdout)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        VARIANT = sys.argv.pop(1)
        if VARIANT not in VARIANTS:
            sys.exit(f"test_resume.py: no variant {VARIANT}; there are {', '.join(VARIANTS)}")
    if len(sys.argv) > 1:
        DEVICE = sys.argv.pop(1)
    if DEVICE == "cuda" and not has_gpu():
        print("skipped: no GPU")
        sys.exit(77)
    unittest.main()
