"""What the start of a run says of ranks: of tasks of a batch job that one rank leaves idle, and whom a rank waits for; and of weights that stay random."""
import contextlib
import json
import os
import pathlib
import re
import socket
import subprocess
import threading
import time
import unittest

from parka_runs import PROGRAM, parka, starters
from refusals import BAD_INPUT, assert_ended_well, has, shown
from token_runs import TokenRuns, random_ids

SECONDS = 30  # within which a rank has said whom it waits for
STEP = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "localhost"}


class OneRank(TokenRuns):
    def setUp(self):
        super().setUp()
        self.tiny = self.write_config(self.config([self.write("ids.npy", random_ids(500, 256))], 256))

    def said(self, *options, **variables):
        """Of a run to its end, whose environment has only these variables of launchers."""
        self.forget_run()
        result = parka("train", self.tiny, *options, env=starters.environment(**variables))
        assert_ended_well(self, result)
        return result

    def test_a_batch_job_of_several_tasks(self):
        batch = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_NODELIST": "node[1-2]"}
        for name, tasks, variables in (
            ("a batch script on two nodes", "8", {**batch, "SLURM_NPROCS": "8", "SLURM_NNODES": "2"}),
            ("a batch script on one node", "4", {**batch, "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "4", "SLURM_JOB_NODELIST": "node1"}),
            ("two tasks", "2", {"SLURM_PROCID": "0"}),
            ("a shell of salloc", "16", {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}),
        ):
            with self.subTest(name):
                result = self.said(SLURM_JOB_ID="7", SLURM_NTASKS=tasks, **variables)
                lines = [line for line in result.stderr.splitlines() if re.search(rf"\b{tasks} tasks", line)]
                self.assertTrue(lines, f"no line says that the job has {tasks} tasks" + shown(result))
                self.assertTrue(any("srun" in line or "--gpus" in line or "--ranks" in line for line in lines), "no way out" + shown(result))

    def test_other_starts_need_no_such_line(self):
        plain = self.said()
        for name, options, variables in (
            ("a job of one task", (), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}),
            ("a job that says nothing of tasks", (), {"SLURM_JOB_ID": "7"}),
            ("a step of one task in a job of one", (), {**STEP, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"}),
            ("as many ranks as tasks", ("--ranks", "2", "--set", "training.micro_batch_size=1"), {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}),
        ):
            with self.subTest(name):
                result = self.said(*options, **variables)
                self.assertNotIn("srun", result.stderr, shown(result))
                self.assertNotIn(" tasks", result.stderr, shown(result))
                if not options:
                    self.assertEqual(len(result.stderr.splitlines()), len(plain.stderr.splitlines()), shown(plain) + shown(result))


    def test_a_command_of_one_process_among_several(self):
        torch = {"RANK": "1", "WORLD_SIZE": "2"}
        for named, variables in (("WORLD_SIZE", torch), ("WORLD_SIZE", {**torch, "RANK": "0", "MASTER_ADDR": "a"}), ("SLURM_STEP_NUM_TASKS", {**STEP, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "4"}),
                                 ("OMPI_COMM_WORLD_SIZE", {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "2"}), ("PMI_SIZE", {"PMI_RANK": "1", "PMI_SIZE": "3"}),
                                 (None, {"RANK": "0", "WORLD_SIZE": "1"}), (None, {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"}), (None, {})):
            for command in (("config", "check", self.tiny), ("data", self.tiny)):
                with self.subTest(variables, command=command):
                    result = parka(*command, env=starters.environment(**variables))
                    assert_ended_well(self, result)
                    told = [line for line in result.stderr.splitlines() if "warning" in line and (named or "") in line]
                    self.assertEqual(len(told), 0 if named is None else 1, shown(result))


class RandomWeights(TokenRuns):
    def test_what_is_added_to_random_weights_is_told_of(self):
        config = self.write_config(self.config([self.write("ids.npy", random_ids(500, 256))], 256))
        for command in ("train", "check"):
            def said(*options, command=command):
                self.forget_run()
                result = parka("train", config, *options) if command == "train" else parka("config", "check", config, *options)
                assert_ended_well(self, result)
                return "checkpoint.init_from" in result.stderr

            with self.subTest(command):
                self.assertFalse(said())
                self.assertTrue(said("--set", "finetune.method=lora"))
                self.assertTrue(said("--set", "optimizer.frozen=[\"blocks.0.*\"]"))


class OddValues(TokenRuns):
    def test_values_that_are_seldom_meant_are_told_of(self):
        path, held_out = self.write("ids.npy", random_ids(500, 256)), self.write("held_out.npy", random_ids(500, 256, seed=1))
        config = self.config([path], 256)
        config["training"]["steps"] = 4
        sound = ("optimizer.lr=0.5", "optimizer.lr=1e-8", "optimizer.weight_decay=0.9", "optimizer.beta1=0.95", "optimizer.schedule.total_steps=4",
                 "training.eval_interval=0")
        odd = ("optimizer.lr=0", "optimizer.lr=1", "optimizer.lr=3e4", "optimizer.weight_decay=1", "optimizer.weight_decay=10", "optimizer.beta2=0.5",
               "optimizer.schedule.total_steps=3", "optimizer.schedule.total_steps=400", f'data.eval=["{held_out}"]', f'evaluation.sets=["a={held_out}"]')
        named = {"optimizer.beta2": "optimizer.beta1", "data.eval": "training.eval_interval", "evaluation.sets": "training.eval_interval"}
        for change in (*sound, *odd):
            for command in (("train",), ("config", "check"), ("data",)):
                with self.subTest(change, command=command):
                    self.forget_run()
                    result = parka(*command, self.write_config(config), "--set", change)
                    assert_ended_well(self, result)
                    key = change.split("=")[0]
                    told = [line for line in result.stderr.splitlines() if "warning" in line and named.get(key, key) in line]
                    self.assertEqual(len(told), int(change in odd), result.stderr)
        self.forget_run()
        constant = parka("train", self.write_config(config), "--set", "optimizer.schedule.kind=constant", "--set", "optimizer.schedule.total_steps=400")
        self.assertNotIn("warning", constant.stderr)

    def test_values_that_undo_others_are_told_of(self):
        """By the last key of those that are set together."""
        config = self.write_config(self.config([self.write("ids.npy", random_ids(500, 256))], 256))
        width = json.loads(pathlib.Path(config).read_text(encoding="utf-8"))["model"]["d_model"]
        yarn, base = "model.rope_scaling.kind=yarn", f"checkpoint.init_from={self.path('some')}"
        patterns, lora = 'optimizer.lr_patterns=["blocks.*","*"]', "finetune.method=lora"
        for is_odd, *settings in (
            (True, patterns, "optimizer.lr_factors=[1,0]"), (True, 'optimizer.frozen=["blocks.*"]', 'optimizer.lr_patterns=["e*"]', "optimizer.lr_factors=[0.0]"),
            (True, lora, patterns, "optimizer.lr_factors=[0,0]"), (False, patterns, "optimizer.lr_factors=[0,1]"), (False, patterns, "optimizer.lr_factors=[1,1e-6]"),
            (True, "model.rope_scaling.factor=2"), (True, "model.rope_scaling.factor=64"), (True, "model.rope_scaling.original_length=32"),
            (True, "model.rope_scaling.original_length=4096"), (True, "model.rope_scaling.attention_factor=1.5"), (False, yarn, "model.rope_scaling.factor=2"),
            (False, yarn, "model.rope_scaling.original_length=32"), (False, "model.rope_scaling.factor=8"),
            (True, "model.init=mitchell", "model.init_std=0.01"), (True, "model.init=mitchell", "model.init_std=0.006"), (False, "model.init=normal", "model.init_std=0.01"),
            (True, "model.init=normal", "model.init_std=0.5"), (True, "model.init=normal", "model.init_std=20"), (False, base, "model.init_std=0.01"),
            (True, "training.eval_sequences=8"), (True, "training.eval_sequences=1"), (False, "training.eval_sequences=0"),
            (True, "optimizer.clip_norm=1e-4"), (True, "optimizer.clip_norm=1e-9"), (False, "optimizer.clip_norm=0"), (False, "optimizer.clip_norm=0.05"),
            (True, "optimizer.eps=0.1"), (True, "optimizer.eps=1"), (False, "optimizer.eps=0.01"),
            (True, "optimizer.beta1=0"), (True, "optimizer.beta1=0.09"), (False, "optimizer.beta1=0.5"),
            (True, "model.sliding_window=1"), (True, "model.sliding_window=15"), (False, "model.sliding_window=16"),
            (True, lora, "finetune.alpha=1600"), (True, lora, "finetune.rank=1", "finetune.alpha=65"), (False, lora, "finetune.rank=1", "finetune.alpha=64"),
            (True, lora, f"finetune.rank={width}"), (True, lora, f"finetune.rank={4 * width}"), (False, lora, f"finetune.rank={width - 1}"),
        ):
            with self.subTest(settings):
                result = parka("config", "check", config, *(word for setting in settings for word in ("--set", setting)))
                assert_ended_well(self, result)
                key = settings[-1].split("=")[0]
                named = "model.rope_scaling" if "rope_scaling" in key else key
                told = [line for line in result.stderr.splitlines() if "warning" in line and named in line]
                self.assertEqual(len(told), int(is_odd), result.stderr)


@contextlib.contextmanager
def listening(answer):
    """A port that this test answers: `answer` is given each connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        def serve():
            with contextlib.suppress(OSError):
                while True:
                    answer(server.accept()[0])

        threading.Thread(target=serve, daemon=True).start()
        yield str(server.getsockname()[1])


def free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return str(server.getsockname()[1])


def as_a_web_server(connection):
    with connection:
        connection.recv(1000)
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")


class Waiting(TokenRuns):
    def start(self, name, config, variables):
        with open(self.path(f"{name}.log"), "w", encoding="utf-8") as log:
            process = subprocess.Popen([PROGRAM, "--threads", "1", "train", config], stdout=log, stderr=log, env=starters.environment(**variables))
        self.addCleanup(process.wait)
        self.addCleanup(process.kill)
        return process

    def log(self, name):
        with open(self.path(f"{name}.log"), encoding="utf-8") as file:
            return file.read()

    def test_a_rank_says_whom_it_waits_for(self):
        """All of them wait at the same time, so that the test takes as long as one of them."""
        config = self.write_config(self.config([self.write("ids.npy", random_ids(500, 256))], 256))
        silent = []
        with listening(silent.append) as mute, listening(as_a_web_server) as web:
            ports = {"first_of_two": free_port(), "first_of_three": free_port(), "nobody_listens": free_port(), "mute": mute, "web": web}
            processes, words = {}, {}

            def begin(name, where, **variables):
                processes[name], words[name] = self.start(name, config, variables), where

            for name, port in ports.items():
                rank, size = ("0", name.split("_")[-1].replace("two", "2").replace("three", "3")) if name.startswith("first") else ("1", "2")
                begin(name, port, RANK=rank, WORLD_SIZE=size, MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
            self.start("second_of_three", config, {"RANK": "1", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1",
                                                   "MASTER_PORT": ports["first_of_three"]})  # has come: rank 0 speaks for it
            begin("no_such_host", "no-such-host.invalid", RANK="1", WORLD_SIZE="2", MASTER_ADDR="no-such-host.invalid",
                  MASTER_PORT=ports["nobody_listens"])
            slurm = free_port()
            begin("slurm", slurm, **STEP, SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="0", MASTER_PORT=slurm)
            begin("slurm_of_its_own_port", ("localhost", "127.0.0.1"), **{**STEP, "SLURM_JOB_ID": str(os.getpid())}, SLURM_STEP_NUM_TASKS="8", SLURM_PROCID="3")

            until = time.monotonic() + SECONDS
            missing = set(processes)
            while missing and time.monotonic() < until:
                time.sleep(0.2)
                missing -= {name for name in missing if has(self.log(name), words[name])}
            for name, process in processes.items():
                with self.subTest(name):
                    said = f"{process.args}: no line with {words[name]} within {SECONDS} s\n{self.log(name)}"
                    self.assertTrue(has(self.log(name), words[name]), said)
                    if process.poll() is not None:  # some of these need not be waited for
                        self.assertEqual((process.returncode, name in ("mute", "web", "no_such_host")), (BAD_INPUT, True), self.log(name))


if __name__ == "__main__":
    unittest.main()
