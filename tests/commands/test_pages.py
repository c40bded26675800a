"""What README.md and the pages of docs/ print of `parka plan` and `parka config` is what these commands print."""
import os
import re
import shlex
import subprocess
import tempfile
import unittest
from pathlib import Path

from parka_runs import PROGRAM

ROOT = Path(__file__).resolve().parents[2]

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
DETERMINISTIC = re.compile(r"(?:build/release/)?parka (?:plan|config) ")


def examples(page):
    """Pairs of a command and the lines that the page shows below it: a block of bash and one without a language, or `$ command`
    within a block."""
    blocks = [(match[1], match[2]) for match in FENCE.finditer(page)]
    for (language, text), following in zip(blocks, blocks[1:] + [("end", "")]):
        command = text.replace("\\\n", " ").strip()
        if language == "bash" and "\n" not in command and DETERMINISTIC.match(command) and following[0] == "":
            yield command, following[1].splitlines()
        for part in re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]:
            command, *lines = part.replace("\\\n", " ").splitlines()
            if DETERMINISTIC.match(command) and lines:
                yield command, lines


def files(page):
    """Configs that a page shows: the name between backticks, then a block of JSON."""
    return re.findall(r"`([\w-]+\.json)`[^`\n]*:\n\n```json\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)


def difference(expected, printed):
    """None, or the first line of `expected` that is not printed where it should be; "..." stands for any lines."""
    at, anywhere = 0, False
    for line in expected:
        if line == "...":
            anywhere = True
            continue
        while anywhere and at < len(printed) and printed[at] != line:
            at += 1
        if at == len(printed) or printed[at] != line:
            return line
        at, anywhere = at + 1, False
    return None if anywhere or at == len(printed) else f"end of the output, not {printed[at]!r}"


class Pages(unittest.TestCase):
    def run_example(self, command, folder):
        arguments = shlex.split(command, comments=True)[1:]
        result = subprocess.run([os.path.abspath(PROGRAM), *arguments], capture_output=True, text=True, cwd=folder, timeout=300)
        self.assertEqual(result.returncode, 0, f"{command}: {result.stderr}")
        return result.stdout.splitlines()

    def test_printed_output_is_what_commands_print(self):
        found = 0
        for path in PAGES:
            page = path.read_text(encoding="utf-8")
            with tempfile.TemporaryDirectory(prefix="parka-test-") as folder:
                for name in ("configs", "tests"):
                    os.symlink(ROOT / name, os.path.join(folder, name))
                for name, text in files(page):
                    Path(folder, name).write_text(text, encoding="utf-8")
                for command, expected in examples(page):
                    found += 1
                    with self.subTest(page=path.name, command=command):
                        self.assertIsNone(difference(expected, self.run_example(command, folder)))
        self.assertGreater(found, 0)

    def test_output_that_differs_is_found(self):
        page = "`x.json`:\n\n```json\n{}\n```\n\n```bash\nbuild/release/parka plan x.json \\\n  --gpus 2\n```\n\n```\na\n...\nc\n```\n\n" \
               "```\n$ parka config show x.json\na\n$ parka train x.json\nb\n```\n"
        self.assertEqual(files(page), [("x.json", "{}\n")])
        self.assertEqual(list(examples(page)), [("build/release/parka plan x.json    --gpus 2", ["a", "...", "c"]),
                                                ("parka config show x.json", ["a"])])
        for printed, first in ((["a", "b", "c"], None), (["a", "c"], None), (["a", "b"], "c"), (["b", "c"], "a"), ([], "a")):
            self.assertEqual(difference(["a", "...", "c"], printed), first)
        self.assertIsNotNone(difference(["a"], ["a", "b"]))


if __name__ == "__main__":
    unittest.main()
