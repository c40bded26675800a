#!/usr/bin/env python3
"""Exports the metrics of one or several runs to TensorBoard.

    scripts/tensorboard.py runs/a runs/b --out runs/tensorboard
    tensorboard --logdir runs/tensorboard        # pip install tensorboard

Each run folder becomes a run of its name. Running it again, of a training that goes on for example, replaces what it wrote
before of the same runs. What there is to see:

    train/loss, train/grad_norm, train/lr, train/tokens_per_second, ...   every number of each step's record
    train/source_epochs/0, ...                    with data.weights: epochs of each entry of data.train
    eval/loss                                     data.eval
    eval_sets/NAME/loss                           evaluation.sets
    tasks/NAME/score, acc, len_norm, ...          evaluation.tasks
    telemetry/TENSOR/error/median, .../max, ...   docs/telemetry.md, kind "quantization": over the blocks
    telemetry/PARAMETER/MOMENT/k/median, ...      kind "moments": quartiles and mean of k, each the median over the blocks

Numbers that were not finite are left out; train/applied is 0 where a step was skipped. The wall time of a point is made of
the seconds that the steps took, up to the time that metrics.jsonl was last written at.
"""
import argparse
import os
import time

from run_metrics import fail, median, read_records

# By these ends of their names the files of earlier exports are known.
PREFIX, SUFFIX = "events.out.tfevents.", ".parka"


def is_number(value):
    return isinstance(value, (int, float))


def numbers(record, prefix):
    """(tag, value) of whatever is a number, and of each number of a list."""
    for key, value in record.items():
        if key == "step":
            continue
        if is_number(value):
            yield f"{prefix}/{key}", value
        elif isinstance(value, list):
            yield from ((f"{prefix}/{key}/{index}", item) for index, item in enumerate(value) if is_number(item))


def quantization(record):
    for tensor, statistics in record["tensors"].items():
        for key, blocks in statistics.items():
            known = [value for value in blocks if value is not None]
            if known:
                yield f"telemetry/{tensor}/{key}/median", median(known)
                yield f"telemetry/{tensor}/{key}/max", max(known)


def moments(record):
    for parameter, both in record["parameters"].items():
        for moment, ranges in both.items():
            for key, statistics in ranges.items():
                for statistic, blocks in statistics.items():
                    if any(value is not None for value in blocks):
                        yield f"telemetry/{parameter}/{moment}/{key}/{statistic}", median(blocks)


SCALARS = {
    "train": lambda record: numbers(record, "train"),
    "eval": lambda record: numbers(record, "eval"),
    "eval_set": lambda record: numbers(record, f"eval_sets/{record['set']}"),
    "task": lambda record: numbers(record, f"tasks/{record['task']}"),
    "quantization": quantization,
    "moments": moments,
}


def points_of(path, records):
    """(step, seconds since the start, [(tag, value), ...]) of each record."""
    elapsed = 0.0
    for number, record in enumerate(records, 1):
        kind = record.get("kind")
        if kind not in SCALARS:
            continue  # a newer parka may write more
        try:
            scalars = list(SCALARS[kind](record))
        except (AttributeError, KeyError, TypeError):
            fail(f"{path}:{number}: not a record of kind {kind} as parka writes it; give the folder of a run")
        if kind == "train":
            elapsed += record.get("seconds") or 0.0
        if scalars:
            yield record["step"], elapsed, scalars


def write_events(folder, points, end):
    """Writes a new event file and removes those of earlier exports. The last point is of the time `end`."""
    # Not SummaryWriter, which writes in a thread and loses its errors.
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import Summary
    from tensorboardX.record_writer import RecordWriter

    start = end - points[-1][1]
    os.makedirs(folder, exist_ok=True)
    earlier = [name for name in os.listdir(folder) if name.startswith(PREFIX) and name.endswith(SUFFIX)]
    draft = os.path.join(folder, "draft")  # TensorBoard reads only names with "tfevents"
    writer = RecordWriter(draft)
    writer.write(Event(wall_time=start, file_version="brain.Event:2").SerializeToString())
    for step, elapsed, scalars in points:
        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in scalars])
        writer.write(Event(wall_time=start + elapsed, step=step, summary=summary).SerializeToString())
    writer.flush()
    writer.close()
    # A new name each time: a TensorBoard that is running would read on in the old file.
    os.replace(draft, os.path.join(folder, f"{PREFIX}{time.time_ns()}{SUFFIX}"))
    for name in earlier:
        os.remove(os.path.join(folder, name))


def run_name(run):
    return os.path.basename(os.path.abspath(run))


def export(run, out):
    path = os.path.join(run, "metrics.jsonl")
    points = list(points_of(path, read_records(path)))
    if not points:
        fail(f"{path}: holds no metrics yet; give a run that has made a step")
    folder = os.path.join(out, run_name(run))
    try:
        write_events(folder, points, os.path.getmtime(path))
    except OSError as error:
        fail(f"{folder}: cannot be written ({error.strerror}); choose another --out, or free some space")
    tags = {tag for _, _, scalars in points for tag, _ in scalars}
    print(f"{folder}: {len(tags)} tags, steps {points[0][0]} to {points[-1][0]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="run folder with a metrics.jsonl")
    parser.add_argument("--out", required=True, help="folder for TensorBoard, with a subfolder for each run")
    arguments = parser.parse_args()
    names = [run_name(run) for run in arguments.run]
    for name in names:
        if names.count(name) > 1:
            fail(f"{name}: the name of several runs; export them with different --out")
    try:
        import tensorboardX  # noqa: F401
    except ImportError:
        fail("tensorboardX is missing; install it with: pip install tensorboardX")
    for run in arguments.run:
        export(run, arguments.out)


if __name__ == "__main__":
    main()
