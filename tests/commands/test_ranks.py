"""Training on several ranks: as one rank does, bit for bit repeatable, resumed on other numbers of ranks. On CPUs, or as
test_ranks.py cuda on GPUs, of which two do, and four show all; exits with 77 (skipped) without mpirun or with fewer.
unittest's options come after cpu or cuda. RANKS_STARTER says who starts the ranks (tests/support/starters.py). The file that
RANKS_BITS names gets a line for each run: what it computed, for tests/equal_bits/compare_starters.py."""
import functools
import json
import os
import sys
import unittest

from parka_runs import (PROGRAM, SEQUENCE, RunFolder, learning_curve, num_gpus, parka, run_rank_tests, starters, tiny_config,
                        tree_digest, write_tokens)

STEPS = 8
DEVICE, RANKS_OPTION = "cpu", "--ranks"


class Ranks(RunFolder):
    def fit(self, cases):
        """Those that the machine has the GPUs for; the first of a case is its number of ranks."""
        return [case for case in cases if DEVICE == "cpu" or case[0] <= num_gpus()]

    def run_ranks(self, name, ranks, stage, steps=STEPS, recipe="bf16", shard_size=0, init_from="", blocks=2, offloaded=0,
                  check_interval=100, batch=8, in_host_memory=False, starter=starters.STARTER, **optimizer):
        config = tiny_config(self.folder, recipe, STEPS, device=DEVICE, **optimizer)
        config["model"]["num_layers"] = blocks
        config["precision"]["offload_blocks"] = offloaded
        config["precision"]["offload_weights"] = config["optimizer"]["offload"] = in_host_memory
        config["data"]["train"] = [self.path("long.npy")]
        config["optimizer"]["schedule"]["total_steps"] = STEPS
        config["training"].update(steps=steps, global_batch_size=batch, micro_batch_size=1)
        if optimizer.get("release_gradients"):
            config["training"]["micro_batch_size"] = batch // ranks
        config["checkpoint"].update(folder=self.path(name), interval=2, init_from=init_from)
        config["distributed"] = {"zero_stage": stage, "shard_size": shard_size}
        config["reliability"] = {f"{kind}_interval": check_interval for kind in ("replay", "state")}
        config["evaluation"] = {"tasks": [self.path("task.jsonl")], "sets": [f"held={self.path('held_out.npy')}"]}
        path = self.path(name + ".json")
        with open(path, "w", encoding="utf-8") as file:
            json.dump(config, file)
        program = [PROGRAM, "--threads", "1", "train", path]
        result = starters.run(ranks, program, starter, RANKS_OPTION)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        if ranks > 1 and "RANKS_BITS" in os.environ:
            self.write_bits(name, os.environ["RANKS_BITS"])
        return result.stdout + result.stderr

    def write_bits(self, name, path):
        """A line with all that the run has computed, and hashes of its checkpoints."""
        folder = self.path(name)
        checkpoints = tree_digest(folder, only=lambda file: file.endswith(".safetensors"))
        with open(path, "a", encoding="utf-8") as file:
            json.dump({"run": name, "curve": learning_curve(folder), "checkpoints": checkpoints}, file, sort_keys=True)
            file.write("\n")

    def setUp(self):
        super().setUp()
        write_tokens(self.path("long.npy"), 50 * SEQUENCE, seed=4)  # an epoch is 6 steps
        self.write_task(self.path("task.jsonl"))

    def write_task(self, path):
        """Ten queries, one in a batch: neither 4 ranks nor 3 have equally many."""
        with open(path, "w", encoding="utf-8") as file:
            lines = [{"kind": "parka requests", "version": 1, "task": "made_up", "metric": "len_norm"}]
            for i in range(5):
                choices = [{"continuation": [i + j + 1, 7, 9][: j + 2], "characters": 3 + j, "bytes": 4 + j} for j in range(2)]
                lines.append({"label": i % 2, "context": list(range(3 * i + 1)), "choices": choices})
            file.writelines(json.dumps(line) + "\n" for line in lines)

    def records(self, name, kind):
        with open(os.path.join(self.path(name), "metrics.jsonl"), encoding="utf-8") as file:
            return [record for record in map(json.loads, file) if record["kind"] == kind]

    def losses(self, name):
        return [record["loss"] for record in self.records(name, "train")]

    def assert_near(self, name, other, bound):
        for kind in ("train", "eval"):
            records = {record["step"]: record for record in self.records(name, kind)}
            for wanted in self.records(other, kind):
                record = records[wanted["step"]]
                self.assertLess(abs(record["loss"] - wanted["loss"]), bound, (name, kind, record["step"]))
                self.assertEqual(record.get("epoch"), wanted.get("epoch"))
        for kind, key in (("eval_set", "loss"), ("task", "bits_per_byte")):
            got, wanted = ({record["step"]: record[key] for record in self.records(n, kind)} for n in (name, other))
            self.assertTrue(wanted)
            for step, value in wanted.items():
                self.assertLess(abs(got[step] - value), bound, (name, kind, step))

    def planned_bytes(self, name, ranks):
        result = parka("plan", self.path(name + ".json"), "--json", "--gpus", str(ranks))
        self.assert_exit(result, 0)
        return json.loads(result.stdout)["bytes"]

    def final_files(self, name):
        folder = os.path.join(self.path(name), f"step_{STEPS:08}")
        files = {}
        for file_name in os.listdir(folder):
            if file_name.endswith(".safetensors"):
                with open(os.path.join(folder, file_name), "rb") as file:
                    files[file_name] = file.read()
        self.assertTrue(files)
        return files

    def test_two_and_four_ranks_train_as_one(self):
        # Gradients of micro-batches are added in another order; bf16 makes of that what it makes of any last bit.
        for recipe, bound in (("fp32", 1e-5), ("parka", 2e-2)):
            self.run_ranks(f"{recipe}-1", 1, 0, recipe=recipe)
            for ranks, stage, size in self.fit(((2, 0, 0), (2, 1, 0), (2, 2, 0), (2, 3, 0), (4, 2, 0), (4, 3, 2))):
                with self.subTest(recipe=recipe, ranks=ranks, stage=stage, shard_size=size):
                    name = f"{recipe}-{ranks}-{stage}"
                    self.run_ranks(name, ranks, stage, recipe=recipe, shard_size=size)
                    self.assert_near(name, f"{recipe}-1", bound)

    def test_every_starter_gives_equal_bits(self):
        for ranks, stage, recipe in self.fit(((2, 1, "fp32"), (3, 3, "parka") if DEVICE == "cpu" else (2, 3, "parka"))):
            names = []
            for starter in filter(starters.is_available, starters.STARTERS):
                names.append(f"{starter}-{recipe}")
                self.run_ranks(names[-1], ranks, stage, recipe=recipe, batch=6, starter=starter)
            for name in names[1:]:
                with self.subTest(name):
                    self.assertEqual(self.losses(name), self.losses(names[0]))
                    self.assertEqual(self.final_files(name), self.final_files(names[0]))

    def test_equal_runs_give_equal_bits_also_when_resumed(self):
        self.run_ranks("straight", 2, 3, recipe="coat")
        self.run_ranks("resumed", 2, 3, steps=4, recipe="coat")
        self.assertIn("resuming from", self.run_ranks("resumed", 2, 3, recipe="coat"))
        self.assertEqual(self.losses("resumed"), self.losses("straight"))
        self.assertEqual(self.final_files("resumed"), self.final_files("straight"))

    def test_released_gradients_are_clipped_alike_when_resumed(self):
        options = {"recipe": "coat", "release_gradients": True, "clip_norm": 0.1}  # every step clips the next one
        for ranks, stage in self.fit(((2, 0), (2, 3))):
            with self.subTest(stage=stage):
                straight, resumed = f"straight-{stage}", f"resumed-{stage}"
                self.run_ranks(straight, ranks, stage, **options)
                self.run_ranks(resumed, ranks, stage, steps=4, **options)
                self.assertIn("resuming from", self.run_ranks(resumed, ranks, stage, **options))
                self.assertEqual(self.losses(resumed), self.losses(straight))
                self.assertEqual(self.final_files(resumed), self.final_files(straight))
                norms = [record["grad_norm"] for record in self.records(straight, "train")]
                self.assertGreater(min(norms), 0.1)

    def test_released_gradients_change_no_bit_without_clipping(self):
        for ranks, stage in self.fit(((2, 0), (2, 1), (2, 2), (2, 3))):
            with self.subTest(stage=stage):
                names = []
                for released in (False, True):
                    names.append(f"released-{released}-{stage}")
                    self.run_ranks(names[-1], ranks, stage, recipe="parka", batch=2, release_gradients=released, clip_norm=0)
                self.assertEqual(*map(self.losses, names))
                self.assertEqual(*map(self.final_files, names))

    def test_checks_in_every_step_change_no_bit(self):
        for ranks, stage in self.fit(((2, 0), (2, 1), (2, 3))):
            with self.subTest(stage=stage):
                plain, checked = f"plain-{stage}", f"checked-{stage}"
                self.run_ranks(plain, ranks, stage, recipe="parka")
                self.run_ranks(checked, ranks, stage, recipe="parka", check_interval=1)
                self.assertEqual(self.losses(checked), self.losses(plain))
                self.assertEqual(self.final_files(checked), self.final_files(plain))

    def test_activations_that_wait_in_host_memory_change_no_bit(self):
        for ranks, stage in self.fit(((2, 0), (2, 1), (2, 2), (2, 3))):
            with self.subTest(stage=stage):
                plain, offloaded = f"plain-{stage}", f"offloaded-{stage}"
                self.run_ranks(plain, ranks, stage, recipe="parka", blocks=5)
                self.run_ranks(offloaded, ranks, stage, recipe="parka", blocks=5, offloaded=3)
                for kind in ("train", "eval", "eval_set"):
                    losses = [[record["loss"] for record in self.records(name, kind)] for name in (offloaded, plain)]
                    self.assertEqual(*losses)
                self.assertEqual(self.final_files(offloaded), self.final_files(plain))
                kept = [self.planned_bytes(name, ranks)["saved activations"] for name in (offloaded, plain)]
                self.assertEqual(kept[0] * 5, kept[1] * 2)

    def test_weights_and_states_in_host_memory_change_no_bit(self):
        for ranks, stage, recipe in self.fit(((1, 0, "bf16"), (2, 1, "parka"), (2, 2, "bf16"), (2, 3, "parka"))):
            with self.subTest(stage=stage):
                plain, in_host = f"plain-{stage}", f"in-host-{stage}"
                self.run_ranks(plain, ranks, stage, recipe=recipe)
                self.run_ranks(in_host, ranks, stage, recipe=recipe, in_host_memory=True, check_interval=1)
                for kind in ("train", "eval", "eval_set"):
                    losses = [[record["loss"] for record in self.records(name, kind)] for name in (in_host, plain)]
                    self.assertEqual(*losses)
                self.assertEqual(self.final_files(in_host), self.final_files(plain))
                weights = [self.planned_bytes(name, ranks)["weights"] for name in (in_host, plain)]
                self.assertLess(*weights)

    def test_a_run_goes_on_on_any_number_of_ranks(self):
        self.run_ranks("one", 1, 0, recipe="fp32")
        moves = ((4, 3, 0, 2), (2, 1, 0, 3), (4, 3, 2, 4), (1, 0, 0, 5), (4, 2, 0, 6), (4, 1, 2, 7), (2, 3, 0, 8))
        for ranks, stage, shard_size, steps in self.fit(moves):
            self.run_ranks("moved", ranks, stage, steps=steps, recipe="fp32", shard_size=shard_size)
        self.assert_near("moved", "one", 1e-5)

    def test_masters_of_24_bits_are_divided_and_move(self):
        bound = 1e-6 if DEVICE == "cpu" else 2e-2  # GPUs add micro-batches in another order
        run = functools.partial(self.run_ranks, recipe="bf16", master="fp24_split")
        run("one", 1, 0)
        for ranks, stage in self.fit(((2, 1), (2, 2), (2, 3), (4, 3))):
            with self.subTest(ranks=ranks, stage=stage):
                run(f"{ranks}-{stage}", ranks, stage)
                self.assert_near(f"{ranks}-{stage}", "one", bound)
        self.assertEqual(self.final_files("2-2"), self.final_files("2-3"))
        for ranks, stage, steps in self.fit(((2, 3, 2), (4, 3, 4), (1, 0, 6), (2, 1, 8))):
            run("moved", ranks, stage, steps=steps)
        self.assert_near("moved", "one", bound)

    def test_a_run_starts_from_weights_that_any_number_of_ranks_saved(self):
        self.run_ranks("source", 2, 3, recipe="fp32")
        for ranks, stage in self.fit(((1, 0), (2, 1), (4, 3))):
            name = f"new-{ranks}"
            with self.subTest(name):
                log = self.run_ranks(name, ranks, stage, recipe="fp32", init_from=self.path("source"))
                self.assertIn("with the weights of " + self.path(f"source/step_{STEPS:08}"), log)
                self.assert_near(name, "new-1", 1e-5)
                first, last = self.records(name, "eval")[0], self.records("source", "eval")[-1]
                self.assertEqual((first["step"], last["step"]), (0, STEPS))
                self.assertAlmostEqual(first["loss"], last["loss"], places=6)

    def test_a_step_that_is_skipped_is_said_once(self):
        self.run_ranks("two", 2, 0, steps=2)
        with open(self.path("two.json"), encoding="utf-8") as file:
            config = json.load(file)
        config["checkpoint"]["folder"] = self.path("spikes")
        config["training"].update(steps=STEPS, spike_window=2)
        config["optimizer"]["lr"] = 1.0  # losses explode
        with open(self.path("spikes.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        program = [PROGRAM, "--threads", "1", "train", self.path("spikes.json")]
        result = starters.run(2, program, starters.STARTER, RANKS_OPTION)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        skipped = [record["step"] for record in self.records("spikes", "train") if not record["applied"]]
        self.assertTrue(skipped)
        said = [line for line in (result.stdout + result.stderr).splitlines() if "is a spike" in line]
        self.assertEqual(len(said), len(skipped), said)

    def test_a_batch_that_does_not_divide_is_refused_once(self):
        if not self.fit([(3,)]):
            self.skipTest("fewer than three GPUs")
        with self.assertRaises(AssertionError) as refused:
            self.run_ranks("three", 3, 0)
        self.assertIn("global_batch", str(refused.exception))


if __name__ == "__main__":
    run_rank_tests(sys.modules[__name__])
