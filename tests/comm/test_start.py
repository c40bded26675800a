#!/usr/bin/env python3
"""How ranks find each other, and what they say when they do not fit together. Exits with 77 (skipped) without MPI."""
import os
import subprocess
import unittest

from ranks import PROGRAM, RanksTest, Run, skip_without_mpi

skip_without_mpi()


class StartTest(RanksTest):
    def test_a_run_that_ends_well(self):
        run = Run(3, "drill", "steps=5")
        self.finish(run, 0)
        self.assertEqual(len(run.lines), 3, run.lines)  # the `ready` lines

    def test_one_process_needs_no_mpirun(self):
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI"))}
        result = subprocess.run([PROGRAM, "alone"], capture_output=True, text=True, env=environment, timeout=60)
        self.assertEqual((result.returncode, result.stderr), (0, "rank 0 of 1\n"))

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

    def test_another_mpi_than_the_launcher(self):
        """As if another MPI's mpirun had started four processes, each of which is alone for ours."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMPI_", "PMI"))}
        for rank, printed in ((0, True), (1, False)):
            # isolated: where there is no ssh, Open MPI refuses to start a process of its own otherwise
            launcher = {"PMI_SIZE": "4", "PMI_RANK": str(rank), "OMPI_MCA_plm": "isolated"}
            result = subprocess.run([PROGRAM, "alone"], capture_output=True, text=True, timeout=60,
                                    env={**environment, **launcher})
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertEqual("PMI_SIZE says that 4 processes were started together" in result.stderr, printed,
                             result.stderr)


if __name__ == "__main__":
    unittest.main()
