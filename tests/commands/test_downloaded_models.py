"""parka import of folders as other tools leave them: pointers of Git LFS in place of files, a shared matrix under its other name,
sizes that are written as floats, folders that lie one level off, values that no trained model has."""
import json
import os
import shutil
import struct
import unittest

from parka_runs import RunFolder, parka, tree_digest
from refusals import FETCH_IT, LFS_POINTER, assert_ended_well, assert_refused
from test_vision_tower import read_tensors, write_tensors

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


class Downloaded(RunFolder):
    def use(self, name, folder="model"):
        """A copy of a fixture, in place of an earlier one."""
        path = self.path(folder)
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(os.path.join(FIXTURES, name), path)
        return path

    def import_model(self, *arguments, out="imported"):
        shutil.rmtree(self.path(out), ignore_errors=True)
        return parka("import", *arguments, "--out", self.path(out))

    def imported(self, *arguments):
        """Of an import that must succeed, its weights and its config, without what came with the model and the names that it had there."""
        result = self.import_model(*arguments)
        assert_ended_well(self, result)
        return tree_digest(self.path("imported"), lambda name: not name.startswith(("huggingface", "manifest")))

    def refuse(self, *words, arguments):
        line = assert_refused(self, self.import_model(*arguments), *words)
        self.assertFalse(os.path.exists(self.path("imported")), line)
        return line


def put(path, content):
    with open(path, "wb") as file:
        file.write(content)


class Pointers(Downloaded):
    def test_in_place_of_weights(self):
        for fixture, name in (("huggingface/llama_tied", "model.safetensors"), ("huggingface/qwen2_tied", "model-00003-of-00007.safetensors"),
                              ("huggingface/qwen2_tied", "model-00001-of-00007.safetensors"), ("llava/clip_llama", "model.safetensors")):
            model = self.use(fixture)
            put(f"{model}/{name}", LFS_POINTER)
            with self.subTest(fixture, name=name):
                self.refuse(name, FETCH_IT, arguments=[model])

    def test_in_place_of_json(self):
        for fixture, name in (("huggingface/llama_tied", "config.json"), ("huggingface/qwen2_tied", "model.safetensors.index.json"),
                              ("llava/clip_llama", "tokenizer.json"), ("huggingface/olmo_tied", "tokenizer.json")):
            model = self.use(fixture)
            put(f"{model}/{name}", LFS_POINTER)
            with self.subTest(fixture, name=name):
                self.refuse(name, FETCH_IT, arguments=[model])

    def test_in_place_of_adapters(self):
        base = self.use("huggingface/llama_mha")
        assert_ended_well(self, self.import_model(base, out="base"))
        for name in ("adapter_model.safetensors", "adapter_config.json"):
            adapters = self.use("peft", "adapters")
            put(f"{adapters}/{name}", LFS_POINTER)
            with self.subTest(name):
                self.refuse(name, FETCH_IT, arguments=[adapters, "--base", self.path("base")])

    def test_in_place_of_a_tower(self):
        model = self.use("huggingface/llama_mha")
        tower = self.path("tower")
        os.mkdir(tower)
        with open(os.path.join(FIXTURES, "llava/clip_llama/config.json"), encoding="utf-8") as file:
            vision = json.load(file)["vision_config"]
        put(f"{tower}/config.json", json.dumps(vision).encode())
        put(f"{tower}/model.safetensors", LFS_POINTER)
        self.refuse("tower/model.safetensors", FETCH_IT, arguments=[model, "--vision-tower", tower])


class OtherName(Downloaded):
    """Of a matrix that is both embedding and head a file has one name."""

    def rename(self, model, metadata=None, prefix=""):
        """In whatever file of the folder it is; in the index, too."""
        for name in os.listdir(model):
            path = f"{model}/{name}"
            if name.endswith(".safetensors") and prefix + EMBEDDING in (tensors := read_tensors(path)):
                tensors[prefix + HEAD] = tensors.pop(prefix + EMBEDDING)
                write_tensors(path, tensors)
                if metadata:
                    self.add_metadata(path, metadata)
            elif name == "model.safetensors.index.json":
                with open(path, encoding="utf-8") as file:
                    index = json.load(file)
                index["weight_map"][prefix + HEAD] = index["weight_map"].pop(prefix + EMBEDDING)
                put(path, json.dumps(index).encode())

    def add_metadata(self, path, metadata):
        with open(path, "rb") as file:
            content = file.read()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8:8 + length])
        header["__metadata__"] |= metadata
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        put(path, len(text).to_bytes(8, "little") + text + content[8 + length:])

    def assert_exported(self, model, want):
        """With the embedding under either name, and every other tensor as it was."""
        shutil.rmtree(self.path("exported"), ignore_errors=True)
        assert_ended_well(self, parka("export", self.path("imported"), "--out", self.path("exported")))
        found = {}
        for name in os.listdir(self.path("exported")):
            if name.endswith(".safetensors"):
                found |= read_tensors(self.path(f"exported/{name}"))
        one_name = {name.replace(HEAD, EMBEDDING): tensor for name, tensor in found.items()}
        self.assertEqual(one_name, want)

    def test_the_head_is_taken_for_the_embedding(self):
        named_in_metadata = {EMBEDDING: HEAD}  # as save_model of safetensors.torch says it
        for fixture, metadata in (("llama_tied", named_in_metadata), ("llama_tied", None), ("olmo_tied", None), ("qwen3_tied", named_in_metadata),
                                  ("gemma3_windows", None), ("qwen2_tied", None), ("qwen2_tied", named_in_metadata)):
            with self.subTest(fixture, metadata=metadata):
                model = self.use(f"huggingface/{fixture}")
                tensors = {}
                for name in os.listdir(model):
                    tensors |= read_tensors(f"{model}/{name}") if name.endswith(".safetensors") else {}
                want = self.imported(model)
                self.rename(model, metadata)
                self.assertEqual(self.imported(model), want)
                self.assert_exported(model, tensors)

    def test_of_a_model_that_sees_images(self):
        model = self.use("llava/siglip_qwen2")
        want = self.imported(model)
        self.rename(model, prefix="language_model.")
        self.assertEqual(self.imported(model), want)

    def test_of_a_language_model_that_is_given_a_tower(self):
        prefix = "language_model."
        tensors = read_tensors(os.path.join(FIXTURES, "llava/siglip_qwen2/model.safetensors"))
        with open(os.path.join(FIXTURES, "llava/siglip_qwen2/config.json"), encoding="utf-8") as file:
            config = json.load(file)
        parts = {"model": ({**config["text_config"], "architectures": ["Qwen2ForCausalLM"]}, prefix, ""),
                 "tower": (config["vision_config"], "vision_tower.", "vision_model.")}
        for folder, (own, begin, instead) in parts.items():
            os.mkdir(self.path(folder))
            put(self.path(f"{folder}/config.json"), json.dumps(own).encode())
            write_tensors(self.path(f"{folder}/model.safetensors"),
                          {instead + name.removeprefix(begin): value for name, value in tensors.items() if name.startswith(begin)})
        arguments = (self.path("model"), "--vision-tower", self.path("tower"))
        want = self.imported(*arguments)
        self.rename(self.path("model"))
        self.assertEqual(self.imported(*arguments), want)

    def test_a_head_that_is_not_tied_is_no_embedding(self):
        model = self.use("huggingface/llama_mha")
        tensors = read_tensors(f"{model}/model.safetensors")
        del tensors[EMBEDDING]
        write_tensors(f"{model}/model.safetensors", tensors)
        self.refuse(EMBEDDING, arguments=[model])


class Floats(Downloaded):
    """Whole numbers with a point, as arithmetic of other tools leaves them."""

    def edit(self, model, change):
        path = f"{model}/config.json"
        with open(path, encoding="utf-8") as file:
            config = json.load(file)
        change(config)
        put(path, json.dumps(config).encode())

    def assert_taken(self, fixture, change):
        model = self.use(fixture)
        want = self.imported(model)
        self.edit(model, change)
        self.assertEqual(self.imported(model), want)

    def test_the_original_length_of_scaled_angles(self):
        def as_float(config):
            rope = config.get("rope_parameters") or config["rope_scaling"]
            rope["original_max_position_embeddings"] = float(rope["original_max_position_embeddings"])

        for fixture in ("llama_yarn", "llama3_gqa"):
            with self.subTest(fixture):
                self.assert_taken(f"huggingface/{fixture}", as_float)

    def test_every_size_and_length(self):
        sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
                 "max_position_embeddings", "sliding_window", "vocab_size")

        def change(*keys):
            return lambda config: config.update({key: float(config[key]) for key in keys if config.get(key) is not None})

        for key in sizes:
            with self.subTest(key):
                self.assert_taken("huggingface/mistral_window", change(key))
        for fixture in ("llama_tied", "qwen3_tied", "olmo2_gqa", "olmo3_windows", "gemma3_windows"):
            with self.subTest(fixture):
                self.assert_taken(f"huggingface/{fixture}", change(*sizes))

    def test_of_a_tower_and_its_language_model(self):
        def change(config):
            for part, keys in (("text_config", ("hidden_size", "intermediate_size", "max_position_embeddings")),
                               ("vision_config", ("hidden_size", "image_size", "patch_size", "intermediate_size"))):
                config[part].update({key: float(config[part][key]) for key in keys})

        self.assert_taken("llava/clip_llama", change)

    def test_what_is_no_whole_number_is_shown_as_it_is_written(self):
        for key, value, written in (("max_position_embeddings", 64.5, "64.5"), ("intermediate_size", 0.0, "0.0"), ("hidden_size", -32.0, "-32.0"),
                                    ("num_hidden_layers", 1e300, "e+300"), ("vocab_size", "59", "59")):
            model = self.use("huggingface/llama_yarn")
            self.edit(model, lambda config: config.update({key: value}))
            with self.subTest(key, value=value):
                self.refuse("config.json", key, written, arguments=[model])


class Values(Downloaded):
    """Files of the right form, whose values are not those of a model. All tensors are in one file, in fp32."""
    QUERY, UP, DOWN = (f"model.layers.1.{name}.weight" for name in ("self_attn.q_proj", "mlp.up_proj", "mlp.down_proj"))

    def setUp(self):
        super().setUp()
        self.model = self.use("huggingface/llama_mha")
        self.file = f"{self.model}/model.safetensors"

    def change(self, name, change):
        tensors = read_tensors(self.file)
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, change(data)
        write_tensors(self.file, tensors)

    def test_not_finite(self):
        for name in (self.QUERY, EMBEDDING, "model.norm.weight"):
            for bits in (b"\0\0\xc0\x7f", b"\0\0\x80\xff"):  # NaN, and less than everything
                self.model = self.use("huggingface/llama_mha")
                self.change(name, lambda data, bits=bits: data[:8] + bits + data[12:])
                with self.subTest(name, bits=bits):
                    self.refuse("model.safetensors", name, arguments=[self.model])

    def write_as(self, stored, said):
        """All tensors in the numbers of one dtype, with a header that says another."""
        tensors = {}
        for name, (_, shape, data) in read_tensors(self.file).items():
            if stored == "BF16":
                data = b"".join(data[i + 2:i + 4] for i in range(0, len(data), 4))
            elif stored == "F16":
                count = len(data) // 4
                data = struct.pack(f"<{count}e", *struct.unpack(f"<{count}f", data))
            tensors[name] = said, shape, data
        write_tensors(self.file, tensors)

    def test_numbers_of_another_dtype_than_the_header_says(self):
        for stored, said in (("BF16", "F16"), ("F16", "BF16"), ("BF16", "BF16"), ("F16", "F16")):
            self.model = self.use("huggingface/llama_mha")
            self.write_as(stored, said)
            with self.subTest(stored=stored, said=said):
                if stored == said:
                    assert_ended_well(self, self.import_model(self.model))
                else:
                    self.refuse("model.safetensors", ".weight", "dtype", arguments=[self.model])

    def test_values_that_are_too_large(self):
        for name in (self.QUERY, self.DOWN, EMBEDDING, "lm_head.weight", "model.norm.weight"):
            for value in (3e7, -1e30, 3e38):
                self.model = self.use("huggingface/llama_mha")
                self.change(name, lambda data, value=value: data[:-8] + struct.pack("<f", value) + data[-4:])
                with self.subTest(name, value=value):
                    self.refuse("model.safetensors", name, arguments=[self.model])

    def edit_config(self, change):
        with open(f"{self.model}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        change(config)
        put(f"{self.model}/config.json", json.dumps(config).encode())

    def test_what_a_config_does_not_say_is_told(self):
        keys = ("rms_norm_eps", "rope_theta")
        for left_out in ((), *((key,) for key in keys), keys):
            self.model = self.use("huggingface/llama_mha")
            angles = ("rope_theta", "rope_parameters") if "rope_theta" in left_out else ()
            self.edit_config(lambda config: [config.pop(key, None) for key in (*left_out, *angles)])
            result = self.import_model(self.model)
            with self.subTest(left_out=left_out):
                assert_ended_well(self, result)
                self.assertEqual(tuple(key for key in keys if key in result.stderr), left_out, result.stderr)

    def test_a_tokenizer_with_more_ids_than_the_model_has_rows(self):
        sizes = []
        self.edit_config(lambda config: sizes.append(config["vocab_size"]))
        rows = sizes[0]
        for tokenizer, last in (({"model": {"vocab": {"a": 0, "<last>": rows}}}, "<last>"), ({"model": {"vocab": {"a": 0, "<last>": rows - 1}}}, None),
                                ({"model": {"vocab": {"a": 0}}, "added_tokens": [{"id": rows + 7, "content": "<tool>"}]}, "<tool>"),
                                ({"model": {"vocab": [["a", -1.5]] * rows + [["<end>", 0.0]]}}, "<end>"), ({"model": {"vocab": [["a", -1.5]] * rows}}, None)):
            put(f"{self.model}/tokenizer.json", json.dumps(tokenizer).encode())
            result = self.import_model(self.model)
            assert_ended_well(self, result)
            self.assertEqual(last is not None and last in result.stderr and "tokenizer" in result.stderr, last is not None, result.stderr)

    def test_a_tensor_of_zeros(self):
        for name in (self.QUERY, self.UP, EMBEDDING, "lm_head.weight", "model.norm.weight"):
            self.model = self.use("huggingface/llama_mha")
            self.change(name, lambda data: bytes(len(data)))
            with self.subTest(name):
                self.refuse("model.safetensors", name, arguments=[self.model])

    def test_holes(self):
        with open(self.file, "rb") as file:
            content = file.read()
        page, size = 4096, len(content)
        for begin, end in ((2 * page, 3 * page), (10 * page, 11 * page), (8 * page, 16 * page), (size - page, size), (size - 30001, size), (30001, 70001)):
            put(self.file, content[:begin] + bytes(end - begin) + content[end:])
            with self.subTest(begin=begin, end=end):
                self.refuse("model.safetensors", "download", arguments=[self.model])

    def test_zeros_that_padding_and_new_blocks_have(self):
        """Rows of a vocabulary without a word; of others a line warns."""
        for name, change, warns in ((EMBEDDING, lambda data: data[:-5120] + bytes(5120), False), (self.DOWN, lambda data: bytes(len(data)), True),
                                    (self.UP, lambda data: data[:4096] + bytes(4096), True)):
            self.model = self.use("huggingface/llama_mha")
            self.change(name, change)
            with self.subTest(name):
                result = self.import_model(self.model)
                assert_ended_well(self, result)
                self.assertEqual(name in result.stderr, warns, result.stderr)

    def test_an_adapter_that_could_not_train(self):
        assert_ended_well(self, self.import_model(self.model, out="base"))
        adapters = self.use("peft", "adapters")
        self.file = f"{adapters}/adapter_model.safetensors"
        name = next(name for name in read_tensors(self.file) if "lora_A" in name)
        self.change(name, lambda data: bytes(len(data)))
        self.refuse(name, arguments=[adapters, "--base", self.path("base")])
        adapters = self.use("peft", "adapters")
        self.change(name.replace("lora_A", "lora_B"), lambda data: bytes(len(data)))
        assert_ended_well(self, self.import_model(adapters, "--base", self.path("base")))

    def test_a_file_that_was_cut(self):
        size = os.path.getsize(self.file)
        for left in (size - 1, size // 2):
            os.truncate(self.file, left)
            with self.subTest(left=left):
                self.refuse("model.safetensors", str(left), str(size), arguments=[self.model])

    def test_prefixes_of_wrappers(self):
        tensors = read_tensors(self.file)
        for prefix in ("_orig_mod.", "module.", "model.", "module._orig_mod."):
            write_tensors(self.file, {prefix + name: tensor for name, tensor in tensors.items()})
            with self.subTest(prefix):
                self.refuse(f'"{prefix}"', EMBEDDING, arguments=[self.model])
        write_tensors(self.file, {name.replace("layers.0.", "layers.0._orig_mod."): tensor for name, tensor in tensors.items()})
        self.refuse('"_orig_mod."', arguments=[self.model])

    def test_an_end_token_that_the_model_lacks(self):
        sizes = []
        self.edit_config(lambda config: sizes.append(config["vocab_size"]))
        vocab = sizes[0]
        for key in ("eos_token_id", "bos_token_id"):
            for ids, is_told in ((vocab + 9, True), (vocab, True), ([1, vocab], True), ([1, vocab - 1], False), (None, False)):
                with self.subTest(key, ids=ids):
                    self.edit_config(lambda config: config.update({"eos_token_id": 2, "bos_token_id": 1, key: ids}))
                    result = self.import_model(self.model)
                    assert_ended_well(self, result)
                    self.assertEqual(key in result.stderr, is_told, result.stderr)

    def test_an_end_token_that_the_tokenizer_lacks(self):
        def tokens(config, tokenizer):
            put(f"{self.model}/tokenizer_config.json", json.dumps(config).encode())
            put(f"{self.model}/tokenizer.json", json.dumps(tokenizer).encode())
            result = self.import_model(self.model)
            assert_ended_well(self, result)
            return "eos_token" in result.stderr

        tokenizer = {"added_tokens": [{"id": 3, "content": "<\u2581end>"}], "model": {"vocab": {"a": 0}}}
        self.assertFalse(tokens({"eos_token": "<\u2581end>"}, tokenizer))
        self.assertFalse(tokens({"eos_token": {"content": "a"}}, tokenizer))
        self.assertFalse(tokens({"eos_token": None}, tokenizer))
        self.assertFalse(tokens({"eos_token": "<new>", "added_tokens_decoder": {"4": {"content": "<new>"}}}, tokenizer))
        self.assertTrue(tokens({"eos_token": "<other>"}, tokenizer))
        self.assertTrue(tokens({"eos_token": {"content": "<other>"}}, tokenizer))


class OneLevelOff(Downloaded):
    def test_adapters_in_the_form_of_pickle(self):
        assert_ended_well(self, self.import_model(self.use("huggingface/llama_mha"), out="base"))
        adapters = self.use("peft", "adapters")
        os.rename(f"{adapters}/adapter_model.safetensors", f"{adapters}/adapter_model.bin")
        self.refuse("adapter_model.bin", "safetensors", arguments=[adapters, "--base", self.path("base")])

    def cached(self, name, model):
        """A folder as the hub's cache has it, and the snapshot in it, where the files of `model` are."""
        cache = self.path(f"models--org--{name}")
        snapshot = f"{cache}/snapshots/0123456789abcdef0123456789abcdef01234567"
        for folder in ("snapshots", "blobs", "refs"):
            os.makedirs(f"{cache}/{folder}")
        put(f"{cache}/refs/main", os.path.basename(snapshot).encode())
        shutil.copytree(model, snapshot)
        return cache, snapshot

    def test_the_folder_of_the_hubs_cache(self):
        """It is read where one snapshot alone can be meant, or else the message says where to look."""
        model = self.use("huggingface/llama_mha")
        assert_ended_well(self, self.import_model(model, out="base"))
        tower = self.path("tower")
        os.mkdir(tower)
        tensors = read_tensors(os.path.join(FIXTURES, "llava/clip_llama/model.safetensors"))
        with open(os.path.join(FIXTURES, "llava/clip_llama/config.json"), encoding="utf-8") as file:
            put(f"{tower}/config.json", json.dumps(json.load(file)["vision_config"]).encode())
        write_tensors(f"{tower}/model.safetensors", {"vision_model." + name.removeprefix("vision_tower."): value
                                                     for name, value in tensors.items() if name.startswith("vision_tower.")})
        for name, given, before, behind in (("model", model, (), ()), ("adapters", os.path.join(FIXTURES, "peft"), (), ("--base", self.path("base"))),
                                            ("tower", tower, (model, "--vision-tower"), ())):
            with self.subTest(name):
                cache, snapshot = self.cached(name, given)
                want = self.imported(*before, snapshot, *behind)
                result = self.import_model(*before, cache, *behind)
                if result.returncode == 0:
                    self.assertEqual(self.imported(*before, cache, *behind), want)
                else:
                    assert_refused(self, result, cache, "snapshots")
        cache = self.path("models--org--model")
        assert_ended_well(self, parka("export", self.path("base"), "--like", cache, "--out", self.path("exported")))
        assert_refused(self, parka("eval", cache), f"parka import {cache}")


if __name__ == "__main__":
    unittest.main()
