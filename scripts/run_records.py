"""A line of a run's metrics.jsonl as a record, checked: the file is anybody's, and a newer parka may write more."""
import datetime
import json
import math

# Keys that records of a kind have besides their step.
KEYS = {"eval": ("loss",), "eval_set": ("set", "loss"), "task": ("task", "metric", "score"), "sample": ("prompt", "text"), "quantization": ("tensors",),
        "moments": ("parameters",), "updates": ("parameters",), "attention": ("blocks",), "routing": ("blocks",), "warning": ("about", "raised")}


def is_number(value):
    """Also true and false, as whether a step was applied. What was not finite is null."""
    return value is None or isinstance(value, (int, float)) and (isinstance(value, int) or math.isfinite(value))


def is_count(value):
    return value is not None and is_number(value)


def is_seconds(value):
    return value is None or type(value) in (int, float) and 0 <= value < 1e12


def is_text(value):
    return isinstance(value, str)


def is_flag(value):
    return type(value) in (bool, int)


def is_time(value):
    try:
        datetime.datetime.fromisoformat(value).timestamp()
        return True
    except (TypeError, ValueError, OverflowError):
        return False


def list_of(check):
    return lambda value: isinstance(value, list) and all(map(check, value))


def object_of(check):
    return lambda value: isinstance(value, dict) and all(map(check, value.values()))


BLOCKS = object_of(list_of(is_number))  # of statistics: a value for each block
# Checks of the values of these keys, in records of every kind and of one.
OF_ALL = {"seconds": is_seconds, "wall_seconds": lambda value: value is not None and is_seconds(value),
          "earlier_seconds": is_seconds}
OF_KIND = {
    "start": dict.fromkeys(("host", "device", "version", "commit", "command"), is_text) | {"ranks": is_number},
    "train": {"tokens": is_count} | dict.fromkeys(("loss", "grad_norm", "lr", "tokens_per_second", "wall_tokens_per_second", "model_tflops", "goodput",
                            "data_wait_seconds", "save_wait_seconds", "applied"), is_number),
    "eval": {"loss": is_number},
    "eval_set": {"set": is_text, "loss": is_number},
    "task": {"task": is_text, "metric": is_text, "score": is_number},
    "sample": {"prompt": is_text, "text": is_text},
    "quantization": {"tensors": object_of(lambda tensor: BLOCKS(tensor) and "error" in tensor)},
    "moments": {"parameters": object_of(object_of(object_of(BLOCKS)))},
    "updates": {"parameters": object_of(object_of(list_of(list_of(is_number))))},
    "attention": {"blocks": BLOCKS},
    "routing": {"blocks": BLOCKS, "loads": list_of(list_of(is_number))},
    "warning": {"about": is_text, "raised": is_flag},
}


# These keys are in the record of a step whatever the model is; all other numbers are scalars that the model's layers report.
OF_EVERY_STEP = {"kind", "step", "time", "epoch", "targets", *OF_ALL, *OF_KIND["train"]}


def model_scalars(record):
    """{name: value} of a step's record; the value is None where it was not finite."""
    return {key: value for key, value in record.items() if key not in OF_EVERY_STEP and is_number(value)}


def read_object(line):
    """None where the line is no JSON object with a step."""
    try:
        record = json.loads(line, parse_constant=lambda name: None)
        if "\\u" in line:
            json.dumps(record, ensure_ascii=False).encode()  # half of a surrogate pair is no text
    except (ValueError, RecursionError):
        return None
    step = record.get("step") if isinstance(record, dict) else None
    return record if type(step) is int and 0 <= step < 2**63 else None


def parse_record(line):
    """None where the line is not a record of a run."""
    record = read_object(line)
    if record is None:
        return None
    kind = record.get("kind")
    checks = OF_ALL | OF_KIND.get(kind, {}) if isinstance(kind, str) else {"kind": is_text} | OF_ALL
    return record if all(check(record[key]) for key, check in checks.items() if key in record) else None


def complete_record(line):
    """The same where the record lacks what its kind has, or its time cannot be shown."""
    record = parse_record(line)
    if record is None or not all(key in record for key in KEYS.get(record.get("kind"), ())):
        return None
    return record if "time" not in record or is_time(record["time"]) else None
