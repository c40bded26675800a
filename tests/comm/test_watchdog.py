#!/usr/bin/env python3
"""Ranks that die, hang, stand still or fail: the others name them and end. Exits with 77 (skipped) without mpirun."""
import signal
import time
import unittest

from ranks import RanksTest, Run, starters

starters.skip_without_starter()

SIZE = 3
SHORT = ("beat=0.2", "silence=3")  # of the watchdog, in seconds


class WatchdogTest(RanksTest):
    def drill(self, *options):
        run = Run(SIZE, "drill", *options)
        run.wait_until_ready(SIZE)
        return run

    def finish_lost(self, run, code):
        """`code` is that of the rank which the others lose. mpirun gives that of whichever rank's end it hears of first."""
        self.assertIn(run.finish(), (code, 5) if starters.STARTER == "mpirun" else (code,), "\n".join(run.lines))

    def test_a_killed_rank(self):
        for rank in (1, 0):
            with self.subTest(rank=rank):
                run = self.drill("beat=0.1")
                began = time.monotonic()
                run.kill(rank, signal.SIGKILL)
                self.finish_lost(run, 128 + signal.SIGKILL)
                self.assertLess(time.monotonic() - began, 30)
                self.assert_lines(run, rf"^error: rank {rank} \(.*, pid {run.pids[rank]}\) died, last heard of in step \d+, "
                                       rf"(forward|all_reduce of x), .*; rank \d ends with exit code 5$", SIZE - 1)

    def test_a_stopped_rank(self):
        for rank in (2, 0):
            with self.subTest(rank=rank):
                run = self.drill(*SHORT)
                run.kill(rank, signal.SIGSTOP)
                self.finish(run, 5)
                self.assert_lines(run, rf"^error: rank {rank} \(.*\) has sent nothing for \d+ s, last heard of in step \d+, .*;"
                                       rf" rank [{'012'.replace(str(rank), '')}] ends with exit code 5$", SIZE - 1)

    def test_a_pause_of_all_ranks(self):
        """As docker pause and scontrol suspend do. A rank that does not wake with the others is found all the same."""
        run = self.drill(*SHORT, "stall_seconds=4")
        for order in ((0, 1, 2), (2, 1, 0)):  # whoever wakes first hears nothing of the others
            for rank in range(SIZE):
                run.kill(rank, signal.SIGSTOP)
            time.sleep(5)
            for rank in order:
                run.kill(rank, signal.SIGCONT)
                time.sleep(0.1)
            time.sleep(2)  # some steps
            self.assertIsNone(run.process.poll(), "\n".join(run.lines))
        for rank in range(SIZE):
            run.kill(rank, signal.SIGSTOP)
        time.sleep(5)
        for rank in (0, 2):
            run.kill(rank, signal.SIGCONT)
        self.finish(run, 5)
        self.assert_lines(run, r"^error: rank 1 \(.*\) has sent nothing for \d+ s, last heard of in step \d+, .*; rank [02] ends"
                               " with exit code 5$", SIZE - 1)

    def test_a_rank_that_stands_still(self):
        run = Run(SIZE, "drill", "stall=1", "stall_seconds=2", *SHORT)
        self.finish(run, 5)
        self.assert_lines(run, r"^error: rank 1 \(.*\) has made no progress for \d+ s in step 3, forward, after \d+ collectives; "
                               r"rank \d \(.*\) waits for it in collective \d+; rank \d ends with exit code 5$", SIZE)

    def test_an_error_of_one_rank(self):
        for rank in (1, 0):
            with self.subTest(rank=rank):
                run = Run(SIZE, "drill", f"throw={rank}")
                self.finish(run, 2)
                self.assert_lines(run, rf"^error: rank {rank} \(.*\): tokens\.npy: cannot be read$", 1)
                self.assert_lines(run, rf"^error: rank {rank} \(.*\) failed: tokens\.npy: cannot be read; rank \d ends with its"
                                       " exit code 2$", SIZE - 1)

    def test_a_rank_that_leaves_without_a_word(self):
        run = Run(SIZE, "drill", "exit=2")
        self.finish_lost(run, 9)
        self.assert_lines(run, r"^error: rank 2 \(.*\) died, last heard of", SIZE - 1)

    def test_a_dead_rank_and_a_signal_to_stop(self):
        """SIGTERM asks for a stop after the step, which never ends once a rank is gone."""
        run = self.drill()
        for rank in (0, 2):
            run.kill(rank, signal.SIGTERM)
        time.sleep(0.2)
        run.kill(1, signal.SIGKILL)
        self.finish_lost(run, 128 + signal.SIGKILL)
        self.assert_lines(run, r"^error: rank 1 \(.*\) died", SIZE - 1)


if __name__ == "__main__":
    unittest.main()
