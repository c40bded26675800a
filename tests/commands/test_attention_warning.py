#!/usr/bin/env python3
"""The warning of attention whose score gradients do not add up to zero (docs/telemetry.md): raised early where they do not,
silent in sound runs."""
import unittest

from parka_runs import RunFolder, metrics, tiny_config


class AttentionWarning(RunFolder):
    def trained(self, name, recipe, steps=6, **keys):
        config = tiny_config(self.folder, recipe, steps)
        for section in ("precision", "model"):
            config[section] |= keys.pop(section, {})
        config["telemetry"] = {"interval": 1} | keys
        config["checkpoint"]["folder"] = self.path(name)
        result = self.train(config)
        self.assert_exit(result, 0)
        return result.stderr + result.stdout, metrics(self.path(name), "warning")

    def test_an_imbalance_above_the_limit_is_told_of_once_at_the_third_report(self):
        said, (record,) = self.trained("low", "parka", imbalance_limit=1e-4)
        self.assertEqual((record["step"], record["about"], record["raised"], record["limit"]), (3, "attention", True, 1e-4))
        self.assertIn(record["block"], (0, 1))
        self.assertTrue(1e-4 < record["imbalance"] < 0.004)
        self.assertEqual(said.count("do not add up to zero"), 1)

    def test_runs_are_silent_by_default(self):
        for recipe in ("fp32", "bf16", "fp8_linear", "coat", "parka"):
            with self.subTest(recipe):
                said, records = self.trained(recipe, recipe, steps=12)
                self.assertEqual(records, [])
                self.assertNotIn("do not add up", said)

    def test_with_a_norm_of_queries_and_keys_the_limit_is_ten_times_as_high(self):
        for kind in ("per_head", "full"):
            with self.subTest(kind):
                _, (record,) = self.trained(kind, "parka", model={"qk_norm": kind}, imbalance_limit=1e-5)
                self.assertEqual((record["step"], record["limit"]), (3, 1e-4))
                said, records = self.trained(f"{kind}_below", "parka", model={"qk_norm": kind}, imbalance_limit=record["imbalance"] / 5)
                self.assertEqual(records, [])
                self.assertNotIn("do not add up", said)

    def test_a_limit_of_0_turns_it_off(self):
        said, records = self.trained("off", "parka", imbalance_limit=0)
        self.assertEqual(records, [])
        self.assertNotIn("do not add up", said)


if __name__ == "__main__":
    unittest.main()
