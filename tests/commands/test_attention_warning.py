#!/usr/bin/env python3
"""The warning of attention whose score gradients do not add up to zero (docs/telemetry.md) is silent in sound runs."""
import unittest

from parka_runs import RunFolder, metrics, tiny_config


class AttentionWarning(RunFolder):
    def test_runs_are_silent_by_default(self):
        for recipe in ("fp32", "bf16", "fp8_linear", "coat", "parka"):
            with self.subTest(recipe):
                config = tiny_config(self.folder, recipe, 12)
                config["telemetry"] = {"interval": 1}
                config["checkpoint"]["folder"] = self.path(recipe)
                result = self.train(config)
                self.assert_exit(result, 0)
                self.assertEqual(metrics(self.path(recipe), "warning"), [])
                self.assertNotIn("do not add up", result.stderr + result.stdout)


if __name__ == "__main__":
    unittest.main()
