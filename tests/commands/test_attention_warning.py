#!/usr/bin/env python3
"""The warning of attention whose score gradients do not add up to zero (docs/telemetry.md): raised early where the attention
output is FP8, silent in all other runs."""
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

    def test_an_attention_output_in_fp8_is_told_of_once_at_the_third_report(self):
        said, (record,) = self.trained("fp8", "parka", precision={"attention_output": "fp8"})
        self.assertEqual((record["step"], record["about"], record["raised"], record["limit"]), (3, "attention", True, 0.01))
        self.assertIn(record["block"], (0, 1))
        self.assertTrue(0.015 < record["imbalance"] < 0.05)
        self.assertEqual(said.count("do not add up to zero"), 1)
        self.assertIn("step 3: the gradients of attention's scores do not add up to zero", said)

    def test_other_runs_are_silent(self):
        for recipe in ("fp32", "bf16", "fp8_linear", "coat", "parka"):
            with self.subTest(recipe):
                said, records = self.trained(recipe, recipe, steps=12)
                self.assertEqual(records, [])
                self.assertNotIn("do not add up", said)

    def test_with_a_norm_of_queries_and_keys_the_limit_is_ten_times_as_high(self):
        for kind in ("per_head", "full"):
            with self.subTest(kind):
                said, records = self.trained(kind, "parka", precision={"attention_output": "fp8"}, model={"qk_norm": kind})
                self.assertEqual(records, [])
                self.assertNotIn("do not add up", said)
        _, (record,) = self.trained("low", "parka", precision={"attention_output": "fp8"}, model={"qk_norm": "full"}, imbalance_limit=0.001)
        self.assertEqual((record["step"], record["limit"]), (3, 0.01))

    def test_a_limit_of_0_turns_it_off(self):
        said, records = self.trained("off", "parka", precision={"attention_output": "fp8"}, imbalance_limit=0)
        self.assertEqual(records, [])
        self.assertNotIn("do not add up", said)


if __name__ == "__main__":
    unittest.main()
