#!/usr/bin/env python3
"""How ranks find each other, and what they say when they do not fit together. Exits with 77 (skipped) without
mpirun."""
import os
import socket
import subprocess
import time
import unittest

from ranks import PROGRAM, RanksTest, Run, starters

starters.skip_without_starter()


def alone(**variables):
    """The environment of a process that these variables tell how it was started."""
    return {**starters.environment(), **variables}


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def connected(port):
    """A connection to a process that will listen there."""
    end = time.monotonic() + 60
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.02)


class StartTest(RanksTest):
    def test_a_run_that_ends_well(self):
        run = Run(3, "drill", "steps=5")
        self.finish(run, 0)
        self.assertEqual(len(run.lines), 3, run.lines)  # the `ready` lines

    def test_one_process_needs_no_mpirun(self):
        result = subprocess.run([PROGRAM, "alone"], capture_output=True, text=True, env=alone(), timeout=60)
        self.assertEqual((result.returncode, result.stderr), (0, "rank 0 of 1\n"))

    @unittest.skipIf(starters.STARTER == "ranks", "ranks that one process starts have its version")
    def test_versions_differ(self):
        run = Run(3, "alone", "version2=1.1")
        self.finish(run, 2)
        self.assert_lines(run, r"^error: the version of parka of rank 2 \(.*\) differs from that of rank 0 \(.*\): "
                               r"1\.1, not 1\.0; install the same on all hosts$", 1)
        self.assert_lines(run, "error: ", 1)

    def test_configs_differ(self):
        run = Run(3, "drill", 'config1={\n  "lr": 0.002\n}')
        self.finish(run, 2)
        self.assert_lines(run, r'^error: the config of rank 1 .*: "lr": 0\.002, not "lr": 0\.001; give all', 1)
        self.assert_lines(run, "error: ", 1)

    def test_an_error_of_all_ranks_is_printed_once(self):
        run = Run(3, "drill", "all_throw")
        self.finish(run, 2)
        self.assert_lines(run, "^error: nobody can read this$", 1)
        self.assert_lines(run, "nobody can read this", 1)

    @unittest.skipIf(starters.STARTER == "mpirun", "mpirun hands on what has come, be it half a line")
    def test_lines_of_all_ranks_stay_whole(self):
        run = Run(4, "chatter")
        self.finish(run, 0)
        mixed = [line for line in run.lines if line not in (letter * 3000 for letter in "abcd")]
        self.assertEqual((len(run.lines), len(mixed)), (800, 0))

    def test_ranks_that_do_not_come(self):
        """Each says whom it has waited for."""
        meeting = {"WORLD_SIZE": "3", "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
        for rank, message in ((0, r"^error: of 3 ranks these have not come to rank 0, TCP port \d+, within 1 s: 1 2; "),
                              (2, r"^error: rank 2 of 3 cannot reach rank 0 at localhost, TCP port \d+, within 1 s: ")):
            result = subprocess.run([PROGRAM, "alone", "meeting_seconds=1"], capture_output=True, text=True, timeout=60,
                                    env=alone(RANK=str(rank), **meeting))
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertRegex(result.stderr, message)

    def test_an_address_that_nobody_knows(self):
        meeting = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "no host", "MASTER_PORT": "29500"}
        result = subprocess.run([PROGRAM, "alone", "meeting_seconds=1"], capture_output=True, text=True, timeout=60,
                                env=alone(**meeting))
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertRegex(result.stderr, r"^error: rank 1 of 2 cannot find rank 0 at no host: .+, for 1 s; name rank 0's host ")

    def test_a_stranger_is_no_rank(self):
        """Who comes to rank 0's port without the word of this run is sent away."""
        port = free_port()
        meeting = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        ranks = [subprocess.Popen([PROGRAM, "alone"], stderr=subprocess.PIPE, text=True, env=alone(RANK="0", **meeting))]
        self.addCleanup(ranks[0].kill)
        for greeting in (b"GET / HTTP/1.1\n", b"parka/// 1\n"):
            with connected(port) as stranger:
                stranger.sendall(greeting)
                self.assertEqual(stranger.recv(100), b"")
        ranks.append(subprocess.Popen([PROGRAM, "alone"], stderr=subprocess.PIPE, text=True, env=alone(RANK="1", **meeting)))
        for number, rank in enumerate(ranks):
            _, errors = rank.communicate(timeout=60)
            self.assertEqual((rank.returncode, errors), (0, f"rank {number} of 2\n"))

    def test_ranks_that_slurm_starts(self):
        """They find each other by what srun tells them."""
        step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_JOB_ID": str(os.getpid()), "SLURM_STEP_ID": "1",
                "SLURM_STEP_NODELIST": "localhost,other[1-2]"}
        ranks = [subprocess.Popen([PROGRAM, "alone"], stderr=subprocess.PIPE, text=True, env=alone(SLURM_PROCID=str(rank), **step))
                 for rank in range(3)]
        for number, rank in enumerate(ranks):
            _, errors = rank.communicate(timeout=120)
            self.assertEqual((rank.returncode, errors), (0, f"rank {number} of 3\n"))

    @unittest.skipUnless(starters.is_available("mpirun"), "mpirun is not on PATH")
    def test_ranks_of_ranks_of_mpirun_are_refused(self):
        result = starters.run(2, [PROGRAM, "alone", "--ranks=2"], "mpirun")
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(result.stderr.count("error: this process shall start 2 ranks, but is itself one of those that"), 1)

    def test_each_process_of_a_launcher_becomes_several_ranks(self):
        """As on two hosts whose launcher starts one process on each."""
        result = starters.run(2, [PROGRAM, "collectives", "--ranks=2"], "variables")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(result.stdout, "4 ranks over TCP\n")

    @unittest.skipUnless(starters.STARTER == "mpirun", "is about MPI")
    def test_another_mpi_than_the_launcher(self):
        """As if another MPI's mpirun had started four processes, each of which is alone for ours."""
        for rank, printed in ((0, True), (1, False)):
            # isolated: where there is no ssh, Open MPI refuses to start a process of its own otherwise
            launcher = {"PMI_SIZE": "4", "PMI_RANK": str(rank), "OMPI_MCA_plm": "isolated"}
            result = subprocess.run([PROGRAM, "alone"], capture_output=True, text=True, timeout=60,
                                    env=alone(**launcher))
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertEqual("PMI_SIZE says that 4 processes were started together" in result.stderr, printed,
                             result.stderr)


if __name__ == "__main__":
    unittest.main()
