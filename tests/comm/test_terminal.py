#!/usr/bin/env python3
"""Ranks that `parka train --ranks` starts on a terminal: `stty tostop` does not stop them, and Ctrl-Z stops all of them."""
import contextlib
import json
import os
import pty
import re
import select
import signal
import sys
import tempfile
import termios
import time
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import starters  # noqa: E402

PROGRAM = os.path.abspath(os.environ.get("PARKA_PROGRAM", "build/release/parka"))
SECONDS = 30  # within which anything comes about, on a machine with other work
STOPPED = 75
RANKS = 2


def state_and_parent(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            state, parent = file.read().rsplit(")", 1)[1].split()[:2]
    except OSError:
        return None, 0
    return state, int(parent)


def children(parent):
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and state_and_parent(name)[1] == parent]


def as_a_shell(command, environment):
    """Never returns: leads the session of the terminal, and has the command in its foreground, whose end is its own."""
    for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP):
        signal.signal(number, signal.SIG_IGN)
    job = os.fork()
    if job == 0:
        os.setpgid(0, 0)
        os.tcsetpgrp(0, os.getpid())
        for number in (signal.SIGTTOU, signal.SIGTTIN, signal.SIGTSTP):
            signal.signal(number, signal.SIG_DFL)
        os.execve(command[0], command, environment)
    while True:
        _, status = os.waitpid(job, os.WUNTRACED)
        if not os.WIFSTOPPED(status):
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)


class OnATerminal:
    """A command with a terminal of its own, whose output is read as it comes."""

    def __init__(self, command, tostop=False):
        self.shell, self.terminal = pty.fork()
        if self.shell == 0:
            if tostop:
                attributes = termios.tcgetattr(0)
                attributes[3] |= termios.TOSTOP
                termios.tcsetattr(0, termios.TCSANOW, attributes)
            as_a_shell(command, starters.environment())
        self.output, self.code = "", None

    def read(self, seconds=0.1):
        if select.select([self.terminal], [], [], seconds)[0]:
            try:
                self.output += os.read(self.terminal, 1 << 16).decode(errors="replace")
            except OSError:  # the other side is closed
                time.sleep(0.02)
        if self.code is None:
            pid, status = os.waitpid(self.shell, os.WNOHANG)
            self.code = os.waitstatus_to_exitcode(status) if pid != 0 else None

    def until(self, holds):
        """Whether it came about in time."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            self.read()
            if holds():
                return True
            if self.code is not None:
                return holds()
        return False

    def starter(self):
        return next(iter(children(self.shell)), None)

    def close(self):
        starter = self.starter()
        for pid in [*(children(starter) if starter else ()), starter, self.shell]:
            if pid and (pid != self.shell or self.code is None):
                with contextlib.suppress(ProcessLookupError):  # it ends by itself
                    os.kill(pid, signal.SIGKILL)
        if self.code is None:
            os.waitpid(self.shell, 0)
        os.close(self.terminal)


class Terminal(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name
        with open(f"{self.folder}/ids.npy", "wb") as file:
            file.write(b"\1\0\2\0\5\0\7\0" * 4000)

    def start(self, steps, **terminal):
        config = {"device": {"kind": "cpu"}, "model": {"vocab_size": 256, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ffn": 16},
                  "precision": {"recipe": "fp32"}, "optimizer": {"schedule": {"kind": "constant", "warmup_steps": 0}},
                  "data": {"train": [f"{self.folder}/ids.npy"], "sequence_length": 16},
                  "training": {"steps": steps, "global_batch_size": RANKS, "micro_batch_size": 1},
                  "checkpoint": {"folder": f"{self.folder}/run", "save_final": False}}
        with open(f"{self.folder}/config.json", "w", encoding="utf-8") as file:
            json.dump(config, file)
        run = OnATerminal([PROGRAM, "--threads", "1", "train", f"{self.folder}/config.json", "--ranks", str(RANKS)], **terminal)
        self.addCleanup(run.close)
        return run

    def test_a_terminal_that_stops_who_writes_in_the_background(self):
        run = self.start(steps=3, tostop=True)
        self.assertTrue(run.until(lambda: run.code is not None), f"it does not end:\n{run.output}")
        self.assertEqual(run.code, 0, run.output)
        self.assertRegex(run.output, r"step +3/3")

    def assert_states(self, run, pids, states, what):
        held = run.until(lambda: all(state_and_parent(pid)[0] in states for pid in pids))
        self.assertTrue(held, f"{what}: {[state_and_parent(pid)[0] for pid in pids]}, starter first\n{run.output}")

    def test_the_key_that_stops_a_job_stops_its_ranks(self):
        run = self.start(steps=1000000)
        self.assertTrue(run.until(lambda: re.search(r"step +2/", run.output)), run.output)
        starter = run.starter()
        ranks = children(starter)
        self.assertEqual(len(ranks), RANKS, run.output)
        for _ in range(2):
            os.write(run.terminal, b"\x1a")  # Ctrl-Z
            self.assert_states(run, [starter, *ranks], "T", "not all are stopped")
            os.kill(starter, signal.SIGCONT)
            self.assert_states(run, [starter, *ranks], "RSD", "not all go on")
        said = len(run.output)
        self.assertTrue(run.until(lambda: "step " in run.output[said:]), run.output)
        os.write(run.terminal, b"\x03")  # Ctrl-C
        self.assertTrue(run.until(lambda: run.code is not None), f"it does not end:\n{run.output[-1000:]}")
        self.assertEqual(run.code, STOPPED, run.output[-1000:])


if __name__ == "__main__":
    unittest.main()
