"""Runs scripts of scripts/ and shows what they said where a test fails."""
import contextlib
import importlib.util
import io
import subprocess
import sys
import tempfile
import traceback
import unittest
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts"
sys.path[:0] = [str(SCRIPTS), str(ROOT / "tests" / "support")]


def load(name):
    """The module of a script; one that is loaded already stays."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def run_here(name, *arguments):
    """main() of a script in this process, which saves starting Python: a subprocess.CompletedProcess. What it does not catch ends it as
    it would end the script."""
    command = [f"{name}.py", *map(str, arguments)]
    out, err = io.StringIO(), io.StringIO()
    with mock.patch.object(sys, "argv", command), contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = load(name).main() or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
        except BaseException:  # as a panic of a library in Rust, which is no Exception
            traceback.print_exc()
            code = 1
    return subprocess.CompletedProcess(command, code, out.getvalue(), err.getvalue())


def run_script(name, *arguments, **options):
    """In a process of its own."""
    return subprocess.run([sys.executable, str(SCRIPTS / f"{name}.py"), *map(str, arguments)], capture_output=True, text=True, timeout=100,
                          **options)


class ScriptTest(unittest.TestCase):
    """With a temporary folder, in which `out` is what a script makes."""

    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.made = 0

    @property
    def out(self):
        """Of the last call of new_out()."""
        return self.folder / f"out{self.made}"

    def new_out(self):
        self.made += 1
        return self.out

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path
