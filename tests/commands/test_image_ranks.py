"""Training on images on several ranks: as one rank does, resumed to the same bits. On CPUs, or as test_image_ranks.py cuda on GPUs,
of which two do, and four show all; exits with 77 (skipped) without mpirun, with fewer, or where a package of
scripts/prepare_images.py is missing."""
import subprocess
import sys
import unittest

from image_runs import STEPS, ImageRuns
from parka_runs import num_gpus, run_rank_tests

DEVICE, RANKS_OPTION = "cpu", "--ranks"


class ImagesOfRanks(ImageRuns):
    def setUp(self):
        self.device, self.ranks_option = DEVICE, RANKS_OPTION
        super().setUp()

    def fit(self, cases):
        """Those that the machine has the GPUs for; the first of a case is its number of ranks."""
        return [case for case in cases if DEVICE == "cpu" or case[0] <= num_gpus()]

    def test_resumed_runs_of_several_ranks_end_with_the_same_bits(self):
        # Every number of ranks at every stage of ZeRO, and in turns what stages of training freeze.
        frozen = [[], ["vision.*"], ["vision.*", "embedding", "blocks.*", "head"]]
        cases = [(ranks, stage, "parka", "fp8") for ranks in (1, 2, 4) for stage in range(4)]
        cases += [(1, 0, "bf16", "compute"), (2, 3, "coat", "compute"), (4, 2, "bf16", "compute")]
        for number, (ranks, stage, recipe, tower) in enumerate(self.fit(cases)):
            with self.subTest(ranks=ranks, stage=stage, recipe=recipe, tower=tower):
                names = [f"{number}-{kind}" for kind in ("straight", "resumed")]
                for name, stops in zip(names, ((STEPS,), (4, STEPS)), strict=True):
                    for steps in stops:
                        config = self.config(name, recipe, steps, tower, frozen=frozen[number % len(frozen)])
                        config["model"]["tie_embeddings"] = False
                        config["distributed"] = {"zero_stage": stage}
                        log = self.run_to_the_end(config, ranks)
                self.assertIn("resuming from", log)
                self.assertEqual(*(self.losses(name) for name in names))
                self.assertEqual(*(self.final_files(name) for name in names))

    def test_an_fp8_tower_on_several_ranks_is_that_of_one(self):
        self.run_to_the_end(self.config("one", "parka", tower="fp8"))
        for ranks, stage in self.fit(((2, 1), (2, 3), (4, 3))):
            with self.subTest(ranks=ranks, stage=stage):
                config = self.config(f"{ranks}-{stage}", "parka", tower="fp8")
                config["distributed"] = {"zero_stage": stage}
                self.run_to_the_end(config, ranks)
                for got, want in zip(self.losses(f"{ranks}-{stage}"), self.losses("one"), strict=True):
                    self.assertLess(abs(got - want), 2e-2)  # as test_ranks.py has it for FP8 recipes

    def test_several_ranks_train_as_one(self):
        for tied in (True, False):
            config = self.config("one", "fp32")
            config["model"]["tie_embeddings"] = tied
            self.run_to_the_end(config)
            for ranks, stage in self.fit(((2, 0), (2, 1), (2, 2), (4, 3))):
                with self.subTest(ranks=ranks, stage=stage, tied=tied):
                    config["checkpoint"]["folder"] = self.path(f"{ranks}-{stage}-{tied}")
                    config["distributed"] = {"zero_stage": stage}
                    self.run_to_the_end(config, ranks)
                    for got, want in zip(self.losses(f"{ranks}-{stage}-{tied}"), self.losses("one"), strict=True):
                        self.assertLess(abs(got - want), 1e-5)
            subprocess.run(["rm", "-r", self.path("one")], check=True)


if __name__ == "__main__":
    run_rank_tests(sys.modules[__name__])
