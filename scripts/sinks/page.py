"""A page with live curves, on this machine alone: 127.0.0.1. The browser asks for what is new every two seconds.

GET /                              page.html, which needs nothing else
GET /data?run=R&epoch=E&from=N     of the R-th run: the columns of training steps from the N-th on, and all that is short. After a resume that
                                   removed steps, and with a new column, the epoch is another one, and the columns come from
                                   the first again
GET /telemetry?run=R&epoch=E&report=I    the I-th record of the kind "quantization"
"""
import functools
import http.server
import json
import os
import shutil
import subprocess
import threading
import time
import urllib.parse

from run_metrics import RunClock, fail
from run_records import model_scalars

COLUMNS = ("step", "tokens", "loss", "grad_norm", "lr", "tokens_per_second", "wall_tokens_per_second", "goodput", "applied")
MOST_ROWS = 20000       # of an answer
GPU_SECONDS = 5.0       # between two looks at the GPUs
FACTS = ("host", "device", "ranks", "version", "commit", "command", "time")
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'"


def planned_memory(run, ranks):
    """{part: bytes} of one GPU, as `parka plan` says; None where it cannot be told."""
    config = os.path.join(run, "config.json")
    program = os.environ.get("PARKA_PROGRAM") or shutil.which("parka")
    if program is None or not os.path.exists(config):
        return None
    try:
        result = subprocess.run([program, "plan", config, "--json", "--gpus", str(ranks)], capture_output=True, timeout=60)
        return json.loads(result.stdout)["bytes"]
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return None


@functools.lru_cache(maxsize=1)  # nvidia-smi is asked once for all runs
def gpus_of_host(_turn):
    """[[bytes in use, bytes, watts, percent of the time in which it was busy], ...]; None for what a GPU does not tell."""
    def number(text):
        try:
            return float(text)
        except ValueError:
            return None

    try:
        result = subprocess.run(["nvidia-smi", "--query-gpu=memory.used,memory.total,power.draw,utilization.gpu", "--format=csv,noheader,nounits"],
                                capture_output=True, text=True, timeout=10)
        rows = [[int(word) << 20 for word in line.split(",")[:2]] + [number(word) for word in line.split(",")[2:]] for line in result.stdout.splitlines()]
        return rows if all(len(row) == 4 for row in rows) else []
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []


def steps_of(run):
    """training.steps of the run's config; None where it cannot be told."""
    try:
        with open(os.path.join(run, "config.json"), encoding="utf-8") as file:
            steps = json.load(file)["training"]["steps"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return steps if isinstance(steps, int) else None


class State:
    """What the page shows of a run: a sink of its records. Written by the thread that follows the run, read by those that answer."""

    def __init__(self, run, name):
        self.run, self.name = run, name
        self.lock = threading.Lock()
        self.epoch, self.memory, self.gpus, self.total_steps = 0, None, [], None
        self.clear()

    def clear(self):
        self.columns = {key: [] for key in (*COLUMNS, "hours")}
        self.clock, self.starts, self.held_out, self.sets, self.tasks, self.samples, self.warnings, self.reports = RunClock(), [], [], {}, {}, {}, set(), []
        self.loads = None
        self.is_new_start = True

    def begin(self):
        with self.lock:
            self.epoch += 1
            self.clear()

    def add(self, records):
        with self.lock:
            for record in records:
                self.add_record(record)

    def add_record(self, record):
        kind, step, hours = record.get("kind"), record["step"], self.clock.hours(record)
        if kind == "train":
            values = model_scalars(record) | {key: record.get(key) for key in COLUMNS} | {"hours": hours}
            new = [key for key in values if key not in self.columns]
            if new and self.columns["step"]:
                self.epoch += 1
            self.columns |= {key: [None] * len(self.columns["step"]) for key in new}
            for key, column in self.columns.items():
                column.append(values.get(key))
        elif kind == "start":
            self.starts.append({"step": step} | {key: record[key] for key in FACTS if key in record})
            self.is_new_start = True
        elif kind == "eval":
            self.held_out.append([step, record["loss"]])
        elif kind == "eval_set":
            self.sets.setdefault(record["set"], []).append([step, record["loss"]])
        elif kind == "task":
            self.tasks.setdefault(record["task"], []).append([step, record["score"]])
        elif kind == "warning":
            (self.warnings.add if record["raised"] else self.warnings.discard)(record["about"])
        elif kind == "sample":
            self.samples[record["prompt"]] = [step, record["text"]]
        elif kind == "routing":
            self.loads = {"step": step, "of_blocks": record.get("loads")}
        elif kind == "quantization":
            self.reports.append((step, json.dumps(record)))

    def flush(self):
        """At what is not in metrics.jsonl: the plan when a start is new, the GPUs every few seconds if they are this host's."""
        start = self.starts[-1] if self.starts else {}
        if self.is_new_start:
            self.is_new_start = False
            self.total_steps = steps_of(self.run)
            self.memory = planned_memory(self.run, start.get("ranks", 1))
        if start.get("host") == os.uname().nodename:
            self.gpus = gpus_of_host(time.monotonic() // GPU_SECONDS)

    def data(self, epoch, begin):
        with self.lock:
            if epoch != self.epoch:
                begin = 0
            count = len(self.columns["step"])
            end = min(count, begin + MOST_ROWS)
            return {"epoch": self.epoch, "from": begin, "count": count, "name": self.name, "total_steps": self.total_steps,
                    "columns": {key: column[begin:end] for key, column in self.columns.items()}, "starts": self.starts,
                    "held_out": self.held_out, "sets": self.sets, "tasks": self.tasks, "samples": self.samples, "warnings": sorted(self.warnings), "memory": self.memory, "gpus": self.gpus, "loads": self.loads,
                    "scalars": list(self.columns)[len(COLUMNS) + 1:], "reports": [step for step, _ in self.reports]}

    def report(self, epoch, index):
        """The text of a telemetry record; None if there is none, or it was removed."""
        with self.lock:
            return self.reports[index][1] if epoch == self.epoch and 0 <= index < len(self.reports) else None


    def close(self):
        pass


class Handler(http.server.BaseHTTPRequestHandler):
    states = page = None

    def do_GET(self):
        # A page of somebody else's whose name has been made to mean 127.0.0.1 shall not read this one.
        if self.headers.get("Host", "").rsplit(":", 1)[0] not in ("127.0.0.1", "localhost"):
            self.answer(403, "text/plain", "ask for http://127.0.0.1")
            return
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        try:
            run, epoch, begin, report = (int(query.get(key, 0)) for key in ("run", "epoch", "from", "report"))
        except ValueError:
            self.answer(400, "text/plain", "run, epoch, from and report are numbers")
            return
        state = self.states[run] if 0 <= run < len(self.states) else None
        if url.path == "/":
            self.answer(200, "text/html; charset=utf-8", self.page)
        elif url.path == "/data" and state is not None:
            self.answer(200, "application/json", json.dumps({"runs": [each.name for each in self.states]} | state.data(epoch, max(0, begin))))
        elif url.path == "/telemetry" and state is not None and (text := state.report(epoch, report)) is not None:
            self.answer(200, "application/json", text)
        else:
            self.answer(404, "text/plain", "not here")

    def answer(self, code, kind, text):
        body = text.encode()
        self.send_response(code)
        for key, value in (("Content-Type", kind), ("Content-Length", len(body)), ("Cache-Control", "no-store"),
                           ("Content-Security-Policy", POLICY)):
            self.send_header(key, str(value))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *arguments):
        pass


class Server(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request, address):
        pass  # the browser has gone


class Page:
    def __init__(self, port):
        self.states = []
        with open(os.path.join(os.path.dirname(os.path.abspath(__file__)), "page.html"), encoding="utf-8") as file:
            handler = type("PageHandler", (Handler,), {"states": self.states, "page": file.read()})
        try:
            self.server = Server(("127.0.0.1", port), handler)
        except (OSError, OverflowError) as error:
            fail(f"--http: port {port}: {getattr(error, 'strerror', None) or error}; choose another, or 0 for a free one")
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def add_run(self, run, name):
        self.states.append(State(run, name))
        return self.states[-1]
