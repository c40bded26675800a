"""Configs from wishes: `parka config new`, several configs of one run, --data, shares of steps, `parka import --finetune`."""
import json
import os
import subprocess
import tempfile
import unittest
from pathlib import Path

from parka_runs import PROGRAM

ROOT = Path(__file__).resolve().parents[2]
TINY = {"d_model": 64, "num_layers": 2, "num_heads": 2, "d_ffn": 128, "norm": "rmsnorm"}


class Folder(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="parka-test-")))

    def parka(self, *arguments, code=0):
        result = subprocess.run([os.path.abspath(PROGRAM), *map(str, arguments)], capture_output=True, text=True, cwd=self.folder, timeout=300)
        self.assertEqual(result.returncode, code, result.stderr)
        if code != 0:
            self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        return result.stderr if code != 0 else result.stdout

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
        return path

    def resolved(self, *arguments):
        return json.loads(self.parka("config", "show", *arguments))

    def prepared(self, *options):
        for number in range(60):
            self.write(f"texts/{number}.txt", f"Text {number}. " * (20 + number))
        self.parka("prepare", "texts", "--tokenizer", "bytes", "--eval-fraction", "0.2", "--out", "data", *options)
        return json.loads((self.folder / "data/data.json").read_text(encoding="utf-8"))


class NewConfig(Folder):
    def new(self, *arguments, code=0):
        return self.parka("config", "new", *arguments, code=code)

    def test_each_model_has_a_config_that_fits(self):
        for model, least, most in (("150m", 1e8, 2e8), ("350m", 3e8, 4e8), ("1b", 1e9, 1.4e9), ("moe", 3e8, 6e8), ("olmoe", 6e9, 8e9)):
            for optimizer in ("adamw", "muon"):
                with self.subTest(model, optimizer=optimizer):
                    out = f"{model}-{optimizer}.json"
                    printed = self.new("--model", model, "--tokens", "10e9", "--gpu", "h200", "--optimizer", optimizer, "--out", out)
                    config = self.resolved(out)
                    training, length = config["training"], config["data"]["sequence_length"]
                    self.assertAlmostEqual(training["steps"] * training["global_batch_size"] * length / 10e9, 1, delta=0.01)
                    self.assertEqual(training["global_batch_size"] % training["micro_batch_size"], 0)
                    self.assertAlmostEqual(config["optimizer"]["schedule"]["warmup_steps"] / training["steps"], 0.02, delta=1e-3)
                    self.assertEqual(config["optimizer"]["kind"], optimizer)
                    self.assertEqual(config["optimizer"]["eps"], 1e-8)
                    planned = json.loads(self.parka("plan", out, "--card", "h200", "--json"))
                    self.assertTrue(planned["fits"])
                    self.assertTrue(least < 2 * planned["bytes"]["weights"] / 4 < most, planned["bytes"]["weights"])
                    self.assertRegex(printed, rf"{(planned['total_bytes'] + planned['context_bytes']) / 1e9:.1f} GB")

    def test_a_short_run_has_a_thousand_steps_and_a_hundred_of_warm_up(self):
        rates = {}
        for optimizer in ("adamw", "muon"):
            self.new("--model", "moe", "--tokens", "1e8", "--gpu", "h200", "--optimizer", optimizer, "--out", f"{optimizer}.json")
            config = self.resolved(f"{optimizer}.json")
            self.assertGreaterEqual(config["training"]["steps"], 1000)
            self.assertAlmostEqual(config["optimizer"]["schedule"]["warmup_steps"], 100, delta=15)
            rates[optimizer] = config["optimizer"]["lr"]
        self.assertAlmostEqual(rates["muon"] / rates["adamw"], 2, delta=0.05)

    def test_it_trains_on_what_prepare_has_made(self):
        info = self.prepared()
        self.write("tiny.json", {"model": TINY})
        self.new("--model", "tiny.json", "--tokens", "20000", "--gpu", "h100", "--data", "data", "--sequence-length", "64", "--out", "mine.json")
        config = self.resolved("mine.json")
        self.assertEqual(config["model"]["vocab_size"], info["padded_vocab_size"])
        self.assertEqual(config["data"]["train"], [f"data/{name}" for name in info["train"]["files"]])
        self.parka("train", "mine.json", "--set", "training.steps=40", "--set", "device.kind=cpu", "--set", "training.eval_sequences=4")
        records = [json.loads(line) for line in (self.folder / "runs/mine/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
        self.assertEqual([record["step"] for record in records if record["kind"] == "train"], list(range(1, 41)))
        self.assertIn("eval", {record["kind"] for record in records})

    def test_comments_of_a_model_are_passed_over(self):
        self.write("tiny.json", "/* a model,\n// tiny */\n" + json.dumps({"model": TINY}).replace('"d_ffn"', '/* of /* one */ "d_ffn"') + " // end /*")
        self.new("--model", "tiny.json", "--tokens", "20000", "--gpu", "h100", "--out", "mine.json")
        self.assertEqual(self.resolved("mine.json")["model"]["d_ffn"], TINY["d_ffn"])

    def test_a_bias_of_routers_moves(self):
        moe = {"num_experts": 4, "experts_per_token": 2, "score": "sigmoid", "correction_bias": True}
        self.write("mine.json", {"model": {**TINY, "moe": moe}})
        self.new("--model", "mine.json", "--tokens", "1e6", "--gpu", "h200", "--out", "out.json")
        self.assertGreater(self.resolved("out.json")["training"]["router_bias_rate"], 0)

    def test_a_refusal_names_no_file_that_is_gone(self):
        refused = self.new("--model", "150m", "--tokens", "1e9", "--gpu", "h100", "--recipe", "fp7", "--out", "x.json", code=2)
        self.assertNotIn(tempfile.gettempdir() + "/tmp", refused)

    def test_what_cannot_be_is_refused(self):
        self.write("there.json", "{}")
        self.write("empty.json", "{}")
        for arguments, named in ((("--model", "nope"), "nope"), (("--model", "150m", "--out", "there.json"), "there.json"), (("--model", "empty.json", "--out", "x.json"), "empty.json"),
                                 (("--model", "150m", "--data", "nowhere"), "nowhere"), (("--model", "150m", "--gpus", "0"), "--gpus"),
                                 (("--model", "150m", "--recipe", "fp7"), "fp7"), (("--model", "150m", "--gpu", "h1000"), "--gpu: ")):
            with self.subTest(arguments):
                self.assertIn(named, self.new("--tokens", "1e9", *(() if "--gpu" in arguments else ("--gpu", "h100")), *arguments, code=2))
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["empty.json", "there.json"])


class SeveralConfigs(Folder):
    def test_the_later_wins_and_overrides_win_over_all(self):
        self.write("a.json", {"model": TINY, "precision": {"recipe": "coat"}, "optimizer": {"lr": 1e-3}, "training": {"steps": 10, "seed": 3}})
        self.write("b.json", "// others\n" + json.dumps({"$schema": "x", "optimizer": {"lr": 2e-3, "schedule": {"warmup_steps": "10%"}}, "training": {"steps": 50}}))
        config = self.resolved("a.json", "b.json", "--set", "training.steps=100")
        self.assertEqual((config["optimizer"]["lr"], config["training"]["steps"], config["training"]["seed"]), (2e-3, 100, 3))
        self.assertEqual((config["model"]["d_model"], config["precision"]["recipe"]), (64, "coat"))
        self.assertEqual(config["optimizer"]["schedule"]["warmup_steps"], 10)
        self.write("c.json", {"precision": {"recipe": "bf16"}})
        self.assertEqual(self.resolved("a.json", "c.json"), self.resolved("a.json", "--set", "precision.recipe=bf16"))

    def test_mistakes_name_the_file(self):
        self.write("a.json", {"model": TINY})
        for content, named in (({"optimizer": {"lrr": 1}}, "optimizer.lr"), ({"optimizer": {"lr": "x"}}, "optimizer.lr"), ([1], "object"), ({"model": 3}, "model"),
                               ({"optimizer": {"schedule": {"warmup_steps": "3 %"}}}, "warmup_steps"), ({"optimizer": {"schedule": {"warmup_steps": "101%"}}}, "warmup_steps")):
            with self.subTest(content):
                self.write("b.json", content)
                refused = self.parka("config", "check", "a.json", "b.json", code=2)
                self.assertIn("b.json", refused)
                self.assertIn(named, refused)

    def test_a_share_is_of_the_steps_of_the_schedule(self):
        self.write("a.json", {"model": TINY, "optimizer": {"schedule": {"warmup_steps": "2.5%"}}, "training": {"steps": 1000}})
        for overrides, warmup in (((), 25), (("training.steps=40",), 1), (("optimizer.schedule.total_steps=400",), 10), (("optimizer.schedule.warmup_steps=7",), 7),
                                  (("optimizer.schedule.warmup_steps=50%",), 500)):
            given = [word for override in overrides for word in ("--set", override)]
            self.assertEqual(self.resolved("a.json", *given)["optimizer"]["schedule"]["warmup_steps"], warmup)


class Data(Folder):
    def test_a_folder_sets_what_it_is_made_of(self):
        info = self.prepared()
        self.write("a.json", {"model": TINY | {"vocab_size": 272}, "data": {"sequence_length": 64, "token_dtype": "uint32"}})
        config = self.resolved("a.json", "--data", "data/")
        self.assertEqual(config["data"]["train"], [f"data/{name}" for name in info["train"]["files"]])
        self.assertEqual(config["data"]["eval"], [f"data/{name}" for name in info["eval"]["files"]])
        self.assertEqual((config["data"]["token_dtype"], config["data"]["sequence_length"], config["data"]["loss_mask"]), ("uint16", 64, False))
        self.assertGreater(config["training"]["eval_interval"], 0)
        # Shares of a config's own files are none of these.
        for count in (1, 2):
            self.write("b.json", {"data": {"train": [f"{n}.npy" for n in range(count)], "weights": [n + 1 for n in range(count)]}})
            self.assertEqual(self.resolved("a.json", "b.json", "--data", "data")["data"]["weights"], [])
        self.assertEqual(self.resolved("a.json", "--data", "data", "--set", "training.eval_interval=7")["training"]["eval_interval"], 7)
        self.assertIn("data.json", self.parka("train", "a.json", "--data", "texts", code=2))

    def test_conversations_are_trained_as_they_are_packed(self):
        lines = [{"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}!"}]} for n in range(40)]
        self.write("chats.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
        self.parka("prepare", "chats.jsonl", "--chat", "chatml", "--tokenizer", "bytes", "--sequence-length", "96", "--out", "data")
        self.write("a.json", {"model": TINY | {"vocab_size": 272}, "training": {"steps": 3, "global_batch_size": 2, "micro_batch_size": 2}, "checkpoint": {"folder": "run"}})
        config = self.resolved("a.json", "--data", "data")
        self.assertEqual((config["data"]["loss_mask"], config["data"]["documents"], config["data"]["sequence_length"], config["data"]["eval"]), (True, "separate", 96, []))
        self.parka("train", "a.json", "--data", "data", "--set", "device.kind=cpu")


class Finetune(Folder):
    def test_an_import_writes_a_config_that_runs(self):
        self.prepared()
        short = {"steps": 2, "global_batch_size": 2, "micro_batch_size": 2}
        self.write("a.json", {"model": TINY | {"vocab_size": 272}, "data": {"sequence_length": 64}, "training": short, "checkpoint": {"folder": "base"}})
        self.parka("train", "a.json", "--data", "data", "--set", "device.kind=cpu")
        self.parka("export", "base", "--out", "hf")
        self.write("short.json", {"training": short | {"steps": 40}, "data": {"sequence_length": 64}, "device": {"kind": "cpu"}})
        for method, own in ((None, {"method": "full"}), ("lora", {"method": "lora", "base": "compute"}), ("qlora", {"method": "lora", "base": "nf4"}),
                            ("qst", {"method": "qst", "base": "nf4"})):
            with self.subTest(method):
                model = f"model-{method}"
                self.parka("import", "hf", "--out", model, *(("--finetune", method) if method else ()))
                config = self.resolved(model, "short.json", "--data", "data")
                self.assertEqual(own, {key: config["finetune"][key] for key in own})
                self.assertEqual(config["optimizer"]["schedule"]["warmup_steps"], 1)
                self.parka("train", model, "short.json", "--data", "data")
                self.assertTrue((self.folder / f"runs/{model}/step_00000040").is_dir())


class Card(Folder):
    def test_speeds_are_those_that_were_measured(self):
        figures = {}
        for line in (ROOT / "docs/results/figures.jsonl").read_text(encoding="utf-8").splitlines():
            figure = json.loads(line)
            figures[figure["name"]] = figure["value"]
        for card, place in (("h200", "1gpu"), ("h100", "1xh100")):
            found = 0
            for model, name in (("olmo-1b",) * 2, ("llama2-7b",) * 2, ("llama3-8b",) * 2, ("olmoe-1b-7b", "olmoe")):
                for recipe in ("bf16", "fp8_linear", "coat", "parka"):
                    measured = figures.get(f"step.{name}.{recipe}.{'4x4.' * (name == 'olmoe')}{place}.tok_s_gpu")
                    if measured is None:
                        continue
                    found += 1
                    planned = json.loads(self.parka("plan", ROOT / f"configs/{model}-bench.json", "--set", f"precision.recipe={recipe}", "--card", card, "--json"))["card"]
                    self.assertAlmostEqual(planned["tokens_per_second_per_gpu"] / measured, 1, delta=2e-3, msg=f"{model} {recipe} on {card}")
            self.assertGreater(found, 3)

    def test_what_was_not_measured_has_no_speed(self):
        for arguments in (("olmo-1b-bench", "--card", "4090"), ("olmoe-1b-7b", "--card", "h100"), ("olmo-1b-bench", "--card", "h100", "--set", "precision.recipe=coat"),
                          ("llama3-70b-qst", "--card", "h200"), ("quickstart", "--set", "precision.recipe=parka", "--card", "h100")):
            card = json.loads(self.parka("plan", ROOT / f"configs/{arguments[0]}.json", *arguments[1:], "--json"))["card"]
            self.assertEqual((card["tokens_per_second_per_gpu"], card["hours"]), (0, 0))


if __name__ == "__main__":
    unittest.main()
