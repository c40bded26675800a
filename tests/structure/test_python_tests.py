"""Every test of every Python file under tests/ is reached by a ctest entry, and entries are named by their folder."""
import ast
import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))
from list_tests import list_tests  # noqa: E402


def reached(tests, arguments):
    """Which of `tests` (Class.test_name) run when their file is given `arguments`: those that are named, by themselves or by
    their class, and all where none is. Other arguments are the file's own."""
    named = [test for test in tests if test in arguments or test.split(".")[0] in arguments]
    return set(named or tests)


def entries_of(build):
    """What ctest would run in a build folder: its name and its command, which tests of programs that are not built lack."""
    listing = subprocess.run([os.environ["CTEST"], "--test-dir", build, "--show-only=json-v1"], capture_output=True, text=True,
                             check=True)
    return [(test["name"], test["command"]) for test in json.loads(listing.stdout)["tests"] if "command" in test]


def commands_of(build):
    """(file, arguments) of each Python test among them."""
    for _, command in entries_of(build):
        if len(command) > 1 and command[1].endswith(".py"):
            yield Path(command[1]), command[2:]


def exits_in_classes(text):
    """The lines on which methods in a Python file with this text call sys.exit."""
    classes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ClassDef)]
    return [node.lineno for each in classes for node in ast.walk(each)
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "sys.exit"]


class PythonTests(unittest.TestCase):
    def test_what_is_missing_skips_a_test_and_does_not_end_it(self):
        """unittest takes sys.exit in a test for an error, whatever the code. A file may call it, a test is skipped."""
        self.assertEqual(exits_in_classes("import sys\nclass A:\n  def test_one(self):\n    sys.exit(77)\nsys.exit(0)\n"), [4])
        for file in sorted(TESTS.rglob("test_*.py")):
            self.assertEqual(exits_in_classes(file.read_text(encoding="utf-8")), [], f"{file}: lines that call sys.exit")

    def test_arguments_choose_tests(self):
        tests = ["A.test_one", "A.test_two", "B.test_one"]
        self.assertEqual(reached(tests, []), set(tests))
        self.assertEqual(reached(tests, ["cuda"]), set(tests))
        self.assertEqual(reached(tests, ["cuda", "A.test_two"]), {"A.test_two"})
        self.assertEqual(reached(tests, ["A"]), {"A.test_one", "A.test_two"})

    def test_tests_are_methods_of_classes(self):
        text = "class A:\n  def test_one(self): pass\n  def helper(self): pass\nclass B(A):\n  def test_two(self): pass\n"
        self.assertEqual(list_tests(text), ["A.test_one", "B.test_two"])

    @unittest.skipUnless("BUILD_FOLDER" in os.environ, "ctest says which build folder to look at")
    def test_every_test_is_reached(self):
        left = {file: set(list_tests(file.read_text(encoding="utf-8"))) for file in TESTS.rglob("test_*.py")}
        self.assertGreater(len(left), 20)
        for file, arguments in commands_of(os.environ["BUILD_FOLDER"]):
            left[file] -= reached(list_tests(file.read_text(encoding="utf-8")), arguments)
        for file, tests in left.items():
            self.assertEqual(tests, set(), f"{file}: no ctest entry runs these; see tests/CMakeLists.txt")

    @unittest.skipUnless("BUILD_FOLDER" in os.environ, "ctest says which build folder to look at")
    def test_names_begin_with_the_folder(self):
        """By which scripts/test.sh chooses."""
        folders = [folder.name for folder in TESTS.iterdir() if folder.is_dir()]
        names = [name for name, _ in entries_of(os.environ["BUILD_FOLDER"])]
        self.assertGreater(len(names), 20)
        others = [name for name in names if not name.startswith(tuple(f"{folder}: " for folder in folders))]
        self.assertEqual(others[:5], [])


if __name__ == "__main__":
    unittest.main()
