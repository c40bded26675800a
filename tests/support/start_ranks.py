#!/usr/bin/env python3
"""Starts N processes of a program as torchrun does: start_ranks.py N PROGRAM ARGUMENT...

Each gets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Stop signals are handed on to all. Ends with 128 + N if signal N has
ended a process, else with the first code other than 0 and 5 (a rank that is lost), else with 5 or 0; ten seconds after the
first failure the others are killed."""
import os
import signal
import socket
import subprocess
import sys
import time

RANK_LOST = 5
GRACE_SECONDS = 10


def free_port():
    with socket.socket() as listener:
        listener.bind(("", 0))
        return listener.getsockname()[1]


def main():
    size, program = int(sys.argv[1]), sys.argv[2:]
    port = free_port()
    ranks = []
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda received, _: [rank.send_signal(received) for rank in ranks])
    for rank in range(size):
        variables = {"RANK": str(rank), "WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
        ranks.append(subprocess.Popen(program, env={**os.environ, **variables}))
    killed, failed_at = [], None
    while any(rank.poll() is None for rank in ranks):
        if failed_at is None and any(rank.poll() for rank in ranks):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() > failed_at + GRACE_SECONDS and not killed:
            killed = [rank for rank in ranks if rank.poll() is None]
            for rank in killed:
                rank.kill()
        time.sleep(0.02)
    codes = [rank.returncode for rank in ranks if rank not in killed]
    by_signal = [128 - code for code in codes if code < 0]
    failed = [code for code in codes if code not in (0, RANK_LOST)]
    sys.exit((by_signal + failed + sorted(codes, reverse=True))[0])


main()
