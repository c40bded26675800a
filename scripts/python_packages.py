"""What scripts are called, and what they say that lack a Python package. The system's Python often takes none from pip."""
import argparse
import importlib
import os
import sys
import textwrap

MODULES = {"pillow": "PIL"}  # where a package is imported by another name
REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "requirements.txt")  # what setup.sh installs
SETUP = os.path.join(os.path.dirname(REQUIREMENTS), "setup.sh")  # an installation has none
OWN_VENV = "~/.local/share/parka/venv"  # of an installation, where `parka` looks for it


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Fills the paragraphs of a description, and leaves commands and lists in it, which are indented, as they are."""

    def _fill_text(self, text, width, indent):
        paragraphs = text.strip().split("\n\n")
        return "\n\n".join(each if "\n " in "\n" + each else textwrap.fill(each, width) for each in paragraphs)


def command_name():
    """"parka prepare" where `parka` has started the script, else the script's name."""
    return os.environ.get("PARKA_COMMAND") or os.path.basename(sys.argv[0])


def advice(packages):
    if os.path.exists(SETUP):
        return f"run {SETUP}, which makes a .venv with it, or install {packages}"
    return f"run python3 -m venv {OWN_VENV} && {OWN_VENV}/bin/pip install -r {REQUIREMENTS}"


def beyond_setup(packages):
    with open(REQUIREMENTS, encoding="utf-8") as file:
        installed = {line.partition(">=")[0] for line in file}
    return [package for package in packages if package not in installed]


def missing(package, needed=()):
    """What to say of a package that is missing, of all that are `needed`."""
    packages = needed or [package]
    others = packages if "PARKA_PYTHON" in os.environ else beyond_setup(packages)
    if others:
        return f"{package} is missing; run {sys.executable} -m pip install {' '.join(others)}"
    return f"{package} is missing; {advice(', '.join(packages))}"


def require(*packages):
    """Ends the script with exit code 2 and one line where one of its packages is missing."""
    for package in packages:
        try:
            importlib.import_module(MODULES.get(package, package))
        except ImportError:
            print(f"{command_name()}: error: {missing(package, packages)}", file=sys.stderr)
            sys.exit(2)
