"""Runs a command within limits of time and memory, and measures both.

As a script, measured.py SECONDS ADDRESS_SPACE REPORT COMMAND..., it is the small process that starts the command: what a process had in
memory at most counts from what its parent had.
"""
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

MIB, GIB = 2**20, 2**30


@dataclass
class Measured:
    """Has what a subprocess.CompletedProcess has."""
    args: list
    returncode: int  # minus the number of a signal
    stdout: str
    stderr: str
    seconds: float
    peak_mib: float  # resident
    in_time: bool


def run_measured(command, seconds, address_space=None, **options):
    """Ends it after these seconds. With `address_space`, in bytes, it gets no more memory: what would take all of this machine's fails
    there instead."""
    command = list(map(str, command))
    with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
        paths = {name: os.path.join(folder, name) for name in ("out", "err", "report")}
        with open(paths["out"], "wb") as out, open(paths["err"], "wb") as err:
            subprocess.run([sys.executable, "-S", __file__, str(seconds), str(address_space or -1), paths["report"], *command],
                           stdin=subprocess.DEVNULL, stdout=out, stderr=err, check=True, **options)
        said = []
        for name in ("out", "err"):
            with open(paths[name], encoding="utf-8", errors="replace") as file:
                said.append(file.read())
        with open(paths["report"], encoding="utf-8") as file:
            report = json.load(file)
    return Measured(command, report.pop("returncode"), *said, **report)


def assert_bounded(test, result, mib=None):
    """It ended by itself, and had no more memory than this."""
    said = f"{result.seconds:.1f} s, {result.peak_mib:.0f} MiB: {result.args}\n{result.stdout[-500:]}\n{result.stderr[-2000:]}"
    test.assertTrue(result.in_time, f"ended after {said}")
    if mib is not None:
        test.assertLess(result.peak_mib, mib, said)


def main(seconds, address_space, report, command):
    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (address_space, address_space))

    begin, in_time = time.monotonic(), True
    process = subprocess.Popen(command, preexec_fn=limit, start_new_session=True)  # it may have processes of its own
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid != 0:
            break
        if in_time and time.monotonic() - begin > seconds:
            in_time = False
            os.killpg(process.pid, signal.SIGKILL)
        time.sleep(0.02)
    with open(report, "w", encoding="utf-8") as file:
        json.dump({"returncode": os.waitstatus_to_exitcode(status), "seconds": time.monotonic() - begin, "peak_mib": usage.ru_maxrss / 1024,
                   "in_time": in_time}, file)
    os._exit(0)  # without a look at the process, which was waited for


if __name__ == "__main__":
    main(float(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:])
