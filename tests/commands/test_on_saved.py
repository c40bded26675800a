"""checkpoint.on_saved: the command runs for complete checkpoints, beside the training, and a run is restored from what it copied.
And addresses of object stores, which Parka does not read."""
import os
import shlex
import shutil
import signal
import subprocess
import time
import unittest

from parka_runs import PROGRAM, STOPPED, RunFolder, learning_curve, metrics, parka, starters, tiny_config, tree_digest

BAD_INPUT = 2
SECONDS = 120


class OnSaved(RunFolder):
    def config(self, command, folder="it's a run", **checkpoint):
        config = tiny_config(self.folder, "parka")
        config["checkpoint"].update(folder=self.path(folder), on_saved=command, **checkpoint)
        return config

    def copying(self, before=""):
        """A command that copies a checkpoint into the folder `store`, where it gets its name when it is complete; `before` is
        what a shell does first."""
        os.makedirs(self.path("store"), exist_ok=True)
        script, store = self.path("copy.sh"), shlex.quote(self.path("store"))
        with open(script, "w", encoding="utf-8") as file:
            file.write(f'set -e\nname=$(basename "$1")\n{before}\ncp -r "$1" {store}/part\nmv {store}/part {store}/"$name"\n')
        return f"sh {shlex.quote(script)} {{path}}"

    def stored(self):
        return sorted(os.listdir(self.path("store")))

    def start(self, config, *arguments):
        with open(self.path("log"), "w", encoding="utf-8") as log:
            run = subprocess.Popen([PROGRAM, "--threads", "1", "train", self.write_config(config), *arguments], stdout=log, stderr=log,
                                   env=starters.environment())
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def log(self):
        with open(self.path("log"), encoding="utf-8") as file:
            return file.read()

    def wait_for(self, condition):
        deadline = time.monotonic() + SECONDS
        while not condition():
            self.assertLess(time.monotonic(), deadline, self.log())
            time.sleep(0.02)

    def test_a_command_that_was_killed_with_the_run_runs_again(self):
        wait = f"while [ -e {shlex.quote(self.path('wait'))} ]; do sleep 0.02; done"
        config = self.config(self.copying(f"echo $$ > {shlex.quote(self.path('pid'))}; {wait}"), interval=1000)
        with open(self.path("wait"), "w", encoding="utf-8"):
            run = self.start(config)
            self.wait_for(lambda: os.path.exists(self.path("pid")) and "waiting for the command" in self.log())
        run.kill()
        run.wait()
        with open(self.path("pid"), encoding="utf-8") as file:
            os.kill(int(file.read()), signal.SIGKILL)
        os.remove(self.path("wait"))
        self.assertEqual(self.stored(), [])
        again = self.train(config)
        self.assert_exit(again, 0)
        self.assertIn("on_saved.done does not name it, so the command of checkpoint.on_saved runs for it now", again.stderr)
        self.assertEqual(self.stored(), ["step_00000008"])
        self.assertNotIn("runs for it now", self.train(config).stderr)
        self.assertEqual(self.stored(), ["step_00000008"])

    def test_a_new_run_in_the_folder_does_not_count_as_copied(self):
        config = self.config(self.copying(), interval=1000)
        self.assert_exit(self.train(config), 0)
        folder = config["checkpoint"]["folder"]
        shutil.rmtree(os.path.join(folder, "step_00000008"))
        shutil.rmtree(self.path("store/step_00000008"))
        config["training"]["seed"] = 3
        without = {**config, "checkpoint": {**config["checkpoint"], "on_saved": "exit 1 # {path}"}}  # as one that is killed with the run
        self.assert_exit(self.train(without), 0)
        self.assert_exit(self.train(config), 0)
        self.assertEqual(tree_digest(self.path("store/step_00000008")), tree_digest(os.path.join(folder, "step_00000008")))

    def test_a_command_that_hangs_behind_the_last_step_is_left_when_the_run_is_asked_to_stop(self):
        config = self.config(f"echo $$ > {shlex.quote(self.path('pid'))}; : {{path}}; exec sleep 600", interval=1000)
        run = self.start(config)
        self.wait_for(lambda: os.path.exists(self.path("pid")) and "waiting for the command" in self.log())
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(timeout=SECONDS), 0, self.log())
        self.assertIn("the command is left running; the next start runs it again", self.log())
        with open(self.path("pid"), encoding="utf-8") as file:
            os.kill(int(file.read()), signal.SIGKILL)
        config["checkpoint"]["on_saved"] = self.copying()
        self.assertIn("runs for it now", self.train(config).stderr)
        self.assertEqual(len(self.stored()), 1)

    def test_every_checkpoint_is_copied(self):
        config = self.config(self.copying())
        for steps in (4, 8):
            config["optimizer"]["schedule"]["total_steps"] = 8
            config["training"]["steps"] = steps
            self.assert_exit(self.train(config), 0)
        self.assertEqual(self.stored(), ["step_00000004", "step_00000008"])
        for name in self.stored():
            self.assertEqual(tree_digest(self.path(f"store/{name}")), tree_digest(os.path.join(config["checkpoint"]["folder"], name)))

    def test_training_does_not_wait_but_the_end_does(self):
        config = self.config(self.copying(before=f"while [ ! -e {self.path('go')} ]; do sleep 0.05; done"), interval=2)
        run = self.start(config)
        self.wait_for(lambda: "waiting for the command of checkpoint.on_saved" in (self.log() if os.path.exists(self.path("log")) else ""))
        self.assertEqual(len(metrics(config["checkpoint"]["folder"])), 8)
        self.assertEqual(self.stored(), [])
        self.assertIsNone(run.poll())
        with open(self.path("go"), "w", encoding="utf-8"):
            pass
        self.assertEqual(run.wait(SECONDS), 0, self.log())
        # The first was copied while the others came, and of what waits the newest has its turn.
        self.assertEqual(self.stored()[-1], "step_00000008")
        self.assertLessEqual(len(self.stored()), 2)

    def test_a_command_that_fails_is_a_warning(self):
        for command, what in (("exit 3 # {path}", "ended with exit code 3"), ("kill -9 $$ # {path}", r"was ended by signal 9 \(Killed\)")):
            with self.subTest(command):
                config = self.config(command)
                shutil.rmtree(config["checkpoint"]["folder"], ignore_errors=True)
                result = self.train(config)
                self.assert_exit(result, 0)
                self.assertRegex(result.stderr, rf"checkpoint\.on_saved {what} for .*/step_00000008; the checkpoint is complete, and "
                                                "the run goes on")

    def test_a_command_whose_checkpoint_is_removed_is_told_so(self):
        result = self.train(self.config("rm -r {path}; exit 5", interval=1000))  # in place of checkpoint.keep, which is quick only at times
        self.assert_exit(result, 0)
        self.assertIn("step_00000008; it was removed meanwhile: a larger checkpoint.keep leaves the command more time", result.stderr)
        self.assertNotIn("the checkpoint is complete", result.stderr)

    def test_a_failure_is_seen_where_ends_of_processes_are_ignored(self):
        config = self.config("echo {path}; exit 7")
        result = self.train(config, preexec_fn=lambda: signal.signal(signal.SIGCHLD, signal.SIG_IGN))
        self.assert_exit(result, 0)
        self.assertIn("checkpoint.on_saved ended with exit code 7 for ", result.stderr)
        self.assertFalse(os.path.exists(os.path.join(config["checkpoint"]["folder"], "on_saved.done")))

    def test_a_stop_lets_it_end(self):
        config = self.config(self.copying(before="sleep 1"))
        config["training"]["steps"] = 1000000
        config["optimizer"]["schedule"] = {"kind": "constant"}
        config["checkpoint"]["interval"] = 0
        run = self.start(config)
        path = os.path.join(config["checkpoint"]["folder"], "metrics.jsonl")
        self.wait_for(lambda: os.path.exists(path) and os.path.getsize(path) > 2000)
        run.send_signal(signal.SIGTERM)
        self.wait_for(lambda: "waiting for the command" in self.log())
        run.send_signal(signal.SIGTERM)
        self.assertEqual(run.wait(SECONDS), STOPPED, self.log())
        self.assertEqual(self.stored(), [f"step_{len(metrics(config['checkpoint']['folder'])):08}"])

    def test_ranks_run_it_once(self):
        command = f"echo {{path}} >> {shlex.quote(self.path('calls'))}"
        run = self.start(self.config(command, folder="run"), "--ranks=2", "--set", "training.micro_batch_size=1")
        self.assertEqual(run.wait(SECONDS), 0, self.log())
        with open(self.path("calls"), encoding="utf-8") as file:
            calls = file.read().splitlines()
        self.assertEqual(calls[-1], self.path("run/step_00000008"))
        self.assertEqual(len(calls), len(set(calls)))

    def test_a_machine_is_lost_during_a_copy_and_another_goes_on_with_the_same_bits(self):
        straight = self.config("", folder="straight")
        self.assert_exit(self.train(straight), 0)
        config = self.config(self.copying(before=f'[ "$name" = step_00000004 ] || {{ cp -r "$1" {self.path("store")}/part; '
                                                 f'echo $$ > {self.path("pid")}; sleep 600; }}'))
        run = self.start(config)
        self.wait_for(lambda: os.path.exists(self.path("pid")) and os.path.getsize(self.path("pid")) > 0)
        run.kill()
        run.wait()
        with open(self.path("pid"), encoding="utf-8") as file:
            os.killpg(os.getpgid(int(file.read())), signal.SIGKILL)
        self.assertEqual(self.stored(), ["part", "step_00000004"])
        restored = self.config("", folder="restored")
        os.mkdir(self.path("restored"))
        shutil.copytree(self.path("store/step_00000004"), self.path("restored/step_00000004"))
        result = self.train(restored)
        self.assert_exit(result, 0)
        self.assertIn("resuming from " + self.path("restored/step_00000004"), result.stderr)
        self.assertEqual(tree_digest(self.path("restored/step_00000008"), only=lambda path: path.endswith(".safetensors")),
                         tree_digest(self.path("straight/step_00000008"), only=lambda path: path.endswith(".safetensors")))
        self.assertEqual(learning_curve(self.path("restored"))[0], learning_curve(self.path("straight"))[0][4:])

    def test_a_command_without_the_path_is_refused(self):
        result = self.train(self.config("cp -r run store"))
        self.assert_exit(result, BAD_INPUT)
        self.assertIn('checkpoint.on_saved = "cp -r run store" has no {path}, which stands for the folder of the checkpoint; add it',
                      result.stderr)
        for command in ('cp -r "{path}" store', "cp -r '{path}' store", 'cp -r "{path}/." store', "sh -c 'cp -r {path} store'"):
            result = self.train(self.config(command))
            self.assert_exit(result, BAD_INPUT)
            self.assertIn(f"checkpoint.on_saved = {command} has {{path}} in quotes, which it gets by itself; write it without", result.stderr)
        for command in ("echo 'a'{path}'b'", 'echo "a\\"b" {path}', "echo it\\'s {path}"):
            self.assert_exit(self.train(self.config(command)), 0)


class Addresses(RunFolder):
    def test_they_are_refused_by_key(self):
        for section, key, value, shown in (("data", "train", ["s3://bucket/x.npy"], "s3://bucket/x.npy"),
                                           ("data", "eval", ["gs://b/*.npy"], "gs://b/*.npy"),
                                           ("data", "tokenizer", "https://host/tokenizer", "https://host/tokenizer"),
                                           ("checkpoint", "folder", "s3://bucket/run", "s3://bucket/run"),
                                           ("checkpoint", "init_from", "s3://bucket/model", "s3://bucket/model"),
                                           ("evaluation", "sets", ["wiki=s3://b/wiki.npy"], "wiki=s3://b/wiki.npy"),
                                           ("evaluation", "tasks", ["s3://b/task.jsonl"], "s3://b/task.jsonl")):
            with self.subTest(f"{section}.{key}"):
                config = tiny_config(self.folder)
                config.setdefault(section, {})[key] = value
                result = self.train(config)
                self.assert_exit(result, BAD_INPUT)
                self.assertIn(f'{section}.{key}: "{shown}" is the address of an object store; mount the store, or copy from and to it '
                              "(docs/object_storage.md)", result.stderr)
        for arguments in (("export", "run", "--out", "s3://b/x"), ("export", "s3://b/run", "--out", "x"), ("import", "s3://b/model", "--out", "x"),
                          ("train", "s3://b/config.json"), ("eval", "run", "--data", "s3://b/x.npy"), ("eval", "run", "--sets", "wiki=s3://b/x.npy"),
                          ("eval", "run", "--predictions", "s3://b/x"), ("data", "s3://b/x.npy"), ("plan", "c.json", "--write", "s3://b/c.json")):
            with self.subTest(arguments):
                result = parka(*arguments)
                self.assert_exit(result, BAD_INPUT)
                self.assertIn("is the address of an object store", result.stderr)
        self.assertFalse(os.path.exists("s3:"))


if __name__ == "__main__":
    unittest.main()
