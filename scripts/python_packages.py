"""What scripts say that lack a Python package. The system's Python often takes none from pip."""
import importlib
import os
import sys

MODULES = {"pillow": "PIL"}  # where a package is imported by another name
REQUIREMENTS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "requirements.txt")  # what setup.sh installs


def advice(packages):
    return f"run this with .venv/bin/python, which scripts/setup.sh makes, or install {packages}"


def beyond_setup(packages):
    with open(REQUIREMENTS, encoding="utf-8") as file:
        installed = {line.partition("==")[0] for line in file}
    return [package for package in packages if package not in installed]


def missing(package, needed=()):
    """What to say of a package that is missing, of all that are `needed`."""
    others = beyond_setup(needed or [package])
    if others:
        return f"{package} is missing; run .venv/bin/python -m pip install {' '.join(others)}, and this with .venv/bin/python"
    return f"{package} is missing; {advice(', '.join(needed or [package]))}"


def require(*packages):
    """Ends the script with exit code 2 and one line where one of its packages is missing."""
    for package in packages:
        try:
            importlib.import_module(MODULES.get(package, package))
        except ImportError:
            print(f"{os.path.basename(sys.argv[0])}: error: {missing(package, packages)}", file=sys.stderr)
            sys.exit(2)
