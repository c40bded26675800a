"""What Python processes that `parka` starts share: requests and answers as lines of JSON on standard input and output."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
from typing import Callable, Iterator

from text_data.common import InputError, one_line, telling_failures

MOST_SECONDS = 20.0  # of a conversation's template, which takes milliseconds
MOST_MEMORY = 2 << 30  # bytes more than the process has


def reason_of(error: BaseException) -> str:
    """What an error of a library says; some say nothing but their type."""
    return one_line(error) or type(error).__name__


@contextlib.contextmanager
def limited() -> Iterator[None]:
    """Python code in the body that loops ends with a TimeoutError, what fills the memory with a MemoryError. For the main
    thread."""

    def end(*_) -> None:
        raise TimeoutError(f"it computes for more than {MOST_SECONDS:g} s")

    before = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", encoding="ascii") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    limits = [limit for limit in (used + MOST_MEMORY, *before) if limit != resource.RLIM_INFINITY]
    handler = signal.signal(signal.SIGPROF, end)
    try:
        resource.setrlimit(resource.RLIMIT_AS, (min(limits), before[1]))
        signal.setitimer(signal.ITIMER_PROF, MOST_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_AS, before)


def advice_to_user(packages: str) -> str:
    """Where this process lacks some."""
    return (
        f"run scripts/setup.sh, which makes a .venv with it, name a Python in PARKA_PYTHON, or run {sys.executable} -m pip "
        f"install {packages}"
    )


def send(answer: dict) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(place: str, make_helper: Callable, first_answer: Callable[..., dict]) -> int:
    """`place`: the file that it works by. Answers each request with helper.answer(request), after a first answer that comes unasked. InputError becomes
    {"error": TEXT}, and ends it with 2 if it comes from make_helper(). Otherwise it ends with its input."""
    what, advice = f"{place} cannot be used", "fix or replace it, or the files beside it"
    try:
        with telling_failures(what, advice):
            helper = make_helper()
    except InputError as error:
        send({"error": str(error)})
        return 2
    send(first_answer(helper))
    for line in sys.stdin.buffer:
        try:
            with telling_failures(what, advice):
                answer = helper.answer(json.loads(line))
        except InputError as error:
            answer = {"error": str(error)}
        send(answer)
    return 0


def end_with_parent() -> None:
    """Else it would notice only between two answers that whoever asks is gone."""
    PR_SET_PDEATHSIG = 1
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def run(main: Callable[[list[str]], int]) -> None:
    end_with_parent()
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        # Whoever asked is gone. Python must not find that out again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
