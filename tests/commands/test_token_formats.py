"""Files of other formats are no raw ids: each is refused before a step is made. Files of the formats that docs/data.md lists are
read to the last token."""
import bz2
import gzip
import io
import json
import lzma
import pickle
import struct
import tarfile
import unittest
import zipfile

from parka_runs import parka
from refusals import FETCH_IT, LFS_POINTER, assert_refused, shown
from token_runs import BATCH, SEQUENCE, TokenRuns, np, random_ids

try:
    import pyarrow
    import pyarrow.ipc
    import pyarrow.parquet
except ImportError:
    pyarrow = None

COUNT = 40 * SEQUENCE
VOCAB = 65536  # every pair of bytes is an id of it
IDS = random_ids(COUNT, VOCAB)


def of_file(write):
    """What a function writes into a file."""
    file = io.BytesIO()
    write(file)
    return file.getvalue()


def whole(content):
    """Filled up to a whole number of ids of 32 bits."""
    return content + b"\0" * (-len(content) % 4)


def zipped(name, content):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(name, content)
    return file.getvalue()


def tarred(content):
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        info = tarfile.TarInfo("ids.npy")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def llm_c(magic, version, count, ids=b""):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, count
    return header.tobytes() + ids


def llmq(ids, vocab):
    return (b"BIN.TOK\n" + np.array([2, 4, len(ids), vocab, 0], "<i4").tobytes()).ljust(1024, b"\0") + ids.astype("<i4").tobytes()


def safetensors(ids):
    header = json.dumps({"ids": {"dtype": "U16", "shape": [len(ids)], "data_offsets": [0, 2 * len(ids)]}}).encode()
    header += b" " * (-len(header) % 8)
    return struct.pack("<Q", len(header)) + header + ids.tobytes()


RAW = IDS.tobytes()
OTHERS = {
    "ids.npz": of_file(lambda file: np.savez(file, ids=IDS)),
    "compressed.npz": of_file(lambda file: np.savez_compressed(file, ids=IDS)),
    "saved_by_torch.bin": zipped("archive/data.pkl", pickle.dumps([1, 2], protocol=2) + RAW),
    "zip_without_its_name.npy": zipped("ids.bin", RAW),
    "ids.npy.gz": gzip.compress(RAW),
    "gzip_without_its_name.npy": gzip.compress(RAW),
    "ids.bin.xz": lzma.compress(RAW),
    "xz_without_its_name.bin": lzma.compress(RAW),
    "ids.safetensors": safetensors(IDS),
    "safetensors_without_its_name.npy": safetensors(IDS),
    "llmq.bin": llmq(random_ids(COUNT, VOCAB, "<i4"), VOCAB),
    "llm_c_questions.bin": llm_c(20240522, 1, 10, RAW),  # hellaswag_val.bin
    "llm_c_model.bin": llm_c(20240326, 5, 1024, RAW),
    "llm_c_tokenizer.bin": llm_c(20240328, 2, 50257, RAW),
}
if pyarrow is not None:
    table = pyarrow.table({"ids": IDS})
    sink = io.BytesIO()
    with pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    OTHERS |= {
        "ids.npy.zst": pyarrow.Codec("zstd").compress(RAW, asbytes=True),
        "ids.parquet": of_file(lambda file: pyarrow.parquet.write_table(table, pyarrow.PythonFile(file, "w"))),
        "parquet_without_its_name.bin": of_file(lambda file: pyarrow.parquet.write_table(table, pyarrow.PythonFile(file, "w"))),
        "ids.arrow": sink.getvalue(),
    }


class Refused(TokenRuns):
    def test_other_formats_are_not_trained_on(self):
        for name, content in OTHERS.items():
            path = self.write(name, whole(content))
            for dtype in ("uint16", "uint32"):
                with self.subTest(name, dtype=dtype):
                    # With ids of 32 bits nearly all of them are beyond the vocabulary: it has to be said when the file is opened.
                    config = self.config([self.path("good.npy"), path], VOCAB, token_dtype=dtype, shuffle=False)
                    self.write("good.npy", IDS if dtype == "uint16" else IDS.astype("<u4"))
                    self.forget_run()
                    self.assert_not_trained(self.train(config), name)

    def test_files_of_llm_c_with_other_names(self):
        """Their header is no id: they are refused, or read as what they are."""
        for name, content in (("llm_c.npy", llm_c(20240520, 1, COUNT, RAW)), ("llm_c.tokens", llm_c(20240520, 1, COUNT, RAW)),
                              ("llm_c_wide.npy", llm_c(20240801, 7, COUNT, IDS.astype("<u4").tobytes()))):
            path = self.write(name, content)
            with self.subTest(name):
                self.forget_run()
                result = self.train(self.config([path], VOCAB))
                if result.returncode != 0:
                    self.assert_not_trained(result, name)
                else:
                    self.assertEqual([(one["format"], one["tokens"]) for one in self.data_of(path)], [("llm.c", COUNT)], shown(result))

    def test_the_data_command_and_held_out_data(self):
        good = self.write("good.npy", IDS)
        for name in ("ids.npz", "gzip_without_its_name.npy", "llmq.bin", "ids.safetensors", "llm_c_questions.bin"):
            path = self.write(name, whole(OTHERS[name]))
            with self.subTest(name):
                assert_refused(self, parka("data", path), name)
                self.forget_run()
                self.assert_not_trained(self.train(self.config([good], VOCAB, eval=[path])), name)

    def test_files_of_an_archiver_and_of_pickle(self):
        for name, content in {"ids.npy.bz2": bz2.compress(RAW), "ids.tar": tarred(RAW), "ids.pkl": pickle.dumps(IDS),
                              "ids.h5": b"\x89HDF\r\n\x1a\n" + RAW}.items():
            path = self.write(name, whole(content))
            with self.subTest(name):
                self.forget_run()
                self.assert_not_trained(self.train(self.config([path], VOCAB)), name)

    def test_ids_of_a_vocabulary_beyond_16_bits(self):
        """As those files are most often met."""
        ids = random_ids(COUNT, 128256, "<u4")
        for name, content in {"ids.npz": of_file(lambda file: np.savez(file, ids=ids)), "llmq.bin": llmq(ids, 128256)}.items():
            path = self.write(name, whole(content))
            for data in ({}, {"token_dtype": "uint32"}):
                with self.subTest(name, **data):
                    self.forget_run()
                    self.assert_not_trained(self.train(self.config([path], 128256, **data)), name)

    def test_a_pointer_of_git_lfs(self):
        good = self.write("good.npy", IDS)
        pointer = LFS_POINTER + b"\n" * (-len(LFS_POINTER) % 4)
        for name in ("train.npy", "train.bin", "train.tokens"):
            path = self.write(name, pointer)
            with self.subTest(name):
                self.assert_not_trained(self.train(self.config([path], VOCAB, sequence_length=16)), name, FETCH_IT)
                self.assert_not_trained(self.train(self.config([good], VOCAB, sequence_length=16, eval=[path])), name, FETCH_IT)
                assert_refused(self, parka("data", path), name, FETCH_IT)

    def test_a_pointer_in_place_of_what_lies_beside_the_tokens(self):
        path = self.write("x.npy", IDS)
        self.write("x.npy.mask", LFS_POINTER)
        self.assert_not_trained(self.train(self.config([path], VOCAB, loss_mask=True)), "x.npy.mask", FETCH_IT)
        path = self.write("y.bin", IDS)
        self.write("y.idx", LFS_POINTER)
        self.assert_not_trained(self.train(self.config([path], VOCAB)), "y.idx", FETCH_IT)


class Read(TokenRuns):
    def assert_read(self, path, vocab, file_format, dtype, **data):
        """All of its tokens, and both steps of a run."""
        said = self.data_of(path) if file_format != "raw" else self.data_of(path, "--dtype", dtype)
        self.assertEqual([(one["format"], one["token_dtype"], one["tokens"]) for one in said], [(file_format, dtype, COUNT)])
        config = self.config([path], vocab, **data)
        self.assertEqual(self.targets_of_first_step(config), BATCH * (SEQUENCE - 1))

    def test_raw_ids_as_olmo_and_nanogpt_write_them(self):
        self.assert_read(self.write("part-00-00000.npy", random_ids(COUNT, 50280)), 50304, "raw", "uint16")  # OLMo, memmap of uint16
        self.assert_read(self.write("part-01-00000.npy", random_ids(COUNT, 100278, "<u4")), 100352, "raw", "uint32", token_dtype="uint32")
        self.assert_read(self.write("train.bin", random_ids(COUNT, 50257)), 50304, "raw", "uint16")  # nanoGPT

    def test_files_of_llm_c(self):
        path = self.write("fineweb_train_000001.bin", llm_c(20240520, 1, COUNT, random_ids(COUNT, 50257).tobytes()))
        self.assert_read(path, 50304, "llm.c", "uint16")
        path = self.write("tiny_shakespeare_train.bin", llm_c(20240801, 7, COUNT, random_ids(COUNT, 128256, "<u4").tobytes()))
        self.assert_read(path, 128256, "llm.c", "uint32")

    def write_megatron(self, name, ids, code, lengths):
        self.write(f"{name}.bin", ids)
        count, starts = len(lengths), np.concatenate([[0], np.cumsum(lengths)[:-1]]) * ids.itemsize
        self.write(f"{name}.idx", b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, count, count + 1) + np.array(lengths, "<i4").tobytes()
                   + starts.astype("<i8").tobytes() + np.arange(count + 1, dtype="<i8").tobytes())
        return self.path(name)

    def test_files_of_megatron(self):
        lengths = [10] * (COUNT // 10)
        path = self.write_megatron("gpt2_text_document", random_ids(COUNT, 50257), 8, lengths)
        for end in (".bin", ".idx"):
            self.assert_read(path + end, 50304, "Megatron", "uint16")
        path = self.write_megatron("llama_text_document", random_ids(COUNT, 128256, "<i4"), 4, lengths)
        self.assert_read(path + ".bin", 128256, "Megatron", "uint32")

    def test_ids_of_llmq_without_the_header(self):
        path = self.write("llmq.bin", llmq(random_ids(COUNT, 128256, "<i4"), 128256))
        ids = np.fromfile(path, "<i4", offset=1024)
        self.assert_read(self.write("raw.npy", ids.astype("<u4")), 128256, "raw", "uint32", token_dtype="uint32")

    def test_ids_that_begin_nearly_as_another_format_does(self):
        """A file that begins with such ids by chance is sound."""
        for name, start in (("zip", b"PK\x05\x09"), ("zip_of_two", b"PK\x00\x00"), ("gzip", b"\x1f\x8b\xff\x01"), ("numpy", b"\x93NUMBE"),
                            ("parquet", b"PAR2"), ("zst", b"\x28\xb5\x2f\xfe"), ("xz", b"\xfd7zYZ\x00"), ("arrow", b"ARROW2"),
                            ("version", b"version 2"), ("llmq", b"BIN.TOM\n"), ("pickle", b"\x80\x04\x00\x01"), ("json", b'{"a": 1}')):
            content = start + b"\x01" * (len(start) % 2)
            path = self.write(f"{name}.npy", content + RAW[len(content):])
            with self.subTest(name):
                self.assert_read(path, VOCAB, "raw", "uint16")


if __name__ == "__main__":
    unittest.main()
