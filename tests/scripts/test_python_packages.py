"""Scripts that lack a package say so in one line, with what helps."""
import ast
import functools
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
from python_packages import MODULES  # noqa: E402

HELP = r"[^\n]*setup\.sh[^\n]*\n"
HELP_BEYOND_SETUP = r"[^\n]*-m pip install [\w ]+\n"
FILES = [path for path in (*sorted(SCRIPTS.glob("*.py")), *sorted(SCRIPTS.glob("*/*.py"))) if path.parent.name != "research"]


def is_script(path):
    return path.read_text(encoding="utf-8").startswith("#!")


def run(script, *arguments):
    """By a Python without packages."""
    return subprocess.run([sys.executable, "-S", SCRIPTS / script, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)


@functools.lru_cache(maxsize=None)
def local_modules():
    """{name: path}, as scripts import them."""
    return {(path.stem if path.parent.name == "scripts" else f"{path.parent.name}.{path.stem}").removesuffix(".__init__"): path
            for path in FILES}


def modules_of(node, path):
    """What an import imports, with the modules in which names of it may be."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    module = ".".join(filter(None, [path.parent.name if node.level else "", node.module]))
    return [module, *(f"{module}.{alias.name}" for alias in node.names)]


def packages_of(node, path):
    """Those that an import needs beyond Python's own library, also by way of modules here."""
    packages, own = set(), {name.split(".")[0] for name in local_modules()}
    for name in modules_of(node, path):
        local = local_modules().get(name)
        if local:
            packages |= at_import(local)
        else:
            packages |= {name.split(".")[0]} - own - sys.stdlib_module_names
    return packages


def imports(path):
    """(import, whether it is made as the file is read, whether a `try` around it catches ImportError)"""
    def walk(node, is_at_once, is_tried):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            yield node, is_at_once, is_tried
        caught = isinstance(node, ast.Try) and any(re.search(r"\bImportError\b", ast.unparse(handler.type or node)) for handler in node.handlers)
        for child in ast.iter_child_nodes(node):
            yield from walk(child, is_at_once and not isinstance(node, ast.FunctionDef), is_tried or caught)

    return walk(ast.parse(path.read_text(encoding="utf-8")), True, False)


@functools.lru_cache(maxsize=None)
def at_import(path):
    """Packages that a module here needs to be imported."""
    return set().union(*(packages_of(node, path) for node, is_at_once, is_tried in imports(path) if is_at_once and not is_tried))


def required(path):
    """{package: line of the call of require() that names it}"""
    calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
             if isinstance(node, ast.Call) and ast.unparse(node.func) == "require"]
    return {MODULES.get(argument.value, argument.value): call.lineno for call in calls for argument in call.args}


def unguarded(path):
    """Packages that a file imports without require() before it or a `try` around it. What a module here imports as it is read is up to
    the scripts that import it."""
    lines, found = required(path), list(imports(path))
    later = set(lines).union(*(packages_of(node, path) for node, _, is_tried in found if is_tried))  # what functions may import
    return {package for node, is_at_once, is_tried in found if not is_tried and (is_script(path) or not is_at_once)
            for package in packages_of(node, path)
            if (lines.get(package, node.lineno) >= node.lineno if is_at_once else package not in later)}


class PythonPackages(unittest.TestCase):
    def test_each_script_helps_or_says_what_is_missing(self):
        found = 0
        for path in filter(is_script, FILES):
            with self.subTest(path.name):
                result = run(path, "--help")
                if "helper" in path.name or result.returncode == 0:
                    self.assertEqual(result.stderr, "")
                    continue
                found += 1
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertRegex(result.stderr, rf"\A{path.name}: error: ((numpy|pillow) is missing; {HELP}|torch is missing; {HELP_BEYOND_SETUP})\Z")
        self.assertGreater(found, 0)

    def test_each_script_refuses_an_option_that_it_does_not_know(self):
        for path in filter(is_script, FILES):
            with self.subTest(path.name):
                result = subprocess.run([sys.executable, path, "--no-such-option"], capture_output=True, text=True, stdin=subprocess.DEVNULL)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn("error: ", result.stderr)
                self.assertNotIn("Traceback", result.stderr)

    def test_each_import_goes_through_require(self):
        """Or through a `try` that says what is missing."""
        self.assertGreater(sum(bool(required(path)) for path in FILES), 0)
        for path in FILES:
            with self.subTest(path.relative_to(SCRIPTS)):
                self.assertEqual(unguarded(path), set())

    def test_an_import_without_require_is_seen(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            path = Path(folder, "script.py")
            for text, expected in (("import torch\n", {"torch"}), ("require('torch')\nimport torch.nn\n", set()),
                                   ("import torch\nrequire('torch')\n", {"torch"}), ("require('pillow')\nfrom PIL import Image\n", set()),
                                   ("from image_data.files import REFERENCE\n", {"numpy", "xxhash"}),
                                   ("try:\n  import torch\nexcept ImportError:\n  torch = None\n", set()),
                                   ("try:\n  import torch\nexcept OSError:\n  pass\n", {"torch"}),
                                   ("def f():\n  import peft\n", {"peft"}), ("def f():\n  require('peft')\n  import peft\n", set())):
                with self.subTest(text):
                    path.write_text("#!\n" + text, encoding="utf-8")
                    self.assertEqual(unguarded(path), expected)

    def test_helpers_of_the_program_name_their_python(self):
        for script, arguments, message in (("tokenizer_helper.py", ["."], "text needs Python's tokenizers package, which"),
                                           ("image_helper.py", ["--tower", "clip", "--size", "8", "--mean", "0,0,0"], "--image needs")):
            with self.subTest(script):
                result = run(script, *arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(message, result.stdout)
                self.assertIn("run scripts/setup.sh, which makes a .venv with it, name a Python in PARKA_PYTHON, or run " + os.path.abspath(sys.executable),
                              result.stdout)


if __name__ == "__main__":
    unittest.main()
