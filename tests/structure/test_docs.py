"""Files, folders and pages that pages and comments name exist. Pages of docs/results/history are records of their day: only what
they link to does."""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/results").glob("*.md"))]
FOLDERS = "bench|configs|docs|examples|fuzz|scripts|src|tests"
# `src/core/shard.h`, scripts/test.sh, tests/engine: from the root. Not what follows a letter, a dot or a slash.
FROM_ROOT = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*<>-]*)")
# `core/shard.h`, between backticks: from src/.
FROM_SOURCE = re.compile(r"`((?:comm|core|data|engine|kernels|model|optim)/[\w./*<>-]*)`")
# core/shard.h in a comment: from the root, src/ or src/kernels/.
IN_CODE = re.compile(rf"(?<![\w./-])((?:{FOLDERS}|comm|core|cpu|cuda|data|engine|kernels|model|ops|optim)/[\w./]+"
                     r"\.(?:h|cpp|cu|cuh|py|md))\b")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def missing(page, text):
    """What the text of a page names that is not there. A name with <...> is a pattern, as one with * is."""
    def exists(folder, name):
        name = re.sub(r"<\w*>", "*", name.rstrip(".-"))
        return any(folder.glob(name)) if "*" in name else (folder / name).exists()

    return ([name for name in FROM_ROOT.findall(text) if not exists(ROOT, name)] +
            [name for name in FROM_SOURCE.findall(text) if not exists(ROOT / "src", name)] +
            [name for name in LINK.findall(text) if "://" not in name and not (page.parent / name).exists()])


class Docs(unittest.TestCase):
    def test_what_pages_name_exists(self):
        found = {str(page.relative_to(ROOT)): missing(page, page.read_text(encoding="utf-8")) for page in PAGES}
        self.assertEqual({page: names for page, names in found.items() if names}, {})

    def test_what_pages_of_history_link_to_exists(self):
        pages = sorted((ROOT / "docs/results/history").glob("*.md"))
        found = [f"{page.name}: {name}" for page in pages for name in LINK.findall(page.read_text(encoding="utf-8"))
                 if "://" not in name and not (page.parent / name).exists()]
        self.assertEqual(found, [])

    def test_what_is_missing_is_found(self):
        text = ("`src/core/nowhere.h`, tests/core. `core/gone.h` `core/shard.h` scripts/*.sh configs/*.toml src/kernels/ops/<folder>/<op>.h "
                "build/src/x [page](testing.md) [none](none.md#part) [web](https://example.org/docs/none.md)")
        self.assertEqual(missing(ROOT / "docs/x.md", text), ["src/core/nowhere.h", "configs/*.toml", "core/gone.h", "none.md"])

    def test_what_comments_name_exists(self):
        found = []
        for file in [file for folder in ("src", "bench", "fuzz", "tests") for file in (ROOT / folder).rglob("*.*")]:
            if file.suffix in (".h", ".cpp", ".cu", ".cuh"):
                names = IN_CODE.findall(file.read_text(encoding="utf-8"))
                found += [f"{file.relative_to(ROOT)}: {name}" for name in names
                          if not any((ROOT / folder / name).exists() for folder in ("", "src", "src/kernels"))]
        self.assertEqual(found, [])

    def test_the_example_of_a_config_key_lists_its_files(self):
        page = (ROOT / "docs/extending.md").read_text(encoding="utf-8")
        section = page[page.index("\n## A config key\n"):]
        key = re.search(r"`\w+\.(\w+)` is the example", section)[1]
        listed = re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
        files = [*(ROOT / "src").rglob("*.*"), *(ROOT / "tests").rglob("*.cpp"), *(ROOT / "docs").glob("*.md"),
                 *(ROOT / "configs").glob("*.json")]
        known = {str(file.relative_to(ROOT)) for file in files if key in file.read_text(encoding="utf-8")}
        self.assertEqual(known - {"docs/extending.md"}, set(listed))

    def test_every_page_is_in_the_index(self):
        index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
        pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/results").glob("*.md")]
        left = [page.name for page in pages if page.name != "README.md" and
                f"]({page.relative_to(ROOT / 'docs')})" not in index]
        self.assertEqual(left, [])


if __name__ == "__main__":
    unittest.main()
