"""Training on the GPU against training on the CPU, on real text: skipped where there is no GPU."""
import json
import os
import shutil
import struct
import sys
import sysconfig
import unittest

from parka_runs import RunFolder, has_gpu, learning_curve, metrics, parka, tree_digest

STEPS = 100
# Losses of single steps; docs/results/kernels.md has what was measured. In fp32 nothing but the order of sums
# differs. bf16 noise is what it makes of the fp32 curve on the CPU; two runs that round differently both have it.
BOUND_FP32 = 0.001


def text_tokens(count):
    """Bytes of this Python's own library: real text, on every machine."""
    folder = sysconfig.get_paths()["stdlib"]
    text = bytearray()
    for name in sorted(os.listdir(folder)):
        if name.endswith(".py"):
            with open(os.path.join(folder, name), "rb") as file:
                text += file.read()
        if len(text) >= count:
            break
    return bytes(text[:count])


class GpuAgainstCpu(RunFolder):
    def setUp(self):
        super().setUp()
        with open(self.path("text.npy"), "wb") as file:
            for byte in text_tokens(1_000_000):
                file.write(bytes((byte, 0)))
        # Of every line but the first eight bytes; lines are the documents of test_masked_documents_agree.
        lines = text_tokens(1_000_000).split(b"\n")
        os.link(self.path("text.npy"), self.path("masked.npy"))
        with open(self.path("masked.npy.mask"), "wb") as file:
            file.write(b"".join(b"\0" * 8 + b"\1" * (len(line) - 7) if len(line) > 7 else b"\0" * (len(line) + 1)
                                for line in lines)[:1_000_000])

    def config(self, run, device, recipe="bf16", steps=STEPS, norm="layernorm", kv_heads=0, offload=False,
               **data):
        return {
            "model": {"vocab_size": 272, "d_model": 128, "num_layers": 3, "num_heads": 2, "num_kv_heads": kv_heads,
                      "d_ffn": 352, "norm": norm, "tie_embeddings": norm == "layernorm"},
            "precision": {"recipe": recipe},
            "optimizer": {"lr": 2e-3, "offload": offload, "schedule": {"kind": "constant", "warmup_steps": 20}},
            "data": {"train": [self.path("text.npy")], "sequence_length": 256, **data},
            "training": {"steps": steps, "global_batch_size": 8, "micro_batch_size": 4, "log_interval": 20},
            "checkpoint": {"folder": self.path(run), "interval": STEPS // 2, "keep": 0},
            "device": {"kind": device},
        }

    def run_training(self, run, device, *arguments, **options):
        path = self.write_config(self.config(run, device, **options), run + ".json")
        result = parka("train", path, *arguments)
        self.assert_exit(result, 0)
        return [record["loss"] for record in metrics(self.path(run))]

    def has_fp8_moments(self, checkpoint):
        with open(self.path(checkpoint + "/shard_0.safetensors"), "rb") as file:
            names = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        self.assertTrue(any(".exp_avg" in name for name in names))
        return any(name.endswith(".exp_avg.amax") for name in names)

    def worst_difference(self, a, b):
        self.assertEqual(len(a), len(b))
        return max(abs(x - y) for x, y in zip(a, b))

    def test_loss_curves_agree(self):
        for norm, kv_heads in (("layernorm", 0), ("rmsnorm", 1)):
            with self.subTest(norm=norm):
                curves = {(recipe, device): self.run_training(f"{recipe}_{norm}_{device}", device, recipe=recipe,
                                                              norm=norm, kv_heads=kv_heads)
                          for recipe in ("fp32", "bf16") for device in ("cpu", "cuda")}
                exact = curves["fp32", "cpu"]
                self.assertLess(exact[-1], 0.75 * exact[0])
                fp32 = self.worst_difference(exact, curves["fp32", "cuda"])
                noise = self.worst_difference(exact, curves["bf16", "cpu"])
                bf16 = self.worst_difference(curves["bf16", "cpu"], curves["bf16", "cuda"])
                mean = sum(a - b for a, b in zip(curves["bf16", "cuda"], curves["bf16", "cpu"])) / STEPS
                print(f"{norm}: loss {exact[0]:.3f} to {exact[-1]:.3f}; largest differences: GPU - CPU {fp32:.6f} in "
                      f"fp32, {bf16:.5f} in bf16 (mean {mean:+.5f}); bf16 - fp32 on the CPU {noise:.5f}")
                self.assertLess(fp32, BOUND_FP32)
                self.assertLess(bf16, 2 * noise)
                self.assertLess(abs(mean), noise / 4)

    def test_masked_documents_agree(self):
        data = {"train": [self.path("masked.npy")], "loss_mask": True, "documents": "separate", "document_end": 10}
        curves = {(recipe, device): self.run_training(f"masked_{recipe}_{device}", device, recipe=recipe, **data)
                  for recipe in ("fp32", "bf16") for device in ("cpu", "cuda")}
        exact = curves["fp32", "cpu"]
        self.assertLess(exact[-1], 0.75 * exact[0])
        noise = self.worst_difference(exact, curves["bf16", "cpu"])
        self.assertLess(self.worst_difference(exact, curves["fp32", "cuda"]), BOUND_FP32)
        self.assertLess(self.worst_difference(curves["bf16", "cpu"], curves["bf16", "cuda"]), 2 * noise)
        counts = [[record["targets"] for record in metrics(self.path(f"masked_fp32_{device}"))]
                  for device in ("cpu", "cuda")]
        self.assertEqual(counts[0], counts[1])
        # Equal runs give equal bits, whatever the number of targets that a recorded step is replayed with.
        again = self.run_training("masked_again", "cuda", recipe="bf16", **data)
        self.assertEqual(again, curves["bf16", "cuda"])

    def test_fp8_loss_curves_agree(self):
        # A code at the edge between two roundings falls to either side when the order of a sum differs, so two devices
        # differ by noise of the kind that FP8 itself makes.
        bf16 = self.run_training("bf16", "cpu")
        for recipe in ("fp8_linear", "fp8_block", "coat_activation", "coat", "parka"):
            with self.subTest(recipe=recipe):
                curves = {device: self.run_training(f"{recipe}_{device}", device, recipe=recipe)
                          for device in ("cpu", "cuda")}
                noise = self.worst_difference(curves["cpu"], bf16)
                fp8 = self.worst_difference(curves["cpu"], curves["cuda"])
                mean = sum(a - b for a, b in zip(curves["cuda"], curves["cpu"])) / STEPS
                print(f"{recipe}: loss {curves['cpu'][0]:.3f} to {curves['cpu'][-1]:.3f}; largest difference GPU - CPU "
                      f"{fp8:.5f} (mean {mean:+.5f}); {recipe} - bf16 on the CPU {noise:.5f}")
                self.assertLess(fp8, 2 * noise)
                self.assertLess(abs(mean), noise / 4)

    def test_equal_runs_give_equal_bits(self):
        for recipe in ("bf16", "coat", "parka"):
            with self.subTest(recipe=recipe):
                runs = [f"{recipe}_{which}" for which in ("first", "second")]
                for run in runs:
                    self.run_training(run, "cuda", recipe=recipe)
                self.assertEqual(*(learning_curve(self.path(run)) for run in runs))
                final = f"step_{STEPS:08}"
                tensors = [tree_digest(self.path(f"{run}/{final}"), only=lambda path: path.endswith(".safetensors"))
                           for run in runs]
                self.assertTrue(tensors[0])
                self.assertEqual(*tensors)

    def test_states_in_host_memory_give_equal_bits_also_when_resumed(self):
        for recipe in ("bf16", "parka"):
            with self.subTest(recipe=recipe):
                straight, offloaded, resumed = (f"{recipe}_{which}" for which in ("straight", "offloaded", "resumed"))
                losses = [self.run_training(straight, "cuda", recipe=recipe),
                          self.run_training(offloaded, "cuda", recipe=recipe, offload=True)]
                self.run_training(resumed, "cuda", recipe=recipe, steps=STEPS // 2, offload=True)
                losses.append(self.run_training(resumed, "cuda", recipe=recipe))
                final = f"step_{STEPS:08}"
                tensors = [tree_digest(self.path(f"{run}/{final}"), only=lambda path: path.endswith(".safetensors"))
                           for run in (straight, offloaded, resumed)]
                self.assertTrue(tensors[0])
                for which in (1, 2):
                    self.assertEqual(losses[which], losses[0])
                    self.assertEqual(tensors[which], tensors[0])

    def test_released_gradients_of_side_networks_give_equal_bits(self):
        """A side network has scalars between its matrices, whose gradients share a buffer once they are released."""
        self.run_training("base", "cuda", norm="rmsnorm", steps=STEPS // 2)
        for gradient in ("fp32", "bf16"):
            with self.subTest(gradient=gradient):
                runs = {releases: f"{gradient}_{releases}" for releases in (False, True)}
                for releases, run in runs.items():
                    config = self.config(run, "cuda", norm="rmsnorm", steps=STEPS // 2)
                    config["finetune"] = {"method": "qst", "base": "nf4", "reduction": 4, "rank": 8}
                    config["optimizer"].update(gradient=gradient, release_gradients=releases, clip_norm=0)
                    config["training"].update(micro_batch_size=8)
                    config["checkpoint"].update(init_from=self.path("base"))
                    self.assert_exit(self.train(config), 0)
                self.assertEqual(*([record["loss"] for record in metrics(self.path(run))] for run in runs.values()))
                tensors = [tree_digest(self.path(f"{run}/step_{STEPS // 2:08}"), only=lambda path: path.endswith(".safetensors"))
                           for run in runs.values()]
                self.assertTrue(tensors[0])
                self.assertEqual(*tensors)

    def test_a_checkpoint_goes_on_on_the_other_device(self):
        straight = {device: self.run_training(f"straight_{device}", device) for device in ("cpu", "cuda")}
        for first, then in (("cpu", "cuda"), ("cuda", "cpu")):
            with self.subTest(first=first, then=then):
                run = f"{first}_then_{then}"
                self.run_training(run, first, steps=STEPS // 2)
                losses = self.run_training(run, then)
                self.assertEqual(losses[: STEPS // 2], straight[first][: STEPS // 2])
                noise = self.worst_difference(straight["cpu"], straight["cuda"])
                self.assertLess(self.worst_difference(losses, straight[first]), 2 * noise)

    def test_a_run_goes_on_with_other_states_on_both_devices(self):
        stem = self.run_training("stem", "cuda", steps=STEPS // 2)
        runs = [(recipe, device) for recipe in ("bf16", "coat") for device in ("cpu", "cuda")]
        curves = {}
        for recipe, device in runs:
            run = f"{recipe}_{device}"
            shutil.copytree(self.path("stem"), self.path(run))
            curves[recipe, device] = self.run_training(run, device, "--convert-states", recipe=recipe)
            self.assertEqual(curves[recipe, device][: STEPS // 2], stem)
            self.assertEqual(self.has_fp8_moments(f"{run}/step_{STEPS:08}"), recipe == "coat")
        noise = self.worst_difference(curves["coat", "cpu"], curves["bf16", "cpu"])
        for recipe in ("bf16", "coat"):
            self.assertLess(self.worst_difference(curves[recipe, "cpu"], curves[recipe, "cuda"]), 2 * noise)
        # And back to fp32 moments.
        again = {device: self.run_training(f"coat_{device}", device, "--convert-states", steps=STEPS + 10)
                 for device in ("cpu", "cuda")}
        for device in again:
            self.assertFalse(self.has_fp8_moments(f"coat_{device}/step_{STEPS + 10:08}"))
        self.assertLess(self.worst_difference(again["cpu"][STEPS:], again["cuda"][STEPS:]), 2 * noise)

    def test_eval_agrees(self):
        self.run_training("run", "cuda")
        results = []
        for device in ("cpu", "cuda"):
            result = parka("eval", self.path("run"), "--data", self.path("text.npy"), "--max-sequences", "50", "--json",
                           "--set", f"device.kind={device}")
            self.assert_exit(result, 0)
            results.append(json.loads(result.stdout)["loss"])
        self.assertLess(abs(results[0] - results[1]), 0.002)

    def test_tuned_runs_repeat_and_stay_close(self):
        plain = self.run_training("plain", "cuda", steps=STEPS // 2)
        config = self.config("tuned", "cuda", steps=STEPS // 2)
        tuning = self.path("tuning.json")
        self.assert_exit(parka("tune", self.write_config(config), "--output", tuning, "--candidates", "4"), 0)
        config["device"]["gemm_tuning"] = tuning
        curves = []
        for run in ("tuned", "tuned_again"):
            config["checkpoint"]["folder"] = self.path(run)
            self.assert_exit(self.train(config), 0)
            curves.append([record["loss"] for record in metrics(self.path(run))])
        self.assertEqual(*curves)
        self.assertLess(self.worst_difference(curves[0], plain), 0.05)
        with open(tuning, encoding="utf-8") as file:
            text = file.read()
        with open(tuning, "w", encoding="utf-8") as file:
            file.write(text.replace('"cublaslt": "', '"cublaslt": "9'))
        refused = self.train(config)
        self.assert_exit(refused, 2)
        self.assertIn("run `parka tune` here", refused.stderr)

    def test_a_run_takes_a_file_beside_its_config_and_keeps_it(self):
        os.mkdir(self.path("tuning"))
        shipped = self.path("tuning/tiny.json")
        config = self.config("straight", "cuda")
        self.assert_exit(parka("tune", self.write_config(config), "--output", shipped, "--candidates", "4", "--seconds", "20"), 0)
        result = self.train(config)
        self.assert_exit(result, 0)
        self.assertIn(f"GEMM algorithms: those of {shipped}", result.stdout + result.stderr)
        straight = [record["loss"] for record in metrics(self.path("straight"))]
        config["checkpoint"]["folder"] = self.path("resumed")
        config["training"]["steps"] = STEPS // 2
        self.assert_exit(self.train(config), 0)
        os.remove(shipped)
        config["training"]["steps"] = STEPS
        resumed = self.train(config)
        self.assert_exit(resumed, 0)
        self.assertRegex(resumed.stdout + resumed.stderr, "GEMM algorithms: those of .*/resumed/gemm_tuning[.]")
        self.assertEqual([record["loss"] for record in metrics(self.path("resumed"))], straight)
        config["checkpoint"]["folder"] = self.path("short")
        short = self.train(config)
        self.assert_exit(short, 0)
        self.assertIn("GEMM algorithms: cuBLASLt's first choices; the products of 100 steps take", short.stdout + short.stderr)

    def test_too_little_memory_is_said_with_what_would_fit(self):
        config = self.config("run", "cuda")
        config["model"].update(d_model=8192, num_layers=80, num_heads=64, num_kv_heads=0, d_ffn=28672)
        result = parka("train", self.write_config(config))
        self.assert_exit(result, 2)
        self.assertRegex(result.stderr, r"needs [0-9.]+ GB, but [0-9.]+ GB are free; .*(it would fit with|use more GPUs)")


if __name__ == "__main__":
    if not has_gpu():
        print("skipped: no GPU")
        sys.exit(77)
    unittest.main(verbosity=2)
