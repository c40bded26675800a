"""plan, bench, tune, config, generate and eval from the command line."""
import contextlib
import glob
import json
import os
import re
import shutil
import stat
import statistics
import subprocess
import tempfile
import time
import unittest

from parka_runs import PROGRAM, RunFolder, has_gpu, metrics, parka, tiny_config

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..")


def config_files():
    return sorted(set(glob.glob(os.path.join(ROOT, "configs", "*.json"))) - {os.path.join(ROOT, "configs", "parka.schema.json")})


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
                ranks = ["--gpus", "2"] if path.endswith("-2gpu.json") else []
                plan = self.plan(os.path.basename(path), *ranks)
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
                for category in set(one) - set(divided) - ({"weights", "fp8 weights"} if stage == 3 else set()):
                    self.assertEqual(plan[category], one[category], category)
        # The embedding and the head stay whole; the FP8 weights are those of a rank's pieces, in one of the two orders,
        # and those of two of the 32 blocks are gathered at a time. One weight at a time is transposed, in the workspace.
        self.assertLess(plan["weights"], one["weights"] / 4)
        self.assertAlmostEqual(plan["fp8 weights"] / (one["fp8 weights"] / 2 / 8), 1, delta=0.001)
        self.assertAlmostEqual(plan["gathered weights"] / (one["fp8 weights"] / 32), 1, delta=0.001)
        self.assertGreaterEqual(plan["workspace"], one["workspace"])
        both = self.plan("olmo-7b-coat.json", "--gpus", "8", "--set", "distributed.zero_stage=3",
                         "--set", "precision.weight_copies=both")["bytes"]
        self.assertAlmostEqual(both["fp8 weights"] / (one["fp8 weights"] / 8), 1, delta=0.001)

    def test_the_suggested_change_fits(self):
        tight = ("--memory-limit", "60", "--set", "training.micro_batch_size=8", "--set", "training.global_batch_size=64")
        plan = self.plan("llama2-7b-parka.json", *tight)
        self.assertFalse(plan["fits"])
        advice = plan["fits_with"]
        overrides = [argument for change in advice["changes"] for argument in ("--set", change)]
        changed = self.plan("llama2-7b-parka.json", *tight, *overrides)
        self.assertTrue(changed["fits"])
        self.assertEqual(changed["total_bytes"], advice["total_bytes"])
        self.assertFalse({"fits_with", "fits_on"} & set(changed))
        more = plan["fits_on"]
        overrides = [argument for change in more["changes"] for argument in ("--set", change)]
        self.assertTrue(self.plan("llama2-7b-parka.json", *tight, *overrides, "--gpus", str(more["gpus"]))["fits"])

    def test_the_advice_can_be_pasted_and_written(self):
        path = os.path.join(ROOT, "configs", "llama2-7b-parka.json")
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            written = os.path.join(folder, "fits.json")
            result = parka("plan", path, "--memory-limit", "48", "--write", written)
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertIn("Does not fit into 48.0 GB.", result.stdout)
            self.assertIn(f"wrote {written}\n", result.stdout)
            pasted = re.findall(r"^    (--set) (\S+)  +# \S", result.stdout, re.MULTILINE)
            self.assertGreater(len(pasted), 1)
            (in_use,) = re.findall(r"cheapest \(([0-9.]+ GB) in use\)", result.stdout)
            for arguments in ([path, *(word for words in pasted for word in words)], [written]):
                fits = parka("plan", *arguments, "--memory-limit", "48").stdout
                self.assertIn("\nFits into 48.0 GB.\n", fits)
                self.assertRegex(fits, rf"\nin use on the GPU +{in_use} +100.0 %\n")
            (gpus, arguments) = re.findall(r"As it is, it fits on \d+ GPUs: --gpus (\d+)((?: --set \S+)*) \(", result.stdout)[0]
            self.assertIn("\nFits into 48.0 GB.\n",
                          parka("plan", path, "--memory-limit", "48", "--gpus", gpus, *arguments.split()).stdout)

            # Nothing to change: the config as it was given. Nothing that helps: no file.
            self.assertEqual(parka("plan", path, "--memory-limit", "200", "--write", written).returncode, 0)
            self.assertEqual(parka("config", "show", written).stdout, parka("config", "show", path).stdout)
            refused = parka("plan", path, "--memory-limit", "4", "--write", os.path.join(folder, "none.json"))
            self.assertEqual(refused.returncode, 2)
            self.assertIn("no change makes it fit into 4.0 GB", refused.stderr)
            self.assertEqual(os.listdir(folder), ["fits.json"])

    def test_what_is_written_replaces_neither_the_config_nor_a_folder(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            config, other = os.path.join(folder, "config.json"), os.path.join(folder, "other.json")
            shutil.copy(os.path.join(ROOT, "configs", "quickstart.json"), config)
            os.makedirs(os.path.join(f"{other}.tmp", "of_someone"))
            with open(config, encoding="utf-8") as file:
                before = file.read()
            for read_from, written, message in ((config, config, "this command reads it"), (folder, config, "this command reads it"),
                                                (config, f"{folder}/../{os.path.basename(folder)}/config.json", "this command reads it"),
                                                (config, other, "other.json.tmp: exists already")):
                for fit in ([], ["--fit"]):
                    with self.subTest(read_from=read_from, written=written, fit=fit):
                        refused = parka("plan", read_from, "--write", written, *fit)
                        self.assertIn(message, refused.stderr)
                        self.assertIn(refused.returncode, (2, 4))
            with open(config, encoding="utf-8") as file:
                self.assertEqual(file.read(), before)
            self.assertEqual(os.listdir(f"{other}.tmp"), ["of_someone"])

    def test_what_is_written_goes_through_links_and_into_pipes(self):
        config = os.path.join(ROOT, "configs", "quickstart.json")
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            file, link, pipe = (os.path.join(folder, name) for name in ("file.json", "link.json", "pipe"))
            self.assertEqual(parka("plan", config, "--write", file).returncode, 0)
            with open(file, encoding="utf-8") as written:
                expected = written.read()
            os.truncate(file, 0)
            os.symlink("file.json", link)
            self.assertEqual(parka("plan", config, "--write", link).returncode, 0)
            self.assertTrue(os.path.islink(link))
            with open(file, encoding="utf-8") as written:
                self.assertEqual(written.read(), expected)
            os.mkfifo(pipe)
            with subprocess.Popen(["cat", pipe], stdout=subprocess.PIPE, text=True) as reader:
                try:
                    result = parka("plan", config, "--write", pipe)
                    self.assertEqual(result.returncode, 0, result.stderr)
                    self.assertTrue(stat.S_ISFIFO(os.stat(pipe).st_mode))
                    self.assertEqual(reader.communicate(timeout=60)[0], expected)
                finally:
                    reader.kill()  # it would wait for ever for what is not written
            self.assertEqual(sorted(os.listdir(folder)), ["file.json", "link.json", "pipe"])

    def test_what_is_written_to_the_output_goes_there_in_order(self):
        # The descriptor's own name, which leads to this test's file or pipe and to no device.
        config = os.path.join(ROOT, "configs", "quickstart.json")
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            printed, link = os.path.join(folder, "printed"), os.path.join(folder, "stdout")
            os.symlink("/proc/self/fd/1", link)
            self.assertEqual(parka("plan", config, "--write", os.path.join(folder, "file.json")).returncode, 0)
            with open(os.path.join(folder, "file.json"), encoding="utf-8") as written:
                expected = written.read()
            piped = parka("plan", config, "--write", link)
            self.assertEqual(piped.returncode, 0, piped.stderr)
            with open(printed, "w", encoding="utf-8") as output:
                result = subprocess.run([PROGRAM, "plan", config, "--write", link], stdout=output)
            self.assertEqual(result.returncode, 0)
            with open(printed, encoding="utf-8") as output:
                text = output.read()
            self.assertEqual(text, piped.stdout)
            self.assertIn(f"{expected}wrote {link}\n", text)
            self.assertFalse(text.startswith(expected))
            self.assertTrue(os.path.islink(link))

    def test_the_table_adds_up_and_has_no_empty_lines(self):
        for name, gpus in (("llama2-7b-parka.json", 1), ("olmo-7b-coat.json", 8), ("quickstart.json", 1)):
            with self.subTest(name):
                text = parka("plan", os.path.join(ROOT, "configs", name), "--gpus", str(gpus)).stdout
                self.assertFalse([line for line in text.splitlines() if line != line.rstrip()])
                self.assertNotIn(" 0.000 GB", text)
                rows = re.findall(r"^(\S.*?) +((?:(?:[0-9.]+ GB|-) +)+)([0-9.]+) %$", text, re.MULTILINE)
                names, columns, shares = zip(*rows)
                self.assertEqual(names[-3:], ("planned", "CUDA context and libraries", "in use on the GPU"))
                numbers = [[float(number.replace("-", "0")) for number in re.findall("[0-9.]+|-", column)] for column in columns]
                for column in zip(*numbers):
                    self.assertAlmostEqual(sum(column[:-3]), column[-3], delta=0.0005 * len(column))
                    self.assertAlmostEqual(column[-3] + column[-2], column[-1], delta=0.0011)
                self.assertEqual(len(numbers[0]), 2 if gpus > 1 else 1)
                self.assertAlmostEqual(sum(map(float, shares[:-3])), float(shares[-3]), delta=0.05 * len(shares))
                self.assertEqual(shares[-1], "100.0")

    def test_offloaded_blocks_are_in_host_memory(self):
        name, blocks, layers = "olmo-7b-coat.json", 20, 32
        offload = ("--set", f"precision.offload_blocks={blocks}")
        for more in ((), ("--gpus", "8", "--set", "distributed.zero_stage=3"), ("--set", "precision.recompute=block")):
            with self.subTest(more):
                plain, offloaded = self.plan(name, *more), self.plan(name, *more, *offload)
                before, after = plain["bytes"], offloaded["bytes"]
                saved = before["saved activations"] - after["saved activations"]
                if "precision.recompute=block" in more:  # keeps a block's input in bf16
                    self.assertEqual(saved, blocks * plain["micro_batch_size"] * 2048 * 4096 * 2)
                else:
                    self.assertEqual(saved, blocks * before["saved activations"] // layers)
                for category in set(after) - {"saved activations", "unused between tensors"}:
                    self.assertLessEqual(after[category], before[category], category)
                self.assertLess(offloaded["total_bytes"], plain["total_bytes"] - 0.9 * saved)
                # Said in both forms of output, and only where there is something to say.
                self.assertFalse([key for key in plain if "host" in key])
                (host,) = [value for key, value in offloaded.items() if "host" in key]
                self.assertAlmostEqual(host / saved, 1, delta=0.01)
                path = os.path.join(ROOT, "configs", name)
                def offload_lines(*arguments):
                    lines = parka("plan", path, *arguments).stdout.splitlines()
                    return [line for line in lines if "host" in line and "checkpoint.async" not in line]
                self.assertEqual(offload_lines(*more), [])
                (line,) = offload_lines(*more, *offload)
                gigabytes = [float(number) for number in re.findall(r"([0-9.]+) GB", line)]
                self.assertTrue(any(abs(number * 1e9 / saved - 1) < 0.01 for number in gigabytes), line)

    def test_offloaded_masters_and_moments_are_in_host_memory(self):
        name, kinds = "olmo-7b-coat.json", ("master weights", "optimizer states")
        offload = ("--set", "optimizer.offload=true")
        for more in ((), ("--gpus", "8", "--set", "distributed.zero_stage=3")):
            with self.subTest(more):
                plain, offloaded = self.plan(name, *more), self.plan(name, *more, *offload)
                self.assertNotIn("bytes_in_host_memory", plain)
                before, after, host = plain["bytes"], offloaded["bytes"], offloaded["bytes_in_host_memory"]
                self.assertEqual(tuple(host), kinds)
                for kind in kinds:
                    self.assertEqual(after.get(kind, 0) + host[kind], before[kind])
                    self.assertLess(after.get(kind, 0), 0.001 * before[kind])  # of norms
                self.assertEqual(offloaded["total_bytes"] - after["buffers for host memory"],
                                 plain["total_bytes"] - sum(host.values()))
                self.assertLess(after["buffers for host memory"], 700e6)
                text = parka("plan", os.path.join(ROOT, "configs", name), *more, *offload).stdout
                for kind in kinds:
                    self.assertIn(f"in host memory, for each GPU: {host[kind] * 1e-9:.3f} GB pinned for {kind}\n", text)

    def test_text_output_says_whether_it_fits(self):
        result = parka("plan", os.path.join(ROOT, "configs", "olmo-7b-coat.json"), "--gpus", "8")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, r"(Fits|Does not fit) into 80\.0 GB")
        self.assertIn("bytes per token and block", result.stdout)


class StepTime(RunFolder):
    """What plan expects of a step, from a real measurement: of the tiny model on the CPU."""

    def setUp(self):
        super().setUp()
        self.config = tiny_config(self.folder, "parka")
        self.config["training"].update(global_batch_size=16, micro_batch_size=2)
        self.measured = self.path("one.json")
        self.assert_exit(parka("bench", self.write_config(self.config), "--steps", "3", "--json", self.measured), 0)
        with open(self.measured, encoding="utf-8") as file:
            measured = json.load(file)
        # As fast as an idle machine: the time of a busy one would hide the transfers that some tests look for.
        self.seconds = 2e-3
        factor = self.seconds / statistics.median(measured["step_seconds"])
        for key in ("step_seconds", "op_seconds_by_rank"):
            measured[key] = [factor * seconds for seconds in measured[key]]
        for op in measured["ops"]:
            op["seconds"] *= factor
        with open(self.measured, "w", encoding="utf-8") as file:
            json.dump(measured, file)

    def plan(self, *arguments):
        result = parka("plan", self.path("config.json"), "--json", "--measured", self.measured, *arguments)
        self.assert_exit(result, 0)
        return json.loads(result.stdout)["step"]

    def test_one_gpu_takes_what_was_measured(self):
        step = self.plan("--compare", self.measured)
        self.assertAlmostEqual(step["seconds"] / self.seconds, 1, places=6)
        self.assertAlmostEqual(step["efficiency"], 1, places=6)
        self.assertAlmostEqual(step["error"], 0, places=6)
        self.assertEqual((step["communication_seconds"], step["hidden_fraction"], step["micro_batches"]), (0, 1, 8))

    def test_every_stage_adds_up(self):
        for stage in range(4):
            step = self.plan("--gpus", "4", "--set", f"distributed.zero_stage={stage}")
            parts = step["compute_seconds"] + step["slowed_seconds"] + step["exposed_seconds"]
            self.assertAlmostEqual(step["seconds"] / parts, 1, places=6)
            self.assertEqual((step["nodes"], step["micro_batches"]), (1, 2))
            self.assertGreater(step["communication_seconds"], step["exposed_seconds"])
            self.assertAlmostEqual(step["tokens_per_second"], 4 * step["tokens_per_second_per_gpu"], places=3)

    def test_every_option_counts(self):
        stage = ("--gpus", "8", "--nodes", "2", "--set", "distributed.zero_stage=3")
        normal = self.plan(*stage)
        for option, value in [("--link-bandwidth", "0.1"), ("--network-bandwidth", "0.01")]:
            with self.subTest(option):
                self.assertGreater(self.plan(*stage, option, value)["seconds"], normal["seconds"])
        self.assertGreater(normal["communication_seconds"], self.plan("--gpus", "8", *stage[4:])["communication_seconds"])

    def test_states_in_host_memory_take_the_time_of_their_link(self):
        offload, on_device = ("--set", "optimizer.offload=true"), self.plan()
        self.assertNotIn("host_exposed_seconds", on_device)
        fast, slow = (self.plan(*offload, "--host-bandwidth", bandwidth) for bandwidth in ("1", "0.01"))
        for step in (fast, slow):
            self.assertEqual(step["host_bytes_in"], step["host_bytes_out"])
            self.assertGreater(step["host_bytes_in"], 0)
            self.assertAlmostEqual(step["compute_seconds"] / on_device["compute_seconds"], 1, places=6)
            self.assertAlmostEqual(step["seconds"], step["compute_seconds"] + step["host_exposed_seconds"], places=6)
        self.assertGreater(slow["host_exposed_seconds"], 0.9 * slow["host_bytes_in"] / 1e7)
        self.assertGreater(slow["host_exposed_seconds"], 10 * fast["host_exposed_seconds"])
        text = parka("plan", self.path("config.json"), "--measured", self.measured, *offload).stdout
        self.assertRegex(text, r"host memory +[0-9.]+ GB in, [0-9.]+ GB out of each GPU: waiting for it is [0-9.]+ % of the step")

    def test_text_output(self):
        result = parka("plan", self.path("config.json"), "--measured", self.measured, "--compare", self.measured)
        self.assert_exit(result, 0)
        for part in ("measured on one CPU", "expected on 1 GPU in 1 node, 8 micro-batches each", "tok/s per GPU",
                     "100.0 % of the measured GPU's speed", "the prediction is"):
            self.assertIn(part, result.stdout)

    def test_a_step_of_very_many_micro_batches_is_predicted(self):
        result = parka("plan", self.path("config.json"), "--measured", self.measured, "--set", "training.global_batch_size=2000000000")
        self.assert_exit(result, 0)
        self.assertIn("expected on 1 GPU in 1 node, 1000000000 micro-batches each", result.stdout)

    def test_bad_input_is_refused(self):
        with open(self.path("broken.json"), "w", encoding="utf-8") as file:
            file.write("{}")
        measured = ("--measured", self.measured)
        for arguments, words in [
            (("--measured", "/nowhere.json"), ["/nowhere.json"]),
            (("--measured", self.path("broken.json")), ["broken.json", "parka bench"]),
            (("--nodes", "2"), ["--measured"]),
            (("--host-bandwidth", "50"), ["--measured"]),
            (("--compare", self.measured), ["--measured"]),
            ((*measured, "--gpus", "4", "--nodes", "3"), ["--gpus", "--nodes"]),
            ((*measured, "--gpus", "12", "--set", "training.global_batch_size=24"), ["--gpus 12 is no number of whole nodes of 8 GPUs", "--nodes"]),
            (("--measured", ""), ["--measured", "empty"]),
            ((*measured, "--gpus", "3"), ["global_batch_size", "3 ranks"]),
            ((*measured, "--set", "precision.group_size=32"), ["precision.group_size", "16", "32"]),
            ((*measured, "--gpus", "2", "--compare", self.measured), ["--gpus 1"]),
            ((*measured, "--compare", self.measured, "--set", "distributed.zero_stage=1"), ["distributed.zero_stage"]),
        ]:
            with self.subTest(arguments):
                result = parka("plan", self.path("config.json"), *arguments)
                self.assert_exit(result, 2)
                self.assertEqual(len(result.stderr.splitlines()), 1)
                for word in words:
                    self.assertIn(word, result.stderr)


def open_files(process):
    """What the files are called that a process has open."""
    names = []
    for entry in os.scandir(f"/proc/{process}/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            names.append(os.readlink(entry.path))
    return names


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
        self.assertIn("FLOP/token", result.stdout)

    def test_states_in_host_memory_are_counted_and_waited_for(self):
        json_path = self.path("bench.json")
        config = tiny_config(self.folder)
        config["optimizer"]["offload"] = True
        result = parka("bench", self.write_config(config), "--steps", "3", "--json", json_path)
        self.assert_exit(result, 0)
        with open(json_path, encoding="utf-8") as file:
            bench = json.load(file)
        self.assertEqual({wait["for"] for wait in bench["waits"]}, {"states from the host", "states to the host"})
        self.assertGreater(bench["planned_host_bytes"], 0)
        self.assertGreater(bench["resident_host_bytes"], bench["planned_bytes"] + bench["planned_host_bytes"])
        self.assertRegex(result.stdout, r"\nmemory +[0-9.]+ GB planned\nhost memory +[0-9.]+ GB planned, [0-9.]+ GB resident")
        plan = parka("plan", self.path("config.json"), "--measured", json_path, "--set", "optimizer.offload=false")
        self.assert_exit(plan, 0)

    def test_a_file_says_whether_documents_were_measured(self):
        for end, measured in ((-1, "joined"), (0, "separate")):
            config = tiny_config(self.folder)
            config["data"].update(documents="separate", document_end=end)
            json_path = self.path("bench.json")
            result = parka("bench", self.write_config(config), "--steps", "1", "--json", json_path)
            self.assert_exit(result, 0)
            with open(json_path, encoding="utf-8") as file:
                self.assertEqual(json.load(file)["config"]["data"]["documents"], measured)
            self.assertEqual("was measured as joined" in result.stderr, measured == "joined")
            plan = parka("plan", self.path("config.json"), "--gpus", "2", "--measured", json_path)
            self.assertEqual(plan.returncode, 2 if measured == "joined" else 0, plan.stderr)
            if measured == "joined":
                self.assertIn("--set data.documents=joined plans what it measured", plan.stderr)
                self.assert_exit(parka("plan", self.path("config.json"), "--measured", json_path, "--set", "data.documents=joined"), 0)

    def test_a_benchmark_that_is_stopped_leaves_no_tokens_behind(self):
        command = [PROGRAM, "--threads", "1", "bench", self.write_config(tiny_config(self.folder)), "--steps", "1000000"]
        folder = self.path("temporary")
        os.mkdir(folder)
        bench = subprocess.Popen(command, env=dict(os.environ, TMPDIR=folder), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self.addCleanup(bench.wait)
        self.addCleanup(bench.kill)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if any(name.startswith(f"{folder}/parka_bench_") and name.endswith(" (deleted)") for name in open_files(bench.pid)):
                break
            time.sleep(0.01)
        else:
            self.fail("the tokens lie in a file that stays")
        self.assertEqual(os.listdir(folder), [])
        self.assertIsNone(bench.poll())

    def test_tune_without_a_gpu_says_so(self):
        if has_gpu():
            self.skipTest("there is a GPU")
        result = parka("tune", self.write_config(tiny_config(self.folder)), "--output", self.path("tuning.json"))
        self.assert_exit(result, 2)
        self.assertRegex(result.stderr, "parka tune times algorithms on a GPU, and (this parka was built without CUDA|no GPU is visible here)")
        self.assertFalse(os.path.exists(self.path("tuning.json")))


class CommandLine(unittest.TestCase):
    def test_what_to_do_about_one_that_cannot_be_read(self):
        for words, advice in ((("trian", "x.json"), "nothing takes trian x.json; trian: did you mean train?"), (("pln",), "pln: did you mean plan?"),
                              (("quickstart",), "see parka --help"), (("--threads", "abc", "pln"), "--threads"),
                              (("--treads", "2"), "nothing takes --treads 2; --treads: did you mean --threads?"),
                              (("--ranks", "2", "train", "x.json"), "nothing takes --ranks before the command; give --ranks after parka train"),
                              (("train", "x.json", "--lr", "3e-4"), "nothing takes --lr; --lr: did you mean --optimizer.lr=VALUE?"),
                              (("train", "x.json", "--must-be-nev"), "did you mean --must-be-new?"),
                              (("plan", "x.json", "y.json", "z.json"), "x.json: no such config"),
                              (("import", "x", "--out", "y", "--optimizer.lr=3"), "nothing takes --set optimizer.lr=3; see parka import --help"),
                              (("config", "show", "x.json", "--json"), "see parka config show --help"),
                              (("train", "x.json", "--optimizer.lr"), "--optimizer.lr: has no value; write --optimizer.lr=VALUE"),
                              (("train",), "see parka train --help")):
            with self.subTest(words):
                result = parka(*words)
                self.assertEqual(result.returncode, 2)
                self.assertIn(advice, result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1)

    def test_a_start_does_not_load_cublaslt(self):
        """It takes ten times as long as all else of a start."""
        listed = subprocess.run([PROGRAM], env={**os.environ, "LD_TRACE_LOADED_OBJECTS": "1"}, capture_output=True, text=True, timeout=60)
        self.assertIn("libstdc++", listed.stdout)
        self.assertNotIn("cublas", listed.stdout)


class Config(unittest.TestCase):
    def show(self, *arguments):
        result = parka("config", "show", *arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    def test_a_key_may_be_an_option(self):
        path = os.path.join(ROOT, "configs", "quickstart.json")
        wanted = self.show(path, "--set", "optimizer.lr=0.25", "--set", "optimizer.schedule.kind=constant")
        self.assertIn('"lr": 0.25', wanted)
        self.assertEqual(self.show(path, "--optimizer.lr=0.25", "--optimizer.schedule.kind=constant"), wanted)
        self.assertEqual(self.show("--optimizer.lr", "0.25", path, "--optimizer.schedule.kind", "constant"), wanted)
        refused = parka("config", "check", path, "--optimizer.lrr=1")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("command line: optimizer.lrr: unknown key; did you mean optimizer.lr?", refused.stderr)

    def test_a_config_may_name_its_schema(self):
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, "config.json")
            for schema, code in (("parka.schema.json", 0), (3, 2)):
                with open(path, "w", encoding="utf-8") as file:
                    json.dump({"$schema": schema, "optimizer": {"lr": 0.25}}, file)
                self.assertEqual(parka("config", "check", path).returncode, code)
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"optimizer": {"$schema": "parka.schema.json"}}, file)
            self.assertIn("optimizer.$schema: unknown key", parka("config", "check", path).stderr)

    def test_a_folder_stands_for_its_config(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertIn("is a folder without a config.json", parka("config", "check", folder).stderr)
            path = os.path.join(folder, "config.json")
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"optimizer": {"lr": 0.25}}, file)
            self.assertEqual(self.show(folder), self.show(path))
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}, file)
            self.assertIn("is the config of a Hugging Face model; `parka import", parka("config", "check", folder).stderr)
            with open(path + ".yaml", "w", encoding="utf-8") as file:
                file.write("optimizer:\n  lr: 0.25\n")
            self.assertIn("configs are JSON files", parka("config", "check", path + ".yaml").stderr)

    def test_what_show_prints_resolves_to_itself(self):
        for path in config_files():
            with self.subTest(os.path.basename(path)):
                shown = parka("config", "show", path).stdout
                with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
                    file.write(shown)
                    file.flush()
                    again = parka("config", "show", file.name)
                self.assertEqual(again.stdout, shown, again.stderr)


class EndOfRun(RunFolder):
    def test_what_to_run_next_can_be_pasted(self):
        config = tiny_config(self.folder)
        config["checkpoint"]["folder"] = self.path("a run")
        self.assertIn(f"next: parka eval '{self.path('a run')}', parka generate '{self.path('a run')}' --prompt", self.train(config).stderr)

    def test_the_log_says_where_the_model_is_and_what_to_run_next(self):
        config = tiny_config(self.folder)
        run = self.path("run")
        log = self.train(config).stderr
        self.assertIn(f"step 8 was the last; the model is in {run}/step_00000008; next: parka eval {run}, parka generate {run}", log)
        for line in log.splitlines():
            self.assertRegex(line, r"^20\d\d-\d\d-\d\d \d\d:\d\d:\d\d ")
        self.assertRegex(log.splitlines()[0], r" parka \d[\d.]+ \(.*\) on .*; times here are UTC[+-]\d{4}$")
        self.assertIn("nothing to do: the run is at step 8 of 8; a larger training.steps continues it", self.train(config).stderr)
        config["checkpoint"].update(folder=self.path("other"), interval=0, save_final=False)
        self.assertIn("step 8 was the last; it is not saved, as checkpoint.save_final is false", self.train(config).stderr)


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
