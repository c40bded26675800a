"""What a run shows on a terminal and leaves in a file, and `parka train --follow`."""
import json
import os
import re
import subprocess
import time
import unittest
import urllib.request

from parka_runs import PROGRAM, on_terminal
from test_new_config import TINY, Folder

ERASED = "\r\x1b[K"
COLOUR = re.compile(r"\x1b\[\d*m")


class Run(Folder):
    def setUp(self):
        super().setUp()
        self.prepared()
        self.write("a.json", {"model": TINY | {"vocab_size": 272}, "data": {"sequence_length": 64},
                              "training": {"steps": 12, "global_batch_size": 4, "log_interval": 2, "eval_interval": 100, "eval_sequences": 4},
                              "checkpoint": {"folder": "run"}})

    def arguments(self, *more):
        return ("train", "a.json", "--data", "data", "--set", "device.kind=cpu", *more)


class Terminal(Run):
    def test_steps_take_the_place_of_one_another(self):
        for columns in (80, 120):
            with self.subTest(columns):
                code, text = on_terminal(columns, self.folder, *self.arguments("--set", f"checkpoint.folder=run{columns}"))
                self.assertEqual(code, 0, text)
                shown = [part for part in text.split(ERASED) if part.startswith("step")]
                self.assertEqual([int(re.match(r"step +(\d+)/12  \d+%", line)[1]) for line in shown], [2, 4, 6, 8, 10])
                self.assertLess(max(map(len, shown)), columns)
                last = next(line for line in text.splitlines() if "step 12/12" in line)
                self.assertLessEqual(len(last.split(ERASED)[-1]), columns)

    def test_words_have_colours_there_alone(self):
        alone = ("--set", "checkpoint.folder=%s", "--set", "training.eval_interval=0")  # which is warned of
        def given(name):
            return self.arguments(*(word.replace("%s", name) for word in alone))
        self.assertRegex(on_terminal(100, self.folder, *given("a"))[1], r"\x1b\[33mwarning:\x1b\[0m ")
        self.assertNotRegex(on_terminal(100, self.folder, *given("b"), NO_COLOR="1")[1], COLOUR)
        self.assertNotIn("\x1b", on_terminal(100, self.folder, *given("c"), TERM="dumb")[1])
        result = subprocess.run([os.path.abspath(PROGRAM), *given("d")], capture_output=True, text=True, cwd=self.folder, timeout=60)
        self.assertNotIn("\x1b", result.stderr)
        self.assertEqual(len(re.findall(r"step +\d+/12  tokens", result.stderr)), 6)
        self.assertIn("1 warning", result.stderr.splitlines()[-1])


class Following(Run):
    def test_the_follower_ends_with_the_run(self):
        done = self.parka(*self.arguments("--follow", "tensorboard:boards,prometheus:run.prom"))
        self.assertEqual(done, "")
        self.assertIn("parka_step", (self.folder / "run.prom").read_text(encoding="utf-8"))
        self.assertTrue(list((self.folder / "boards/run").iterdir()))

    def test_a_page_is_there_while_it_trains(self):
        process = subprocess.Popen([os.path.abspath(PROGRAM), *self.arguments("--follow", "http:0", "--set", "training.steps=100000")], stderr=subprocess.PIPE,
                                   text=True, cwd=self.folder)
        try:
            address = next(line for line in process.stderr if line.startswith("http")).strip()
            deadline = time.monotonic() + 30
            count = 0
            while count == 0 and time.monotonic() < deadline:
                count = json.load(urllib.request.urlopen(f"{address}data?epoch=0&from=0", timeout=10))["count"]
            self.assertGreater(count, 0)
            process.kill()  # the follower sees that its run has gone
            process.wait()
            deadline = time.monotonic() + 30
            with self.assertRaises(OSError):
                while time.monotonic() < deadline:
                    urllib.request.urlopen(address, timeout=10).close()
                    time.sleep(0.1)
        finally:
            process.kill()
            process.wait()
            process.stderr.close()

    def test_a_sink_that_is_none_is_named(self):
        for sink in ("htp", "http,", "", "http,x", "http:,"):
            self.assertIn("--follow", self.parka(*self.arguments("--follow", sink), code=2))
        self.assertFalse((self.folder / "run").exists())


if __name__ == "__main__":
    unittest.main()
