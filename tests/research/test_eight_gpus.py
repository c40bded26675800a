#!/usr/bin/env python3
"""Tests of scripts/research/eight_gpus.py with a made-up program, and of kill_drill.py, which it calls, on CPU ranks. Exits with 77
(skipped) where numpy is missing."""
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import numpy  # noqa: F401
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/commands"))
from parka_runs import PROGRAM  # noqa: E402

SCRIPTS = ROOT / "scripts/research"

# A step takes as many seconds as its sequences on a GPU: 10 % longer on several, 1 % longer with Muon, and twice as long with experts
# divided by 8. Half of it are ops, of which one rank has 4 % more than the others. It fits with stage 3, and with experts divided by 2
# where blocks are computed again.
MADE_UP_PROGRAM = f"""#!{sys.executable}
import json, pathlib, sys
def option(name, otherwise):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else otherwise
sets = dict(sys.argv[i + 1].split("=", 1) for i, word in enumerate(sys.argv) if word == "--set")
ranks, batch, divided_by = int(option("--ranks", 1)), int(sets["training.global_batch_size"]), int(sets.get("distributed.expert_parallel", 1))
if sys.argv[1] == "plan":
    if "--measured" in sys.argv:
        one, several = (json.loads(pathlib.Path(option(name, "")).read_text()) for name in ("--measured", "--compare"))
        assert one["sets"]["model.num_layers"] == "8" and one["ranks"] == 1 and several["ranks"] == int(option("--gpus", 0))
        assert all(one["sets"][key] == several["sets"][key] for key in ("precision.recompute", "training.micro_batch_size"))
        print(json.dumps(dict(step=dict(error=0.015))))
    else:
        fits = sets["precision.recompute"] == "block" if divided_by == 2 else sets["distributed.zero_stage"] == "3"
        print(json.dumps(dict(fits=fits and option("--memory-limit", "") == "139")))
    sys.exit()
assert batch % (ranks * int(sets.get("training.micro_batch_size", 4))) == 0
seconds = batch / ranks * (1.1 if ranks > 1 else 1) * (1.01 if sets.get("optimizer.kind") == "muon" else 1) * (2 if divided_by == 8 else 1)
length = 4096
pathlib.Path(option("--json", "")).write_text(json.dumps(dict(
    device="made up", ranks=ranks, tokens_per_step=batch * length, step_seconds=[seconds, 0.9 * seconds, 1.2 * seconds], sets=sets,
    op_seconds_by_rank=[0.5 * seconds] * (ranks - 1) + [0.52 * seconds], timed_step_seconds=seconds,
    waits=[dict(seconds=0.1 * seconds)], planned_bytes=99e9, context_bytes=1e9, used_bytes=int(1e11 + divided_by * 1e9))))
"""


class EightGpus(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.program = self.folder / "parka"
        self.program.write_text(MADE_UP_PROGRAM)
        self.program.chmod(0o755)

    def script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / "eight_gpus.py", self.folder / "out", "--parka", self.program, "--commit", "abc",
                               *arguments], capture_output=True, text=True, check=False)

    def figures(self, *arguments):
        result = self.script(*arguments)
        self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
        return {figure["name"]: figure for figure in map(json.loads, (self.folder / "out/figures.jsonl").read_text().splitlines())}

    def test_figures_are_those_of_the_runs(self):
        for gpus in (8, 4):
            figures = self.figures("qwen3", "olmoe", "muon", "--gpus", str(gpus))
            values = {name: figure["value"] for name, figure in figures.items()}
            qwen3 = f"moe.qwen3-30b-a3b.parka.{gpus}gpu"
            self.assertEqual(values[f"{qwen3}.tok_s_gpu"], float(f"{4096 / 1.1:.6g}"))
            self.assertEqual(values[f"{qwen3}.peak_gb"], 104)  # the quickest two take as long: of these what takes most
            if gpus == 8:
                self.assertEqual(values[f"{qwen3}.expert_parallel8.tok_s_gpu"], float(f"{4096 / 2.2:.6g}"))
            self.assertNotEqual(f"{qwen3}.expert_parallel8.tok_s_gpu" in values, gpus == 4)
            self.assertIn("distributed.zero_stage=3", figures[f"{qwen3}.expert_parallel4.tok_s_gpu"]["command"])
            self.assertIn("precision.recompute=block", figures[f"{qwen3}.expert_parallel2.tok_s_gpu"]["command"])
            self.assertAlmostEqual(values[f"{qwen3}.expert_parallel4.slowest_rank_percent"], 2 * (1 - 1 / gpus), 3)
            self.assertEqual(values[f"{qwen3}.expert_parallel4.plan_time_error_percent"], 1.5)
            self.assertAlmostEqual(values[f"{qwen3}.expert_parallel4.plan_memory_error_percent"], 100 * (100 / 104 - 1), 3)
            self.assertAlmostEqual(values[f"moe.olmoe.parka.{gpus}gpu.of_one_gpu"], 1 / 1.1, 5)
            self.assertAlmostEqual(values[f"muon.llama2-7b.{gpus}gpu.step_cost_percent"], 1, 5)
            self.assertTrue(all(figure["spread"][0] <= figure["value"] <= figure["spread"][1] for figure in figures.values()))
            self.assertEqual({(figure["commit"], figure["card"]) for figure in figures.values()}, {("abc", "made up")})
            for path in (self.folder / "out").iterdir():
                path.unlink()

    def test_a_repeated_call_runs_what_is_missing(self):
        self.figures("olmoe")
        (self.folder / "out/olmoe.all.json").unlink()
        one = self.folder / "out/olmoe.1.json"
        bench = json.loads(one.read_text())
        one.write_text(json.dumps({**bench, "step_seconds": [32, 32, 32]}))  # of 16 sequences: half the speed
        self.assertAlmostEqual(self.figures("olmoe")["moe.olmoe.parka.8gpu.of_one_gpu"]["value"], 2 / 1.1, 5)

    def test_what_fails_ends_the_call(self):
        self.program.write_text("#!/bin/sh\necho 'parka: error: no such GPU' >&2\nexit 3\n")
        result = self.script("olmoe")
        self.assertEqual((result.returncode, result.stderr.count("\n")), (3, 1), result.stderr)
        self.assertIn("no such GPU", result.stderr)
        for arguments, named in ((["all"], "all"), (["--gpus", "3"], "--gpus"), (["muon", "--parka", "none"], "none")):
            result = self.script(*arguments)
            self.assertEqual((result.returncode, result.stderr.count("\n")), (2, 1), result.stderr)
            self.assertIn(named, result.stderr)


TINY = ("device.kind=cpu", "model.d_model=32", "model.num_layers=1", "model.num_heads=2", "model.d_ffn=32", "data.sequence_length=64",
        "training.micro_batch_size=1", "training.global_batch_size=4", "optimizer.schedule.warmup_steps=5")


class KillDrill(unittest.TestCase):
    def drill(self, folder, program, *sets):
        words = [word for pair in (*TINY, *sets) for word in ("--set", pair)]
        return subprocess.run([sys.executable, SCRIPTS / "kill_drill.py", folder / "drill", "--ranks", "2", "--move-to", "1",
                               "--program", program, *words], capture_output=True, text=True, check=False, timeout=300,
                              env={**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"})

    def test_a_killed_run_of_divided_experts_moves_and_reads_the_same_data(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            result = self.drill(Path(folder), PROGRAM, "model.norm=rmsnorm", "model.moe.num_experts=4", "model.moe.experts_per_token=2")
            self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
            self.assertIn("equal to the bit", result.stdout)
            self.assertIn("read the same data", result.stdout)

    def test_other_data_are_noticed(self):
        """One rank alone shuffles otherwise."""
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            program = Path(folder) / "bin/parka"
            program.parent.mkdir()
            program.write_text(f"""#!{sys.executable}
import os, sys
alone = os.environ.get("OMPI_COMM_WORLD_SIZE", "1") == "1" and "--ranks" not in sys.argv or sys.argv[-2:] == ["--ranks", "1"]
os.execv({os.path.abspath(PROGRAM)!r}, ["parka", *sys.argv[1:], *(["--set", "data.seed=7"] if alone else [])])
""")
            program.chmod(0o755)
            result = self.drill(Path(folder), program)
            self.assertNotEqual(result.returncode, 0)
            self.assertIn("moved", result.stderr)


if __name__ == "__main__":
    unittest.main()
