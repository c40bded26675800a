"""Files, folders and pages that pages and comments name exist."""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FOLDERS = "bench|configs|docs|examples|fuzz|scripts|src|tests"
# `src/core/placement.h`, scripts/test.sh, tests/engine: from the root. Not what follows a letter, a dot or a slash.
FROM_ROOT = re.compile(rf"(?<![\w./-])((?:{FOLDERS})/[\w./*<>-]*)")
# `core/placement.h`, between backticks: from src/.
FROM_SOURCE = re.compile(r"`((?:comm|core|data|engine|kernels|model|optim)/[\w./*<>-]*)`")
# core/placement.h in a comment: from the root, src/ or src/kernels/.
IN_CODE = re.compile(rf"(?<![\w./-])((?:{FOLDERS}|comm|core|cpu|cuda|data|engine|kernels|model|ops|optim)/[\w./]+"
                     r"\.(?:h|cpp|cu|cuh|py|md))\b")
LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")
LINK_TO_PART = re.compile(r"\]\(([^)#]*)#([^)]+)\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def parts(text):
    """What links may name behind #: the headings of a page as GitHub writes them."""
    headings = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(CODE_BLOCK.sub("", text))]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def missing_parts(page, text):
    """PAGE#PART of the links whose page is there and has no such part."""
    found = []
    for name, part in LINK_TO_PART.findall(text):
        target = page.parent / name if name else page
        if "://" not in name and target.suffix == ".md" and target.exists() and part not in parts(target.read_text(encoding="utf-8")):
            found.append(f"{name}#{part}")
    return found


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

    def test_the_parts_that_links_name_exist(self):
        found = {str(page.relative_to(ROOT)): missing_parts(page, page.read_text(encoding="utf-8")) for page in PAGES}
        self.assertEqual({page: names for page, names in found.items() if names}, {})

    def test_missing_parts_are_found(self):
        text = "[a](architecture.md#words) [b](architecture.md#where-is-) [c](architecture.md#none) [d](none.md#x) [e](https://example.org/x.md#y)"
        self.assertEqual(missing_parts(ROOT / "docs/x.md", text), ["architecture.md#none"])

    def test_what_is_missing_is_found(self):
        text = ("`src/core/nowhere.h`, tests/core. `core/gone.h` `core/placement.h` scripts/*.sh configs/*.toml src/kernels/ops/<folder>/<op>.h "
                "build/src/x [page](memory.md) [none](none.md#part) [web](https://example.org/docs/none.md)")
        self.assertEqual(missing(ROOT / "docs/x.md", text), ["src/core/nowhere.h", "configs/*.toml", "core/gone.h", "none.md"])

    def test_what_comments_name_exists(self):
        found = []
        for file in [file for folder in ("src", "bench", "fuzz", "tests") for file in (ROOT / folder).rglob("*.*")]:
            if file.suffix in (".h", ".cpp", ".cu", ".cuh"):
                names = IN_CODE.findall(file.read_text(encoding="utf-8"))
                found += [f"{file.relative_to(ROOT)}: {name}" for name in names
                          if not any((ROOT / folder / name).exists() for folder in ("", "src", "src/kernels"))]
        self.assertEqual(found, [])

    def test_every_page_is_in_the_index(self):
        index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
        left = [page.name for page in (ROOT / "docs").rglob("*.md") if page.name != "README.md" and
                f"]({page.relative_to(ROOT / 'docs')})" not in index]
        self.assertEqual(left, [])


if __name__ == "__main__":
    unittest.main()
