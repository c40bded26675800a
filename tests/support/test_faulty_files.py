"""The library that lets file operations fail does what its rules say."""
import os
import signal
import subprocess
import sys
import tempfile
import time
import unittest

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "commands"))
from parka_runs import faulty_files

# One line per operation: "ok", or the name of its error.
OPERATIONS = """
import errno, os, sys
def attempt(action):
    try:
        action()
        print("ok")
    except OSError as error:
        print(errno.errorcode[error.errno])
"""


class FaultyFiles(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def run_operations(self, script, *rules, **options):
        return subprocess.run([sys.executable, "-c", OPERATIONS + script], cwd=self.folder, env=faulty_files(*rules, **options),
                              capture_output=True, text=True, timeout=60)

    def outcomes(self, script, *rules):
        result = self.run_operations(script, *rules)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout.split()

    def test_a_rule_counts_from_and_how_often(self):
        script = "f = open('a.txt', 'wb', 0)\nfor _ in range(5): attempt(lambda: f.write(b'x'))"
        self.assertEqual(self.outcomes(script), ["ok"] * 5)
        self.assertEqual(self.outcomes(script, "write:*/a.txt:ENOSPC:2:2"), ["ok", "ENOSPC", "ENOSPC", "ok", "ok"])
        self.assertEqual(self.outcomes(script, "write:*/a.txt:EIO:4:0"), ["ok", "ok", "ok", "EIO", "EIO"])
        self.assertEqual(self.outcomes(script, "write:*/b.txt:EIO:1:0", "write:*/a.txt:EDQUOT:1:1"), ["EDQUOT"] + ["ok"] * 4)

    def test_every_operation_can_fail(self):
        with open(os.path.join(self.folder, "a.txt"), "w", encoding="utf-8") as file:
            file.write("text")
        for operation, action in [("open", "os.open('a.txt', os.O_RDONLY)"), ("read", "os.read(f, 1)"), ("read", "os.pread(f, 1, 0)"),
                                  ("fsync", "os.fsync(f)"), ("fsync", "os.fdatasync(f)"), ("rename", "os.rename('a.txt', 'b')"),
                                  ("rename", "os.rename('b', 'a.txt')"), ("mkdir", "os.mkdir('a.txt')"), ("unlink", "os.unlink('a.txt')"),
                                  ("unlink", "os.rmdir('a.txt')"), ("flock", "__import__('fcntl').flock(f, 2)")]:
            with self.subTest(action):
                # The descriptor is opened by the first use of the path.
                script = f"f = os.open('a.txt', os.O_RDONLY) if {operation!r} != 'open' else -1\nattempt(lambda: {action})"
                self.assertEqual(self.outcomes(script, f"{operation}:{self.folder}/a.txt:ESTALE:1:1"), ["ESTALE"])

    def test_a_rule_can_kill(self):
        result = self.run_operations("open('a.txt', 'w').close(); os.remove('a.txt')", "unlink:*/a.txt:KILL:1:1")
        self.assertEqual(result.returncode, -signal.SIGKILL)
        self.assertEqual(os.listdir(self.folder), ["a.txt"])

    def test_writes_are_slow(self):
        begin = time.monotonic()
        result = self.run_operations("for n in 'ab': open(n + '.slow', 'wb', 0).write(bytes(1000))", slow_glob="*.slow", bytes_per_second=2000)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertGreaterEqual(time.monotonic() - begin, 1.0)

    def test_a_rule_that_cannot_be_read_is_no_silence(self):
        for rule in ("write:*:ENOSPC:1", "write:*:ENOTHING:1:1", "wirte:*:EIO:1:1", "write:*:EIO:one:1"):
            with self.subTest(rule):
                result = self.run_operations("attempt(lambda: open('a.txt', 'w').close())", rule)
                self.assertEqual(result.returncode, 99)
                self.assertIn(rule, result.stderr)


if __name__ == "__main__":
    unittest.main()
