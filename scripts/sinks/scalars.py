"""The numbers of a record, by tags that TensorBoard, W&B and MLflow show as curves (parka follow lists them)."""
import datetime
import math

from run_metrics import median


def is_number(value):
    return isinstance(value, (int, float))


def infinite(value):
    """What stands for a number that is too large for a sink's format."""
    return math.inf if value > 0 else -math.inf


def as_double(value):
    try:
        return float(value)
    except OverflowError:  # a whole number
        return infinite(value)


def numbers(record, prefix):
    """(tag, value) of whatever is a number, and of each number of a list."""
    for key, value in record.items():
        if key == "step":
            continue
        if is_number(value):
            yield f"{prefix}/{key}", value
        elif isinstance(value, list):
            yield from ((f"{prefix}/{key}/{index}", item) for index, item in enumerate(value) if is_number(item))


def over_blocks(statistics, prefix):
    for key, blocks in statistics.items():
        known = [value for value in blocks if value is not None]
        if known:
            yield f"{prefix}/{key}/median", median(known)
            yield f"{prefix}/{key}/max", max(known)


def quantization(record):
    for tensor, statistics in record["tensors"].items():
        yield from over_blocks(statistics, f"telemetry/{tensor}")


def moments(record):
    for parameter, both in record["parameters"].items():
        for moment, ranges in both.items():
            for key, statistics in ranges.items():
                for statistic, blocks in statistics.items():
                    if any(value is not None for value in blocks):
                        yield f"telemetry/{parameter}/{moment}/{key}/{statistic}", median(blocks)


def updates(record):
    for parameter, statistics in record["parameters"].items():
        yield from over_blocks({key: sum(blocks, []) for key, blocks in statistics.items()}, f"telemetry/{parameter}/update")


SCALARS = {
    "train": lambda record: numbers(record, "train"),
    "eval": lambda record: numbers(record, "eval"),
    "eval_set": lambda record: numbers(record, f"eval_sets/{record['set']}"),
    "task": lambda record: numbers(record, f"tasks/{record['task']}"),
    "quantization": quantization,
    "moments": moments,
    "updates": updates,
    "attention": lambda record: over_blocks(record["blocks"], "telemetry/attention_backward"),
    "routing": lambda record: over_blocks(record["blocks"], "telemetry/routing"),
}


def scalars(record):
    """[(tag, value), ...]; none of a kind that is not known, because a newer parka may write more."""
    kind = record.get("kind")
    return list(SCALARS[kind](record)) if kind in SCALARS else []


class WallTime:
    """Seconds since 1970 at which records were written. Those of older versions lack it: they begin in 1970, and a step comes
    its seconds after the one before."""

    def __init__(self):
        self.last = 0.0

    def of(self, record):
        if "time" in record:
            self.last = datetime.datetime.fromisoformat(record["time"]).timestamp()
        else:
            self.last += record.get("seconds") or 0.0
        return self.last
