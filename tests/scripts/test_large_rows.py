#!/usr/bin/env python3
"""Tables whose rows are large take no more memory than a few of them. Exits with 77 (skipped) where a package is missing."""
import sys
import unittest

from chat_data import ChatData, np, pyarrow, user
from script_runs import SCRIPTS

from measured import GIB, MIB, assert_bounded, run_measured
from refusals import assert_ended_well, assert_refused

import pyarrow.ipc  # noqa: E402

SECONDS = 20  # on a machine with other work


def python(name, *arguments):
    return run_measured([sys.executable, SCRIPTS / f"{name}.py", *arguments], SECONDS, address_space=5 * GIB)


class LargeRows(ChatData):
    """Small files whose rows are together as large as a gigabyte, of which the first few are asked for."""
    TEXT, ROWS = 4 * MIB, 160
    PEAK = 400  # MiB; Python with its packages has about 100, and one row is a few times in memory at once

    def assert_read(self, path, *options):
        result = python("prepare_data", path, *options, "--out", self.new_out())
        assert_bounded(self, result, mib=self.PEAK)
        assert_ended_well(self, result)

    def shared(self, values):
        """A column all of whose rows are one value."""
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array(np.zeros(self.ROWS, "<i4")), pyarrow.array(values))

    FEW = ("--jsonl-field", "text", "--max-tokens", 3 * TEXT)

    def test_one_text_in_all_rows(self):
        path = self.folder / "shared.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": self.shared(["a" * self.TEXT])}), path)
        self.assert_read(path, *self.FEW)

    def test_one_text_in_all_rows_of_an_arrow_file(self):
        table = pyarrow.table({"text": self.shared(["a" * self.TEXT])})
        path = self.folder / "shared.arrow"
        with pyarrow.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
        self.assert_read(path, *self.FEW)

    def test_rows_that_compress_well(self):
        path = self.folder / "rows.parquet"
        texts = pyarrow.array([chr(97 + number % 26) * self.TEXT for number in range(80)])
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), path, compression="zstd", use_dictionary=False, row_group_size=10)
        self.assert_read(path, *self.FEW)

    def test_conversations(self):
        path = self.folder / "chats.parquet"
        said = [[user("a" * self.TEXT), {"role": "assistant", "content": "b"}]] * 40
        pyarrow.parquet.write_table(pyarrow.table({"messages": said}), path, compression="zstd")
        del said
        result = python("prepare_data", path, "--chat", "chatml", "--sequence-length", self.TEXT + 256, "--out", self.new_out())
        assert_bounded(self, result, mib=self.PEAK)

    def test_another_column_is_not_read(self):
        path = self.folder / "other.parquet"
        texts = pyarrow.array([f"text {number}" for number in range(self.ROWS)])
        pyarrow.parquet.write_table(pyarrow.table({"other": self.shared(["a" * self.TEXT]), "text": texts}), path)
        self.assert_read(path, "--jsonl-field", "text")

    def test_a_text_beyond_the_limit_is_named(self):
        path = self.folder / "beyond.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"text": self.shared(["a" * 65 * MIB])}), path)
        result = python("prepare_data", path, "--jsonl-field", "text", "--out", self.new_out())
        assert_bounded(self, result, mib=600)
        assert_refused(self, result, "beyond.parquet, row 1")


if __name__ == "__main__":
    unittest.main()
