"""The ways to start the ranks of a run, of which the environment variable RANKS_STARTER chooses one:
    ranks      the default: the program starts them itself, by its option --ranks, or on GPUs --gpus
    mpirun     Open MPI's
    variables  each is started alone, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, by tests/support/start_ranks.py
"""
import glob
import os
import shutil
import subprocess
import sys
import tempfile

STARTERS = ("ranks", "mpirun", "variables")
STARTER = os.environ.get("RANKS_STARTER", "ranks")
# What tells a process that a launcher has started it.
LAUNCHER_VARIABLES = ("OMPI_", "PMI", "SLURM_", "RANK", "WORLD_SIZE", "MASTER_", "TORCHELASTIC_")


def is_available(starter=STARTER):
    return starter != "mpirun" or shutil.which("mpirun") is not None


def skip_without_starter():
    if not is_available():
        print("skipped: mpirun is not on PATH")
        sys.exit(77)


def command(size, program, starter=STARTER, option="--ranks"):
    """The command that starts `size` ranks of the program, a list of words. `option` is the program's own."""
    if starter == "mpirun":
        return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(size), *program]
    if starter == "ranks":
        return [*program, f"{option}={size}"]
    assert starter == "variables", starter
    return [sys.executable, os.path.join(os.path.dirname(os.path.abspath(__file__)), "start_ranks.py"), str(size), *program]


def environment(**variables):
    """In which the command runs: without what another launcher may have left. mpirun stays on this host, so it needs no ssh, and
    says nothing of a system without /sys, and looks for no GPU by way of a display: without /etc/hosts each rank would wait five
    seconds or more for the address of `localhost`."""
    own = {key: value for key, value in os.environ.items() if not key.startswith(LAUNCHER_VARIABLES)}
    return {**own, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_plm": "isolated",
            "HWLOC_HIDE_ERRORS": "2", "HWLOC_COMPONENTS": "-gl", **variables}


def run(size, program, starter=STARTER, option="--ranks", timeout=200, variables=None, **settings):
    """Runs `size` ranks to their end, one as a program alone, with `variables` in their environment. Returns a subprocess.CompletedProcess, whose output is that of mpirun,
    then that of rank 0, 1, ...: mpirun hands lines on in pieces, and those of one rank may come within a line of another."""
    command_line = command(size, program, starter, option) if size > 1 else program
    with tempfile.TemporaryDirectory() as folder:
        of_mpirun = size > 1 and starter == "mpirun"
        if of_mpirun:
            command_line[1:1] = ["--output-filename", f"{folder}:nocopy"]
        result = subprocess.run(command_line, env=environment(**(variables or {})), text=True, capture_output=True, timeout=timeout, check=False, **settings)
        for name in ("stdout", "stderr") if of_mpirun else ():
            for path in sorted(glob.glob(os.path.join(folder, "*", "rank.*", name))):
                with open(path, encoding="utf-8") as file:
                    setattr(result, name, getattr(result, name) + file.read())
    return result
