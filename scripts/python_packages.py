"""What scripts say that lack a Python package."""


def missing(name, packages=None):
    """One line: what is missing, and what helps; the system's Python often takes nothing from pip."""
    return f"{name} is missing; run this with .venv/bin/python, which scripts/setup.sh makes, or install {packages or name}"
