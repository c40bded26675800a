"""What Python processes that `parka` starts share: requests and answers as lines of JSON on standard input and output."""

from __future__ import annotations

import json
import os
import sys
from typing import Callable

from text_data.common import InputError, telling_failures


def advice_to_user(packages: str) -> str:
    """Where this process lacks some."""
    return (
        f"run scripts/setup.sh, which makes a .venv with it, name a Python in PARKA_PYTHON, or run {sys.executable} -m pip "
        f"install {packages}"
    )


def send(answer: dict) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def serve(make_helper: Callable, first_answer: Callable[..., dict]) -> int:
    """Answers each request with helper.answer(request), after a first answer that comes unasked. InputError becomes
    {"error": TEXT}, and ends it with 2 if it comes from make_helper(). Otherwise it ends with its input."""
    files = "the files of a tokenizer or a processor cannot be used"
    try:
        with telling_failures(files, "fix or replace them"):
            helper = make_helper()
    except InputError as error:
        send({"error": str(error)})
        return 2
    send(first_answer(helper))
    for line in sys.stdin.buffer:
        try:
            with telling_failures(files, "fix or replace them"):
                answer = helper.answer(json.loads(line))
        except InputError as error:
            answer = {"error": str(error)}
        send(answer)
    return 0


def run(main: Callable[[list[str]], int]) -> None:
    try:
        sys.exit(main(sys.argv[1:]))
    except BrokenPipeError:
        # Whoever asked is gone. Python must not find that out again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
