"""The command `parka` of the wheel: the program in the package, whose Python commands run in this environment."""
import os
import sys


def main():
    program = os.path.join(os.path.dirname(os.path.abspath(__file__)), "bin", "parka")
    os.environ.setdefault("PARKA_PYTHON", sys.executable)
    os.execv(program, ["parka", *sys.argv[1:]])
