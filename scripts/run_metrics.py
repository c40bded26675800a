"""What the scripts that read a run's metrics.jsonl share (docs/monitoring.md, docs/evaluation.md): runs as they are named on
the command line, their records, how curves are smoothed, and pictures."""
import itertools
import os
import sys

from python_packages import command_name, missing
from run_records import parse_record
from script_exit import print_last, run_script


def fail(message, code=2):
    """The user can fix it. One line: what, where, what to do. Codes are those of `parka`: 2 bad input, 4 writing failed."""
    print(f"{command_name()}: error: {message}", file=sys.stderr)
    sys.exit(code)


def warn(message):
    """Reports what does not stop the script."""
    print_line(f"warning: {message}")


def print_line(message):
    print(f"{command_name()}: {message}", file=sys.stderr, flush=True)


def run_main(main):
    """Ends the script with what script_exit.run_script() makes of its `main`."""
    sys.exit(run_script(lambda _: print_last(main), print_line))


def metrics_path(run):
    """Of a run folder; a metrics.jsonl may be named itself."""
    return os.path.join(run, "metrics.jsonl") if os.path.isdir(run) else run


def run_name(run):
    """The name of the run's folder."""
    path = os.path.abspath(run)
    return os.path.basename(os.path.dirname(path) if os.path.isfile(path) else path) or run


def named_runs(arguments, may_be_missing=False):
    """[(name, run), ...] of run folders, each of which may be given as NAME=FOLDER."""
    runs = []
    for argument in arguments:
        name, separator, run = argument.partition("=")
        runs.append((name, run) if separator and not os.path.exists(argument) else (run_name(argument), argument))
        if not may_be_missing and not os.path.exists(runs[-1][1]):
            fail(f"{runs[-1][1]}: No such file or directory; give a run folder")
    names = [name for name, _ in runs]
    for name in names:
        if names.count(name) > 1:
            fail(f"{name}: the name of several runs; name them by NAME=FOLDER")
    return runs


def read_records(path):
    """Of a metrics.jsonl; a last line that is being written is left out."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            lines = file.read().split("\n")
    except OSError as error:
        fail(f"{path}: {error.strerror}; give a run folder or its metrics.jsonl")
    records = []
    for number, line in enumerate(lines, 1):
        record = parse_record(line)
        if record is not None:
            records.append(record)
        elif number < len(lines):
            fail(f"{path}:{number}: not a record of a run; give a run folder or its metrics.jsonl")
    return records


class RunClock:
    """Hours that the run's processes had run, all starts together, when a record was written. Wants all records, in order."""

    def __init__(self):
        self.earlier = self.steps = self.so_far = 0.0
        self.start = None

    def hours(self, record):
        if record.get("kind") == "start":
            earlier = record.get("earlier_seconds") or 0.0
            # A run whose file was moved away before it was resumed knows of no time before. One whose file is moved while it
            # runs writes its start again.
            is_again = record.get("time") == self.start
            self.earlier = earlier if is_again else max(earlier, self.so_far)
            self.start = record.get("time")
        self.steps += record.get("seconds") or 0.0
        # Records of older versions only say how long their step took.
        seconds = self.earlier + record["wall_seconds"] if "wall_seconds" in record else self.steps
        self.so_far = max(self.so_far, seconds)
        return seconds / 3600


def centred_mean(values, width):
    """Means over windows of at most `width` values, each with as many before its middle as after it. Near the ends windows are
    narrower: a window to one side of its value would lie above a falling curve, or below it."""
    sums = [0.0, *itertools.accumulate(values)]
    result = []
    for i in range(len(values)):
        half = min((width - 1) // 2, i, len(values) - 1 - i)
        result.append((sums[i + half + 1] - sums[i - half]) / (2 * half + 1))
    return result


def smooth_curve(x, values, width):
    """(x, centred means) without the last of them, whose windows have become too narrow to average out noise."""
    end = len(values) - min(width, len(values)) // 4
    return x[:end], centred_mean(values, width)[:end]


def median(values):
    """Of a list that may hold nulls: what was not finite. Of an even number it is the upper of the two in the middle, and not their mean:
    recorded figures are so."""
    known = sorted(value for value in values if value is not None)
    return known[len(known) // 2] if known else float("nan")


def save_picture(draw_on, out):
    """What draw_on(pyplot) returns, into the file `out`."""
    try:
        import matplotlib
    except ImportError:
        fail(missing("matplotlib"))
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.backend_bases import FigureCanvasBase

    if os.path.splitext(out)[1][1:].lower() not in FigureCanvasBase.get_supported_filetypes():
        fail(f"--out: {out}: ends in no format that can be drawn; .png, .svg and .pdf do")
    figure = draw_on(plt)
    try:
        figure.savefig(out, dpi=110)
    except OSError as error:
        fail(f"{out}: {error.strerror}", code=4)
