#!/usr/bin/env python3
"""What a recipe costs at equal loss: how many more tokens it needs to reach the loss of another, and what of its speed is left.

    scripts/research/equal_loss.py bf16.1 bf16.2 parka.1 parka.2 --shorter half/bf16.1 --model olmo-150m --out equal_loss.png

A run is a run folder named RECIPE.SEED, or RECIPE.SEED=FOLDER. The first run's recipe is the base. Every seed of another
recipe has a base run over the same batches.

    gap    the run's loss minus that of the base run with its seed, nats per token: mean over the last --last of the steps, with
           --until of those up to so many tokens, as where a text begins to be read again. The slope stays that of whole runs,
           with whatever comes after
    slope  how much the base's loss falls when the number of tokens n is multiplied: -dL / d ln n
    t      exp(gap / slope): the recipe needs t times the tokens
    speed at equal loss = raw speed-up / t

The slope is that between complete runs: from base runs --shorter, each with its own whole schedule over fewer tokens n0,
to those with the same seeds over n1 tokens, (L0 - L1) / ln(n1 / n0). L is the mean over the last --last of a run. Without
--shorter it is a line fitted to the base's own curves, loss over ln n, over their second half. A curve also falls because its
learning rate does, and so this slope is too steep, and t - 1 too small, unless the learning rate is constant. Both slopes
are chords: where the loss falls ever more slowly, t - 1 is too small by about a tenth with n1 = 2 n0.

The interval covers the true gap with 95 %: of several seeds by Student's t over their gaps, of one by compare.py's bootstrap
over its steps, which leaves out what another seed would change, and wants 20 of them. That of t is of the gap alone. The raw speed-up is the ratio of
the median tokens per second of the runs (of an even number of records the upper of the two in the middle), if both of each seed ran on
one kind of device, or what --speedup says, `parka bench` for example.

With --held-out losses on held-out data are compared, too. They are from held_out.json in each run's folder, which evaluate_runs of
scripts/research/paired_runs.sh makes: {"same": what `parka eval --json` prints, "bf16": the same with --set precision.eval=bf16}.
`same` is the loss in the numerics of training; `bf16` that of the same weights with linear layers in bf16, without what FP8 rounds in
the evaluation itself. A run without the file has the last evaluation of its metrics, `same` alone. A recipe is not compared in `bf16`
where some of its runs or of the base's lack it; a warning says so. The gap is to the base run of the same seed in the same evaluation,
and the slope that of `same` between complete runs, too; without --shorter it is that above. One seed has no interval.

Prints a table, or with --json lines of figures, each with its value, least and most over the seeds (spread), interval and
values by seed: loss_gap.MODEL.RECIPE.nats_per_token, and equal_loss.MODEL.* with RECIPE.token_ratio, RECIPE.raw_speedup,
RECIPE.speedup and BASE.slope; with --held-out loss_gap.MODEL.RECIPE.held_out.same, equal_loss.MODEL.RECIPE.token_ratio.held_out.same,
both with bf16 for same, and with --shorter, too, equal_loss.MODEL.BASE.slope.held_out. The picture shows losses and gaps over
tokens: means over the seeds, with bands from the least to the most.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""
import argparse
import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("numpy")
import numpy as np  # noqa: E402

from compare import Run, block_length, differences, interval, last_mean, limit, print_rows  # noqa: E402
from paired_losses import EVALUATIONS, HeldOut, check_targets, runs_by_seed  # noqa: E402
from run_metrics import fail, median, metrics_path, read_records, run_main, save_picture, smooth_curve, warn  # noqa: E402

# The 97.5 % quantile of Student's t with so many degrees of freedom; with more that of the last is a little too wide.
STUDENT = dict(enumerate((12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262), 1))


FEWEST_STEPS = 20  # of which blocks can be drawn


class SeedRun(Run):
    """With the median tokens per second, None where no record has it, the names of the devices that it ran on, and if it was
    `evaluated` its losses on held-out data at its end, else None."""

    def __init__(self, name, run, evaluated):
        super().__init__(name, run)
        records = read_records(metrics_path(run))
        speeds = [record.get("tokens_per_second") for record in records if record.get("kind") == "train"]
        self.devices = {record["device"] for record in records if record.get("kind") == "start" and "device" in record}
        self.speed = median(speeds) if any(speeds) else None
        self.held_out = HeldOut(run) if evaluated else None
        if evaluated and self.held_out.step != self.end[0]:
            fail(f"{self.held_out.path}: is of step {self.held_out.step:,}, and the run ends at {self.end[0]:,}; evaluate the run there, into a new "
                 "held_out.json")


def read_runs(arguments, evaluated):
    """{recipe: {seed: SeedRun}}, in the order in which recipes are named."""
    return {recipe: {seed: SeedRun(*named, evaluated) for seed, named in of_recipe.items()}
            for recipe, of_recipe in runs_by_seed(arguments).items()}


def check_pairs(base, runs):
    """Every run has a base run of its seed, and all are as long."""
    steps, tokens = next(iter(run.end[:2] for run in base.values()))
    for run in [run for of_recipe in (base, *runs.values()) for run in of_recipe.values()]:
        if run.end[:2] != (steps, tokens):
            fail(f"{run.name}: ends at step {run.end[0]:,.0f} with {run.end[1]:,.0f} tokens, others at {steps:,.0f} with "
                 f"{tokens:,.0f}; train all to the same end")
    for of_recipe in runs.values():
        for seed, run in of_recipe.items():
            if seed not in base:
                fail(f"{run.name}: there is no run of the first recipe with the seed {seed}; give one")


def slope_between(base, shorter, loss):
    """Mean over `shorter`, [(seed, run)]: nats by which the `loss` of a run falls when ln of the tokens grows by 1."""
    slopes = []
    for seed, run in shorter:
        if seed not in base or run.tokens[-1] >= base[seed].tokens[-1]:
            fail(f"--shorter: {run.name}: no run of the first recipe with the seed {seed} has more tokens; give a shorter run")
        slopes.append((loss(run) - loss(base[seed])) / np.log(base[seed].tokens[-1] / run.tokens[-1]))
    return np.mean(slopes)


def fitted_slope(base):
    """The same of the second halves of the base's own curves."""
    slopes = []
    for run in base.values():
        late = run.tokens >= run.tokens[-1] / 2
        if late.sum() < 2:
            fail(f"{run.name}: too few steps to fit a line to their losses; give --shorter, or a longer run")
        slopes.append(-np.polyfit(np.log(run.tokens[late]), run.loss[late], 1)[0])
    return np.mean(slopes)


def last_gaps(base, run, share, until):
    """Differences of the loss over the last share of the steps up to so many tokens, or None: of all."""
    _, of_base, of_run = differences(base, run, "steps")
    gaps = of_run - of_base
    if until is not None:
        tokens = np.intersect1d(base.tokens, run.tokens)
        if until > tokens[-1]:
            fail(f"--until: {run.name} ends at {tokens[-1]:,.0f} tokens; give fewer, or leave it out")
        gaps = gaps[tokens <= until]
        if len(gaps) < 2:
            fail(f"--until: {run.name} has too few losses up to {until:,.0f} tokens, {len(gaps)} of at least 2; give more tokens")
    return gaps[-max(2, round(share * len(gaps))):]


def student_interval(means):
    """[low, high] of the mean over several seeds."""
    half = STUDENT[min(len(means) - 1, len(STUDENT))] * np.std(means, ddof=1) / np.sqrt(len(means))
    return [np.mean(means) - half, np.mean(means) + half]


def gap_interval(gaps_of_seeds, means):
    """[low, high] of the mean over seeds; None of too few steps of one seed, or of its evaluation."""
    if len(means) > 1:
        return student_interval(means)
    gaps, = gaps_of_seeds
    if len(gaps) < FEWEST_STEPS:
        return None
    half = interval(gaps, block_length(gaps, len(gaps)), np.random.default_rng(0))[1]
    return [np.mean(means) - half, np.mean(means) + half]


def figure(name, value, unit, of_seeds, limits=None):
    values = list(of_seeds.values())
    return {"name": name, "value": value, "unit": unit, "spread": [min(values), max(values)], "interval": limits, "seeds": of_seeds}


def speedups(base, runs, given):
    """Of each seed, or None where it is not known."""
    if given is not None:
        return dict.fromkeys(runs, given)
    if any(run.speed is None for run in (*base.values(), *runs.values())):
        return None
    if any(run.devices != base[seed].devices for seed, run in runs.items()):
        return None
    return {seed: run.speed / base[seed].speed for seed, run in runs.items()}


def gap_figures(gap_name, ratio_name, gaps, slope):
    """The gap and t, from the gaps of each seed: of its steps, or the one of its evaluation."""
    means = {seed: np.mean(of_seed) for seed, of_seed in gaps.items()}
    values = list(means.values())
    limits = gap_interval(gaps.values(), values)
    ratios = {seed: np.exp(gap / slope) for seed, gap in means.items()}
    return {
        "nats": figure(gap_name, np.mean(values), "nats/token", means, limits),
        "t": figure(ratio_name, np.exp(np.mean(values) / slope), "1", ratios, limits and [np.exp(end / slope) for end in limits]),
    }


def held_out_figures(model, base, runs, slope):
    """{(recipe, evaluation): gap_figures}, of evaluations that all runs of a recipe and those of the base have."""
    result = {}
    for recipe, of_recipe in runs.items():
        for name in EVALUATIONS:
            pairs = {seed: (run.held_out, base[seed].held_out) for seed, run in of_recipe.items()}
            there = [name in each.losses for pair in pairs.values() for each in pair]
            if any(there) and not all(there):
                warn(f"{recipe}: not all of its runs and those of the base are evaluated in {name}, and so none are compared in it")
            if all(there):
                gaps = {seed: [of_run.losses[name] - of_base.losses[name]] for seed, (of_run, of_base) in pairs.items()}
                result[recipe, name] = gap_figures(f"loss_gap.{model}.{recipe}.held_out.{name}",
                                                   f"equal_loss.{model}.{recipe}.token_ratio.held_out.{name}", gaps, slope)
    return result


def recipe_figures(model, recipe, base, runs, slope, options):
    """Those of one recipe, by their last part."""
    gaps = {seed: last_gaps(base[seed], run, options.last, options.until) for seed, run in runs.items()}
    name = f"equal_loss.{model}.{recipe}"
    result = gap_figures(f"loss_gap.{model}.{recipe}.nats_per_token", f"{name}.token_ratio", gaps, slope)
    raw = speedups(base, runs, options.speedup.get(recipe))
    if raw is not None:
        at_equal_loss = {seed: raw[seed] / result["t"]["seeds"][seed] for seed in runs}
        result["raw"] = figure(f"{name}.raw_speedup", np.median(list(raw.values())), "1", raw)
        result["speed"] = figure(f"{name}.speedup", np.median(list(at_equal_loss.values())), "1", at_equal_loss)
    return result


def print_table(base_name, slope, source, figures):
    print(f"{base_name} loses {slope:.4f} nats per token when the tokens are multiplied by e (of {source})")
    rows = [["recipe", "seeds", "gap", "95 % interval", "t", "least to most", "raw speed-up", "at equal loss"]]
    for recipe, of_recipe in figures.items():
        gap, ratio = of_recipe["nats"], of_recipe["t"]
        limits = "{:+.4f} to {:+.4f}".format(*gap["interval"]) if gap["interval"] else ""
        row = [recipe, str(len(gap["seeds"])), f"{gap['value']:+.4f}", limits, f"{ratio['value']:.4f}",
               f"{ratio['spread'][0]:.4f} to {ratio['spread'][1]:.4f}"]
        row += [f"{of_recipe[key]['value']:.3f}" if key in of_recipe else "" for key in ("raw", "speed")]
        rows.append(row)
    print_rows(rows)


def print_held_out(base_name, slope, slope_source, figures):
    print(f"\nheld-out loss minus that of {base_name}, both in the numerics of training (same), or with linear layers in bf16; slope {slope:.4f} of {slope_source}")
    rows = [["recipe", "evaluation", "gap", "least to most", "95 % interval", "t", "least to most"]]
    for (recipe, name), of_recipe in figures.items():
        gap, ratio = of_recipe["nats"], of_recipe["t"]
        rows.append([recipe, name, f"{gap['value']:+.4f}", "{:+.4f} to {:+.4f}".format(*gap["spread"]),
                     "{:+.4f} to {:+.4f}".format(*gap["interval"]) if gap["interval"] else "one seed",
                     f"{ratio['value']:.4f}", "{:.4f} to {:.4f}".format(*ratio["spread"])])
    print_rows(rows)


def draw_band(axis, curves, color, label):
    """Mean, least and most of [(x, values)], at the x of the first. Returns the limits of the values after their start."""
    x = curves[0][0]
    values = np.array([np.interp(x, *curve) for curve in curves])
    axis.fill_between(x, values.min(axis=0), values.max(axis=0), color=color, alpha=0.2, linewidth=0)
    axis.plot(x, values.mean(axis=0), color=color, linewidth=1.5, label=label)
    late = values[:, values.shape[1] // 20:]
    return late.min(), late.max()


def draw(plt, base_name, runs, figures, smooth, until):
    picture, (loss_axis, gap_axis) = plt.subplots(2, 1, figsize=(10, 9), sharex=True, constrained_layout=True)
    loss_ends, gap_ends = [], []
    for index, (recipe, of_recipe) in enumerate(runs.items()):
        color = f"C{index}"
        losses = [smooth_curve(run.tokens, run.loss, smooth) for run in of_recipe.values()]
        loss_ends.append(draw_band(loss_axis, losses, color, recipe))
        if recipe == base_name:
            continue
        gaps = []
        for seed, run in of_recipe.items():
            base = runs[base_name][seed]
            _, of_base, of_run = differences(base, run, "steps")
            gaps.append(smooth_curve(np.intersect1d(base.tokens, run.tokens), of_run - of_base, smooth))
        gap_ends.append(draw_band(gap_axis, gaps, color, f"{recipe}: t = {figures[recipe]['t']['value']:.4f}"))
    limit(loss_axis, *zip(*loss_ends))
    limit(gap_axis, *zip(*gap_ends))
    gap_axis.axhline(0, color="C0", linewidth=1)
    if until is not None:
        gap_axis.axvline(until, color="black", linewidth=1, linestyle=":", label="end of what t is of")
    loss_axis.set_title(f"training loss (nats per token), mean of {smooth} steps and of the seeds, least to most of the seeds")
    gap_axis.set_title(f"loss minus that of {base_name} over the same batches")
    gap_axis.set_xlabel("tokens")
    for each in (loss_axis, gap_axis):
        each.legend()
        each.grid(alpha=0.3)
    return picture


def speedup(text):
    """A type of argument: (recipe, ratio)."""
    recipe, _, ratio = text.partition("=")
    try:
        value = float(ratio)
    except ValueError:
        value = 0.0
    if not recipe or not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected RECIPE=RATIO with a ratio above 0, got {text}")
    return recipe, value


def read_options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="+", help="RECIPE.SEED, a run folder, or RECIPE.SEED=FOLDER; the first is of the base")
    parser.add_argument("--shorter", action="append", default=[], metavar="RUN", help="a shorter run of the base; may be repeated")
    parser.add_argument("--speedup", type=speedup, action="append", default=[], metavar="RECIPE=RATIO",
                        help="raw speed-up over the base; may be repeated (default: of the runs)")
    parser.add_argument("--held-out", action="store_true", help="compare losses on held-out data, too")
    parser.add_argument("--model", metavar="NAME", help="in the names of figures; --json needs it")
    parser.add_argument("--last", type=float, default=0.05, metavar="SHARE", help="share of the steps at the end (default: 0.05)")
    parser.add_argument("--until", type=float, metavar="TOKENS", help="compare training losses up to there (default: to the end)")
    parser.add_argument("--json", action="store_true", help="print JSON lines instead of the table")
    parser.add_argument("--out", metavar="PICTURE", help="its name ends in .png, .svg, .pdf or another format of matplotlib")
    options = parser.parse_args()
    if not 0 < options.last <= 1:
        fail("--last: must be above 0 and at most 1")
    if options.until is not None and not options.until > 0:
        fail("--until: must be above 0")
    if options.json and not options.model:
        fail("--json: the names of figures have the model's; give it with --model")
    options.speedup = dict(options.speedup)
    return options


def slopes_of(base_name, base, options):
    """({name of a figure's end: slope}, what they are of): of training losses, and with --held-out of losses on held-out data."""
    shorter = [pair for of_recipe in read_runs(options.shorter, options.held_out).values() for pair in of_recipe.items()]
    slopes = {"slope": slope_between(base, shorter, lambda run: last_mean(run.loss, options.last)) if shorter else fitted_slope(base)}
    if options.held_out:
        check_targets([run.held_out for _, run in (*base.items(), *shorter)])
        if shorter:
            slopes["slope.held_out"] = slope_between(base, shorter, lambda run: run.held_out.losses["same"])
    source = "complete runs" if shorter else "its own curves"
    if not all(slope > 1e-9 for slope in slopes.values()):  # rounding alone is less
        fail(f"the loss of {base_name} does not fall with more tokens ({source}); train longer runs")
    return slopes, source


def main():
    options = read_options()
    runs = read_runs(options.run, options.held_out)
    base_name, *names = runs
    if not names:
        fail(f"all runs are of {base_name}; give those of another recipe, too")
    for recipe in options.speedup:
        if recipe not in names:
            fail(f"--speedup: {recipe} is none of {', '.join(names)}")
    base, others = runs[base_name], {name: runs[name] for name in names}
    check_pairs(base, others)
    if options.held_out:
        check_targets([run.held_out for of_recipe in runs.values() for run in of_recipe.values()])
    slopes, source = slopes_of(base_name, base, options)
    figures = {name: recipe_figures(options.model, name, base, runs[name], slopes["slope"], options) for name in names}
    held_out_slope = slopes.get("slope.held_out", slopes["slope"])
    held_out = held_out_figures(options.model, base, others, held_out_slope) if options.held_out else {}
    if options.json:
        for name, slope in slopes.items():
            print(json.dumps({"name": f"equal_loss.{options.model}.{base_name}.{name}", "value": slope, "unit": "nats/token", "of": source}))
        for of_recipe in (*figures.values(), *held_out.values()):
            for each in of_recipe.values():
                print(json.dumps(each))
    else:
        if options.until is not None:
            print(f"training losses up to {options.until:,.0f} tokens; the slope is that of whole runs")
        print_table(base_name, slopes["slope"], source, figures)
        if held_out:
            print_held_out(base_name, held_out_slope, "held-out losses" if "slope.held_out" in slopes else "training losses", held_out)
    if options.out:
        smooth = max(25, min(len(run.loss) for run in base.values()) // 20)
        save_picture(lambda plt: draw(plt, base_name, runs, figures, smooth, options.until), options.out)


if __name__ == "__main__":
    run_main(main)
