"""Starts ranks of tests/comm/ranks_program.cpp and watches what becomes of them."""
import os
import re
import signal
import subprocess
import sys
import threading
import time
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import starters  # noqa: E402

PROGRAM = os.environ.get("RANKS_PROGRAM", "build/release/tests/ranks_program")
SECONDS = 120  # after which a run counts as hung; a busy machine is slow


class Run:
    """N ranks of the program. `lines` are what they and their starter print, as it comes."""

    def __init__(self, size, *arguments, variables=None):
        self.process = subprocess.Popen(starters.command(size, [PROGRAM, *arguments]),
                                        env=starters.environment(**(variables or {})), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                        text=True, start_new_session=True)
        self.lines = []
        self.pids = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
            ready = re.match(r"ready (\d+) (\d+)$", line)
            if ready:
                self.pids[int(ready[1])] = int(ready[2])

    def wait_until_ready(self, size):
        end = time.monotonic() + SECONDS
        while len(self.pids) < size:
            if time.monotonic() > end or self.process.poll() is not None:
                raise AssertionError("the ranks did not start:\n" + "\n".join(self.lines))
            time.sleep(0.02)
        time.sleep(0.3)  # some steps

    def kill(self, rank, signal_number):
        os.kill(self.pids[rank], signal_number)

    def finish(self):
        """The exit code of the starter; 128 + N for a signal."""
        try:
            code = self.process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            for pid in self.pids.values():
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            raise AssertionError("the ranks hang:\n" + "\n".join(self.lines)) from None
        self._reader.join(10)
        self.process.stdout.close()
        return code


class RanksTest(unittest.TestCase):
    def finish(self, run, code):
        self.assertEqual(run.finish(), code, "\n".join(run.lines))

    def lines_with(self, run, pattern):
        return [line for line in run.lines if re.search(pattern, line)]

    def assert_lines(self, run, pattern, count):
        self.assertEqual(len(self.lines_with(run, pattern)), count, pattern + " in:\n" + "\n".join(run.lines))
