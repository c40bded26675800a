"""What the scripts here that measure `parka train` share: token files, runs of the program, their records, the report."""
import argparse
import array
import contextlib
import datetime
import glob
import json
import os
import random
import shlex
import signal
import subprocess
import sys
from pathlib import Path

SKIPPED_STEPS = 5  # at the start of a run: kernels are loaded, clocks rise
TOKENS_AT_MOST = 1 << 24  # of a made-up file; a longer run goes through it again


def fail(message, code=2):
    """One line: what, where, what to do. Codes are those of `parka`: 1 a measurement failed, 2 bad input, 4 I/O."""
    print(f"{os.path.basename(sys.argv[0])}: error: {message}", file=sys.stderr)
    sys.exit(code)


def run_main(main):
    try:
        main()
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}", 4)


def at_least(lowest):
    """A type of argument."""
    def number(text):
        if not text.isdigit() or int(text) < lowest:
            raise argparse.ArgumentTypeError(f"expected a whole number from {lowest}, got {text}")
        return int(text)
    return number


positive = at_least(1)


def report_file(text):
    """Known before anything is measured."""
    path = Path(text)
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"no folder {path.parent}; make it first")
    return path


class ScriptParser(argparse.ArgumentParser):
    """Says in one line what is wrong."""

    def __init__(self, description):
        super().__init__(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)

    def error(self, message):
        fail(f"{message}; see --help")


class RunParser(ScriptParser):
    """Has the options of all scripts that measure a run of a config."""

    def __init__(self, description):
        super().__init__(description)
        self.add_argument("parka", type=Path, metavar="PARKA", help="the program")
        self.add_argument("config", type=Path, metavar="CONFIG")
        self.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for parka train")
        self.add_argument("--ranks", type=positive, default=1, help="number of ranks; several are started by --ranks (default 1)")
        self.add_argument("--threads", type=positive, help="CPU threads, as for parka")
        self.add_argument("--json", type=report_file, required=True, metavar="OUT", help="file for command, date and figures")


def program(arguments):
    threads = ["--threads", str(arguments.threads)] if arguments.threads else []
    return [os.path.abspath(arguments.parka), *threads]


def options_of(sets):
    return [word for pair in sets for word in ("--set", pair)]


def resolved_config(arguments):
    command = [*program(arguments), "config", "show", str(arguments.config), *options_of(arguments.set)]
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        fail(f"{arguments.parka}: {error.strerror}; give the program parka")
    if shown.returncode != 0:
        fail(f"{arguments.config}: {error_line(shown.stderr)}")
    return json.loads(shown.stdout)


def error_line(text):
    """Of what a program and its launcher have printed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    own = [line for line in lines if line.startswith("parka: ")]
    return (own or lines or ["no message"])[-1].removeprefix("parka: ").removeprefix("error: ")


def bench_lines(bench, what):
    """What bench_kernels measures, a JSON object for each line."""
    try:
        result = subprocess.run([bench, what], capture_output=True, text=True, check=False)
    except OSError as error:
        fail(f"{bench}: {error.strerror}; build it with the preset cuda, or name it with --bench")
    if result.returncode != 0:
        fail(f"{bench} {what} ended with {result.returncode}: {error_line(result.stderr)}", 1)
    return [json.loads(line) for line in result.stdout.splitlines()]


def write_tokens(path, count, config):
    """Random ids below the vocabulary's size, always the same ones; a file that is there and long enough stays."""
    code = "H" if config["model"]["vocab_size"] <= 65536 else "I"
    size = array.array(code).itemsize
    if path.exists() and path.stat().st_size >= count * size:
        return
    generator, vocab = random.Random(1), config["model"]["vocab_size"]
    with open(path, "wb") as file:
        for begin in range(0, count, 1 << 20):
            words = array.array("I", generator.randbytes(4 * min(1 << 20, count - begin)))
            array.array(code, (word % vocab for word in words)).tofile(file)


def shared_options(config, folder, steps):
    """For --set: the config's own files where they exist, else folder/tokens.npy; its schedule; no evaluation."""
    schedule_steps = config["optimizer"]["schedule"]["total_steps"] or config["training"]["steps"]
    sets = [f"optimizer.schedule.total_steps={schedule_steps}", "data.eval=[]", "training.eval_interval=0", "evaluation.sets=[]",
            "evaluation.tasks=[]"]
    train = config["data"]["train"]
    if train and all(os.path.exists(entry) or glob.glob(entry) for entry in train):
        return sets
    per_step = config["training"]["global_batch_size"] * config["data"]["sequence_length"]
    count = max(per_step, min(steps * per_step, TOKENS_AT_MOST))
    path = Path(folder).resolve() / "tokens.npy"
    write_tokens(path, count, config)
    dtype = "uint16" if config["model"]["vocab_size"] <= 65536 else "uint32"
    joined = [] if config["data"]["document_end"] >= 0 else ["data.documents=joined"]  # nothing else marks documents
    return [*sets, *joined, f"data.train={json.dumps([str(path)])}", "data.weights=[]", f"data.token_dtype={dtype}",
            "data.loss_mask=false", "data.checksum=false"]


@contextlib.contextmanager
def training(arguments, sets, log, extra=(), environment=None):
    """A `parka train` under way, whose messages go to the file `log`. Whoever leaves early ends it."""
    ranks = ["--ranks", str(arguments.ranks)] if arguments.ranks > 1 else []
    command = [*program(arguments), "train", str(arguments.config), *ranks, *options_of([*arguments.set, *sets]), *extra]
    with open(log, "w", encoding="utf-8") as file:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                                   env={**os.environ, **(environment or {})}, start_new_session=True)
        try:
            yield process
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def train(arguments, sets, log, environment=None):
    """Trains to the end; anything else ends the script."""
    with training(arguments, sets, log, environment=environment) as process:
        code = process.wait()
    require_success(code, log)


def require_success(code, log):
    if code != 0:
        fail(f"parka train ended with {code}: {error_line(Path(log).read_text(encoding='utf-8'))} ({log})", 1)


def records(folder, kind="train"):
    """Those of the newest start of the program."""
    found = []
    for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            continue  # the program is writing it
        if record.get("kind") == "start":
            found.clear()
        found.append(record)
    return [record for record in found if record.get("kind") == kind]


def wall_seconds_of_steps(train_records):
    """By step: seconds of the wall clock since the record before."""
    seconds = {}
    if not all("wall_seconds" in record for record in train_records):
        fail("the records of the run have no wall_seconds: this parka is too old")
    for before, record in zip(train_records, train_records[1:]):
        if record["step"] == before["step"] + 1:
            seconds[record["step"]] = record["wall_seconds"] - before["wall_seconds"]
    return seconds


def checkpoints(folder):
    """Complete ones, by step."""
    return {int(manifest.parent.name[len("step_"):]): manifest.parent
            for manifest in sorted(Path(folder).glob("step_*/manifest.json")) if manifest.parent.name[len("step_"):].isdigit()}


def write_report(arguments, figures, details):
    """Prints the figures; writes them with how they came about."""
    for name, value in figures.items():
        print(f"{name} = {value:.6g}")
    date = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")
    report = {"command": shlex.join(sys.argv), "date": date, "figures": figures, **details}
    arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
