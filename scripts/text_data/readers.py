"""Finds the input files and reads the documents in them.

A file is plain text, JSON Lines, Parquet, or a table in the Arrow format, in which Hugging Face's datasets library keeps
a data set on disk. Text and JSON Lines may be compressed (.gz, .zst).
"""

from __future__ import annotations

import codecs
import contextlib
import fnmatch
import gzip
import io
import json
import os
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator

from python_packages import advice

from .common import InputError, hub_advice, one_line, refuse_address, refuse_to_replace
from .conversations import RECORD_KEYS, bytes_of, conversation_of, kind_of

# Bounds the memory: a document is tokenized as a whole.
MAX_DOCUMENT_BYTES = 64 * 2**20
# Rows of a table that are in memory at the same time, beside what the format itself keeps (a group of rows of Parquet).
TABLE_ROWS = 256
FORMAT_NAMES = {"parquet": "Parquet", "arrow": "an Arrow table"}


@dataclass(frozen=True)
class Reading:
    """What is a document in a file. At most one of these is set."""

    field: str | None = None  # the text's field of JSON Lines, or its column of a table
    chat: bool | None = None  # whether a record is a conversation; None in a script without --chat, which then is not advised
    split_bytes: int | None = None  # plain text is cut into documents of about this size


def find_files(inputs: list[Path], patterns: list[str], out: Path, print_line: Callable[[str], None]) -> Iterator[Path]:
    """Files as given, folders walked in sorted order. `out`, a file or a folder, is left out: it may lie inside a folder.
    As a given file it is refused. Links to folders are not followed, because they may lead in circles, or to what nobody
    meant; `print_line` tells of those whose files are left out by that."""
    links: list[Path] = []
    for given in inputs:
        if os.path.isfile(given):
            refuse_to_replace(given, out)
            yield given
        elif os.path.isdir(given):
            for folder, folders, names in os.walk(given, onerror=raise_unreadable):
                visible = [f for f in folders if not f.startswith(".")]
                folders[:] = sorted(f for f in visible if (Path(folder) / f).resolve() != out)
                links += [Path(folder) / f for f in folders if os.path.islink(Path(folder) / f)]
                named = data_set_files(Path(folder), names)
                for name in named or sorted(names):
                    path = Path(folder) / name
                    if name == out.name and path.resolve() == out:
                        continue
                    if not is_wanted_name(path.relative_to(given), patterns):
                        continue
                    if os.path.isfile(path):
                        yield path
                    else:
                        refuse_missing(path, out, bool(named))
        else:
            refuse_address(given)
            advice = hub_advice(str(given), "--repo-type dataset") if "/" in str(given) else ""
            raise InputError(f"{given}: no such file or folder, or not one that you may read{advice and f'; {advice}'}")
    searched = [given.resolve() for given in inputs if os.path.isdir(given)]
    if left_out := [link for link in links if not is_below(link.resolve(), searched)]:
        others = f" and {len(left_out) - 1:,} more" if len(left_out) > 1 else ""
        print_line(f"{left_out[0]}{others}: links to folders are not followed; to have their files, give these folders, too")


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
            return [file["filename"] for file in json.loads((folder / "state.json").read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{folder}: is a data set that cannot be read ({one_line(error)}); save it again")
    return []


def file_format(path: Path) -> str:
    """gz, zst, parquet, arrow, or plain. A suffix of a compressed file counts, even where the content disagrees."""
    if path.suffix in (".gz", ".zst", ".parquet", ".arrow") and path.stat().st_size == 0:
        raise InputError(f"{path}: has no bytes, as after a download that failed; fetch it again or remove it")
    if path.suffix in (".gz", ".zst"):
        return path.suffix[1:]
    with open(path, "rb") as file:
        start = file.read(6)
    # An Arrow stream begins with the mark of a message, which is followed by the length of its schema.
    signs = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"PAR1": "parquet", b"ARROW1": "arrow", b"\xff" * 4: "arrow"}
    return next((name for sign, name in signs.items() if start.startswith(sign)), "plain")


def import_pyarrow(path: Path, what: str):
    try:
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: {what} needs the pyarrow package; {advice('pyarrow')}")
    return pyarrow


def check_size(document: bytes, place: str, advice: str) -> None:
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InputError(f"{place}: a document of more than {MAX_DOCUMENT_BYTES // 2**20} MiB; {advice}")


class InputFile:
    """The documents of a file, as bytes, which are UTF-8 if those of the file are; a conversation as JSON in one form."""

    def __init__(self, path: Path, reading: Reading):
        self.path, self._reading = path, reading
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
            raise InputError(f"{self.path}: cannot be read ({one_line(error)}); fix it or leave it out")

    def _documents(self) -> Iterator[bytes]:
        reading = self._reading
        if (kind := file_format(self.path)) in FORMAT_NAMES:
            yield from self._table_documents(kind)
        elif reading.field is not None or reading.chat:
            with self._open(kind) as file:
                refuse_utf16(file, self.path)
                yield from self._jsonl_documents(file)
        elif not self._looks_binary(kind):
            with self._open(kind) as file:
                yield from self._text_documents(file)

    def content(self) -> contextlib.AbstractContextManager[BinaryIO]:
        """What is in it, decompressed."""
        return self._open(file_format(self.path))

    @contextlib.contextmanager
    def _open(self, kind: str) -> Iterator[BinaryIO]:
        """The content, decompressed. A cut file ends with an error, not early."""
        with open(self.path, "rb") as self._raw:
            if kind == "gz":
                with gzip.open(self._raw, "rb") as file:
                    yield file
            elif kind == "zst":
                # Not the zstandard package, which reads the beginning of a cut file as if it were the whole.
                stream = import_pyarrow(self.path, "Zstandard").CompressedInputStream(self._raw, "zstd")
                with io.BufferedReader(stream) as file:
                    yield file
            else:
                yield self._raw

    def _looks_binary(self, kind: str) -> bool:
        """As git decides: whether there is a zero byte near the start. Refuses JSON, which is no plain text."""
        with self._open(kind) as file:
            self.is_binary = b"\0" in file.read(8000)
        if self.is_binary:
            return True
        name = self.path.name.removesuffix(".gz").removesuffix(".zst")
        with self._open(kind) as file:
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
        document = file.read(size)
        while True:
            if split_bytes and not document.endswith(b"\n"):
                document += file.readline(MAX_DOCUMENT_BYTES + 1)
            check_size(document, str(self.path), "cut it at line ends with --split-bytes, or leave it out")
            yield document
            document = file.read(size)
            if not document:
                return

    def _jsonl_documents(self, file: BinaryIO) -> Iterator[bytes]:
        number = 0
        while line := file.readline(MAX_DOCUMENT_BYTES + 1):
            number += 1
            self.place = place = f"{self.path}:{number}"
            check_size(line, place, "split this record")
            if not line.strip():
                continue
            try:
                record, is_utf8 = load_json(line)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{place}: is not JSON ({one_line(error)}); give JSON Lines, one object per line")
            yield self._document_of(record, place, is_utf8)

    def _table_documents(self, kind: str) -> Iterator[bytes]:
        """The rows of a Parquet file or an Arrow table."""
        pyarrow = import_pyarrow(self.path, FORMAT_NAMES[kind])
        fields = list(RECORD_KEYS) if self._reading.chat else [self._reading.field]
        if fields == [None]:
            raise InputError(f"{self.path}: is {FORMAT_NAMES[kind]}; name the column of its text with --jsonl-field")
        self._raw = open(self.path, "rb")
        number = 0
        try:
            with self._raw:
                for row, is_utf8, self._table_position in table_rows(pyarrow, self._raw, kind, fields, self.path):
                    number += 1
                    self.place = place = f"{self.path}, row {number}"
                    document = self._document_of(without_nulls(row) if self._reading.chat else row, place, is_utf8)
                    check_size(document, place, "split this record")
                    yield document
        except pyarrow.ArrowException as error:
            raise InputError(f"{self.path}: is not {FORMAT_NAMES[kind]} ({one_line(error)}); fix it or leave it out")

    def _document_of(self, record: object, place: str, is_utf8: bool) -> bytes:
        if isinstance(record, list):
            raise InputError(f"{place}: is an array; give JSON Lines, one object per line (jq -c '.[]' makes them)")
        if self._reading.chat:
            return conversation_of(record, place, is_utf8)
        field = self._reading.field
        if not isinstance(record, dict) or field not in record:
            raise InputError(f'{place}: has no string field "{field}"; name the text\'s field with --jsonl-field')
        if not isinstance(record[field], str):
            raise InputError(
                f'{place}: the field "{field}" is {kind_of(record[field])}, not text; leave such records out of the file, or name '
                "another field with --jsonl-field"
            )
        return bytes_of(record[field], is_utf8)


def load_json(line: bytes) -> tuple[object, bool]:
    """The value, and whether the line is UTF-8. Where it is not, U+DC80 to U+DCFF in texts stand for its bad bytes, as they do
    in Python's names of files."""
    try:
        return json.loads(line.decode("utf-8-sig")), True
    except UnicodeDecodeError:
        return json.loads(line.decode("utf-8-sig", "surrogateescape")), False


def refuse_utf16(file: io.BufferedReader | gzip.GzipFile, path: Path) -> None:
    """Of records. Plain text in UTF-16 has zero bytes, and counts as binary."""
    if file.peek(2)[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise InputError(f"{path}: is in UTF-16; make it UTF-8 (iconv -f UTF-16 -t UTF-8)")


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


def table_rows(pyarrow, file: BinaryIO, kind: str, fields: list[str], path: Path) -> Iterator[tuple[dict, bool, int]]:
    """The rows with the values of these columns, of which the first must be there; whether a row is UTF-8, if not as
    load_json() has it; and about where in the file the row ends."""
    stream = kind == "arrow" and file.read(6) != b"ARROW1"
    file.seek(0)
    if kind == "parquet":
        table = pyarrow.parquet.ParquetFile(file)
        schema = table.schema_arrow
        pieces = table.iter_batches(TABLE_ROWS, columns=fields, use_threads=False)
        placed = with_shares(pieces, table.metadata.num_rows, os.fstat(file.fileno()).st_size)
    elif stream:
        table = pyarrow.ipc.open_stream(file)
        schema = table.schema
        placed = with_places(table, file)
    else:
        table = pyarrow.ipc.open_file(file)
        schema = table.schema
        placed = with_places(map(table.get_batch, range(table.num_record_batches)), file)
    if fields[0] not in schema.names:
        raise InputError(f"{path}: has no column {fields[0]}; it has {', '.join(schema.names)}")
    for piece, first, last in placed:
        piece = piece.select([name for name in fields if name in schema.names])
        for start in range(0, len(piece), TABLE_ROWS):
            for number, (row, is_utf8) in enumerate(values_of(pyarrow, piece.slice(start, TABLE_ROWS)), start + 1):
                yield row, is_utf8, first + (last - first) * number // len(piece)


def values_of(pyarrow, rows) -> Iterator[tuple[dict, bool]]:
    """Of a few rows of a table. What it calls text may be other bytes, which pyarrow does not make text of."""
    try:
        for row in rows.to_pylist():
            yield row, True
    except UnicodeDecodeError:
        for number in range(len(rows)):
            row = {name: column[number] for name, column in zip(rows.schema.names, rows.columns)}
            try:
                yield {name: value.as_py() for name, value in row.items()}, True
            except UnicodeDecodeError:
                yield {name: escaped_value(pyarrow, value) for name, value in row.items()}, False


def escaped_value(pyarrow, scalar) -> object:
    """The value of a cell in which texts are not UTF-8."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pyarrow.StringScalar):
        return scalar.as_buffer().to_pybytes().decode("utf-8", "surrogateescape")
    if isinstance(scalar, (pyarrow.DictionaryScalar, pyarrow.ExtensionScalar)):
        return escaped_value(pyarrow, scalar.value)
    if isinstance(scalar, pyarrow.ListScalar):
        return [escaped_value(pyarrow, item) for item in scalar.values]
    if isinstance(scalar, pyarrow.StructScalar):
        return {name: escaped_value(pyarrow, item) for name, item in scalar.items()}
    return scalar.as_py()


def with_shares(pieces: Iterable, rows: int, size: int) -> Iterator[tuple]:
    """(piece, where it begins, where it ends) of a Parquet file, by its share of the rows: the bytes of a column lie together,
    and columns that nobody asks for are not read."""
    done = 0
    for piece in pieces:
        first, done = done, done + len(piece)
        yield piece, size * first // max(rows, 1), size * done // max(rows, 1)


def with_places(pieces: Iterable, file: BinaryIO) -> Iterator[tuple]:
    """The same of an Arrow table, whose pieces lie one behind the other, each with all of its columns."""
    last = 0
    for piece in pieces:
        first, last = last, file.tell()
        yield piece, first, last


def without_nulls(value: object) -> object:
    """A table gives every record all keys: those that a record does not have are null."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value
