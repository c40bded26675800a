"""What other programs, other runs and the user do to a run folder, before a run and while it trains."""
import json
import os
import shutil
import subprocess
import time
import unittest

from parka_runs import PROGRAM, RunFolder, checkpoints, learning_curve, metrics, tiny_config, tree_digest

BAD_INPUT, IO_FAILED = 2, 4
ENDLESS = 1000000


class RunFolders(RunFolder):
    def start(self, config, name="first.json", **options):
        """A run in the background."""
        process = subprocess.Popen([PROGRAM, "--threads", "1", "train", self.write_config(config, name)],
                                   stderr=subprocess.PIPE, text=True, **options)
        self.addCleanup(process.communicate)
        self.addCleanup(process.kill)
        return process

    def wait_for(self, condition, process):
        deadline = time.monotonic() + 120
        while not condition():
            self.assertIsNone(process.poll(), "the run has ended")
            self.assertLess(time.monotonic(), deadline)
            time.sleep(0.01)

    def endless_config(self, interval=1000):
        config = tiny_config(self.folder, "fp32", steps=ENDLESS)
        config["training"]["eval_interval"] = 0
        config["checkpoint"].update(interval=interval, keep=2)
        config["optimizer"]["schedule"] = {"kind": "constant"}
        return config

    def has_checkpoint(self):
        return os.path.isdir(self.path("run")) and len(checkpoints(self.path("run"))) > 0


class InMidRun(RunFolders):
    def test_a_run_whose_folder_was_moved_leaves_the_next_run_there_alone(self):
        first = self.start(self.endless_config(interval=50))
        self.wait_for(self.has_checkpoint, first)
        first.send_signal(19)  # SIGSTOP, so that it meets with the other run's files
        os.rename(self.path("run"), self.path("moved"))
        config = tiny_config(self.folder, "fp32", steps=8)
        config["training"]["seed"] = 7
        self.assert_exit(self.train(config), 0)
        before = tree_digest(self.path("run"))
        first.send_signal(18)
        _, log = first.communicate(timeout=120)
        self.assertEqual(first.returncode, IO_FAILED, log)
        self.assertIn(f"parka: {self.path('run')}: is not the folder any more in which this run began", log)
        self.assertEqual(tree_digest(self.path("run")), before)
        again = self.train(config)
        self.assert_exit(again, 0)
        self.assertIn("nothing to do: the run is at step 8 of 8", again.stderr)
        # And the first run goes on from where it was, in its folder's new name.
        config = self.endless_config()
        config["checkpoint"]["folder"] = self.path("moved")
        config["training"]["steps"] = len(metrics(self.path("moved"))) + 5
        self.assert_exit(self.train(config), 0)

    def test_a_folder_that_was_removed_is_not_made_again(self):
        for remains in ([], ["lock"]):
            with self.subTest(remains):
                run = self.start(self.endless_config(interval=20))
                self.wait_for(self.has_checkpoint, run)
                if remains:
                    os.remove(self.path("run/lock"))
                else:
                    os.rename(self.path("run"), self.path("elsewhere"))
                _, log = run.communicate(timeout=120)
                self.assertEqual(run.returncode, IO_FAILED, log)
                self.assertIn("is not the folder any more", log)
                self.assertEqual(os.path.exists(self.path("run")), bool(remains))
                shutil.rmtree(self.path("run"), ignore_errors=True)

    def test_metrics_that_were_rotated_go_on_in_a_new_file(self):
        run = self.start(self.endless_config())
        path = self.path("run/metrics.jsonl")
        self.wait_for(lambda: os.path.exists(path) and os.path.getsize(path) > 3000, run)
        os.rename(path, path + ".old")
        self.wait_for(lambda: os.path.exists(path) and os.path.getsize(path) > 3000, run)
        run.terminate()
        _, log = run.communicate(timeout=120)
        self.assertEqual(run.returncode, 0, log)
        self.assertEqual(log.count("was removed, moved or replaced"), 1, log)
        with open(path + ".old", encoding="utf-8") as old, open(path, encoding="utf-8") as new:
            steps = [json.loads(line)["step"] for line in [*old, *new]]
        self.assertEqual(steps, list(range(1, len(steps) + 1)))


if __name__ == "__main__":
    unittest.main()
