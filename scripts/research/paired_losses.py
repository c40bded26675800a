"""What the scripts that compare recipes over several seeds share: runs named RECIPE.SEED, and their losses on held-out data."""
import json
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import fail, metrics_path, named_runs, read_records  # noqa: E402

EVALUATIONS = ("same", "bf16")


def runs_by_seed(arguments):
    """{recipe: {seed: (name, run)}} of runs that named_runs() names RECIPE.SEED, in the order in which recipes are named."""
    runs = {}
    for name, run in named_runs(arguments):
        recipe, dot, seed = name.rpartition(".")
        if not dot or not recipe or not seed:
            fail(f"{name}: not the name of a run with a seed; name it RECIPE.SEED=FOLDER")
        runs.setdefault(recipe, {})[seed] = (name, run)
    return runs


def is_evaluation(result):
    """Whether it is what `parka eval --json` prints of held-out data."""
    if not isinstance(result, dict) or type(result.get("loss")) not in (int, float) or not math.isfinite(result["loss"]):
        return False
    return all(type(result.get(key)) is int and result[key] > 0 for key in ("step", "num_targets"))


class HeldOut:
    """A run's losses on held-out data, by the numerics they were found in, and of how many targets, at which step, they are:
    of held_out.json in its folder, or without one of the last evaluation in its metrics, which is in the numerics of training.
    `path` is the file they are from."""

    def __init__(self, run):
        metrics = metrics_path(run)
        self.path = os.path.join(os.path.dirname(metrics), "held_out.json")
        if os.path.exists(self.path):
            results = self.read_file()
        else:
            self.path = metrics
            results = {"same": next((record for record in reversed(read_records(metrics)) if record.get("kind") == "eval"), None)}
            if not is_evaluation(results["same"]):
                fail(f"{metrics}: its last evaluation has no loss on held-out data; evaluate the run: what `parka eval RUN --json` prints goes "
                     "into held_out.json beside it as \"same\", and with --set precision.eval=bf16 as \"bf16\"")
        self.losses = {name: result["loss"] for name, result in results.items()}
        self.step, self.targets = results["same"]["step"], results["same"]["num_targets"]

    def read_file(self):
        """Its results in the first of EVALUATIONS, or in all, at one step and of as many targets."""
        try:
            with open(self.path, encoding="utf-8", errors="replace") as file:
                results = json.load(file)
        except OSError as error:
            fail(f"{self.path}: {error.strerror}")
        except ValueError:
            results = None
        known = {name: results[name] for name in EVALUATIONS if name in results} if isinstance(results, dict) else {}
        if "same" not in known or not all(map(is_evaluation, known.values())):
            fail(f"{self.path}: not losses on held-out data; delete it and evaluate the run again")
        extents = dict.fromkeys(f"{result['num_targets']:,} targets at step {result['step']:,}" for result in known.values())
        if len(extents) > 1:
            fail(f"{self.path}: is of {' and of '.join(extents)}; delete it and evaluate the run again")
        return known


def check_targets(evaluated):
    """Of HeldOut: all are over as many targets."""
    first = evaluated[0]
    for each in evaluated:
        if each.targets != first.targets:
            fail(f"{each.path}: is of {each.targets:,} targets, {first.path} of {first.targets:,}; evaluate the runs on the same data")
