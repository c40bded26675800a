"""Scripts that lack a package or a program say so in one line, with what helps."""
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
HELP = r"run this with \.venv/bin/python, which scripts/setup\.sh makes, or install [\w, ]+\n"
WITH_TORCH = ("amax_vs_torch.py", "attention_vs_cudnn.py")  # measure it


def run(script, *arguments):
    """By a Python without packages."""
    return subprocess.run([sys.executable, "-S", SCRIPTS / script, *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)


class PythonPackages(unittest.TestCase):
    def test_each_script_helps_or_says_what_is_missing(self):
        found = 0
        for path in sorted(SCRIPTS.glob("*.py")):
            if path.name in WITH_TORCH or not path.read_text(encoding="utf-8").startswith("#!"):
                continue
            with self.subTest(path.name):
                result = run(path.name, "--help")
                if "helper" in path.name or result.returncode == 0:
                    self.assertEqual(result.stderr, "")
                    continue
                found += 1
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertRegex(result.stderr, rf"\A{path.name}: error: numpy is missing; {HELP}\Z")
        self.assertGreaterEqual(found, 10)

    def test_helpers_of_the_program_name_their_python(self):
        for script, arguments, message in (("tokenizer_helper.py", ["."], "text needs Python's tokenizers package, which"),
                                           ("image_helper.py", ["--tower", "clip", "--size", "8", "--mean", "0,0,0"], "--image needs")):
            with self.subTest(script):
                result = run(script, *arguments)
                self.assertEqual(result.returncode, 2, result.stderr)
                self.assertIn(message, result.stdout)
                self.assertIn("run scripts/setup.sh, which makes a .venv with it, name a Python in PARKA_PYTHON, or run " + sys.executable,
                              result.stdout)


class Program(unittest.TestCase):
    def test_the_table_of_what_fits_says_what_is_wrong_with_the_program(self):
        with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
            for name, text, message in (("none", None, r"cannot be run \(No such file or directory\); build it"),
                                        ("text", "no program", r"cannot be run \(.*\); build it"),
                                        ("silent", "#!/bin/sh\nexit 1\n", "prints no plan; build parka"),
                                        ("other", "#!/bin/sh\necho fits\n", "prints no plan; build parka"),
                                        ("bytes", "#!/bin/sh\nprintf '\\377'\n", "prints no plan; build parka")):
                with self.subTest(name):
                    path = Path(folder, name)
                    if text is not None:
                        path.write_text(text, encoding="utf-8")
                        path.chmod(0o755)
                    result = run("fits_table.py", "--parka", path)
                    self.assertEqual(result.returncode, 2, result.stderr)
                    self.assertRegex(result.stderr, rf"\Afits_table.py: error: {path}: {message}, or name the program with --parka\n\Z")
            result = run("fits_table.py", "--parka", folder)
            self.assertEqual(result.returncode, 2, result.stderr)
            self.assertIn("cannot be run (Permission denied)", result.stderr)


if __name__ == "__main__":
    unittest.main()
