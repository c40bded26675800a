#!/usr/bin/env python3
"""How much faster whole steps are with one program or setting than with another: `parka bench` of both in turns on the same
GPUs, because cards of one kind differ by several per cent.

    scripts/research/speed_ratio.py CONFIG OUT --old PROGRAM              two programs
    scripts/research/speed_ratio.py CONFIG OUT --new-set KEY=VALUE        one program, two settings

First each tunes its GEMMs on this card for --tune seconds, unless that is 0. Then come --turns turns of the old and
the new one, and of the new one with what each --also changes besides. What is printed are their speeds and the ratios to the
old one in each turn; what counts is the median ratio. OUT gets what every bench has measured, the tuning files, and
speed_ratio.json. What is there already is not measured again: after an interruption the same command continues.
"""
import argparse
import dataclasses
import json
import re
import shlex
import statistics
import subprocess
import sys
from pathlib import Path

from measured_runs import ScriptParser, at_least, error_line, fail, options_of, positive, run_main, write_report


def changed(text):
    """NAME=KEY=VALUE,KEY=VALUE as its name and the rest as a list."""
    name, _, sets = text.partition("=")
    if not re.fullmatch(r"\w+", name) or not all("=" in pair for pair in sets.split(",")):
        raise argparse.ArgumentTypeError(f"expected NAME=KEY=VALUE or NAME=KEY=VALUE,KEY=VALUE, got {text}")
    return name, sets.split(",")


def read_arguments():
    parser = ScriptParser(__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="of both, unless --old-config names another")
    parser.add_argument("out", type=Path, metavar="OUT", help="folder for what is measured")
    parser.add_argument("--parka", type=Path, default=Path("build/cuda/parka"), metavar="PROGRAM", help="the new one (default %(default)s)")
    parser.add_argument("--old", type=Path, metavar="PROGRAM", help="the old one (default: that of --parka)")
    parser.add_argument("--old-config", type=Path, metavar="CONFIG", help="where the old program does not know the other")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="for both, as for parka bench")
    parser.add_argument("--old-set", action="append", default=[], metavar="KEY=VALUE", help="for the old one alone")
    parser.add_argument("--new-set", action="append", default=[], metavar="KEY=VALUE", help="for the new one alone")
    parser.add_argument("--also", action="append", default=[], type=changed, metavar="NAME=KEY=VALUE[,KEY=VALUE...]",
                        help="the new one with these set besides and its tuning file, in the same turns; may be repeated")
    parser.add_argument("--gpus", type=positive, default=1, metavar="N", help="one rank on each of N (default %(default)s)")
    parser.add_argument("--steps", type=positive, default=4, help="timed in each turn (default %(default)s)")
    parser.add_argument("--turns", type=positive, default=2, help="of both (default %(default)s)")
    parser.add_argument("--tune", type=at_least(0), default=15, metavar="SECONDS", help="of each; 0: do not (default %(default)s)")
    arguments = parser.parse_args()
    names = ["old", "new", *(name for name, _ in arguments.also)]
    if len(set(names)) < len(names):
        parser.error(f"argument --also: of {', '.join(names)} no two may be the same; give another name")
    arguments.json = arguments.out / "speed_ratio.json"
    return arguments


@dataclasses.dataclass
class Side:
    """One of those that are compared."""
    name: str
    program: Path
    config: Path
    sets: list
    out: Path

    def run(self, command, what, *options):
        """Writes what `parka COMMAND` prints to OUT/WHAT.txt."""
        log = self.out / f"{what}.txt"
        words = [str(self.program.absolute()), command, str(self.config), *options_of(self.sets), *options]
        print(shlex.join(words), file=sys.stderr, flush=True)
        try:
            with open(log, "w", encoding="utf-8") as file:
                result = subprocess.run(words, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, check=False)
        except OSError as error:
            fail(f"{self.program}: {error.strerror}; give the program parka")
        if result.returncode != 0:
            fail(f"parka {command} ended with {result.returncode}: {error_line(log.read_text(encoding='utf-8'))} ({log})", 1)

    def tune(self, seconds):
        tuning = self.out / f"{self.name}.tuning.json"
        if not tuning.exists():  # without a file: empty is what older programs know, too
            self.run("tune", f"{self.name}.tuning", "--set", "device.gemm_tuning=", "--seconds", str(seconds), "--output", str(tuning))
        self.sets = [*self.sets, f"device.gemm_tuning={tuning}"]  # the last of several counts

    def bench(self, turn, steps, gpus):
        """What was measured, as `parka bench --json` writes it."""
        name = f"{self.name}.{turn}"
        result = self.out / f"{name}.json"
        if not result.exists():
            partial = self.out / f"{name}.partial"
            several = ["--gpus", str(gpus)] if gpus > 1 else []
            self.run("bench", name, *several, "--steps", str(steps), "--json", str(partial))
            partial.rename(result)
        return json.loads(result.read_text(encoding="utf-8"))


def check_same_command(arguments):
    """What is in OUT must come from the same comparison."""
    asked = {key: value for key, value in vars(arguments).items() if key not in ("out", "json", "turns")}
    text = "".join(f"{key}: {value}\n" for key, value in asked.items())
    path = arguments.out / "command.txt"
    if path.exists() and path.read_text(encoding="utf-8") != text:
        fail(f"{arguments.out} has another comparison ({path}); give another folder")
    path.write_text(text, encoding="utf-8")


def of_all_turns(benches):
    return {"step_seconds": [seconds for bench in benches for seconds in bench["step_seconds"]],
            "planned_bytes": benches[0]["planned_bytes"]}


def print_table(device, speeds, ratios):
    heads = ["turn", *(f"{name}, tokens/s" for name in speeds), *("ratio" if name == "new" else f"ratio of {name}" for name in ratios)]
    print("| " + " | ".join(heads) + " |\n" + "|---" * len(heads) + "|")
    for turn in range(len(speeds["old"])):
        cells = [f"{of_turns[turn]:,.0f}" for of_turns in speeds.values()] + [f"{of_turns[turn]:.4f}" for of_turns in ratios.values()]
        print(f"| {turn + 1} | " + " | ".join(cells) + " |")
    print()
    for name, of_turns in ratios.items():
        print(f"{device}, {name}: {min(of_turns):.4f} to {max(of_turns):.4f}")


def main():
    arguments = read_arguments()
    arguments.out.mkdir(parents=True, exist_ok=True)
    check_same_command(arguments)
    shared = ["training.eval_interval=0", *arguments.set]
    old = Side("old", arguments.old or arguments.parka, arguments.old_config or arguments.config, shared + arguments.old_set, arguments.out)
    new = Side("new", arguments.parka, arguments.config, shared + arguments.new_set, arguments.out)
    if arguments.tune > 0:
        for side in (old, new):
            side.tune(arguments.tune)
    also = [dataclasses.replace(new, name=name, sets=new.sets + sets) for name, sets in arguments.also]
    sides = {side.name: [] for side in (old, new, *also)}
    for turn in range(1, arguments.turns + 1):
        for side in (old, new, *also):
            sides[side.name].append(side.bench(turn, arguments.steps, arguments.gpus))
    devices = {bench["device"] for benches in sides.values() for bench in benches}
    if len(devices) > 1:
        fail(f"{arguments.out} has benches of {' and of '.join(sorted(devices))}; give another folder", 1)
    speeds = {name: [bench["tokens_per_second"] for bench in benches] for name, benches in sides.items()}
    ratios = {name: [mine / before for mine, before in zip(speeds[name], speeds["old"])] for name in speeds if name != "old"}
    print_table(devices.pop(), speeds, ratios)
    figures = {}
    for name, of_turns in ratios.items():
        figures["ratio" if name == "new" else f"{name}.ratio"] = statistics.median(of_turns)
    figures |= {f"{name}.tokens_per_second": statistics.median(of_turns) for name, of_turns in speeds.items()}
    write_report(arguments, figures, {"device": sides["old"][0]["device"], "ratios": ratios["new"],
                                      **{side.name: of_all_turns(sides[side.name]) for side in (old, new)},
                                      "also": {side.name: {"ratios": ratios[side.name], "set": side.sets,
                                                           **of_all_turns(sides[side.name])} for side in also}})


if __name__ == "__main__":
    run_main(main)
