#!/usr/bin/env python3
"""Compares the training losses of runs with that of the first: a table, and with --out a picture.

    parka compare runs/bf16 runs/coat runs/parka --out compare.png
    parka compare bf16=runs/a coat=runs/b --axis hours --json

A run is a run folder, or NAME=FOLDER. Its difference is its loss less the first run's, where both have records: step by
step, or with --axis tokens or hours at the first run's points, with the other run's loss interpolated between its own
where no records are missing between them.
Hours are those that the run's processes have run, all starts together.

The table has, over the last --last of what is compared, the mean difference in nats per token and an interval that covers
the true one with 95 % (studentized block bootstrap: neighbouring steps may be correlated), or a little less often where few
steps are strongly correlated. The interval is about these two runs; another seed moves the loss as well. The picture has two panels: losses, and differences with their intervals.
Curves are means over centred windows of --smooth steps; differences are drawn where a whole window fits.

With --json it prints one line for each run but the first: its name, the first's name, the mean difference in nats, its
standard error and interval (null of too few steps), the run's own mean loss, and the range of the axis they are averaged over.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import json

from python_packages import HelpFormatter, command_name, require

require("numpy")
import numpy as np  # noqa: E402

from run_metrics import RunClock, centred_mean, fail, metrics_path, named_runs, read_records, run_main, save_picture, smooth_curve, warn  # noqa: E402
from sinks.scalars import as_double  # noqa: E402

REPLICATES = 1000
BAND_POINTS = 100  # of the picture, for each run
AXES = ("steps", "tokens", "hours")


class Run:
    def __init__(self, name, run):
        path = metrics_path(run)
        records = read_records(path)
        clock = RunClock()
        train = [(record["step"], record.get("tokens", 0), hours, record.get("loss"))
                 for record, hours in zip(records, map(clock.hours, records)) if record.get("kind") == "train"]
        points = [point for point in train if point[3] is not None]
        if not points:
            fail(f"{path}: holds no training steps")
        if len(points) < len(train):
            warn(f"{path}: {len(train) - len(points):,} of {len(train):,} losses are not finite, and are left out")
        self.end = train[-1][:3]  # step, tokens, hours
        if any(after[0] <= before[0] for before, after in zip(points, points[1:])):
            fail(f"{path}: its steps do not grow; of files that were rotated join each once, the oldest first")
        self.name = name
        self.steps, self.tokens, self.hours, self.loss = (np.array([as_double(value) for value in column]) for column in zip(*points))
        held_out = [(record["loss"], record["step"]) for record in records
                    if record.get("kind") == "eval" and record.get("loss") is not None]
        self.held_out, self.held_out_step = held_out[-1] if held_out else (None, None)

    def told_held_out(self):
        if self.held_out is None:
            return ""
        # A run that was stopped may have none since its first steps.
        return f"{self.held_out:.4f}" + (f" at {self.held_out_step:,}" if self.held_out_step < self.end[0] else "")


def spacing(run):
    """Steps from one record to the next."""
    return float(np.median(np.diff(run.steps))) if len(run.steps) > 1 else 1.0


def in_gaps(run, known, x):
    """Which x lie where records are missing: between two of `known`, those of the run's records, whose steps are more than
    four times as far apart as usual."""
    if len(known) < 2:
        return np.zeros(len(x), bool)
    after = np.clip(np.searchsorted(known, x), 1, len(known) - 1)
    return (np.diff(run.steps)[after - 1] > 4 * spacing(run)) & ~np.isin(x, known)


def differences(base, run, axis):
    """(x, losses of base, losses of run), both at the x where both are known."""
    base_x, run_x = getattr(base, axis), getattr(run, axis)
    if axis == "steps":
        x, of_base, of_run = np.intersect1d(base_x, run_x, assume_unique=True, return_indices=True)
        return x, base.loss[of_base], run.loss[of_run]
    both = (base_x >= run_x[0]) & (base_x <= run_x[-1]) & ~in_gaps(run, run_x, base_x)
    return base_x[both], base.loss[both], np.interp(base_x[both], run_x, run.loss)


def block_length(values, count):
    """Of blocks for the mean of `count` values that are correlated as these are: 1.5 times what Politis and White (2004,
    corrected 2009) choose for the circular block bootstrap, and at least the square root of `count`, because shorter blocks
    miss correlation. At most a sixth of `count`."""
    n = len(values)
    centred = values - values.mean()
    gap = max(5, int(np.ceil(np.sqrt(np.log10(n)))))
    last = min(int(np.ceil(np.sqrt(n))) + gap, n - 1)
    covariance = np.array([centred[:n - lag] @ centred[lag:] / n for lag in range(last + 1)])
    if covariance[0] == 0:
        return 1
    small = np.abs(covariance / covariance[0]) < 2 * np.sqrt(np.log10(n) / n)
    # The lag from which on `gap` correlations in a row are as small as those of independent values.
    lag = next((i - 1 for i in range(1, last - gap + 2) if small[i:i + gap].all()), last - gap)
    most = min(2 * max(1, lag), last)
    lags = np.arange(-most, most + 1)
    weights = np.minimum(1, 2 * (1 - np.abs(lags) / most)) * covariance[np.abs(lags)]
    variance, slope = weights.sum(), (np.abs(lags) * weights).sum()
    best = (1.5 * slope**2 / variance**2 * count)**(1 / 3) if variance > 0 else 1
    return int(max(1, min(max(np.sqrt(count), 1.5 * best), count // 6)))


def interval(values, length, generator):
    """(standard error, half width of the 95 % interval) of the mean of a series whose neighbours may be correlated. Blocks of
    `length` are drawn with replacement; the interval is symmetric and studentized, which few blocks need (Goetze and Kuensch
    1996). The width is infinite where so few blocks are drawn that equal ones make up more than a twentieth of the draws."""
    n = len(values)
    sums = np.concatenate(([0.0], np.cumsum(values - values.mean())))
    blocks = (sums[length:] - sums[:-length]) / length
    error = np.sqrt((blocks**2).mean() * length / (n - length))
    drawn = blocks[generator.integers(0, len(blocks), (REPLICATES, max(2, n // length)))]
    means, errors = drawn.mean(axis=1), drawn.std(axis=1, ddof=1) / np.sqrt(drawn.shape[1])
    distances = np.abs(means - blocks.mean())
    equal = errors <= 1e-9 * np.abs(blocks).max()  # rounded, where the blocks that were drawn are the same
    if np.mean(equal & (distances > 0)) > 0.05:
        return error, np.inf
    ratios = np.divide(distances, errors, out=np.where(distances > 0, np.inf, 0.0), where=~equal)
    return error, np.quantile(ratios, 0.95) * error


def band(x, values, width, generator):
    """(x, means, half widths) of windows of `width` values, spread evenly over the series."""
    count = min(BAND_POINTS, len(values) - width + 1)
    begins = np.unique(np.linspace(0, len(values) - width, count).round().astype(int))
    windows = [values[begin:begin + width] for begin in begins]
    # One length for all windows: chosen by each of them it would jump from window to window.
    length = block_length(values - np.array(centred_mean(values, width)), width)
    return (x[begins + width // 2], np.array([window.mean() for window in windows]),
            np.array([interval(window, length, generator)[1] for window in windows]))


def compare(base, run, axis, share):
    """What --json prints of a run."""
    x, of_base, of_run = differences(base, run, axis)
    if len(x) < 2:
        fail(f"{run.name} and {base.name} have no two points in common on the axis of {axis}; nothing can be compared")
    last = slice(-min(len(x), max(2, round(share * len(x)))), None)
    gaps = (of_run - of_base)[last]
    error, half = interval(gaps, block_length(gaps, len(gaps)), np.random.default_rng(0))
    return {"run": run.name, "against": base.name, "nats": gaps.mean(), "standard_error": error,
            "interval": [gaps.mean() - half, gaps.mean() + half] if np.isfinite(half) else None, "loss": of_run[last].mean(), axis: [x[last][0], x[-1]]}


def last_mean(values, share):
    """Of a run: the mean of the last share of its values."""
    return values[-max(1, round(share * len(values))):].mean()


def range_text(axis, limits):
    texts = [f"{value:.3g}" if axis == "hours" else f"{value:,.0f}" for value in limits]
    return f"{texts[0]} to {texts[1]}"


def print_table(runs, compared, axis, share):
    rows = [["run", "steps", "tokens", "hours", f"loss, own last {100 * share:g} %", "held out", "difference", "95 % interval",
             f"over {axis}"]]
    for run, result in zip(runs, [None, *compared]):
        step, tokens, run_hours = run.end
        hours = "" if np.isnan(run_hours) else f"{run_hours:.3g}"
        row = [run.name, f"{step:,.0f}", f"{tokens:,.0f}", hours, f"{last_mean(run.loss, share):.4f}",
               run.told_held_out()]
        if result is not None:
            limits = "{:+.4f} to {:+.4f}".format(*result["interval"]) if result["interval"] else "too few steps"
            row += [f"{result['nats']:+.4f}", limits, range_text(axis, result[axis])]
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    print_rows(rows)


def print_rows(rows):
    """In columns, the first to the left."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        cells = [row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join(cells).rstrip())


def limit(axis, lows, highs):
    """Limits the y axis to what the curves need; the start of a training would leave no room for the rest."""
    low, high = min(map(np.min, lows)), max(map(np.max, highs))
    margin = 0.05 * (high - low) or 0.05
    axis.set_ylim(low - margin, high + margin)


def draw(plt, runs, axis, smooth):
    figure, (loss_axis, gap_axis) = plt.subplots(2, 1, figsize=(10, 9), sharex=True, constrained_layout=True)
    losses, lows, highs = [], [], []
    generator = np.random.default_rng(0)
    for index, run in enumerate(runs):
        x = getattr(run, axis)
        smooth_x, mean = smooth_curve(x, run.loss, smooth)
        loss_axis.plot(x, run.loss, color=f"C{index}", alpha=0.2, linewidth=0.7)
        loss_axis.plot(smooth_x, mean, color=f"C{index}", linewidth=1.5, label=run.name)
        losses.append(mean[len(mean) // 20:])
        if index == 0:
            continue
        common, of_base, of_run = differences(runs[0], run, axis)
        middle, gap, half = band(common, of_run - of_base, min(smooth, len(common)), generator)
        half = np.where(np.isfinite(half), half, 0.0)  # of too few steps there is no band
        gap_axis.fill_between(middle, gap - half, gap + half, color=f"C{index}", alpha=0.2, linewidth=0)
        gap_axis.plot(middle, gap, color=f"C{index}", linewidth=1.5, marker="" if len(middle) > 1 else "o", label=run.name)
        late = slice(len(gap) // 20, None)
        lows.append((gap - half)[late])
        highs.append((gap + half)[late])
    limit(loss_axis, losses, losses)
    limit(gap_axis, lows, highs)
    gap_axis.axhline(0, color="C0", linewidth=1)
    loss_axis.set_title(f"training loss (nats per token), mean of {smooth} steps")
    gap_axis.set_title(f"loss minus that of {runs[0].name}, with 95 % interval")
    gap_axis.set_xlabel({"hours": "hours of the run's processes"}.get(axis, axis))
    for each in (loss_axis, gap_axis):
        each.legend()
        each.grid(alpha=0.3)
    return figure


def main():
    parser = argparse.ArgumentParser(prog=command_name(), description=__doc__, formatter_class=HelpFormatter)
    parser.add_argument("run", nargs="+", help="run folder, or NAME=FOLDER; the first is what the others are compared with")
    parser.add_argument("--axis", choices=AXES, default="steps", help="what runs have in common (default: steps)")
    parser.add_argument("--last", type=float, default=0.05, metavar="SHARE",
                        help="share of the compared points that the table averages over (default: 0.05)")
    parser.add_argument("--smooth", type=int, metavar="STEPS",
                        help="width of the picture's windows (default: a twentieth of the first run, at least 25)")
    parser.add_argument("--out", metavar="PICTURE", help="its name ends in .png, .svg, .pdf or another format of matplotlib")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    options = parser.parse_args()
    if len(options.run) < 2:
        fail("give at least two runs; the first is what the others are compared with")
    if not 0 < options.last <= 1:
        fail("--last: must be above 0 and at most 1")
    if options.smooth is not None and options.smooth < 2:
        fail("--smooth: must be at least 2")
    runs = [Run(name, run) for name, run in named_runs(options.run)]
    compared = [compare(runs[0], run, options.axis, options.last) for run in runs[1:]]
    if options.json:
        for result in compared:
            print(json.dumps(result))
    else:
        print_table(runs, compared, options.axis, options.last)
    if options.out:
        smooth = options.smooth or max(25, len(runs[0].loss) // 20)
        save_picture(lambda plt: draw(plt, runs, options.axis, smooth), options.out)


if __name__ == "__main__":
    run_main(main)
