#!/usr/bin/env python3
"""Follows a run and shows its metrics elsewhere, also while it is training.

    parka follow runs/a --http 8000                          # a page with live curves: http://127.0.0.1:8000/
    parka follow runs/a runs/b --http 8000                   # with those of both
    parka follow runs/a --tensorboard runs/tensorboard       # then: tensorboard --logdir runs/tensorboard
    parka follow runs/a --wandb PROJECT --prometheus /var/lib/node_exporter/a.prom
    parka follow runs/a --mlflow EXPERIMENT --once
    parka train a.json --follow http,wandb                   # starts it beside the run, and ends it with that

It reads the run's metrics.jsonl, waits for it where it is not there yet, and continues until Ctrl-C or SIGTERM; with --once it
ends when it has sent what is there. Several sinks may be given at once. When a resumed run repeats steps, no sink has them
twice: the page, TensorBoard and Prometheus show the new ones, W&B and MLflow keep the first (both are the same, unless the
config was changed). Starting parka follow again adds what is missing, or for TensorBoard replaces what it wrote before.

Curves in TensorBoard, W&B and MLflow:

    train/loss, train/grad_norm, train/lr, train/tokens_per_second, ...   every number of each step's record
    train/source_epochs/0, ...                    with data.weights: epochs of each entry of data.train
    eval/loss                                     data.eval
    eval_sets/NAME/loss                           evaluation.sets
    tasks/NAME/score, acc, len_norm, ...          evaluation.tasks
    telemetry/TENSOR/error/median, .../max, ...   docs/telemetry.md, kind "quantization": over the blocks
    telemetry/PARAMETER/MOMENT/k/median, ...      kind "moments": quartiles and mean of k, each the median over the blocks
    telemetry/PARAMETER/update/rms/median, ...    kind "updates": rms and singular_value, over the matrices of all blocks
    telemetry/attention_backward/imbalance/max, ...   kind "attention": over the blocks
    telemetry/routing/expert_load/max, ...        kind "routing": over the blocks

Medians of an even number of blocks are the upper of the two in the middle. Numbers that were not finite are left out;
train/applied is 0 where a step was skipped. TensorBoard has numbers in fp32: those that are too large for it (beyond 3.4e38) are
infinite there.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import os
import signal
import socket
import sys
import threading
import time

from python_packages import HelpFormatter, command_name
from run_metrics import fail, named_runs, run_main, warn
from run_tail import NotARun, Tail

PATIENCE = 10.0  # seconds that the folder of a run may take to be made before it is said that it is not there


def poll(tail):
    try:
        return tail.poll()
    except NotARun as error:
        fail(str(error))
    except OSError as error:
        fail(f"{tail.path}: {error.strerror}; give a run folder")


class Followed:
    """A run and where it is sent to."""

    def __init__(self, tail, sinks):
        self.tail, self.sinks = tail, sinks
        self.has_begun = self.has_waited = self.has_warned = False
        self.begin = time.monotonic()
        self.unreadable = 0  # lines, as far as they were warned of

    def look(self, once):
        """Sends all that has been written by now."""
        tail = self.tail
        has_more = True
        while has_more:
            batch = poll(tail)
            for sink in self.sinks if batch.anew or batch.records else ():
                if batch.anew:
                    sink.begin()
                sink.add(batch.records)
            self.has_begun = self.has_begun or bool(batch.records)
            has_more = batch.more
        if tail.unreadable > self.unreadable:
            warn(f"{tail.path}: {tail.unreadable} damaged line{'s' * (tail.unreadable > 1)} left out so far")
        self.unreadable = tail.unreadable
        if self.has_begun:
            for sink in self.sinks:
                sink.flush()
        elif once:
            fail(f"{tail.path}: {'holds no metrics yet' if os.path.exists(tail.path) else 'is not there'}; give a run that has begun")
        elif not self.has_waited:
            self.has_waited = True
            print(f"waiting for the first record in {tail.path}", file=sys.stderr, flush=True)
        folder = os.path.dirname(tail.path)
        if not self.has_begun and not self.has_warned and time.monotonic() - self.begin > PATIENCE and not os.path.isdir(folder):
            self.has_warned = True
            warn(f"{folder}: there is no such folder yet; if its name is wrong, end this and give the folder of the run")


def follow(runs, once, stop, interval):
    """Until `stop` is set, or all has been read. What was written before `stop` was set is sent, too."""
    while True:
        is_last = once or stop.is_set()
        for run in runs:
            run.look(once)
        if is_last:
            return
        stop.wait(interval)


def open_sinks(options, run, name, page):
    # Each is imported when it is asked for.
    sinks = [page.add_run(run, name)] if page else []
    if options.tensorboard:
        from sinks.event_file import EventFile

        sinks.append(EventFile(options.tensorboard, name, run))
    if options.prometheus:
        from sinks.prometheus import Prometheus

        sinks.append(Prometheus(options.prometheus, name))
    if options.wandb:
        from sinks.trackers import WandB

        sinks.append(WandB(run, name, options.wandb))
    if options.mlflow:
        from sinks.trackers import MLflow

        sinks.append(MLflow(run, name, options.mlflow))
    return sinks


def usual_port():
    """8000, or a free one where somebody has that."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", 8000))
        except OSError:
            return 0
    return 8000


def parse_options():
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("run", nargs="+", help="run folder, or NAME=FOLDER")
    parser.add_argument("--tensorboard", metavar="DIR", help="write an event file to DIR/NAME")
    parser.add_argument("--wandb", metavar="PROJECT", help="log to Weights & Biases (the package wandb)")
    parser.add_argument("--mlflow", metavar="EXPERIMENT", help="log to MLflow, at MLFLOW_TRACKING_URI (the package mlflow)")
    parser.add_argument("--prometheus", metavar="FILE", help="write a text file for the node exporter, whose names end in .prom")
    parser.add_argument("--http", metavar="PORT", type=int, help="serve a page on this machine, at 127.0.0.1; 0 takes a free port")
    parser.add_argument("--name", help="name of the run in all of these (default: its folder's)")
    parser.add_argument("--once", action="store_true", help="end when all that is there has been sent")
    parser.add_argument("--interval", type=float, default=2.0, metavar="SECONDS", help="between two looks at the file (default: 2)")
    parser.add_argument("--beside", metavar="SINK,...", help="end where standard input ends, and send to http[:PORT], "
                        "tensorboard[:DIR], wandb[:PROJECT], mlflow[:EXPERIMENT], prometheus:FILE.prom; `parka train --follow` gives it")
    options = parser.parse_intermixed_args()
    for sink in filter(None, (options.beside or "").split(",")):
        name, _, value = sink.partition(":")
        defaults = {"http": str(usual_port()), "tensorboard": os.path.join(os.path.dirname(os.path.abspath(options.run[0])), "tensorboard"),
                    "wandb": "parka", "mlflow": "parka", "prometheus": ""}
        value = value or defaults.get(name, "")
        if not value or name == "http" and not value.isdigit():
            fail(f"{sink}: is no place to send a run to; give http, tensorboard, wandb, mlflow or prometheus:FILE.prom")
        setattr(options, name, int(value) if name == "http" else value)
    if not (options.tensorboard or options.wandb or options.mlflow or options.prometheus or options.http is not None):
        fail("nothing to do; give --tensorboard, --wandb, --mlflow, --prometheus or --http")
    if len(options.run) > 1 and (options.name or options.prometheus):
        fail(f"{'--name' if options.name else '--prometheus'}: is of one run; name several as NAME=FOLDER, and give each a parka follow of its own for Prometheus")
    if options.once and options.http is not None:
        fail("--once: ends before anybody can see the page of --http; leave one of them out")
    if options.prometheus and not options.prometheus.endswith(".prom"):
        fail(f"--prometheus: {options.prometheus}: the node exporter reads files alone whose names end in .prom")
    if not 0 < options.interval <= threading.TIMEOUT_MAX:
        fail("--interval: must be above 0, and seconds that can be waited for")
    return options


def main():
    options = parse_options()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    if options.beside:
        threading.Thread(target=lambda: (sys.stdin.read(), stop.set()), daemon=True).start()
    try:
        page = None
        if options.http is not None:
            from sinks.page import Page

            page = Page(options.http)
        runs = [Followed(Tail(os.path.join(run, "metrics.jsonl")), open_sinks(options, run, options.name or name, page))
                for name, run in named_runs(options.run, may_be_missing=True)]
        if page:
            print(f"http://127.0.0.1:{page.port}/", file=sys.stderr if options.beside else sys.stdout, flush=True)
        follow(runs, options.once, stop, options.interval)
        for run in runs:
            for sink in run.sinks:
                sink.close()
            run.tail.close()
    except OSError as error:
        fail(f"{error.filename or ', '.join(options.run)}: {error.strerror}; nothing more is written", code=4)


if __name__ == "__main__":
    run_main(main)
