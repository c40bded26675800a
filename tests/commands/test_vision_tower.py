"""parka import --vision-tower: a language model and a tower become a model that sees images; and models with the original LLaVA's
names, and VILA's. The parts are those of models that transformers wrote. Needs Python alone."""
import array
import json
import os
import shutil
import struct
import unittest
from pathlib import Path

from parka_runs import RunFolder, parka

ROOT = Path(__file__).resolve().parents[2]
LLAVA = ROOT / "tests" / "fixtures" / "llava"
WIDTH, D_MODEL, VOCAB = 24, 32, 312


def read_tensors(path):
    """{name: (dtype, shape, bytes)} of a safetensors file."""
    content = Path(path).read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:begin])
    return {name: (entry["dtype"], entry["shape"], content[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]])
            for name, entry in header.items() if name != "__metadata__"}


def tensors_read(tensors):
    """Without those of the fixtures' towers that no model reads."""
    return {name: tensor for name, tensor in tensors.items()
            if not any(part in name for part in ("encoder.layers.2.", "post_layernorm", "vision_model.head.", "vision_tower.head."))}


def write_tensors(path, tensors):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (dtype, shape, data) in sorted(tensors.items()):
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + len(data)]}
        end += len(data)
    text = json.dumps(header)
    text += " " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text.encode())
        for _, (_, _, data) in sorted(tensors.items()):
            file.write(data)


def floats(tensor):
    dtype, _, data = tensor
    if dtype == "F32":
        return array.array("f", data)
    halves = array.array("H", data)
    return array.array("f", b"".join(struct.pack("<I", half << 16) for half in halves))


class Towers(RunFolder):
    def config_of(self, name):
        return json.loads((LLAVA / name / "config.json").read_text())

    def write(self, folder, config, tensors):
        os.mkdir(self.path(folder))
        with open(self.path(f"{folder}/config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        write_tensors(self.path(f"{folder}/model.safetensors"), tensors)
        return self.path(folder)

    def language_model(self, name="clip_llama"):
        config = self.config_of(name)["text_config"]
        architecture = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[config["model_type"]]
        prefix = "language_model."
        tensors = {key.removeprefix(prefix): value for key, value in read_tensors(LLAVA / name / "model.safetensors").items()
                   if key.startswith(prefix)}
        return self.write(f"text_{name}", {**config, "architectures": [architecture]}, tensors)

    def tower(self, name="clip_llama", prefix="vision_model.", nested=False):
        config = self.config_of(name)["vision_config"]
        tensors = {prefix + key.removeprefix("vision_tower."): value
                   for key, value in read_tensors(LLAVA / name / "model.safetensors").items() if key.startswith("vision_tower.")}
        if nested:  # beside one for text
            config = {"model_type": name.split("_")[0], "vision_config": {**config, "model_type": None}}
            if name.startswith("clip"):  # older CLIP models have it twice, and transformers takes the second
                config |= {"vision_config_dict": config["vision_config"], "vision_config": {**config["vision_config"], "hidden_act": "relu"}}
            tensors["text_model.final_layer_norm.weight"] = tensors["logit_scale"] = ("F32", [1], bytes(4))
        return self.write(f"tower_{name}_{len(os.listdir(self.folder))}", config, tensors)

    def imported(self, name, *arguments):
        result = parka("import", *arguments, "--out", self.path(name))
        self.assert_exit(result, 0)
        return self.path(name)

    def exported(self, model, name):
        self.assert_exit(parka("export", model, "--out", self.path(name)), 0)
        return self.path(name)


class Joined(Towers):
    def test_parts_are_as_they_were_and_the_projector_is_new(self):
        for name in ("clip_llama", "siglip_qwen2"):
            for prefix, nested in (("vision_model.", False), ("", False), ("vision_model.", True)):
                with self.subTest(name, prefix=prefix, nested=nested):
                    own = f"{name}-{len(prefix)}-{nested}"
                    text = self.path(f"text_{name}")
                    text = text if os.path.exists(text) else self.language_model(name)
                    model = self.imported(own, text, "--vision-tower", self.tower(name, prefix, nested), "--image-token", "305")
                    hf = self.exported(model, f"{own}-hf")
                    old, new = read_tensors(LLAVA / name / "model.safetensors"), read_tensors(f"{hf}/model.safetensors")
                    new = {key.replace("vision_tower.vision_model.", "vision_tower."): value for key, value in new.items()}
                    self.assertEqual(tensors_read(old).keys(), tensors_read(new).keys())
                    for key in tensors_read(old):
                        self.assertEqual(old[key] == new[key], not key.startswith("multi_modal_projector."), key)
                    drawn = floats(new["multi_modal_projector.linear_1.weight"])
                    deviation = (sum(x * x for x in drawn) / len(drawn)) ** 0.5
                    self.assertTrue(0.015 < deviation < 0.025, deviation)
                    self.assertEqual(set(floats(new["multi_modal_projector.linear_2.bias"])), {0.0})
                    written = json.loads(Path(f"{hf}/config.json").read_text())
                    for key in ("image_token_index", "model_type", "image_seq_length"):
                        self.assertEqual(written[key], self.config_of(name)[key])

    def test_an_align_stage_starts_from_it(self):
        model = self.imported("joined", self.language_model(), "--vision-tower", self.tower())
        text = "\n".join(Path(f"{model}/config.json").read_text().splitlines()[1:])  # without the comment
        config = json.loads(text)
        self.assertEqual(sorted(config["optimizer"]["frozen"]), ["blocks.*", "embedding", "final_norm", "head", "vision.*"])
        plan = parka("plan", f"{model}/config.json", "--set", 'data.train=["tokens.npy"]', "--set", "device.kind=cpu")
        self.assert_exit(plan, 0)

    def test_the_vocabulary_grows_by_rows_that_are_the_mean_of_the_others(self):
        model = self.imported("joined", self.language_model(), "--vision-tower", self.tower())
        hf = self.exported(model, "hf")
        config = json.loads(Path(f"{hf}/config.json").read_text())
        self.assertEqual((config["image_token_index"], config["text_config"]["vocab_size"]), (VOCAB, 320))
        old, new = read_tensors(LLAVA / "clip_llama/model.safetensors"), read_tensors(f"{hf}/model.safetensors")
        for name in ("language_model.model.embed_tokens.weight", "language_model.lm_head.weight"):
            self.assertEqual(new[name][1], [320, D_MODEL])
            self.assertEqual(new[name][2][: len(old[name][2])], old[name][2])
            before, after = floats(old[name]), floats(new[name])
            for column in range(D_MODEL):
                mean = sum(before[column::D_MODEL]) / VOCAB
                for row in range(VOCAB, 320):
                    self.assertAlmostEqual(after[row * D_MODEL + column], mean, places=6)

    def test_numbers_of_positions_may_be_in_files(self):
        # As older versions of transformers saved them, in 64-bit integers.
        own = self.path("llava")
        shutil.copytree(LLAVA / "clip_llama", own)
        tensors = read_tensors(f"{own}/model.safetensors")
        count = tensors["vision_tower.embeddings.position_embedding.weight"][1][0]
        name = "vision_tower.embeddings.position_ids"
        tensors[name] = ("I64", [1, count], struct.pack(f"<{count}q", *range(count)))
        write_tensors(f"{own}/model.safetensors", tensors)
        model = self.imported("imported", own)
        self.assertNotIn(name, read_tensors(f"{self.exported(model, 'hf')}/model.safetensors"))
        plain = self.imported("plain", str(LLAVA / "clip_llama"))
        self.assertEqual(*(Path(f"{each}/shard_0.safetensors").read_bytes() for each in (model, plain)))
        # The same of a tower beside one for text.
        tower = self.tower("clip_llama", nested=True)
        tensors = read_tensors(f"{tower}/model.safetensors")
        for part in ("vision_model", "text_model"):
            tensors[f"{part}.embeddings.position_ids"] = ("I64", [1, count], struct.pack(f"<{count}q", *range(count)))
        write_tensors(f"{tower}/model.safetensors", tensors)
        self.imported("joined", self.language_model(), "--vision-tower", tower)

    def test_the_tower_s_processor_says_mean_and_deviation(self):
        tower = self.tower()
        with open(f"{tower}/preprocessor_config.json", "w", encoding="utf-8") as file:
            json.dump({"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.25, 0.125], "size": {"shortest_edge": 14}}, file)
        model = self.imported("joined", self.language_model(), "--vision-tower", tower)
        text = "\n".join(Path(f"{model}/config.json").read_text().splitlines()[1:])
        vision = json.loads(text)["model"]["vision"]
        self.assertEqual((vision["pixel_mean"], vision["pixel_deviation"]), ([0.1, 0.2, 0.3], [0.5, 0.25, 0.125]))
        self.assertTrue(os.path.exists(f"{model}/huggingface/preprocessor_config.json"))

    def test_what_does_not_fit_is_refused(self):
        text, tower = self.language_model(), self.tower()
        for arguments, says in (
                ((text, "--vision-tower", text), 'model_type "llama" is not supported as a tower'),
                ((str(LLAVA / "clip_llama"), "--vision-tower", tower), "leave out --vision-tower"),
                ((str(ROOT / "tests/fixtures/huggingface/olmo2_gqa"), "--vision-tower", tower), "llama and qwen2 are"),
                ((text, "--vision-tower", self.path("none")), "none"),
                ((text, "--image-token", "5"), "--vision-tower"),
                ((text, "--vision-tower", tower, "--image-token", "-1"), "--image-token")):
            with self.subTest(says):
                result = parka("import", *arguments, "--out", self.path("out"))
                self.assert_exit(result, 2)
                self.assertIn(says, result.stderr)
                self.assertFalse(os.path.exists(self.path("out")))


class Original(Towers):
    def folder_of(self, with_tower, **changes):
        """The fixture's model as the original LLaVA writes it."""
        config = {**self.config_of("clip_llama")["text_config"], "model_type": "llava_llama", "architectures": ["LlavaLlamaForCausalLM"],
                  "mm_vision_tower": "somewhere/clip", "mm_projector_type": "mlp2x_gelu", "mm_hidden_size": WIDTH,
                  "mm_vision_select_layer": -2, "mm_vision_select_feature": "patch", "mm_use_im_start_end": False,
                  "image_aspect_ratio": "pad", **changes}
        tensors = {}
        for name, value in read_tensors(LLAVA / "clip_llama/model.safetensors").items():
            for theirs, original in (("language_model.", ""), ("multi_modal_projector.linear_1", "model.mm_projector.0"),
                                     ("multi_modal_projector.linear_2", "model.mm_projector.2"),
                                     ("vision_tower.", "model.vision_tower.vision_tower.vision_model.")):
                if name.startswith(theirs) and (with_tower or theirs != "vision_tower."):
                    tensors[original + name.removeprefix(theirs)] = value
        return self.write(f"original_{len(os.listdir(self.folder))}", config, tensors)

    def test_it_is_the_model_of_transformers_names(self):
        for with_tower in (False, True):
            with self.subTest(with_tower=with_tower):
                arguments = (self.folder_of(with_tower), "--vision-tower", self.tower(), "--image-token", "305")
                model = self.imported(f"imported_{with_tower}", *arguments)
                hf = self.exported(model, f"hf_{with_tower}")
                new = {key.replace("vision_tower.vision_model.", "vision_tower."): value
                       for key, value in read_tensors(f"{hf}/model.safetensors").items()}
                self.assertEqual(tensors_read(new), tensors_read(read_tensors(LLAVA / "clip_llama/model.safetensors")))

    def test_pictures_are_padded_where_the_original_says_so(self):
        for ratio, given in (("pad", False), ("pad", True), ("square", True)):
            with self.subTest(ratio=ratio, given=given):
                tower = self.tower()
                if given:
                    own = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 30, "do_center_crop": True, "image_std": [0.5, 0.5, 0.5]}
                    Path(tower, "preprocessor_config.json").write_text(json.dumps(own))
                model = self.imported(f"{ratio}_{given}", self.folder_of(True, image_aspect_ratio=ratio), "--vision-tower", tower)
                written = json.loads(Path(model, "huggingface/preprocessor_config.json").read_text())
                if ratio == "square":
                    self.assertEqual(written, own)
                else:
                    size = self.config_of("clip_llama")["vision_config"]["image_size"]
                    self.assertEqual((written["do_pad"], written["image_processor_type"], written["size"]),
                                     (True, "LlavaImageProcessor", {"shortest_edge": size}))
                    if given:
                        self.assertEqual(written["image_std"], own["image_std"])
                    self.assertNotIn("feature_extractor_type", written)

    def test_what_is_not_supported_is_refused_by_name(self):
        tower = self.tower()
        result = parka("import", self.folder_of(False), "--out", self.path("out"))
        self.assert_exit(result, 2)
        self.assertIn("--vision-tower", result.stderr)
        for key, value in (("mm_projector_type", "linear"), ("mm_projector_type", None), ("mm_use_im_start_end", True),
                           ("mm_vision_select_layer", "last"), ("mm_vision_select_feature", "mean"),
                           ("mm_patch_merge_type", "spatial_unpad"), ("image_aspect_ratio", "anyres")):
            with self.subTest(key):
                result = parka("import", self.folder_of(False, **{key: value}), "--vision-tower", tower, "--out", self.path("out"))
                self.assert_exit(result, 2)
                self.assertIn(key, result.stderr)


class Vila(Towers):
    def numbers(self, *shape, first):
        count = 1
        for size in shape:
            count *= size
        return "F32", list(shape), array.array("f", (((first + 7 * i) % 97) / 97 - 0.5 for i in range(count))).tobytes()

    def folder_of(self, projector="mlp_downsample", **changes):
        os.mkdir(self.path("vila"))
        width = 4 * WIDTH
        tensors = {"layers.1.weight": self.numbers(width, first=1), "layers.1.bias": self.numbers(width, first=2),
                   "layers.2.weight": self.numbers(D_MODEL, width, first=3), "layers.2.bias": self.numbers(D_MODEL, first=4),
                   "layers.4.weight": self.numbers(D_MODEL, D_MODEL, first=5), "layers.4.bias": self.numbers(D_MODEL, first=6)}
        self.write("vila/mm_projector", {"model_type": "v2l_projector", "mm_projector_type": projector}, tensors)
        os.rename(self.language_model("siglip_qwen2"), self.path("vila/llm"))
        os.rename(self.tower("siglip_qwen2"), self.path("vila/vision_tower"))
        config = {"model_type": "llava_llama", "architectures": ["LlavaLlamaModel"], "mm_vision_select_layer": -2,
                  "mm_vision_select_feature": "cls_patch", "mm_use_im_start_end": False, "s2": False, **changes}
        with open(self.path("vila/config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        return self.path("vila"), tensors

    def test_its_three_folders_are_one_model(self):
        folder, projector = self.folder_of()
        model = self.imported("imported", folder, "--image-token", "305")
        stored = read_tensors(f"{model}/shard_0.safetensors")
        for name, theirs in (("norm", "layers.1"), ("fc1", "layers.2"), ("fc2", "layers.4")):
            for suffix, part in (("", "weight"), ("_bias", "bias")):
                self.assertEqual(stored[f"projector.{name}{suffix}"][2], projector[f"{theirs}.{part}"][2])
        old = read_tensors(LLAVA / "siglip_qwen2/model.safetensors")
        self.assertEqual(stored["embedding"][2], old["language_model.model.embed_tokens.weight"][2])
        self.assertEqual(stored["vision.blocks.1.fc1"][2], old["vision_tower.encoder.layers.1.mlp.fc1.weight"][2])
        text = "\n".join(Path(f"{model}/config.json").read_text().splitlines()[1:])
        vision = json.loads(text)["model"]["vision"]
        self.assertEqual((vision["projector"], vision["column_major"], vision["image_token"]), ("mlp_downsample", True, 305))
        answer = parka("generate", model, "--prompt-tokens", "1,2,3", "--tokens", "2", "--set", "device.kind=cpu")
        self.assert_exit(answer, 0)

    def test_its_three_folders_come_back(self):
        folder, _ = self.folder_of()
        with open(f"{folder}/llm/tokenizer_config.json", "w", encoding="utf-8") as file:
            file.write("{}")
        model = self.imported("imported", folder, "--image-token", "305")
        exported = self.exported(model, "exported")
        for part in ("llm", "vision_tower", "mm_projector"):
            with self.subTest(part):
                new, old = (tensors_read(read_tensors(f"{each}/{part}/model.safetensors")) for each in (exported, folder))
                self.assertEqual(new.keys(), old.keys())
                self.assertEqual([name for name in old if new[name] != old[name]], [])
        self.assertTrue(os.path.exists(f"{exported}/llm/tokenizer_config.json"))
        new, old = (json.loads(Path(f"{each}/config.json").read_text()) for each in (exported, folder))
        self.assertEqual(new, {**old, "mm_vision_select_layer": -1})
        again = self.imported("again", exported, "--image-token", "305")
        again_bytes, bytes_before = (Path(f"{each}/shard_0.safetensors").read_bytes() for each in (again, model))
        self.assertTrue(again_bytes == bytes_before)
        half = parka("export", model, "--dtype", "fp16", "--out", self.path("half"))
        self.assert_exit(half, 0)
        for part in ("llm", "vision_tower", "mm_projector"):
            self.assertEqual({dtype for dtype, _, _ in read_tensors(self.path(f"half/{part}/model.safetensors")).values()}, {"F16"})

    def test_the_longest_sequence_is_that_of_the_model_or_of_a_longer_run(self):
        folder, _ = self.folder_of()
        model = self.imported("imported", folder, "--image-token", "305")

        def train(name, length, init_from):
            sets = {"data.train": f'["{self.path("a.npy")}"]', "data.sequence_length": length, "training.steps": 1,
                    "training.global_batch_size": 1, "optimizer.schedule.warmup_steps": 0, "checkpoint.folder": self.path(name),
                    "checkpoint.init_from": init_from, "device.kind": "cpu"}
            words = [word for key, value in sets.items() for word in ("--set", f"{key}={value}")]
            self.assert_exit(parka("train", f"{model}/config.json", *words), 0)

        def positions(name):
            exported = self.exported(self.path(name), f"{name}_exported")
            self.assertFalse(os.path.exists(f"{exported}/llm/max_positions.json"))
            return json.loads(Path(f"{exported}/llm/config.json").read_text())["max_position_embeddings"]

        train("shorter", 32, model)
        train("longer", 128, model)
        train("second", 48, self.path("shorter"))
        self.assertEqual([positions(name) for name in ("imported", "shorter", "longer", "second")], [64, 64, 128, 64])
        # A run keeps it, too.
        os.rename(model, self.path("gone"))
        shutil.rmtree(self.path("second_exported"))
        self.assertEqual(positions("second"), 64)

    def test_what_is_not_supported_is_refused_by_name(self):
        folder, _ = self.folder_of(projector="mlp_downsample_3x3_fix")
        self.assertIn("mlp_downsample_3x3_fix", self.refusal(folder))
        with open(f"{folder}/mm_projector/config.json", "w", encoding="utf-8") as file:
            json.dump({"mm_projector_type": "mlp_downsample"}, file)
        self.assertIn("--vision-tower", self.refusal(folder, "--vision-tower", folder))
        for key, value in (("s2", True), ("dynamic_s2", True), ("mm_use_im_start_end", True), ("mm_vision_select_feature", "patch")):
            with self.subTest(key):
                config = json.loads(Path(f"{folder}/config.json").read_text())
                Path(f"{folder}/config.json").write_text(json.dumps({**config, key: value}))
                self.assertIn(key, self.refusal(folder))
                Path(f"{folder}/config.json").write_text(json.dumps(config))

    def refusal(self, *arguments):
        result = parka("import", *arguments, "--out", self.path("out"))
        self.assert_exit(result, 2)
        return result.stderr


if __name__ == "__main__":
    unittest.main()
