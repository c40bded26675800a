#!/usr/bin/env python3
"""Tests of the page of scripts/follow.py --http: what it is told, and in a headless Chromium, where one is on PATH and in CI, what it
shows."""
import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import unittest
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1] / "support")]
from followed_run import SCRIPTS, SECONDS, FollowTest, quantization_record, start_record, train_record  # noqa: E402
from needed_tools import skip_without  # noqa: E402

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome"))), None)


class Page(FollowTest):
    def serving(self, run, *arguments, **environment):
        return self.following(run, "--http", "0", *arguments, **environment)

    def port_of(self, process):
        return int(re.fullmatch(r"http://127\.0\.0\.1:(\d+)/\n", process.stdout.readline())[1])

    def get(self, port, path, **headers):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
        try:
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()

    def data(self, port, epoch=0, begin=0):
        status, _, body = self.get(port, f"/data?epoch={epoch}&from={begin}")
        self.assertEqual(status, 200)
        return json.loads(body)

    def wait_for_step(self, port, step):
        self.wait_for(lambda: self.data(port)["columns"]["step"][-1:] == [step])
        return self.data(port)

    def test_a_run_that_grows_and_is_resumed(self):
        run = self.make_run("a", [start_record(), *map(train_record, range(1, 6)), {"kind": "eval", "step": 5, "loss": 2.5}])
        with self.serving(run) as process:
            port = self.port_of(process)
            first = self.wait_for_step(port, 5)
            self.assertEqual((first["name"], first["count"], first["held_out"]), ("a", 5, [[5, 2.5]]))
            self.assertEqual(first["columns"]["loss"], [4.0 / step for step in range(1, 6)])
            run.add(train_record(6))
            self.wait_for_step(port, 6)
            later = self.data(port, first["epoch"], 5)
            self.assertEqual((later["epoch"], later["from"], later["columns"]["step"]), (first["epoch"], 5, [6]))
            run.resume(3)
            run.add(train_record(4, loss=9.0))
            self.wait_for_step(port, 4)
            again = self.data(port, first["epoch"], 6)
            self.assertNotEqual(again["epoch"], first["epoch"])
            self.assertEqual((again["from"], again["columns"]["step"], again["columns"]["loss"][-1]), (0, [1, 2, 3, 4], 9.0))
            self.assertEqual([start["step"] for start in again["starts"]], [0, 3])
            self.assertEqual(again["held_out"], [])

    def test_scalars_of_the_model_are_columns_whatever_their_names(self):
        run = self.make_run("a", [train_record(1), train_record(2, targets=64, data_wait_seconds=0.5)])
        with self.serving(run) as process:
            port = self.port_of(process)
            first = self.wait_for_step(port, 2)
            self.assertEqual(first["scalars"], [])
            run.add(train_record(3, balance_loss=0.25, entropy=None), train_record(4, culprit="qkv"))
            self.wait_for_step(port, 4)
            again = self.data(port, first["epoch"], 2)  # what began later comes whole
            self.assertNotEqual(again["epoch"], first["epoch"])
            self.assertEqual((again["from"], again["scalars"]), (0, ["balance_loss", "entropy"]))
            self.assertEqual([again["columns"][name] for name in again["scalars"]], [[None, None, 0.25, None], [None] * 4])

    def test_long_runs_come_in_parts(self):
        run = self.make_run("a", [train_record(1)])
        run.write("".join(json.dumps(train_record(step)) + "\n" for step in range(2, 25001)))
        with self.serving(run) as process:
            port = self.port_of(process)
            self.wait_for(lambda: self.data(port)["count"] == 25000)
            first = self.data(port)
            second = self.data(port, first["epoch"], len(first["columns"]["step"]))
            self.assertEqual(first["columns"]["step"] + second["columns"]["step"], list(range(1, 25001)))

    def test_telemetry(self):
        other = quantization_record(4)
        other["tensors"]["qkv.weight"]["error"] = [0.5, None]
        run = self.make_run("a", [start_record(), train_record(2), quantization_record(2), train_record(4), other])
        with self.serving(run) as process:
            port = self.port_of(process)
            data = self.wait_for_step(port, 4)
            self.assertEqual(data["reports"], [2, 4])
            epoch = data["epoch"]
            self.assertEqual(json.loads(self.get(port, f"/telemetry?epoch={epoch}&report=1")[2])["tensors"], other["tensors"])
            for query in (f"epoch={epoch}&report=2", f"epoch={epoch}&report=-1", f"epoch={epoch + 1}&report=0"):
                self.assertEqual(self.get(port, f"/telemetry?{query}")[0], 404)

    def test_memory_is_what_plan_and_the_driver_say(self):
        programs = self.folder / "bin"
        programs.mkdir()
        plan = ('#!/bin/sh\n[ "$1 $3 $4 $5" = "plan --json --gpus 8" ] && grep -q steps "$2" && echo \'{"bytes": {"weights": 3000, "gradients": 1000}}\'\n')
        for name, text in (("parka", plan), ("nvidia-smi", '#!/bin/sh\necho "1024, 81559, 612.25, 97"; echo "2048, 81559, [N/A], [N/A]"\n')):
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        run = self.make_run("a", [start_record(host=os.uname().nodename), train_record(1)])
        (run.folder / "config.json").write_text('{"training": {"steps": 500}}')
        with self.serving(run, PARKA_PROGRAM=str(programs / "parka"), PATH=f"{programs}:{os.environ['PATH']}") as process:
            port = self.port_of(process)
            self.wait_for(lambda: self.data(port)["gpus"])
            data = self.data(port)
        self.assertEqual(data["memory"], {"weights": 3000, "gradients": 1000})
        self.assertEqual(data["gpus"], [[1024 << 20, 81559 << 20, 612.25, 97], [2048 << 20, 81559 << 20, None, None]])
        self.assertEqual(data["total_steps"], 500)

    def test_several_runs(self):
        loads = {"kind": "routing", "step": 3, "blocks": {"expert_load": [None, 1.5]}, "loads": [[], [0.5, 1.5]]}
        runs = [self.make_run(name, [*map(train_record, range(1, steps + 1)), *more]) for name, steps, more in (("a", 2, []), ("b", 3, [loads]))]
        with self.serving(runs[0], f"other={runs[1].folder}", self.folder / "later") as process:
            port = self.port_of(process)
            self.wait_for(lambda: json.loads(self.get(port, "/data?run=1")[2])["loads"])
            self.assertEqual(json.loads(self.get(port, "/data?run=1")[2])["loads"], {"step": 3, "of_blocks": [[], [0.5, 1.5]]})
            self.assertEqual([json.loads(self.get(port, f"/data?run={run}")[2])["count"] for run in range(3)], [2, 3, 0])
            self.assertEqual(self.data(port)["runs"], ["a", "other", "later"])
            self.assertEqual([self.get(port, f"/data?run={run}")[0] for run in (3, -1)], [404, 404])
        self.assert_refused("--prometheus: ", runs[0], runs[1].folder, "--once", "--prometheus", self.folder / "a.prom")

    def test_gpus_of_another_host_are_not_asked(self):
        run = self.make_run("a", [start_record(host="elsewhere"), train_record(1)])
        (self.folder / "nvidia-smi").write_text('#!/bin/sh\necho "1024, 81559"\n')
        (self.folder / "nvidia-smi").chmod(0o755)
        with self.serving(run, PARKA_PROGRAM="/bin/false", PATH=f"{self.folder}:{os.environ['PATH']}") as process:
            data = self.wait_for_step(self.port_of(process), 1)
        self.assertEqual((data["gpus"], data["memory"], data["total_steps"]), ([], None, None))

    def test_it_is_on_this_machine_alone_and_needs_nothing_else(self):
        with self.serving(self.make_run("a", [train_record(1)])) as process:
            port = self.port_of(process)
            status, headers, page = self.get(port, "/")
            self.assertEqual((status, headers["Content-Type"]), (200, "text/html; charset=utf-8"))
            for rule in ("default-src 'none'", "frame-ancestors 'none'"):
                self.assertIn(rule, headers["Content-Security-Policy"])
            self.assertEqual(page, (SCRIPTS / "sinks/page.html").read_bytes())
            self.assertEqual(re.findall(rb"""(?:src|href)=(?!["']?data:)|https?://|@import""", page), [])
            self.assertEqual(self.get(port, "/", Host="attacker.example")[0], 403)
            self.assertEqual(self.get(port, "/", Host=f"localhost:{port}")[0], 200)
            for path, code in (("/metrics.jsonl", 404), ("/../follow.py", 404), ("/data?from=x", 400)):
                self.assertEqual(self.get(port, path)[0], code)
            with self.assertRaises(OSError):  # another address of this machine
                socket.create_connection(("127.0.0.2", port), timeout=SECONDS).close()

    def test_a_port_that_is_taken(self):
        with socket.create_server(("127.0.0.1", 0)) as other:
            port = other.getsockname()[1]
            self.assert_refused(f"--http: port {port}: Address already in use; choose another", self.make_run("a", [train_record(1)]),
                                "--http", str(port))
        self.assert_refused("--http: port 70000: .*; choose another", self.make_run("b", [train_record(1)]), "--http", "70000")

    def shown_by_chromium(self, port):
        result = subprocess.run([CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={self.folder}/chromium",
                                 "--virtual-time-budget=5000", "--dump-dom", f"http://127.0.0.1:{port}/"],
                                capture_output=True, text=True, timeout=10 * SECONDS)
        self.assertEqual(result.returncode, 0, result.stderr)
        return result.stdout

    @skip_without(CHROMIUM, "Chromium")
    def test_chromium_shows_several_runs(self):
        self.assertIsNotNone(CHROMIUM, "Chromium is not on PATH")
        loads = {"kind": "routing", "step": 60, "blocks": {"expert_load": [1.5]}, "loads": [[0.5, 1.5]]}
        first, second = (self.make_run(name, [*(train_record(step, loss=loss) for step in range(1, 61)), {"kind": "eval", "step": 60, "loss": loss - 0.5}, loads])
                         for name, loss in (("a", 4.0), ("b", 3.0)))
        with self.serving(first, second.folder, PARKA_PROGRAM="/bin/false") as process:
            page = self.shown_by_chromium(self.port_of(process))
        for pattern in (r'id="loss-read">.*>a 4</span>.*>b 3</span>.*>a held out 3\.5</span>.*>b held out 2\.5</span>', r'<option value="1">b</option>',
                        r'<div class="card wide" id="loads-card">', r'<canvas id="loads"[^>]* height="74"', "<title>60 · 4 · a</title>"):
            self.assertTrue(re.search(pattern, page), pattern)

    @skip_without(CHROMIUM, "Chromium")
    def test_chromium_shows_it(self):
        self.assertIsNotNone(CHROMIUM, "Chromium is not on PATH")
        records = [start_record(), *(train_record(step, loss=4.0 if step <= 280 else 3.0, balance_loss=0.25) for step in range(1, 301)),
                   quantization_record(300)]
        run = self.make_run("a", [*records, {"kind": "eval", "step": 300, "loss": 2.5}])
        (run.folder / "config.json").write_text('{"training": {"steps": 1200}}')
        with self.serving(run, PARKA_PROGRAM="/bin/false") as process:
            port = self.port_of(process)
            self.wait_for_step(port, 300)
            page = self.shown_by_chromium(port)

        def shown(pattern):
            self.assertTrue(re.search(pattern, page), pattern)

        shown('<b id="fact-step">300 / 1,200</b>')
        shown('<b id="fact-loss">3</b>')  # of the last 20 steps
        shown('<b id="fact-held-out">2.5</b>')
        shown('<b id="fact-device">8 × NVIDIA H200</b>')
        shown(r'id="loss-read">.*>training 3</span>.*>held out 2\.5</span>')
        shown('<h2>balance_loss</h2>.*>balance_loss 0.25</span>')
        shown('<div class="card wide" id="heat-card">')
        shown('<span id="report-step">300</span>')
        shown(r'<canvas id="loss"[^>]* height="280"')  # 150 where nothing was drawn
        shown("<title>300 · 3 · a</title>")


if __name__ == "__main__":
    unittest.main()
