"""The pages of docs/ as a site: mkdocs finds every link and every page. Skipped where mkdocs is missing."""
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WITH_MKDOCS = importlib.util.find_spec("material") is not None or os.environ.get("CI") == "true"


def build(root, site):
    return subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", root / "mkdocs.yml", "--site-dir", site],
                          capture_output=True, text=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})


@unittest.skipUnless(WITH_MKDOCS, "needs mkdocs-material of scripts/requirements-dev.txt")
class Site(unittest.TestCase):
    def setUp(self):
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory(prefix="parka-test-")))

    def test_it_builds_without_a_dead_link(self):
        result = build(ROOT, self.folder)
        self.assertEqual(result.returncode, 0, result.stderr)
        index = (self.folder / "search/search_index.json").read_text(encoding="utf-8")
        for found in ("optimizer.schedule.warmup_steps", "norm_forward"):  # a key, a kernel
            self.assertIn(found, index)
        self.assertTrue((self.folder / "repository/CONTRIBUTING.html").exists())

    def test_a_dead_link_and_a_page_without_a_place_are_errors(self):
        root = self.folder / "root"
        for name in ("docs", "examples", "configs"):
            shutil.copytree(ROOT / name, root / name)
        for path in [*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "CITATION.cff", ROOT / "mkdocs.yml"]:
            shutil.copy(path, root)
        for path, more in (("docs/guide.md", "[x](nowhere.md)"), ("docs/guide.md", "[x](install.md#nowhere)"), ("CONTRIBUTING.md", "[x](docs/nowhere.md)"), ("docs/new.md", "# New")):
            with self.subTest(path, more=more):
                before = (root / path).read_text(encoding="utf-8") if (root / path).exists() else None
                (root / path).write_text(f"{before or ''}\n{more}\n", encoding="utf-8")
                result = build(root, self.folder / "site")
                self.assertNotEqual(result.returncode, 0)
                self.assertRegex(result.stderr, re.escape(Path(path).name))
                (root / path).write_text(before, encoding="utf-8") if before else (root / path).unlink()


if __name__ == "__main__":
    unittest.main()
