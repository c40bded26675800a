"""parka plan --fit: what it chooses, prints and writes."""
import json
import os
import re
import shlex
import tempfile
import unittest

from parka_runs import parka

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")
CONFIG = os.path.join(ROOT, "configs", "llama2-7b.json")


class Fit(unittest.TestCase):
    def fit(self, *arguments, host_memory="1000"):
        result = parka("plan", CONFIG, "--fit", "--json", "--host-memory", host_memory, *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)

    def test_the_command_and_the_written_config_are_the_run_that_fits(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            written = os.path.join(folder, "fits.json")
            given = ("--set", "precision.recipe=parka", "--set", 'data.train=["a b.npy"]', "--memory-limit", "60", "--host-memory", "1000")
            printed = parka("plan", CONFIG, "--fit", *given)
            self.assertEqual(printed.returncode, 0, printed.stderr)
            (in_use,) = re.findall(r"^in use on the GPU +([0-9.]+) GB$", printed.stdout, re.MULTILINE)
            command = shlex.split(printed.stdout.splitlines()[-1])
            self.assertEqual(command[:3], ["parka", "train", CONFIG])
            self.assertEqual(command[3:7], ["--set", "precision.recipe=parka", "--set", 'data.train=["a b.npy"]'])
            self.assertGreater(len(command), 7)
            result = parka("plan", CONFIG, "--fit", *given, "--write", written)
            self.assertEqual(shlex.split(result.stdout.splitlines()[-1]), ["parka", "train", written])
            for arguments in (command[2:], [written]):
                plan = json.loads(parka("plan", *arguments, "--json", "--memory-limit", "60").stdout)
                self.assertTrue(plan["fits"])
                self.assertEqual(f"{(plan['total_bytes'] + plan['context_bytes']) / 1e9:.3f}", in_use)
            again = parka("plan", written, "--fit", "--memory-limit", "60", "--host-memory", "1000")
            self.assertIn("Fits as it is into 60.0 GB.\n", again.stdout)

    def test_changes_beside_a_file_that_gives_every_key_are_the_run_that_fits(self):
        # Its recipe's keys make room for another recipe's; those of --set stay.
        given = ("--set", "optimizer.states=fp32")
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            for config, limit in ((os.path.join(os.path.dirname(CONFIG), "qwen3-0.6b.json"), "4"), (CONFIG, "86")):
                full = os.path.join(folder, "full.json")
                with open(full, "w", encoding="utf-8") as file:
                    file.write(parka("config", "show", config).stdout)
                advice = json.loads(parka("plan", full, *given, "--memory-limit", limit, "--json").stdout)["fits_with"]
                changed = parka("plan", full, *given, *(f"--set={change}" for change in advice["changes"]), "--json", "--memory-limit", limit)
                self.assertEqual(json.loads(changed.stdout)["total_bytes"], advice["total_bytes"])
                self.assertTrue(json.loads(changed.stdout)["fits"])
            nothing = parka("plan", full, "--fit", *given, "--memory-limit", "45", "--host-memory", "1")
            self.assertEqual(nothing.returncode, 2, nothing.stdout)

    def test_several_gpus_are_started_by_the_command(self):
        parka_recipe = ("--set", "precision.recipe=parka")
        on_four = self.fit(*parka_recipe, "--memory-limit", "40", "--gpus", "4")
        self.assertIn(" --gpus 4", on_four["command"])
        self.assertIn("scripts/launch.sh -np 16 -- parka train", self.fit(*parka_recipe, "--gpus", "16")["command"])

    def test_changes_of_results_are_named_and_come_last(self):
        parka_recipe = ("--set", "precision.recipe=parka", "--set", "training.global_batch_size=32")
        enough = self.fit(*parka_recipe, "--memory-limit", "78")
        self.assertEqual({change["results"] for change in enough["changes"]}, {"same bits"})
        text = parka("plan", CONFIG, "--fit", *parka_recipe, "--memory-limit", "55", "--host-memory", "16").stdout
        self.assertRegex(text, r"--set optimizer.gradient=bf16 +# other results: gradients are summed in bf16\n")

    def test_long_sequences_are_shared_which_adds_in_another_order(self):
        long = ("--set", "data.sequence_length=1048576", "--gpus", "8", "--memory-limit", "141")
        changes = self.fit(*long)["changes"]
        self.assertIn("other sums", [change["results"] for change in changes if change["set"].startswith("distributed.context_parallel=")])

    def test_host_memory_is_a_limit(self):
        tight = ("--set", "precision.recipe=parka", "--memory-limit", "80")
        self.assertGreater(self.fit(*tight)["host_bytes"], 1e9)
        self.assertEqual(self.fit(*tight, host_memory="1")["host_bytes"], 0)
        # Of which a run leaves 2 GiB to everything else, or ends.
        needed = self.fit(*tight)["host_bytes"]
        enough = needed + 2 * 2**30 + 1000
        self.assertEqual(self.fit(*tight, host_memory=f"{enough / 1e9:.6f}")["host_bytes"], needed)
        self.assertLess(self.fit(*tight, host_memory=f"{(enough - 10**8) / 1e9:.6f}")["host_bytes"], needed)
        few = parka("plan", CONFIG, "--fit", *tight, "--host-memory", "1")
        self.assertIn("Training waits for saves: ", few.stdout)
        self.assertNotIn("to save beside the training", few.stdout)

    def test_little_host_memory_is_used_before_results_change(self):
        config = os.path.join(os.path.dirname(CONFIG), "llama3-8b.json")
        # Masters and moments need what offloaded blocks took before them, and with fp32 moments more than 52 GB.
        for host_memory, others in (("83", []), ("52", ["precision.recipe=parka"])):
            with self.subTest(host_memory):
                result = parka("plan", config, "--fit", "--json", "--memory-limit", "56", "--host-memory", host_memory)
                changes = json.loads(result.stdout)["changes"]
                self.assertIn("optimizer.offload=true", [change["set"] for change in changes])
                self.assertEqual([change["set"] for change in changes if change["results"] != "same bits"], others)

    def test_nothing_fits_with_a_reason(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            written = os.path.join(folder, "fits.json")
            result = parka("plan", CONFIG, "--fit", "--memory-limit", "8", "--host-memory", "64", "--write", written)
            self.assertEqual(result.returncode, 2)
            self.assertEqual(result.stdout, "")
            self.assertEqual(len(result.stderr.splitlines()), 1)
            self.assertRegex(result.stderr, r"no set of changes makes it fit into 8\.0 GB and 61\.9 GB of host memory for each of 1 GPU; "
                                            r"use at least \d+ GPUs \(--gpus \d+\)")
            self.assertEqual(os.listdir(folder), [])

    def test_so_many_gpus_as_are_named_are_enough_with_the_host_memory_that_they_share(self):
        arguments = ("plan", os.path.join(os.path.dirname(CONFIG), "llava-1.5-7b.json"), "--set", "precision.recipe=fp8_linear", "--fit",
                     "--memory-limit", "12", "--host-memory", "30")
        named = re.search(r"use at least (\d+) GPUs", parka(*arguments).stderr)
        self.assertIsNotNone(named)
        result = parka(*arguments, "--gpus", named[1])
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_options_that_need_others_are_refused_without(self):
        for arguments, word in ((("--host-memory", "10"), "--fit"), (("--fit", "--measured", CONFIG), "--measured"),
                                (("--fit", "--host-memory", "0"), "--host-memory"),
                                (("--fit", "--host-memory", "2000000000000"), "--host-memory: got 2000000000000; it must be a positive number of GB"),
                                (("--memory-limit", "1e300"), "--memory-limit"), (("--write", ""), "--write: the name is empty"),
                                (("--set", "model.num_heads=1"), "attention on a GPU takes heads of up to 512 columns"),
                                (("--fit", "--gpus", "3", "--set", "training.global_batch_size=8"), "global_batch_size")):
            with self.subTest(arguments):
                result = parka("plan", CONFIG, *arguments)
                self.assertEqual(result.returncode, 2)
                self.assertEqual(len(result.stderr.splitlines()), 1)
                self.assertIn(word, result.stderr)


if __name__ == "__main__":
    unittest.main()
