"""Experiment trackers, whose points cannot be taken back: W&B and MLflow. Their packages are imported when they are asked for.

Each point is sent once, by its tag and step. Steps that a resumed run repeats are not sent again: they have the same values,
unless the run was resumed with another config; then a warning says so. A run that was begun anew in the same folder becomes
another run of the tracker.
"""
import hashlib
import json
import os
import re

from python_packages import missing
from run_metrics import fail, warn

from .scalars import WallTime, as_double, scalars

MOST_METRICS, MOST_PARAMETERS = 1000, 100  # of one request to MLflow


def resolved_config(run):
    try:
        with open(os.path.join(run, "config.json"), encoding="utf-8") as file:
            config = json.load(file)
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def first_line(error):
    """Of what a package says."""
    return (str(error).splitlines() or [type(error).__name__])[0]


class Tracker:
    """What W&B and MLflow have in common. A tracker has start(identity), last_sent(tag), send(step, time, points), end()."""

    title = ""

    def __init__(self, run, name):
        self.run, self.name = run, name
        self.identity = None  # of the tracker's run
        self.clock = WallTime()

    def begin(self):
        self.is_first, self.clock = True, WallTime()

    def add(self, records):
        for record in records:
            time = self.clock.of(record)
            if self.is_first:
                self.is_first = False
                self.change_run(record)
            step = record["step"]
            self.check_loss(record)
            points = [(tag, value) for tag, value in scalars(record) if step > self.sent_until(tag)]
            if points:
                self.send(step, time, points)
                self.sent.update((tag, step) for tag, _ in points)

    def change_run(self, first):
        """The run of the tracker is known by the folder, its name there and when the run began."""
        text = "\n".join((os.path.realpath(self.run), self.name, first.get("time", "")))
        identity = hashlib.sha256(text.encode()).hexdigest()[:16]
        if identity == self.identity:
            return
        if self.identity is not None:
            self.end()
        self.identity, self.sent, self.losses, self.has_warned = identity, {}, {}, False
        try:
            self.start(identity)
        except Exception as error:  # of the package: no account, no network, ...
            fail(f"{self.title}: {first_line(error)}", code=4)

    def sent_until(self, tag):
        if tag not in self.sent:
            self.sent[tag] = self.last_sent(tag)
        return self.sent[tag]

    def check_loss(self, record):
        if record.get("kind") != "train":
            return
        step, loss = record["step"], record.get("loss")
        if self.losses.setdefault(step, loss) != loss and not self.has_warned:
            warn(f"step {step} was repeated with another loss than {self.title} was sent, which keeps the first; to send the run as "
                 "it is now, follow it with another --name")
            self.has_warned = True

    def flush(self):
        pass

    def close(self):
        if self.identity is not None:
            self.end()
            self.identity = None


class WandB(Tracker):
    title = "W&B"

    def __init__(self, run, name, project):
        super().__init__(run, name)
        try:
            import wandb
        except ImportError:
            fail(f"--wandb: {missing('wandb')}")
        self.wandb, self.project = wandb, project

    def start(self, identity):
        self.tracked = self.wandb.init(project=self.project, name=self.name, id=identity, resume="allow",
                                       config=resolved_config(self.run))
        self.before = self.tracked.step - 1  # the last step that an earlier parka follow has sent

    def last_sent(self, tag):
        return self.before

    def send(self, step, time, points):
        self.tracked.log(dict(points), step=step)

    def end(self):
        self.tracked.finish()


def flat(config, prefix=""):
    for key, value in config.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


class MLflow(Tracker):
    """Of the server that MLFLOW_TRACKING_URI names."""

    title = "MLflow"

    def __init__(self, run, name, experiment):
        super().__init__(run, name)
        try:
            import mlflow
        except ImportError:
            fail(f"--mlflow: {missing('mlflow')}")
        self.entities, self.failure = mlflow.entities, mlflow.exceptions.MlflowException
        try:
            self.client, self.experiment = mlflow.MlflowClient(), experiment
        except Exception as error:  # no such kind of server, a database that cannot be opened, ...
            fail(f"MLflow: {first_line(error)}; is MLFLOW_TRACKING_URI right?", code=4)
        self.waiting = []  # metrics

    def start(self, identity):
        found = self.client.get_experiment_by_name(self.experiment)
        experiment = found.experiment_id if found else self.client.create_experiment(self.experiment)
        known = self.client.search_runs([experiment], f"tags.`parka.run` = '{identity}'")
        self.is_known = bool(known)
        self.taken = {}  # key: the last step that an earlier parka follow has sent
        if known:
            self.id = known[0].info.run_id
            self.client.update_run(self.id, status="RUNNING")
            return
        self.id = self.client.create_run(experiment, run_name=self.name, tags={"parka.run": identity}).info.run_id
        parameters = [self.entities.Param(key, value) for key, value in flat(resolved_config(self.run))]
        for i in range(0, len(parameters), MOST_PARAMETERS):
            self.client.log_batch(self.id, params=parameters[i:i + MOST_PARAMETERS])

    @staticmethod
    def key(tag):
        """Other characters are refused."""
        return re.sub(r"[^\w\-./ ]", "_", tag, flags=re.ASCII)

    def last_sent(self, tag):
        return -1  # flush() asks the server, which may be out of reach now

    def is_taken(self, metric):
        if metric.key not in self.taken:
            history = self.client.get_metric_history(self.id, metric.key) if self.is_known else []
            self.taken[metric.key] = max((each.step for each in history), default=-1)
        return metric.step <= self.taken[metric.key]

    def send(self, step, time, points):
        self.waiting += [self.entities.Metric(self.key(tag), as_double(value), round(1000 * time), step) for tag, value in points]
        if len(self.waiting) >= MOST_METRICS:
            self.flush()

    def flush(self):
        """What a server out of reach does not take is sent later."""
        while self.waiting:
            try:
                missing = [metric for metric in self.waiting[:MOST_METRICS] if not self.is_taken(metric)]
                if missing:
                    self.client.log_batch(self.id, metrics=missing)
            except self.failure as error:
                warn(f"MLflow: {first_line(error)}; trying again later")
                return
            del self.waiting[:MOST_METRICS]

    def end(self):
        self.flush()
        if self.waiting:
            fail(f"MLflow: {len(self.waiting)} points were not taken; follow the run again to send them", code=4)
        try:
            self.client.set_terminated(self.id, "FINISHED")
        except Exception as error:
            fail(f"MLflow: {first_line(error)}; all points were taken, but the run is not marked as finished; follow it again to do so",
                 code=4)
