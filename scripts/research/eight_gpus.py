#!/usr/bin/env python3
"""All that is measured on the 8 or 4 GPUs of one host, in one call.

    scripts/research/eight_gpus.py OUT [--gpus 8] [--parka build/cuda/parka] [PART...]

check: scripts/gpu_check.sh. drill: a run loses a rank, and one moves to half of the GPUs and back (kill_drill.py), dense and with divided
experts. qwen3: Qwen3-30B-A3B, its experts divided over 8, 4 and 2 ranks and not at all, ZeRO over all, beside what `parka plan` expects from
one GPU with 8 of its blocks. olmoe: OLMoE-1B-7B beside one GPU. muon: what a step of Llama-2-7B of 1,048,576 tokens costs with Muon, over AdamW's.
Without a PART all of them run. A benchmark whose result is in OUT is not run again, so an interrupted call may be repeated.

OUT/figures.jsonl gets a line for each figure, in the form of docs/results/figures.jsonl. Ends with 0, or with the code of what failed."""
import datetime
import itertools
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from measured_runs import ScriptParser, error_line, fail, options_of, positive, run_main

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
QWEN3 = ("precision.weight_copies=rows", "optimizer.gradient=bf16", "optimizer.master=fp32", "precision.group_size=32")


class Host:
    """Runs of parka on the GPUs of this host, and the figures of them."""

    def __init__(self, arguments):
        self.out, self.gpus, self.steps, self.memory = arguments.out, arguments.gpus, arguments.steps, arguments.memory
        self.parka, self.commit = os.path.abspath(arguments.parka), arguments.commit

    def call(self, *words, log):
        with open(self.out / log, "w", encoding="utf-8") as file:
            code = subprocess.run([str(word) for word in words], stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, check=False).returncode
        if code != 0:
            fail(f"{words[0]} ended with {code}: {error_line((self.out / log).read_text(encoding='utf-8'))} ({self.out / log})", code)

    def bench(self, name, config, ranks, sets):
        path = self.out / f"{name}.json"
        if not path.exists():
            self.call(self.parka, "bench", CONFIGS / f"{config}.json", *(["--ranks", ranks] if ranks > 1 else []), *options_of(sets),
                      "--steps", self.steps, "--json", path, log=f"{name}.log")
        return json.loads(path.read_text(encoding="utf-8"))

    def plan(self, config, sets, *words):
        command = [self.parka, "plan", CONFIGS / f"{config}.json", "--json", "--gpus", self.gpus, *options_of(sets), *words]
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if not result.stdout:
            fail(f"parka plan ended with {result.returncode}: {error_line(result.stderr)}")
        return json.loads(result.stdout)

    def add(self, name, value, unit, spread, command, card):
        line = {"name": name, "value": float(f"{value:.6g}"), "unit": unit, "spread": [float(f"{x:.6g}") for x in spread],
                "command": command, "commit": self.commit, "date": str(datetime.date.today()), "card": card}
        with open(self.out / "figures.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        print(f"{name} = {value:.6g} {unit}", flush=True)


def rates(bench):
    """Tokens per second of each GPU: the median, the least and the most."""
    speeds = [bench["tokens_per_step"] / bench["ranks"] / seconds for seconds in bench["step_seconds"]]
    return statistics.median(speeds), min(speeds), max(speeds)


def check(host):
    host.call(ROOT / "scripts/gpu_check.sh", log="gpu_check.log")


def drill(host):
    mixture = ("model.norm=rmsnorm", "model.d_ffn=512", "model.moe.num_experts=32", "model.moe.experts_per_token=4",
               f"distributed.expert_parallel={host.gpus // 2}")
    for name, sets in (("dense", ()), ("mixture", mixture)):
        if not (host.out / f"drill.{name}").exists():
            host.call(sys.executable, ROOT / "scripts/research/kill_drill.py", host.out / f"drill.{name}", "--ranks", host.gpus, "--move-to",
                      host.gpus // 2, "--program", host.parka, *options_of(sets), log=f"drill.{name}.log")
        print((host.out / f"drill.{name}.log").read_text(encoding="utf-8"), end="", flush=True)


def roomiest(host, sets):
    """The settings that compute and exchange least of those that fit."""
    for recompute, micro, stage in itertools.product(("none", "block"), (8, 4, 2), (1, 3)):
        shape = [f"precision.recompute={recompute}", f"training.micro_batch_size={micro}"]
        divided = [f"training.global_batch_size={4 * micro * host.gpus}", f"distributed.zero_stage={stage}"]
        if host.plan("qwen3-30b-a3b", [*sets, *shape, *divided], "--memory-limit", host.memory)["fits"]:
            return f"{recompute}.{micro}", shape, divided
    return fail(f"Qwen3-30B-A3B does not fit on {host.gpus} GPUs of {host.memory} GB with {sets[-1]}; give more GPUs, or --memory", 3)


def qwen3(host):
    name, found = f"moe.qwen3-30b-a3b.parka.{host.gpus}gpu", {}
    for divided_by in (ranks for ranks in (8, 4, 2, 1) if ranks <= host.gpus):
        over = [f"distributed.expert_parallel={divided_by}"]
        shape_name, shape, divided = roomiest(host, [*QWEN3, *over])
        one = host.out / f"qwen3.one.{shape_name}.json"
        host.bench(one.stem, "qwen3-30b-a3b", 1,
                   [*QWEN3, *shape, f"training.global_batch_size={4 * int(shape_name[-1])}", "model.num_layers=8", "distributed.zero_stage=0"])
        sets = [*QWEN3, *over, *shape, *divided]
        bench = host.bench(f"qwen3.{divided_by}", "qwen3-30b-a3b", host.gpus, sets)
        step = host.plan("qwen3-30b-a3b", sets, "--measured", one, "--compare", host.out / f"qwen3.{divided_by}.json")["step"]
        command = f"scripts/research/eight_gpus.py OUT --gpus {host.gpus} qwen3: parka bench configs/qwen3-30b-a3b.json --set {' --set '.join(sets)}"
        rate, *spread = rates(bench)
        used = bench["used_bytes"] / 1e9
        own = bench["op_seconds_by_rank"]
        waited = 100 * (max(own) - statistics.mean(own)) / statistics.median(bench["step_seconds"])
        of_waits = 100 * sum(wait["seconds"] for wait in bench["waits"]) / bench["timed_step_seconds"]
        memory_error = 100 * ((bench["planned_bytes"] + bench["context_bytes"]) / bench["used_bytes"] - 1)
        for figure, value, unit, of_value in (
                ("tok_s_gpu", rate, "tok/s", spread), ("peak_gb", used, "GB", (used, used)),
                ("slowest_rank_percent", waited, "%", (waited, waited)), ("wait_percent", of_waits, "%", (of_waits, of_waits)),
                ("plan_memory_error_percent", memory_error, "%", (memory_error, memory_error)),
                ("plan_time_error_percent", 100 * step["error"], "%", (100 * step["error"],) * 2)):
            host.add(f"{name}.expert_parallel{divided_by}.{figure}", value, unit, of_value, command, bench["device"])
        found[divided_by] = rate, spread, used, command, bench["device"]
    rate, spread, used, command, card = max(found.values())
    host.add(f"{name}.tok_s_gpu", rate, "tok/s", spread, command, card)
    host.add(f"{name}.peak_gb", used, "GB", (used, used), command, card)


def olmoe(host):
    sets = ["training.micro_batch_size=4"]
    one = host.bench("olmoe.1", "olmoe-1b-7b-bench", 1, [*sets, "training.global_batch_size=16"])
    all_of_them = host.bench("olmoe.all", "olmoe-1b-7b-bench", host.gpus,
                             [*sets, f"training.global_batch_size={16 * host.gpus}", "distributed.zero_stage=1"])
    alone, *_ = rates(one)
    host.add(f"moe.olmoe.parka.{host.gpus}gpu.of_one_gpu", rates(all_of_them)[0] / alone, "1", [x / alone for x in rates(all_of_them)[1:]],
             f"scripts/research/eight_gpus.py OUT --gpus {host.gpus} olmoe: parka bench configs/olmoe-1b-7b-bench.json, distributed.zero_stage=1, "
             "4 micro-batches of 4 sequences on each GPU, beside one of them alone", all_of_them["device"])


def muon(host):
    """In turns, for GPUs get warmer."""
    seconds = {"adamw": [], "muon": []}
    for turn in (1, 2):
        for kind, of_kind in seconds.items():
            bench = host.bench(f"muon.{kind}.{turn}", "llama2-7b-bench", host.gpus,
                               ["training.global_batch_size=512", "distributed.zero_stage=1", f"optimizer.kind={kind}"])
            of_kind.append(statistics.median(bench["step_seconds"]))
    costs = [100 * (muon / adamw - 1) for adamw, muon in zip(*seconds.values())]
    host.add(f"muon.llama2-7b.{host.gpus}gpu.step_cost_percent", statistics.mean(costs), "percent", (min(costs), max(costs)),
             f"scripts/research/eight_gpus.py OUT --gpus {host.gpus} muon: parka bench configs/llama2-7b-bench.json, 512 sequences, "
             "distributed.zero_stage=1, optimizer.kind=muon over adamw, in two turns", bench["device"])


PARTS = {part.__name__: part for part in (check, drill, qwen3, olmoe, muon)}


def own_commit():
    result = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=ROOT, check=False)
    return result.stdout.strip()


def main():
    parser = ScriptParser(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}")
    parser.add_argument("--gpus", type=int, choices=(4, 8), default=8)
    parser.add_argument("--parka", type=Path, default=ROOT / "build/cuda/parka")
    parser.add_argument("--steps", type=positive, default=5, help="of a benchmark (default 5)")
    parser.add_argument("--memory", type=positive, default=139, metavar="GB", help="of a GPU (default 139)")
    parser.add_argument("--commit", default=own_commit(), help="of the figures (default: that of this checkout)")
    arguments = parser.parse_intermixed_args()
    unknown = [part for part in arguments.parts if part not in PARTS]
    if unknown:
        parser.error(f"no part {unknown[0]}; take {', '.join(PARTS)}")
    if os.geteuid() == 0:  # Open MPI refuses root without
        os.environ.update(OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    arguments.out = arguments.out.absolute()
    arguments.out.mkdir(parents=True, exist_ok=True)
    host = Host(arguments)
    for part in arguments.parts or PARTS:
        if part != "check" and not os.access(host.parka, os.X_OK):
            parser.error(f"{host.parka}: no program; the part check builds build/cuda/parka, or name another with --parka")
        PARTS[part](host)


run_main(main)
