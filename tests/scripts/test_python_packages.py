"""Scripts that lack a package say so in one line, with what helps."""
import subprocess
import sys
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


if __name__ == "__main__":
    unittest.main()
