"""What a file is by its first bytes, and whether that is what its name or its place promises."""

from __future__ import annotations

import bz2
import lzma
import os
import re
import stat
from pathlib import Path

from .common import InputError

TABLES = {"parquet": "Parquet", "arrow": "an Arrow table"}
COMPRESSED = {"gz": "gzip", "zst": "Zstandard"}
# The content that these ends of a name promise. A file of another name is what its content says.
PROMISES = {".gz": "gz", ".zst": "zst", ".parquet": "parquet", ".arrow": "arrow"}
JSON_NAMES = (".json", ".jsonl", ".ndjson")
# Names that promise text. Archives of other names are no text, as other files with zero bytes are none.
TEXT_NAMES = (*JSON_NAMES, ".txt", ".md")
# Texts in which tags or separators would be learnt.
MARKUP = {".html": "a web page", ".htm": "a web page", ".xhtml": "a web page", ".csv": "CSV", ".tsv": "a table"}
START_BYTES = 1024
SIGNS = (
    (rb"\x1f\x8b", "gz"),
    (rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", "zst"),  # or a frame to be skipped, which pzstd puts first
    (rb"PAR1", "parquet"),
    (rb"ARROW1|\xff{4}", "arrow"),  # a stream begins with the mark of a message, before the length of its schema
    (rb"\xfd7zXZ\0", "xz"),
    (rb"BZh[1-9](1AY&SY|\x17\x72\x45\x38\x50\x90)", "bz2"),
    (rb"PK(\x03\x04|\x05\x06)", "zip"),
    (rb"7z\xbc\xaf\x27\x1c", "7z"),
    (rb"Rar!\x1a\x07", "rar"),
    (rb"\x04\x22\x4d\x18", "lz4"),
    (rb"%PDF-", "pdf"),
    (rb"version https?://(git-lfs\.github\.com/spec|hawser\.github\.com/spec|git-media\.io)/", "pointer"),
    (rb"/annex/objects/", "annex"),
    (rb"\xff\xfe(?!\0\0)|\xfe\xff|([\t\n\r -~]\0){4}|(\0[\t\n\r -~]){4}", "utf16"),  # with a byte order mark, or in Latin letters
    (rb"(\xef\xbb\xbf)?\s*<", "page"),
)
POINTER_BYTES = 1024  # a pointer has fewer
# The message about each, and the remedy.
TOLD = {
    "gz": ("is compressed by gzip", "give it a name that ends in .gz"),
    "zst": ("is compressed by Zstandard", "give it a name that ends in .zst"),
    "parquet": ("is Parquet", "give it a name that ends in .parquet"),
    "arrow": ("is an Arrow table", "give it a name that ends in .arrow"),
    "xz": ("is compressed by xz", "decompress it (xz -d)"),
    "bz2": ("is compressed by bzip2", "decompress it (bzip2 -d)"),
    "zip": ("is a zip archive", "unpack it (unzip), or leave it out"),
    "7z": ("is a 7z archive", "unpack it, or leave it out"),
    "rar": ("is a rar archive", "unpack it, or leave it out"),
    "lz4": ("is compressed by lz4", "decompress it (lz4 -d)"),
    "utf16": ("is in UTF-16", "make it UTF-8 (iconv -f UTF-16 -t UTF-8)"),
    "pdf": ("is a PDF", "make text of it, or leave it out"),
    "pointer": ("is a Git LFS pointer, not the file that it stands for", "fetch that: git lfs pull"),
    "annex": ("is a pointer of git-annex, not the file that it stands for", "fetch that: git annex get"),
    "page": ("is a web page or XML, as sites send for what is gone or needs a login", "fetch the file again"),
    "binary": ("is binary, of no format that is read here", "fetch it again or leave it out"),
    "text": ("is text", "give it a name that ends in .txt or .jsonl, or fetch it again"),
}
POINTERS = ("pointer", "annex")
ARCHIVES = ("zip", "7z", "rar", "lz4", "pdf", "utf16")  # in a folder of text they are left out as binary


def told(kind: str) -> str:
    return "; ".join(TOLD[kind])


def kind_of_start(start: bytes, size: int | None = None) -> str:
    """By the first START_BYTES of a file, of `size` bytes where that is known: one of TOLD."""
    for sign, kind in SIGNS:
        if re.match(sign, start):
            is_text_about_them = kind in POINTERS and (len(start) if size is None else size) >= POINTER_BYTES
            return "text" if is_text_about_them else kind
    return "binary" if b"\0" in start else "text"


def is_irregular(path: Path) -> bool:
    """Whether it is a pipe, a socket or a device, which a script would wait for, or never come to the end of."""
    try:
        mode = os.stat(path).st_mode
    except OSError:
        return False  # opening it says why
    return not stat.S_ISREG(mode) and not stat.S_ISDIR(mode)


def refuse_irregular(path: Path) -> None:
    if is_irregular(path):
        raise InputError(f"{path}: is a pipe, a socket or a device; write what it holds into a file and give that")


def read_start(path: Path) -> bytes:
    with open(path, "rb") as file:
        return file.read(START_BYTES)


def refuse_pointer(path: Path) -> None:
    """Raises an InputError for a file that stands for another one, which was not fetched."""
    try:
        kind = kind_of_start(read_start(path), path.stat().st_size)
    except OSError:
        return  # whoever opens it says why
    if kind in POINTERS:
        raise InputError(f"{path}: {told(kind)}")


def refuse_no_content(path: Path) -> None:
    """Of a small file that is read as a whole, if there is one."""
    refuse_irregular(path)
    refuse_pointer(path)


def refuse_archive(path: Path) -> None:
    """Raises an InputError for a file that holds text in a form that is not read, once the file is asked for by its name."""
    try:
        kind = kind_of_start(read_start(path))
    except OSError:
        return
    if kind in ARCHIVES:
        raise InputError(f"{path}: {told(kind)}")


def file_format(path: Path, has_records: bool) -> str:
    """gz, zst, parquet, arrow, or plain. Raises an InputError for what is not what its name promises, and for what cannot hold
    records where `has_records`, or text where not."""
    refuse_irregular(path)
    size, promised = path.stat().st_size, PROMISES.get(path.suffix)
    if promised and size == 0:
        raise InputError(f"{path}: has no bytes, as after a download that failed; fetch it again or remove it")
    start = read_start(path)
    kind = kind_of_start(start, size)
    if kind in POINTERS:
        raise InputError(f"{path}: {told(kind)}")
    if promised:
        # A table of one kind under the name of the other can be read, and what begins otherwise the library judges.
        fits = kind == promised or (promised in TABLES and kind in TABLES) or (promised in COMPRESSED and kind == "binary")
        if not fits:
            raise InputError(f"{path}: ends in {path.suffix}, but {told(kind)}")
        return kind if kind in TABLES else promised
    if kind in TABLES or kind in COMPRESSED:
        return kind
    check_content(start, path, path.suffix, has_records)
    return "plain"


def check_content(start: bytes, path: Path, suffix: str, has_records: bool) -> None:
    """Likewise of what a plain or decompressed file begins with; without compression its name would end in `suffix`."""
    kind = kind_of_start(start)
    if kind in TABLES or kind in COMPRESSED:  # inside of a compressed file
        raise InputError(f"{path}: what is compressed in it {TOLD[kind][0]}; decompress it once, and {TOLD[kind][1]}")
    if kind == "page":
        is_wrong = has_records or suffix in JSON_NAMES
    elif kind in ARCHIVES:
        is_wrong = has_records or suffix in TEXT_NAMES
    elif kind in ("xz", "bz2"):
        is_wrong = has_records or suffix in TEXT_NAMES or not holds_zero(path, kind)
    elif has_records and MARKUP.get(suffix.lower()) in ("CSV", "a table"):
        raise InputError(f"{path}: is {MARKUP[suffix.lower()]} by its name; make JSON Lines of its rows")
    else:
        is_wrong = kind == "binary" and has_records
    if is_wrong:
        raise InputError(f"{path}: {told(kind)}")


def markup_of(path: Path) -> str | None:
    """What a text is that is learnt with its tags or separators, by its name or its first bytes; None of others."""
    is_compressed = path.suffix[1:] in COMPRESSED
    what = MARKUP.get((path.with_suffix("") if is_compressed else path).suffix.lower())
    if what is None and path.suffix in (*PROMISES, *JSON_NAMES):
        return None
    try:
        start = b"" if is_irregular(path) else read_start(path)
    except OSError:
        return None  # whoever opens it says why
    if what is not None or kind_of_start(start) not in ("text", "page"):
        return what if kind_of_start(start) in ("text", "page", *COMPRESSED) else None
    return MARKUP[".html"] if re.match(rb"(\xef\xbb\xbf)?\s*<(!doctype html|html)\b", start, re.IGNORECASE) else None


def holds_zero(path: Path, kind: str) -> bool:
    """Whether there is a zero byte near the start of what is compressed."""
    decompressor = lzma.LZMADecompressor() if kind == "xz" else bz2.BZ2Decompressor()
    with open(path, "rb") as file:
        try:
            return b"\0" in decompressor.decompress(file.read(2**20), 8000)
        except (OSError, EOFError, lzma.LZMAError):
            return True
