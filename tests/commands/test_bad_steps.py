"""Steps whose loss or gradients are not finite: what ends the run, what is saved then, and how it goes on."""
import os
import re
import shutil
import unittest

from parka_runs import RunFolder, checkpoints, faulty_files, learning_curve, metrics, tiny_config, tree_digest, write_tokens

NOT_FINITE = 3
IO_FAILED = 4
DIVERGES = 1e30  # a learning rate that makes weights whose next step overflows


class BadSteps(RunFolder):
    def setUp(self):
        super().setUp()
        self.run_folder = self.path("run")
        self.config = tiny_config(self.folder, "bf16")
        self.config["model"].update(norm="rmsnorm", tie_embeddings=False)
        self.config["training"]["eval_interval"] = 0
        self.config["checkpoint"].update(interval=0, keep=1)
        self.config["optimizer"]["schedule"] = {"kind": "constant"}

    def good_steps(self, *arguments):
        """Three of them, of a run that then diverges in step 4 and ends in step 5."""
        self.config["training"]["steps"] = 3
        self.assert_exit(self.train(self.config, *arguments), 0)
        self.config["training"]["steps"] = 8
        self.config["optimizer"]["lr"] = DIVERGES

    def assert_ended(self, result, *words):
        self.assert_exit(result, NOT_FINITE)
        for word in words:
            self.assertRegex(result.stderr.splitlines()[-1], word)

    def test_the_state_before_the_step_is_saved_and_older_checkpoints_stay(self):
        for ranks in ((), ("--ranks", "2")):
            with self.subTest(ranks=ranks):
                self.config["optimizer"]["lr"] = 3e-3
                self.config["checkpoint"]["folder"] = self.run_folder = self.path(f"run{len(ranks)}")
                self.good_steps(*ranks)
                result = self.train(self.config, *ranks)
                self.assert_ended(result, "step 5: loss .* not both finite", "weights were not changed; step 4 is saved; set training.non_finite")
                self.assertEqual(checkpoints(self.run_folder), ["step_00000003", "step_00000004"])
                self.assertEqual([record["step"] for record in metrics(self.run_folder) if not record["applied"]], [5])
                before = tree_digest(self.run_folder, only=lambda path: path.startswith("step_"))
                self.assert_ended(self.train(self.config, *ranks), "step 5: loss", "step 4 is saved")
                self.assertEqual(tree_digest(self.run_folder, only=lambda path: path.startswith("step_")), before)

                shutil.rmtree(os.path.join(self.run_folder, "step_00000004"))
                self.config["optimizer"]["lr"] = 3e-3
                self.assert_exit(self.train(self.config, *ranks), 0)
                self.assertEqual(checkpoints(self.run_folder), ["step_00000008"])  # checkpoint.keep counts again
                whole = dict(self.config, checkpoint=dict(self.config["checkpoint"], folder=self.path(f"whole{len(ranks)}")))
                self.assert_exit(self.train(whole, *ranks), 0)
                self.assertEqual(learning_curve(self.run_folder), learning_curve(whole["checkpoint"]["folder"]))

    def test_the_last_of_too_many_skipped_steps_is_saved(self):
        self.good_steps()
        self.config["training"].update(non_finite="skip", steps=30)
        result = self.train(self.config)
        self.assert_ended(result, "step 14: loss", "10 steps in a row were skipped; step 14 is saved$")
        self.assertEqual(len(re.findall("; skipped$", result.stderr, re.MULTILINE)), 9)
        self.assertEqual(checkpoints(self.run_folder), ["step_00000003", "step_00000014"])
        self.assert_ended(self.train(self.config), "step 15: loss", "11 steps in a row were skipped; step 15 is saved$")
        self.assertEqual([record["step"] for record in metrics(self.run_folder)], list(range(1, 16)))

    def test_skipped_steps_of_earlier_starts_count(self):
        self.good_steps()
        self.config["training"].update(non_finite="skip")
        for steps in (5, 7):
            self.config["training"]["steps"] = steps
            self.assert_exit(self.train(self.config), 0)
        self.assertEqual(checkpoints(self.run_folder), [f"step_{step:08}" for step in (3, 5, 7)])
        self.config["training"]["steps"] = 20
        self.assert_ended(self.train(self.config), "step 14: loss", "10 steps in a row were skipped; step 14 is saved$")

    def test_a_step_that_is_taken_back_does_not_count_as_skipped(self):
        self.good_steps()
        self.assert_ended(self.train(self.config), "step 5: loss", "step 4 is saved")
        self.config["training"].update(non_finite="skip", steps=20)
        self.assert_ended(self.train(self.config), "step 14: loss", "10 steps in a row were skipped")

    def test_saves_between_skipped_steps_remove_no_older_checkpoint(self):
        self.good_steps()
        self.config["training"].update(non_finite="skip", steps=20)
        self.config["checkpoint"]["interval"] = 3
        self.assert_ended(self.train(self.config), "step 14: loss", "step 14 is saved")
        self.assertEqual(checkpoints(self.run_folder), [f"step_{step:08}" for step in (3, 6, 9, 12, 14)])

    def test_weights_that_were_never_updated_are_not_saved(self):
        self.config["model"].update(init="normal", init_std=1e18)
        self.config["training"].update(non_finite="skip", steps=20)
        self.config["checkpoint"]["interval"] = 1
        self.assert_ended(self.train(self.config), "step 10: loss", "10 steps in a row were skipped$")
        self.assertEqual(checkpoints(self.run_folder), [])

    def test_a_start_that_trains_nothing_leaves_the_checkpoints_alone(self):
        self.good_steps()
        self.assert_ended(self.train(self.config), "step 4 is saved")
        self.config["optimizer"]["lr"] = 3e-3
        self.config["training"]["eval_interval"] = 4
        write_tokens(self.path("bad.npy"), 100, seed=1, vocab=9999)
        self.config["data"]["eval"] = [self.path("bad.npy")]
        before = tree_digest(self.run_folder, only=lambda path: path.startswith("step_"))
        result = self.train(self.config)
        self.assert_exit(result, 2)
        self.assertNotIn("step 4 is saved", result.stderr)
        self.assertEqual(tree_digest(self.run_folder, only=lambda path: path.startswith("step_")), before)

    def test_a_last_evaluation_that_is_not_finite_is_made_again(self):
        self.good_steps()
        self.config["training"].update(steps=4, eval_interval=4)
        for learning_rate in (DIVERGES, 3e-3):
            self.config["optimizer"]["lr"] = learning_rate
            self.assert_ended(self.train(self.config), "data.eval: the loss is not finite")
        self.assertEqual(len(metrics(self.run_folder, "eval")), 1)

    def test_a_save_replaces_no_older_one_before_its_evaluation_is_finite(self):
        for arguments in ((), ("--ranks", "2"), ("--set", "checkpoint.async=false")):
            with self.subTest(arguments=arguments):
                self.config["optimizer"]["lr"] = 3e-3
                self.config["training"]["eval_interval"] = 0
                self.config["checkpoint"].update(interval=0, folder=self.path("_".join(["kept", *arguments])))
                self.good_steps(*arguments)
                self.config["training"].update(steps=4, eval_interval=2)
                self.config["checkpoint"]["interval"] = 2
                self.assert_ended(self.train(self.config, *arguments), "data.eval: the loss is not finite")
                folder = self.config["checkpoint"]["folder"]
                self.assertEqual(checkpoints(folder), ["step_00000003", "step_00000004"])
                shutil.rmtree(os.path.join(folder, "step_00000004"))
                self.config["optimizer"]["lr"] = 3e-3
                self.assert_exit(self.train(self.config, *arguments), 0)
                self.assertEqual(checkpoints(folder), ["step_00000004"])  # the finite evaluation has removed the other
                self.config["training"]["steps"] = 9
                self.assert_exit(self.train(self.config, *arguments), 0)
                self.assertEqual(checkpoints(folder), ["step_00000009"])

    def test_a_save_replaces_no_older_one_before_the_next_step_is_finite(self):
        for arguments in ((), ("--ranks", "2"), ("--set", "checkpoint.async=false")):
            with self.subTest(arguments=arguments):
                self.config["optimizer"]["lr"] = 3e-3
                self.config["checkpoint"].update(interval=0, folder=self.path("_".join(["next", *arguments])))
                self.good_steps(*arguments)
                self.config["checkpoint"]["interval"] = 4
                for _ in range(2):
                    self.assert_ended(self.train(self.config, *arguments), "step 5: loss", "step 4 is saved")
                    folder = self.config["checkpoint"]["folder"]
                    self.assertEqual(checkpoints(folder), ["step_00000003", "step_00000004"])
                shutil.rmtree(os.path.join(folder, "step_00000004"))
                self.config["optimizer"]["lr"] = 3e-3
                self.config["training"]["steps"] = 9
                self.config["checkpoint"]["save_final"] = False
                self.assert_exit(self.train(self.config, *arguments), 0)
                self.assertEqual(checkpoints(folder), ["step_00000008"])
                self.config["checkpoint"]["save_final"] = True

    def test_a_last_save_that_is_tried_again_keeps_no_older_ones_after_its_evaluation(self):
        self.good_steps()
        self.config["optimizer"]["lr"] = 3e-3
        self.config["training"].update(steps=4, eval_interval=4)
        result = self.train(self.config, env=faulty_files("fsync:*step_00000004*shard*:EIO:1:1"))
        self.assert_exit(result, 0)
        self.assertIn("trying once more", result.stderr)
        self.assertEqual(checkpoints(self.run_folder), ["step_00000004"])

    def test_what_a_stop_has_kept_is_removed_before_the_next_save(self):
        self.good_steps()
        self.config["optimizer"]["lr"] = 3e-3
        self.config["training"]["steps"] = 20
        self.config["checkpoint"]["interval"] = 4
        # A record of metrics is written in order with the steps; the token files are also read by other threads.
        self.assert_exit(self.train(self.config, env=faulty_files("write:*/metrics.jsonl:ENOSPC:4:1")), IO_FAILED)
        of_interval, of_stop = checkpoints(self.run_folder)
        self.assertEqual((of_interval, of_stop), ("step_00000004", "step_00000006"))
        # There is room for checkpoint.keep + 1 of them.
        # It is tried again after whatever step sees that it failed.
        full = faulty_files(*(f"open:*step_000000{later}*:ENOSPC:1:1000" for later in ("0[89]", "1", "2")))
        self.assert_exit(self.train(self.config, env=full), IO_FAILED)
        self.assertEqual(checkpoints(self.run_folder), [of_stop])

    def test_a_last_evaluation_that_was_cut_off_removes_older_checkpoints_when_it_is_made(self):
        self.good_steps()
        self.config["optimizer"]["lr"] = 3e-3
        self.config["training"].update(steps=4, eval_interval=4)
        self.assert_exit(self.train(self.config, env=faulty_files("read:*/held_out.npy:EIO:21:1000")), IO_FAILED)
        self.assertEqual(checkpoints(self.run_folder), ["step_00000003", "step_00000004"])
        self.assert_exit(self.train(self.config), 0)
        self.assertEqual(len(metrics(self.run_folder, "eval")), 1)
        self.assertEqual(checkpoints(self.run_folder), ["step_00000004"])

    def test_the_command_of_the_save_ends_first_where_an_evaluation_is_not_finite(self):
        self.config["checkpoint"]["on_saved"] = f"sleep 0.5; basename {{path}} >> {self.path('copied')}"
        self.good_steps()
        self.config["training"].update(steps=4, eval_interval=4)
        # The evaluation is over before the save is.
        slow_disk = faulty_files(slow_glob="*step_00000004*", bytes_per_second=100_000)
        result = self.train(self.config, env=slow_disk)
        self.assert_ended(result, "data.eval: the loss is not finite")
        self.assertIn("waiting for the command of checkpoint.on_saved", result.stderr)
        with open(self.path("copied"), encoding="utf-8") as file:
            self.assertEqual(file.read().split(), ["step_00000003", "step_00000004"])

    def test_the_command_of_the_save_ends_first(self):
        self.config["checkpoint"]["on_saved"] = f"sleep 0.5; basename {{path}} >> {self.path('copied')}"
        for ranks in ((), ("--ranks", "2")):
            with self.subTest(ranks=ranks):
                self.config["optimizer"]["lr"] = 3e-3
                self.config["checkpoint"]["folder"] = self.run_folder = self.path(f"hook{len(ranks)}")
                self.good_steps(*ranks)
                self.assert_ended(self.train(self.config, *ranks), "step 4 is saved")
                with open(self.path("copied"), encoding="utf-8") as file:
                    self.assertEqual(file.read().split(), ["step_00000003", "step_00000004"])
                os.remove(self.path("copied"))

    def test_a_first_step_leaves_nothing_to_save(self):
        self.config["model"].update(init="normal", init_std=1e18)  # whose scores of attention overflow
        result = self.train(self.config)
        self.assert_ended(result, "step 1: loss", "weights were not changed; set training.non_finite")
        self.assertEqual(checkpoints(self.run_folder), [])

    def test_a_state_that_cannot_be_saved_ends_the_run_for_the_same_reason(self):
        self.good_steps()
        result = self.train(self.config, env=faulty_files("open:*step_00000004*:ENOSPC:1:1000"))
        self.assert_ended(result, "step 5: loss", "weights were not changed; set training.non_finite")
        self.assertIn("No space left on device", result.stderr)
        self.assertEqual(checkpoints(self.run_folder), ["step_00000003"])


if __name__ == "__main__":
    unittest.main(verbosity=2)
