"""Prometheus: a text file for the node exporter's textfile collector, whose names end in .prom. It is replaced as a whole."""
import math

from python_packages import missing
from run_metrics import fail, median
from run_records import model_scalars

from .scalars import WallTime, as_double

# Metric, key of the train record, help.
OF_STEP = (
    ("step", "step", "Training steps that are done."),
    ("tokens", "tokens", "Tokens that the run has been trained on."),
    ("loss", "loss", "Training loss of the last step in nats per token; NaN where it was not finite."),
    ("grad_norm", "grad_norm", "Gradient norm before clipping."),
    ("learning_rate", "lr", "Learning rate."),
    ("tokens_per_second", "tokens_per_second", "Speed of the last step, of all GPUs together."),
    ("wall_tokens_per_second", "wall_tokens_per_second", "Speed by the wall clock, with all that is between two steps."),
    ("model_tflops", "model_tflops", "Useful TFLOP/s of all GPUs together."),
    ("goodput_ratio", "goodput", "Share of the run's time, all starts together, that went into steps."),
    ("data_wait_seconds", "data_wait_seconds", "How long the last step waited for data."),
    ("save_wait_seconds", "save_wait_seconds", "How long training waited for saves since the step before."),
)
FACTS = ("host", "device", "ranks", "version", "commit")


class Prometheus:
    def __init__(self, path, name):
        try:
            import prometheus_client
        except ImportError:
            fail(f"--prometheus: {missing('prometheus-client')}")
        self.path, self.name, self.client = path, name, prometheus_client

    def begin(self):
        self.clock, self.time, self.started, self.starts, self.skipped = WallTime(), 0.0, None, 0, 0
        self.facts, self.step = {}, {}
        self.held_out, self.sets, self.tasks, self.errors, self.warnings = {}, {}, {}, {}, {}

    def add(self, records):
        for record in records:
            self.time = self.clock.of(record)
            kind = record.get("kind")
            if kind == "start":
                self.facts, self.started, self.starts = record, self.time, self.starts + 1
                self.warnings = dict.fromkeys(self.warnings, 0)  # a start begins without, and raises again what still holds
            elif kind == "train":
                self.step = record
                self.skipped += record.get("applied") is False
            elif kind == "eval":
                self.held_out = {(): record["loss"]}
            elif kind == "eval_set":
                self.sets[("set", record["set"]),] = record["loss"]
            elif kind == "task":
                self.tasks[("task", record["task"]), ("metric", record["metric"])] = record["score"]
            elif kind == "quantization":
                self.errors = {(("tensor", tensor),): median(statistics["error"])
                               for tensor, statistics in record["tensors"].items()}

            elif kind == "warning":
                self.warnings[("about", record["about"]),] = int(record["raised"])

    def families(self):
        """(metric, help, {labels: value})"""
        yield "info", "What runs where.", {tuple((key, self.facts[key]) for key in FACTS if key in self.facts): 1}
        if self.started is not None:
            yield "start_time_seconds", "When the run was started last, since 1970.", {(): self.started}
        yield "starts", "How often the run was started.", {(): self.starts}
        yield "last_record_time_seconds", "When the run wrote a record last, since 1970.", {(): self.time}
        yield "skipped_steps", "Steps that were not applied.", {(): self.skipped}
        for metric, key, text in OF_STEP:
            if key in self.step:
                yield metric, text, {(): self.step[key]}
        yield "scalar", "What a layer of the model reports of the last step.", {(("name", key),): value for key, value in model_scalars(self.step).items()}
        yield "held_out_loss", "Loss on data.eval in nats per token.", self.held_out
        yield "eval_set_loss", "Loss on an evaluation set in nats per token.", self.sets
        yield "task_score", "Score of a task.", self.tasks
        yield "quantization_error", "Relative error of a kind of FP8 tensor, median of the blocks.", self.errors
        yield "warning", "Whether a warning is raised.", self.warnings

    def collect(self):
        """What prometheus_client asks a registry for."""
        for metric, text, samples in self.families():
            family = self.client.metrics_core.GaugeMetricFamily(f"parka_{metric}", text)
            for labels, value in samples.items():
                family.add_sample(family.name, {"run": self.name} | {key: str(label) for key, label in labels}, math.nan if value is None else as_double(value))
            if samples:
                yield family

    def flush(self):
        self.client.write_to_textfile(self.path, self)

    def close(self):
        pass
