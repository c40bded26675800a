"""What plot.py and tensorboard.py share: the records of a run's metrics.jsonl (docs/telemetry.md, docs/evaluation.md)."""
import json
import os
import sys


def fail(message, code=2):
    """The user can fix it. One line: what, where, what to do. Codes are those of `parka`: 2 bad input, 4 writing failed."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(code)


def read_records(path):
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().splitlines()
    except OSError as error:
        fail(f"{path}: {error.strerror}; give the metrics.jsonl of a run folder")
    records = []
    for number, line in enumerate(lines, 1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            if number == len(lines):  # a running training may be writing the last line
                break
            record = None
        if not isinstance(record, dict) or not isinstance(record.get("step"), int):
            fail(f"{path}:{number}: not a record of a run; give the metrics.jsonl of a run folder")
        records.append(record)
    return records


def median(values):
    """Of a list that may hold nulls: what was not finite."""
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else float("nan")
