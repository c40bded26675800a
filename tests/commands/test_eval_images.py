"""Multiple-choice tasks with pictures: scripts/prepare_eval.py --task image_choice and `parka eval`, with the log-likelihoods that
transformers computes. Exits with 77 (skipped) where a package of the scripts is missing."""
import json
import os
import shutil
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
GEOMETRY = ("--image-size", "14", "--patch-size", "4")
OVERRIDES = ("precision.recipe=fp32", "device.kind=cpu", "training.global_batch_size=12", "data.sequence_length=64")


class ImageTasks(RunFolder):
    def setUp(self):
        super().setUp()
        self.case = json.loads((FIXTURES / "clip_llama.json").read_text())
        shutil.copy(FIXTURES / "photo.png", self.path("photo.png"))
        Image.fromarray(np.full((9, 9, 3), (255, 0, 9), np.uint8)).save(self.path("red.png"))
        choices = [choice.strip() for choice in self.case["choices"]]
        self.documents = [
            {"image": "photo.png", "question": "<image>\nWhat says the cat?", "choices": choices, "answer": "B"},
            {"question": "What says the cat?", "choices": ["Wau!", "Miau!"], "answer": 1},
            {"image": ["photo.png", "red.png"], "question": "And the dog?", "choices": ["Wau!", "Miau!"], "answer": 0},
            {"image": "red.png", "question": "What says the cat?", "choices": choices, "answer": 1}]

    def prepare(self, documents, *arguments, name="clip_llama", tower="clip", out="cat.requests.jsonl", code=0):
        with open(self.path("documents.jsonl"), "w", encoding="utf-8") as file:
            file.writelines(json.dumps(document) + "\n" for document in documents)
        command = [sys.executable, str(ROOT / "scripts/prepare_eval.py"), "--task", "image_choice", "--tower", tower, *GEOMETRY,
                   "--image-folder", self.folder, "--tokenizer", str(FIXTURES / name / "tokenizer.json"), "--prompt",
                   "USER: {question} ASSISTANT:", *arguments, self.path("documents.jsonl"), "--out", self.path(out)]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual(result.returncode, code, result.stderr)
        return result.stderr

    def import_model(self, name="clip_llama"):
        if not os.path.exists(self.path(name)):
            self.assert_exit(parka("import", str(FIXTURES / name), "--out", self.path(name)), 0)
        return self.path(name)

    def eval(self, model, *overrides, tasks="cat.requests.jsonl"):
        sets = [word for one in (*OVERRIDES, *overrides) for word in ("--set", one)]
        if os.path.exists(self.path("predictions.jsonl")):
            os.remove(self.path("predictions.jsonl"))
        return parka("eval", model, "--tasks", self.path(tasks), "--json", "--predictions", self.path("predictions.jsonl"), *sets)

    def predictions(self, *arguments):
        self.assert_exit(self.eval(*arguments), 0)
        with open(self.path("predictions.jsonl"), encoding="utf-8") as file:
            return [json.loads(line)["log_likelihood"] for line in file]

    def assert_near(self, got, want):
        self.assertEqual(len(got), len(want))
        for one, other in zip(got, want):
            self.assertAlmostEqual(one, other, delta=1e-4 * abs(other))

    def test_log_likelihoods_are_those_of_transformers_in_any_batch(self):
        for name, tower in (("clip_llama", "clip"), ("siglip_qwen2", "siglip")):
            with self.subTest(name):
                want = json.loads((FIXTURES / f"{name}.json").read_text())["log_likelihood"]
                self.prepare(self.documents, name=name, tower=tower)
                model = self.import_model(name)
                alone = self.predictions(model, "training.micro_batch_size=1", "data.images_per_sequence=2")
                self.assert_near(alone[0], want)
                together = self.predictions(model, "training.micro_batch_size=3", "data.images_per_sequence=1")
                for one, other in zip(alone, together, strict=True):
                    self.assert_near(one, other)
                self.assertNotAlmostEqual(alone[0][0], alone[3][0], delta=0.1)  # the same words with another picture

    def test_pictures_become_squares_as_the_processor_beside_the_tokenizer_says(self):
        def pixels(name, *arguments):
            self.prepare(self.documents[:1], *arguments, name=name)
            return Path(self.path("cat.requests.jsonl.pixels")).read_bytes()

        clip = FIXTURES / "clip_llama"
        crop, stretch = (pixels(clip, "--geometry", geometry) for geometry in ("crop", "stretch"))
        self.assertNotEqual(crop, stretch)
        self.assertEqual(pixels(clip), crop)
        shutil.copytree(clip, self.path("run"))
        size = {"height": 14, "width": 14}
        Path(self.path("run/preprocessor_config.json")).write_text(json.dumps({"size": size}))
        self.assertEqual(pixels(self.path("run")), stretch)
        self.assertEqual(pixels(self.path("run"), "--geometry", "crop"), crop)

    def test_scores_are_of_the_right_choices(self):
        self.prepare(self.documents[:1])
        result = self.eval(self.import_model(), "training.micro_batch_size=1")
        self.assert_exit(result, 0)
        self.assertEqual(json.loads(result.stdout)["tasks"]["image_choice"]["acc"], 1.0)  # the shortest is the likeliest

    def test_contexts_that_are_cut_lose_rows_of_their_images(self):
        self.prepare([{**self.documents[0], "question": "<image> What says the cat? " * 1, "choices": ["Wau!", "Miau!"]}])
        model = self.import_model()
        whole = self.predictions(model, "training.micro_batch_size=1")
        cut = self.predictions(model, "training.micro_batch_size=1", "data.sequence_length=32")
        self.assertNotEqual(whole, cut)

    def test_what_does_not_fit_is_refused(self):
        self.prepare(self.documents)
        model = self.import_model()
        text = str(ROOT / "tests/fixtures/text/llama3")
        self.assert_exit(parka("import", text, "--out", self.path("text")), 0)
        for of, overrides, says in (
                (model, ("training.micro_batch_size=1", "data.images_per_sequence=1"), "a document has 2 images, and there is room for 1"),
                (self.path("text"), (), "model.vision.tower is none"),
                (model, ("model.vision.image_token=306",), "model.vision.image_token: 305 in the checkpoint")):
            with self.subTest(says):
                result = self.eval(of, *overrides)
                self.assert_exit(result, 2)
                self.assertIn(says, result.stderr)
        requests = Path(self.path("cat.requests.jsonl"))
        first, rest = requests.read_text().split("\n", 1)
        header = json.loads(first)
        header["images"]["token"] = 306
        requests.write_text(json.dumps(header) + "\n" + rest)
        result = self.eval(model, "training.micro_batch_size=1")
        self.assert_exit(result, 2)
        self.assertIn("of id 306", result.stderr)
        del header["images"]  # a task of text alone, whose contexts have slots all the same
        requests.write_text("\n".join([json.dumps(header | {"version": 1}), *(
            json.dumps({key: value for key, value in json.loads(line).items() if key != "images"}) for line in rest.splitlines())]))
        result = self.eval(model)
        self.assert_exit(result, 2)
        self.assertIn("does not have 0 slots of 0 images", result.stderr)
        requests.write_text(first + "\n" + rest)
        pixels = Path(self.path("cat.requests.jsonl.pixels"))
        pixels.write_bytes(pixels.read_bytes()[:-1] + bytes([pixels.read_bytes()[-1] ^ 1]))
        result = self.eval(model, "data.images_per_sequence=2")
        self.assert_exit(result, 2)
        self.assertIn("cat.requests.jsonl.pixels", result.stderr)

    def test_documents_that_do_not_fit_are_refused(self):
        first = self.documents[0]
        for document, says in (({**first, "image": "none.png"}, "none.png: cannot be read"), ({**first, "image": []}, "0 images for 1"),
                               ({**first, "answer": 7}, "number 7 of 3"), ({**first, "choices": ["<image>", "b"]}, "line 1")):
            with self.subTest(says):
                self.assertIn(says, self.prepare([document], code=2))
                self.assertEqual([name for name in os.listdir(self.folder) if "requests" in name], [])
        self.assertIn("--image-token", self.prepare([first], "--image-token", "269", code=2))  # of the text
        self.assertIn("--prompt", self.prepare([first], "--prompt", "What?", code=2))


if __name__ == "__main__":
    unittest.main()
