"""finetune.method = qst from the command line: a side network beside an imported model, resumed, evaluated, sampled from, exported."""
import json
import os
import unittest

from parka_runs import RunFolder, parka, write_tokens

FIXTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "huggingface", "llama_mha")
PEFT = os.path.join(os.path.dirname(FIXTURE), "..", "peft")

try:
    import numpy as np
    from safetensors.numpy import load_file
except ImportError:
    raise SystemExit(77)


class SideNetworks(RunFolder):
    def run_ok(self, *arguments):
        result = parka(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout + result.stderr

    def start(self, fixture=FIXTURE, **changes):
        """Imports the model; the command that trains beside it."""
        model = os.path.join(self.folder, "model")
        self.run_ok("import", fixture, "--finetune", "qst", "--out", model)
        with open(os.path.join(fixture, "config.json"), encoding="utf-8") as file:
            vocab = json.load(file)["vocab_size"]
        write_tokens(f"{self.folder}/tokens.npy", 2000, 5, vocab)
        tokens = json.dumps([f"{self.folder}/tokens.npy"])
        write_tokens(f"{self.folder}/held_out.npy", 2000, 6, vocab)
        held_out = json.dumps([f"{self.folder}/held_out.npy"])
        settings = {"data.train": tokens, "data.eval": held_out, "data.sequence_length": 16, "checkpoint.folder": f"{self.folder}/run",
                    "device.kind": "cpu", "finetune.method": "qst", "finetune.base": "nf4", "finetune.reduction": 4, "finetune.rank": 4,
                    "optimizer.lr": 1e-2, "optimizer.schedule.warmup_steps": 0, "training.global_batch_size": 4,
                    "training.micro_batch_size": 2, "training.eval_interval": 0} | changes
        return ["train", os.path.join(model, "config.json"), *(f"--set={key}={value}" for key, value in settings.items())]

    def sample(self, *arguments):
        return self.run_ok("generate", f"{self.folder}/run", "--prompt-tokens", "1,2,3", "--tokens", "12", "--temperature", "0",
                           "--set", "device.kind=cpu", *arguments)

    def test_a_side_network_beside_experts(self):
        """Of six experts with a width of 12 a token goes through two."""
        train = self.start(os.path.join(os.path.dirname(FIXTURE), "qwen3_moe_gqa"))
        self.run_ok(*train, "--set=training.steps=2")
        self.assertIn("resuming from", self.run_ok(*train, "--set=training.steps=4"))
        self.run_ok("eval", self.path("run"), "--set", "device.kind=cpu")
        self.sample()
        self.run_ok("export", self.path("run"), "--out", self.path("out"), "--adapter")
        weights = load_file(self.path("out/side_network.safetensors"))
        self.assertEqual(weights["side.blocks.0.up_gate"].shape, (2 * 16, 16))  # 2 * 12 / 4, and 32 / 4, rounded up to 16
        self.assertFalse([name for name in weights if "router" in name])

    def test_side_network_of_an_imported_model(self):
        train, out = self.start(), os.path.join(self.folder, "out")
        self.run_ok(*train, "--set=training.steps=2")
        said = self.run_ok(*train, "--set=training.steps=4")
        self.assertIn("resuming from", said)
        self.assertIn(f"parka export {self.folder}/run --adapter --out FOLDER", said)
        self.run_ok("eval", f"{self.folder}/run", "--set", "device.kind=cpu")
        self.sample()

        refused = parka("export", f"{self.folder}/run", "--out", out)
        self.assertEqual(refused.returncode, 2)
        self.assertIn("--adapter", refused.stderr)
        refused = parka("export", f"{self.folder}/run", "--out", out, "--adapter", "--family", "llama")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("leave --family and --like out", refused.stderr)
        self.run_ok("export", f"{self.folder}/run", "--out", out, "--adapter")
        with open(os.path.join(out, "side_config.json"), encoding="utf-8") as file:
            config = json.load(file)
        weights = load_file(os.path.join(out, "side_network.safetensors"))
        self.assertEqual((config["format"], config["reduction"], config["downsample"]), ("parka.side_network", 4, "adapter"))
        self.assertEqual(weights["side.up"].shape[1], config["width"])
        self.assertEqual(weights["side.blocks.0.up_gate"].shape, (2 * config["ffn_width"], config["width"]))
        self.assertEqual(os.path.realpath(config["base"]["checkpoint"]), os.path.realpath(os.path.join(self.folder, "model")))
        self.assertGreater(len(config["base"]["checksum"]), 8)
        self.assertTrue(all(name.startswith("side.") and weight.dtype == np.float32 for name, weight in weights.items()))
        self.assertGreater(np.abs(weights["side.up"]).max(), 0)  # it began at 0

        # A side network comes without a config.json that could say by which angles the base rotates.
        self.run_ok(*train, "--set=training.steps=1", "--set=model.rope_theta=50", f"--set=checkpoint.folder={self.folder}/rotated")
        refused = parka("export", f"{self.folder}/rotated", "--out", out + "_rotated", "--adapter")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("model.rope_theta", refused.stderr)
        refused = parka("import", PEFT, "--base", f"{self.folder}/run", "--out", out + "_adapters")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("has a side network of its own; give the model", refused.stderr)

    def test_generation_sees_the_side_network(self):
        train = self.start(**{"finetune.downsample": "avg_pool", "finetune.rank": 16, "optimizer.lr": 0.05, "finetune.base": "compute"})
        self.run_ok(*train, "--set=training.steps=30")
        # A token after another with a cache, and all of a prompt at once, must agree: the samples are greedy.
        tokens = self.sample().split("\n")[0].replace(",", " ").split()
        self.assertGreaterEqual(len(tokens), 12)
        base = self.run_ok("generate", os.path.join(self.folder, "model"), "--prompt-tokens", "1,2,3", "--tokens", "12", "--temperature", "0",
                           "--set", "device.kind=cpu")
        self.assertNotEqual(self.sample(), base)


if __name__ == "__main__":
    unittest.main()
