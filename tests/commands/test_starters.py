"""Ranks that `parka train --ranks` starts: how they are stopped, what becomes of them when one dies, wrong options."""
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import termios
import time
import unittest

from parka_runs import PROGRAM, STOPPED, RunFolder, checkpoints, learning_curve, metrics, parka, starters, tiny_config, tree_digest

BAD_INPUT = 2
RANKS = 3


def processes():
    """The parent of each process, and those that still run."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8") as file:
                state, parent = file.read().rsplit(")", 1)[1].split()[:2]
        except OSError:
            continue  # it has ended meanwhile
        if state != "Z":
            found[int(name)] = int(parent)
    return found


def state_of(process):
    """Its letter in /proc/PID/stat: T is stopped."""
    with open(f"/proc/{process}/stat", encoding="utf-8") as file:
        return file.read().rsplit(")", 1)[1].split()[0]


class Starters(RunFolder):
    def start(self, steps, *options, prefix=(), **keywords):
        config = tiny_config(self.folder, "fp32", steps=steps)
        config["optimizer"]["schedule"] = {"kind": "constant"}
        config["training"].update(eval_interval=0, global_batch_size=2 * RANKS, micro_batch_size=1)
        config["checkpoint"]["interval"] = steps
        config["distributed"] = {"zero_stage": 3}
        command = [*prefix, os.path.abspath(PROGRAM), "--threads", "1", "train", self.write_config(config), *options]
        with open(self.path("log"), "w", encoding="utf-8") as log:
            run = subprocess.Popen(command, stdout=log, stderr=log, env=starters.environment(), **keywords)
        self.addCleanup(run.wait)
        self.addCleanup(run.kill)
        return run

    def started(self, *arguments, **keywords):
        """A new and endless run that has made some steps, and the processes of its ranks in their order."""
        shutil.rmtree(self.path("run"), ignore_errors=True)
        run = self.start(1000000, f"--ranks={RANKS}", *arguments, **keywords)
        path, deadline = self.path("run/metrics.jsonl"), time.monotonic() + 120
        while not os.path.exists(path) or os.path.getsize(path) < 3000:
            self.assertIsNone(run.poll(), self.log())
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)
        ranks = sorted(process for process, parent in processes().items() if parent == run.pid)
        self.assertEqual(len(ranks), RANKS)
        return run, ranks

    def log(self):
        with open(self.path("log"), encoding="utf-8") as file:
            return file.read()

    def end(self, run, code):
        self.assertEqual(run.wait(timeout=120), code, self.log())

    def assert_all_ended(self, ranks):
        deadline = time.monotonic() + 30
        while set(ranks) & set(processes()):
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.02)

    def test_signals_stop_all_ranks(self):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            with self.subTest(number.name):
                run, ranks = self.started()
                run.send_signal(number)
                self.end(run, STOPPED)
                reached = len(metrics(self.path("run")))
                self.assertEqual(checkpoints(self.path("run"))[-1], f"step_{reached:08}")
                self.assertEqual(self.log().count(f"{signal.strsignal(number)}: saved step {reached} and stopping"), 1)
                self.assertNotIn("error", self.log())
                self.assert_all_ended(ranks)

    def test_a_signal_to_one_rank_stops_all(self):
        run, ranks = self.started()
        os.kill(ranks[1], signal.SIGTERM)
        self.end(run, STOPPED)
        self.assertIn("another rank was asked to stop: saved step", self.log())

    def test_under_nohup_a_terminal_may_go_away(self):
        run, _ = self.started(prefix=["nohup"])
        before = len(metrics(self.path("run")))
        run.send_signal(signal.SIGHUP)
        while len(metrics(self.path("run"))) < before + 5:
            self.assertIsNone(run.poll(), self.log())
            time.sleep(0.02)
        run.terminate()
        self.end(run, STOPPED)

    def test_a_dead_rank_ends_the_others(self):
        for rank in (0, 2):
            with self.subTest(rank):
                run, ranks = self.started()
                os.kill(ranks[rank], signal.SIGKILL)
                self.end(run, 128 + signal.SIGKILL)
                log = self.log()
                self.assertEqual(len(re.findall(rf"rank {rank} \(.*, pid {ranks[rank]}\) died", log)), RANKS - 1, log)
                self.assertEqual(log.count(f"rank {rank} (pid {ranks[rank]}) was ended by signal 9 (Killed)"), 1, log)
                self.assert_all_ended(ranks)

    def test_a_pause_stops_all_and_fg_continues_all(self):
        """Ctrl-Z reaches the process that has started the ranks, which are in process groups of their own."""
        run, ranks = self.started(process_group=0)

        def wait_for(states):
            deadline = time.monotonic() + 30
            while not all(state_of(process) in states for process in (run.pid, *ranks)):
                self.assertLess(time.monotonic(), deadline, [state_of(process) for process in (run.pid, *ranks)])
                time.sleep(0.02)

        for _ in range(2):
            run.send_signal(signal.SIGTSTP)
            wait_for("T")
            run.send_signal(signal.SIGCONT)
            wait_for("RSD")
        before = len(metrics(self.path("run")))
        while len(metrics(self.path("run"))) < before + 5:
            self.assertIsNone(run.poll(), self.log())
            time.sleep(0.02)
        run.terminate()
        self.end(run, STOPPED)

    def test_a_terminal_that_stops_who_writes_from_the_background(self):
        """As `stty tostop` says. The ranks are in the background, and their log is on the terminal."""
        config = tiny_config(self.folder, "fp32")
        command = [os.path.abspath(PROGRAM), "--threads", "1", "train", self.write_config(config), "--ranks=2"]
        pid, terminal = pty.fork()
        if pid == 0:
            try:
                flags = termios.tcgetattr(1)
                flags[3] |= termios.TOSTOP
                termios.tcsetattr(1, termios.TCSANOW, flags)
                os.execve(command[0], command, starters.environment())
            finally:
                os._exit(127)
        said = b""
        try:
            while piece := os.read(terminal, 1 << 16):
                said += piece
        except OSError:
            pass  # the end of a terminal
        os.close(terminal)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), 0, said.decode())
        self.assertIn(b"saved", said)

    def test_ranks_do_not_outlive_their_parent(self):
        run, ranks = self.started()
        run.kill()
        self.end(run, -signal.SIGKILL)
        self.assert_all_ended(ranks)

    def test_a_stopped_run_goes_on_to_the_same_bits(self):
        self.end(self.start(300, f"--ranks={RANKS}"), 0)
        os.rename(self.path("run"), self.path("straight"))
        run = self.start(300, f"--ranks={RANKS}")
        while not os.path.exists(self.path("run/metrics.jsonl")) or os.path.getsize(self.path("run/metrics.jsonl")) < 3000:
            time.sleep(0.01)
        run.terminate()
        self.end(run, STOPPED)
        self.end(self.start(300, f"--ranks={RANKS}"), 0)
        self.assertEqual(learning_curve(self.path("run")), learning_curve(self.path("straight")))
        digests = [tree_digest(self.path(f"{name}/step_00000300"), only=lambda path: path.endswith(".safetensors"))
                   for name in ("run", "straight")]
        self.assertEqual(*digests)

    def test_an_error_of_all_ranks_is_one_line(self):
        config = tiny_config(self.folder)
        config["data"]["train"] = [self.path("none.npy")]
        result = self.train(config, "--ranks=3", env=starters.environment())
        self.assert_exit(result, BAD_INPUT)
        self.assertEqual(result.stderr.count("parka: error: "), 1, result.stderr)

    def test_a_batch_job_of_more_tasks_than_ranks_is_told_of(self):
        config = self.write_config(tiny_config(self.folder))
        for variables, options, told in (({"SLURM_NTASKS": "8"}, (), "SLURM_NTASKS"), ({"SLURM_NTASKS": "8"}, ("--ranks=2",), "SLURM_NTASKS"),
                                         ({"SLURM_JOB_NUM_NODES": "2"}, (), "SLURM_JOB_NUM_NODES"), ({"SLURM_NTASKS": "1"}, (), None),
                                         ({"SLURM_NTASKS": "2"}, ("--ranks=2",), None)):
            with self.subTest(variables=variables, options=options):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                result = parka("train", config, *options, env=starters.environment(SLURM_JOB_ID="7", SLURM_PROCID="0", **variables))
                self.assert_exit(result, 0)
                self.assertEqual(result.stderr.count(told or "Slurm"), 1 if told else 0, result.stderr)

    def test_a_number_of_ranks_that_the_config_refuses(self):
        """No rank is started, be it one of a thousand."""
        for keys, named in (({}, "training.global_batch_size"), ({"distributed": {"context_parallel": 3}}, "context_parallel"),
                            ({"distributed": {"shard_size": 3}}, "shard_size")):
            config = tiny_config(self.folder)
            config["training"]["micro_batch_size"] = 1
            config.update(keys)
            for command in ("train", "bench"):
                with self.subTest(named, command=command):
                    began = time.monotonic()
                    result = parka(command, self.write_config(config), "--ranks=1024", env=starters.environment())
                    self.assert_exit(result, BAD_INPUT)
                    self.assertEqual(result.stderr.count("parka: error: "), 1, result.stderr)
                    self.assertIn(named, result.stderr)
                    self.assertLess(time.monotonic() - began, 20)

    def test_wrong_options(self):
        config = self.write_config(tiny_config(self.folder))
        for options, message in ((("--gpus=2",), "--gpus 2: this run computes on the CPU, because device.kind is cpu"),
                                 (("--gpus=2", "--ranks=2"), "--gpus excludes --ranks"), (("--ranks=0",), "--ranks"),
                                 (("--ranks=two",), "--ranks")):
            with self.subTest(options):
                result = parka("train", config, *options, env=starters.environment())
                self.assert_exit(result, BAD_INPUT)
                self.assertEqual(result.stderr.count("parka: error: "), 1, result.stderr)
                self.assertIn(message, result.stderr)

    def test_the_bench_takes_ranks_too(self):
        config = self.write_config(tiny_config(self.folder))
        result = parka("bench", config, "--steps=1", "--ranks=2", "--json", self.path("two.json"), env=starters.environment())
        self.assert_exit(result, 0)
        with open(self.path("two.json"), encoding="utf-8") as file:
            self.assertEqual(json.load(file)["ranks"], 2)


if __name__ == "__main__":
    unittest.main()
