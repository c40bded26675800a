"""Dockerfile and Apptainer.def: they name files that exist, build alike, and a linter has nothing to say where it is installed."""
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
from needed_tools import skip_without  # noqa: E402

HADOLINT = shutil.which("hadolint", path=f"{ROOT}/.venv/bin") or shutil.which("hadolint")


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


def packages(text):
    """Of each `apt-get install`, what it installs."""
    return [re.findall(r"(?<!\S)[a-z/][\w./*-]+", arguments) for arguments in re.findall(r"apt-get install -y --no-install-recommends (.*?) *(?:\\\\)?\n", text)]


class Containers(unittest.TestCase):
    def test_both_build_alike(self):
        docker, apptainer = text_of("Dockerfile"), text_of("Apptainer.def")
        self.assertEqual(re.findall(r"^ARG \w+_IMAGE=(\S+)$", docker, re.MULTILINE), re.findall(r"^From: (\S+)$", apptainer, re.MULTILINE))
        self.assertEqual(len(packages(docker)), 2)
        self.assertEqual(packages(docker), packages(apptainer))
        for pattern in (r"cmake --.*", r"cpack --.*", r"parka plan .*", r"/opt/parka/bin/pip install .*"):
            commands = [[found.rstrip("\\ ") for found in re.findall(pattern, text)] for text in (docker, apptainer)]
            self.assertGreater(len(commands[0]), 0, pattern)
            self.assertEqual(commands[0], commands[1])

    def test_what_they_copy_and_use_exists(self):
        for sources in re.findall(r"^COPY (?!--from)(.*) \S+$", text_of("Dockerfile"), re.MULTILINE):
            for source in sources.split():
                self.assertTrue((ROOT / source).exists(), source)
        for name in ("Dockerfile", "Apptainer.def"):
            used = re.findall(r"/usr/share/parka/(\S+)", text_of(name))
            self.assertEqual([path for path in used if not (ROOT / path).exists()], [], name)
            self.assertGreaterEqual(len(used), 2)

    @skip_without(HADOLINT, "hadolint")
    def test_hadolint_finds_nothing(self):
        self.assertIsNotNone(HADOLINT, "hadolint is not on PATH")
        result = subprocess.run([HADOLINT, "--no-color", ROOT / "Dockerfile"], capture_output=True, text=True)
        self.assertEqual((result.returncode, result.stdout), (0, ""))


if __name__ == "__main__":
    unittest.main()
