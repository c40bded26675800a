"""Finds the input files and reads the documents in them.

A file is plain text, JSON Lines, Parquet, or a table in the Arrow format, in which Hugging Face's datasets library keeps
a data set on disk. Text and JSON Lines may be compressed (.gz, .zst).
"""

from __future__ import annotations

import codecs
import collections
import contextlib
import fnmatch
import gzip
import io
import itertools
import json
import os
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator

from .common import InputError, hub_advice, one_line, printable, real_path, refuse_address, refuse_to_replace, tell
from .conversations import bytes_of, conversation_of, is_checked, kind_of, unread_keys
from .formats import ARCHIVES, START_BYTES, TABLES, check_content, file_format, kind_of_start, markup_of, refuse_archive, refuse_irregular, told
from .tables import MAX_DOCUMENT_BYTES, check_size, import_pyarrow, table_rows


@dataclass(frozen=True)
class Reading:
    """What is a document in a file. At most one of field, chat and split_bytes is set."""

    field: str | None = None  # the text's field of JSON Lines, or its column of a table
    chat: bool | None = None  # whether a record is a conversation; None in a script without --chat, which then is not advised
    split_bytes: int | None = None  # plain text is cut into documents of about this size
    holds_out: bool = False  # with chat: records that say that they are of another split than train are held out


# src/data/token_files.cpp has the same list.
LEFTOVERS = ("~", ".bak", ".tmp", ".part", ".partial", ".orig", ".old", ".crdownload", ".download", ".incomplete", ".aria2", ".swp")

# Names of files and folders as data sets have them for each split.
SPLITS = re.compile(r"(?:.*[-_.])?(train|test|valid|validation|val|dev|eval|held_?out)(?:[-_.\d].*)?", re.IGNORECASE)
QUOTED_ALL = "'.[]'"
MOST_KEYS = 200  # of one part that are told of
# Bytes of a text, and how many times as many another field has, where the wrong one may be named; records that tell of it.
SHORT_TEXT, FAR_LONGER, SAMPLE = 64, 10, 1000


def find_files(inputs: list[Path], patterns: list[str], out: Path, print_line: Callable[[str], None], texts: bool = False) -> Iterator[Path]:
    """Files as given, folders walked in sorted order, each file once, however often and by whatever names it is found. `out`,
    a file or a folder, is left out: it may lie inside a folder. As a given file it is refused. Links to folders are not
    followed, because they may lead in circles, or to what nobody meant. Without patterns, what editors and unfinished downloads
    leave behind is left out of folders, and refused as a given file: a shell's * takes it. Where `texts` are meant, web pages and CSV are
    refused as given files, too. `print_line` tells of what is left out or doubtful."""
    links: list[Path] = []
    leftovers: list[Path] = []
    markup: list[Path] = []
    twice: list[Path] = []
    splits: dict[Path, dict[str, Path]] = collections.defaultdict(dict)  # for each folder its names of splits
    seen: set[tuple[int, int]] = set()
    for path in walked_files(inputs, patterns, out, links):
        status = os.stat(path)
        if not patterns and path.name.lower().endswith(LEFTOVERS):
            if path in inputs:
                raise InputError(
                    f"{path}: is named as what an editor or an unfinished download leaves behind; leave it out, or rename it"
                )
            leftovers.append(path)
        elif (status.st_dev, status.st_ino) in seen:
            twice.append(path)
        else:
            seen.add((status.st_dev, status.st_ino))
            if texts and not patterns and (what := markup_of(path)):
                if path in inputs and path.suffix != ".txt":
                    raise InputError(f"{path}: is {what}, and would be learnt as it is written; if that is meant, name it .txt")
                markup.append(path)
            for place in (path, path.parent):
                if (split := SPLITS.fullmatch(place.name)) and not any(split[1].lower() in pattern.lower() for pattern in patterns):
                    splits[place.parent].setdefault(split[1].lower(), place)
            yield path
    searched = [real_path(given) for given in inputs if os.path.isdir(given)]
    links = [link for link in links if not is_below(real_path(link), searched)]
    held_out = [place for names in splits.values() if "train" in names for split, place in names.items() if split != "train"]
    for paths, told in (
        (held_out, "named as data to evaluate on, beside others for training, and taken with them; choose files with --include"),
        (links, "links to folders are not followed; to have their files, give these folders, too"),
        (leftovers, "left out as what an editor or a download has left; to have such files, rename them or give --include"),
        (markup, "web pages or CSV, learnt as they are written; make text or JSON Lines of them unless that is meant"),
        (twice, "found before, perhaps by another name; read once"),
    ):
        if paths:
            others = f" and {len(paths) - 1:,} more" if len(paths) > 1 else ""
            print_line(f"warning: {printable(paths[0])}{others}: {told}")


def walked_files(inputs: list[Path], patterns: list[str], out: Path, links: list[Path]) -> Iterator[Path]:
    """The files that find_files() chooses from. `links` gets the links to folders."""
    for given in inputs:
        if os.path.isfile(given):
            refuse_to_replace(given, out)
            refuse_archive(given)
            yield given
        elif os.path.isdir(given):
            for folder, folders, names in os.walk(given, onerror=raise_unreadable):
                visible = [f for f in folders if not f.startswith(".")]
                folders[:] = sorted(f for f in visible if real_path(Path(folder) / f) != out)
                links += [Path(folder) / f for f in folders if os.path.islink(Path(folder) / f)]
                named = data_set_files(Path(folder), names)
                for name in named or sorted(names):
                    path = Path(folder) / name
                    if name == out.name and real_path(path) == out:
                        continue
                    if not is_wanted_name(path.relative_to(given), patterns):
                        continue
                    if os.path.isfile(path):
                        yield path
                    else:
                        refuse_missing(path, out, bool(named))
        else:
            refuse_address(given)
            refuse_irregular(given)
            advice = hub_advice(str(given), "--repo-type dataset") if "/" in str(given) else ""
            raise InputError(f"{given}: no such file or folder, or not one that you may read{advice and f'; {advice}'}")


def refuse_missing(path: Path, out: Path, named: bool) -> None:
    """Of what is no file in a folder: pipes and the like are left out, but what should be a file would be missed."""
    if os.path.islink(path) and not os.path.exists(path):
        if os.path.realpath(path) != str(out):
            raise InputError(
                f"{path}: is a link to {os.readlink(path)}, which is not there or cannot be reached; fetch that, or remove the link, "
                "or choose other files with --include"
            )
    elif named:
        raise InputError(f"{path}: is not there, but state.json beside it names it; fetch it, or save the data set again")


def is_below(folder: Path, searched: list[Path]) -> bool:
    """Whether a search of the folders `searched`, which are free of links, comes to `folder`."""
    return any(
        folder.is_relative_to(each) and not any(part.startswith(".") for part in folder.relative_to(each).parts) for each in searched
    )


def is_wanted_name(path: Path, patterns: list[str]) -> bool:
    if path.name.startswith("."):
        return False
    return not patterns or any(
        fnmatch.fnmatchcase(name, pattern) for name in (path.name, path.as_posix()) for pattern in patterns
    )


def raise_unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be read ({error.strerror})")


def data_set_files(folder: Path, names: list[str]) -> list[str]:
    """The tables, in their order, of a folder that the datasets library wrote (`save_to_disk`), else nothing."""
    try:
        if "dataset_dict.json" in names:
            splits = json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
            raise InputError(f"{folder}: is a data set with splits; give one or more of them: {', '.join(splits)}")
        if "state.json" in names and "dataset_info.json" in names:
            tables = [file["filename"] for file in json.loads((folder / "state.json").read_bytes())["_data_files"]]
            if other := next((name for name in tables if name in ("", "..") or name != os.path.basename(name)), None):
                raise ValueError(f"its table {other} lies elsewhere")
            return tables
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{folder}: is a data set that cannot be read ({one_line(error)}); save it again")
    return []


class InputFile:
    """The documents of a file, as bytes, which are UTF-8 if those of the file are; a conversation as JSON in one form."""

    def __init__(self, path: Path, reading: Reading, told: collections.Counter | None = None):
        """`told` counts records without the text's field as "lacking", their keys as "lacking KEY", and keys that are not read as "unread KEY"."""
        self.path, self._reading = path, reading
        self._told = collections.Counter() if told is None else told
        self._raw: BinaryIO | None = None  # the file as it is stored
        self._table_position: int | None = None  # of a table
        self.is_binary = False  # valid once documents() has ended: nothing was read
        self.place = str(path)  # of the last document

    @property
    def position(self) -> int:
        """Bytes read of the stored file. A table is read ahead of its rows: there it is how far the last row lies in the file."""
        if self._raw is None or self._raw.closed:
            return 0
        return self._raw.tell() if self._table_position is None else self._table_position

    def documents(self) -> Iterator[bytes]:
        try:
            yield from self._documents()
        except (OSError, EOFError, zlib.error) as error:
            raise unreadable(self.path, error)

    def _documents(self) -> Iterator[bytes]:
        reading = self._reading
        has_records = reading.field is not None or bool(reading.chat)
        if (kind := file_format(self.path, has_records)) in TABLES:
            yield from self._table_documents(kind)
        elif has_records:
            with self._open(kind, has_records) as file:
                yield from self._with_values(self._jsonl_documents(file))
        elif not self._looks_binary(kind):
            with self._open(kind, has_records) as file:
                yield from self._text_documents(file)

    def _with_values(self, documents: Iterator[bytes | None]) -> Iterator[bytes]:
        """Records without a value, as tables have them and programs that leave out what is null, count as empty documents. A file
        that has no others is of another form."""
        records = values = filled = size = 0
        for document in documents:
            records += 1
            values += document is not None
            filled += bool(document)
            size += len(document or b"")
            yield document or b""
        if records and not values:
            field, advice = self._reading.field, "name another one with --jsonl-field, or leave the file out"
            if self._reading.chat:
                field, advice = "messages", "--chat wants a list of messages in each record"
            raise InputError(f'{self.path}: all of its {records:,} records lack "{field}", or have null there; {advice}')
        if not self._reading.chat:
            self._tell_of_other_field(size / max(filled, 1), 2 * filled < records)

    def _tell_of_other_field(self, length: float, is_empty: bool) -> None:
        """Where texts have about this length or most of them are empty, and another field of the records has more, or begins with them."""
        field, sizes, number = self._reading.field, collections.defaultdict(list), 0
        begun: collections.Counter = collections.Counter()
        with contextlib.suppress(Exception):  # what nobody asked for may be in any state
            asked = (record for record in self._records() if not (is_empty and record.get(field)))
            for number, record in enumerate(itertools.islice(asked, SAMPLE), 1):
                text = str(record.get(field) or "")
                start = text.rstrip(" .\u2026")
                for name, value in record.items():
                    if name != field and isinstance(value, str):
                        sizes[name].append(len(bytes_of(value, False)))
                        begun[name] += bool(start) and len(value) > len(text) and value.startswith(start)
        medians = {name: sorted(some + [0] * (number - len(some)))[number // 2] for name, some in sizes.items()}
        other = max(medians, key=medians.get, default=None)
        is_begin = other is not None and 2 * begun[other] > number
        if other is None or medians[other] < (max(length / 2, 1) if is_empty or is_begin else max(FAR_LONGER * length, SHORT_TEXT)):
            return
        doubt = f"is short, and another field is {FAR_LONGER} times as long"
        if is_empty:
            doubt = "is null or empty in more than half of the records"
            self._told[f"fuller {other}"] += 1
        elif is_begin:
            doubt = "is the beginning of another field"
        tell(self._told, "files", printable(f'"{field}" {doubt}; name "{other}" with --jsonl-field if its text is meant'), str(self.path))

    def _records(self) -> Iterator[dict]:
        """All that is in the records, of a file that was read before."""
        if (kind := file_format(self.path, has_records=True)) in TABLES:
            with open(self.path, "rb") as file:
                yield from (row for row, _, _ in table_rows(import_pyarrow(self.path, TABLES[kind]), file, kind, list, self.path))
        else:
            with self._open(kind, has_records=True) as file:
                yield from (record for line in file if line.strip() and isinstance(record := load_json(line)[0], dict))

    def content(self) -> contextlib.AbstractContextManager[BinaryIO]:
        """What is in a file of JSON, decompressed."""
        kind = file_format(self.path, has_records=True)
        if kind in TABLES:
            raise InputError(f"{self.path}: is {TABLES[kind]}, not JSON; write its rows as JSON Lines")
        return self._open(kind, has_records=True)

    @contextlib.contextmanager
    def _open(self, kind: str, has_records: bool) -> Iterator[BinaryIO]:
        """The content, decompressed. A cut file ends with an error, not early."""
        with open(self.path, "rb") as self._raw:
            if kind == "gz":
                with gzip.open(self._raw, "rb") as file:
                    self._check_compressed(file, has_records)
                    yield file
            elif kind == "zst":
                # Not the zstandard package, which reads the beginning of a cut file as if it were the whole.
                stream = import_pyarrow(self.path, "Zstandard").CompressedInputStream(self._raw, "zstd")
                with io.BufferedReader(stream) as file:
                    self._check_compressed(file, has_records)
                    yield file
            else:
                yield self._raw

    def _check_compressed(self, file: io.BufferedReader | gzip.GzipFile, has_records: bool) -> None:
        check_content(file.peek(START_BYTES)[:START_BYTES], self.path, Path(self.path.stem).suffix, has_records)

    def _looks_binary(self, kind: str) -> bool:
        """As git decides: whether there is a zero byte near the start. Refuses JSON, which is no plain text."""
        with self._open(kind, has_records=False) as file:
            start = file.read(8000)
            content = kind_of_start(start[:START_BYTES])
        self.is_binary = b"\0" in start or content in ARCHIVES
        if content == "utf16":
            tell(self._told, "files", f"left out, which {told(content)}", str(self.path))
        if self.is_binary:
            return True
        name = self.path.name.removesuffix(".gz").removesuffix(".zst")
        with self._open(kind, has_records=False) as file:
            is_json = name.endswith((".jsonl", ".ndjson")) or holds_json(file, name.endswith(".json"))
        if is_json:
            for_chat = "" if self._reading.chat is None else " use --chat for conversations,"
            raise InputError(
                f"{self.path}: is JSON, not plain text; name the field of its text with --jsonl-field,{for_chat} or choose other files "
                "with --include"
            )
        return False

    def _text_documents(self, file: BinaryIO) -> Iterator[bytes]:
        """The whole file, or pieces of about split_bytes that end at line ends."""
        split_bytes = self._reading.split_bytes
        size = split_bytes or MAX_DOCUMENT_BYTES + 1
        document = file.read(size).removeprefix(codecs.BOM_UTF8)
        while True:
            if split_bytes and not document.endswith(b"\n"):
                document += file.readline(MAX_DOCUMENT_BYTES + 1)
            check_size(len(document), str(self.path), "cut it at line ends with --split-bytes, or leave it out")
            yield document
            document = file.read(size)
            if not document:
                return

    def _jsonl_documents(self, file: BinaryIO) -> Iterator[bytes | None]:
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            self.place = place = f"{self.path}:{number}"
            check_size(len(line), place, "split this record")
            if not line.strip():
                continue
            try:
                record, is_utf8 = load_json(line)
            except (ValueError, RecursionError) as error:
                is_begin = number == 1 and line.strip().removeprefix(codecs.BOM_UTF8) in (b"[", b"{", b"[{")
                made = f" (of such a file jq -c {'.' if line.strip().endswith(b'{') and b'[' not in line else QUOTED_ALL} makes them)" if is_begin else ""
                raise InputError(f"{place}: is not JSON ({one_line(error)}); give JSON Lines, one object per line{made}")
            yield self._document_of(record, place, is_utf8)

    def _table_documents(self, kind: str) -> Iterator[bytes]:
        """The rows of a Parquet file or an Arrow table."""
        pyarrow = import_pyarrow(self.path, TABLES[kind])
        self._raw = open(self.path, "rb")
        try:
            with self._raw:
                yield from self._with_values(self._documents_of_rows(table_rows(pyarrow, self._raw, kind, self._columns, self.path)))
        except (pyarrow.ArrowMemoryError, MemoryError) as error:
            raise MemoryError(f"{self.path}: {one_line(error)}")
        except (pyarrow.ArrowException, OverflowError, ValueError) as error:  # the last where a part of a message is there twice
            raise InputError(f"{self.path}: cannot be read as {TABLES[kind]} ({one_line(error)}); where it is cut short fetch it again, else fix it or leave it out")

    def _columns(self, names: list[str]) -> list[str]:
        """Those of a table that are read, first the one that must be there."""
        if not self._reading.chat:
            if self._reading.field is None:
                raise InputError(f"{self.path}: is a table; name the column of its text with --jsonl-field: it has {', '.join(names)}")
            return [self._reading.field]
        self._tell("unread", (f"{name} of records" for name in names if not is_checked(name)))
        return ["messages", *(name for name in dict.fromkeys(names) if is_checked(name) and name != "messages")]

    def _tell(self, what: str, keys: Iterable[str]) -> None:
        for key in keys:
            if len(self._told) < MOST_KEYS or f"{what} {key}" in self._told:
                self._told[f"{what} {key}"] += 1

    def _documents_of_rows(self, rows: Iterator[tuple[dict, bool, int]]) -> Iterator[bytes | None]:
        for number, (row, is_utf8, self._table_position) in enumerate(rows, 1):
            self.place = place = f"{self.path}, row {number}"
            if self._reading.chat:  # but what is null is not left out itself
                row = {name: without_nulls(value) for name, value in row.items()}
            document = self._document_of(row, place, is_utf8)
            check_size(len(document or b""), place, "split this record")
            yield document

    def _document_of(self, record: object, place: str, is_utf8: bool) -> bytes | None:
        try:
            return self._value_of(record, place, is_utf8)
        except KeyTwice as error:
            raise InputError(f"{place}: {error}; keep one of them")

    def _value_of(self, record: object, place: str, is_utf8: bool) -> bytes | None:
        if record is None:
            return None
        if not isinstance(record, dict):
            raise InputError(
                f"{place}: is {kind_of(record)}, not an object; give JSON Lines, one object per line (of an array jq -c '.[]' makes them)"
            )
        if self._reading.chat:
            is_null = "messages" in record and record.get("messages") is None
            if is_null:
                return None
            conversation = conversation_of(record, place, is_utf8, self._reading.holds_out)
            self._tell("unread", unread_keys(record))
            return conversation
        field = self._reading.field
        if (value := record.get(field)) is None:
            if field not in record:
                self._told["lacking"] += 1
                self._tell("lacking", record)
            return None
        if not isinstance(value, str):
            raise InputError(
                f'{place}: the field "{field}" is {kind_of(value)}, not text; leave such records out of the file, or name '
                "another field with --jsonl-field"
            )
        return bytes_of(value, is_utf8)


class KeyTwice(ValueError):
    """A key that is asked for is there twice. One line, without the place."""


class Object(dict):
    """A JSON object that has keys twice. Those that nobody asks for are no hindrance."""

    def __init__(self, pairs: list[tuple[str, object]]):
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self._twice = {name for name in names if names.count(name) > 1}

    def __getitem__(self, name):
        return super().__getitem__(self._once(name))

    def get(self, name, default=None):
        return super().get(self._once(name), default)

    def items(self):
        self._once(next(iter(self._twice)))  # whoever takes them all asks for this one, too

    def _once(self, name):
        if name in self._twice:
            raise KeyTwice(f'the key "{name}" is there several times')
        return name


def object_of(pairs: list[tuple[str, object]]) -> dict:
    """For json.loads()."""
    plain = dict(pairs)
    return plain if len(plain) == len(pairs) else Object(pairs)


def unreadable(path: Path, error: Exception) -> InputError:
    """Of a file whose content cannot be read to its end."""
    reason = one_line(error)
    if "too much memory" in reason:  # what Zstandard says of more than 128 MiB
        return InputError(f"{path}: was compressed with a window that is too large (zstd --long); decompress it (zstd -d --long=31)")
    if isinstance(error, (EOFError, zlib.error)) or "Truncated" in reason or "Expected to" in reason:  # the last of Arrow's tables
        return InputError(f"{path}: cannot be read ({reason}): it is cut short or damaged; fetch it again or leave it out")
    return InputError(f"{path}: cannot be read ({reason}); fix it or leave it out")


def load_json(line: bytes) -> tuple[object, bool]:
    """The value, and whether the line is UTF-8. Where it is not, U+DC80 to U+DCFF in texts stand for its bad bytes, as they do
    in Python's names of files."""
    try:
        return json.loads(line.decode("utf-8-sig"), object_pairs_hook=object_of), True
    except UnicodeDecodeError:
        return json.loads(line.decode("utf-8-sig", "surrogateescape"), object_pairs_hook=object_of), False


def holds_json(file: BinaryIO, any_json: bool) -> bool:
    """Whether the first line with text is a JSON object or an array of such; with `any_json` whether it begins as one."""
    line = b""
    while not line.strip():
        if not (line := file.readline(MAX_DOCUMENT_BYTES + 1)):
            return False
    line = line.removeprefix(b"\xef\xbb\xbf").strip()
    if line[:1] not in (b"{", b"["):
        return False
    if any_json:
        return True
    try:
        value, _ = load_json(line)
    except (ValueError, RecursionError):
        return False
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(item, dict) for item in value))


def without_nulls(value: object) -> object:
    """A table gives every record all keys: those that a record does not have are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
