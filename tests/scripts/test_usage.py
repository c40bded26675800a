"""Scripts say how they are used, and refuse what they do not know before they do anything. That Python scripts do is in
test_python_packages.py, too."""
import os
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [path for path in sorted((ROOT / "scripts").glob("*.sh")) if path.read_text(encoding="utf-8").startswith("#!")]  # the others are sourced
# All that the scripts find: what they would install, build or train by mistake they cannot.
PROGRAMS = ("basename", "bash", "cat", "dirname", "env", "grep", "mktemp", "realpath", "rm", "sed", "seq")


class Usage(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        (self.folder / "bin").mkdir()
        for program in PROGRAMS:
            (self.folder / "bin" / program).symlink_to(shutil.which(program))
        (self.folder / "called").mkdir()

    def run_script(self, path, *arguments):
        """From an empty folder, by a path relative to it."""
        called = self.folder / "called"
        result = subprocess.run(["bash", os.path.relpath(path, called), *arguments], cwd=called, capture_output=True, text=True, timeout=60,
                                stdin=subprocess.DEVNULL, env={"PATH": str(self.folder / "bin"), "PYTHON": "false", "PARKA": "false"})
        self.assertEqual(list(called.iterdir()), [])
        return result

    def assert_refused(self, result, path):
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertIn(path.name, result.stderr)

    def test_help_is_what_a_script_begins_with(self):
        for path in SCRIPTS:
            with self.subTest(path.name):
                text = path.read_text(encoding="utf-8").split("\nset -")[0]
                comment = "".join(line.removeprefix("#").removeprefix(" ") + "\n" for line in text.split("\n")[1:])
                for option in ("--help", "-h"):
                    result = self.run_script(path, option)
                    self.assertEqual((result.returncode, result.stdout, result.stderr), (0, comment, ""))

    def test_options_that_they_do_not_know_are_refused(self):
        for path in SCRIPTS:
            if path.name != "quickstart.sh":  # its options are those of `parka train`
                with self.subTest(path.name):
                    self.assert_refused(self.run_script(path, "--no-such-option"), path)

    def test_arguments_that_they_do_not_take_are_refused(self):
        for name in ("format.sh", "gpu_check.sh", "quickstart.sh", "setup.sh", "test.sh", "fuzz.sh"):
            path = ROOT / "scripts" / name
            with self.subTest(name):
                self.assert_refused(self.run_script(path, "word"), path)


if __name__ == "__main__":
    unittest.main()
