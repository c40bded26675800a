"""import and export from the command line: round trips, bad input, memory, and what transformers makes of an export."""
import json
import os
import re
import shutil
import struct
import subprocess
import sys
import unittest

from parka_runs import PROGRAM, RunFolder, faulty_files, metrics, parka, tree_digest, write_tokens

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "huggingface")
NAMES = ["llama_mha", "llama3_gqa", "llama_tied", "olmo_untied", "olmo_tied", "mistral_window", "mistral_full", "llama_yarn",
         "llama_linear", "qwen3_tied", "olmo2_gqa", "olmo3_windows", "qwen2_tied", "gemma3_windows", "gemma3_untied", "olmoe_mha",
         "qwen3_moe_gqa", "mixtral_gqa", "dots1_groups"]
WITH_EXPERTS = NAMES[-4:]

# What config.json may ask of each family and Parka does not compute, beside REFUSED_OF_ALL. docs/huggingface.md lists them.
WINDOW = {"sliding_window": 8}
ACTIVATION = {"hidden_act": "gelu"}
REFUSED = {
    "llama": {"attention_bias": True, "mlp_bias": True, **WINDOW, **ACTIVATION},
    "mistral": {"attention_bias": True, **ACTIVATION},
    "qwen2": {"use_sliding_window": True, **ACTIVATION},
    "qwen3": {"attention_bias": True, "use_sliding_window": True, **ACTIVATION},
    "olmo2": {"attention_bias": True, **WINDOW, **ACTIVATION},
    "olmo3": {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"], **ACTIVATION},
    "gemma3_text": {"attention_bias": True, "attn_logit_softcapping": 30.0, "final_logit_softcapping": 30.0,
                    "use_bidirectional_attention": True, "hidden_activation": "gelu"},
    "olmo": {"attention_bias": True, "clip_qkv": 8.0, **WINDOW, **ACTIVATION},
    "olmoe": {"attention_bias": True, "clip_qkv": 8.0, **WINDOW, **ACTIVATION},
    "qwen3_moe": {"attention_bias": True, "use_sliding_window": True, "decoder_sparse_step": 2, "mlp_only_layers": [0], **ACTIVATION},
    "mixtral": {"attention_bias": True, "router_jitter_noise": 0.1, **ACTIVATION},
    "dots1": {"attention_bias": True, "layer_types": ["full_attention", "sliding_attention"], **ACTIVATION},
}
REFUSED_OF_ALL = {"architectures": ["OtherForSequenceClassification"], "attention_dropout": 0.5, "is_causal": False,
                  "partial_rotary_factor": 0.25, "quantization_config": {"quant_method": "fp8"}}

try:
    import torch
    import transformers
except ImportError:
    torch = transformers = None


# Runs its arguments and prints the most memory that they had, in KiB.
MEASURE = """
import resource, subprocess, sys
subprocess.run(sys.argv[1:], check=True)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
"""


def edit_json(path, change):
    with open(path, encoding="utf-8") as file:
        content = json.load(file)
    change(content)
    with open(path, "w", encoding="utf-8") as file:
        json.dump(content, file)


def edit_header(path, change):
    """Changes the header of a safetensors file, whose tensors stay as they are."""
    with open(path, "rb") as file:
        content = file.read()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8:8 + length])
    change(header)
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + content[8 + length:])


def rename_tensor(old, new):
    def change(header):
        header[new] = header.pop(old)
    return change


class HuggingFace(RunFolder):
    def setUp(self):
        super().setUp()
        self.model = self.path("model")
        self.use("llama3_gqa")

    def use(self, name):
        shutil.rmtree(self.model, ignore_errors=True)
        shutil.copytree(os.path.join(FIXTURES, name), self.model)

    def import_model(self, out="imported"):
        self.assert_exit(parka("import", self.model, "--out", self.path(out)), 0)
        return self.path(out)

    def export(self, checkpoint, out, *arguments):
        """In files as small as those of the fixture."""
        result = parka("export", checkpoint, "--out", self.path(out), "--shard-size", "9KB", *arguments)
        self.assert_exit(result, 0)
        return result

    def refused(self, *arguments, words, out="out"):
        result = parka(*arguments, "--out", self.path(out))
        self.assert_exit(result, 2)
        errors = [line for line in result.stderr.splitlines() if line.startswith("parka: error: ")]
        self.assertEqual(len(errors), 1, result.stderr)
        for word in words:
            self.assertIn(word, errors[0])
        if out == "out":
            self.assertEqual([name for name in os.listdir(self.folder) if name.startswith("out")], [])

    def train(self, imported, *overrides):
        arguments = ["--set", f"data.train=[\"{self.path('a.npy')}\"]", "--set", f"data.eval=[\"{self.path('held_out.npy')}\"]"]
        for override in ("data.sequence_length=16", "training.steps=3", "training.global_batch_size=4", "training.eval_interval=3",
                         "optimizer.schedule.warmup_steps=0", f"checkpoint.folder={self.path('run')}", "device.kind=cpu", *overrides):
            arguments += ["--set", override]
        return parka("train", f"{imported}/config.json", *arguments)


class RoundTrip(HuggingFace):
    def test_tokenizer_files_come_along(self):
        for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tekken.json"):
            with open(f"{self.model}/{name}", "w", encoding="utf-8") as file:
                file.write(f"the {name} of a test")
        self.export(self.import_model(), "exported")
        self.assertEqual(tree_digest(self.path("exported")), tree_digest(self.model))

    def test_names_of_folders_may_end_with_slashes_and_dots(self):
        imported = self.import_model("imported/./")
        self.assertEqual(sorted(os.listdir(self.folder)), ["a.npy", "b.npy", "held_out.npy", "imported", "model"])
        self.export(imported, "exported/.")
        self.assertEqual(tree_digest(self.path("exported")), tree_digest(self.model))

    def test_other_programs_files(self):
        """Another order of tensors, other metadata, a padded header, two formats, a tied head that is there all the same."""
        self.use("olmo_tied")
        path = f"{self.model}/model.safetensors"
        with open(path, "rb") as file:
            content = file.read()
        (length,) = struct.unpack("<Q", content[:8])
        header, data = json.loads(content[8:8 + length]), content[8 + length:]
        del header["__metadata__"]
        tensors = {name: (tensor["dtype"], data[slice(*tensor["data_offsets"])]) for name, tensor in header.items()}
        down, values = "model.layers.0.mlp.down_proj.weight", memoryview(tensors["model.layers.0.mlp.down_proj.weight"][1]).cast("H")
        tensors[down] = ("F32", b"".join(struct.pack("<I", value << 16) for value in values))
        header["lm_head.weight"] = header["model.embed_tokens.weight"]
        new_header, new_data = {"__metadata__": {"format": "pt", "by": "a test"}}, b""
        for name in sorted(header, key=lambda name: (name != down, name), reverse=True):
            dtype, content = tensors.get(name, tensors["model.embed_tokens.weight"])
            new_header[name] = dict(header[name], dtype=dtype, data_offsets=[len(new_data), len(new_data) + len(content)])
            new_data += content
        text = json.dumps(new_header).encode() + b"   \n"
        with open(path, "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + new_data)
        self.assert_exit(parka("export", self.import_model(), "--out", self.path("exported")), 0)
        with open(self.path("exported/model.safetensors"), "rb") as file:
            content = file.read()
        (begin,) = struct.unpack("<Q", content[:8])
        written = json.loads(content[8:8 + begin])
        del written["__metadata__"]
        self.assertEqual({name: (tensor["dtype"], content[8 + begin:][slice(*tensor["data_offsets"])]) for name, tensor in written.items()}, tensors)
        self.assertEqual(tree_digest(self.path("exported"), lambda name: "safetensors" not in name),
                         tree_digest(self.model, lambda name: "safetensors" not in name))

        # A head that is not the embedding is not tied.
        with open(path, "r+b") as file:
            file.seek(8 + len(text) + new_header["lm_head.weight"]["data_offsets"][0])
            file.write(b"\x12\x34")
        result = parka("import", self.model, "--out", self.path("other"))
        self.assert_exit(result, 2)
        self.assertIn("tie_word_embeddings", result.stderr)

    def test_train_evaluate_and_export(self):
        imported = self.import_model()
        self.assert_exit(self.train(imported), 0)
        steps = metrics(self.path("run"))
        self.assertEqual([step["step"] for step in steps], [1, 2, 3])
        at_start = metrics(self.path("run"), "eval")[0]
        result = parka("eval", imported, "--data", self.path("held_out.npy"), "--json", "--set", "data.sequence_length=16",
                       "--set", "device.kind=cpu")
        self.assert_exit(result, 0)
        self.assertAlmostEqual(json.loads(result.stdout)["loss"], at_start["loss"], places=5)
        # The same command goes on with the run: it does not start from the model again.
        result = self.train(imported, "training.steps=4")
        self.assert_exit(result, 0)
        self.assertIn("resuming", result.stderr)
        self.assert_exit(parka("generate", imported, "--prompt-tokens", "1,2", "--tokens", "3", "--set", "device.kind=cpu"), 0)

        # A second run starts from the first; what came with the imported model is still known.
        second = self.train(imported, f"checkpoint.folder={self.path('second')}", f"checkpoint.init_from={self.path('run')}")
        self.assert_exit(second, 0)
        self.export(self.path("second"), "exported")
        self.assertEqual(sorted(os.listdir(self.path("exported"))), sorted(os.listdir(self.model)))
        weights = lambda name: not name.endswith("safetensors")
        self.assertEqual(tree_digest(self.path("exported"), weights), tree_digest(self.model, weights))

        # Each run has a copy of what came with the model, and needs neither that nor the runs between.
        os.rename(imported, self.path("elsewhere"))
        self.export(self.path("run"), "of_run")
        shutil.rmtree(self.path("run"))
        self.export(self.path("second"), "again")
        self.assertEqual(tree_digest(self.path("again")), tree_digest(self.path("exported")))
        self.assertEqual(tree_digest(self.path("of_run"), weights), tree_digest(self.model, weights))
        third = self.train(self.path("second"), f"checkpoint.folder={self.path('third')}", f"checkpoint.init_from={self.path('second')}")
        self.assert_exit(third, 0)
        shutil.rmtree(self.path("second"))
        self.export(self.path("third"), "of_third")
        self.assertEqual(tree_digest(self.path("of_third"), weights), tree_digest(self.model, weights))

        # Without the copy it is missed; --like stands in for it.
        shutil.rmtree(f"{self.path('third')}/huggingface")
        result = parka("export", self.path("third"), "--out", self.path("bare"))
        self.assert_exit(result, 0)
        self.assertIn("--like", result.stderr)
        self.assertEqual(sorted(os.listdir(self.path("bare"))), ["config.json", "model.safetensors"])
        self.assert_exit(parka("export", self.path("third"), "--like", self.model, "--out", self.path("like")), 0)
        others = [name for name in os.listdir(self.model) if not name.startswith("model")]
        self.assertEqual(sorted(os.listdir(self.path("like"))), sorted([*others, "model.safetensors"]))

    def test_the_longest_sequence_is_that_of_the_model_or_of_a_longer_run(self):
        imported = self.import_model()

        def positions(name, *options):
            out = self.path(f"{name}_exported")
            self.assert_exit(parka("export", self.path(name), "--out", out, *options), 0)
            with open(f"{out}/config.json", encoding="utf-8") as file:
                return json.load(file)["max_position_embeddings"]

        for name, length, *overrides in (("shorter", 16, "model.rope_theta=20000"), ("longer", 128), ("as_long", 64, "model.rope_theta=20000")):
            result = self.train(imported, f"checkpoint.folder={self.path(name)}", f"data.sequence_length={length}", "training.steps=1",
                                "data.eval=[]", "training.eval_interval=0", "training.global_batch_size=2", *overrides)
            self.assert_exit(result, 0)
            self.assertEqual(positions(name), max(length, 64))
        # transformers before version 5 takes the quotient of the lengths for YaRN's factor.
        self.use("llama_yarn")
        write_tokens(self.path("a.npy"), 100, seed=1, vocab=59)
        self.assert_exit(self.train(self.import_model("yarn"), f"checkpoint.folder={self.path('stretched')}", "training.steps=1",
                                    "data.eval=[]", "training.eval_interval=0", "training.global_batch_size=2", "model.rope_scaling.factor=8"), 0)
        self.assertEqual(positions("stretched"), 8 * 16)
        self.use("llama_mha")
        imported = self.import_model("other")
        self.assert_exit(self.train(imported, f"checkpoint.folder={self.path('family')}"), 0)
        self.assertEqual(positions("family", "--family", "mistral"), 64)

    def test_a_theta_of_windows_that_is_left_to_defaults_is_written(self):
        """transformers 5 takes 500000 there, 4 took rope_theta, and Parka does."""
        self.use("olmo3_windows")

        def model_of(folder):
            with open(f"{folder}/config.json", encoding="utf-8") as file:
                return json.loads("".join(file.readlines()[1:]))["model"]  # without the comment

        for theta, parameters, kept in ((500000.0, None, True), (20000.0, None, False), (20000.0, {"full_attention": {"rope_theta": 20000.0}}, False),
                                        (20000.0, {"full_attention": {"rope_theta": 20000.0}, "sliding_attention": {"rope_theta": 20000.0}}, True)):
            with self.subTest(theta=theta, parameters=parameters):
                edit_json(f"{self.model}/config.json", lambda config: config.update(rope_theta=theta, rope_parameters=parameters))
                name = f"{theta}_{len(str(parameters))}"
                imported = self.import_model(name)
                self.assert_exit(parka("export", imported, "--out", self.path(f"{name}_exported")), 0)
                self.assertEqual(tree_digest(self.path(f"{name}_exported")) == tree_digest(self.model), kept)
                with open(self.path(f"{name}_exported/config.json"), encoding="utf-8") as file:
                    written = json.load(file)
                if not kept:
                    self.assertEqual(written["rope_theta"], theta)
                    for kind in ("full_attention", "sliding_attention"):
                        self.assertEqual(written["rope_parameters"][kind]["rope_theta"], theta)
                again = self.path(f"{name}_again")
                self.assert_exit(parka("import", self.path(f"{name}_exported"), "--out", again), 0)
                self.assertEqual(model_of(again), model_of(imported))

    def peak_kib(self, *arguments):
        # In between stands a small process: a child's peak counts from what its parent had in memory.
        # AddressSanitizer would keep 256 MB of what was freed.
        keep_little = {**os.environ, "ASAN_OPTIONS": os.environ.get("ASAN_OPTIONS", "") + ":quarantine_size_mb=8"}
        result = subprocess.run([sys.executable, "-c", MEASURE, PROGRAM, *arguments], capture_output=True, text=True,
                                env=keep_little)
        self.assert_exit(result, 0)
        return int(result.stdout.splitlines()[-1])

    def test_memory_does_not_grow_with_the_model(self):
        """Of a model of 0.6 GB import and export keep a few pieces in memory."""
        self.use("llama_mha")
        sizes = {"vocab_size": 40000, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 4,
                 "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 64}
        edit_json(f"{self.model}/config.json", lambda config: config.update(sizes))
        d, f = 1024, 4096
        shapes = {"lm_head.weight": [40000, d], "model.embed_tokens.weight": [40000, d], "model.norm.weight": [d]}
        for layer in range(4):
            prefix = f"model.layers.{layer}."
            shapes |= {prefix + f"self_attn.{x}_proj.weight": [d, d] for x in "qkvo"}
            shapes |= {prefix + "mlp.gate_proj.weight": [f, d], prefix + "mlp.up_proj.weight": [f, d],
                       prefix + "mlp.down_proj.weight": [d, f]}
            shapes |= {prefix + "input_layernorm.weight": [d], prefix + "post_attention_layernorm.weight": [d]}
        header, begin = {}, 0
        for name, shape in shapes.items():
            end = begin + 4 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header).encode()
        with open(f"{self.model}/model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            ones = struct.pack("<f", 1) * d
            for _ in range(begin // len(ones)):
                file.write(ones)
        self.assertGreater(begin, 5e8)
        # The program alone, with the libraries that it is linked to, is the least: CUDA's are large.
        least = self.peak_kib("--version")
        for arguments in (("import", self.model, "--out", self.path("imported")),
                          ("export", self.path("imported"), "--out", self.path("exported"), "--dtype", "bf16")):
            self.assertLess(self.peak_kib(*arguments), least + 120_000, arguments)
        self.assertGreater(os.path.getsize(self.path("exported/model.safetensors")), 2.5e8)


class BadInput(HuggingFace):
    SHARD = "model-00002-of-00006.safetensors"

    def test_import(self):
        shard, index, config = (f"{self.model}/{name}" for name in (self.SHARD, "model.safetensors.index.json", "config.json"))
        q = "model.layers.0.self_attn.v_proj.weight"

        def truncate(path, count):
            os.truncate(path, os.path.getsize(path) - count)

        cases = [
            ("no config", lambda: os.remove(config), ["config.json"]),
            ("config that is cut off", lambda: truncate(config, 20), ["config.json"]),
            ("config of another model", lambda: edit_json(config, lambda c: c.update(model_type="gpt2")), ["gpt2"]),
            ("sliding window", lambda: edit_json(config, lambda c: c.update(sliding_window=128)), ["sliding_window"]),
            ("no weights", lambda: [os.remove(f"{self.model}/{n}") for n in os.listdir(self.model) if "safetensors" in n],
             ["no model.safetensors"]),
            ("two sets of weights", lambda: shutil.copy(shard, f"{self.model}/model.safetensors"), ["model.safetensors"]),
            ("missing file", lambda: os.remove(shard), [self.SHARD]),
            ("file that is cut off", lambda: truncate(shard, 1), [self.SHARD]),
            ("file cut off in its header", lambda: os.truncate(shard, 50), [self.SHARD]),
            ("empty file", lambda: os.truncate(shard, 0), [self.SHARD]),
            ("index that is cut off", lambda: truncate(index, 5), ["index.json"]),
            ("index without files", lambda: edit_json(index, lambda c: c.pop("weight_map")), ["weight_map"]),
            ("index that leads out of the folder",
             lambda: edit_json(index, lambda c: c["weight_map"].update({q: "../model/" + self.SHARD})), ["../model"]),
            ("index that names another file",
             lambda: edit_json(index, lambda c: c["weight_map"].update({q: "model-00001-of-00006.safetensors"})), [q, "00001"]),
            ("missing tensor", lambda: (edit_header(shard, rename_tensor(q, "model.layers.0.self_attn.rotary_emb.inv_freq")),
                                        edit_json(index, lambda c: c["weight_map"].pop(q))), [q, "missing"]),
            ("unknown tensor", lambda: (edit_header(shard, rename_tensor(q, "model.layers.0.self_attn.v_proj.bias")),
                                        edit_json(index, lambda c: c["weight_map"].pop(q))), [q]),
            ("wrong shape", lambda: edit_header(shard, lambda h: h[q].update(shape=h[q]["shape"][::-1])), [q, "[32, 24]", "[24, 32]"]),
            ("wrong size of the model", lambda: edit_json(config, lambda c: c.update(vocab_size=68)), ["embed_tokens", "[68, 32]"]),
            ("integers", lambda: edit_header(shard, lambda h: h[q].update(dtype="U16")), [q, "uint16"]),
            ("a tensor twice", lambda: (shutil.copy(shard, f"{self.model}/model-00007.safetensors"),
                                        edit_json(index, lambda c: c["weight_map"].update({"x": "model-00007.safetensors"}))),
             ["too"]),
        ]
        for name, damage, words in cases:
            with self.subTest(name):
                self.use("llama3_gqa")
                damage()
                self.refused("import", self.model, words=words)

    def test_a_folder_that_is_not_imported_is_told_of_import(self):
        for arguments, words in ((("eval", self.model), "is a Hugging Face model; `parka import"),
                                 (("train", self.model), "is the config of a Hugging Face model; `parka import")):
            result = parka(*arguments)
            self.assert_exit(result, 2)
            self.assertIn(words, result.stderr)

    def test_what_a_family_asks_and_parka_lacks(self):
        families = {}
        for name in NAMES:
            with open(os.path.join(FIXTURES, name, "config.json"), encoding="utf-8") as file:
                families.setdefault(json.load(file)["model_type"], name)
        self.assertEqual(set(families), set(REFUSED))
        for family, name in families.items():
            for key, value in (REFUSED_OF_ALL | REFUSED[family]).items():
                with self.subTest(family=family, key=key):
                    self.use(name)
                    edit_json(f"{self.model}/config.json", lambda config: config.update({key: value}))
                    self.refused("import", self.model, words=[key, "is not supported"])
            for rope_type in ("dynamic", "longrope"):
                with self.subTest(family=family, rope_type=rope_type):
                    self.use(name)
                    scaling = {"rope_type": rope_type, "rope_theta": 10000.0, "factor": 2.0}
                    edit_json(f"{self.model}/config.json", lambda config: config.update(rope_scaling=scaling))
                    self.refused("import", self.model, words=["rope_type", rope_type, "is not supported"])

    def test_every_family_has_models_here(self):
        """All tests of this file go over NAMES; docs/huggingface.md has a row for each family in both of its tables."""
        result = parka("export", self.import_model(), "--family", "none", "--out", self.path("out"))
        families = re.findall(r"(\w+) \((\w+ForCausalLM)\)", result.stderr)
        self.assertEqual({family for family, _ in families}, set(REFUSED))
        with open(os.path.join(FIXTURES, "..", "..", "..", "docs", "huggingface.md"), encoding="utf-8") as file:
            rows = [line for line in file if line.startswith("|")]
        for _, architecture in families:
            self.assertGreaterEqual(sum(f"`{architecture}`" in row for row in rows), 2, architecture)

    def test_nothing_is_overwritten(self):
        os.mkdir(self.path("there"))
        with open(self.path("there/file"), "w", encoding="utf-8") as file:
            file.write("precious")
        before = tree_digest(self.path("there"))
        self.refused("import", self.model, words=["there", "exists"], out="there")
        imported = self.import_model()
        self.refused("export", imported, words=["there", "exists"], out="there")
        self.refused("export", imported, words=["model", "exists"], out="model")
        self.assertEqual(tree_digest(self.path("there")), before)
        # A run would write its own config.json over the model's.
        result = self.train(imported, f"checkpoint.folder={imported}")
        self.assert_exit(result, 2)
        self.assertIn("checkpoint.init_from", result.stderr)

    def test_export(self):
        imported = self.import_model()
        self.refused("import", self.path("nowhere"), words=["nowhere"])
        self.refused("export", self.path("nowhere"), words=["nowhere"])
        self.refused("export", imported, "--dtype", "int8", words=["--dtype"])
        self.refused("export", imported, "--shard-size", "much", words=["--shard-size", "much"])
        self.refused("export", imported, "--shard-size", "0", words=["--shard-size"])
        self.refused("export", imported, "--like", self.path("run"), words=["run"])
        self.refused("export", imported, "--family", "gpt2", words=["gpt2", "llama", "olmo"])
        self.refused("export", imported, "--family", "olmo", words=[imported, "model.norm", "rmsnorm", "layernorm"])
        self.export(imported, "named", "--family", "llama")
        self.assertEqual(tree_digest(self.path("named")), tree_digest(self.model))
        with open(f"{imported}/shard_0.safetensors", "r+b") as file:
            file.seek(5000)
            file.write(b"\x55\xaa")
        self.refused("export", imported, words=["shard_0.safetensors"])

    def test_values_beyond_fp16(self):
        self.use("llama_mha")
        with open(f"{self.model}/model.safetensors", "r+b") as file:
            file.seek(-4, os.SEEK_END)
            file.write(struct.pack("<f", 7e4))
        imported = self.import_model()
        self.refused("export", imported, "--dtype", "fp16", words=["70000", "fp16", "bf16"])
        self.assert_exit(parka("export", imported, "--dtype", "bf16", "--out", self.path("fine")), 0)

    def test_init_from(self):
        imported = self.import_model()
        for override, words in [("checkpoint.init_from=/nowhere", ["/nowhere"]),
                                ("model.num_kv_heads=4", ["model.num_kv_heads"]),
                                ("model.norm_eps=1e-3", ["model.norm_eps"])]:
            with self.subTest(override):
                result = self.train(imported, override)
                self.assert_exit(result, 2)
                for word in words:
                    self.assertIn(word, result.stderr)
        # An imported model has no run that could be resumed.
        shutil.copytree(imported, self.path("run/step_00000000"))
        result = self.train(imported, "checkpoint.init_from=")
        self.assert_exit(result, 2)
        self.assertIn("checkpoint.init_from", result.stderr)


class OtherForms(HuggingFace):
    """Models in forms that other programs and the hub leave them in."""

    POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0123456789abcdef" * 4 + "\nsize 123456789\n"

    def imported(self, *arguments):
        shutil.rmtree(self.path("imported"), ignore_errors=True)
        return parka("import", self.model, "--out", self.path("imported"), *arguments)

    def weights(self):
        return tree_digest(self.path("imported"), only=lambda path: path.startswith("shard_"))

    def write(self, name, text):
        with open(os.path.join(self.model, name), "w", encoding="utf-8") as file:
            file.write(text)

    def test_pointers_of_git_lfs_are_called_that(self):
        index = "model.safetensors.index.json"
        for name in ("model.safetensors", "config.json", "tokenizer.json", "generation_config.json", index):
            with self.subTest(name):
                self.use("llama3_gqa")
                self.write(name, self.POINTER)
                result = self.imported()
                self.assert_exit(result, 2)
                self.assertRegex(result.stderr, rf"/{name}: .*git lfs pull")
        os.makedirs(self.path("tokenizer"))
        with open(self.path("tokenizer/tokenizer.json"), "w", encoding="utf-8") as file:
            file.write(self.POINTER)
        self.use("llama3_gqa")
        self.assert_exit(self.imported(), 0)
        result = parka("generate", self.path("imported"), "--prompt", "a", "--tokenizer", self.path("tokenizer"))
        self.assert_exit(result, 2)
        self.assertIn("git lfs pull", result.stderr)

    def test_a_tied_matrix_may_have_either_name(self):
        for name in ("llama_tied", "qwen3_tied", "gemma3_windows", os.path.join("..", "llava", "siglip_qwen2")):
            self.use(name)
            self.assert_exit(self.imported(), 0)
            expected = self.weights()
            for metadata in (False, True):
                with self.subTest(name, metadata=metadata):
                    self.use(name)

                    def change(header):
                        (embedding,) = [key for key in header if key.endswith("embed_tokens.weight")]
                        head = "language_model.lm_head.weight" if embedding.startswith("language_model.") else "lm_head.weight"
                        header[head] = header.pop(embedding)
                        if metadata:
                            header["__metadata__"] = {"format": "pt", embedding: head}
                    edit_header(os.path.join(self.model, "model.safetensors"), change)
                    self.assert_exit(self.imported(), 0)
                    self.assertEqual(self.weights(), expected)

    def test_whole_floats_are_sizes(self):
        self.use("llama_yarn")
        self.assert_exit(self.imported(), 0)
        expected = self.weights()
        for key in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings"):
            with self.subTest(key):
                self.use("llama_yarn")
                edit_json(os.path.join(self.model, "config.json"), lambda config: config.update({key: float(config[key])}))
                self.assert_exit(self.imported(), 0)
                self.assertEqual(self.weights(), expected)
        for written in ("16.5", "1e-1", "-8.0", "0.0"):
            with self.subTest(written):
                self.use("llama_yarn")
                with open(os.path.join(self.model, "config.json"), encoding="utf-8") as file:
                    text = file.read()
                self.write("config.json", re.sub(r'("num_hidden_layers": )\d+', rf"\g<1>{written}", text))
                result = self.imported()
                self.assert_exit(result, 2)
                self.assertRegex(result.stderr, rf"num_hidden_layers: .*got {float(written)}")

    def test_folders_of_the_hubs_cache(self):
        self.assert_exit(self.imported(), 0)
        expected = self.weights()
        cache = self.path("models--org--name")
        for revision in ("one", "two"):
            shutil.copytree(self.model, os.path.join(cache, "snapshots", revision))
            self.model = cache
            result = self.imported()
            if revision == "one":
                self.assert_exit(result, 0)
                self.assertEqual(self.weights(), expected)
            else:
                self.assert_exit(result, 2)
                self.assertIn("snapshots/two", result.stderr)
            self.model = os.path.join(cache, "snapshots", "one")
        self.model = os.path.join(cache, "snapshots")  # a folder above
        self.assertIn("snapshots/one", self.imported().stderr)
        os.remove(os.path.join(self.model, "one", "config.json"))
        self.model = os.path.join(self.model, "one")
        result = self.imported()
        self.assert_exit(result, 2)
        self.assertIn("has no config.json", result.stderr)

    def test_what_a_killed_import_has_left_is_in_nobodys_way(self):
        for rule in ("write:*/imported.tmp/shard_0.safetensors:KILL:1:1", "open:*/imported.tmp/huggingface/config.json:KILL:1:1",
                     "mkdir:*/imported.tmp/huggingface:KILL:1:1"):
            with self.subTest(rule):
                killed = parka("import", self.model, "--out", self.path("imported"), env=faulty_files(rule))
                self.assertEqual(killed.returncode, -9, killed.stderr)
                self.assertTrue(os.path.exists(self.path("imported.tmp")))
                self.assert_exit(self.imported(), 0)
                self.assertEqual([name for name in os.listdir(self.folder) if "imported" in name], ["imported"])
                self.assertNotIn(".unfinished", os.listdir(self.path("imported")))
                shutil.rmtree(self.path("imported"))


class Experts(HuggingFace):
    """Files with a tensor for each expert, and with those of all in one, as transformers 5 has them in memory."""

    def read(self):
        with open(f"{self.model}/model.safetensors", "rb") as file:
            content = file.read()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8:8 + length])
        header.pop("__metadata__")
        return {name: (entry["dtype"], entry["shape"], content[8 + length:][slice(*entry["data_offsets"])]) for name, entry in header.items()}

    def write(self, tensors):
        header, data = {"__metadata__": {"format": "pt"}}, b""
        for name, (dtype, shape, content) in sorted(tensors.items(), key=lambda item: item[1][0] != "F32"):
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(content)]}
            data += content
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(f"{self.model}/model.safetensors", "wb") as file:
            file.write(struct.pack("<Q", len(text)) + text + data)

    def stacked(self, tensors):
        """The same tensors under the names of transformers 5, with experts in one tensor."""
        result, experts = {}, {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"(.*)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight", name)
            if match:
                part = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(match[3], match[3])
                experts.setdefault(match[1], {})[int(match[2]), part] = tensor
            else:
                result[name.replace("block_sparse_moe", "mlp")] = tensor
        for block, parts in experts.items():
            count = len(parts) // 3
            for target, sources in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                dtype, (rows, columns), _ = parts[0, sources[0]]
                data = b"".join(parts[e, source][2] for e in range(count) for source in sources)
                result[f"{block}.mlp.experts.{target}"] = (dtype, [count, rows * len(sources), columns], data)
        return result

    def test_stacked_ones_are_imported_as_the_others(self):
        for name in WITH_EXPERTS:
            with self.subTest(name):
                self.use(name)
                before, tensors = tree_digest(self.model), self.read()
                self.write(self.stacked(tensors))
                self.assertNotEqual(set(self.read()), set(tensors))
                self.assert_exit(parka("export", self.import_model(f"imported_{name}"), "--out", self.path(f"out_{name}")), 0)
                self.assertEqual(tree_digest(self.path(f"out_{name}")), before)

    def test_one_that_is_missing_or_of_another_size(self):
        for name, expert in (("olmoe_mha", "model.layers.1.mlp.experts.10.up_proj.weight"),
                             ("mixtral_gqa", "model.layers.0.block_sparse_moe.experts.3.w2.weight"),
                             ("dots1_groups", "model.layers.1.mlp.shared_experts.down_proj.weight"),
                             ("dots1_groups", "model.layers.1.mlp.gate.e_score_correction_bias")):
            self.use(name)
            tensors = self.read()
            with self.subTest("missing", tensor=expert):
                self.write({key: value for key, value in tensors.items() if key != expert})
                self.refused("import", self.model, words=[expert, "missing"])
        self.use("qwen3_moe_gqa")
        tensors, stacked = self.read(), "model.layers.0.mlp.experts.gate_up_proj"
        with self.subTest("another size"):
            edit_json(f"{self.model}/config.json", lambda config: config.update(num_local_experts=5))
            self.write(self.stacked(tensors))
            self.refused("import", self.model, words=["model.layers.0.mlp.gate.weight", "[6, 32]", "[5, 32]"])
            self.write({key: value for key, value in self.stacked(tensors).items() if not key.endswith("gate.weight")})
            self.refused("import", self.model, words=[stacked, "[6, 24, 32]", "[5, 24, 32]"])
        with self.subTest("twice"):
            self.use("qwen3_moe_gqa")
            self.write(tensors | {stacked: self.stacked(tensors)[stacked]})
            self.refused("import", self.model, words=["model.layers.0.mlp.experts.0.gate_proj.weight", stacked])

    def test_keys_that_must_be_there(self):
        for name, keys in (("olmoe_mha", ("num_experts", "num_experts_per_tok", "intermediate_size")),
                           ("qwen3_moe_gqa", ("num_local_experts", "num_experts_per_tok", "moe_intermediate_size")),
                           ("mixtral_gqa", ("num_local_experts", "num_experts_per_tok", "intermediate_size")),
                           ("dots1_groups", ("n_routed_experts", "num_experts_per_tok", "moe_intermediate_size", "intermediate_size",
                                             "n_shared_experts"))):
            for key in keys:
                with self.subTest(name, key=key):
                    self.use(name)
                    edit_json(f"{self.model}/config.json", lambda config: config.pop(key))
                    named = "num_experts" if name == "qwen3_moe_gqa" and key == "num_local_experts" else key
                    self.refused("import", self.model, words=[f"has no {named}"])

    def test_what_a_missing_key_means(self):
        """As in transformers' classes; and of norm_topk_prob an import tells."""
        imported = {}
        for name, change in (("given", {"norm_topk_prob": False}), ("absent", {"norm_topk_prob": None}), ("other", {})):
            self.use("qwen3_moe_gqa")
            edit_json(f"{self.model}/config.json", lambda config: config.update(change))
            if name == "absent":
                edit_json(f"{self.model}/config.json", lambda config: config.pop("norm_topk_prob"))
            result = parka("import", self.model, "--out", self.path(name))
            self.assert_exit(result, 0)
            self.assertEqual("norm_topk_prob" in result.stderr, name == "absent")
            with open(f"{self.path(name)}/config.json", encoding="utf-8") as file:
                imported[name] = json.loads(file.read().split("\n", 1)[1])["model"]["moe"]
        self.assertEqual(imported["given"], imported["absent"])
        self.assertNotEqual(imported["given"], imported["other"])
        # A window that no layer has.
        self.use("dots1_groups")
        for window, of_layers in ((8, 2), (8, 62), (None, 0)):
            edit_json(f"{self.model}/config.json", lambda config: (config.pop("layer_types", None), config.update(
                sliding_window=window, max_window_layers=of_layers)))
            self.assert_exit(parka("import", self.model, "--out", self.path(f"window_{window}_{of_layers}")), 0)
        edit_json(f"{self.model}/config.json", lambda config: config.update(sliding_window=8, max_window_layers=1))
        self.refused("import", self.model, words=["max_window_layers", "sliding_window"])


@unittest.skipIf(transformers is None, "torch or transformers is missing")
class Transformers(HuggingFace):
    def logits(self, folder, tokens):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            return model.eval()(input_ids=tokens, use_cache=False).logits

    def test_loads_what_was_exported(self):
        for name in NAMES:
            with self.subTest(name):
                self.use(name)
                tokens = torch.randint(0, 53, (2, 40), generator=torch.Generator().manual_seed(1))  # the smallest vocabulary
                want = self.logits(self.model, tokens)
                imported = self.import_model(f"imported_{name}")
                for arguments in ((), ("--dtype", "fp32"), ("--shard-size", "20KB")):
                    out = self.path("exported_" + name + "".join(arguments))
                    self.assert_exit(parka("export", imported, "--out", out, *arguments), 0)
                    self.assertEqual((self.logits(out, tokens) - want).abs().max().item(), 0)

    def test_continues_prompts_token_for_token(self):
        """Greedily in FP32, up to where the two likeliest tokens are so close that rounding decides."""
        random = torch.Generator().manual_seed(2)
        for name in NAMES:
            self.use(name)
            imported = self.import_model(f"imported_{name}")
            model = transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32, attn_implementation="eager")
            compared = 0
            for length in (1, 5, 12):
                prompt = torch.randint(0, 53, (1, length), generator=random)
                with torch.no_grad():
                    out = model.eval().generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=30, do_sample=False,
                                                output_logits=True, return_dict_in_generate=True, pad_token_id=0, eos_token_id=None)
                best = torch.cat(out.logits).topk(2).values
                close = ((best[:, 0] - best[:, 1]) < 1e-3).tolist()
                count = close.index(True) if True in close else len(close)
                result = parka("generate", imported, "--prompt-tokens", ",".join(map(str, prompt[0].tolist())), "--tokens", "30",
                               "--temperature", "0", "--json", "--set", "device.kind=cpu", "--set", "precision.recipe=fp32",
                               "--set", "data.sequence_length=64")
                self.assert_exit(result, 0)
                with self.subTest(name=name, length=length):
                    self.assertEqual(json.loads(result.stdout)["tokens"][:count], out.sequences[0, length:length + count].tolist())
                compared += count
            self.assertGreater(compared, 45, name)

    def test_writes_the_same_files(self):
        """In another format, and where a tensor is larger than a file may be."""
        for name in NAMES:
            with self.subTest(name):
                self.use(name)
                imported = self.import_model(f"imported_{name}")
                for dtype, word in ((torch.float32, "fp32"), (torch.bfloat16, "bf16"), (torch.float16, "fp16")):
                    # One that was made, not loaded: transformers 5 orders tensors of a loaded one by name.
                    loaded = transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=dtype)
                    model = transformers.AutoModelForCausalLM.from_config(loaded.config)
                    model.load_state_dict(loaded.state_dict())
                    model.to(dtype)
                    for module, theirs in zip(model.modules(), loaded.modules()):  # which stays in fp32 in a loaded one
                        if hasattr(module, "e_score_correction_bias"):
                            module.e_score_correction_bias = torch.nn.Buffer(theirs.e_score_correction_bias)
                    # transformers 5 orders the tensors of models with experts by name, and leaves those of a block in one file.
                    for size in ("50GB",) if name in WITH_EXPERTS else ("50GB", "5KB", "20KB"):
                        want, got = self.path(f"{name}_{word}_{size}"), self.path(f"{name}_{word}_{size}_parka")
                        model.save_pretrained(want, max_shard_size=size)
                        self.assert_exit(parka("export", imported, "--out", got, "--dtype", word, "--shard-size", size), 0)
                        only = lambda path: "safetensors" in path
                        self.assertEqual(tree_digest(got, only), tree_digest(want, only))

    def test_loads_a_model_that_was_never_imported(self):
        llama3 = {"kind": "llama3", "factor": 4, "original_length": 8}
        yarn = {"kind": "yarn", "factor": 4, "original_length": 64}
        for name, norm, eps, changes in (("llama", "rmsnorm", 1e-6, {"rope_scaling": llama3}),
                                         ("olmo", "layernorm", 1e-5, {"rope_scaling": llama3}),
                                         ("mistral", "rmsnorm", 1e-6, {"sliding_window": 5}),
                                         ("qwen2", "rmsnorm", 1e-6, {"qkv_bias": True, "rope_scaling": llama3}),
                                         ("qwen3", "rmsnorm", 1e-6, {"qk_norm": "per_head", "rope_scaling": llama3}),
                                         ("olmo2", "rmsnorm", 1e-6, {"qk_norm": "full", "norm_placement": "after",
                                                                     "rope_scaling": llama3}),
                                         ("olmo3", "rmsnorm", 1e-6, {"qk_norm": "full", "norm_placement": "after",
                                                                     "rope_scaling": yarn,
                                                                     "sliding_window": 5, "full_attention_every": 2}),
                                         ("gemma3_text", "rmsnorm", 1e-6, {
                                             "qk_norm": "per_head", "norm_placement": "both", "norm_unit_offset": True,
                                             "activation": "gelu_tanh", "embedding_scale": "sqrt_d_model", "query_pre_attn_scalar": 5,
                                             "rope_scaling": {"kind": "linear", "factor": 3}, "sliding_window": 5,
                                             "full_attention_every": 2, "local_rope_theta": 100}),
                                         ("olmoe", "rmsnorm", 1e-5, {"qk_norm": "full", "d_ffn": 16, "moe": {
                                             "num_experts": 8, "experts_per_token": 3}}),
                                         ("qwen3_moe", "rmsnorm", 1e-6, {"qk_norm": "per_head", "d_ffn": 16, "head_dim": 12, "moe": {
                                             "num_experts": 8, "experts_per_token": 3, "normalize_weights": True}}),
                                         ("mixtral", "rmsnorm", 1e-5, {"d_ffn": 16, "sliding_window": 5, "moe": {
                                             "num_experts": 4, "experts_per_token": 2, "normalize_weights": True}}),
                                         ("dots1", "rmsnorm", 1e-6, {"qk_norm": "per_head", "d_ffn": 16, "moe": {
                                             "num_experts": 8, "experts_per_token": 3, "score": "sigmoid", "correction_bias": True,
                                             "weight_scaling": 2.5, "groups": 4, "groups_kept": 2, "shared_width": 32,
                                             "dense_layers": 1, "dense_width": 48}}),
                                         ("llama", "rmsnorm", 1e-5, {"rope_scaling": {"kind": "linear", "factor": 3}}),
                                         ("llama", "rmsnorm", 1e-5, {"rope_scaling": yarn})):
            with self.subTest(name=name, changes=changes):
                run = self.path(f"run_{name}_{eps}_{len(str(changes))}")
                config = {"device": {"kind": "cpu"},
                          "model": {"vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 48,
                                    "norm": norm, "norm_eps": eps, "tie_embeddings": norm == "layernorm", **changes},
                          "precision": {"recipe": "fp32"},
                          "data": {"train": [self.path("a.npy")], "eval": [self.path("held_out.npy")], "sequence_length": 16},
                          "training": {"steps": 3, "global_batch_size": 4, "micro_batch_size": 2},
                          "checkpoint": {"folder": run}}
                self.assert_exit(parka("train", self.write_config(config)), 0)
                out = run.replace("run_", "exported_")
                self.assert_exit(parka("export", run, "--out", out), 0)
                with open(f"{out}/config.json", encoding="utf-8") as file:
                    self.assertEqual(json.load(file)["model_type"], name)
                result = parka("eval", run, "--json")
                with open(self.path("held_out.npy"), "rb") as file:
                    tokens = torch.frombuffer(bytearray(file.read()), dtype=torch.int16).long().reshape(-1, 16)
                logits = self.logits(out, tokens)
                loss = torch.nn.functional.cross_entropy(logits[:, :-1].reshape(-1, 64), tokens[:, 1:].reshape(-1))
                self.assertAlmostEqual(loss.item(), json.loads(result.stdout)["loss"], places=5)


if __name__ == "__main__":
    unittest.main()
