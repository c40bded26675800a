#!/usr/bin/env python3
"""Hashes of what tiny trainings on the CPU compute, to show that two builds of Parka give equal bits.

    tests/equal_bits/hash_runs.py OLD/parka --jobs 2 --json old.json
    tests/equal_bits/hash_runs.py NEW/parka --jobs 2 --check old.json

Prints `name losses checkpoint` for each run of run_cases.py. `losses` is a hash of the numbers of metrics.jsonl, as they
are written: of train, eval, eval_set, task, quantization and moments records, and of what `parka eval` and `parka generate`
print where a run has them. `checkpoint` is one of the tensors of all its checkpoints: the name, type, shape and bytes of
each in its file, and of which piece of a tensor it is. Neither covers times, paths, manifests or configs.

Ends with 1 where a run fails, where hashes differ from the file of --check, or where two runs differ that promise the same
bits (a resumed one and a straight one, say); with 2 on bad input. RANKS_STARTER in the environment says who starts several
ranks (tests/support/starters.py): all starters give the same bits.

A recorded file is good on one kind of CPU only, and with the compiler and libraries that it was made with. Sums are taken in
the order of Eigen's vectors, 16 numbers at a time with AVX-512, 8 with AVX2, and Eigen divides long sums of products into
blocks by the sizes of the CPU's caches: of a build with -march=x86-64-v3 no run has the hashes of one for the same machine's
AVX-512. The file says what it was made on, and --check says what is different here. The old program, built on the same
machine with the same options, is always a fair comparison."""
import argparse
import concurrent.futures
import dataclasses
import fnmatch
import hashlib
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import tempfile

from run_cases import all_cases, merged, write_data

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "support"))
import starters  # noqa: E402

# Of each kind of record; None is all but NOT_HASHED.
FIELDS = {
    "train": ("step", "loss", "grad_norm", "lr", "applied", "targets"),
    "eval": ("step", "loss", "num_targets"),
    "eval_set": ("step", "set", "loss", "num_targets"),
    "task": None,
    "quantization": None,
    "moments": None,
}
NOT_HASHED = ("time", "wall_seconds", "seconds")
# Tokens show a changed bit only where it changes a choice, so there are many.
MANY_PROMPTS = tuple(word for i in range(40) for word in ("--prompt-tokens", f"{i},{i + 7}"))
GENERATIONS = (
    ("--prompt-tokens", "1,2,3", "--tokens", "10", "--temperature", "0"),
    (*MANY_PROMPTS, "--tokens", "22", "--batch", "7"),
    (*MANY_PROMPTS[:8], "--tokens", "12", "--top-k", "20", "--top-p", "0.9", "--seed", "3"),
    ("--prompt-tokens", "4,5,6", "--tokens", "60", "--temperature", "0.8"),  # past the context
)


class RunFailed(Exception):
    pass


@dataclasses.dataclass
class Hashes:
    losses: str
    checkpoint: str
    tensors: str  # of whole tensors, however they are divided over files
    train_losses: list  # as written, by step


def short_hash(parts):
    """Of byte strings, and of where each ends."""
    result = hashlib.blake2b(digest_size=8)
    for part in parts:
        result.update(struct.pack("<Q", len(part)))
        result.update(part)
    return result.hexdigest()


def numbers_as_written(text):
    return json.loads(text, parse_float=str, parse_int=str)


def canonical(value):
    return json.dumps(value, sort_keys=True).encode()


def numeric_records(run_folder):
    """(numbers of each record of metrics.jsonl, sorted, for the order of kinds is not what is compared; losses of steps; the
    program's commit, empty where it does not say)"""
    numbers, losses, commit = [], [], ""
    with open(os.path.join(run_folder, "metrics.jsonl"), encoding="utf-8") as file:
        for record in map(numbers_as_written, file):
            kind = record["kind"]
            if kind == "start":
                commit = record["commit"]
            if kind == "train":
                losses.append(record["loss"])
            if kind in FIELDS:
                fields = FIELDS[kind] or [field for field in record if field not in NOT_HASHED]
                numbers.append((int(record["step"]), kind, canonical({field: record[field] for field in fields})))
    return [kind.encode() + text for _, kind, text in sorted(numbers)], losses, commit


def read_tensors(path):
    """(name, type, shape, whole shape, first element, bytes) of each tensor or piece of one in a safetensors file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))
        data = file.read()
    pieces = json.loads(header.pop("__metadata__", {}).get("parka_pieces", "{}"))
    for name, tensor in sorted(header.items()):
        begin, end = tensor["data_offsets"]
        piece = pieces.get(name, {"shape": tensor["shape"], "begin": 0})
        yield name, tensor["dtype"], tensor["shape"], piece["shape"], piece["begin"], data[begin:end]


def hash_checkpoints(run_folder):
    """(of tensors as they lie in files, of whole tensors)"""
    in_files, whole = [], []
    for step in sorted(name for name in os.listdir(run_folder) if re.fullmatch(r"step_\d+", name)):
        folder = os.path.join(run_folder, step)
        pieces = []
        for name in sorted(name for name in os.listdir(folder) if name.endswith(".safetensors")):
            for tensor, dtype, shape, whole_shape, first, data in read_tensors(os.path.join(folder, name)):
                in_files += [canonical([step, name, tensor, dtype, shape, whole_shape, first]), data]
                pieces.append((tensor, first, dtype, whole_shape, data))
        parts = {}
        for tensor, _, dtype, whole_shape, data in sorted(pieces, key=lambda piece: piece[:2]):
            parts.setdefault((tensor, dtype, tuple(whole_shape)), []).append(data)
        for key, data in parts.items():
            whole += [canonical([step, *key]), b"".join(data)]
    if not in_files:
        raise RunFailed("there is no checkpoint")
    return short_hash(in_files), short_hash(whole)


def run_parka(program, folder, *arguments, ranks=1, threads=1):
    result = starters.run(ranks, [program, "--threads", str(threads), *arguments], cwd=folder, timeout=300)
    if result.returncode != 0:
        lines = (result.stdout + result.stderr).strip().splitlines() or [""]
        reason = next((line for line in lines if " error: " in line), lines[-1])  # mpirun has much to say after it
        raise RunFailed(f"exit code {result.returncode}: {reason}")
    return result


def train(program, folder, config, **options):
    path = os.path.join(folder, "config.json")
    with open(path, "w", encoding="utf-8") as file:
        json.dump(config, file)
    return run_parka(program, folder, "train", "config.json", **options).stderr


def printed_numbers(program, folder):
    """What `eval` and `generate` print about the last checkpoint of a run."""
    evaluation = numbers_as_written(run_parka(program, folder, "eval", "run", "--json").stdout)
    del evaluation["checkpoint"]
    yield canonical(evaluation)
    for arguments in GENERATIONS:
        for line in run_parka(program, folder, "generate", "run", "--json", *arguments).stdout.splitlines():
            yield canonical(json.loads(line)["tokens"])


def hash_case(program, case, folder):
    """(its Hashes, the program's commit or an empty text). Trains in a new folder beside the data, which is removed."""
    with tempfile.TemporaryDirectory(dir=folder) as place:
        if case.source:
            train(program, place, merged(case.source, {"checkpoint": {"folder": "source"}}))
        for i, part in enumerate(case.parts):
            log = train(program, place, merged(case.config, part.changes), ranks=part.ranks, threads=case.threads)
            if i > 0 and "resuming from" not in log:
                raise RunFailed(f"start {i + 1} of the run resumed nothing")
        run_folder = os.path.join(place, "run")
        numbers, losses, commit = numeric_records(run_folder)
        if len(losses) != case.config["training"]["steps"]:
            raise RunFailed(f"metrics.jsonl has {len(losses)} steps")
        if case.generates:
            numbers += printed_numbers(program, place)
        return Hashes(short_hash(numbers), *hash_checkpoints(run_folder), losses), commit


def first_line_with(path, beginning):
    try:
        with open(path, encoding="utf-8") as file:
            return next((line[len(beginning):].strip(" \t:=\n") for line in file if line.startswith(beginning)), "")
    except OSError:
        return ""


def describe_machine():
    """What the order of sums and the choice of functions depend on, as far as the machine tells."""
    flags = first_line_with("/proc/cpuinfo", "flags").split()
    names = ("LEVEL1_DCACHE_SIZE", "LEVEL2_CACHE_SIZE", "LEVEL3_CACHE_SIZE")
    caches = [subprocess.run(["getconf", name], capture_output=True, text=True).stdout.strip() for name in names]
    return {"cpu": first_line_with("/proc/cpuinfo", "model name"),
            "cpu_flags": " ".join(sorted(flag for flag in flags if re.match(r"avx|fma|f16c|sse4_|bmi", flag))),
            "cache_bytes": " ".join(caches), "libc": " ".join(platform.libc_ver())}


def describe_program(program, commit):
    """Without a commit, which older programs do not tell, it is that of the source around the build folder."""
    folder = os.path.dirname(os.path.realpath(program))

    def git(*arguments):
        return subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True).stdout.strip()

    if not commit:
        commit = git("rev-parse", "--short=12", "HEAD") or "unknown"
        if git("status", "--porcelain", "--untracked-files=no"):
            commit += "-dirty"
    with open(program, "rb") as file:
        compilers = set(re.findall(rb"GCC: \([^\0]*?\) [0-9.]+|clang version [0-9.]+", file.read()))
    march = first_line_with(os.path.join(folder, "CMakeCache.txt"), "PARKA_MARCH:STRING")
    return {"commit": commit, "march": march or "unknown",
            "compiler": ", ".join(sorted(compiler.decode() for compiler in compilers))}


def write_json(path, description, results):
    """One line per run."""
    runs = ",\n".join(f"    {json.dumps(name)}: {json.dumps(dataclasses.asdict(hashes))}"
                      for name, hashes in results.items())
    with open(path, "w", encoding="utf-8") as file:
        file.write(f'{{\n  "made_on": {json.dumps(description)},\n  "runs": {{\n{runs}\n  }}\n}}\n')


def difference(new, old):
    """What differs between the Hashes of two runs, in words; empty where nothing does."""
    said = []
    if new.losses != old.losses:
        step = next((i + 1 for i, pair in enumerate(zip(new.train_losses, old.train_losses)) if pair[0] != pair[1]), None)
        if step is None:
            said.append("numbers of evaluations, telemetry or generation, or norms of gradients, though no loss of a step")
        else:
            said.append(f"losses from step {step} on ({new.train_losses[step - 1]}, was {old.train_losses[step - 1]})")
    if new.tensors != old.tensors:
        said.append("tensors")
    elif new.checkpoint != old.checkpoint:
        said.append("which file has which piece of a tensor, though no value")
    return "; ".join(said)


def check_recorded(path, here, results, all_were_run):
    """Number of runs that differ from those of the file; prints them."""
    with open(path, encoding="utf-8") as file:
        recorded = json.load(file)
    was = recorded["made_on"]
    print(f"recorded of commit {was['commit']}; this program is of commit {here['commit']}")
    for key in ("cpu", "cpu_flags", "cache_bytes", "libc", "march", "compiler"):
        if here[key] != was[key]:
            print(f"not as recorded: {key} is {here[key]}, was {was[key]}; bits may differ for this alone")
    num_different = 0
    for name, hashes in results.items():
        old = recorded["runs"].get(name)
        text = difference(hashes, Hashes(**old)) if old else "not recorded"
        if text:
            num_different += 1
            print(f"differs: {name}: {text}")
    missing = [name for name in recorded["runs"] if name not in results] if all_were_run else []
    for name in missing:
        print(f"differs: {name}: recorded, but not run")
    print(f"{len(results) - num_different} of {len(results)} runs are as recorded")
    return num_different + len(missing)


def check_promises(cases, results):
    """Number of runs whose bits are not those of the run that they promise to equal; prints them."""
    num_broken = 0
    for case in cases:
        if case.name in results and case.same_as in results:
            hashes, wanted = results[case.name], results[case.same_as]
            if hashes != wanted:
                num_broken += 1
                print(f"differs: {case.name} from {case.same_as}: {difference(hashes, wanted)}")
    return num_broken


def run_cases(program, cases, jobs):
    """(Hashes by name of those that ended well, each printed as soon as those before it are; the program's commit or "")"""
    results, commit = {}, ""
    with tempfile.TemporaryDirectory(prefix="parka-bits-") as folder, concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        write_data(os.path.join(folder, "data"))
        waiting = [(case, pool.submit(hash_case, program, case, folder)) for case in cases]
        for case, future in waiting:
            try:
                results[case.name], commit = future.result()
                print(f"{case.name}  {results[case.name].losses}  {results[case.name].checkpoint}", flush=True)
            except (RunFailed, subprocess.TimeoutExpired) as error:
                print(f"{case.name}  failed: {error}", flush=True)
    return results, commit


def fail(message):
    print(f"hash_runs.py: error: {message}", file=sys.stderr)
    sys.exit(2)


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", metavar="PROGRAM", help="the parka program")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="runs at a time")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="runs whose names match, such as 'llama.*zero3*'")
    parser.add_argument("--json", metavar="OUT", help="write the hashes, the commit and the machine to this file")
    parser.add_argument("--check", metavar="FILE", help="compare with a file that --json wrote")
    arguments = parser.parse_args()
    if shutil.which(arguments.program) is None:
        fail(f"{arguments.program} is no program; build parka first")
    if arguments.check and not os.path.isfile(arguments.check):
        fail(f"there is no file {arguments.check}; write one with --json")
    return arguments


def main():
    arguments = parse_arguments()
    program = os.path.abspath(shutil.which(arguments.program))
    cases = all_cases()
    chosen = [case for case in cases if fnmatch.fnmatchcase(case.name, arguments.only)]
    if not chosen:
        fail(f"no run has a name like {arguments.only}")
    if not starters.is_available() and any(case.ranks() > 1 for case in chosen):
        fail("mpirun is not on PATH; choose RANKS_STARTER=ranks or choose runs with --only")
    results, commit = run_cases(program, chosen, max(arguments.jobs, 1))
    description = {**describe_program(program, commit), **describe_machine()}
    num_wrong = len(chosen) - len(results) + check_promises(chosen, results)
    if arguments.json:
        write_json(arguments.json, description, results)
    if arguments.check:
        num_wrong += check_recorded(arguments.check, description, results, len(chosen) == len(cases))
    sys.exit(1 if num_wrong else 0)


if __name__ == "__main__":
    main()
