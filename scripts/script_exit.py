"""How scripts end: with one line and an exit code, whatever their input is."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from typing import Callable

from text_data.common import InputError, one_line, printable

DEFECT, BAD_INPUT, NOT_WRITTEN = 1, 2, 4
MOST_CHARACTERS = 1600  # of an error


def run_script(run: Callable[[list[str]], None], print_line: Callable[[str], None]) -> int:
    """Runs a script's `run` with the arguments of the command line. Returns the exit code."""
    open_missing_streams()
    # An exception, so that what cannot be continued is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        code = exit_code(run, print_line)
        with contextlib.suppress(BrokenPipeError):  # `head` has read what it wants
            sys.stdout.flush()
            return code
    except OSError as error:
        tell(print_line, f"writing failed: {one_line(error)}")
        code = NOT_WRITTEN
    drop_output()
    return code


def exit_code(run: Callable[[list[str]], None], print_line: Callable[[str], None]) -> int:
    try:
        run(sys.argv[1:])
    except InputError as error:
        tell(print_line, str(error))
        return BAD_INPUT
    except MemoryError as error:
        tell(print_line, f"memory ran out ({one_line(error)}); use fewer --workers, smaller records or another machine")
        return BAD_INPUT
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 0 if error.code is None else BAD_INPUT
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError:
        raise
    except Exception as error:
        places = traceback.extract_tb(error.__traceback__)[-3:]
        where = ", ".join(f"{os.path.basename(place.filename)}:{place.lineno}" for place in reversed(places))
        tell(print_line, f"{type(error).__name__}: {one_line(error)} ({where}); this is a defect of the script: please report this line")
        return DEFECT
    return 0


def tell(print_line: Callable[[str], None], text: str) -> None:
    line = printable(text)
    if len(line) > MOST_CHARACTERS:  # of a name, in the midst of what is said of it
        line = f"{line[:MOST_CHARACTERS // 2]} ... {line[-MOST_CHARACTERS // 2:]}"
    with contextlib.suppress(OSError):
        print_line(f"error: {line}")


def open_missing_streams() -> None:
    """A script may be started with closed streams, which Python has as None. Files that are opened would get their numbers."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))


def drop_output() -> None:
    """What is left to flush when Python ends goes nowhere."""
    with contextlib.suppress(OSError, ValueError):  # standard output may be no file
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)


def print_last(print_summary: Callable[[], None]) -> None:
    """Prints what was made. That nobody reads it to its end, `head` for example, is no error: all is written."""
    try:
        print_summary()
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()
