"""Models with towers that were imported: prompts with pictures, and training on them. Exits with 77 (skipped) where a package of
the Python helpers or of scripts/prepare_images.py is missing."""
import json
import os
import shutil
import struct
import subprocess
import sys
import unittest
from pathlib import Path

try:
    import numpy as np
    import tokenizers  # noqa: F401
    import xxhash  # noqa: F401
    from PIL import Image
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

from parka_runs import RunFolder, parka

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "tests" / "fixtures" / "llava"
PHOTO = str(FIXTURES / "photo.png")
GREEDY = ("--temperature", "0", "--set", "device.kind=cpu", "--set", "precision.recipe=fp32")
ENVIRONMENT = {**os.environ, "PARKA_PYTHON": sys.executable}
NAMES = ("clip_llama", "siglip_qwen2")
IMAGE_TOKEN, SLOTS, LINE_END = 305, 9, 198


def read_tensors(path):
    """The bytes of each tensor of a safetensors file."""
    content = path.read_bytes()
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8:begin])
    return {name: content[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
            for name, entry in header.items() if name != "__metadata__"}


class Imported(RunFolder):
    def import_model(self, name):
        self.assert_exit(parka("import", str(FIXTURES / name), "--out", self.path(name)), 0)
        return self.path(name)

    def generate(self, model, *arguments):
        return parka("generate", model, *arguments, *GREEDY, env=ENVIRONMENT)

    def json_of(self, model, *arguments):
        result = self.generate(model, *arguments, "--json")
        self.assert_exit(result, 0)
        return json.loads(result.stdout)


class Prompts(Imported):
    def test_greedy_tokens_are_those_of_transformers(self):
        for name in NAMES:
            with self.subTest(name):
                case = json.loads((FIXTURES / f"{name}.json").read_text())
                count = str(len(case["tokens"]))
                line = self.json_of(self.import_model(name), "--image", PHOTO, "--prompt", case["prompt"], "--tokens", count)
                self.assertEqual((line["prompt_tokens"], line["tokens"]), (case["ids"], case["tokens"]))

    def test_an_export_answers_as_the_import(self):
        model = self.import_model("siglip_qwen2")
        self.assert_exit(parka("export", model, "--out", self.path("hf")), 0)
        self.assert_exit(parka("import", self.path("hf"), "--out", self.path("again")), 0)
        arguments = ("--image", PHOTO, "--prompt", "Who are you?", "--tokens", "10")
        self.assertEqual(self.json_of(model, *arguments), self.json_of(self.path("again"), *arguments))

    def test_images_stand_in_front_of_a_prompt_that_does_not_place_them(self):
        model = self.import_model("clip_llama")
        line = self.json_of(model, "--image", PHOTO, "--image", PHOTO, "--prompt", "cat", "--tokens", "4")
        image = [IMAGE_TOKEN] * SLOTS + [LINE_END]
        self.assertEqual(line["prompt_tokens"][:1 + 2 * len(image)], [300, *image, *image])
        placed = self.json_of(model, "--image", PHOTO, "--image", PHOTO, "--prompt", "<image>\n<image>\ncat", "--tokens", "4")
        self.assertEqual(placed, line)

    def test_pictures_and_how_they_become_squares_decide(self):
        model = self.import_model("clip_llama")
        Image.fromarray(np.full((20, 50, 3), (250, 0, 40), np.uint8)).save(self.path("red.png"))
        pixels = np.array(Image.open(PHOTO))
        pixels[:, :12] = 0
        Image.fromarray(pixels).save(self.path("dark.png"))

        def tokens(image, *arguments):
            return self.json_of(model, "--image", image, "--prompt", "<image>", "--tokens", "8", *arguments)["tokens"]

        answers = {tuple(tokens(image)) for image in (PHOTO, self.path("red.png"), self.path("dark.png"))}
        self.assertEqual(len(answers), 3)
        self.assertEqual(tokens(PHOTO), tokens(PHOTO, "--geometry", "crop"))  # of its processor
        self.assertNotEqual(tokens(self.path("dark.png")), tokens(self.path("dark.png"), "--geometry", "pad"))

    def test_a_continuation_goes_on_past_the_context(self):
        model = self.import_model("clip_llama")  # of 64 positions
        arguments = ("--image", PHOTO, "--prompt", "A cat <image> and a dog", "--stop-token", "301")
        long = self.json_of(model, *arguments, "--tokens", "70")["tokens"]
        short = self.json_of(model, *arguments, "--tokens", "20")["tokens"]
        self.assertEqual(long[:20], short)
        self.assertGreater(len(long), 60)

    def test_what_does_not_fit_is_refused(self):
        model = self.import_model("clip_llama")
        with open(self.path("cut.png"), "wb") as file:
            file.write(Path(PHOTO).read_bytes()[:100])
        text = ROOT / "tests/fixtures/text/llama3"
        self.assert_exit(parka("import", str(text), "--out", self.path("text")), 0)
        for of, arguments, says in (
                (model, ("--image", self.path("none.png"), "--prompt", "?"), "none.png: cannot be read"),
                (model, ("--image", self.path("cut.png"), "--prompt", "?"), "cut.png: cannot be read"),
                (model, ("--image", PHOTO, "--prompt", "<image> <image>"), "has 2 <image>, and there are 1 --image"),
                (model, ("--image", PHOTO, "--prompt", "a", "--prompt", "b"), "one --prompt"),
                (model, ("--prompt", "What is in <image>?"), "the prompt has <image> and no picture is given; add --image FILE"),
                (model, ("--prompt-tokens", f"1,{IMAGE_TOKEN}"), "is the slot of an image"),
                (self.path("text"), ("--image", PHOTO, "--prompt", "?"), "--image needs a model that sees images")):
            with self.subTest(says):
                result = self.generate(of, *arguments)
                self.assert_exit(result, 2)
                self.assertIn(says, result.stderr)
        for arguments, says in ((("--image", PHOTO), "--prompt"), (("--geometry", "crop", "--prompt", "a"), "--image"),
                                (("--image", PHOTO, "--prompt", "a", "--geometry", "round"), "round")):
            result = self.generate(model, *arguments)
            self.assert_exit(result, 2)
            self.assertIn(says, result.stderr)


class Training(Imported):
    def prepare(self, geometry="crop", out="data"):
        records = [{"id": str(i), "image": "photo.png", "conversations": [
            {"from": "human", "value": "<image>\nWhat says the cat?"}, {"from": "gpt", "value": f"Miau {i}!"}]} for i in range(24)]
        with open(self.path("samples.json"), "w", encoding="utf-8") as file:
            json.dump(records, file)
        options = {"--image-folder": FIXTURES, "--tower": "clip", "--image-size": 14, "--patch-size": 4, "--chat": "vicuna_v1",
                   "--tokenizer": FIXTURES / "clip_llama/tokenizer.json", "--sequence-length": 64, "--max-images": 1,
                   "--geometry": geometry, "--out": self.path(out)}
        command = [sys.executable, str(ROOT / "scripts/prepare_images.py"), self.path("samples.json"),
                   *(str(word) for pair in options.items() for word in pair)]
        prepared = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(prepared.returncode, 0, prepared.stderr)

    def train(self, config, *overrides, data=("data",), out="run"):
        """What it says on the way."""
        files = ", ".join(f'"{self.path(folder)}/train-*.npy"' for folder in data)
        sets = (f"data.train=[{files}]", "data.sequence_length=64", "data.loss_mask=true", "data.documents=separate",
                "training.steps=2", "training.global_batch_size=2",
                "optimizer.schedule.warmup_steps=0", f"checkpoint.folder={self.path(out)}", "device.kind=cpu", "precision.recipe=fp32",
                "optimizer.master=none", *overrides)
        result = parka("train", config, *[word for one in sets for word in ("--set", one)])
        self.assert_exit(result, 0)
        return result.stdout + result.stderr

    def export(self, run, out):
        self.assert_exit(parka("export", self.path(run), "--out", self.path(out), "--dtype", "fp32"), 0)

    def processors(self, folder):
        """preprocessor_config.json and processor_config.json there; None for one that is not."""
        paths = [Path(self.path(folder), name) for name in ("preprocessor_config.json", "processor_config.json")]
        return [json.loads(path.read_text()) if path.exists() else None for path in paths]

    def test_a_run_starts_from_an_import_and_is_exported_with_the_tower_as_far_as_it_is_read(self):
        model = self.import_model("clip_llama")
        self.prepare()
        self.train(f"{model}/config.json")
        self.export("run", "hf")
        before, after = (read_tensors(folder / "model.safetensors") for folder in (FIXTURES / "clip_llama", Path(self.path("hf"))))
        for name in [name for name in before if "encoder.layers.2." in name or "post_layernorm" in name]:  # which no model reads
            before.pop(name)
            after.pop(name, None)
        self.assertEqual(before.keys(), after.keys())
        for name in before:
            with self.subTest(name):
                self.assertEqual(before[name] == after[name], name.startswith("vision_tower."))
        self.assertEqual((FIXTURES / "clip_llama/processor_config.json").read_bytes(),
                         Path(self.path("hf/processor_config.json")).read_bytes())
        result = self.generate(self.path("run"), "--image", PHOTO, "--prompt", "What says the cat?", "--tokens", "4")
        self.assert_exit(result, 0)

    def test_a_run_keeps_the_processor_of_its_pictures(self):
        model = self.import_model("clip_llama")
        self.prepare("pad")
        self.assertNotIn("the pictures of", self.train(f"{model}/config.json"))
        self.export("run", "hf")
        of_model = json.loads((FIXTURES / "clip_llama/processor_config.json").read_text())
        del of_model["image_processor"]  # which transformers would take first
        [of_data, _] = self.processors("data/tokenizer")
        self.assertTrue(of_data["do_pad"])
        for folder in ("run/tokenizer", "hf"):
            self.assertEqual(self.processors(folder), [of_data, of_model])

    def test_each_stage_keeps_the_processor_of_its_own_pictures(self):
        model = self.import_model("clip_llama")
        for geometry in ("pad", "stretch"):
            self.prepare(geometry, out=geometry)
        self.train(f"{model}/config.json", data=["pad"], out="first")
        self.train(f"{model}/config.json", f"checkpoint.init_from={self.path('first')}", data=["stretch"], out="second")
        self.export("second", "hf")
        self.assertEqual(self.processors("hf")[0], self.processors("stretch/tokenizer")[0])

    def test_the_kept_processor_has_the_mean_of_the_run(self):
        shutil.copytree(FIXTURES / "clip_llama", self.path("model"))
        path = Path(self.path("model/processor_config.json"))
        described = json.loads(path.read_text())
        described["image_processor"]["image_mean"] = [0.3, 0.4, 0.6]
        path.write_text(json.dumps(described))
        self.assert_exit(parka("import", self.path("model"), "--out", self.path("imported")), 0)
        self.prepare("stretch")
        self.train(self.path("imported/config.json"))
        self.export("run", "hf")  # which refuses another
        self.assertEqual(self.processors("hf")[0], self.processors("data/tokenizer")[0] | {"image_mean": [0.3, 0.4, 0.6]})

    def test_the_processor_is_that_of_the_first_data_with_pictures(self):
        model = self.import_model("clip_llama")
        self.prepare("pad")
        os.mkdir(self.path("text"))
        np.full(640, 1, np.uint16).tofile(self.path("text/train-0.npy"))
        np.where(np.arange(640) % 64 == 0, 3, 1).astype(np.uint8).tofile(self.path("text/train-0.npy.mask"))  # ten documents
        self.train(f"{model}/config.json", data=["text", "data"])
        self.assertEqual(self.processors("run/tokenizer")[0], self.processors("data/tokenizer")[0])

    def test_the_tokenizer_that_a_config_names_stays_as_it_is(self):
        model, named = self.import_model("clip_llama"), FIXTURES / "clip_llama"
        self.prepare("pad")
        said = self.train(f"{model}/config.json", f"data.tokenizer={named}")
        self.assertIn("made with --geometry pad, and the model's processor says crop", said)
        self.assertEqual(self.processors("run/tokenizer"), self.processors(named))


if __name__ == "__main__":
    unittest.main()
