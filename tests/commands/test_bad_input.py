"""Every bad input ends with one clear line and the documented exit code, and leaves earlier checkpoints untouched."""
import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import unittest

from parka_runs import PROGRAM, SEQUENCE, RunFolder, checkpoints, parka, tiny_config, tree_digest, write_tokens

BAD_INPUT, NOT_FINITE, IO_FAILED = 2, 3, 4


def setting(dotted, value):
    """A config change: section.key = value; None removes the key."""
    def change(test, config):
        *sections, key = dotted.split(".")
        target = config
        for section in sections:
            target = target.setdefault(section, {})
        if value is None:
            target.pop(key)
        else:
            target[key] = value
    return change


# (name, change of the config, what the error line must contain)
CONFIG_CASES = [
    ("unknown key", setting("optimizer.lrr", 1e-3), ["optimizer.lrr", "optimizer.lr"]),
    ("unknown section", setting("optimiser.lr", 1e-3), ["optimiser", "optimizer"]),
    ("misspelt recipe", setting("precision.recipe", "caot"), ["precision.recipe", "caot", "coat"]),
    ("misspelt format", setting("precision.backward_format", "e4m4"), ["precision.backward_format", "e4m3"]),
    ("misspelt states", setting("optimizer.states", "expand"), ["optimizer.states", "fp8_expanded"]),
    ("misspelt schedule", setting("optimizer.schedule.kind", "cosin"), ["optimizer.schedule.kind", "cosine"]),
    ("text for a number", setting("optimizer.lr", "fast"), ["optimizer.lr", "number", "fast"]),
    ("number for text", setting("checkpoint.folder", 7), ["checkpoint.folder", "string"]),
    ("fraction for a count", setting("training.steps", 1.5), ["training.steps", "1.5"]),
    ("number for a flag", setting("data.shuffle", 1), ["data.shuffle"]),
    ("list for a number", setting("model.d_model", [32]), ["model.d_model"]),
    ("text for a list", setting("data.train", "a.npy"), ["data.train"]),
    ("section that is a number", setting("model", 3), ["model"]),
    ("negative count", setting("training.steps", -1), ["training.steps"]),
    ("zero batch", setting("training.micro_batch_size", 0), ["training.micro_batch_size"]),
    ("batch that does not divide", setting("training.micro_batch_size", 3), ["training.micro_batch_size", "global_batch_size"]),
    ("heads that do not divide", setting("model.num_heads", 3), ["num_heads"]),
    ("kv heads that do not divide", setting("model.num_kv_heads", 3), ["num_kv_heads"]),
    ("huge width", setting("model.d_model", 10**15), ["model.d_model"]),
    ("fp8 width not a multiple of 16", lambda t, c: (setting("precision.recipe", "coat")(t, c), setting("model.d_ffn", 40)(t, c)), ["d_ffn", "16"]),
    ("beta of one", setting("optimizer.beta2", 1.0), ["optimizer.beta2"]),
    ("negative learning rate", setting("optimizer.lr", -1e-3), ["optimizer.lr"]),
    ("master that does not fit", setting("optimizer.master", "none"), ["optimizer.master"]),
    ("silu kept without fp8", setting("precision.save_silu", True), ["save_silu", "up_gate"]),
    ("more blocks offloaded than there may be", setting("precision.offload_blocks", 1), ["precision.offload_blocks"]),
    ("weights in host memory without their states", setting("precision.offload_weights", True),
     ["precision.offload_weights", "optimizer.offload"]),
    ("fewer blocks offloaded than none", setting("precision.offload_blocks", -1), ["precision.offload_blocks", "-1"]),
    ("a window of one step for spikes", setting("training.spike_window", 1), ["training.spike_window", "2 or more"]),
    ("warm-up longer than the run", setting("optimizer.schedule.warmup_steps", 100), ["warmup_steps"]),
    ("no training data", setting("data.train", []), ["data.train"]),
    ("missing token file", lambda t, c: c["data"]["train"].append(t.path("missing.npy")), ["missing.npy"]),
    ("token file that is a folder", lambda t, c: (os.mkdir(t.path("dir.npy")), c["data"]["train"].append(t.path("dir.npy"))), ["dir.npy"]),
    ("empty token file", lambda t, c: t.add_file(c, "empty.npy", b""), ["empty.npy"]),
    ("short token file", lambda t, c: t.add_file(c, "short.npy", b"\0" * 10), ["short.npy"]),
    ("odd-sized token file", lambda t, c: t.add_file(c, "odd.npy", b"\0" * 1001), ["odd.npy", "1001"]),
    ("token file with a numpy header", lambda t, c: t.add_file(c, "numpy.npy", b"\x93NUMPY\x01\x00" + b"\0" * 1000), ["numpy.npy"]),
    ("batch larger than the data", setting("training.global_batch_size", 64), ["64"]),
    ("missing held-out file", setting("data.eval", ["/nowhere/held_out.npy"]), ["/nowhere/held_out.npy"]),
    ("run folder below a file", lambda t, c: setting("checkpoint.folder", t.path("a.npy") + "/run")(t, c), ["a.npy"]),
    ("run folder that cannot be made", setting("checkpoint.folder", "/proc/parka/run"), ["/proc/parka"]),
    ("other model on resume", setting("model.d_ffn", 96), ["model.d_ffn", "96"]),
    ("other states on resume", setting("optimizer.states", "fp8"), ["optimizer.states", "--convert-states"]),
    ("other seed of the data on resume", setting("data.seed", 1), ["data.seed"]),
    ("other data on resume", lambda t, c: write_tokens(t.path("a.npy"), 22 * SEQUENCE, seed=9), ["data.train"]),
]


class BadInput(RunFolder):
    """Each case meets a run folder with checkpoints of steps 4 and 8, which must look the same afterwards."""

    @classmethod
    def setUpClass(cls):
        super().setUpClass()

    def setUp(self):
        super().setUp()
        self.config = tiny_config(self.folder)
        self.assert_exit(self.train(self.config), 0)
        self.config["training"]["steps"] = 12
        self.checkpoints_before = self.digest()

    def digest(self):
        return tree_digest(self.path("run"), only=lambda path: path.startswith("step_"))

    def add_file(self, config, name, content):
        with open(self.path(name), "wb") as file:
            file.write(content)
        config["data"]["train"].append(self.path(name))

    def assert_refused(self, result, words, code=BAD_INPUT):
        self.assertEqual(result.returncode, code, result.stderr)
        errors = [line for line in result.stderr.splitlines() if line.startswith("parka: ")]
        self.assertEqual(len(errors), 1, result.stderr)
        self.assertTrue(result.stderr.endswith(errors[0] + "\n"), result.stderr)  # the last thing said
        for word in words:
            self.assertIn(word, errors[0])
        self.assertEqual(self.digest(), self.checkpoints_before)

    def test_config_and_data(self):
        self.assertGreaterEqual(len(CONFIG_CASES), 40)
        for name, change, words in CONFIG_CASES:
            with self.subTest(name):
                config = json.loads(json.dumps(self.config))
                change(self, config)
                self.assert_refused(self.train(config), words)
                write_tokens(self.path("a.npy"), 21 * SEQUENCE + 5, seed=1)  # undo a case that wrote over it

    def test_config_text(self):
        cases = [
            ("not JSON", "{\"model\": }", ["config.json"]),
            ("cut off", "{\"model\": {\"d_model\": 32", ["config.json"]),
            ("empty", "", ["config.json"]),
            ("a list", "[]", ["config.json"]),
            ("a key twice", "{\"training\": {\"steps\": 3, \"steps\": 4}}", ["steps"]),
            ("not UTF-8", "{\"model\": \"\udcff\"}", ["config.json"]),
        ]
        for name, text, words in cases:
            with self.subTest(name):
                with open(self.path("config.json"), "w", encoding="utf-8", errors="surrogateescape") as file:
                    file.write(text)
                self.assert_refused(parka("train", self.path("config.json")), words)
        self.assert_refused(parka("train", self.path("nothing.json")), ["nothing.json"])

    def test_command_line(self):
        config = self.write_config(self.config)
        for arguments, words in [
            (("trian", config), ["trian"]),
            (("train",), ["config"]),
            (("train", config, "--stepz", "3"), ["--stepz"]),
            (("train", config, "--set", "optimizer.lr"), ["optimizer.lr"]),
            (("train", config, "--set", "optimizer.lrr=1"), ["optimizer.lrr", "optimizer.lr"]),
            (("train", config, "--set", "training.steps=many"), ["training.steps", "many"]),
            (("train", config, "--must-be-new"), ["--must-be-new"]),
            (("train", config, "--fresh"), ["--must-be-new"]),  # its old name
            (("plan", config, "--gpus", "0"), ["--gpus"]),
            (("train", config, "--ranks", "1.5"), ["--ranks", "1.5"]),
            (("train", config, "--ranks="), ["--ranks"]),
            (("generate", self.path("run"), "--tokens", "1.5"), ["--tokens", "1.5"]),
            (("eval", self.path("nowhere")), ["nowhere"]),
            (("eval", self.path("")), ["no checkpoint"]),
            (("eval", self.path("run"), "--data", "/nowhere.npy"), ["/nowhere.npy"]),
            (("generate", self.path("run"), "--prompt", "text"), ["--prompt-tokens"]),
            (("generate", self.path("run"), "--prompt-tokens", "1,9999"), ["9999"]),
            (("generate", self.path("run"), "--prompt-tokens", "1,2x"), ["--prompt-tokens", "1,2x"]),
            (("generate", self.path("run"), "--prompt-tokens", "1,,2"), ["--prompt-tokens", "1,,2"]),
            (("generate", self.path("run"), "--prompt-tokens", "99999999999"), ["--prompt-tokens", "99999999999"]),
            (("generate", self.path("run"), "--prompt-tokens", "1", "--prompt", "a"), ["not both"]),
            (("generate", self.path("run"), "--prompt-tokens", "1", "--stop-token", "64"), ["--stop-token 64", "64"]),
            (("generate", self.path("run"), "--temperature", "-1"), ["--temperature"]),
            (("generate", self.path("run"), "--prompt-tokens", "1", "--temperature", "nan"), ["--temperature"]),
            (("generate", self.path("run"), "--prompt-tokens", "1", "--top-p", "1.5"), ["--top-p"]),
            (("generate", self.path("run"), "--prompt-tokens", "1", "--batch", "0"), ["--batch"]),
            (("eval", self.path("run"), "--sets", "a.npy"), ["--sets", "a.npy", "NAME=FILE"]),
            (("eval", self.path("run"), "--tasks", "/nowhere.jsonl"), ["/nowhere.jsonl"]),
            (("eval", self.path("run"), "--predictions", "x.jsonl"), ["--predictions", "--tasks"]),
        ]:
            with self.subTest(arguments):
                self.assert_refused(parka(*arguments), words)

    def test_token_ids_out_of_range(self):
        write_tokens(self.path("a.npy"), 21 * SEQUENCE, seed=1, vocab=65000)
        config = dict(self.config, checkpoint={"folder": self.path("other_run")})
        self.assert_refused(self.train(config), ["a.npy", "vocab"])

    def hide_bad_token(self, name):
        """In a file that is long enough for it to be on none of the pages that are looked at when a file is opened."""
        write_tokens(self.path(name), 700 * SEQUENCE, seed=1)
        with open(self.path(name), "r+b") as file:
            file.seek(2 * 2060)
            file.write(b"\xff\xff")

    def test_held_out_ids_out_of_range(self):
        self.config["checkpoint"]["folder"] = folder = self.path("other_run")
        self.config["training"]["steps"] = 8
        self.hide_bad_token("held_out.npy")
        result = self.train(self.config)
        self.assert_refused(result, ["held_out.npy", "vocab"])
        # No step was made: nothing is saved that would bind the config.
        self.assertNotIn("is saved", result.stderr)
        self.assertEqual(checkpoints(folder), [])
        self.config["model"]["d_ffn"] = 96
        write_tokens(self.path("held_out.npy"), 5 * SEQUENCE, seed=1)
        self.assert_exit(self.train(self.config), 0)
        self.hide_bad_token("held_out.npy")
        self.config["training"]["steps"] = 12
        self.assert_refused(self.train(self.config), ["held_out.npy", "step 12 is saved: once this is mended, the same command resumes"])
        self.assertEqual(checkpoints(folder)[-1], "step_00000012")

    def test_mended_tokens(self):
        """A run ends at a token that is none, and does not go on in other data where that is mended."""
        self.config["checkpoint"]["folder"] = self.path("other_run")
        self.config["data"].update(shuffle=False, checksum=True)
        self.config["training"].update(steps=40, eval_interval=20)
        write_tokens(self.path("a.npy"), 700 * SEQUENCE, seed=1)
        with open(self.path("a.npy"), "rb") as file:
            good = file.read()
        self.hide_bad_token("a.npy")
        self.assert_refused(self.train(self.config), ["a.npy", "vocab", "checkpoint.init_from"])
        saved = checkpoints(self.path("other_run"))[-1]
        with open(self.path("a.npy"), "wb") as file:
            file.write(good)
        self.assert_refused(self.train(self.config), [saved, '"a.npy" holds different bytes'])

    def test_checksums_outlive_starts_without_them(self):
        write_tokens(self.path("a.npy"), 700 * SEQUENCE, seed=1)
        self.config["checkpoint"]["folder"] = self.path("checked")

        def go_on(checksum):
            self.config["data"]["checksum"] = checksum
            self.config["training"]["steps"] += 1
            return self.train(self.config)

        self.assert_exit(go_on(True), 0)
        self.assert_exit(go_on(True), 0)
        with open(self.path("a.npy"), "r+b") as file:
            file.seek(350 * SEQUENCE)
            file.write(b"\1\0\2\0\1\0\2\0")
        self.assert_exit(go_on(False), 0)
        self.assert_exit(go_on(False), 0)
        self.assert_refused(go_on(True), ['"a.npy" holds different bytes'])

    def test_states_of_another_format(self):
        """A run goes on with them if that is asked for."""
        self.config["optimizer"].update(states="fp8_expanded", master="fp24_split")
        self.config["training"]["steps"] += 4
        self.assert_refused(self.train(self.config), ['optimizer.states: "fp32" in the checkpoint', "--convert-states"])
        result = self.train(self.config, "--convert-states")
        self.assert_exit(result, 0)
        self.assertIn('changed since: optimizer.states: "fp32" in the checkpoint, "fp8_expanded" now, converted', result.stderr)
        self.assertIn('optimizer.master: "fp32" in the checkpoint, "fp24_split" now, converted', result.stderr)
        self.config["training"]["steps"] += 4
        result = self.train(self.config)  # has these formats itself
        self.assert_exit(result, 0)
        self.assertNotIn("converted", result.stderr)

    def damage(self, checkpoint, name, how):
        path = self.path(f"run/{checkpoint}/{name}")
        with open(path, "rb") as file:
            content = bytearray(file.read())
        with open(path, "wb") as file:
            file.write(how(content))

    def flip(self, content):
        content[len(content) // 2] ^= 1
        return content

    def test_a_damaged_checkpoint_is_named_and_the_one_before_used(self):
        for name, how in [("shard_0.safetensors", self.flip), ("manifest.json", self.flip),
                          ("shard_0.safetensors", lambda content: content[:-100]), ("manifest.json", lambda content: content[:50])]:
            with self.subTest(name):
                shutil.copytree(self.path("run"), self.path("good"))
                self.damage("step_00000008", name, how)
                result = self.train(self.config)
                self.assert_exit(result, 0)
                self.assertIn(name, result.stderr)
                self.assertIn("resuming from " + self.path("run/step_00000004"), result.stderr)
                shutil.rmtree(self.path("run"))
                os.rename(self.path("good"), self.path("run"))

    def test_all_checkpoints_damaged(self):
        for checkpoint in checkpoints(self.path("run")):
            self.damage(checkpoint, "shard_0.safetensors", self.flip)
        self.checkpoints_before = self.digest()
        self.assert_refused(self.train(self.config), [self.path("run")])
        self.assert_refused(parka("eval", self.path("run/step_00000008")), ["shard_0.safetensors"])

    def test_full_disk(self):
        def limit_file_size():
            # A write beyond this fails like one on a full disk does; the signal that would come first stays ignored.
            resource.setrlimit(resource.RLIMIT_FSIZE, (30000, 30000))

        config = self.write_config(self.config)
        result = subprocess.run([PROGRAM, "--threads", "1", "train", config], capture_output=True, text=True, timeout=300,
                                preexec_fn=limit_file_size, restore_signals=False)
        self.assert_refused(result, ["step_00000012"], code=IO_FAILED)
        self.assertEqual(checkpoints(self.path("run")), ["step_00000004", "step_00000008"])
        self.assert_exit(self.train(self.config), 0)  # with room again the run goes on

    @unittest.skipUnless(os.getuid() == 0, "only root can be a user of whom nothing else runs")
    def test_few_threads(self):
        """Where the system allows fewer threads a run goes on with those, or says which limit it is that ends it."""
        user = 61000 + os.getpid() % 4000
        program = shutil.copy(PROGRAM, self.path("parka"))  # the folder that it is in may be closed to others
        config = self.write_config(self.config)
        for folder, _, names in os.walk(self.folder):
            for path in [folder, *(os.path.join(folder, name) for name in names)]:
                os.chown(path, user, user)

        def run(limit, *arguments):
            def become_the_user():
                resource.setrlimit(resource.RLIMIT_NPROC, (limit, limit))
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)

            # The search for leaks wants a thread of its own.
            return subprocess.run([program, "--threads", "4", *arguments], capture_output=True, text=True, timeout=120,
                                  preexec_fn=become_the_user, env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"})

        for limit in (1, 2):  # the thread that reads the data, and the one that saves
            self.assert_refused(run(limit, "train", config), ["cannot start the thread that", "ulimit -u"])
        # One that the sanitizers may have, the program's own, the two above and a worker: not one for each of 4.
        result = run(5, "train", config)
        self.assert_exit(result, 0)
        self.assertRegex(result.stderr, r"continuing with [23] of 4 CPU threads: cannot start the thread that computes: .*ulimit -u")
        self.assertEqual(len(result.stderr.split("continuing with")), 2, result.stderr)

    def test_a_refused_start_leaves_no_file(self):
        self.config["checkpoint"]["folder"] = self.path("new")
        for change, words in [(setting("data.train", [self.path("missing.npy")]), ["missing.npy"]),
                              (setting("checkpoint.init_from", self.path("nowhere")), ["nowhere"])]:
            config = json.loads(json.dumps(self.config))
            change(self, config)
            self.assert_refused(self.train(config), words)
            self.assertFalse(os.path.exists(self.path("new")))
        self.assert_exit(self.train(self.config), 0)
        self.assertIn("lock", os.listdir(self.path("new")))

    def test_two_runs_in_one_folder(self):
        with open(self.path("run/lock"), "a", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self.assert_refused(self.train(self.config), [self.path("run"), "another process"])
        self.assert_exit(self.train(self.config), 0)

    def test_options_of_tasks_need_tasks(self):
        for option, value in (("--max-documents", "3"), ("--predictions", self.path("predictions.jsonl"))):
            self.assert_refused(parka("eval", self.path("run"), option, value), [f"{option} needs tasks"])

    def test_an_evaluation_without_a_loss_is_none(self):
        self.config["optimizer"].update(lr=1e30, schedule={"kind": "constant"})
        self.config["model"].update(norm="rmsnorm", tie_embeddings=False)
        self.config["training"].update(steps=1, eval_interval=0)
        self.config["checkpoint"]["folder"] = self.path("diverged")
        self.assert_exit(self.train(self.config), 0)
        # Its only step had a loss; its weights of 1e30 have none.
        for chosen in ((), ("--sets", "held=" + self.path("held_out.npy"))):
            result = parka("eval", self.path("diverged"), "--json", *chosen)
            self.assert_refused(result, ["held" if chosen else "data.eval", "not finite", "diverged"], code=NOT_FINITE)
            self.assertEqual(result.stdout, "")
        with open(self.path("held_out.npy.mask"), "wb") as file:
            file.write(bytes(os.path.getsize(self.path("held_out.npy")) // 2))
        self.assert_refused(parka("eval", self.path("diverged"), "--set", "data.loss_mask=true"), ["data.eval", "none of", "target"])

    def test_overrides_that_make_another_model_of_a_checkpoint(self):
        run = self.path("run")
        for key, value, own in (("num_layers", "1", "2"), ("tie_embeddings", "false", "true"), ("norm_eps", "0.1", "1e-05")):
            for command in (("eval",), ("generate", "--prompt-tokens", "1", "--tokens", "1")):
                result = parka(command[0], run, *command[1:], "--set", f"model.{key}={value}")
                self.assert_refused(result, [f"model.{key}: {own} in the checkpoint", "another model"])
        # Longer contexts have other angles, and how weights began says nothing of what they are.
        self.assert_exit(parka("eval", run, "--set", "model.rope_theta=50", "--set", "model.init_std=0.5"), 0)

    def test_an_evaluation_without_a_loss_ends_training(self):
        self.config["optimizer"].update(lr=1e30, schedule={"kind": "constant"})
        self.config["model"].update(norm="rmsnorm", tie_embeddings=False)
        self.config["training"].update(steps=1, eval_interval=1)
        self.config["checkpoint"]["folder"] = self.path("diverged")
        result = self.train(self.config)
        self.assert_refused(result, ["data.eval", "not finite", "diverged"], code=NOT_FINITE)
        self.assertEqual(checkpoints(self.path("diverged")), ["step_00000001"])
        for name, marked in (("a.npy", 1), ("b.npy", 1), ("held_out.npy", 0)):
            with open(self.path(name + ".mask"), "wb") as file:
                file.write(bytes([marked]) * (os.path.getsize(self.path(name)) // 2))
        self.config["data"].update(loss_mask=True, eval=[])
        self.config["evaluation"] = {"sets": ["held=" + self.path("held_out.npy")]}
        self.config["checkpoint"]["folder"] = self.path("unmarked")
        self.assert_refused(self.train(self.config), ["held", "none of", "target"])

    def test_loss_that_is_not_finite_where_gradients_are_released(self):
        self.config["optimizer"].update(lr=1e30, schedule={"kind": "constant"}, release_gradients=True)
        self.config["training"]["micro_batch_size"] = self.config["training"]["global_batch_size"]
        self.config["checkpoint"].update(interval=1, folder=self.path("released"))
        result = self.train(self.config)
        wanted = ["step ", "not both finite", "parts of the weights", "not saved", "goes on from the last checkpoint"]
        self.assert_refused(result, wanted, code=NOT_FINITE)
        bad_step = int(re.search(r"step (\d+): loss", result.stderr)[1])
        saved = [f"step_{step:08}" for step in range(1, bad_step - 1)]  # the step before has left infinite weights
        self.assertEqual(checkpoints(self.path("released")), saved)
        self.config["training"]["non_finite"] = "skip"
        self.assert_refused(self.train(self.config), ["optimizer.release_gradients"])

    @unittest.skipUnless(os.path.exists("/dev/full"), "needs /dev/full")
    def test_output_that_cannot_be_written(self):
        for arguments in [("config", "show", self.write_config(self.config)), ("config", "schema")]:
            with self.subTest(arguments), open("/dev/full", "w", encoding="utf-8") as full:
                result = subprocess.run([PROGRAM, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
                self.assertEqual(result.returncode, IO_FAILED)
                self.assertIn("standard output: cannot be written", result.stderr)

    def test_a_result_file_that_cannot_be_written_is_refused_before_the_work(self):
        config = self.write_config(self.config)
        for path, reason in [(self.path("missing/one.json"), "No such file or directory"), (self.folder, "Is a directory")]:
            for arguments in [("bench", config, "--json", path), ("tune", config, "--output", path)]:
                with self.subTest(arguments):
                    result = parka(*arguments)
                    self.assert_refused(result, [f"cannot create {path}", reason])
                    self.assertEqual(result.stdout, "")

    def test_a_result_file_that_is_the_config_is_refused(self):
        config = self.write_config(self.config)
        with open(config, "rb") as file:
            before = file.read()
        os.symlink(config, self.path("link.json"))
        for path in (config, self.path("link.json")):
            for arguments in [("bench", config, "--json", path), ("tune", config, "--output", path)]:
                with self.subTest(arguments):
                    self.assert_refused(parka(*arguments), [path, "this command reads it", "write to another file"])
        with open(config, "rb") as file:
            self.assertEqual(file.read(), before)

    def latin_folder(self):
        """A folder whose name is no UTF-8, as bytes; or the test is skipped."""
        folder = os.fsencode(self.path("caf")) + b"\xe9"
        try:
            os.mkdir(folder)
        except OSError:
            self.skipTest("this file system takes UTF-8 names only")
        return folder

    def test_names_that_are_not_utf8(self):
        folder = self.latin_folder()
        shutil.copy(self.path("a.npy"), folder + b"/a.npy")
        shutil.copy(self.path("a.npy"), os.fsencode(self.path("a")) + b"\xe9.npy")
        self.config["data"]["train"] = [self.path("a?.npy")]
        self.config["checkpoint"]["folder"] = self.path("new")
        self.assert_refused(self.train(self.config), ["its name is not UTF-8", "rename it"])
        self.assertFalse(os.path.exists(self.path("new")))
        self.config["data"]["train"] = [self.path("caf?/a.npy")]  # only names of files are recorded
        self.assert_exit(self.train(self.config), 0)
        result = parka("data", "--json", self.path("caf?/a.npy"))
        self.assert_exit(result, 0)
        self.assertEqual(json.loads(result.stdout)["tokens"], 21 * SEQUENCE + 5)

    def test_a_base_in_a_folder_that_is_not_utf8(self):
        folder = self.latin_folder()
        shutil.copytree(os.fsencode(self.path("run/step_00000008")), folder + b"/base")
        config = self.write_config(self.config)
        result = parka("train", config, "--set", "checkpoint.init_from=base", "--set", "finetune.method=lora", "--set",
                       "checkpoint.folder=tuned", cwd=folder)
        self.assert_refused(result, ["base: its name is not UTF-8"])

    def test_a_low_soft_limit_of_open_files_is_raised(self):
        paths = [self.path(f"{number}.npy") for number in range(120)]
        for number, path in enumerate(paths):
            write_tokens(path, SEQUENCE + 1, seed=number)
        self.config["data"]["train"] = paths
        self.config["checkpoint"]["folder"] = self.path("new")
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        for steps in (8, 12):
            self.config["training"]["steps"] = steps
            result = self.train(self.config, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (126, hard)))
            self.assert_exit(result, 0)

    def test_a_checkpoint_whose_name_is_too_long(self):
        self.assert_refused(parka("eval", self.path("x" * 300)), ["no such checkpoint or run folder"])

    def test_a_plan_says_that_a_batch_does_not_divide(self):
        config = self.write_config(self.config)
        batch = self.config["training"]["global_batch_size"]
        self.assertNotIn("cannot be divided", parka("plan", config).stdout)
        self.assertIn(f"This batch cannot be divided: training.global_batch_size {batch} is not a multiple of",
                      parka("plan", config, "--gpus", str(batch + 1)).stdout)

    def test_numbers_on_the_command_line(self):
        for value, message in [(value, "be a positive number") for value in ("-1", "0", "many", "inf")]:
            with self.subTest(value):
                result = parka("plan", self.write_config(self.config), f"--memory-limit={value}")
                self.assert_refused(result, [f"--memory-limit: got {value}; it must", message])
                self.assertLess(len(result.stderr), 120)

        for value in ("-1", "1.5", "18446744073709551616", "some"):
            with self.subTest(seed=value):
                result = parka("generate", self.path("run"), "--prompt-tokens", "1", f"--seed={value}")
                self.assert_refused(result, [f"--seed: got {value}; it must be a whole number from 0 to 2^64 - 1"])

    def test_a_memory_limit_may_have_a_unit(self):
        config = self.write_config(self.config)
        for text, limit in (("24", "24.0"), ("24GB", "24.0"), ("24 GB", "24.0"), ("24GiB", "25.8")):
            self.assertIn(f"into {limit} GB", parka("plan", config, "--memory-limit", text).stdout)
        self.assert_refused(parka("plan", config, "--memory-limit", "24XB"), ["--memory-limit: got 24XB; it must"])

    def test_help_succeeds(self):
        for arguments in [("--help",), ("train", "--help"), ("config", "show", "--help"), ("--version",)]:
            result = parka(*arguments)
            self.assert_exit(result, 0)
            self.assertGreater(len(result.stdout), 5)


if __name__ == "__main__":
    unittest.main()
