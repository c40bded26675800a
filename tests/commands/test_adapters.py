"""finetune.method = lora from the command line: adapters beside an imported model, resumed, evaluated, exported."""
import json
import os
import shutil
import unittest

from parka_runs import PROGRAM, RunFolder, parka, tree_digest, write_tokens

FIXTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "huggingface", "llama_mha")
PEFT = os.path.join(os.path.dirname(FIXTURE), "..", "peft")

try:
    import numpy as np
    from safetensors.numpy import load_file
except ImportError:
    raise SystemExit(77)

NF4 = np.array([-1, -0.69619, -0.52507, -0.39492, -0.28444, -0.18477, -0.09105, 0, 0.07958, 0.16093, 0.24611, 0.33792, 0.44071, 0.56262,
                0.72296, 1])


class Adapters(RunFolder):
    def run_ok(self, *arguments):
        result = parka(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout + result.stderr

    def test_adapters_of_an_imported_model(self):
        model, run, out = (os.path.join(self.folder, name) for name in ("model", "run", "out"))
        self.run_ok("import", FIXTURE, "--out", model)
        with open(os.path.join(FIXTURE, "config.json"), encoding="utf-8") as file:
            vocab = json.load(file)["vocab_size"]
        write_tokens(f"{self.folder}/tokens.npy", 2000, 5, vocab)
        tokens = json.dumps([f"{self.folder}/tokens.npy"])
        write_tokens(f"{self.folder}/held_out.npy", 2000, 6, vocab)
        held_out = json.dumps([f"{self.folder}/held_out.npy"])
        settings = {"data.train": tokens, "data.eval": held_out, "data.sequence_length": 16, "checkpoint.folder": run, "device.kind": "cpu",
                    "finetune.method": "lora", "finetune.rank": 4, "finetune.alpha": 12, "finetune.targets": '["q_proj", "v_proj", "up_proj"]',
                    "optimizer.lr": 1e-2, "optimizer.schedule.warmup_steps": 0, "training.global_batch_size": 4,
                    "training.micro_batch_size": 2, "training.eval_interval": 0}
        train = ["train", os.path.join(model, "config.json"), *(f"--set={key}={value}" for key, value in settings.items())]
        self.run_ok(*train, "--set=training.steps=2")
        self.assertIn("resuming from", self.run_ok(*train, "--set=training.steps=4"))
        self.run_ok("eval", run, "--set", "device.kind=cpu")
        refused = parka("eval", run, "--set", 'finetune.targets=["q_proj"]')
        self.assertEqual(refused.returncode, 2)
        self.assertIn("finetune.targets", refused.stderr)

        self.run_ok("export", run, "--out", out, "--dtype", "fp32")
        self.run_ok("export", run, "--out", out + "_adapter", "--adapter")
        with open(os.path.join(out + "_adapter", "adapter_config.json"), encoding="utf-8") as file:
            config = json.load(file)
        self.assertEqual((config["peft_type"], config["r"], config["lora_alpha"]), ("LORA", 4, 12))
        self.assertEqual(config["target_modules"], ["q_proj", "v_proj", "up_proj"])
        self.assertEqual(config["base_model_name_or_path"], os.path.abspath(FIXTURE))
        adapter = load_file(os.path.join(out + "_adapter", "adapter_model.safetensors"))
        merged = load_file(os.path.join(out, "model.safetensors"))
        base = load_file(os.path.join(FIXTURE, "model.safetensors"))
        num_adapted = 0
        for name, weight in merged.items():
            factor = "base_model.model." + name.removesuffix("weight")
            want = base[name].astype(np.float64)
            if factor + "lora_A.weight" in adapter:
                num_adapted += 1
                product = adapter[factor + "lora_B.weight"].astype(np.float64) @ adapter[factor + "lora_A.weight"]
                self.assertGreater(np.abs(product).max(), 0)
                want = want + 3 * product
            np.testing.assert_allclose(weight, want, rtol=0, atol=1e-6, err_msg=name)
        self.assertEqual(2 * num_adapted, len(adapter))

        # Of a base that was trained here peft knows nothing.
        full = [f"--set={key}={value}" for key, value in settings.items() if not key.startswith("finetune")]
        self.run_ok(*train[:2], *full, f"--set=checkpoint.folder={run}_full", "--set=training.steps=1")
        self.run_ok(*train, f"--set=checkpoint.init_from={run}_full", f"--set=checkpoint.folder={run}_beside", "--set=training.steps=1")
        said = self.run_ok("export", run + "_beside", "--out", out + "_beside", "--adapter")
        self.assertIn(f"names no model that the adapters belong to; export {run}_full/step_00000001", said)
        with open(os.path.join(out + "_beside", "adapter_config.json"), encoding="utf-8") as file:
            self.assertIsNone(json.load(file)["base_model_name_or_path"])

        # Run and imported model somewhere else, the one beside the other.
        moved = os.path.join(self.folder, "moved")
        shutil.copytree(run, os.path.join(moved, "run"))
        shutil.copytree(model, os.path.join(moved, "model"))
        os.rename(model, model + ".away")
        self.run_ok("eval", os.path.join(moved, "run"), "--set", "device.kind=cpu")
        os.rename(model + ".away", model)

        # Adapters come without a config.json that could say by which angles they rotate.
        self.run_ok(*train, "--set=training.steps=1", "--set=model.rope_theta=50", f"--set=checkpoint.folder={run}_rotated")
        refused = parka("export", run + "_rotated", "--out", out + "_rotated", "--adapter")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("model.rope_theta", refused.stderr)
        self.assertIn("without --adapter", refused.stderr)
        self.run_ok("export", run + "_rotated", "--out", out + "_rotated")
        # Those of a base that was trained with the same angles need not say so; with others they would have to.
        self.run_ok(*train[:2], *full, f"--set=checkpoint.folder={run}_of_50", "--set=training.steps=1", "--set=model.rope_theta=50")
        beside = [*train, f"--set=checkpoint.init_from={run}_of_50", "--set=training.steps=1"]
        for theta, code in ((50, 0), (10000, 2)):
            self.run_ok(*beside, f"--set=model.rope_theta={theta}", f"--set=checkpoint.folder={run}_{theta}")
            result = parka("export", f"{run}_{theta}", "--out", f"{out}_{theta}", "--adapter")
            self.assertEqual(result.returncode, code, result.stderr)
        refused = parka("export", run, "--out", out + "_like", "--adapter", "--like", os.path.join(os.path.dirname(FIXTURE), "llama3_gqa"))
        self.assertEqual(refused.returncode, 2)
        self.assertIn("is another model than the adapters' base: model.", refused.stderr)

        refused = parka("export", model, "--out", out + "_none", "--adapter")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("has no adapters", refused.stderr)
        self.assertNotIn("names no model", refused.stderr)

    def test_adapters_beside_a_base_in_4_bits(self):
        model, run, out = (os.path.join(self.folder, name) for name in ("model", "run", "out"))
        self.run_ok("import", FIXTURE, "--out", model)
        with open(os.path.join(FIXTURE, "config.json"), encoding="utf-8") as file:
            vocab = json.load(file)["vocab_size"]
        write_tokens(f"{self.folder}/tokens.npy", 2000, 5, vocab)
        tokens = json.dumps([f"{self.folder}/tokens.npy"])
        write_tokens(f"{self.folder}/held_out.npy", 2000, 6, vocab)
        held_out = json.dumps([f"{self.folder}/held_out.npy"])
        settings = {"data.train": tokens, "data.eval": held_out, "data.sequence_length": 16, "checkpoint.folder": run, "device.kind": "cpu",
                    "finetune.method": "lora", "finetune.base": "nf4", "finetune.rank": 4, "finetune.alpha": 12, "optimizer.lr": 1e-2,
                    "optimizer.schedule.warmup_steps": 0, "training.global_batch_size": 4, "training.micro_batch_size": 2,
                    "training.eval_interval": 0}
        train = ["train", os.path.join(model, "config.json"), *(f"--set={key}={value}" for key, value in settings.items())]
        self.run_ok(*train, "--set=training.steps=2")
        self.assertIn("resuming from", self.run_ok(*train, "--set=training.steps=4"))
        self.run_ok("eval", run, "--set", "device.kind=cpu")
        self.run_ok("generate", run, "--prompt-tokens", "1,2,3", "--tokens", "4", "--set", "device.kind=cpu")

        # What is exported is the decoded weights with the adapters: without these, in each block of 64 only values of NF4.
        self.run_ok("export", run, "--out", out, "--dtype", "fp32")
        self.run_ok("export", run, "--out", out + "_adapter", "--adapter")
        adapter = load_file(os.path.join(out + "_adapter", "adapter_model.safetensors"))
        merged = load_file(os.path.join(out, "model.safetensors"))
        base = load_file(os.path.join(FIXTURE, "model.safetensors"))
        num_tested = 0
        for name, weight in merged.items():
            factor = "base_model.model." + name.removesuffix("weight")
            if "o_proj" not in name and "down_proj" not in name:
                continue
            num_tested += 1
            product = adapter[factor + "lora_B.weight"].astype(np.float64) @ adapter[factor + "lora_A.weight"]
            self.assertGreater(np.abs(product).max(), 0)
            self.assert_nf4(weight - 3 * product, base[name])
        self.assertGreater(num_tested, 1)

    def test_adapters_beside_experts(self):
        attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
        feed_forward = ["gate_proj", "up_proj", "down_proj"]
        of_experts = [f"experts.{expert}.{layer}" for expert in range(11) for layer in feed_forward]
        for family, method, targets in (("qwen3_moe_gqa", "qlora", attention), ("olmoe_mha", "lora", attention),
                                        ("olmoe_mha", "lora", attention + of_experts), ("dots1_groups", "lora", attention + feed_forward),
                                        ("mixtral_gqa", "lora", ["v_proj"] + [f"experts.{e}.{w}" for e in range(4) for w in ("w1", "w2", "w3")])):
            with self.subTest(family=family, targets=len(targets)):
                fixture = os.path.join(os.path.dirname(FIXTURE), family)
                model, run, out = (self.path(f"{family}_{len(targets)}_{name}") for name in ("model", "run", "out"))
                self.run_ok("import", fixture, "--finetune", method, "--out", model)
                with open(os.path.join(fixture, "config.json"), encoding="utf-8") as file:
                    vocab = json.load(file)["vocab_size"]
                for name, seed in (("tokens", 5), ("held_out", 6)):
                    write_tokens(self.path(name + ".npy"), 2000, seed, vocab)
                settings = {"data.train": json.dumps([self.path("tokens.npy")]), "data.eval": json.dumps([self.path("held_out.npy")]),
                            "data.sequence_length": 16, "checkpoint.folder": run, "device.kind": "cpu", "precision.recipe": "fp32",
                            "optimizer.gradient": "fp32", "optimizer.master": "none", "optimizer.lr": 1e-2,
                            "optimizer.schedule.warmup_steps": 0, "training.global_batch_size": 4, "training.micro_batch_size": 2,
                            "training.eval_interval": 0}
                adapts_experts = any(target.startswith("experts.") for target in targets)
                if adapts_experts:
                    plain = [target for target in targets if not target.startswith("experts.")]
                    settings["finetune.targets"] = json.dumps(plain + [f"experts.{layer}" for layer in feed_forward])
                train = ["train", os.path.join(model, "config.json"), *(f"--set={key}={value}" for key, value in settings.items())]
                self.run_ok(*train, "--set=training.steps=2")
                self.assertIn("resuming from", self.run_ok(*train, "--set=training.steps=4"))
                self.run_ok("export", run, "--out", out, "--dtype", "fp32")
                self.run_ok("export", run, "--out", out + "_adapter", "--adapter")
                with open(os.path.join(out + "_adapter", "adapter_config.json"), encoding="utf-8") as file:
                    self.assertEqual(sorted(json.load(file)["target_modules"]), sorted(targets))
                adapter = load_file(os.path.join(out + "_adapter", "adapter_model.safetensors"))
                self.assertFalse([name for name in adapter if ".mlp.gate." in name])
                self.assertEqual(any(".experts." in name for name in adapter), adapts_experts)
                self.run_ok("export", model, "--out", out + "_base", "--dtype", "fp32")
                merged, base = (load_file(os.path.join(folder, "model.safetensors")) for folder in (out, out + "_base"))
                self.assertEqual(merged.keys(), base.keys())
                for name, weight in merged.items():
                    factor, want = "base_model.model." + name.removesuffix("weight"), base[name].astype(np.float64)
                    decoded = weight.astype(np.float64)
                    if any(name.endswith(f".{target}.weight") for target in targets) and (adapts_experts or ".experts." not in name):
                        decoded = decoded - 2 * adapter.pop(factor + "lora_B.weight") @ adapter.pop(factor + "lora_A.weight").astype(np.float64)
                        self.assertTrue(".experts." in name or np.abs(decoded - weight).max() > 0)
                    if method == "qlora" and ".experts." in name:
                        self.assert_nf4(decoded, want)
                    elif method == "lora" or "proj" not in name:
                        np.testing.assert_allclose(decoded, want, rtol=0, atol=1e-6, err_msg=name)
                self.assertFalse(adapter)
                # The whole model, and peft's files beside the base, are what the run is.
                self.run_ok("import", out, "--out", out + "_whole")
                models = [run, out + "_whole"]
                if method == "lora":
                    self.run_ok("import", out + "_adapter", "--base", model, "--out", out + "_again")
                    models.append(out + "_again")
                losses = [json.loads(parka("eval", one, "--data", self.path("held_out.npy"), "--json", "--set", "data.sequence_length=16", "--set",
                                           "precision.recipe=fp32").stdout)["loss"] for one in models]
                for loss in losses[1:]:
                    self.assertAlmostEqual(loss, losses[0], places=5)

    def assert_nf4(self, decoded, weight):
        """A matrix of which each block of 64 has values of NF4 alone, times a scale."""
        error = np.linalg.norm(decoded - weight) / np.linalg.norm(weight)
        self.assertTrue(0.05 < error < 0.15, error)
        blocks = decoded.ravel()[:decoded.size // 64 * 64].reshape(-1, 64)
        fractions = blocks / np.abs(blocks).max(axis=1, keepdims=True)
        self.assertLess(np.abs(fractions[..., None] - NF4).min(axis=-1).max(), 0.01)

    def test_adapters_come_from_their_base_wherever_they_are_read(self):
        here, other, moved = (os.path.join(self.folder, name) for name in ("here", "other", "moved"))
        for folder in (here, other):
            os.mkdir(folder)
        fixture, peft = os.path.abspath(FIXTURE), os.path.abspath(PEFT)

        def run_in(folder, *arguments):
            result = parka(*arguments, cwd=folder, executable=os.path.abspath(PROGRAM))
            self.assertEqual(result.returncode, 0, result.stderr)

        run_in(here, "import", fixture, "--out", "model")
        run_in(here, "import", peft, "--base", "model", "--out", "adapters")
        run_in(here, "export", "adapters", "--out", os.path.join(self.folder, "expected"))
        expected = tree_digest(os.path.join(self.folder, "expected"))
        # Where another model has the name that the base was given by.
        run_in(other, "import", os.path.join(os.path.dirname(fixture), "qwen2_tied"), "--out", "model")
        run_in(other, "export", os.path.join(here, "adapters"), "--out", "exported")
        self.assertEqual(tree_digest(os.path.join(other, "exported")), expected)
        os.rename(here, moved)
        run_in(other, "export", os.path.join(moved, "adapters"), "--out", "of_moved")
        self.assertEqual(tree_digest(os.path.join(other, "of_moved")), expected)
        # Another model where the base lay.
        os.mkdir(here)
        run_in(here, "import", os.path.join(os.path.dirname(fixture), "qwen2_tied"), "--out", "model")
        run_in(other, "export", os.path.join(moved, "adapters"), "--out", "of_moved_again")
        self.assertEqual(tree_digest(os.path.join(other, "of_moved_again")), expected)
        # The base alone has moved, to a place that nothing but --base names.
        os.rename(os.path.join(moved, "model"), os.path.join(other, "base"))
        run_in(other, "export", os.path.join(moved, "adapters"), "--base", "base", "--out", "of_base")
        self.assertEqual(tree_digest(os.path.join(other, "of_base")), expected)
        refused = parka("export", os.path.join(other, "base"), "--base", moved, "--out", os.path.join(other, "of_all"))
        self.assertEqual(refused.returncode, 2)
        self.assertIn("has all of its weights, so --base", refused.stderr)

    def test_a_base_is_found_by_its_weights(self):
        def run_in(folder, code, *arguments):
            result = parka(*arguments, cwd=os.path.join(self.folder, folder), executable=os.path.abspath(PROGRAM))
            self.assertEqual(result.returncode, code, result.stdout + result.stderr)
            return result.stdout + result.stderr

        os.mkdir(self.path("project"))
        shutil.copytree(FIXTURE, self.path("downloaded"))
        run_in("project", 0, "import", os.path.abspath(FIXTURE), "--out", "models/llama")
        write_tokens(self.path("tokens.npy"), 2000, 5, 83)
        tokens = json.dumps([self.path("tokens.npy")])
        write_tokens(self.path("held_out.npy"), 2000, 6, 83)
        held_out = json.dumps([self.path("held_out.npy")])
        settings = {"data.train": tokens, "data.eval": held_out, "data.sequence_length": 16, "device.kind": "cpu", "finetune.method": "lora",
                    "optimizer.lr": 1e-2, "optimizer.schedule.warmup_steps": 0, "training.global_batch_size": 4, "training.micro_batch_size": 2,
                    "training.steps": 2, "training.eval_interval": 0}
        # Into runs/llama, as the config that was written proposes.
        train = ["train", "models/llama/config.json", *(f"--set={key}={value}" for key, value in settings.items())]
        run_in("project", 0, *train)
        loss = run_in("project", 0, "eval", "runs/llama", "--json").splitlines()[0]

        os.rename(self.path("project"), self.path("moved"))
        self.assertEqual(run_in("moved", 0, "eval", "runs/llama", "--json").splitlines()[0], loss.replace("/project/", "/moved/"))
        # Imported anew from a copy elsewhere, it has the same weights.
        shutil.rmtree(self.path("moved/models/llama"))
        gone = run_in("moved", 2, "eval", "runs/llama")
        self.assertIn(f"put it back as {self.folder}/project/models/llama or {self.folder}/moved/models/llama, or name its place", gone)
        run_in("moved", 0, "import", self.path("downloaded"), "--out", "models/llama")
        self.assertEqual(run_in("moved", 0, "eval", "runs/llama", "--json").splitlines()[0], loss.replace("/project/", "/moved/"))
        run_in("moved", 0, "export", "runs/llama", "--out", "whole")
        exported = tree_digest(self.path("moved/whole"))
        # Where it is named.
        os.rename(self.path("moved/models/llama"), self.path("base"))
        run_in("moved", 2, "generate", "runs/llama", "--prompt-tokens", "1,2", "--tokens", "2")
        named = f"checkpoint.init_from={self.folder}/base"
        run_in("moved", 0, "generate", "runs/llama", "--prompt-tokens", "1,2", "--tokens", "2", "--set", named)
        run_in("moved", 0, "eval", "runs/llama", "--set", named)
        self.assertIn("export: --base FOLDER", run_in("moved", 2, "export", "runs/llama", "--out", "exported"))
        run_in("moved", 0, "export", "runs/llama", "--base", "../base", "--out", "exported")
        self.assertEqual(tree_digest(self.path("moved/exported")), exported)
        # A run that goes on with the adapters from another folder names the place where it found the base.
        os.rename(self.path("base"), self.path("moved/models/llama"))
        on = [*train[:1], "moved/models/llama/config.json", *train[2:], "--set=checkpoint.init_from=moved/runs/llama", "--set=checkpoint.folder=on"]
        run_in(".", 0, *on)
        run_in(".", 0, "eval", "on")
        self.assertIn("resuming from", run_in(".", 0, *on, "--set=training.steps=3"))

    def test_adapters_of_peft_beside_a_run_with_settings_of_its_own(self):
        write_tokens(self.path("tokens.npy"), 2000, 5, 83)
        self.run_ok("import", FIXTURE, "--out", self.path("model"))
        settings = {"data.train": json.dumps([self.path("tokens.npy")]), "data.sequence_length": 16, "checkpoint.folder": self.path("run"),
                    "device.kind": "cpu", "training.steps": 1, "training.global_batch_size": 2, "training.eval_interval": 0,
                    "optimizer.lr_patterns": '["embedding", "head"]', "optimizer.lr_factors": "[0.1, 0.1]", "optimizer.schedule.warmup_steps": 0}
        self.run_ok("train", self.path("model/config.json"), *(f"--set={key}={value}" for key, value in settings.items()))
        self.run_ok("import", PEFT, "--base", self.path("run"), "--out", self.path("adapters"))
        self.run_ok("eval", self.path("adapters"), "--data", self.path("tokens.npy"), "--set", "device.kind=cpu")
        out = os.path.join(os.fsencode(self.folder), b"not\xfdutf8")
        for command in (("import", FIXTURE), ("import", PEFT, "--base", self.path("model"))):
            refused = parka(*command, "--out", out)
            self.assertEqual(refused.returncode, 2, refused.stderr)
            self.assertIn("its name is not UTF-8", refused.stderr)
            self.assertFalse(os.path.exists(out))

    @staticmethod
    def write_changed(folder, config, change):
        """The adapters of peft with another config."""
        os.makedirs(folder, exist_ok=True)
        with open(os.path.join(folder, "adapter_config.json"), "w", encoding="utf-8") as file:
            json.dump(dict(config, **change), file)
        if not os.path.exists(os.path.join(folder, "adapter_model.safetensors")):
            os.symlink(os.path.join(PEFT, "adapter_model.safetensors"), os.path.join(folder, "adapter_model.safetensors"))

    def assert_whole_names_of_layers_mean_the_same(self, model, adapters, config):
        """peft writes them, where "all-linear" means fewer than 20 layers."""
        part = {"q_proj": "self_attn", "v_proj": "self_attn", "o_proj": "self_attn", "down_proj": "mlp"}
        names = [f"model.layers.{block}.{part[name]}.{name}" for block in range(2) for name in config["target_modules"]]
        self.write_changed(self.path("named"), config, {"target_modules": names})
        self.run_ok("import", self.path("named"), "--base", model, "--out", self.path("of_named"))
        with open(os.path.join(adapters, "shard_0.safetensors"), "rb") as one, open(self.path("of_named/shard_0.safetensors"), "rb") as other:
            self.assertEqual(one.read(), other.read())

    def test_adapters_of_peft(self):
        model, adapters, out, back, run, merged = (os.path.join(self.folder, name)
                                                   for name in ("model", "adapters", "out", "back", "run", "merged"))
        self.run_ok("import", FIXTURE, "--out", model)
        self.run_ok("import", PEFT, "--base", model, "--out", adapters)
        self.run_ok("export", adapters, "--out", out, "--dtype", "fp32")
        weights = load_file(os.path.join(out, "model.safetensors"))
        expected = load_file(os.path.join(PEFT, "merged.safetensors"))  # by peft
        self.assertGreater(len(expected), 5)
        for name, weight in expected.items():
            np.testing.assert_allclose(weights[name], weight, rtol=0, atol=1e-6, err_msg=name)
        # What comes back is what came.
        self.run_ok("export", adapters, "--out", back, "--adapter")
        old, new = (load_file(os.path.join(folder, "adapter_model.safetensors")) for folder in (PEFT, back))
        self.assertEqual(sorted(old), sorted(new))
        for name, factor in old.items():
            np.testing.assert_array_equal(factor, new[name])
        with open(os.path.join(PEFT, "adapter_config.json"), encoding="utf-8") as file:
            config = json.load(file)
        with open(os.path.join(back, "adapter_config.json"), encoding="utf-8") as file:
            written = json.load(file)
        for key in ("r", "lora_alpha", "lora_dropout", "use_rslora", "peft_type"):
            self.assertEqual(written[key], config[key], key)
        self.assertEqual(sorted(written["target_modules"]), config["target_modules"])

        self.assert_whole_names_of_layers_mean_the_same(model, adapters, config)

        # They are trained on by the config that was written.
        write_tokens(f"{self.folder}/tokens.npy", 2000, 5, 83)
        tokens = json.dumps([f"{self.folder}/tokens.npy"])
        settings = {"data.train": tokens, "data.sequence_length": 16, "checkpoint.folder": run, "device.kind": "cpu", "training.steps": 2,
                    "training.global_batch_size": 4, "optimizer.lr": 1e-2, "precision.recipe": "fp32"}
        train = ["train", os.path.join(adapters, "config.json"), *(f"--set={key}={value}" for key, value in settings.items())]
        self.run_ok(*train)
        self.assertIn("resuming from", self.run_ok(*train, "--set=training.steps=3"))
        self.run_ok("export", run, "--out", merged, "--adapter")
        trained = load_file(os.path.join(merged, "adapter_model.safetensors"))
        for name, factor in old.items():
            change = np.abs(trained[name] - factor).max()
            self.assertTrue(0 < change < 0.1, (name, change))

        one_block = [f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj")]
        bad = self.path("bad")
        for change, part in (({"use_dora": True}, '"use_dora" is true'), ({"peft_type": "IA3"}, '"peft_type"'), ({"r": 4}, "floats [4, 32]"),
                             ({"target_modules": ["q_proj"]}, "no adapter of q_proj"), ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
                             ({"target_modules": ["q_proj", "lm_head"]}, "lm_head"), ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
                             ({"target_modules": one_block}, "no adapter of q_proj"), ({"target_modules": ["model.lm_head"]}, "lm_head"),
                             ({"init_lora_weights": "pissa"}, "init_lora_weights"), ({"lora_dropout": 1}, "lora_dropout")):
            self.write_changed(bad, config, change)
            refused = parka("import", bad, "--base", model, "--out", out + "_bad")
            self.assertEqual(refused.returncode, 2, change)
            self.assertIn(part, refused.stderr)
            self.assertFalse(os.path.exists(out + "_bad"))
        for arguments, part in ((("import", PEFT), "as --base"), (("import", FIXTURE, "--base", model), "leave it out"),
                                (("import", PEFT, "--base", adapters), "adapters of its own")):
            refused = parka(*arguments, "--out", out + "_bad")
            self.assertEqual(refused.returncode, 2, arguments)
            self.assertIn(part, refused.stderr)


if __name__ == "__main__":
    unittest.main()
