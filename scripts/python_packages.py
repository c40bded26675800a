"""What scripts say that lack a Python package. The system's Python often takes none from pip."""
import importlib
import os
import sys

MODULES = {"pillow": "PIL"}  # where a package is imported by another name


def advice(packages):
    return f"run this with .venv/bin/python, which scripts/setup.sh makes, or install {packages}"


def missing(package):
    return f"{package} is missing; {advice(package)}"


def require(*packages):
    """Ends the script with exit code 2 and one line where one of its packages is missing."""
    for package in packages:
        try:
            importlib.import_module(MODULES.get(package, package))
        except ImportError:
            print(f"{os.path.basename(sys.argv[0])}: error: {package} is missing; {advice(', '.join(packages))}", file=sys.stderr)
            sys.exit(2)
