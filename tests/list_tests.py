#!/usr/bin/env python3
"""Prints the tests of a Python file as unittest takes them, Class.test_name, one per line; with --classes the classes that
have any. The file is parsed, not run.

list_tests.py [--classes] FILE
"""
import argparse
import ast
from pathlib import Path


def list_tests(text):
    """Class.test_name of every test in a Python file with this text."""
    return [f"{node.name}.{member.name}" for node in ast.parse(text).body if isinstance(node, ast.ClassDef)
            for member in node.body if isinstance(member, ast.FunctionDef) and member.name.startswith("test_")]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--classes", action="store_true")
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    names = list_tests(arguments.file.read_text(encoding="utf-8"))
    if arguments.classes:
        names = dict.fromkeys(name.split(".")[0] for name in names)
    print("\n".join(names))
