"""Runs of a tiny model on token files of any kind. Importing this exits with 77 (skipped) without numpy."""
import json
import os
import shutil
import sys

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

from parka_runs import RunFolder, metrics, parka
from refusals import assert_ended_well, assert_refused, assert_refused_or_told, shown

SEQUENCE, BATCH, STEPS = 32, 2, 2


def random_ids(count, vocab, dtype="<u2", seed=0):
    return np.random.default_rng(seed).integers(1, vocab, count).astype(dtype)


class TokenRuns(RunFolder):
    def write(self, name, content):
        """Of bytes, or of a numpy array as tofile() writes it."""
        path = self.path(name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content if isinstance(content, bytes) else content.tobytes())
        return path

    def config(self, files, vocab, **data):
        return {"device": {"kind": "cpu"}, "model": {"vocab_size": vocab, "d_model": 16, "num_layers": 1, "num_heads": 2, "d_ffn": 16},
                "precision": {"recipe": "fp32"}, "data": {"train": files, "sequence_length": SEQUENCE, **data},
                "optimizer": {"schedule": {"warmup_steps": 0}},
                "training": {"steps": STEPS, "global_batch_size": BATCH, "micro_batch_size": BATCH},
                "checkpoint": {"folder": self.path("run"), "save_final": False}}

    def train(self, config, *arguments, **options):
        if config["data"].get("eval") or "evaluation" in config:
            config = {**config, "training": {**config["training"], "eval_interval": STEPS}}
        return super().train(config, *arguments, **options)

    def forget_run(self):
        shutil.rmtree(self.path("run"), ignore_errors=True)

    def targets_of_first_step(self, config):
        """Of a run that ends well."""
        self.forget_run()
        result = self.train(config)
        assert_ended_well(self, result)
        records = metrics(self.path("run"))
        self.assertEqual(len(records), config["training"]["steps"], shown(result))
        return records[0]["targets"]

    def data_of(self, *arguments):
        """What `parka data --json` says of each file, which must be sound."""
        result = parka("data", *arguments, "--json")
        assert_ended_well(self, result)
        return [json.loads(line) for line in result.stdout.splitlines()]

    def assert_not_trained(self, result, *words):
        """Refused before a step was made."""
        line = assert_refused(self, result, *words)
        self.assertFalse(os.path.exists(self.path("run/metrics.jsonl")), "a step was made before" + shown(result))
        return line

    def assert_not_trained_or_told(self, result, *words):
        if result.returncode != 0:
            self.assertFalse(os.path.exists(self.path("run/metrics.jsonl")), "a step was made before" + shown(result))
        assert_refused_or_told(self, result, *words)
