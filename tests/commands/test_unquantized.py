"""FP8 for weights that were trained without it: the warning of `parka train`, and `parka tune-precision`."""
import array
import json
import math
import os
import random
import re
import struct
import unittest

from parka_runs import SEQUENCE, VOCAB, RunFolder, parka, tiny_config


def edit_weights(path, edit):
    """Calls edit(name, rows) for each matrix of a safetensors file in fp32, in which it may change rows."""
    with open(path, "rb") as file:
        content = bytearray(file.read())
    start = 8 + struct.unpack("<Q", content[:8])[0]
    for name, entry in json.loads(content[8:start]).items():
        if len(entry.get("shape", [])) != 2:
            continue
        begin, end = (start + offset for offset in entry["data_offsets"])
        values = array.array("f", bytes(content[begin:end]))
        cols = entry["shape"][1]
        rows = [values[at:at + cols] for at in range(0, len(values), cols)]
        edit(name, rows)
        content[begin:end] = b"".join(row.tobytes() for row in rows)
    with open(path, "wb") as file:
        file.write(content)


def spoil(name, rows):
    """One row of up in block 0 is large, and nothing reads what it makes: one scale for a weight leaves the others no codes.
    In a mixture of experts that is so in each expert."""
    if re.search(r"layers\.0\.(mlp\.up_proj|block_sparse_moe\.experts\.\d+\.w3)\.weight$", name):
        rows[0] = array.array("f", [3e4] * len(rows[0]))
    if re.search(r"layers\.0\.(mlp\.down_proj|block_sparse_moe\.experts\.\d+\.w2)\.weight$", name):
        for row in rows:
            row[0] = 0.0


def spoil_one_scale(name, rows):
    """The same row of up is large, and its gate is shut: one scale for a weight leaves the others no codes, a scale for each row does."""
    if re.search(r"layers\.0\.mlp\.up_proj\.weight$", name):
        rows[0] = array.array("f", [1e6] * len(rows[0]))
    if re.search(r"layers\.0\.mlp\.gate_proj\.weight$", name):
        rows[0] = array.array("f", [0.0] * len(rows[0]))


class Unquantized(RunFolder):
    def run_ok(self, *arguments):
        result = parka(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout, result.stderr

    def import_trained(self, family="llama", edit=spoil, **model):
        """A model that knows which token follows which, with an outlier in the up projection of block 0."""
        for seed, name in enumerate(("a", "b", "held_out")):
            draw = random.Random(seed)
            tokens = [seed]
            while len(tokens) < 3000:
                tokens.append(draw.randrange(VOCAB) if draw.random() < 0.05 else (tokens[-1] * 5 + 3) % VOCAB)
            with open(self.path(f"{name}.npy"), "wb") as file:
                file.write(array.array("H", tokens).tobytes())
        config = tiny_config(self.folder, steps=150)
        config["model"].update(norm="rmsnorm", **model)
        config["optimizer"]["lr"] = 1e-2
        config["training"]["eval_interval"] = 0
        self.write_config(config, "bf16.json")
        self.run_ok("train", self.path("bf16.json"))
        self.run_ok("export", self.path("run"), "--out", self.path("out"), "--dtype", "fp32", "--family", family)
        edit_weights(self.path("out/model.safetensors"), edit)
        self.run_ok("import", self.path("out"), "--out", self.path("model"))
        config["precision"] = {"recipe": "fp8_linear"}
        config["checkpoint"] = {"folder": self.path("fp8"), "init_from": self.path("model")}
        config["training"]["steps"] = 1
        config["optimizer"]["schedule"]["warmup_steps"] = 0
        self.write_config(config, "fp8.json")

    def loss(self, *settings):
        shape = ("training.micro_batch_size=2", f"data.sequence_length={SEQUENCE}")
        options = [option for setting in (*shape, *settings) for option in ("--set", setting)]
        out, _ = self.run_ok("eval", self.path("model"), "--data", self.path("held_out.npy"), "--json", *options)
        return json.loads(out)["loss"]

    def test_what_costs_the_loss_is_found_and_left_in_bf16(self):
        self.import_trained()
        plain, fp8 = self.loss("precision.recipe=bf16"), self.loss("precision.recipe=fp8_linear")
        self.assertGreater(fp8 - plain, 0.01)
        warned = self.run_ok("train", self.path("fp8.json"))[1]
        self.assertIn("tune-precision", warned)

        out, _ = self.run_ok("tune-precision", self.path("fp8.json"), "--rise", "1%", "--write", self.path("tuned.json"))
        with open(self.path("tuned.json"), encoding="utf-8") as file:
            precision = json.load(file)["precision"]
        names = precision["unquantized"]
        self.assertIn("blocks.0.down.forward", names)  # which reads what the row makes
        self.assertNotIn("forward_format", precision)  # which that row harms more
        self.assertLess(len(names), 8)
        tuned = self.loss("precision.recipe=fp8_linear", f"precision.unquantized={json.dumps(names)}")
        self.assertLess(tuned - plain, 0.01)
        self.assertIn(f"{tuned:.5f}", out)
        quiet = self.run_ok("train", self.path("tuned.json"), "--set", f"checkpoint.folder={self.path('tuned')}")[1]
        self.assertNotIn("tune-precision", quiet)

    def test_int8_in_forward_is_tried_before_anything_leaves_fp8(self):
        self.import_trained(edit=spoil_one_scale)
        plain, fp8 = self.loss("precision.recipe=bf16"), self.loss("precision.recipe=fp8_linear")
        self.assertGreater(fp8 - plain, 0.01)
        out, _ = self.run_ok("tune-precision", self.path("fp8.json"), "--rise", "0.5%", "--write", self.path("tuned.json"))
        with open(self.path("tuned.json"), encoding="utf-8") as file:
            precision = json.load(file)["precision"]
        self.assertEqual(precision, {"recipe": "fp8_linear", "forward_format": "int8"})
        int8 = self.loss("precision.recipe=fp8_linear", "precision.forward_format=int8")
        self.assertLess(abs(int8 - plain), 0.005)
        self.assertIn(f"{int8:.5f}", out)
        self.run_ok("train", self.path("tuned.json"), "--set", f"checkpoint.folder={self.path('tuned')}")

    def test_what_cannot_leave_fp8_counts_as_its_cost(self):
        """Experts stay in FP8: the loss without FP8 is not that of all else in bf16."""
        self.import_trained("mixtral", moe={"num_experts": 4, "experts_per_token": 2, "normalize_weights": True})
        plain, fp8 = self.loss("precision.recipe=bf16"), self.loss("precision.recipe=fp8_linear")
        rise = 100 * math.expm1(fp8 - plain)
        self.assertGreater(rise, 0.2)
        result = parka("tune-precision", self.path("fp8.json"), "--rise", "0.05%", "--write", self.path("tuned.json"))
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn("--rise", result.stderr)
        self.assertIn(f"loss {plain:.5f} without FP8, {fp8:.5f}", result.stdout)
        self.assertFalse(os.path.exists(self.path("tuned.json")))
        out, _ = self.run_ok("tune-precision", self.path("fp8.json"), "--rise", f"{rise + 1:.3f}%", "--write", self.path("tuned.json"))
        self.assertIn(f"loss {plain:.5f} without FP8, {fp8:.5f}", out)

    def test_a_config_without_fp8_or_without_weights_is_refused(self):
        config = tiny_config(self.folder, recipe="coat")
        self.write_config(config)
        for settings, key in ((["precision.recipe=bf16"], "precision.recipe"), ([], "checkpoint.init_from")):
            options = [option for setting in settings for option in ("--set", setting)]
            result = parka("tune-precision", self.path("config.json"), "--write", self.path("new.json"), *options)
            self.assertEqual(result.returncode, 2)
            self.assertIn(key, result.stderr)
            self.assertFalse(os.path.exists(self.path("new.json")))


if __name__ == "__main__":
    unittest.main()
