#!/usr/bin/env python3
"""Makes a small file of a run's metrics, to be kept with its figures.

    thin_metrics.py RUN --out FILE [--every STEPS]

RUN is a run folder or its metrics.jsonl. FILE is a metrics.jsonl that the scripts read as they read the run's own. Each --every
steps (default 16, counted from the run's first) become one record: means of loss and gradient norm, with the number of finite_steps
where some losses are not finite, the median of the tokens per second (of an even number of steps the upper of the two in the
middle), and step, tokens, learning rate and time since the start of the last of them. Fewer steps at the end are one record, too.
Of the start records versions, device, ranks and the time of earlier starts are kept, of others (evaluations, warnings) everything.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import json
from pathlib import Path

from python_packages import require

require("numpy")
import numpy as np  # noqa: E402

from run_metrics import fail, median, metrics_path, read_records  # noqa: E402
from text_data.common import InputError, refuse_to_replace, write_file  # noqa: E402

START_KEYS = ("kind", "step", "device", "driver", "cuda", "gemm_tuning", "ranks", "version", "commit", "earlier_seconds")


def mean_record(records):
    """One record for those of several steps."""
    last = records[-1]
    mean = {key: last[key] for key in ("kind", "step", "tokens", "lr", "wall_seconds") if key in last}
    for key in ("loss", "grad_norm"):
        values = [record[key] for record in records if record.get(key) is not None]
        if values:
            mean[key] = float(f"{np.mean(values):.7g}")
        if key == "loss" and len(values) < len(records):
            mean["finite_steps"] = len(values)
    speeds = [record["tokens_per_second"] for record in records if record.get("tokens_per_second")]
    if speeds:
        mean["tokens_per_second"] = round(median(speeds))
    if "wall_seconds" not in mean and any("seconds" in record for record in records):  # of an older version
        mean["seconds"] = float(f"{sum(record.get('seconds') or 0.0 for record in records):.7g}")
    return mean


def thinned(records, every):
    """The steps of a mean are the same in every run, also in one that was stopped among them: then the record of the next start
    stands before it. A record behind the last step of a mean, such as an evaluation, stays behind."""
    last_step = max((record["step"] for record in records if record.get("kind") == "train"), default=0)
    steps = []
    for record in records:
        is_step = record.get("kind") == "train"
        next_group = is_step and steps and (record["step"] - 1) // every != (steps[-1]["step"] - 1) // every
        if next_group or steps and not is_step and (steps[-1]["step"] % every == 0 or steps[-1]["step"] == last_step):
            yield mean_record(steps)
            steps = []
        if is_step:
            steps.append(record)
        elif record.get("kind") == "start":
            yield {key: record[key] for key in START_KEYS if key in record}
        else:
            yield record
    if steps:
        yield mean_record(steps)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a run folder, or its metrics.jsonl")
    parser.add_argument("--out", required=True, type=Path, metavar="FILE", help="is replaced if it exists, once all is written")
    parser.add_argument("--every", type=int, default=16, metavar="STEPS", help="in one record (default: 16)")
    options = parser.parse_args()
    if options.every < 1:
        fail("--every: must be at least 1")
    path = metrics_path(options.run)
    try:
        refuse_to_replace(path, options.out)
    except InputError as error:
        fail(error)
    records = list(thinned(read_records(path), options.every))
    if not any(record.get("kind") == "train" for record in records):
        fail(f"{options.run}: no steps; give a run that has made some")
    try:
        write_file(options.out, ((json.dumps(record) + "\n").encode() for record in records))
    except InputError as error:
        fail(error, code=4)
    except OSError as error:
        fail(f"{options.out}: {error.strerror}", code=4)


if __name__ == "__main__":
    main()
