"""Small runs that train on images, for the command line tests: pictures of noise, conversations about them. Importing this exits
with 77 (skipped) where a package of scripts/prepare_images.py is missing."""
import json
import os
import random
import subprocess
import sys
from pathlib import Path

try:
    import numpy as np
    import xxhash  # noqa: F401
    from PIL import Image
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

from parka_runs import PROGRAM, RunFolder, metrics, starters, tree_digest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_images.py"
SIZE, SEQUENCE, STEPS = 8, 96, 8
NUM_SAMPLES = 60


class ImageRuns(RunFolder):
    device, ranks_option = "cpu", "--ranks"

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
            "device": {"kind": self.device},
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

    def run_config(self, config, ranks=1):
        path = self.write_config(config, os.path.basename(config["checkpoint"]["folder"]) + ".json")
        program = [PROGRAM, "--threads", "1", "train", path]
        return starters.run(ranks, program, option=self.ranks_option)

    def run_to_the_end(self, config, ranks=1):
        result = self.run_config(config, ranks)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return result.stdout + result.stderr

    def losses(self, name):
        return [record["loss"] for record in metrics(self.path(name))]

    def final_files(self, name):
        return tree_digest(self.path(f"{name}/step_{STEPS:08}"), lambda path: path.endswith(".safetensors"))
