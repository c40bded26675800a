"""What fails beside a sound state, and who asks a run to stop: the state is saved, and the run goes on to the same bits."""
import datetime
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time
import unittest
from pathlib import Path

from parka_runs import (PROGRAM, SEQUENCE, STOPPED, RunFolder, checkpoints, faulty_files, killed_in_save, learning_curve, metrics,
                        tiny_config, tree_digest, write_tokens)

IO_FAILED = 4
ENDLESS = 1000000


def shards(folder):
    return tree_digest(folder, only=lambda path: path.endswith(".safetensors"))


class Interruptions(RunFolder):
    long_blocks = 15

    def config(self, steps, **checkpoint):
        config = tiny_config(self.folder, "fp32", steps=steps)
        config["training"]["eval_interval"] = 0
        config["optimizer"]["schedule"] = {"kind": "constant"}
        config["checkpoint"].update(checkpoint)
        return config

    def undisturbed(self, config):
        """Trains the same in another folder, and returns that."""
        config = json.loads(json.dumps(config))
        config["checkpoint"]["folder"] = self.path("undisturbed")
        with open(self.path("undisturbed.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        result = subprocess.run(self.program("undisturbed.json"), capture_output=True, text=True, timeout=300)
        self.assert_exit(result, 0)
        return self.path("undisturbed")

    def program(self, name="config.json"):
        return [os.path.abspath(PROGRAM), "--threads", "1", "train", self.path(name)]

    def start(self, config, command=None, **options):
        """A run in the background; its log goes into a file."""
        self.write_config(config)
        with open(self.path("log"), "w", encoding="utf-8") as log:
            process = subprocess.Popen(command or self.program(), stdout=log, stderr=log, **options)
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def log(self):
        with open(self.path("log"), encoding="utf-8") as file:
            return file.read()

    def end(self, process, code):
        process.wait(timeout=120)
        self.assertEqual(process.returncode, code, self.log())

    def test_what_is_not_finite_takes_the_place_of_no_checkpoint(self):
        for in_background in (True, False):
            with self.subTest(in_background=in_background):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                config = self.config(4, interval=1, keep=1, **{"async": in_background})
                self.assert_exit(self.train(config), 0)
                wild = json.loads(json.dumps(config))
                wild["training"]["steps"] = 20
                wild["optimizer"].update({"lr": 1e30, "weight_decay": 1e20})
                result = self.train(wild)
                self.assert_exit(result, 3)
                self.assertRegex(result.stderr, r"NaN or infinite values in step 5 on .*: .*; the step was not saved")
                self.assertEqual([os.path.basename(path) for path in checkpoints(config["checkpoint"]["folder"])], ["step_00000004"])
                config["training"]["steps"] = 6
                self.assert_exit(self.train(config), 0)

    def wait_for(self, condition, process):
        deadline = time.monotonic() + 120
        while not condition():
            self.assertIsNone(process.poll(), "the run has ended:\n" + self.log())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.005)

    def steps_in_metrics(self, kind="train"):
        """Of a file that may end with half a line."""
        path = self.path("run/metrics.jsonl")
        if not os.path.exists(path):
            return []
        with open(path, encoding="utf-8") as file:
            records = [json.loads(line) for line in file if line.endswith("\n")]
        return [record["step"] for record in records if record["kind"] == kind]

    def step_reached(self):
        return self.steps_in_metrics()[-1]

    def saved_steps(self):
        return [int(name[5:]) for name in checkpoints(self.path("run"))]

    def assert_goes_on_as(self, undisturbed, config):
        """The same command reaches the end of the undisturbed run, with its bits."""
        self.assert_exit(self.train(config), 0)
        last = checkpoints(undisturbed)[-1]
        self.assertEqual(shards(self.path("run/" + last)), shards(os.path.join(undisturbed, last)))

    def endless(self):
        return self.config(ENDLESS, interval=ENDLESS)

    def long_evaluation(self):
        """A short held-out set and a long one: a second or so, which a stop signal cuts."""
        config = self.config(6, interval=4)
        config["training"]["eval_interval"] = 4
        write_tokens(self.path("block.npy"), 1000 * SEQUENCE, seed=5)
        with open(self.path("block.npy"), "rb") as block, open(self.path("long.npy"), "wb") as file:
            file.write(block.read() * self.long_blocks)
        config["evaluation"] = {"sets": [f"long={self.path('long.npy')}"]}
        return config

    def assert_same_records(self, undisturbed):
        self.assertEqual(learning_curve(self.path("run")), learning_curve(undisturbed))
        sets = [[(r["step"], r["loss"], r["num_targets"]) for r in metrics(folder, "eval_set")]
                for folder in (self.path("run"), undisturbed)]
        self.assertEqual(*sets)
        self.assertEqual([step for step, _, _ in sets[0]], [0, 4, 6])


class Saves(Interruptions):
    def test_a_save_that_fails_once_is_made_up_for_at_the_next_step(self):
        for asynchronous in (True, False):
            with self.subTest(asynchronous):
                config = self.config(300, interval=100, **{"async": asynchronous})
                result = self.train(config, env=faulty_files("write:*/step_00000100*shard*:ENOSPC:1:1"))
                self.assert_exit(result, 0)
                self.assertEqual(result.stderr.count("trying once more"), 1, result.stderr)
                saved = self.saved_steps()
                self.assertEqual(saved[-2:], [200, 300])
                self.assertTrue(100 < saved[0] <= 200 if asynchronous else saved[0] == 101, saved)
                undisturbed = self.undisturbed(config)
                self.assertEqual(learning_curve(self.path("run")), learning_curve(undisturbed))
                self.assertEqual(shards(self.path("run/step_00000300")), shards(os.path.join(undisturbed, "step_00000300")))
                shutil.rmtree(self.path("run"))
                shutil.rmtree(undisturbed)

    def test_a_save_that_fails_twice_ends_the_run(self):
        for asynchronous in (True, False):
            with self.subTest(asynchronous):
                config = self.config(ENDLESS, interval=20, **{"async": asynchronous})
                result = self.train(config, env=faulty_files("fsync:*/step_*shard*:ENOSPC:2:2"))
                self.assert_exit(result, IO_FAILED)
                self.assertEqual(result.stderr.count("parka: error: "), 1, result.stderr)
                self.assertIn("No space left on device", result.stderr.splitlines()[-1])
                self.assertEqual(self.saved_steps(), [20])
                self.assertEqual([name for name in os.listdir(self.path("run")) if "." in name and name.startswith("step")], [])
                shutil.rmtree(self.path("run"))

    def test_failures_of_two_saves_are_each_made_up_for(self):
        """A second try that works counts: the next failure is a first one again."""
        config = self.config(300, interval=100, **{"async": False})
        result = self.train(config, env=faulty_files("write:*/step_00000100*shard*:ENOSPC:1:1", "write:*/step_00000200*shard*:EIO:1:1"))
        self.assert_exit(result, 0)
        self.assertEqual(self.saved_steps(), [101, 201, 300])

    def test_the_last_save_is_tried_again(self):
        for asynchronous in (True, False):
            with self.subTest(asynchronous):
                config = self.config(8, interval=4, **{"async": asynchronous})
                rule = "fsync:*/step_00000008*shard*:EIO:1:"
                self.assert_exit(self.train(config, env=faulty_files(rule + "1")), 0)
                self.assertEqual(self.saved_steps(), [4, 8])
                shutil.rmtree(self.path("run"))
                self.assert_exit(self.train(config, env=faulty_files(rule + "2")), IO_FAILED)
                self.assertEqual(self.saved_steps(), [4])
                shutil.rmtree(self.path("run"))

    def test_a_signal_after_a_failed_save_still_saves(self):
        """The signal comes while the save that will fail is slow: before anybody knows of the failure."""
        for asynchronous in (True, False):
            with self.subTest(asynchronous):
                config = self.config(ENDLESS, interval=50, **{"async": asynchronous})
                environment = faulty_files("fsync:*/step_00000050*shard*:EIO:1:1", slow_glob="*/step_00000050*shard*",
                                           bytes_per_second=200000)
                run = self.start(config, env=environment)
                self.wait_for(lambda: os.path.exists(self.path("run/step_00000050.tmp")), run)
                run.terminate()
                self.end(run, STOPPED)
                self.assertEqual(self.saved_steps(), [self.step_reached()])
                self.assertTrue(self.step_reached() > 50 if asynchronous else self.step_reached() == 51, self.step_reached())
                self.assertEqual(self.log().count("trying once more"), 1, self.log())
                shutil.rmtree(self.path("run"))

    def test_beside_the_training_or_not_the_same_is_saved(self):
        folders = []
        for asynchronous in (True, False):
            config = self.config(12, interval=4, folder=self.path(f"run_{asynchronous}"), **{"async": asynchronous})
            self.assert_exit(self.train(config), 0)
            folders.append(self.path(f"run_{asynchronous}"))
        self.assertEqual(len(shards(folders[0])), 3)
        self.assertEqual(*map(shards, folders))
        self.assertEqual(*map(learning_curve, folders))


class Failures(Interruptions):
    def test_an_error_of_reading_the_data_is_met_with_the_state_saved(self):
        config = self.config(200, interval=1000)
        undisturbed = self.undisturbed(config)
        for file, nth in (("a.npy", 150), ("b.npy", 90)):
            with self.subTest(file):
                result = self.train(config, env=faulty_files(f"read:*/{file}:EIO:{nth}:1"))
                self.assert_exit(result, IO_FAILED)
                errors = [line for line in result.stderr.splitlines() if line.startswith("parka: error: ")]
                self.assertEqual(len(errors), 1, result.stderr)
                self.assertIn(self.path(file), errors[0])
                self.assertIn("Input/output error", errors[0])
                self.assertIn(f"step {self.step_reached()} is saved", errors[0])
                self.assertEqual(self.saved_steps(), [self.step_reached()])
                self.assertTrue(20 < self.step_reached() < 200)
                self.assert_goes_on_as(undisturbed, config)
                self.assertEqual(learning_curve(self.path("run")), learning_curve(undisturbed))
                shutil.rmtree(self.path("run"))

    def test_a_save_that_fails_does_not_hide_why_the_run_ends(self):
        config = self.config(200, interval=1000)
        result = self.train(config, env=faulty_files("read:*/a.npy:EIO:150:1", "write:*shard*:ENOSPC:1:1000"))
        self.assert_exit(result, IO_FAILED)
        errors = [line for line in result.stderr.splitlines() if line.startswith("parka: error: ")]
        self.assertEqual(len(errors), 1, result.stderr)
        self.assertIn(self.path("a.npy"), errors[0])
        self.assertNotIn("is saved", errors[0])
        self.assertIn("No space left on device", result.stderr)

    def test_one_error_at_any_read_of_the_data_loses_no_step(self):
        """What is read ahead of the last step is of no use; the saves of all steps lie between."""
        config = self.config(8, interval=1, keep=1, **{"async": False})
        undisturbed = self.undisturbed(config)
        codes = []
        while codes[-8:] != [0] * 8:
            result = self.train(config, env=faulty_files(f"read:*/a.npy:EIO:{len(codes) + 1}:1"))
            codes.append(result.returncode)
            with self.subTest(f"read {len(codes)}"):
                self.assertIn(result.returncode, (0, IO_FAILED), result.stderr)
                if self.steps_in_metrics():
                    self.assertEqual(self.saved_steps()[-1], self.step_reached())
                    self.assertLessEqual(len(self.saved_steps()), 2)  # checkpoint.keep, and what the next step had not removed
                self.assert_goes_on_as(undisturbed, config)
            shutil.rmtree(self.path("run"))
        self.assertGreater(codes.count(IO_FAILED), 10)

    def test_an_error_of_reading_what_is_held_out_is_met_with_the_state_saved(self):
        config = self.config(10, interval=1000)
        config["training"]["eval_interval"] = 3
        undisturbed = self.undisturbed(config)
        result = self.train(config, env=faulty_files("read:*/held_out.npy:EIO:31:1"))
        self.assert_exit(result, IO_FAILED)
        self.assertIn(self.path("held_out.npy"), result.stderr)
        self.assertEqual(self.saved_steps(), [self.step_reached()])
        self.assertTrue(0 < self.step_reached() < 10)
        self.assert_goes_on_as(undisturbed, config)
        self.assertEqual(learning_curve(self.path("run")), learning_curve(undisturbed))

    def test_an_evaluation_without_targets_is_met_with_the_state_saved(self):
        config = self.config(10, interval=1000)
        config["data"]["loss_mask"] = True
        for name in ("a", "b", "held_out"):
            with open(self.path(f"{name}.npy"), "rb") as file:
                num_tokens = len(file.read()) // 2
            with open(self.path(f"{name}.npy.mask"), "wb") as file:
                file.write(bytes((name != "held_out",)) * num_tokens)
        config["training"]["eval_interval"] = 0
        undisturbed = self.undisturbed(config)
        self.assert_exit(self.train(dict(config, training=dict(config["training"], steps=1))), 0)
        result = self.train(dict(config, training=dict(config["training"], eval_interval=6)))
        self.assert_exit(result, 2)
        self.assertRegex(result.stderr, "none of 6 sequences has a target.*; step 6 is saved")
        self.assert_goes_on_as(undisturbed, config)

    def test_the_last_evaluation_whose_record_cannot_be_written_fails_the_run(self):
        config = self.config(8, interval=1000)
        config["training"]["eval_interval"] = 8
        self.assert_exit(self.train(config), 0)
        with open(self.path("run/metrics.jsonl"), encoding="utf-8") as file:
            lines = file.readlines()
        self.assertIn('"eval"', lines[-1])
        with open(self.path("run/metrics.jsonl"), "w", encoding="utf-8") as file:
            file.writelines(lines[:-1])  # as if killed in the last evaluation
        self.assert_exit(self.train(config, env=faulty_files("write:*/metrics.jsonl:ENOSPC:2:0")), IO_FAILED)
        self.assert_exit(self.train(config), 0)
        self.assertEqual([record["step"] for record in metrics(self.path("run"), "eval")][-1], 8)

    def test_a_record_that_cannot_be_written_is_met_with_the_state_saved(self):
        config = self.config(60, interval=1000)
        undisturbed = self.undisturbed(config)
        for times, reached in ((0, 29), (1, 30)):  # for good, or once: then it is written once more when the state is saved
            with self.subTest(times=times):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                result = self.train(config, env=faulty_files(f"write:*/metrics.jsonl:ENOSPC:31:{times}"))
                self.assert_exit(result, IO_FAILED)
                self.assertIn("metrics.jsonl: No space left on device", result.stderr)
                self.assertEqual(result.stderr.count("parka: error: "), 1, result.stderr)
                self.assertEqual(self.saved_steps(), [30])
                self.assertEqual(self.step_reached(), reached)
                self.assert_goes_on_as(undisturbed, config)

    def test_a_record_of_the_last_step_that_cannot_be_written_fails_the_run_with_its_state_saved(self):
        config = self.config(8, interval=1000)
        self.assert_exit(self.train(config, env=faulty_files("write:*/metrics.jsonl:ENOSPC:9:1")), IO_FAILED)
        self.assertEqual(self.saved_steps(), [8])

    def test_a_failure_in_the_first_step_is_one_line(self):
        config = self.config(8)
        result = self.train(config, env=faulty_files("read:*/a.npy:EIO:1:0", "read:*/b.npy:EIO:1:0"))
        self.assertIn(result.returncode, (2, IO_FAILED), result.stderr)
        self.assertEqual(result.stderr.count("parka: "), 1, result.stderr)


class Signals(Interruptions):
    def test_a_signal_cuts_an_evaluation_which_is_done_again(self):
        config = self.long_evaluation()
        undisturbed = self.undisturbed(config)
        for step in (0, 4, 6):
            run = self.start(config)
            self.wait_for(lambda at=step: self.steps_in_metrics("eval")[-1:] == [at], run)
            if step == 4:  # the save that was due does not wait for the evaluation
                self.wait_for(lambda: self.saved_steps()[-1:] == [4], run)
            self.assertNotIn(step, self.steps_in_metrics("eval_set"))
            run.terminate()
            self.end(run, STOPPED)
            self.assertNotIn(step, self.steps_in_metrics("eval_set"))
            self.assertEqual(self.saved_steps()[-1:], [step] if step > 0 else [])
            self.assertIn(f"{'saved' if step > 0 else 'nothing to save at'} step {step} and stopping", self.log())
        self.assert_exit(self.train(config), 0)
        self.assert_same_records(undisturbed)
        again = self.train(config)
        self.assert_exit(again, 0)
        self.assertIn("nothing to do", again.stderr)
        self.assert_same_records(undisturbed)

    def test_a_stop_before_the_first_step_leaves_what_was_loaded(self):
        config = self.long_evaluation()
        run = self.start(config)
        self.wait_for(lambda: self.steps_in_metrics("eval")[-1:] == [4] and self.saved_steps()[-1:] == [4], run)
        run.terminate()
        self.end(run, STOPPED)
        saved = os.stat(self.path("run/step_00000004")).st_ino
        run = self.start(config)
        self.wait_for(lambda: "resuming from" in self.log(), run)  # then it evaluates, as it has not at that step
        run.terminate()
        self.end(run, STOPPED)
        self.assertIn("nothing to save at step 4 and stopping", self.log())
        self.assertEqual((self.saved_steps()[-1], os.stat(self.path("run/step_00000004")).st_ino), (4, saved))

    def test_a_stop_before_a_run_has_met_its_ranks_is_a_stop(self):
        with socket.create_server(("localhost", 0)) as server:
            port = server.getsockname()[1]
        alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        run = self.start(self.config(8), env={**os.environ, **alone})

        def is_caught():
            status = Path(f"/proc/{run.pid}/status").read_text(encoding="utf-8")
            return int(re.search(r"SigCgt:\s*(\w+)", status)[1], 16) >> (signal.SIGTERM - 1) & 1 == 1

        self.wait_for(is_caught, run)
        run.terminate()
        self.end(run, STOPPED)
        self.assertFalse(os.path.exists(self.path("run")))

    def test_an_evaluation_that_was_killed_is_done_again(self):
        config = self.long_evaluation()
        undisturbed = self.undisturbed(config)
        run = self.start(config)
        self.wait_for(lambda: self.steps_in_metrics("eval")[-1:] == [4] and self.saved_steps() == [4], run)
        run.kill()
        run.wait()
        self.assertNotIn(4, self.steps_in_metrics("eval_set"))
        self.assert_exit(self.train(config), 0)
        self.assert_same_records(undisturbed)

    def test_a_terminal_that_goes_away_saves_and_stops(self):
        run = self.start(self.endless())
        self.wait_for(lambda: len(self.steps_in_metrics()) > 5, run)
        run.send_signal(signal.SIGHUP)
        self.end(run, STOPPED)
        self.assertEqual(self.saved_steps(), [self.step_reached()])
        self.assertIn("Hangup: saved step", self.log())

    def test_under_nohup_a_terminal_may_go_away(self):
        run = self.start(self.endless(), ["nohup", *self.program()])
        self.wait_for(lambda: len(self.steps_in_metrics()) > 5, run)
        run.send_signal(signal.SIGHUP)
        reached = self.step_reached()
        self.wait_for(lambda: self.step_reached() > reached + 50, run)
        run.terminate()
        self.end(run, STOPPED)
        self.assertIn("Terminated: saved step", self.log())

    def test_a_log_that_nobody_reads_ends_nothing(self):
        self.write_config(self.config(50))
        run = subprocess.Popen(self.program(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL)
        self.addCleanup(run.kill)
        run.stderr.readline()
        run.stderr.close()
        self.assertEqual(run.wait(timeout=120), 0)
        self.assertEqual(self.saved_steps()[-1], 50)
        self.assertEqual(len(metrics(self.path("run"))), 50)


class Records(Interruptions):
    def all_records(self):
        with open(self.path("run/metrics.jsonl"), encoding="utf-8") as file:
            return list(map(json.loads, file))

    def test_records_say_when_and_how_fast_by_the_wall(self):
        config = self.config(8)
        config["training"]["eval_interval"] = 4
        before = datetime.datetime.now(datetime.timezone.utc)
        result = self.train(config)
        self.assert_exit(result, 0)
        after = datetime.datetime.now(datetime.timezone.utc)
        records = self.all_records()
        times = [datetime.datetime.fromisoformat(record["time"]) for record in records]
        self.assertEqual(times, sorted(times))
        self.assertTrue(before - datetime.timedelta(milliseconds=1) <= times[0] and times[-1] <= after)
        walls = [record["wall_seconds"] for record in records]
        self.assertEqual(walls, sorted(walls))
        self.assertGreater(walls[0], 0)
        self.assertLess(abs((times[-1] - times[0]).total_seconds() - (walls[-1] - walls[0])), 0.01)
        start = records[0]
        self.assertEqual((start["kind"], start["step"], start["device"], start["ranks"]), ("start", 0, "CPU", 1))
        self.assertEqual(start["host"], os.uname().nodename)
        self.assertIn("train " + self.path("config.json"), start["command"])
        self.assertTrue(start["version"] and start["commit"])
        for record in metrics(self.path("run")):
            self.assertGreaterEqual(record["save_wait_seconds"], 0)
            self.assertTrue(0 < record["goodput"] <= 1)
            self.assertTrue(0 < record["wall_tokens_per_second"] < record["tokens_per_second"] * 1.001)
        for step in (4, 8):
            self.assertRegex(result.stderr, rf"saved {self.path('run')}/step_{step:08}: [0-9.e-]+ GB in [0-9.]+ s\n")

    def test_goodput_counts_all_starts_and_the_steps_that_are_run_again(self):
        config = self.config(30, interval=10)
        killed = self.train(config, env=killed_in_save(20))
        self.assertEqual(killed.returncode, -signal.SIGKILL, killed.stderr)
        first = self.all_records()
        self.assert_exit(self.train(config), 0)
        starts = metrics(self.path("run"), "start")
        self.assertEqual([start["step"] for start in starts], [0, 10])
        self.assertEqual(starts[1]["earlier_seconds"], first[-1]["wall_seconds"])
        steps = metrics(self.path("run"))
        self.assertEqual([step["step"] for step in steps], list(range(1, 31)))
        useful = sum(step["seconds"] for step in steps)
        # Counted after the record before was written and before its own is.
        last, before = steps[-1], steps[-2]
        self.assertGreaterEqual(last["goodput"], useful / (starts[1]["earlier_seconds"] + last["wall_seconds"]) * 0.999)
        self.assertLessEqual(last["goodput"], useful / (starts[1]["earlier_seconds"] + before["wall_seconds"]) * 1.001)

    def test_the_wait_for_a_save_is_told(self):
        config = self.config(12, interval=4, **{"async": False})
        self.assert_exit(self.train(config, env=faulty_files(slow_glob="*/step_00000004*shard*", bytes_per_second=1000000)), 0)
        waits = {record["step"]: record["save_wait_seconds"] for record in metrics(self.path("run"))}
        size = sum(os.path.getsize(self.path("run/step_00000004/" + name)) for name in os.listdir(self.path("run/step_00000004")))
        self.assertGreater(waits[5], 0.9 * size / 1e6)
        self.assertEqual(waits[4], 0)
        self.assertEqual(waits[6], 0)


class Ranks(Interruptions):
    """With two ranks, of which one meets with it."""

    long_blocks = 4

    def setUp(self):
        super().setUp()
        if shutil.which("mpirun") is None:
            self.skipTest("mpirun is not on PATH")
        self.environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")

    def program(self, name="config.json"):
        return self.ranks(None, None, name=name)

    def ranks(self, *rules, name="config.json"):
        """The command of a run of a rank for each of `rules`, which its file operations fail by; None: they do not."""
        command = ["mpirun", "--oversubscribe", "--bind-to", "none"]
        for rank, rule in enumerate(rules):
            faults = []
            if rule is not None:
                faulty = faulty_files(rule)
                faults = ["env", *(f"{key}={faulty[key]}" for key in ("LD_PRELOAD", "FAULTY_FILES"))]
            own = ["sh", "-c", f'echo $$ > "{self.path(f"pid_{rank}")}"; exec "$@"', "rank", *faults]
            command += ["-np", "1", *own, os.path.abspath(PROGRAM), "--threads", "1", "train", self.path(name), ":"]
        return command[:-1]

    def start(self, config, command=None, **options):
        return super().start(config, command, env=self.environment, **options)

    def train_ranks(self, config, *rules):
        self.write_config(config)
        return subprocess.run(self.ranks(*rules), env=self.environment, capture_output=True, text=True, timeout=200)

    def undisturbed(self, config):
        config = json.loads(json.dumps(config))
        config["checkpoint"]["folder"] = self.path("undisturbed")
        self.assert_exit(self.train_ranks(config, None, None), 0)
        return self.path("undisturbed")

    def config(self, steps, **checkpoint):
        config = super().config(steps, **checkpoint)
        config["distributed"] = {"zero_stage": 1}
        return config

    def signal_rank(self, rank, number):
        with open(self.path(f"pid_{rank}"), encoding="utf-8") as file:
            os.kill(int(file.read()), number)

    def test_a_save_that_fails_on_one_rank_is_made_up_for_by_all(self):
        config = self.config(300, interval=100)
        undisturbed = self.undisturbed(config)
        for rank in (0, 1):
            with self.subTest(rank):
                rules = [None, None]
                rules[rank] = "write:*/step_00000100*shard*:ENOSPC:1:1"
                result = self.train_ranks(config, *rules)
                self.assert_exit(result, 0)
                saved = self.saved_steps()
                self.assertGreater(saved[0], 100)  # when is a matter of time: ranks that save look for files of each other
                self.assertGreater(len(saved), 1)
                self.assertIn("trying once more", result.stderr)
                self.assertEqual(shards(self.path("run/step_00000300")), shards(os.path.join(undisturbed, "step_00000300")))
                shutil.rmtree(self.path("run"))

    def test_a_save_that_fails_twice_on_one_rank_ends_all(self):
        result = self.train_ranks(self.config(ENDLESS, interval=50), None, "fsync:*/step_*shard*:ENOSPC:2:2")
        self.assert_exit(result, IO_FAILED)
        self.assertIn("No space left on device", result.stderr)
        self.assertEqual(self.saved_steps(), [50])

    def test_the_last_save_is_tried_again(self):
        result = self.train_ranks(self.config(8, interval=4), None, "fsync:*/step_00000008*shard*:EIO:1:1")
        self.assert_exit(result, 0)
        self.assertEqual(self.saved_steps(), [4, 8])

    def test_an_error_of_one_rank_is_met_with_the_state_of_all_saved(self):
        config = self.config(40, interval=1000)
        config["training"]["eval_interval"] = 6
        undisturbed = self.undisturbed(config)
        for rank, rule in ((0, "read:*/a.npy:EIO:25:1"), (1, "read:*/a.npy:EIO:25:1"), (0, "read:*/held_out.npy:EIO:28:1"),
                           (1, "read:*/held_out.npy:EIO:28:1"), (0, "write:*/metrics.jsonl:ENOSPC:20:1")):
            with self.subTest(f"{rule} on rank {rank}"):
                rules = [None, None]
                rules[rank] = rule
                result = self.train_ranks(config, *rules)
                self.assert_exit(result, IO_FAILED)
                self.assertIn(f"rank {rank}: ", result.stderr)
                reached = self.saved_steps()[-1]
                self.assertIn(f"step {reached} is saved", result.stderr)
                self.assertTrue(0 <= reached - self.step_reached() <= 1 and 5 < reached < 40, (reached, self.step_reached()))
                self.assert_exit(self.train_ranks(config, None, None), 0)
                last = "step_00000040"
                self.assertEqual(shards(self.path("run/" + last)), shards(os.path.join(undisturbed, last)))
                if "metrics" not in rule:
                    self.assertEqual(learning_curve(self.path("run")), learning_curve(undisturbed))
                shutil.rmtree(self.path("run"))

    def test_a_signal_to_one_rank_cuts_the_evaluation_of_all(self):
        config = self.long_evaluation()
        undisturbed = self.undisturbed(config)
        for step, rank in ((0, 1), (4, 0), (6, 1)):
            run = self.start(config)
            self.wait_for(lambda at=step: self.steps_in_metrics("eval")[-1:] == [at], run)
            self.signal_rank(rank, signal.SIGTERM)
            self.end(run, STOPPED)
            self.assertNotIn(step, self.steps_in_metrics("eval_set"))
            self.assertEqual(self.saved_steps()[-1:], [step] if step > 0 else [])
        self.assert_exit(self.train_ranks(config, None, None), 0)
        self.assert_same_records(undisturbed)

    def test_a_terminal_of_one_rank_that_goes_away_stops_all(self):
        run = self.start(self.endless())
        self.wait_for(lambda: len(self.steps_in_metrics()) > 5, run)
        self.signal_rank(1, signal.SIGHUP)
        self.end(run, STOPPED)
        self.assertEqual(self.saved_steps(), [self.step_reached()])
        self.assertIn("another rank was asked to stop: saved step", self.log())


if __name__ == "__main__":
    unittest.main()
