"""What README.md and the pages of docs/ print of `parka plan` and `parka config` is what these commands print."""
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from parka_runs import PROGRAM, parka

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import fits_table  # noqa: E402

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DETERMINISTIC = re.compile(r"(?:build/release/)?parka (?:plan|config) ")


def examples(page):
    """Pairs of a command and the lines that the page shows below it: a block of bash and one without a language, or `$ command`
    within a block."""
    blocks = [(match[1], match[2]) for match in FENCE.finditer(page)]
    for (language, text), following in zip(blocks, blocks[1:] + [("end", "")]):
        command = text.replace("\\\n", " ").strip()
        if language == "bash" and "\n" not in command and DETERMINISTIC.match(command) and following[0] == "":
            yield command, following[1].splitlines()
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *lines = part.replace("\\\n", " ").splitlines()
            if DETERMINISTIC.match(command) and lines:
                yield command, lines


def files(page):
    """Configs that a page shows: the name between backticks, then a block of JSON."""
    return re.findall(r"`([\w-]+\.json)`[^`\n]*:\n\n```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def settings_tables(page):
    """Pairs of a command and the rows below "COMMAND says with these settings": settings, and GB in use."""
    for command, table in re.findall(r"`(parka plan [^`]+)` says with these\s+settings[^|]*\n((?:\|.*\n)+)", page):
        yield command, [tuple(cell.strip() for cell in row.strip("|").split("|")) for row in table.splitlines()[2:]]


def overrides(settings):
    """Of "4 x 384 tokens, `KEY=VALUE`" and the like."""
    micro_batch, length = re.search(r"(\d+) x (\d+) tokens", settings).groups()
    keys = [f"training.micro_batch_size={micro_batch}", f"data.sequence_length={length}", *re.findall(r"`([\w.]+=[^`]+)`", settings)]
    return [word for key in keys for word in ("--set", key)]


def difference(expected, printed):
    """None, or the first line of `expected` that is not printed where it should be; "..." stands for any lines."""
    at, anywhere = 0, False
    for line in expected:
        if line == "...":
            anywhere = True
            continue
        while anywhere and at < len(printed) and printed[at] != line:
            at += 1
        if at == len(printed) or printed[at] != line:
            return line
        at, anywhere = at + 1, False
    return None if anywhere or at == len(printed) else f"end of the output, not {printed[at]!r}"


class Pages(unittest.TestCase):
    def run_example(self, command, folder):
        arguments = shlex.split(command, comments=True)[1:]
        result = subprocess.run([os.path.abspath(PROGRAM), *arguments], capture_output=True, text=True, cwd=folder, timeout=300)
        self.assertEqual(result.returncode, 0, f"{command}: {result.stderr}")
        return result.stdout.splitlines()

    def test_printed_output_is_what_commands_print(self):
        found = 0
        for path in PAGES:
            page = path.read_text(encoding="utf-8")
            with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
                for name in ("configs", "docs"):
                    os.symlink(ROOT / name, os.path.join(folder, name))
                for name, text in files(page):
                    Path(folder, name).write_text(text, encoding="utf-8")
                for command, expected in examples(page):
                    found += 1
                    with self.subTest(page=path.name, command=command):
                        self.assertIsNone(difference(expected, self.run_example(command, folder)))
        self.assertGreaterEqual(found, 4)

    def test_what_settings_take_is_what_the_plan_says(self):
        found = 0
        for path in PAGES:
            for command, rows in settings_tables(path.read_text(encoding="utf-8")):
                for settings, in_use in rows:
                    found += 1
                    with self.subTest(page=path.name, settings=settings):
                        plan = parka(*shlex.split(command)[1:], "--json", *overrides(settings), executable=os.path.abspath(PROGRAM), cwd=ROOT)
                        bytes_in_use = sum(json.loads(plan.stdout)[key] for key in ("total_bytes", "context_bytes"))
                        self.assertEqual(in_use, f"{bytes_in_use / 1e9:.3f}")
        self.assertGreaterEqual(found, 21)

    def expected_step(self, gpus, stage, copies, measured, *options, shard_size=0):
        """Of Llama-2-7B on several GPUs, with the settings of scaling.md, as the plan says."""
        keys = {"precision.recipe": "parka", "precision.group_size": 32, "precision.weight_copies": copies, "precision.head": "compute",
                "precision.sampled_amax": "false",
                "optimizer.gradient": "bf16", "training.micro_batch_size": 4, "training.global_batch_size": 32 * int(gpus),
                "distributed.zero_stage": stage, "distributed.shard_size": shard_size,
                "device.gemm_tuning": "configs/tuning/llama2-7b.parka.tuning.json"}
        overrides = [word for key, value in keys.items() for word in ("--set", f"{key}={value}")]
        result = parka("plan", "configs/llama2-7b.json", "--json", "--gpus", gpus, "--measured",
                       f"docs/results/scaling/llama2-7b.parka.{measured}.json", "--memory-limit", "1000", *options, *overrides,
                       executable=os.path.abspath(PROGRAM), cwd=ROOT)
        self.assertEqual(result.returncode, 0, result.stderr)
        return json.loads(result.stdout)["step"]

    def test_what_is_expected_of_many_gpus_is_what_the_plan_expects(self):
        page = (ROOT / "docs/results/scaling.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| (\d+) \((\d+)\), (\d)(?:, (\w+))? \| ([\d,]+) \| ([\d.]+) % \| (\d+) % \|", page, re.MULTILINE)
        self.assertEqual(len(rows), 14)
        for gpus, nodes, stage, shard, speed, efficiency, hidden in rows:
            with self.subTest(gpus=gpus, stage=stage, shard=shard):
                step = self.expected_step(gpus, stage, "both", "both.of2", "--nodes", nodes, shard_size=shard if shard == "8" else 0)
                self.assertEqual((f"{step['tokens_per_second_per_gpu']:,.0f}", f"{100 * step['efficiency']:.1f}",
                                  f"{100 * step['hidden_fraction']:.0f}"), (speed, efficiency, hidden))

    def test_steps_measured_on_several_gpus_are_near_what_the_plan_expects(self):
        page = (ROOT / "docs/results/scaling.md").read_text(encoding="utf-8")
        rows = re.findall(r"^\| (two|four), stage (\d), `(\w+)` \| ([\d,]+) \|.*\| (-?[\d.]+) % \|", page, re.MULTILINE)
        self.assertEqual(len(rows), 6)
        for number, stage, copies, measured, error in rows:
            with self.subTest(gpus=number, stage=stage, copies=copies):
                gpus, most = {"two": ("2", 0.01), "four": ("4", 0.015)}[number]
                step = self.expected_step(gpus, stage, copies, f"{copies}.of2" if gpus == "2" else "tuned.of4")
                difference = float(measured.replace(",", "")) / step["tokens_per_second_per_gpu"] - 1  # of times
                self.assertLess(abs(difference), most)
                self.assertEqual(f"{100 * difference:.1f}", error)

    def test_output_that_differs_is_found(self):
        page = "`x.json`:\n\n```json\n{}\n```\n\n```bash\nbuild/release/parka plan x.json \\\n  --gpus 2\n```\n\n```\na\n...\nc\n```\n\n" \
               "```\n$ parka config show x.json\na\n$ parka train x.json\nb\n```\n"
        self.assertEqual(files(page), [("x.json", "{}\n")])
        self.assertEqual(list(examples(page)), [("build/release/parka plan x.json    --gpus 2", ["a", "...", "c"]),
                                                ("parka config show x.json", ["a"])])
        for printed, first in ((["a", "b", "c"], None), (["a", "c"], None), (["a", "b"], "c"), (["b", "c"], "a"), ([], "a")):
            self.assertEqual(difference(["a", "...", "c"], printed), first)
        self.assertIsNotNone(difference(["a"], ["a", "b"]))

    def test_the_front_page_has_the_memory_of_its_configs(self):
        page = (ROOT / "README.md").read_text(encoding="utf-8")
        for config, pattern in (("llama2-7b-bench", r"Llama-2-7B at [\d,]+\s+tokens/s in ([\d.]+)\s+GB"),
                                ("olmo-1b-bench", r"OLMo-1B at [\d,]+\s+tokens/s in ([\d.]+)\s+GB")):
            with self.subTest(config):
                plan = json.loads(parka("plan", str(ROOT / f"configs/{config}.json"), "--json").stdout)
                in_use = (plan["total_bytes"] + plan["context_bytes"]) / 1e9
                (printed,) = re.findall(pattern, page)
                self.assertAlmostEqual(in_use / float(printed), 1, delta=0.001)
                self.assertIn(f"configs/{config}.json", page)

    def test_the_front_page_has_the_table_of_what_fits(self):
        page = (ROOT / "README.md").read_text(encoding="utf-8")
        table = "\n".join(fits_table.table(os.path.abspath(PROGRAM)))
        self.assertIn(f"\n\n{table}\n\n", page)

    def test_kept_runs_have_a_config_that_the_program_takes(self):
        runs = sorted(path.parent for path in (ROOT / "docs/results/equal_loss").glob("*/*/metrics.jsonl"))
        self.assertGreater(len(runs), 40)
        for run in runs:
            with self.subTest(run=str(run.relative_to(ROOT))):
                shown = parka("config", "show", str(run / "config.json"), executable=os.path.abspath(PROGRAM))
                self.assertEqual(shown.returncode, 0, shown.stderr)
                config, (name, seed) = json.loads(shown.stdout), run.name.split(".")
                self.assertEqual((config["training"]["seed"], config["data"]["seed"]), (int(seed), int(seed)))
                self.assertEqual(config["checkpoint"]["folder"], f"runs/{run.name}")
                if name in ("bf16", "coat", "parka"):
                    self.assertEqual(config["precision"]["recipe"], name)


if __name__ == "__main__":
    unittest.main()
