"""The hook scripts/pre-commit, in a repository of its own."""
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORMATTED, UNFORMATTED = "int value = 1;\n", "int   value=1;\n"


class PreCommit(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        # Git tells a hook, and what a hook starts, which repository it is in.
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
        self.run_checked("git", "init", "--quiet")
        for name in ("scripts", "tests/structure"):
            (self.folder / name).mkdir(parents=True)
        shutil.copy(ROOT / "scripts/pre-commit", self.folder / "scripts")
        shutil.copy(ROOT / ".clang-format", self.folder)
        (self.folder / ".venv").symlink_to(ROOT / ".venv")
        self.write("tests/structure/test_tree.py", "")
        self.run_checked("git", "config", "core.hooksPath", "scripts")

    def run_checked(self, *command):
        subprocess.run(command, cwd=self.folder, env=self.environment, check=True)

    def write(self, name, text):
        (self.folder / name).write_text(text, encoding="utf-8")

    def commit(self, *files):
        """The exit code and messages of committing these files, staged as they are."""
        self.run_checked("git", "add", *files)
        return self.commit_staged()

    def commit_staged(self):
        command = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "commit", "--quiet", "-m", "Change"]
        result = subprocess.run(command, cwd=self.folder, env=self.environment, capture_output=True, text=True)
        return result.returncode, result.stdout + result.stderr

    def test_what_is_staged_must_be_formatted(self):
        self.write("a b.cpp", UNFORMATTED)
        self.assertEqual(self.commit("a b.cpp"), (1, "pre-commit: a b.cpp is not formatted: run scripts/format.sh and stage it\n"))
        self.write("a b.cpp", FORMATTED)
        self.assertEqual(self.commit_staged()[0], 1)  # what is staged has not changed
        self.assertEqual(self.commit("a b.cpp"), (0, ""))

    def test_what_is_not_staged_does_not_matter(self):
        self.write("a.cpp", UNFORMATTED)
        self.write("b.h", FORMATTED)
        self.assertEqual(self.commit("b.h"), (0, ""))

    def test_the_structure_must_hold(self):
        self.write("tests/structure/test_tree.py", "raise SystemExit('core includes model')")
        self.write("b.h", FORMATTED)
        self.assertEqual(self.commit("b.h"), (1, "core includes model\npre-commit: tests/structure/test_tree.py failed\n"))


if __name__ == "__main__":
    if shutil.which("git") is None or not (ROOT / ".venv/bin/clang-format").exists():
        print("skipped: scripts/format.sh installs the formatter")
        sys.exit(77)
    unittest.main()
