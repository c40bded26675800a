#!/usr/bin/env python3
"""Turns text into token files for Parka.

    prepare_data.py corpus/ --out data/corpus --eval-fraction 0.01
    prepare_data.py dolma/*.json.gz --jsonl-field text --tokenizer tokenizer.json --out data/dolma

    prepare_data.py chats.jsonl --chat chatml --tokenizer tokenizer.json --sequence-length 4096 --out data/chats

Inputs are files, or folders that are searched recursively in sorted order (hidden names are left out). A text file
is one document, or several with --split-bytes; with --jsonl-field every input is JSON Lines and each line is one
document. Names that end in .gz are decompressed. Each document is followed by the end-of-document id.

With --chat each line is a conversation, {"messages": [{"role": "user", "content": "..."}, ...]}. A template (chatml,
llama2, llama3, or the chat_template of a tokenizer_config.json) makes text of it, of which only what the assistant says
is a target. Whole conversations are packed into sequences of --sequence-length tokens; longer ones are cut there.

Writes into the folder --out, which must not exist yet or be empty:
    train-00000.npy, ...   raw little-endian uint16 or uint32 ids, no header (the naming and form of OLMo)
    eval-00000.npy, ...    the same for held-out documents, with --eval-fraction
    train-00000.npy.mask   with --chat: a byte per token: 1 for a target, plus 2 for the first of a conversation
    data.json              what was made: counts, vocabulary, tokenizer, dtype
    tokenizer/             a copy of the tokenizer.json and what lies beside it, for `parka generate` and `parka export`

The folder appears whole or not at all. Identical documents are kept once, and whether a document is held out
depends on its content alone: neither another order, other names nor more data move it between train and eval.

Exit codes: 0 done, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import fnmatch
import gzip
import hashlib
import json
import os
import shutil
import signal
import sys
import time
import zlib
from pathlib import Path
from typing import BinaryIO, Iterable, Iterator

try:
    import numpy as np
except ImportError:
    print("prepare_data: error: numpy is missing; install it with: pip install numpy", file=sys.stderr)
    sys.exit(2)

sys.path.insert(0, str(Path(__file__).resolve().parent))
import chat_data  # noqa: E402
from tokenizer_files import copy_tokenizer  # noqa: E402

# Bounds the memory: a document is tokenized as a whole.
MAX_DOCUMENT_BYTES = 64 * 2**20
# Documents are tokenized together up to this many bytes, so that a tokenizer can use all cores.
BATCH_BYTES = 8 * 2**20
# A last file with fewer tokens joins the one before, because Parka refuses a file shorter than one sequence.
MIN_LAST_FILE_TOKENS = 2**20
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>")


class InputError(Exception):
    """The user can fix it. One line: what, where, what to do."""


class ByteTokenizer:
    """Ids 0-255 are the bytes themselves, 256 ends a document."""

    name = "bytes"
    sha256 = None
    vocab_size = 257
    eos = 256

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(document, np.uint8) for document in documents]


class JsonTokenizer:
    """A tokenizer.json of Hugging Face's tokenizers library."""

    def __init__(self, path: Path, eos_name: str | None):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError("--tokenizer needs the tokenizers package; install it with: pip install tokenizers")
        if not path.is_file():
            raise InputError(f"{path}: no such tokenizer file; give bytes, or the path of a tokenizer.json")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises plain Exception
            raise InputError(f"{path}: is not a tokenizer.json ({one_line(error)}); give another file")
        # A tokenizer.json may carry the settings of whoever saved it; both would damage documents.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.name = path.name
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.eos = self._find_eos(path, eos_name)

    def _find_eos(self, path: Path, eos_name: str | None) -> int:
        for name in [eos_name] if eos_name else EOS_NAMES:
            token = self._tokenizer.token_to_id(name)
            if token is not None:
                return token
        if eos_name:
            raise InputError(f"{path}: has no token {eos_name}; give --eos another name")
        raise InputError(f"{path}: has none of {', '.join(EOS_NAMES)}; name its end-of-document token with --eos")

    def encode(self, documents: list[bytes]) -> list[np.ndarray]:
        texts = [document.decode("utf-8") for document in documents]
        encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]


class TokenWriter:
    """Writes ids into <split>-00000.npy, <split>-00001.npy, ... of a folder; whatever else has one byte per token goes
    into files of the same names with a suffix, through a writer of its own."""

    def __init__(self, folder: Path, split: str, tokens_per_file: int, suffix: str = ""):
        self._folder, self._split, self._tokens_per_file = folder, split, tokens_per_file
        self._suffix = suffix
        self._file: BinaryIO | None = None
        self._counts: list[int] = []  # tokens of each file
        self.documents = 0

    @property
    def tokens(self) -> int:
        return sum(self._counts)

    def _path(self, index: int) -> Path:
        return self._folder / f"{self._split}-{index:05d}.npy{self._suffix}"

    def write(self, ids: np.ndarray) -> None:
        while len(ids) > 0:
            if self._file is None or self._counts[-1] == self._tokens_per_file:
                self._close()
                self._counts.append(0)
                self._file = open(self._path(len(self._counts) - 1), "wb")
            part = ids[: self._tokens_per_file - self._counts[-1]]
            self._file.write(part.data)
            self._counts[-1] += len(part)
            ids = ids[len(part) :]

    def _close(self) -> None:
        if self._file is not None:
            sync_and_close(self._file)
            self._file = None

    def finish(self) -> None:
        self._close()
        least = min(MIN_LAST_FILE_TOKENS, self._tokens_per_file // 2)
        if len(self._counts) > 1 and self._counts[-1] < least:
            last = self._path(len(self._counts) - 1)
            with open(last, "rb") as source, open(self._path(len(self._counts) - 2), "ab") as target:
                shutil.copyfileobj(source, target)
                sync(target)
            last.unlink()
            joined = self._counts.pop()
            self._counts[-1] += joined

    def summary(self) -> dict:
        files = [self._path(i).name for i in range(len(self._counts))]
        return {"files": files, "documents": self.documents, "tokens": self.tokens}


def one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


def sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_and_close(file: BinaryIO) -> None:
    with file:
        sync(file)


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find_files(inputs: list[Path], patterns: list[str], out: Path) -> Iterator[Path]:
    """Files as given, folders walked in sorted order. The output folder is left out: it may lie inside an input."""
    for given in inputs:
        if os.path.isfile(given):
            yield given
        elif os.path.isdir(given):
            for folder, folders, names in os.walk(given, onerror=raise_unreadable):
                visible = [f for f in folders if not f.startswith(".")]
                folders[:] = sorted(f for f in visible if (Path(folder) / f).resolve() != out)
                for name in sorted(names):
                    path = Path(folder) / name
                    if is_wanted_name(path.relative_to(given), patterns) and os.path.isfile(path):
                        yield path
        else:
            raise InputError(f"{given}: no such file or folder, or not one that you may read")


def is_wanted_name(path: Path, patterns: list[str]) -> bool:
    if path.name.startswith("."):
        return False
    return not patterns or any(
        fnmatch.fnmatchcase(name, pattern) for name in (path.name, path.as_posix()) for pattern in patterns
    )


def raise_unreadable(error: OSError) -> None:
    raise InputError(f"{error.filename}: cannot be read ({error.strerror})")


def check_size(document: bytes, place: str, advice: str) -> None:
    if len(document) > MAX_DOCUMENT_BYTES:
        raise InputError(f"{place}: a document of more than {MAX_DOCUMENT_BYTES // 2**20} MiB; {advice}")


def text_documents(file: BinaryIO, path: Path, split_bytes: int | None) -> Iterator[bytes]:
    """The whole file, or pieces of about split_bytes that end at line ends."""
    size = split_bytes or MAX_DOCUMENT_BYTES + 1
    document = file.read(size)
    while True:
        if split_bytes and not document.endswith(b"\n"):
            document += file.readline(MAX_DOCUMENT_BYTES + 1)
        check_size(document, str(path), "cut it at line ends with --split-bytes, or leave it out")
        yield document
        document = file.read(size)
        if not document:
            return


def jsonl_documents(file: BinaryIO, path: Path, field: str) -> Iterator[bytes]:
    number = 0
    while line := file.readline(MAX_DOCUMENT_BYTES + 1):
        number += 1
        place = f"{path}:{number}"
        check_size(line, place, "split this record")
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{place}: is not JSON ({one_line(error)}); --jsonl-field wants one object per line")
        if not isinstance(record, dict) or not isinstance(record.get(field), str):
            raise InputError(f'{place}: has no string field "{field}"; name the text\'s field with --jsonl-field')
        # JSON can spell half of a surrogate pair, which no UTF-8 text can hold: it becomes a question mark.
        yield record[field].encode("utf-8", "replace")


def chat_documents(file: BinaryIO, path: Path) -> Iterator[bytes]:
    try:
        for _, messages in chat_data.conversations(file, MAX_DOCUMENT_BYTES):
            yield messages
    except chat_data.ChatError as error:
        raise InputError(f"{path}:{error.line}: {error}")


def is_binary(path: Path) -> bool:
    """As git decides: whether there is a zero byte near the start."""
    with open_input(path) as file:
        return b"\0" in file.read(8000)


def open_input(path: Path) -> BinaryIO:
    return gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb")


class Corpus:
    """The distinct documents of the inputs, with counts of what was left out."""

    def __init__(self, options: argparse.Namespace):
        self._options = options
        self._seen: set[int] = set()
        self.duplicate_documents = self.empty_documents = self.binary_files = self.files = 0

    def documents(self) -> Iterator[tuple[bytes, bool]]:
        """Yields (document, whether it is held out)."""
        options = self._options
        for path in find_files(options.input, options.include, options.out):
            self.files += 1
            try:
                yield from self._documents_of(path)
            except (OSError, EOFError, zlib.error) as error:
                raise InputError(f"{path}: cannot be read ({one_line(error)}); fix it or leave it out")

    def _documents_of(self, path: Path) -> Iterator[tuple[bytes, bool]]:
        options = self._options
        if options.jsonl_field is None and options.chat is None:
            if path.name.endswith((".jsonl", ".jsonl.gz")):
                raise InputError(f"{path}: is JSON Lines; name the field of its text with --jsonl-field")
            if is_binary(path):
                self.binary_files += 1
                return
        with open_input(path) as file:
            if options.chat is not None:
                found = chat_documents(file, path)
            elif options.jsonl_field is None:
                found = text_documents(file, path, options.split_bytes)
            else:
                found = jsonl_documents(file, path, options.jsonl_field)
            for document in found:
                self._check_text(document, path)
                digest = hashlib.blake2b(document, digest_size=16).digest()
                if self._is_wanted(document, digest):
                    yield document, int.from_bytes(digest[:8], "big") < options.eval_fraction * 2**64

    def _check_text(self, document: bytes, path: Path) -> None:
        if self._options.tokenizer == "bytes":
            return
        try:
            document.decode("utf-8")
        except UnicodeDecodeError as error:
            raise InputError(f"{path}: is not UTF-8 (byte {error.start} of a document); convert it or leave it out")

    def _is_wanted(self, document: bytes, digest: bytes) -> bool:
        if not document.strip():
            self.empty_documents += 1
            return False
        if self._options.keep_duplicates:
            return True
        # Half of the digest, to save memory: a false match among 100 million documents has a chance of 1 in 4000.
        key = int.from_bytes(digest[8:], "big")
        if key in self._seen:
            self.duplicate_documents += 1
            return False
        self._seen.add(key)
        return True


def batches(documents: Iterable[tuple[bytes, bool]]) -> Iterator[list[tuple[bytes, bool]]]:
    batch: list[tuple[bytes, bool]] = []
    size = 0
    for item in documents:
        batch.append(item)
        size += len(item[0])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def write_splits(
    documents: Iterable[tuple[bytes, bool]],
    tokenizer: ByteTokenizer | JsonTokenizer,
    writers: dict[str, TokenWriter],
    dtype: str,
    max_tokens: int | None,
) -> None:
    left = max_tokens if max_tokens is not None else sys.maxsize
    last_report = time.monotonic()
    for batch in batches(documents):
        encoded = tokenizer.encode([document for document, _ in batch])
        for ids, (_, held_out) in zip(encoded, batch):
            ids = np.concatenate((ids, [tokenizer.eos]), dtype=dtype, casting="unsafe")[:left]
            writer = writers["eval" if held_out else "train"]
            writer.write(ids)
            writer.documents += 1
            left -= len(ids)
            if left == 0:
                return
        if time.monotonic() - last_report > 30:
            last_report = time.monotonic()
            print(f"prepare_data: {sum(w.tokens for w in writers.values()):,} tokens so far", file=sys.stderr)


def write_chats(
    documents: Iterable[tuple[bytes, bool]],
    tokenizer: ByteTokenizer | JsonTokenizer,
    splits: dict[str, chat_data.ChatSplit],
    name: str,
) -> None:
    try:
        template = chat_data.make_template(name)
        for batch in batches(documents):
            conversations = [template(json.loads(document)) for document, _ in batch]
            ids = iter(tokenizer.encode([text.encode() for pieces in conversations for text, _ in pieces]))
            for pieces, (_, held_out) in zip(conversations, batch):
                own = [next(ids) for _ in pieces]
                splits["eval" if held_out else "train"].add(*chat_data.mark_conversation(pieces, own))
    except chat_data.ChatError as error:
        raise InputError(f"--chat {name}: {error}")
    spelled_out = chat_data.spelled_out_markers(name, tokenizer.encode)
    if spelled_out and tokenizer.name != "bytes":
        print(f"prepare_data: the tokenizer has no single token for {', '.join(spelled_out)}", file=sys.stderr)


def make_chat_split(folder: Path, split: str, options: argparse.Namespace, padding: int, dtype: str):
    length = options.sequence_length
    tokens_per_file = max(options.tokens_per_file // length, 1) * length
    writers = [TokenWriter(folder, split, tokens_per_file, suffix) for suffix in ("", ".mask")]
    return chat_data.ChatSplit(*writers, length, padding, dtype)


def check_splits(writers: dict[str, TokenWriter], options: argparse.Namespace, corpus: Corpus) -> None:
    if writers["train"].tokens + writers["eval"].tokens == 0:
        raise InputError(
            f"no text in {', '.join(map(str, options.input))}: {corpus.files} files matched, {corpus.binary_files} "
            f"of them binary; check the paths and --include"
        )
    if writers["train"].tokens == 0:
        raise InputError("every document is held out; lower --eval-fraction or give more documents")
    if options.eval_fraction > 0 and writers["eval"].tokens == 0:
        raise InputError(
            f"none of the {writers['train'].documents} documents is held out; raise --eval-fraction, give more "
            f"documents, or cut text files into more with --split-bytes"
        )


def padded_vocab_size(vocab_size: int) -> int:
    """FP8 matrix products want multiples of 16; with large vocabularies 128 costs nothing and fills whole tiles."""
    multiple = 16 if vocab_size <= 1024 else 128
    return -(-vocab_size // multiple) * multiple


def prepare(options: argparse.Namespace, staging: Path) -> dict:
    """Writes everything into the folder `staging` and returns what data.json holds."""
    if options.tokenizer == "bytes":
        tokenizer = ByteTokenizer()
    else:
        tokenizer = JsonTokenizer(Path(options.tokenizer), options.eos)
    dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    little_endian = "<u2" if dtype == "uint16" else "<u4"
    corpus = Corpus(options)
    if options.chat is not None:
        writers = {
            split: make_chat_split(staging, split, options, tokenizer.eos, little_endian) for split in ("train", "eval")
        }
        write_chats(corpus.documents(), tokenizer, writers, options.chat)
    else:
        writers = {split: TokenWriter(staging, split, options.tokens_per_file) for split in ("train", "eval")}
        write_splits(corpus.documents(), tokenizer, writers, little_endian, options.max_tokens)
    for writer in writers.values():
        writer.finish()
    check_splits(writers, options, corpus)
    info = {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size),
        "eos": tokenizer.eos,
        "dtype": dtype,
        "train": writers["train"].summary(),
        "eval": writers["eval"].summary(),
        "left_out": {
            "duplicate_documents": corpus.duplicate_documents,
            "empty_documents": corpus.empty_documents,
            "binary_files": corpus.binary_files,
        },
    }
    if options.chat is not None:
        info["chat"] = options.chat if options.chat in chat_data.TEMPLATES else Path(options.chat).name
        info["sequence_length"] = options.sequence_length
        info["left_out"]["conversations_without_targets"] = sum(w.without_targets for w in writers.values())
    if options.tokenizer != "bytes":
        copy_tokenizer(Path(options.tokenizer), staging / "tokenizer")
    with open(staging / "data.json", "wb") as file:
        file.write((json.dumps(info, indent=2) + "\n").encode())
        sync(file)
    sync_folder(staging)
    return info


def print_summary(info: dict, out: Path) -> None:
    for split in ("train", "eval"):
        counts = info[split]
        files = len(counts["files"])
        print(f"{split}: {counts['documents']:,} documents, {counts['tokens']:,} tokens, {files} files")
        if "targets" in counts:
            print(
                f"  {counts['targets']:,} targets, {counts['padding']:,} padding, "
                f"{counts['cut_conversations']:,} conversations cut"
            )
    left_out = info["left_out"]
    print("left out: " + ", ".join(f"{count:,} {what.replace('_', ' ')}" for what, count in left_out.items()))
    paths = {split: [str(out / name) for name in info[split]["files"]] for split in ("train", "eval")}
    print(f"vocabulary: {info['vocab_size']} ids, in the config {info['padded_vocab_size']}")
    print("config:")
    config = {
        "model": {"vocab_size": info["padded_vocab_size"]},
        "data": {"train": paths["train"], "eval": paths["eval"], "token_dtype": info["dtype"]},
    }
    if "chat" in info:
        config["data"] |= {
            "sequence_length": info["sequence_length"],
            "loss_mask": True,
            "documents": "separate",
        }
    print(json.dumps(config, indent=2))


class Parser(argparse.ArgumentParser):
    def error(self, message: str):
        raise InputError(f"{message}; see --help")


def check_chat_options(options: argparse.Namespace) -> None:
    if options.chat is None:
        if options.sequence_length is not None:
            raise InputError("--sequence-length packs conversations; it needs --chat")
        return
    for name in ("jsonl_field", "split_bytes", "max_tokens"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} cannot be used with --chat; leave it out")
    if options.sequence_length is None or options.sequence_length < 2:
        raise InputError("--chat packs conversations: give --sequence-length, the config's data.sequence_length")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog="prepare_data",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("input", nargs="+", type=Path, help="text or JSON Lines files, or folders of them")
    add("--out", required=True, type=Path, help="folder to create")
    add(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="take only files of folders whose name or relative path matches, as *.txt; may be repeated",
    )
    add("--jsonl-field", metavar="NAME", help="inputs are JSON Lines with the text in this field")
    add("--chat", metavar="TEMPLATE", help="inputs are conversations: chatml, llama2, llama3 or a tokenizer_config.json")
    add("--sequence-length", type=int, metavar="S", help="with --chat: tokens per sequence, as data.sequence_length")
    add("--split-bytes", type=int, metavar="N", help="cut text files into documents of about N bytes, at line ends")
    add("--tokenizer", default="bytes", help="bytes, or the path of a tokenizer.json (default: bytes)")
    add(
        "--eos", metavar="NAME", help=f"end-of-document token of a tokenizer.json (default: {', '.join(EOS_NAMES)})"
    )
    add("--eval-fraction", type=float, default=0.0, metavar="F", help="hold out this fraction of the documents")
    add("--max-tokens", type=int, metavar="N", help="stop after N tokens, train and eval together")
    add("--tokens-per-file", type=int, default=512 * 2**20, metavar="N", help="start another file after N tokens")
    add(
        "--keep-duplicates",
        action="store_true",
        help="keep identical documents, all in the same split (saves about 70 bytes of memory per document)",
    )
    options = parser.parse_args(arguments)
    check_chat_options(options)
    for name in ("split_bytes", "max_tokens", "tokens_per_file"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give a positive number")
    if not 0 <= options.eval_fraction < 1:
        raise InputError(f"--eval-fraction is {options.eval_fraction}; give a number from 0 to below 1")
    if options.split_bytes and options.split_bytes > MAX_DOCUMENT_BYTES:
        raise InputError(f"--split-bytes is {options.split_bytes}; give at most {MAX_DOCUMENT_BYTES}")
    if options.split_bytes and options.jsonl_field is not None:
        raise InputError("--split-bytes cuts text files; it cannot be used with --jsonl-field")
    if options.eos and options.tokenizer == "bytes":
        raise InputError("--eos names a token of a tokenizer.json; the byte tokenizer ends documents with id 256")
    options.out = options.out.resolve()
    if options.out.exists() and not (options.out.is_dir() and not any(options.out.iterdir())):
        raise InputError(f"{options.out}: exists and is not an empty folder; give --out another name or remove it")
    return options


def make_staging(out: Path) -> Path:
    """A folder beside `out`, to be renamed to it; hidden, so that a search of the inputs passes it by."""
    staging = out.with_name(f".{out.name}.tmp-{os.getpid()}")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        staging.mkdir()
    except OSError as error:
        raise InputError(f"{staging}: cannot be made ({error.strerror}); give --out a place that you may write to")
    return staging


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    staging = make_staging(options.out)
    try:
        info = prepare(options, staging)
        staging.rename(options.out)
        sync_folder(options.out.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)  # gone already where all went well
    print_summary(info, options.out)


def main() -> int:
    # As an exception, so that an unfinished output is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        run(sys.argv[1:])
    except InputError as error:
        print(f"prepare_data: error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"prepare_data: error: writing failed: {one_line(error)}", file=sys.stderr)
        return 4
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
