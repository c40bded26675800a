"""LICENSE, CHANGELOG.md, CITATION.cff and CMakeLists.txt agree about version and date; requirements are pinned."""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def text_of(name):
    return (ROOT / name).read_text(encoding="utf-8")


class ProjectFiles(unittest.TestCase):
    def test_the_version_is_the_same_everywhere(self):
        built = re.search(r"project\(parka VERSION ([0-9.]+) ", text_of("CMakeLists.txt"))[1]
        newest = re.search(r"^## (\S+), (\S+)$", text_of("CHANGELOG.md"), re.MULTILINE)
        cited = text_of("CITATION.cff")
        self.assertEqual(newest[1], built)
        self.assertIn(f"\nversion: {built}\n", cited)
        self.assertIn(f"\ndate-released: {newest[2]}\n", cited)

    def test_versions_of_the_changelog_fall(self):
        headings = re.findall(r"^## (.*)$", text_of("CHANGELOG.md"), re.MULTILINE)
        if headings[0] == "Unreleased":
            del headings[0]
        entries = re.findall(r"^## (\S+), (\d{4}-\d{2}-\d{2})$", text_of("CHANGELOG.md"), re.MULTILINE)
        self.assertEqual(len(entries), len(headings))
        order = [(tuple(map(int, version.split("."))), date) for version, date in entries]
        self.assertEqual(order, sorted(order, reverse=True))

    def test_requirements(self):
        """What only developers need is pinned; the wheel and a checkout take the same ranges of all else."""
        def lines(name):
            return [line for line in text_of(name).splitlines() if line and not line.startswith("#")]

        self.assertEqual([line for line in lines("scripts/requirements-dev.txt") if not re.search(r"==|>=[\d.]+,<", line)], [])
        project = re.search(r"(?s)^dependencies = (.*?)^cuda", text_of("pyproject.toml"), re.MULTILINE)[1]
        of_wheel = set(re.findall(r'"([^"]*>=[^"]*)"', project))
        self.assertEqual({line for line in of_wheel if not line.startswith(("wandb", "mlflow"))}, set(lines("scripts/requirements.txt")))


if __name__ == "__main__":
    unittest.main()
