"""Scripts say how they are used, and refuse what they do not know before they do anything. That Python scripts do is in
test_python_packages.py, too."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [*sorted((ROOT / "scripts").glob("*.sh")), *sorted((ROOT / "scripts/reproduce").glob("*.sh"))]
SCRIPTS = [path for path in FILES if path.read_text(encoding="utf-8").startswith("#!")]  # the others are sourced
# All that the scripts find: what they would install, build or train by mistake they cannot.
PROGRAMS = ("basename", "bash", "cat", "dirname", "env", "grep", "mktemp", "realpath", "rm", "sed", "seq")
PYTHON_SCRIPTS = ("reproduce/paper_memory.py", "reproduce/paper_tables.py", "reproduce/step_parts.py", "tokenizer_helper.py")


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
        self.assertRegex(result.stderr, rf"usage: scripts/\S*{path.name}|^{path.name}: [^\n]+\n$")

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

    def test_options_behind_names_are_refused(self):
        paths = [path for path in SCRIPTS if path.parent.name == "reproduce" and "has_option" in path.read_text(encoding="utf-8")]
        self.assertGreaterEqual(len(paths), 10)
        for path in paths:
            for arguments in (("--no-such-option", "text", "bf16", "coat"), ("out", "--no-such-option"), ("out", "text", "bf16", "--no-such-option")):
                with self.subTest([path.name, *arguments]):
                    self.assert_refused(self.run_script(path, *arguments), path)

    def test_arguments_are_wanted(self):
        for path in SCRIPTS:
            if path.parent.name == "reproduce":
                with self.subTest(path.name):
                    self.assert_refused(self.run_script(path), path)
        for name in ("format.sh", "gpu_check.sh", "quickstart.sh", "setup.sh", "test.sh", "fuzz.sh"):
            path = ROOT / "scripts" / name
            with self.subTest(name):
                self.assert_refused(self.run_script(path, "word"), path)

    def test_python_scripts_without_options(self):
        for name in PYTHON_SCRIPTS:
            for arguments, code in ((["--help"], 0), ([], 2), (["--no-such-option"], 2)):
                with self.subTest([name, *arguments]):
                    result = subprocess.run([sys.executable, ROOT / "scripts" / name, *arguments], capture_output=True, text=True,
                                            stdin=subprocess.DEVNULL)
                    self.assertEqual(result.returncode, code, result.stderr)
                    self.assertIn("usage: " if code == 0 else "error: ", result.stdout + result.stderr)

    def test_what_is_no_measurement(self):
        path = self.folder / "bench.json"
        for text, code, message in ((None, 4, f"{path}: No such file or directory"), ("no JSON", 2, f"{path} has no times of ops"),
                                    ("[]", 2, f"{path} has no times of ops"), ("{}", 2, f"{path} has no times of ops")):
            with self.subTest(text):
                if text is not None:
                    path.write_text(text, encoding="utf-8")
                result = subprocess.run([sys.executable, ROOT / "scripts/reproduce/step_parts.py", path], capture_output=True, text=True)
                self.assertEqual(result.returncode, code, result.stderr)
                self.assertTrue(result.stderr.startswith(f"step_parts.py: error: {message}"), result.stderr)


if __name__ == "__main__":
    unittest.main()
