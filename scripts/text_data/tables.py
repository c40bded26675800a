"""Reads the rows of Parquet files and Arrow tables, of which only a few become Python's texts at a time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Callable, Iterable, Iterator

try:
    import numpy as np
except ImportError:
    np = None  # as import_pyarrow() says

from python_packages import advice

from .common import InputError

# Bounds the memory: a document is tokenized as a whole.
MAX_DOCUMENT_BYTES = 64 * 2**20
# Rows that are in memory at the same time, beside what the format itself keeps (a page of Parquet, a piece of an Arrow table),
# and about how many bytes of text they may have together.
TABLE_ROWS, TABLE_BYTES = 256, 64 * 2**20
# With more rows in a group each row is too short for one at a time to be fast.
ROWS_ONE_BY_ONE = 2**14
FEWEST_ROWS = 16


def import_pyarrow(path: Path, what: str):
    try:
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise InputError(f"{path}: {what} needs the pyarrow package; {advice('pyarrow')}")
    if np is None:
        raise InputError(f"{path}: {what} needs the numpy package; {advice('numpy')}")
    return pyarrow


def check_size(size: int, place: str, advice: str) -> None:
    if size > MAX_DOCUMENT_BYTES:
        raise InputError(f"{place}: a document of more than {MAX_DOCUMENT_BYTES // 2**20} MiB; {advice}")


def table_rows(pyarrow, file: BinaryIO, kind: str, columns: Callable[[list[str]], list[str]], path: Path) -> Iterator[tuple[dict, bool, int]]:
    """The rows with the values of those `columns` that it chooses of all, of which the first must be there; whether a row is UTF-8, if not as
    readers.load_json() has it; and about where in the file the row ends."""
    stream = kind == "arrow" and file.read(6) != b"ARROW1"
    file.seek(0)
    if kind == "parquet":
        table = pyarrow.parquet.ParquetFile(file)
        schema = table.schema_arrow
        fields = columns(schema.names)
        check_columns(schema, fields, path)
        pieces = table.iter_batches(rows_at_once(pyarrow, table, fields), columns=fields, use_threads=False)
        placed = with_shares(pieces, table.metadata.num_rows, os.fstat(file.fileno()).st_size)
    else:
        table = pyarrow.ipc.open_stream(file) if stream else pyarrow.ipc.open_file(file)
        schema = table.schema
        fields = columns(schema.names)
        check_columns(schema, fields, path)
        pieces = whole_stream(table, file, path) if stream else map(table.get_batch, range(table.num_record_batches))
        placed = with_places(pieces, file)
    before = 0
    for piece, first, last in placed:
        piece = piece.select([name for name in fields if name in schema.names])
        if kind == "arrow":
            for column in piece.columns:
                validate(pyarrow, column)
        done = 0
        for rows in few_rows(pyarrow, piece, f"{path}, row ", before):
            for row, is_utf8 in values_of(pyarrow, rows):
                done += 1
                yield row, is_utf8, first + (last - first) * done // len(piece)
        before += len(piece)


def check_columns(schema, fields: list[str], path: Path) -> None:
    if fields[0] not in schema.names:
        raise InputError(f"{path}: has no column {fields[0]}; it has {', '.join(schema.names)}")
    for field in fields:
        if schema.names.count(field) > 1:
            raise InputError(f"{path}: has the column {field} {schema.names.count(field)} times; rename or drop all but one")


def rows_at_once(pyarrow, table, fields: list[str]) -> int:
    """How many rows of a Parquet file are decoded together. No text is longer than its column in a group of rows, but a group
    may have a long text many times, and store it once."""
    types = [table.schema_arrow.field(name).type for name in fields if name in table.schema_arrow.names]
    if all(map(pyarrow.types.is_dictionary, types)):  # stays as it is stored
        return TABLE_ROWS
    paths = [table.schema.column(i).path + "." for i in range(len(table.schema))]
    columns = [i for i, path in enumerate(paths) if any(path.startswith(f"{name}.") for name in fields)]
    groups = [table.metadata.row_group(i) for i in range(table.metadata.num_row_groups)]
    longest = max((sum(group.column(i).total_uncompressed_size for i in columns) for group in groups), default=0)
    fewest = 1 if max((group.num_rows for group in groups), default=0) <= ROWS_ONE_BY_ONE else FEWEST_ROWS
    return min(TABLE_ROWS, max(fewest, TABLE_BYTES // max(longest, 1)))


def few_rows(pyarrow, piece, place: str, before: int) -> Iterator:
    """The rows of a piece in slices, none of which takes much memory as Python's texts. Raises an InputError for a row that is
    larger than a document may be, before anything is made of it; `before` rows have come before the piece."""
    sizes = sum(bytes_of_rows(pyarrow, column) for column in piece.columns).tolist() if len(piece) else []
    start = total = 0
    for number, size in enumerate(sizes):
        if number > start and (total + size > TABLE_BYTES or number - start == TABLE_ROWS):
            yield piece.slice(start, number - start)
            start, total = number, 0
        check_size(size, f"{place}{before + number + 1}", "split this record")
        total += size
    if start < len(piece):
        yield piece.slice(start)


def validate(pyarrow, array) -> None:
    """Raises pyarrow.ArrowInvalid where a damaged table leads out of its memory: pyarrow reads what a file says unchecked. Texts
    need not be UTF-8, and are checked as bytes."""
    array = array.storage if isinstance(array, pyarrow.ExtensionArray) else array
    array.view(as_bytes(pyarrow, array.type)).validate(full=True)


def as_bytes(pyarrow, kind):
    """The type with bytes in the place of texts."""
    types = pyarrow.types
    for is_of_it, other in ((types.is_string, pyarrow.binary()), (types.is_large_string, pyarrow.large_binary()),
                            (types.is_string_view, pyarrow.binary_view())):
        if is_of_it(kind):
            return other
    if types.is_dictionary(kind):
        return pyarrow.dictionary(kind.index_type, as_bytes(pyarrow, kind.value_type), kind.ordered)
    if types.is_struct(kind):
        return pyarrow.struct([field.with_type(as_bytes(pyarrow, field.type)) for field in kind.fields])
    if types.is_map(kind):
        return pyarrow.map_(as_bytes(pyarrow, kind.key_type), as_bytes(pyarrow, kind.item_type), kind.keys_sorted)
    for is_of_it, make in ((types.is_list, pyarrow.list_), (types.is_large_list, pyarrow.large_list), (types.is_list_view, pyarrow.list_view),
                           (types.is_large_list_view, pyarrow.large_list_view)):
        if is_of_it(kind):
            return make(kind.value_field.with_type(as_bytes(pyarrow, kind.value_type)))
    if types.is_fixed_size_list(kind):
        return pyarrow.list_(kind.value_field.with_type(as_bytes(pyarrow, kind.value_type)), kind.list_size)
    return kind


def bytes_of_rows(pyarrow, array):
    """How many bytes of text are in each row: an array of numpy."""
    types, kind = pyarrow.types, array.type
    if isinstance(array, pyarrow.ExtensionArray):
        return bytes_of_rows(pyarrow, array.storage)
    if types.is_dictionary(kind):
        sizes = np.append(bytes_of_rows(pyarrow, array.dictionary), 0)  # the last of them is that of null
        return sizes[array.indices.cast(pyarrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False)]
    if types.is_run_end_encoded(kind):
        places = np.searchsorted(array.run_ends.to_numpy(), array.offset + np.arange(len(array)), side="right")
        return bytes_of_rows(pyarrow, array.values)[places]
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)  # each begins with its length
        return views[array.offset : array.offset + len(array), 0].astype(np.int64)
    if types.is_string(kind) or types.is_large_string(kind) or types.is_binary(kind) or types.is_large_binary(kind):
        sizes = pyarrow.compute.binary_length(array).fill_null(0)
        return sizes.to_numpy(zero_copy_only=False).astype(np.int64)
    if types.is_struct(kind):
        return sum((bytes_of_rows(pyarrow, array.field(i)) for i in range(kind.num_fields)), np.zeros(len(array), np.int64))
    if types.is_map(kind):
        parts = (array.keys, array.items)
    elif types.is_nested(kind) and hasattr(array, "values"):
        parts = (array.values,)
    else:
        return np.zeros(len(array), np.int64)
    ends = np.concatenate(([0], np.cumsum(sum(bytes_of_rows(pyarrow, part) for part in parts))))
    if types.is_fixed_size_list(kind):
        starts = (array.offset + np.arange(len(array))) * kind.list_size
        return ends[starts + kind.list_size] - ends[starts]
    offsets = array.offsets.to_numpy()
    if types.is_list_view(kind) or types.is_large_list_view(kind):
        return ends[offsets + array.sizes.to_numpy()] - ends[offsets]
    return ends[offsets[1:]] - ends[offsets[:-1]]


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


def whole_stream(table, file: BinaryIO, path: Path) -> Iterator:
    """The pieces of an Arrow stream, which pyarrow takes for whole where it ends behind any of them."""
    last = file.tell()
    for piece in table:
        last = file.tell()
        yield piece
    if file.tell() == last:
        raise InputError(f"{path}: is cut short, since an Arrow stream ends with a mark; fetch or write it again, or leave it out")


def with_places(pieces: Iterable, file: BinaryIO) -> Iterator[tuple]:
    """The same of an Arrow table, whose pieces lie one after the other, each with all of its columns."""
    last = 0
    for piece in pieces:
        first, last = last, file.tell()
        yield piece, first, last
