"""What other programs, other runs and the user do to a run folder, before a run and while it trains."""
import json
import os
import shutil
import signal
import subprocess
import time
import unittest

from parka_runs import PROGRAM, RunFolder, checkpoints, faulty_files, metrics, parka, tiny_config, tree_digest

BAD_INPUT, IO_FAILED = 2, 4
ENDLESS = 1000000


class RunFolders(RunFolder):
    def start(self, config, name="first.json", **options):
        """A run in the background."""
        process = subprocess.Popen([PROGRAM, "--threads", "1", "train", self.write_config(config, name)],
                                   stderr=subprocess.PIPE, text=True, **options)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, condition, process):
        deadline = time.monotonic() + 120
        while not condition():
            self.assertIsNone(process.poll(), "the run has ended")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def endless_config(self, interval=1000):
        config = tiny_config(self.folder, "fp32", steps=ENDLESS)
        config["training"]["eval_interval"] = 0
        config["checkpoint"].update(interval=interval, keep=2)
        config["optimizer"]["schedule"] = {"kind": "constant"}
        return config

    def read(self, name):
        with open(self.path(name), encoding="utf-8") as file:
            return file.read()

    def has_checkpoint(self):
        return os.path.isdir(self.path("run")) and len(checkpoints(self.path("run"))) > 0


class InMidRun(RunFolders):
    def test_a_run_whose_folder_was_moved_leaves_the_next_run_there_alone(self):
        first = self.start(self.endless_config(interval=50))
        self.wait_for(self.has_checkpoint, first)
        first.send_signal(signal.SIGSTOP)  # so that it meets with the other run's files
        os.rename(self.path("run"), self.path("moved"))
        config = tiny_config(self.folder, "fp32", steps=8)
        config["training"]["seed"] = 7
        self.assert_exit(self.train(config), 0)
        before = tree_digest(self.path("run"))
        first.send_signal(signal.SIGCONT)
        _, log = first.communicate(timeout=120)
        self.assertEqual(first.returncode, IO_FAILED, log)
        self.assertIn(f"parka: error: {self.path('run')}: is no longer the folder in which this run began", log)
        self.assertEqual(tree_digest(self.path("run")), before)
        again = self.train(config)
        self.assert_exit(again, 0)
        self.assertIn("nothing to do: the run is at step 8 of 8", again.stderr)
        # And the first run goes on from where it was, in its folder's new name.
        config = self.endless_config()
        config["checkpoint"]["folder"] = self.path("moved")
        config["training"]["steps"] = len(metrics(self.path("moved"))) + 5
        self.assert_exit(self.train(config), 0)

    def test_a_folder_that_was_removed_is_not_made_again(self):
        for remains in ([], ["lock"]):
            with self.subTest(remains):
                run = self.start(self.endless_config(interval=20))
                self.wait_for(self.has_checkpoint, run)
                if remains:
                    os.remove(self.path("run/lock"))
                else:
                    os.rename(self.path("run"), self.path("elsewhere"))
                _, log = run.communicate(timeout=120)
                self.assertEqual(run.returncode, IO_FAILED, log)
                self.assertIn("is no longer the folder", log)
                self.assertEqual(os.path.exists(self.path("run")), bool(remains))
                shutil.rmtree(self.path("run"), ignore_errors=True)

    def test_metrics_that_were_rotated_go_on_in_a_new_file(self):
        run = self.start(self.endless_config())
        path = self.path("run/metrics.jsonl")
        self.wait_for(lambda: os.path.exists(path) and os.path.getsize(path) > 3000, run)
        os.rename(path, path + ".old")
        self.wait_for(lambda: os.path.exists(path) and os.path.getsize(path) > 3000, run)
        run.terminate()
        _, log = run.communicate(timeout=120)
        self.assertEqual(run.returncode, 75, log)
        self.assertEqual(log.count("was removed, moved or replaced"), 1, log)
        with open(path + ".old", encoding="utf-8") as old, open(path, encoding="utf-8") as new:
            records = [json.loads(line) for line in [*old, *new]]
        starts = [record for record in records if record["kind"] == "start"]
        self.assertEqual(len(starts), 2)
        self.assertEqual(starts[0], starts[1])  # without which the times in the new file would mean nothing
        steps = [record["step"] for record in records if record["kind"] == "train"]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))


class AtTheStart(RunFolders):
    def setUp(self):
        super().setUp()
        self.config = tiny_config(self.folder, "fp32", steps=8)

    def write(self, name, text):
        os.makedirs(os.path.dirname(self.path(name)), exist_ok=True)
        with open(self.path(name), "w", encoding="utf-8") as file:
            file.write(text)

    def assert_refused(self, result, *words):
        self.assert_exit(result, BAD_INPUT)
        errors = [line for line in result.stderr.splitlines() if line.startswith("parka: ")]
        self.assertEqual(len(errors), 1, result.stderr)
        for word in words:
            self.assertIn(word, errors[0])

    def test_files_that_no_run_wrote_are_not_taken(self):
        own = "// mine\n" + json.dumps(self.config)
        cases = [("config.json", own), ("config.json", '{"architectures": ["LlamaForCausalLM"], "vocab_size": 64}\n'), ("config.json", ""),
                 ("config.json", json.dumps(self.config, indent=2) + "\n"), ("metrics.jsonl", '{"step": 1, "loss": 2.0}\n'),
                 ("metrics.jsonl", "loss 2.0 at step 1\n")]
        for name, text in cases:
            with self.subTest(text[:20]):
                self.write("run/" + name, text)
                before = tree_digest(self.path("run"))
                self.assert_refused(self.train(self.config), self.path("run/" + name), "was not written by a run", "rename")
                self.assertEqual(tree_digest(self.path("run")), before)
                shutil.rmtree(self.path("run"))
        # The one that the command line names is no exception.
        self.write("run/config.json", own)
        self.assert_refused(parka("train", self.path("run/config.json")), self.path("run/config.json"))
        self.assertEqual(self.read("run/config.json"), own)
        self.assertEqual(os.listdir(self.path("run")), ["config.json"])

    def test_a_folder_of_data_or_of_a_model_is_none_of_a_run(self):
        for name in ("data.json", "train-00000.npy", "ids.bin", "ids.idx", "model-00001-of-00002.safetensors", "text.parquet"):
            with self.subTest(name):
                self.write("run/notes.txt", "mine")
                self.write("run/" + name, "{}")
                before = tree_digest(self.path("run"))
                self.assert_refused(self.train(self.config), "checkpoint.folder", name)
                self.assertEqual(tree_digest(self.path("run")), before)
                os.remove(self.path("run/" + name))
        self.assert_exit(self.train(self.config), 0)
        # A run that lies among such files goes on there.
        self.write("run/data.json", "{}")
        self.config["training"]["steps"] += 1
        self.assert_exit(self.train(self.config), 0)

    def test_the_config_of_a_run_may_be_named_and_stays(self):
        self.assert_exit(self.train(self.config), 0)
        before = self.read("run/config.json")
        result = parka("train", self.path("run/config.json"), "--set", "training.steps=10")
        self.assert_exit(result, 0)
        self.assertIn("stays as it is", result.stderr)
        self.assertEqual(self.read("run/config.json"), before)
        self.assertEqual(len(metrics(self.path("run"))), 10)
        # As the config of another file it is brought up to date.
        self.config["training"]["steps"] = 12
        self.assert_exit(self.train(self.config), 0)
        self.assertEqual(json.loads(self.read("run/config.json"))["training"]["steps"], 12)

    def test_the_config_of_a_moved_run_does_not_start_another(self):
        self.assert_exit(self.train(self.config), 0)
        os.rename(self.path("run"), self.path("moved"))
        for named in ("moved", "moved/config.json"):
            self.assert_refused(parka("train", self.path(named), "--set", "training.steps=10"), f"has checkpoint.folder = {self.path('run')}",
                                f"--set checkpoint.folder={self.path('moved')}")
        self.assertFalse(os.path.exists(self.path("run")))
        result = parka("train", self.path("moved"), "--set", "training.steps=10", "--set", f"checkpoint.folder={self.path('moved')}")
        self.assert_exit(result, 0)
        self.assertEqual(len(metrics(self.path("moved"))), 10)

    def test_a_run_that_is_done_changes_nothing_when_it_is_asked_again(self):
        self.assert_exit(self.train(self.config), 0)
        before = tree_digest(self.path("run"))
        for options in ((), ("--set", "training.steps=6")):
            self.assert_exit(self.train(self.config, *options), 0)
            self.assertEqual(tree_digest(self.path("run")), before)

    def test_the_folder_of_an_older_parka_goes_on(self):
        self.assert_exit(self.train(self.config), 0)
        older = json.loads(self.read("run/config.json"))
        del older["telemetry"], older["training"]["seed"]
        self.write("run/config.json", json.dumps(older, indent=2) + "\n")
        self.config["training"]["steps"] = 10
        self.assert_exit(self.train(self.config), 0)
        self.assertIn("telemetry", json.loads(self.read("run/config.json")))

    def test_folders_that_cannot_be_used_are_bad_input(self):
        os.makedirs(self.path("run/config.json"))
        self.assert_refused(self.train(self.config), self.path("run/config.json"))
        os.rmdir(self.path("run/config.json"))
        deep = self.path("run")
        while len(deep) < 4070:
            deep += "/" + "d" * min(200, 4075 - len(deep))
        self.config["checkpoint"]["folder"] = deep
        self.assert_refused(self.train(self.config), "checkpoint.folder", str(len(deep)))

    def test_a_folder_without_search_permission_is_bad_input(self):
        os.mkdir(self.path("run"))
        os.chmod(self.path("run"), 0o644)
        os.chmod(self.folder, 0o755)
        other = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
        program = PROGRAM
        if other:
            os.chown(self.path("run"), 65534, 65534)
            program = shutil.copy(PROGRAM, self.path("parka"))  # the folder that it is in may be closed to others
        result = subprocess.run([program, "--threads", "1", "train", self.write_config(self.config)], capture_output=True, text=True,
                                timeout=300, **other)
        self.assert_refused(result, self.path("run"))

    def test_what_killed_starts_left_is_removed(self):
        for _ in range(2):
            killed = self.train(self.config, env=faulty_files("unlink:*/.write_test_*:KILL:1:1"))
            self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
        self.assertEqual(len([name for name in os.listdir(self.path("run")) if name.startswith(".write_test_")]), 2)
        self.assert_exit(self.train(self.config), 0)
        for name in ("step_00000012.tmp", "step_00000004.delete"):
            self.write(f"run/{name}/shard_0.safetensors", "half of a file")
        done = self.train(self.config)
        self.assert_exit(done, 0)
        self.assertIn("nothing to do", done.stderr)
        self.assertEqual(sorted(os.listdir(self.path("run"))),
                         ["config.json", "lock", "metrics.jsonl", "step_00000004", "step_00000008"])

    def test_what_a_killed_save_left_makes_room_before_the_next_one(self):
        self.assert_exit(self.train(self.config), 0)
        self.write("run/step_00000099.tmp/shard_0.safetensors", "half of a file")
        self.config["training"]["steps"] = 10
        self.assert_exit(self.train(self.config, env=faulty_files("write:*/step_*.tmp/*:ENOSPC:1:0")), 4)
        self.assertFalse(os.path.exists(self.path("run/step_00000099.tmp")))

    def test_a_start_with_nothing_to_do_leaves_later_records(self):
        self.config["checkpoint"]["save_final"] = False
        self.config["optimizer"]["schedule"] = {"kind": "constant"}
        self.config["training"]["steps"] = 6
        self.assert_exit(self.train(self.config), 0)
        before = self.read("run/metrics.jsonl")
        self.config["training"]["steps"] = 4
        result = self.train(self.config)
        self.assert_exit(result, 0)
        self.assertIn("nothing to do", result.stderr)
        self.assertEqual(self.read("run/metrics.jsonl"), before)

    def test_streams_that_are_closed_become_no_file_of_the_run(self):
        """The next file that is opened would take the number of such a stream, and the log would go there."""
        self.config["checkpoint"]["interval"] = 100
        written = None
        for closed in ("", "2>&-", "2>&- >&-", "2>&- >&- <&-"):
            with self.subTest(closed):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                command = ["sh", "-c", f'exec "$0" "$@" {closed}', PROGRAM, "--threads", "1", "train", self.write_config(self.config)]
                self.assertEqual(subprocess.run(command, stderr=subprocess.DEVNULL, timeout=300).returncode, 0)
                self.assertEqual(self.read("run/lock"), "")
                found = [(line["kind"], line.get("loss")) for line in map(json.loads, self.read("run/metrics.jsonl").splitlines())]
                written = written or found
                self.assertEqual(found, written)

    def test_a_file_system_without_locks_is_told_of(self):
        result = self.train(self.config, env=faulty_files("flock:*/run/lock:ENOLCK:1:0"))
        self.assert_exit(result, 0)
        self.assertEqual(result.stderr.count("run/lock: cannot be locked (No locks available)"), 1, result.stderr)


class Checkpoints(RunFolders):
    def setUp(self):
        super().setUp()
        self.config = tiny_config(self.folder, "fp32", steps=8)
        self.assert_exit(self.train(self.config), 0)
        self.config["training"]["steps"] = 12

    def test_an_error_of_reading_is_no_damage(self):
        before = tree_digest(self.path("run"))
        for rule in ("read:*/step_00000008/shard_0*:EIO:1:1", "read:*/step_00000008/manifest.json:ESTALE:1:1",
                     "open:*/step_00000008/shard_0*:EMFILE:1:1", "open:*/step_00000008/shard_0*:EACCES:1:1",
                     "open:*/step_00000008/manifest.json:EACCES:1:0", "open:*/step_00000008/shard_0*:ENOMEM:2:1"):
            with self.subTest(rule):
                result = self.train(self.config, env=faulty_files(rule))
                self.assert_exit(result, IO_FAILED)
                self.assertIn("parka: error: checkpoint of step 8 could not be read: cannot ", result.stderr)
                self.assertEqual(tree_digest(self.path("run")), before)
        self.assert_exit(self.train(self.config), 0)
        self.assertEqual(len(metrics(self.path("run"))), 12)

    def test_a_refused_checkpoint_does_not_come_back(self):
        shard = self.path("run/step_00000008/shard_0.safetensors")
        for name in ("step_00000008.refused", "step_00000008.refused.2"):
            with self.subTest(name):
                os.rename(shard, self.path("shard"))
                for arguments in (("eval", self.path("run")), ("generate", self.path("run"), "--prompt-tokens", "1")):  # only read
                    self.assert_exit(parka(*arguments), 0)
                self.assertIn("step_00000008", checkpoints(self.path("run")))
                result = self.train(self.config, "--set", "training.steps=6", "--set", "optimizer.schedule.total_steps=12")
                self.assert_exit(result, 0)
                self.assertIn("resuming from " + self.path("run/step_00000004"), result.stderr)
                self.assertIn(name, result.stderr)
                os.rename(self.path("shard"), self.path(f"run/{name}/shard_0.safetensors"))  # too late
                again = self.train(self.config, "--set", "training.steps=8", "--set", "optimizer.schedule.total_steps=12")
                self.assert_exit(again, 0)
                self.assertIn("resuming from " + self.path("run/step_00000006"), again.stderr)
                self.assertEqual(len(metrics(self.path("run"))), 8)
                shutil.rmtree(self.path("run/step_00000006"))

    def test_checkpoints_that_will_be_removed_are_told_of(self):
        config = tiny_config(self.folder, "fp32", steps=10)
        config["checkpoint"].update(folder=self.path("kept"), interval=2)
        self.assert_exit(self.train(config), 0)
        config["checkpoint"]["keep"] = 2
        told = f"checkpoint.keep = 2: the older ones of the 5 checkpoints in {self.path('kept')} will be removed; move away what is to stay"
        self.assertNotIn(told, self.train(config).stderr)  # it has nothing to do, and removes none
        for steps, is_told in ((11, True), (12, False)):
            config["training"]["steps"] = steps
            result = self.train(config)
            self.assert_exit(result, 0)
            self.assertEqual(told in result.stderr, is_told)
            self.assertEqual(checkpoints(self.path("kept")), [f"step_{step:08}" for step in (steps - 1, steps)])
        # An evaluation that is made up for shows that the weights are sound, and removes older ones, too.
        config["checkpoint"]["keep"] = 0
        config["training"]["steps"] = 16
        self.assert_exit(self.train(config), 0)
        config["checkpoint"]["keep"] = 2
        config["evaluation"] = {"sets": [f"more={self.path('held_out.npy')}"]}
        self.assertIn("the older ones of the 4 checkpoints in", self.train(config).stderr)
        self.assertEqual(checkpoints(self.path("kept")), ["step_00000014", "step_00000016"])

    def test_another_start_is_ignored_and_not_kept(self):
        self.config["checkpoint"].update(folder=self.path("begun"), init_from=self.path("run"))
        self.config["training"]["steps"] = 6
        self.config["optimizer"]["schedule"]["total_steps"] = 10
        self.assert_exit(self.train(self.config), 0)
        kept = lambda name: json.loads(self.read(name))["checkpoint"]["init_from"]
        for steps, given in ((8, self.path("other")), (10, "")):
            with self.subTest(given=given):
                self.config["checkpoint"]["init_from"] = given
                self.config["training"]["steps"] = steps
                result = self.train(self.config)
                self.assert_exit(result, 0)
                said = [line for line in result.stderr.splitlines() if "init_from" in line]
                self.assertEqual(len(said), 1 if given else 0, result.stderr)
                for line in said:
                    self.assertIn(f"checkpoint.init_from = {given} is ignored", line)
                    self.assertIn(f"began with {self.path('run')};", line)
                self.assertEqual(kept("begun/config.json"), self.path("run"))
                self.assertIn(f'"init_from": "{self.path("run")}"', self.read(f"begun/step_{steps:08}/manifest.json"))

    def test_what_has_the_name_of_a_checkpoint_is_kept_aside(self):
        os.symlink(self.path("nowhere"), self.path("run/step_00000012"))
        result = self.train(self.config)
        self.assert_exit(result, 0)
        self.assertTrue(os.path.islink(self.path("run/step_00000012.refused")))
        self.assertEqual(checkpoints(self.path("run")), ["step_00000004", "step_00000008", "step_00000012"])

    def test_permission_that_is_lost_in_mid_run_is_an_io_error(self):
        for rule in ("mkdir:*/step_00000012.tmp*:EACCES:1:0", "open:*/step_00000012.tmp/*:ENOENT:1:0"):
            with self.subTest(rule):
                self.assert_exit(self.train(self.config, env=faulty_files(rule)), IO_FAILED)


class Metrics(RunFolders):
    def setUp(self):
        super().setUp()
        self.config = tiny_config(self.folder, "fp32", steps=8)
        self.metrics_path = self.path("run/metrics.jsonl")

    def test_records_are_durable_before_their_checkpoint_is(self):
        """Only rank 0's save of step 8 syncs the metrics; a failure of that is told and no failure of the save."""
        result = self.train(self.config, env=faulty_files("fsync:*/metrics.jsonl:EIO:2:1"))
        self.assert_exit(result, 0)
        self.assertEqual(result.stderr.count(f"cannot sync {self.metrics_path}: Input/output error"), 1, result.stderr)
        self.assertEqual(len(checkpoints(self.path("run"))), 2)
        shutil.rmtree(self.path("run"))
        killed = self.train(self.config, env=faulty_files("fsync:*/metrics.jsonl:KILL:2:1"))
        self.assertEqual(killed.returncode, -signal.SIGKILL)
        self.assertEqual(checkpoints(self.path("run")), ["step_00000004"])  # not before

    def write_metrics(self, text):
        with open(self.metrics_path, "w", encoding="utf-8") as file:
            file.write(text)

    def test_metrics_that_are_no_file_are_refused_at_once(self):
        self.assert_exit(self.train(self.config), 0)
        for kind in ("/dev/zero", "/dev/random", "a pipe", "a folder"):
            with self.subTest(kind):
                path = self.path("run/metrics.jsonl")
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
                if kind == "a pipe":
                    os.mkfifo(path)
                elif kind == "a folder":
                    os.mkdir(path)
                else:
                    os.symlink(kind, path)
                result = self.train(self.config, "--set", "training.steps=10")
                self.assert_exit(result, BAD_INPUT)
                self.assertIn(f"{self.metrics_path}: is not a regular file", result.stderr)

    def test_warnings_are_marked_and_counted(self):
        self.assertNotIn("warning", self.train(self.config).stderr)
        for damage, count in ((["metrics.jsonl"], 1), (["metrics.jsonl", "step_00000010/manifest.json"], 3), (["step_00000012/manifest.json"], 2)):
            with self.subTest(damage):
                for name in damage:
                    with open(self.path(f"run/{name}"), "ab") as file:
                        file.write(b"{torn")
                self.config["training"]["steps"] += 2
                log = self.train(self.config).stderr.splitlines()
                self.assertEqual(sum(" warning: " in line for line in log), count, log)
                self.assertIn(f"{count} warning{'s' if count > 1 else ''}, see above", log[-1])

    def test_missing_records_are_told_when_a_run_goes_on(self):
        self.assert_exit(self.train(self.config), 0)
        with open(self.metrics_path, encoding="utf-8") as file:
            lines = file.readlines()
        cut = [line for line in lines if json.loads(line)["step"] <= 5]
        for remains, missing in ((lines, None), (cut, "steps 6 to 8"), ([], "steps 1 to 8"), (None, "steps 1 to 8")):
            with self.subTest(missing):
                os.remove(self.metrics_path)
                if remains is not None:
                    with open(self.metrics_path, "w", encoding="utf-8") as file:
                        file.writelines(remains)
                result = self.train(self.config, "--set", "training.steps=8")
                self.assert_exit(result, 0)
                self.assertEqual("are missing" in result.stderr, missing is not None, result.stderr)
                self.assertIn(missing or "nothing to do", result.stderr)
        holes = [line for line in lines if json.loads(line)["step"] not in (3, 5)]
        self.write_metrics("".join(holes))
        self.assertIn("the records of 2 of the steps 3 to 5 are missing", self.train(self.config, "--set", "training.steps=10").stderr)

    def test_what_is_no_record_of_a_run_is_kept_beside(self):
        self.assert_exit(self.train(self.config), 0)
        self.write_metrics("my own notes\n")
        result = self.train(self.config, "--set", "training.steps=10")
        self.assert_exit(result, 0)
        self.assertIn(f"{self.metrics_path}: had no record of a run; it is now {self.metrics_path}.1", result.stderr)
        with open(f"{self.metrics_path}.1", encoding="utf-8") as file:
            self.assertEqual(file.read(), "my own notes\n")

    def test_a_pipe_in_the_place_of_metrics_is_refused(self):
        os.mkdir(self.path("run"))
        os.mkfifo(self.metrics_path)
        result = self.train(self.config)
        self.assert_exit(result, 2)
        self.assertIn(f"{self.metrics_path}: is not a regular file", result.stderr)

    def test_a_link_stays_a_link(self):
        self.assert_exit(self.train(self.config), 0)
        os.rename(self.metrics_path, self.path("elsewhere.jsonl"))
        os.symlink(self.path("elsewhere.jsonl"), self.metrics_path)
        with open(self.metrics_path, "a", encoding="utf-8") as file:
            file.write('{"kind":"tr')
        self.assert_exit(self.train(self.config, "--set", "training.steps=10"), 0)
        self.assertTrue(os.path.islink(self.metrics_path))
        self.assertEqual(len(metrics(self.path("run"))), 10)

    def test_a_new_run_begins_with_an_empty_file(self):
        killed = self.train(self.config, env=faulty_files("mkdir:*/step_00000004.tmp:KILL:1:1"))
        self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
        self.assertIn(len(metrics(self.path("run"), "eval")), (1, 2))  # step 4 is saved while it is evaluated
        result = self.train(self.config)
        self.assert_exit(result, 0)
        self.assertIn(self.metrics_path + ".1", result.stderr)
        self.assertEqual([record["step"] for record in metrics(self.path("run"), "eval")], [0, 4, 8])
        self.assertEqual(len(metrics(self.path("run"))), 8)
        # Without a step there is nothing to keep.
        shutil.rmtree(self.path("run"))
        killed = self.train(self.config, env=faulty_files("write:*/metrics.jsonl:KILL:2:1"))
        self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
        self.assert_exit(self.train(self.config), 0)
        self.assertEqual([record["step"] for record in metrics(self.path("run"), "eval")], [0, 4, 8])
        self.assertNotIn("metrics.jsonl.1", os.listdir(self.path("run")))


class Ranks(RunFolders):
    def setUp(self):
        super().setUp()
        if shutil.which("mpirun") is None:
            self.skipTest("mpirun is not on PATH")

    def run_ranks(self, *commands):
        """Each command is that of a rank."""
        environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
        joined = [word for command in commands for word in (":", "-np", "1", *command)]
        program = ["mpirun", "--oversubscribe", "--bind-to", "none", *joined[1:]]
        return subprocess.run(program, cwd=self.folder, env=environment, text=True, capture_output=True, timeout=200)

    def setup_ranks(self):
        config = tiny_config(self.folder, "fp32", steps=8)
        config["checkpoint"]["folder"] = "run"
        os.mkdir(self.path("other"))
        return [os.path.abspath(PROGRAM), "--threads", "1", "train", self.write_config(config)]

    def test_ranks_that_do_not_see_one_folder_are_named(self):
        train = self.setup_ranks()
        elsewhere = ["env", "-C", self.path("other"), *train]
        for make in (False, True):
            with self.subTest(make):
                if make:
                    os.mkdir(self.path("other/run"))
                result = self.run_ranks(train, elsewhere)
                output = result.stdout + result.stderr
                self.assertEqual(result.returncode, BAD_INPUT, output)
                for word in ("the ranks do not see the same folder: rank 0 has", self.path("run") + ",", "differs from that of rank 1 at", self.path("other/run")):
                    self.assertIn(word, output)
                self.assertNotIn("rank 0 at", output)
                self.assertFalse(os.path.exists(self.path("run")) and set(os.listdir(self.path("run"))) - {"lock"})
        result = self.run_ranks(train, train)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        self.assertEqual(checkpoints(self.path("run")), ["step_00000004", "step_00000008"])

    def test_a_key_that_differs_between_ranks_is_named_with_its_section(self):
        train = self.setup_ranks()
        result = self.run_ranks(train, [*train, "--set", "optimizer.lr=0.5"])
        output = result.stdout + result.stderr
        self.assertEqual(result.returncode, BAD_INPUT, output)
        self.assertIn("optimizer.lr: 0.5, not optimizer.lr: 0.003", output)


if __name__ == "__main__":
    unittest.main()
