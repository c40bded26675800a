"""For mkdocs.yml: files outside of docs/ that pages link to become pages and files below repository/."""
import re
from pathlib import Path

from mkdocs.structure.files import File

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(\]\()([^)#:\s]+)((?:#[^)]*)?\))")


def targets(path):
    """Files of the repository that a page links to."""
    found = (path.parent / match[2] for match in LINK.finditer(path.read_text(encoding="utf-8")))
    return {target.resolve() for target in found if target.is_file()}


def outside():
    """Those outside of docs/, also by way of one another."""
    seen, left = set(), list(DOCS.rglob("*.md"))
    while left:
        page = left.pop()
        new = {target for target in targets(page) if not target.is_relative_to(DOCS) and ROOT in target.parents} - seen
        seen |= new
        left += [target for target in new if target.suffix == ".md"]
    return seen


def place(path):
    """Of a file in the site."""
    return path.relative_to(DOCS) if path.is_relative_to(DOCS) else Path("repository") / path.relative_to(ROOT)


def on_files(files, config):
    for path in sorted(outside()):
        files.append(File.generated(config, str(place(path)), abs_src_path=str(path)))
    return files


def on_page_markdown(markdown, page, **_):
    source, here = Path(page.file.abs_src_path), Path(page.file.src_uri).parent

    def link(match):
        target = (source.parent / match[2]).resolve()
        if not target.is_file() or ROOT not in target.parents or target.is_relative_to(DOCS) and source.is_relative_to(DOCS):
            return match[0]
        up = [".."] * len(here.parts)
        return f"{match[1]}{'/'.join([*up, *place(target).parts])}{match[3]}"

    return LINK.sub(link, markdown)
