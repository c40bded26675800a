#!/usr/bin/env python3
"""Keeps docs/results/figures.jsonl, and writes the tables of pages.

    scripts/research/figures.py add --commit COMMIT [--gpus N] MODEL.RECIPE.json... [--kernels FILE] [--attention FILE]
    scripts/research/figures.py show OUT/MODEL.RECIPE...           prints a table of those runs
    scripts/research/figures.py tables [--check] [--parka PROGRAM]  writes the tables of README.md and docs/

add: MODEL.RECIPE.json is what `parka bench --json` wrote, olmo-1b.bf16.json for example; the files are what bench_kernels printed
and what `attention_vs_cudnn.py --json` wrote. A newer line replaces an older one of its name.

tables: what stands between `<!-- table: NAME -->` and `<!-- end -->` on a page is written anew, by the section NAME of tables.md
beside this script, or from what `parka plan` says. In tables.md {FIGURE} stands for the value of a figure, {FIGURE~} for that with
the least and the most, {FIGURE / FIGURE} and {FIGURE - FIGURE} for what they say. A format of Python may follow after a colon. {plan}
stands for GB in use by `parka plan CONFIG`, with the keys that the section's line "plan: CONFIG KEY=VALUE ..." has and those of the
row. With --check nothing is written, and pages that differ are named.

Exit codes: 0 done, 1 a page differs (--check), 2 something is wrong with the input or the options.
"""
import argparse
import datetime
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from run_metrics import fail  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]
FIGURES = ROOT / "docs/results/figures.jsonl"
TEMPLATES = Path(__file__).with_name("tables.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
CELL = re.compile(r"\{([\w.-]+)(~)?(?: ([/-]) ([\w.-]+))?(?::([^}]*))?\}")
FORMATS = {"tok/s": ",.0f", "GB": ".1f", "TFLOP/s": ",.0f", "ms": ".1f", "us": ".1f", "samples/s": ".1f", "%": ".2f"}


def read_figures():
    with open(FIGURES, encoding="utf-8") as file:
        return {line["name"]: line for line in map(json.loads, file)}


# ---- new figures ----

def step_figures(bench, model, recipe, gpus):
    """Yields (name, value, unit, (least, most)) of whole steps."""
    speeds = [bench["tokens_per_step"] / seconds for seconds in bench["step_seconds"]]
    step = f"step.{model}.{recipe}.{gpus}gpu"
    yield f"{step}.tok_s_gpu", bench["tokens_per_second"], "tok/s", (min(speeds), max(speeds))
    used = bench["used_bytes"] / 1e9
    yield f"{step}.peak_gb", used, "GB", (used, used)
    error = 100 * ((bench["planned_bytes"] + bench["context_bytes"]) / bench["used_bytes"] - 1)
    yield f"plan.{model}.{recipe}.error_percent", error, "%", (error, error)
    if "floor_seconds" in bench:
        fractions = [bench["floor_seconds"] / seconds for seconds in bench["step_seconds"]]
        yield (f"roofline.{model}.{recipe}.fraction", statistics.median(fractions), "1",
               (min(fractions), max(fractions)))
    busy = sum(op["seconds"] for op in bench["ops"]) / bench["timed_step_seconds"]
    yield f"busy.{model}.{recipe}.fraction", busy, "1", (busy, busy)


def kernel_figures(lines):
    """The same of kernels alone; rates vary as the times of their runs do."""
    for line in lines:
        if line["op"].startswith("attention_"):
            continue  # beside cuDNN's: attention_figures
        value = line["copy_fraction"]
        spread = tuple(value * line["us"] / line[time] for time in ("us_most", "us_least"))
        op = "optimizer.adamw_fp8" if line["op"] == "adamw_step.fp8" else f"kernel.{line['op']}.{line['model']}"
        yield f"{op}.copy_fraction", value, "1", spread


def attention_figures(lines):
    """Attention beside cuDNN; each line has two measurements of Parka's and one of cuDNN's."""
    for line in lines:
        for direction, key in (("fwd", "forward"), ("bwd", "backward")):
            name = f"attention.{direction}.d128.s{line['length']}"
            values, cudnn = line[key], line["cudnn_" + key]
            yield f"{name}.tflops", statistics.mean(values), "TFLOP/s", (min(values), max(values))
            yield (f"{name}.vs_cudnn", statistics.mean(values) / cudnn, "1",
                   (min(values) / cudnn, max(values) / cudnn))


def read_json(path, lines=False):
    try:
        text = Path(path).read_text(encoding="utf-8")
        return [json.loads(line) for line in text.splitlines()] if lines else json.loads(text)
    except OSError as error:
        fail(f"{path}: {error.strerror}")
    except ValueError:
        fail(f"{path}: is no JSON; give what `parka bench --json` or a measuring script wrote")


def add(options):
    figures = read_figures()

    def keep(measured, command, card):
        for name, value, unit, spread in measured:
            figures[name] = {"name": name, "value": float(f"{value:.6g}"), "unit": unit,
                             "spread": [float(f"{x:.6g}") for x in spread], "command": command,
                             "commit": options.commit, "date": str(datetime.date.today()), "card": card}

    for path in options.files:
        model, recipe = Path(path).name.removesuffix(".json").rsplit(".", 1)
        bench = read_json(path)
        keep(step_figures(bench, model, recipe, options.gpus), f"scripts/research/one_gpu.sh OUT {model}.{recipe}", bench["device"])
    if options.kernels:
        device, *lines = read_json(options.kernels, lines=True)
        keep(kernel_figures(lines), "bench_kernels", device["device"])
    if options.attention:
        lines = read_json(options.attention, lines=True)
        keep(attention_figures(lines), "scripts/research/attention_vs_cudnn.py", lines[0]["card"])
    with open(FIGURES, "w", encoding="utf-8") as file:
        file.writelines(json.dumps(figure) + "\n" for figure in figures.values())


def show(options):
    print(row(("model", "recipe", "tokens/s (least to most)", "TFLOP/s", "in use", "planned less used", "floor / step")))
    print("|---" * 7 + "|")
    for run in options.files:
        model, recipe = Path(run).name.rsplit(".", 1)
        bench = read_json(run + ".json")
        measured = {name: (value, spread) for name, value, _, spread in step_figures(bench, model, recipe, 1)}
        speed, (least, most) = measured[f"step.{model}.{recipe}.1gpu.tok_s_gpu"]
        floor = "not measured"  # without --roofline
        if "floor_seconds" in bench:
            floor = f"{statistics.median(bench['floor_seconds'] / s for s in bench['step_seconds']):.3f}"
        print(row((model, recipe, f"{speed:,.0f} ({least:,.0f} to {most:,.0f})", f"{1e-12 * bench['model_flops']:.0f}",
                   f"{bench['used_bytes'] / 1e9:.1f} GB",
                   f"{100 * ((bench['planned_bytes'] + bench['context_bytes']) / bench['used_bytes'] - 1):+.2f} %", floor)))


# ---- tables of pages ----

def row(cells):
    return "| " + " | ".join(cells) + " |"


def number(value, form):
    """Zero without a minus, and per cent with a space, as in "95.3 %"."""
    text = format(value, form)
    if re.fullmatch(r"-0[.0]*%?", text):
        text = text.replace("-", "+" if "+" in form else "")
    return text.replace("%", " %")


def cell(match, figures):
    """What stands for {FIGURE}."""
    name, spread, operation, other, form = match.groups()
    for each in filter(None, (name, other)):
        if each not in figures:
            fail(f"{TEMPLATES.name}: {match[0]}: figures.jsonl has no {each}")
    if operation:
        first, second = figures[name]["value"], figures[other]["value"]
        return number(first / second if operation == "/" else first - second, form or ".2f")
    figure = figures[name]
    form = form or FORMATS.get(figure["unit"], ".4g")
    value, least, most = (number(x, form) for x in (figure["value"], *figure["spread"]))
    return f"{value} ({least} to {most})" if spread else value


def planned(text, plans):
    """The rows of a section that begins with "plan: CONFIG KEY=VALUE ...". A row has "4 x 384 tokens" and more keys between backticks."""
    head, _, rows = text.partition("\n")
    config, *keys = head.removeprefix("plan: ").split()
    for line in rows.strip().splitlines():
        if "{plan}" in line:
            micro_batch, length = re.search(r"(\d+) x (\d+) tokens", line).groups()
            own = [f"training.micro_batch_size={micro_batch}", f"data.sequence_length={length}", *re.findall(r"`([\w.]+=[^`]+)`", line)]
            plan = plans.plan(config, *(word for key in (*keys, *own) for word in ("--set", key)))
            line = line.replace("{plan}", plans.in_use(plan, ".2f"))
        yield line


def template_tables(plans):
    """{name: its text}: sections of tables.md, with values for figures and plans."""
    figures, texts = read_figures(), {}
    _, *sections = re.split(r"^## ", TEMPLATES.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for title, text in (section.split("\n", 1) for section in sections):
        text = text.strip()
        texts[title] = "\n".join(planned(text, plans)) if text.startswith("plan: ") else CELL.sub(lambda match: cell(match, figures), text)
    return texts


class Plans:
    """Tables of what `parka plan` says; one method for each."""
    MEMORY = (24, 48, 80, 141)
    MODELS = (("Qwen3-0.6B", "qwen3-0.6b"), ("OLMo-1B", "olmo-1b"), ("Llama-3-8B", "llama3-8b"), ("a Llama of 32B", "llama-30b"))
    EXACT = "--set precision.recipe=parka --set precision.head=compute --set precision.group_size=32"
    LEAN = (f"{EXACT} --set precision.weight_copies=none --set optimizer.gradient=bf16 --set optimizer.master=fp24_split "
            "--set optimizer.release_gradients=true")
    LADDER = (("bf16, 8 x 80 GB", "--set precision.recipe=bf16 --gpus 8 --memory-limit 80", None),
              ("141 GB", f"{EXACT} --gpus 1 --memory-limit 141", None),
              ("80 GB", f"{EXACT} --gpus 1 --memory-limit 80", "80gb"),
              ("48 GB", f"{EXACT} --set precision.weight_copies=none --gpus 1 --memory-limit 48", "48gb"),
              ("24 GB", f"{EXACT} --set precision.weight_copies=none --gpus 1 --memory-limit 24", "24gb_exact"),
              ("46 GB, lean", f"{LEAN} --set training.global_batch_size=1 --set training.micro_batch_size=1 "
               "--set precision.offload_blocks=24 --gpus 1 --memory-limit 46", "46gb"),
              ("24 GB, lean", f"{LEAN} --set training.global_batch_size=8 --set training.micro_batch_size=8 --gpus 1 --memory-limit 24", "24gb"),
              ("12 GB, lean", f"{LEAN} --set training.global_batch_size=3 --set training.micro_batch_size=3 --gpus 1 --memory-limit 12", "12gb"))

    def __init__(self, parka):
        self.parka = parka

    def plan(self, config, *words):
        try:
            result = subprocess.run([self.parka, "plan", f"configs/{config}.json", "--json", *words], capture_output=True, text=True, cwd=ROOT)
            if result.returncode != 0 and result.stderr.strip():
                fail(result.stderr.strip())
            return json.loads(result.stdout)
        except OSError as error:
            fail(f"{self.parka}: cannot be run ({error.strerror}); build it, or name the program with --parka")
        except ValueError:  # no text, or no JSON
            fail(f"{self.parka}: prints no plan; build parka, or name the program with --parka")

    @staticmethod
    def in_use(plan, form=".1f"):
        return format((plan["total_bytes"] + plan["context_bytes"]) / 1e9, form)

    def fits(self):
        """What it takes to fit: nothing, changes of the config, or more GPUs."""
        def needs(plan):
            if plan["fits"]:
                return "yes"
            if "fits_with" in plan:
                changes = len(plan["fits_with"]["changes"])
                return f"{changes} change{'s' if changes > 1 else ''}"
            return f"{plan['fits_on']['gpus']} GPUs" if "fits_on" in plan else "no"

        yield row(("model", "context", *(f"{gigabytes} GB" for gigabytes in self.MEMORY)))
        yield "|---" * (2 + len(self.MEMORY)) + "|"
        for name, config in self.MODELS:
            text = (ROOT / f"configs/{config}.json").read_text(encoding="utf-8")
            context = re.search(r'"sequence_length": *(\d+)', text)[1]
            yield row((name, context, *(needs(self.plan(config, "--memory-limit", str(gigabytes), "--set", "precision.recipe=parka"))
                                        for gigabytes in self.MEMORY)))

    RECIPES = (("parka", "GEMMs, head, all saved activations but the attention output, moments", "by default"),
               ("coat", "GEMMs, most saved activations, moments", "if `parka` loses too much, or as the paper has it"),
               ("fp8_linear", "GEMMs", "as the simplest kind of FP8"),
               ("fp8_block", "GEMMs, a scale per 128 numbers", "if outliers spoil one scale per tensor"),
               ("coat_activation", "GEMMs, most saved activations", "to tell costs apart"),
               ("coat_optimizer", "moments", "on GPUs without FP8"),
               ("bf16", "nothing", "to compare with"),
               ("fp32", "nothing", "to find bugs"))

    def recipes(self):
        """What each recipe costs in memory by plan, and in loss and time as measured."""
        figures = read_figures()

        def measured(name, form):
            return format(figures[name]["value"], form) if name in figures else "-"

        yield row(("recipe", "in FP8", "bytes per parameter", "7B: GB", "tokens/s", "loss above bf16: 110M", "342M", "take it"))
        yield "|---" * 8 + "|"
        for recipe, formats, use in self.RECIPES:
            plan = self.plan("llama2-7b", "--gpus", "1", "--memory-limit", "1000", "--set", f"precision.recipe={recipe}")
            state = sum(plan["bytes"].get(part, 0) for part in ("weights", "fp8 weights", "gradients", "master weights", "optimizer states"))
            parameters = plan["bytes"]["weights"] / (4 if recipe == "fp32" else 2)
            gaps = [measured(f"loss_gap.{model}.linux.{recipe}.nats_per_token", "+.4f") if recipe != "bf16" else "0" for model in ("olmo-150m", "olmo-350m")]
            yield row((f"`{recipe}`", formats, f"{state / parameters:.1f}", self.in_use(plan, ".0f"),
                       measured(f"step.llama2-7b.{recipe}.1gpu.tok_s_gpu", ",.0f"), *gaps, use))

    COMMON_KEYS = (("data.train", "token files to train on; a pattern takes all files that match"),
                   ("data.eval", "held-out token files"),
                   ("data.sequence_length", "tokens in a sequence: the context"),
                   ("data.token_dtype", "`uint32` for vocabularies of more than 65,536 ids; data.json says it"),
                   ("data.documents", "`separate`: a token sees only its own document"),
                   ("data.loss_mask", "`true` for chats: only marked tokens count in the loss"),
                   ("checkpoint.folder", "where the run is saved"),
                   ("checkpoint.interval", "steps between saves; `0` saves only at the end and when stopped"),
                   ("checkpoint.keep", "how many of the newest checkpoints stay"),
                   ("checkpoint.init_from", "an imported model or a run whose weights are the start"),
                   ("training.steps", "length of the run; a larger number continues a finished one"),
                   ("training.global_batch_size", "sequences in a step, on all GPUs together"),
                   ("training.micro_batch_size", "sequences that a GPU computes at once; the first thing to lower when memory is short"),
                   ("training.eval_interval", "steps between evaluations"),
                   ("training.eval_sequences", "sequences of an evaluation; `0` takes all of `data.eval`, which may take long"),
                   ("training.seed", "another number gives other initial weights; `data.seed` gives another order"),
                   ("optimizer.lr", "peak learning rate"),
                   ("optimizer.schedule.kind", "`cosine`, `linear`, `wsd` or `constant`"),
                   ("optimizer.schedule.warmup_steps", "steps until the peak"),
                   ("optimizer.weight_decay", "of matrices"),
                   ("optimizer.gradient", "`bf16` saves 2 bytes per parameter"),
                   ("optimizer.offload", "`true` keeps masters and moments in host memory"),
                   ("precision.recipe", "which tensors are FP8: [recipes.md](recipes.md)"),
                   ("precision.recompute", "`block` saves most activations for a third more time"),
                   ("precision.eval", "`bf16` evaluates the model as it is exported"),
                   ("finetune.method", "`lora` or `qst` trains few parameters ([finetuning.md](finetuning.md))"),
                   ("distributed.zero_stage", "1 to 3 divide state over the GPUs ([distributed.md](distributed.md))"))

    def reference(self):
        """What `parka config reference` prints."""
        try:
            return subprocess.run([self.parka, "config", "reference"], capture_output=True, text=True, check=True).stdout.strip()
        except (OSError, subprocess.CalledProcessError):
            fail(f"{self.parka}: does not print its keys; build it, or name the program with --parka")

    def all_keys(self):
        yield self.reference()

    def common_keys(self):
        defaults = dict(re.findall(r"^\| `([\w.]+)` \| [^|]* \| ([^|]*) \|", self.reference(), re.MULTILINE))
        yield row(("key", "default", ""))
        yield "|---" * 3 + "|"
        for key, text in self.COMMON_KEYS:
            if key not in defaults:
                fail(f"{key}: there is no such key any more; change COMMON_KEYS in {Path(__file__).name}")
            yield row((f"`{key}`", defaults[key], text))

    def ladder(self):
        figures = read_figures()
        yield row(("GPU", "arguments", "in use, GB", "host, GB", "changes", "tokens/s"))
        yield "|---" * 6 + "|"
        for name, words, measured in self.LADDER:
            plan = self.plan("llama3-8b", "--set", "data.sequence_length=4096", "--fit", "--host-memory", "2000", *words.split())
            changes = " ".join(f"`{change['set']}`" for change in plan["changes"])
            shown = words.replace(self.LEAN, "LEAN").replace(self.EXACT, "EXACT")
            speed = f"{figures[f'step.llama3-8b.{measured}.tok_s_gpu']['value']:,.0f}" if measured else "not measured"
            yield row((name, f"`{shown}`", self.in_use(plan), f"{plan['host_bytes'] / 1e9:.1f}", changes or "none", speed))
        yield f"\nEXACT is `{self.EXACT}`, and LEAN is `{self.LEAN.replace(self.EXACT, 'EXACT')}`."

    def paper_models(self):
        """Whole models beside the paper's table 7, of which the first row of a model without a number did not fit."""
        from paper_memory import recipe_options
        from paper_tables import END_TO_END
        figures = read_figures()

        def numbers(values, form):
            return " / ".join("-" if value is None else format(value, form) for value in values)

        yield row(("model, GPUs", "paper, GB: BF16 / COAT", "Parka, GB: `bf16` / `coat` / `parka`", "paper, tokens/s", "Parka, tokens/s"))
        yield "|---" * 5 + "|"
        for name, paper in END_TO_END.items():
            model, gpus = name.split(".")
            config, batch = {"7b": ("olmo-7b", 1 if gpus == "1" else 2), "13b": ("llama2-13b", 1), "30b": ("llama-30b", 1)}[model]
            keys = ["model.vocab_size=50304", "model.norm=layernorm", "distributed.zero_stage=3", f"training.micro_batch_size={batch}",
                    f"training.global_batch_size={8 * batch * int(gpus)}", *(["data.sequence_length=1024"] if name == "13b.2" else [])]
            planned = [self.in_use(self.plan(config, "--gpus", gpus, "--memory-limit", "1000",
                                             *(word for key in (*keys, *recipe_options(recipe)) for word in ("--set", key))))
                       for recipe in ("bf16", "coat", "parka")]
            speeds = [figures.get(f"end_to_end.{name}.{recipe}.tok_s_gpu", {}).get("value") for recipe in ("bf16", "coat", "parka")]
            yield row((f"{model.upper()}, {gpus}", numbers([paper[recipe][2] for recipe in ("bf16", "coat")], ".1f"), " / ".join(planned),
                       numbers([paper[recipe][4] for recipe in ("bf16", "coat")], ",.0f"), numbers(speeds, ",.0f")))


def peers():
    """Others and Parka in one call on one card, of docs/results/peers.jsonl."""
    yield row(("program", "model, card, batch", "tokens/s", "GB", "Parka in the same call", "GB", "Parka is"))
    yield "|---" * 7 + "|"
    for line in read_json(FIGURES.with_name("peers.jsonl"), lines=True):
        yield row((f"[{line['name']}]({line['source']}) {line['commit']}", f"{line['model']}, {line['card'].removeprefix('NVIDIA ')}, {line['batch']}",
                   f"{line['tok_s']:,.0f}", f"{line['memory_gb']:.1f}", f"{line['parka_tok_s']:,.0f} (`{line['recipe']}`, {line['date']})",
                   f"{line['parka_memory_gb']:.1f}", f"{line['parka_tok_s'] / line['tok_s']:.2f} x"))


def tables(options):
    plans, used, wrong = Plans(options.parka), set(), []
    texts = template_tables(plans)
    made = {"peers": peers, "fits": plans.fits, "recipes": plans.recipes, "common-keys": plans.common_keys, "all-keys": plans.all_keys,
            "ladder": plans.ladder, "paper-models": plans.paper_models}

    def written_by(page):
        def text_of(match):
            name = match[2]
            if name not in texts and name not in made:
                fail(f"{page}: {name}: there is no such table in {TEMPLATES.name}")
            used.add(name)
            if name not in texts:
                texts[name] = "\n".join(made[name]())
            return f"{match[1]}\n{texts[name]}\n\n{match[3]}"
        return text_of

    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        page, name = path.read_text(encoding="utf-8"), str(path.relative_to(ROOT))
        written = MARKED.sub(written_by(name), page)
        if written != page:
            wrong.append(name)
            if not options.check:
                path.write_text(written, encoding="utf-8")
    unused = sorted(set(texts) - used)
    if unused:
        fail(f"{TEMPLATES.name}: no page has the table {unused[0]}; delete it")
    for name in wrong:
        print(f"{name}: {'its tables are not those of today; scripts/research/figures.py tables writes them' if options.check else 'written'}")
    sys.exit(1 if wrong and options.check else 0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    adding = commands.add_parser("add", help="turns measurements into figures")
    adding.add_argument("--commit", required=True)
    adding.add_argument("--gpus", type=int, default=1)
    adding.add_argument("--kernels", metavar="FILE")
    adding.add_argument("--attention", metavar="FILE")
    adding.add_argument("files", nargs="*")
    showing = commands.add_parser("show", help="prints a table of runs")
    showing.add_argument("files", nargs="+")
    writing = commands.add_parser("tables", help="writes the tables of pages")
    writing.add_argument("--check", action="store_true")
    writing.add_argument("--parka", default=str(ROOT / "build/release/parka"), metavar="PROGRAM")
    options = parser.parse_args()
    {"add": add, "show": show, "tables": tables}[options.command](options)


if __name__ == "__main__":
    main()
