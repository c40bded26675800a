"""plan, bench, tune, config, generate and eval from the command line."""
import glob
import json
import os
import tempfile
import unittest

from parka_runs import RunFolder, has_gpu, metrics, parka, tiny_config

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def config_files():
    return sorted(glob.glob(os.path.join(ROOT, "configs", "*.json")))


class Plan(unittest.TestCase):
    def plan(self, name, *arguments):
        result = parka("plan", os.path.join(ROOT, "configs", name), "--json", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_every_config_is_valid_and_has_a_plan(self):
        self.assertGreaterEqual(len(config_files()), 10)
        for path in config_files():
            with self.subTest(os.path.basename(path)):
                self.assertEqual(parka("config", "check", path).returncode, 0)
                plan = self.plan(os.path.basename(path))
                self.assertEqual(plan["total_bytes"], sum(plan["bytes"].values()))

    def test_sharding_divides_what_its_stage_says(self):
        one = self.plan("olmo-7b-coat.json", "--gpus", "1")["bytes"]
        divided = ["optimizer states", "master weights"]
        for stage in (1, 2, 3):
            with self.subTest(stage=stage):
                if stage == 2:
                    divided.append("gradients")
                plan = self.plan("olmo-7b-coat.json", "--gpus", "8", "--set", f"distributed.zero_stage={stage}")["bytes"]
                for category in divided:
                    self.assertAlmostEqual(plan[category] / (one[category] / 8), 1, delta=0.001, msg=category)
                self.assertEqual("gradient buckets" in plan, stage >= 2)
                self.assertEqual("gathered weights" in plan, stage == 3)
                # With stage 3 one FP8 weight at a time is transposed, in the workspace.
                for category in set(one) - set(divided) - ({"weights", "fp8 weights", "workspace"} if stage == 3 else set()):
                    self.assertEqual(plan[category], one[category], category)
        # The embedding and the head stay whole; of the FP8 weights one order is kept.
        self.assertLess(plan["weights"], one["weights"] / 4)
        self.assertAlmostEqual(plan["fp8 weights"] / (one["fp8 weights"] / 16), 1, delta=0.001)

    def test_the_suggested_change_fits(self):
        tight = ("--memory-limit", "60", "--set", "training.micro_batch_size=8", "--set", "training.global_batch_size=64")
        plan = self.plan("llama2-7b-parka.json", *tight)
        self.assertFalse(plan["fits"])
        overrides = []
        for change in plan["change_that_fits"].split(" + "):
            for assignment in change.split(" (")[0].split(" and "):
                overrides += ["--set", assignment]
        self.assertTrue(self.plan("llama2-7b-parka.json", *tight, *overrides)["fits"])

    def test_text_output_says_whether_it_fits(self):
        result = parka("plan", os.path.join(ROOT, "configs", "olmo-7b-coat.json"), "--gpus", "8")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"(Fits|Does not fit) into 80\.0 GB")
        self.assertIn("bytes per token and block", result.stdout)


class Bench(RunFolder):
    def test_times_are_whole_and_add_up(self):
        json_path = self.path("bench.json")
        result = parka("bench", self.write_config(tiny_config(self.folder)), "--steps", "3", "--json", json_path)
        self.assert_exit(result, 0)
        with open(json_path, encoding="utf-8") as file:
            bench = json.load(file)
        self.assertEqual(len(bench["step_seconds"]), 3)
        self.assertEqual(bench["tokens_per_step"], 4 * 16)
        ops = {}
        for op in bench["ops"]:
            ops[op["op"]] = ops.get(op["op"], 0) + op["runs"]
        # Two micro-batches of two blocks; a norm before each half of a block and one at the end.
        self.assertEqual(ops["attention_forward"], 4)
        self.assertEqual(ops["norm_forward"], 10)
        self.assertEqual(ops["norm_backward"], 10)
        self.assertEqual(ops["gemm"], 2 * (2 * 12 + 3))
        self.assertEqual(ops["sum_of_squares"], 1)
        self.assertLessEqual(sum(op["seconds"] for op in bench["ops"]), bench["timed_step_seconds"])
        gemm = next(op for op in bench["ops"] if op["op"] == "gemm" and op["shape"].startswith("32 x 96 x 32 "))
        self.assertEqual(gemm["flop"], 2 * 32 * 96 * 32)
        self.assertIn("FLOP/token = 6 x parameters", result.stdout)

    def test_tune_without_a_gpu_says_so(self):
        if has_gpu():
            self.skipTest("there is a GPU")
        result = parka("tune", self.write_config(tiny_config(self.folder)), "--output", self.path("tuning.json"))
        self.assert_exit(result, 2)
        self.assertRegex(result.stderr, "GPU|CUDA")  # a build without CUDA cannot tell
        self.assertFalse(os.path.exists(self.path("tuning.json")))


class Config(unittest.TestCase):
    def test_what_show_prints_resolves_to_itself(self):
        for path in config_files():
            with self.subTest(os.path.basename(path)):
                shown = parka("config", "show", path).stdout
                with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                    file.write(shown)
                    file.flush()
                    again = parka("config", "show", file.name)
                self.assertEqual(again.stdout, shown, again.stderr)

    def test_schema_is_json_and_reference_is_the_documentation(self):
        self.assertIn("properties", json.loads(parka("config", "schema").stdout))
        with open(os.path.join(ROOT, "docs", "config.md"), encoding="utf-8") as file:
            self.assertEqual(parka("config", "reference").stdout, file.read())


class GenerateAndEval(RunFolder):
    def setUp(self):
        super().setUp()
        config = tiny_config(self.folder, "parka")
        config["model"]["vocab_size"] = 272  # a byte vocabulary
        self.assert_exit(self.train(config), 0)

    def generate(self, *arguments):
        result = parka("generate", self.path("run"), *arguments)
        self.assert_exit(result, 0)
        return result.stdout

    def test_generate(self):
        tokens = self.generate("--prompt-tokens", "1,2,3", "--tokens", "20")
        self.assertEqual(len(tokens.split(",")), 20)
        self.assertTrue(all(0 <= int(token) < 272 for token in tokens.split(",")))
        self.assertEqual(tokens, self.generate("--prompt-tokens", "1,2,3", "--tokens", "20"))
        self.assertNotEqual(tokens, self.generate("--prompt-tokens", "1,2,3", "--tokens", "20", "--seed", "1"))
        greedy = self.generate("--prompt-tokens", "1,2,3", "--tokens", "20", "--temperature", "0")
        self.assertEqual(greedy, self.generate("--prompt-tokens", "1,2,3", "--tokens", "20", "--top-k", "1", "--seed", "7"))

    def test_a_longer_greedy_text_starts_with_the_shorter_one(self):
        # 40 tokens pass the context of 16: the window moves.
        longer = self.generate("--prompt-tokens", "1,2,3", "--tokens", "40", "--temperature", "0")
        shorter = self.generate("--prompt-tokens", "1,2,3", "--tokens", "25", "--temperature", "0")
        self.assertTrue(longer.startswith(shorter.strip() + ","))

    def test_several_prompts_are_lines_of_json(self):
        options = ("--tokens", "12", "--temperature", "0", "--set", "precision.eval=bf16")
        prompts = ["1,2,3", "200", "9,8,7,6,5"]
        # Two at a time: the third waits for a slot.
        arguments = [word for prompt in prompts for word in ("--prompt-tokens", prompt)]
        lines = [json.loads(line) for line in self.generate(*arguments, "--batch", "2", *options).splitlines()]
        self.assertEqual(len(lines), 3)
        for prompt, line in zip(prompts, lines):
            self.assertEqual(",".join(map(str, line["prompt_tokens"])), prompt)
            self.assertEqual((len(line["tokens"]), line["stopped"]), (12, False))
            alone = self.generate("--prompt-tokens", prompt, *options)
            self.assertEqual(",".join(map(str, line["tokens"])), alone.strip())

    def test_stop_tokens_and_top_p(self):
        arguments = ("--prompt-tokens", "1,2,3", "--tokens", "30", "--temperature", "0")
        tokens = self.generate(*arguments).strip().split(",")
        line = json.loads(self.generate(*arguments, "--json", "--stop-token", tokens[7]))
        self.assertEqual([str(token) for token in line["tokens"]], tokens[: tokens.index(tokens[7])])
        self.assertTrue(line["stopped"])
        # The likeliest token alone has more than no probability.
        narrow = ("--prompt-tokens", "1,2,3", "--tokens", "30", "--temperature", "1", "--top-p", "0", "--seed", "3")
        self.assertEqual(self.generate(*narrow).strip().split(","), tokens)

    def test_text_ends_at_what_is_no_byte(self):
        line = json.loads(self.generate("--prompt", "abc", "--json", "--tokens", "200", "--temperature", "3", "--seed", "5"))
        self.assertEqual(line["prompt_tokens"], [97, 98, 99])
        self.assertTrue(line["stopped"])
        self.assertTrue(all(token < 256 for token in line["tokens"]))
        self.assertLess(len(line["tokens"]), 200)
        self.assertEqual(bytes(line["tokens"]).decode("utf-8", "replace").count("\ufffd") > 0, "\ufffd" in line["text"])

    def test_eval_of_every_checkpoint_agrees_with_the_log(self):
        for record in metrics(self.path("run"), "eval")[1:]:
            result = parka("eval", self.path(f"run/step_{record['step']:08}"), "--json")
            self.assert_exit(result, 0)
            self.assertEqual(json.loads(result.stdout)["loss"], record["loss"])

    def test_eval_in_bf16_is_close_but_not_the_same(self):
        same = json.loads(parka("eval", self.path("run"), "--json").stdout)["loss"]
        plain = json.loads(parka("eval", self.path("run"), "--json", "--set", "precision.eval=bf16").stdout)["loss"]
        self.assertNotEqual(same, plain)
        self.assertLess(abs(same - plain), 0.05)


if __name__ == "__main__":
    unittest.main()
