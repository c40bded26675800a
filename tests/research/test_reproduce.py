#!/usr/bin/env python3
"""Tests of scripts/research/end_to_end.sh, per_layer.sh and finetune_speed.py without a GPU: plans, the largest batch, tables."""
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "commands"))
from parka_runs import PROGRAM, RunFolder, parka, tiny_config  # noqa: E402

FOLDER = ROOT / "scripts" / "research"
SMALL = "model.d_model=32 model.num_layers=1 model.num_heads=2 model.d_ffn=64 training.micro_batch_size=4"  # in fork_gap.sh


def run(script, *arguments, **environment):
    return subprocess.run([FOLDER / script, *arguments], capture_output=True, text=True, timeout=600,
                          env={**os.environ, "PARKA": os.path.abspath(PROGRAM), **environment})


def table(text):
    """The cells of a Markdown table below its header."""
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in text.splitlines()]
    assert all(len(row) == len(rows[0]) for row in rows), text
    return rows[2:]


def held_out_line(name, number=r"[+-]0\.\d{5}"):
    """Of fork_gap.sh with HELD_OUT, as a pattern."""
    return rf"{name}: .* nats per token .*; held out: same {number} \({number} to {number}\), bf16 {number} \({number} to {number}\)\n"


class Reproduce(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.out = os.path.join(temporary.name, "out")

    def write_pages(self):
        """A folder of text for fork_gap.sh."""
        text = Path(self.out) / "text"
        text.mkdir(parents=True)
        for number in range(40):
            (text / f"{number}.md").write_text("".join(f"Line {number * 40 + line} of page {number}.\n" for line in range(40)))
        return text

    def load(self, name):
        with open(os.path.join(self.out, name), encoding="utf-8") as file:
            return json.load(file)

    def run_script(self, script, *arguments, **environment):
        result = run(script, "--plan-only", *arguments, **environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        return table(result.stdout)

    def test_end_to_end(self):
        rows = self.run_script("end_to_end.sh", self.out, "7b.1", "7b.8", "13b.2")
        self.assertEqual([(row[0], row[1], row[8]) for row in rows],
                         [(model, gpus, recipe) for model, gpus in (("7B", "1"), ("7B", "8"), ("13B", "2"))
                          for recipe in ("bf16", "fp8_linear", "coat", "parka")])
        cells = {(row[0], row[1], row[8]): row for row in rows}
        coat = cells["7B", "8", "coat"]
        self.assertEqual(coat[2:8], ["COAT", "1.7", "17.7", "27.0", "8", "11,241"])
        self.assertEqual(cells["7B", "1", "bf16"][5], "out of memory")
        self.assertEqual(cells["7B", "1", "parka"][2:8], [""] * 6)  # the paper has none
        self.assertTrue(all(len(row) == 13 for row in rows))  # nothing is measured
        # 2 bytes and scales for each of 6.9 billion parameters, over 8 GPUs.
        self.assertEqual(coat[9], "1.8")
        plan = self.load("7b.8.coat.memory.plan.json")
        self.assertEqual((plan["gpus"], plan["micro_batch_size"]), (8, 2))
        self.assertEqual(coat[11], f"{(plan['total_bytes'] + plan['context_bytes']) / 1e9:.1f}")
        with open(os.path.join(self.out, "end_to_end.md"), encoding="utf-8") as file:
            self.assertEqual(table(file.read()), rows)

    def test_the_largest_batch_is_the_last_that_fits(self):
        for limit in (20, 60):
            row, = self.run_script("end_to_end.sh", "--memory-limit", str(limit), self.out, "7b.8", RECIPES="parka")
            largest = int(row[12])
            self.assertGreater(largest, 0)
            plans = {}
            for micro in (largest, 2 * largest):
                plan = parka("plan", str(ROOT / "configs/olmo-7b.json"), "--gpus", "8", "--json", "--memory-limit", str(limit),
                             "--set", "precision.recipe=parka", "--set", "precision.group_size=32",
                             "--set", "precision.weight_copies=rows",
                             "--set", "optimizer.gradient=bf16", "--set", "distributed.zero_stage=3",
                             "--set", f"training.micro_batch_size={micro}")
                plans[micro] = json.loads(plan.stdout)
            self.assertTrue(plans[largest]["fits"])
            self.assertFalse(plans[2 * largest]["fits"])
            self.assertEqual(self.load("7b.8.parka.speed.plan.json")["total_bytes"], plans[largest]["total_bytes"])
        row, = self.run_script("end_to_end.sh", "--memory-limit", "10", self.out, "7b.8", RECIPES="parka")
        self.assertEqual(row[12], "-")
        self.assertIn("too much", row[11])

    def test_per_layer(self):
        rows = self.run_script("per_layer.sh", self.out, "2048.2048", "4096.4096")
        self.assertEqual(len(rows), 8)
        bf16 = rows[0]
        self.assertEqual(bf16[:8], ["2048", "2048", "BF16", "3.36", "8.47", "11.83", "1,457", "bf16"])
        kept = {(row[0], row[7]): float(row[8].replace(",", "")) for row in rows}
        for width in ("2048", "4096"):
            self.assertLess(kept[width, "parka"], kept[width, "coat"])
            self.assertLess(kept[width, "coat"], kept[width, "bf16"])

    def test_bad_arguments_are_refused(self):
        for script, arguments, word in [("end_to_end.sh", (), "usage"), ("end_to_end.sh", ("--plan", "x"), "usage"),
                                        ("end_to_end.sh", ("--plan-only", self.out, "9b.1"), "no row 9b.1"),
                                        ("end_to_end.sh", ("--plan-only", self.out, "7b.3"), "no row 7b.3"),
                                        ("per_layer.sh", ("--plan-only",), "usage"),
                                        ("per_layer.sh", ("--plan-only", self.out, "512.2048"), "no case 512.2048")]:
            with self.subTest(arguments):
                result = run(script, *arguments, RECIPES="coat")
                self.assertNotEqual(result.returncode, 0)
                self.assertIn(word, result.stderr)
        result = run("end_to_end.sh", "--plan-only", self.out, "7b.8", RECIPES="caot")
        self.assertEqual(result.returncode, 2)
        self.assertIn("no recipe caot", result.stderr)


    def test_paths_of_paired_runs_are_those_of_the_caller(self):
        folder = Path(self.out).resolve()
        (folder / "text").mkdir(parents=True)
        for number in range(30):
            (folder / "text" / f"{number}.md").write_text(f"# Page {number}\n" + "Some words of it, again and again.\n" * 40)
        program = folder / "program"
        program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > "$FOLDER/arguments"\nexit 2\n')
        program.chmod(0o755)
        environment = dict(os.environ, PARKA="./program", FOLDER=str(folder), PYTHON=sys.executable, TOKENS="200000")
        command = [FOLDER / "loss_gap.sh", "runs", "text", "coat"]
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
        self.assertNotEqual(result.returncode, 0)
        arguments = (folder / "arguments").read_text()
        tokens = folder.joinpath("runs", "work", "tokens")
        self.assertIn(f'data.train=["{tokens}/train-*.npy"]', arguments)
        self.assertTrue((tokens / "train-00000.npy").exists())
        command[1] = "my runs"
        result = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=folder, timeout=300)
        self.assertEqual(result.returncode, 2)
        self.assertIn("give OUT a path without spaces", result.stderr)

    def test_forks_go_on_from_one_state(self):
        text = self.write_pages()
        environment = dict(PYTHON=sys.executable, TOKENS="10240", AT="8", BATCH="4", LENGTH="128", SEEDS="1 2",
                           MODEL=f"{SMALL} training.log_interval=1")
        command = ["fork_gap.sh", f"{self.out}/gap", text, "parka", "same=parka", "exact_qkv=parka,precision.qkv=compute",
                   "exact=parka,optimizer.states=fp32"]
        for _ in range(2):  # the second finds all runs at their end
            result = run(*command, **environment)
            self.assertEqual(result.returncode, 0, result.stderr)
            rows = [json.loads(line) for line in Path(self.out, "gap", "fork_gap.jsonl").read_text().splitlines()]
            self.assertEqual([row["run"] for row in rows], ["same.1", "exact_qkv.1", "exact.1", "same.2", "exact_qkv.2", "exact.2"])
            self.assertEqual([row["nats"] for row in rows if row["run"].startswith("same")], [0, 0])
            self.assertTrue(all(row["nats"] != 0 for row in rows if row["run"].startswith("exact")))
            self.assertIn("same: +0.00000 nats per token (+0.00000 to +0.00000)", result.stdout)
        self.assertFalse(any("held_out" in row for row in rows) or list(Path(self.out, "gap").glob("*/held_out.json")))
        result = run(*command, **environment, HELD_OUT="0.2")  # of tokens of which none is
        self.assertEqual(result.returncode, 2)
        self.assertIn("nothing was held out when", result.stderr)
        of_runs = [[json.loads(line) for line in Path(self.out, "gap", f"{name}.1", "metrics.jsonl").read_text().splitlines()]
                   for name in ("parka", "exact_qkv")]
        until_fork = [[record["loss"] for record in records if record["kind"] == "train" and record["step"] <= 8]
                      for records in of_runs]
        self.assertEqual(until_fork[0], until_fork[1])
        self.assertEqual(len(until_fork[0]), 8)

        command[1:] = [f"{self.out}/bpe", text, "bf16", "same=bf16", "coat"]  # of other moments, too
        environment |= dict(SEEDS="1", VOCABULARY="320", HELD_OUT="0.1")
        result = run(*command, **environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        config = json.loads(Path(self.out, "bpe", "same.1", "config.json").read_text())
        self.assertEqual(config["model"]["vocab_size"], 320)
        self.assertRegex(result.stdout, r"same: \+0\.00000 .*\ncoat: [+-]0\.\d+ nats per token")
        self.assertTrue(Path(self.out, "bpe", "work", "tokens", "eval-00000.npy").exists())

        self.assertRegex(result.stdout, held_out_line("same", r"\+0\.00000") + held_out_line("coat"))

    def test_forks_are_compared_on_held_out_bytes(self):
        text = self.write_pages()
        environment = dict(PYTHON=sys.executable, TOKENS="10240", AT="8", BATCH="4", LENGTH="128", SEEDS="1 2", MODEL=SMALL, HELD_OUT="0.2")
        out = Path(self.out, "gap")
        command = ["fork_gap.sh", out, text, "parka", "same=parka", "exact=parka,optimizer.states=fp32"]
        for share, others in (("1.5", {}), ("0.0", {}), ("0.0", dict(VOCABULARY="320")), ("1.5", dict(VOCABULARY="320"))):
            result = run(*command, **environment | dict(HELD_OUT=share) | others)
            self.assertEqual(result.returncode, 2)
            self.assertEqual(result.stderr, f"fork_gap.sh: HELD_OUT={share} is no share of the documents; give one as 0.02\n")
        result = run(*command, **environment)
        self.assertEqual(result.returncode, 0, result.stderr)
        data = json.loads(Path(out, "work", "tokens", "data.json").read_text())
        self.assertEqual(data["train"]["tokens"] + data["eval"]["tokens"], 12800)  # 10240 / (1 - 0.2)
        self.assertGreater(data["eval"]["tokens"], 0)
        rows = [json.loads(line) for line in (out / "fork_gap.jsonl").read_text().splitlines()]
        self.assertEqual([row["run"] for row in rows], ["same.1", "exact.1", "same.2", "exact.2"])
        for row in rows:
            of_run, of_base = (json.loads((out / row[which] / "held_out.json").read_text()) for which in ("run", "against"))
            self.assertEqual((of_run["same"]["step"], of_base["bf16"]["step"]), (20, 20))
            self.assertEqual(row["held_out"], {name: of_run[name]["loss"] - of_base[name]["loss"] for name in ("same", "bf16")})
            self.assertNotEqual(of_run["same"]["loss"], of_run["bf16"]["loss"])
            self.assertEqual(set(row["held_out"].values()) == {0}, row["run"].startswith("same"))
        self.assertRegex(result.stdout, held_out_line("same", r"\+0\.00000") + held_out_line("exact"))
        self.assertEqual((out / "fork_gap.txt").read_text(), result.stdout[-len((out / "fork_gap.txt").read_text()):])

    def test_means_of_forks(self):
        """Of made-up differences and held-out losses."""
        out = Path(self.out)
        rows = [{"run": f"fp8.{seed}", "against": f"bf16.{seed}", "nats": nats, "interval": None} for seed, nats in ((1, 0.001), (2, 0.004))]
        for name, same, bf16 in (("bf16.1", 3.0, 2.0), ("fp8.1", 3.01, 2.001), ("bf16.2", 3.5, 2.5), ("fp8.2", 3.53, 2.498)):
            (out / name).mkdir(parents=True)
            (out / name / "held_out.json").write_text(json.dumps(
                {key: {"loss": loss, "step": 20, "num_targets": 100} for key, loss in (("same", same), ("bf16", bf16))}))
        (out / "differences").write_text("".join(json.dumps(row) + "\n" for row in rows))
        command = [sys.executable, FOLDER / "fork_table.py", out / "differences", out]
        first = subprocess.run(command, capture_output=True, text=True)
        self.assertEqual((first.returncode, first.stdout), (0, "fp8: +0.00250 nats per token (+0.00100 to +0.00400)\n"))
        self.assertEqual((out / "fork_gap.jsonl").read_bytes(), (out / "differences").read_bytes())
        result = subprocess.run([*command, "--held-out"], capture_output=True, text=True)
        self.assertEqual(result.stdout, first.stdout[:-1] + "; held out: same +0.02000 (+0.01000 to +0.03000), "
                         "bf16 -0.00050 (-0.00200 to +0.00100)\n")
        held_out = [json.loads(line)["held_out"] for line in (out / "fork_gap.jsonl").read_text().splitlines()]
        self.assertEqual([{key: round(value, 9) for key, value in each.items()} for each in held_out],
                         [{"same": 0.01, "bf16": 0.001}, {"same": 0.03, "bf16": -0.002}])
        file = out / "fp8.2" / "held_out.json"
        whole = file.read_text()
        file.write_text(json.dumps({"same": json.loads(whole)["same"]}))  # of numerics that one run lacks nothing is said
        self.assertTrue(subprocess.run([*command, "--held-out"], capture_output=True, text=True).stdout.endswith(
            "; held out: same +0.02000 (+0.01000 to +0.03000)\n"))
        for text in ("", "no JSON", "5\n", "{}\n", json.dumps({**rows[0], "nats": None}) + "\n", None):
            other = out / ("none" if text is None else "other")
            if text is not None:
                other.write_text(text)
            result = subprocess.run([*command[:2], other, out], capture_output=True, text=True)
            self.assertEqual((result.returncode, result.stdout, result.stderr.count("\n")), (2, "", 1), result.stderr)
            self.assertRegex(result.stderr, "^fork_table.py: error: .*the lines of compare.py --json\n$")
        file.write_text(whole.replace("100", "90"))
        result = subprocess.run([*command, "--held-out"], capture_output=True, text=True)
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertRegex(result.stderr, r"^fork_table.py: error: .*fp8\.2/held_out\.json: is of 90 targets, .*bf16\.1/held_out\.json of 100; ")

    def test_an_evaluation_that_fails_leaves_no_file(self):
        """With a program that writes down how it is called, and fails in bf16 as long as there is a file."""
        folder = Path(self.out).resolve()
        work = folder / "runs" / "work"
        for name, compute in (("fp8.1", "bf16"), ("fp8.2", "bf16"), ("fp8.3", "fp32")):
            (folder / "runs" / name).mkdir(parents=True)
            (work / name / "step_00000007").mkdir(parents=True)
            (folder / "runs" / name / "config.json").write_text(json.dumps({"precision": {"compute": compute}}, indent=2))
        program = folder / "program"
        program.write_text(f"""#!/bin/sh
echo "$CUDA_VISIBLE_DEVICES $*" >> '{folder}/calls'
loss=1
case $* in *precision.eval=bf16*) [ ! -e '{folder}/fails' ] || {{ echo '{{"loss":'; exit 3; }}; loss=2 ;; esac
for checkpoint in "$2"/step_*; do :; done
echo "{{\\"checkpoint\\":\\"$checkpoint\\",\\"loss\\":$loss}}"
""")
        program.chmod(0o755)
        (folder / "fails").touch()
        script = 'set -euo pipefail; cd "$0"; . scripts/research/paired_runs.sh; evaluate_runs "$out"/fp8.*; echo done'

        def evaluate():
            return subprocess.run(["bash", "-c", script, ROOT, folder / "runs", folder], capture_output=True, text=True, cwd=folder,
                                  env={**os.environ, "PARKA": str(program), "GPUS": "3,2 1"})

        result = evaluate()
        self.assertEqual((result.returncode, result.stdout), (3, ""))
        self.assertEqual({path.name for path in folder.glob("runs/fp8.*/*")}, {"config.json"})
        (folder / "fails").unlink()
        (folder / "calls").unlink()
        for _ in range(2):  # the second time both have one
            result = evaluate()
            self.assertEqual((result.returncode, result.stdout), (0, "done\n"))
        for name in ("fp8.1", "fp8.2", "fp8.3"):  # the last computes in fp32
            self.assertEqual({path.name for path in (folder / "runs" / name).iterdir()}, {"config.json", "held_out.json"})
            self.assertEqual(self.losses_of(folder / "runs" / name), {"same": 1, "bf16": 2} if name != "fp8.3" else {"same": 1})
        calls = (folder / "calls").read_text().splitlines()
        expected = [*((f"fp8.{seed}", numerics) for seed in (1, 2) for numerics in ("same", "bf16")), ("fp8.3", "same")]
        self.assertEqual(len(calls), len(expected))
        for call, (name, numerics) in zip(calls, expected):
            self.assertTrue(call.startswith(f"3 eval {work / name} --json --data {work}/tokens/eval-*.npy "
                                            f"--max-sequences 1024 --set precision.eval={numerics}"), call)

        # One that went on is evaluated again.
        (work / "fp8.2" / "step_00000009").mkdir()
        self.assertEqual(evaluate().stdout, "done\n")
        self.assertEqual(len((folder / "calls").read_text().splitlines()), len(expected) + 2)
        self.assertIn("step_00000009", (folder / "runs" / "fp8.2" / "held_out.json").read_text())

    def losses_of(self, run):
        return {name: result["loss"] for name, result in json.loads((run / "held_out.json").read_text()).items()}

    def test_runs_that_divide_weights_are_evaluated_in_bf16(self):
        """ZeRO stage 3, or weights in host memory, leave FP8 codes alone where the run computes."""
        text = self.write_pages()
        result = run("fork_gap.sh", f"{self.out}/gap", text, "coat", "divided=coat,distributed.zero_stage=3",
                     "host=coat,optimizer.offload=true,precision.offload_weights=true", PYTHON=sys.executable, TOKENS="10240", AT="8",
                     BATCH="4", LENGTH="128", SEEDS="1", MODEL=SMALL, HELD_OUT="0.2")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stdout, held_out_line("divided", r"\+0\.00000") + held_out_line("host", r"\+0\.00000"))

    def test_runs_of_fp32_are_evaluated_in_their_own_numerics_alone(self):
        text = self.write_pages()
        result = run("fork_gap.sh", f"{self.out}/gap", text, "fp32", "same=fp32", PYTHON=sys.executable, TOKENS="10240", AT="8", BATCH="4",
                     LENGTH="128", SEEDS="1", MODEL=SMALL, HELD_OUT="0.2")
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertTrue(result.stdout.endswith("; held out: same +0.00000 (+0.00000 to +0.00000)\n"), result.stdout)
        self.assertEqual(set(self.load("gap/fp32.1/held_out.json")), {"same"})

    def test_forks_behind_the_end_are_refused(self):
        result = run("fork_gap.sh", self.out, self.out, "bf16", "parka", TOKENS="10240", AT="800")
        self.assertEqual(result.returncode, 2)
        self.assertIn("AT=800 is no step before the last of 0", result.stderr)

    def test_without_a_program_the_scripts_say_what_to_do(self):
        scripts = Path(self.out) / "scripts" / "research"
        shutil.copytree(FOLDER, scripts)
        shutil.copy(FOLDER.parent / "help.sh", scripts.parent)
        for script in ("end_to_end.sh", "per_layer.sh"):
            result = subprocess.run([scripts / script, "--plan-only", f"{self.out}/of_{script}"], capture_output=True, text=True,
                                    env={key: value for key, value in os.environ.items() if key != "PARKA"})
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("set PARKA to the program", result.stderr)
        program = Path(self.out) / "build" / "release" / "parka"
        program.parent.mkdir(parents=True)
        program.symlink_to(os.path.abspath(PROGRAM))
        (Path(self.out) / "configs").symlink_to(ROOT / "configs")
        result = subprocess.run([scripts / "end_to_end.sh", "--plan-only", f"{self.out}/planned", "7b.8"], capture_output=True,
                                text=True, env={key: value for key, value in os.environ.items() if key != "PARKA"})
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_what_takes_memory_is_what_is_planned(self):
        for which in ("figure1", "table2"):
            with self.subTest(which):
                printed = run("paper_memory.py", which)
                self.assertEqual(printed.returncode, 0, printed.stderr)
                self.assertEqual(len(table(printed.stdout)), 9 if which == "figure1" else 7)
        self.assertNotEqual(run("paper_memory.py", "table3").returncode, 0)
        refused = run("paper_memory.py", "table2", PARKA="/bin/false")
        self.assertNotEqual(refused.returncode, 0)


class Measured(RunFolder):
    """Columns that need a GPU, from real measurements of the tiny model on the CPU under the names of a row."""

    def test_measurements_take_their_columns(self):
        out = self.path("out")
        self.assertEqual(run("end_to_end.sh", "--plan-only", out, "7b.1", RECIPES="coat").returncode, 0)
        self.assertEqual(run("per_layer.sh", "--plan-only", out, "2048.2048", RECIPES="coat").returncode, 0)
        config = self.write_config(tiny_config(self.folder, "coat"))
        for name in ("7b.1.coat.memory", "7b.1.coat.speed", "2048.2048.coat"):
            self.assert_exit(parka("bench", config, "--steps", "3", "--json", f"{out}/{name}.json"), 0)
        with open(f"{out}/7b.1.coat.speed.json", encoding="utf-8") as file:
            bench = json.load(file)
        row, = table(run("paper_tables.py", "end_to_end", out, "7b.1").stdout)
        self.assertEqual(row[12], "0.0")  # on a GPU by a run on the CPU
        self.assertEqual(row[14], f"{64 / statistics.median(bench['step_seconds']):,.0f}")
        with open(f"{out}/2048.2048.coat.json", encoding="utf-8") as file:
            bench = json.load(file)
        row, = table(run("paper_tables.py", "per_layer", out, "2048.2048").stdout)
        # Two micro-batches of two blocks.
        forward = 1e3 * sum(op["seconds"] for op in bench["ops"] if op["section"] == "block forward") / 4
        self.assertEqual(row[8], f"{forward:.2f}")
        self.assertAlmostEqual(float(row[10]), float(row[8]) + float(row[9]), delta=0.011)

    def test_what_is_run(self):
        """With a GPU that is made up, and a program that plans, and only writes down what it should measure."""
        programs = self.path("programs")
        os.mkdir(programs)
        for name, text in (("nvidia-smi", "echo 'GPU 0: made up'"), ("parka", f"""
[ "$1" != plan ] || exec '{os.path.abspath(PROGRAM)}' "$@"
while [ $# -gt 0 ]; do [ "$1" != --json ] || echo '{{"used_bytes": 5e9, "tokens_per_step": 8, "step_seconds": [2], "ranks": 1}}' > "$2"; shift; done""")):
            with open(os.path.join(programs, name), "w", encoding="utf-8") as file:
                file.write(f"#!/bin/sh\n{text}\n")
            os.chmod(file.name, 0o755)
        # Of 80 GB one sequence of `coat` is all that fits, which is the paper's batch; of `parka` four fit.
        for option, measured in (("--speed-only", {"parka.speed", "coat.speed", "coat.memory"}),
                                 ("", {"parka.speed", "parka.memory", "coat.speed", "coat.memory"})):
            out = self.path(f"out{option}")
            result = run("end_to_end.sh", *option.split(), out, "7b.1", RECIPES="coat parka", PARKA=f"{programs}/parka",
                         PATH=f"{programs}:{os.environ['PATH']}")
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual({name[len("7b.1."):-len(".json")] for name in os.listdir(out)
                              if name.endswith(".json") and not name.endswith(".plan.json")}, measured)
            coat, made = table(result.stdout)
            self.assertEqual((coat[12:], made[13:]), (["5.0", "1", "4"], ["4", "4"]))
            self.assertEqual(made[12], "-" if option else "5.0")


class FinetuneSpeed(unittest.TestCase):
    def run_script(self, *arguments):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as out:
            return run("finetune_speed.py", os.path.abspath(PROGRAM), out, "--config", ROOT / "configs" / "tiny-llama.json",
                       "--steps", "1", "--runs", *arguments)

    def test_a_row_for_each_run_that_the_model_allows(self):
        result = self.run_script("qlora.2x16", "full.1x16", "lora_fp8.2x16")  # heads are narrower than a group
        self.assertEqual(result.returncode, 0, result.stderr)
        left_out = [line for line in result.stdout.splitlines() if not line.startswith("|")]
        self.assertEqual(len(left_out), 1)
        self.assertIn("lora_fp8.2x16: left out, parka exited with 2: ", left_out[0])
        rows = table(result.stdout[result.stdout.index("| model |"):])
        self.assertEqual([row[:3] for row in rows], [["tiny-llama", "full", "1x16"], ["tiny-llama", "qlora", "2x16"]])

    def test_a_program_in_the_folder_that_it_is_called_from(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            os.symlink(os.path.abspath(PROGRAM), f"{folder}/parka")
            command = [FOLDER / "finetune_speed.py", "./parka", "out", "--config", ROOT / "configs" / "tiny-llama.json", "--steps", "1",
                       "--runs", "full.1x16"]
            result = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=folder)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_unknown_runs_are_refused(self):
        result = self.run_script("other.2x16")
        self.assertEqual(result.returncode, 2)
        self.assertIn("no run other.2x16; runs are METHOD.SEQUENCESxLENGTH, see --help", result.stderr)


if __name__ == "__main__":
    unittest.main()
