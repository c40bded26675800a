"""Tokenizes the input files, a group of them at a time, into parts that a later run of the same command finds again.

A part is what one group holds: KEY.ids (ids one after the other), with conversations KEY.marks (a byte per id), and
KEY.npz (see Part), whose presence says that the part is complete. KEY depends on all that decides the ids.
"""

from __future__ import annotations

import array
import collections
import concurrent.futures
import contextlib
import hashlib
import json
import multiprocessing
import os
import pickle
import re
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable, Iterable, Iterator

import numpy as np

from .chat import ChatTemplate
from .common import InputError, real_path, sync, tell
from .conversations import empty_answers, says_held_out
from .readers import InputFile, Reading
from .tokenizer import make_tokenizer

# Counts changes of what a part holds.
VERSION = 10
# Documents are tokenized together up to this many bytes, so that a tokenizer can use all cores.
BATCH_BYTES = 8 * 2**20
# Small files are made together into a part up to this size; a larger file is one of its own.
GROUP_BYTES = 4 * 2**20
REPORT_SECONDS = 5.0
# Documents that were perhaps made by mistake, where most of the first LOOKED_AT are so. Commands of TeX follow "\\n" with a small letter.
LOOKED_AT = 1000
DOUBTFUL_TEXTS = {
    "documents are JSON of a text, encoded once more than JSON Lines need; decode them": rb'"(?!.*[^\\]".)[^\n]*"|(?=[^\n]*\Z)[^\n]*\\n(?![a-z])[^\n]*',
    "documents are numbers and nothing else, as ids of tokens; give the text of which they were made": rb"(?=\[?\s*-?\d[.\d]*[\s,;]+-?\d)[-.\d\s,;\[\]]+",
    "documents end in three dots, as texts that were cut short; give whole ones": rb"[\s\S]{40,}(?:\.\.\.|\xe2\x80\xa6)",
}
# Documents with such damage, and conversations, are told of where they are more than this share. UTF-8 that was read as Latin has some of the last signs.
DAMAGED_SHARE = 0.01
DAMAGES = {
    "have U+FFFD in the place of what could not be decoded; decode the files by their own encoding": rb"\xef\xbf\xbd",
    "have zero bytes, as binary files do; leave them out": rb"\0|\A\{[\s\S]*[^\\]\\u0000",
    "are UTF-8 that was read in another encoding; decode the files as UTF-8":
        rb"\xc3[\x83\x90\x91](?:\xc2[\x80-\xbf]|\xc5[\x92\x93\xa0\xa1\xb8\xbd\xbe]|\xe2[\x80\x82\x84])|\xc3\xa2(?:\xe2\x82\xac|\xc2\x80)",
}
# The file of the groups that workers make parts of.
GROUPS = "groups"


@dataclass(frozen=True)
class Settings:
    """What decides which ids the documents have."""

    reading: Reading
    tokenizer: str  # bytes, or the path of a tokenizer.json
    bos: str | None
    eos: str | None
    chat: str | None
    max_tokens: int | None
    keep_duplicates: bool
    utf8_only: bool


@dataclass(frozen=True)
class File:
    path: Path
    size: int
    changed: int  # modification time in nanoseconds


def finish_part(path: Path, **arrays: np.ndarray) -> None:
    """Writes the file that says that a part is complete: PATH.npz appears whole, after the part's other files."""
    draft = path.with_suffix(".tmp")
    with open(draft, "wb") as file:
        np.savez(file, **arrays)
        sync(file)
    draft.rename(path.with_suffix(".npz"))


@dataclass(frozen=True)
class Part:
    """A complete part. Documents are distinct, except with Settings.keep_duplicates."""

    path: Path  # without a suffix
    digests: np.ndarray  # uint8 [documents, 16]: BLAKE2b of the document, of a conversation what ChatTemplate.digest gives
    lengths: np.ndarray  # int64 [documents]: tokens
    # files, binary_files, empty_documents, empty_answers, duplicate_documents, not_utf8_documents, and what InputFile tells
    counts: dict[str, int]

    def tokens(self, suffix: str, dtype: str) -> np.ndarray:
        return token_array(self.path.with_suffix(suffix), dtype)


def token_array(path: Path, dtype: str) -> np.ndarray:
    return np.memmap(path, dtype, "r") if path.stat().st_size > 0 else np.zeros(0, dtype)


def stat_file(path: Path) -> File:
    try:
        status = path.stat()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); fix it or leave it out")
    return File(path, status.st_size, status.st_mtime_ns)


def groups_of(files: list[File]) -> list[list[File]]:
    """Files that follow each other, together while they are small."""
    groups: list[list[File]] = []
    size = GROUP_BYTES
    for file in files:
        if size >= GROUP_BYTES or file.size >= GROUP_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(file)
        size += file.size
    return groups


@dataclass(frozen=True)
class Progress:
    """Counters that all processes share, and a thread that prints them."""

    bytes_read: multiprocessing.Value
    tokens: multiprocessing.Value

    def add(self, bytes_read: int, tokens: int) -> None:
        for counter, more in ((self.bytes_read, bytes_read), (self.tokens, tokens)):
            with counter.get_lock():
                counter.value += more

    def line(self, total: int, seconds: float) -> str:
        """Of `total` bytes in all, after so many seconds."""
        done, tokens = self.bytes_read.value, self.tokens.value
        return (
            f"{100 * done / max(total, 1):.1f} % of {total / 1e9:.3f} GB read, {tokens:,} tokens, "
            f"{tokens / seconds:,.0f} tokens/s, {time_left(done, total, seconds)}"
        )

    def report(self, total: int, print_line: Callable[[str], None]) -> threading.Event:
        """Prints a line every few seconds until the event is set."""
        start, stop = time.monotonic(), threading.Event()

        def run() -> None:
            while not stop.wait(REPORT_SECONDS):
                print_line(self.line(total, time.monotonic() - start))

        threading.Thread(target=run, daemon=True).start()
        return stop


def time_left(done: int, total: int, seconds: float) -> str:
    """If `done` of `total` took so long."""
    left = (total - done) * seconds / done if done else 0
    return f"{int(left // 3600)}:{int(left // 60 % 60):02}:{int(left % 60):02} left"


def make_progress(kind: type[Progress] = Progress) -> Progress:
    context = multiprocessing.get_context("spawn")
    return kind(context.Value("q", 0), context.Value("q", 0))


class PartMaker:
    """Makes parts in a folder; a process has one."""

    def __init__(self, settings: Settings, folder: Path, progress: Progress):
        self.settings, self.folder, self.progress = settings, folder, progress
        self.tokenizer = make_tokenizer(settings.tokenizer, settings.bos, settings.eos)
        self.template = ChatTemplate(settings.chat, self.tokenizer) if settings.chat is not None else None
        self.dtype = "<u2" if self.tokenizer.vocab_size <= 2**16 else "<u4"
        template = self.template.known() if self.template is not None else None
        known = [VERSION, asdict(settings), self.tokenizer.sha256, self.tokenizer.bos, self.tokenizer.eos, template]
        self._fingerprint = json.dumps(known)

    def path(self, index: int, group: list[File]) -> Path:
        files = [(str(real_path(file.path)), file.size, file.changed) for file in group]
        key = hashlib.blake2b(json.dumps([self._fingerprint, index, files]).encode(), digest_size=12).hexdigest()
        return self.folder / f"{index:06d}-{key}"

    def make(self, index: int, group: list[File]) -> None:
        path = self.path(index, group)
        counts = collections.Counter(files=0, binary_files=0, empty_documents=0, empty_answers=0, duplicate_documents=0, not_utf8_documents=0)
        digests, lengths, total = bytearray(), array.array("q"), 0
        suffixes = [".ids"] if self.template is None else [".ids", ".marks"]
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(open(path.with_suffix(suffix), "wb")) for suffix in suffixes]
            for batch in batches(self._documents(group, counts)):
                for (_, digest, _), arrays in zip(batch, self._encode(batch)):
                    for file, content in zip(files, arrays):
                        file.write(content.data)
                    digests += digest
                    lengths.append(len(arrays[0]))
                    counts["unknown_tokens"] += np.count_nonzero(arrays[0] == self.tokenizer.unknown) if self.tokenizer.unknown is not None else 0
                more = sum(lengths[-len(batch) :])
                self.progress.add(0, more)
                total += more
                # More than the first max_tokens of a part are never taken, because its documents are distinct.
                if self.settings.max_tokens is not None and total >= self.settings.max_tokens:
                    break
            for file in files:
                sync(file)
            if self.template is not None:
                counts.update(self.template.take_told())
        finish_part(
            path,
            digests=np.frombuffer(digests, np.uint8).reshape(-1, 16),
            lengths=np.array(lengths, np.int64),
            counts=np.array(list(counts.values())),
            names=np.array(list(counts)),
        )

    def _documents(self, group: list[File], counts: collections.Counter) -> Iterator[tuple[bytes, bytes, str]]:
        """(document, digest, place)"""
        seen: set[int] = set()
        for file in group:
            counts["files"] += 1
            source = InputFile(file.path, self.settings.reading, counts)
            reported = 0
            for document in source.documents():
                if not self._is_text(document, source.place):
                    counts["not_utf8_documents"] += 1
                    continue
                if not document.strip():
                    counts["empty_documents"] += 1
                    continue
                digest = self._digest(document, source.place)
                if not self.settings.keep_duplicates and not is_new(digest, seen):
                    counts["duplicate_documents"] += 1
                else:
                    if self.template is None and counts["looked_at"] < LOOKED_AT:
                        counts["looked_at"] += 1
                        for doubt in (doubt for doubt, form in DOUBTFUL_TEXTS.items() if re.fullmatch(form, document.strip())):
                            tell(counts, "documents", doubt, source.place)
                    counts["texts"] += 1
                    for damage in (damage for damage, signs in DAMAGES.items() if re.search(signs, document)):
                        tell(counts, "damaged documents", damage, source.place)
                    counts["empty_answers"] += empty_answers(document) if self.template is not None else 0
                    counts["of_other_splits"] += says_held_out(document) if self.template is not None else 0
                    yield document, digest, source.place
                    position = min(source.position, file.size)
                    self.progress.add(position - reported, 0)
                    reported = position
            counts["binary_files"] += source.is_binary
            self.progress.add(file.size - reported, 0)

    def _digest(self, document: bytes, place: str) -> bytes:
        if self.template is not None:
            return self.template.digest(document, place)
        return hashlib.blake2b(document, digest_size=16).digest()

    def _is_text(self, document: bytes, place: str) -> bool:
        """Whether it is UTF-8; without utf8_only all is text to bytes, and what another tokenizer or a template cannot read is
        an error."""
        if self.settings.tokenizer == "bytes" and self.template is None and not self.settings.utf8_only:
            return True
        try:
            document.decode("utf-8")
            return True
        except UnicodeDecodeError as error:
            if self.settings.utf8_only:
                return False
            raise InputError(f"{place}: is not UTF-8 (byte {error.start} of a document); convert it, or leave it out with --utf8-only")

    def _encode(self, batch: list[tuple[bytes, bytes, str]]) -> Iterator[tuple[np.ndarray, ...]]:
        """The ids of each document, of a conversation with its marks."""
        documents = [document for document, _, _ in batch]
        if self.template is not None:
            for ids, marks in self.template.mark(documents, [place for _, _, place in batch]):
                yield ids.astype(self.dtype), marks
            return
        bos, eos = self.tokenizer.bos, [self.tokenizer.eos]
        for ids in self.tokenizer.encode(documents):
            yield (np.concatenate((bos, ids, eos), dtype=self.dtype, casting="unsafe"),)


def is_held_out(digest: bytes, eval_fraction: float) -> bool:
    """Whether a document is, by its content alone: about this share of all documents."""
    return int.from_bytes(digest[:8], "big") < eval_fraction * 2**64


def is_new(digest: bytes, seen: set[int]) -> bool:
    """Whether a document was not there before; adds it."""
    # Half of the digest, to save memory: a false match among 100 million documents has a chance of 1 in 4000.
    key = int.from_bytes(digest[8:], "big")
    if key in seen:
        return False
    seen.add(key)
    return True


def batches(documents: Iterator[tuple[bytes, bytes, str]]) -> Iterator[list[tuple[bytes, bytes, str]]]:
    batch: list[tuple[bytes, bytes, str]] = []
    size = 0
    for item in documents:
        batch.append(item)
        size += len(item[0])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def load_part(path: Path) -> Part:
    with np.load(path.with_suffix(".npz")) as stored:
        counts = dict(zip(stored["names"].tolist(), stored["counts"].tolist()))
        return Part(path, stored["digests"], stored["lengths"], counts)


def make_parts(maker, groups: list[list], workers: int) -> Iterator[Path]:
    """The paths of the parts of all groups, in order. Those that are there are not made again.

    The maker is a PartMaker, or another class with its `settings`, `folder`, `progress`, `path` and `make`, whose groups
    may hold anything that can be sent to a process."""
    missing = [index for index, group in enumerate(groups) if not is_made(maker.path(index, group))]
    made = (make_here if workers == 1 else make_in_workers)(maker, groups, missing, workers)
    waiting = set(missing)
    try:
        for index, group in enumerate(groups):
            while index in waiting:
                waiting.remove(next(made))
            yield maker.path(index, group)
    finally:
        made.close()


def is_made(path: Path) -> bool:
    return path.with_suffix(".npz").exists()


def make_here(maker, groups: list[list], missing: list[int], _: int) -> Iterator[int]:
    """Makes these parts in order and gives their indices."""
    for index in missing:
        maker.make(index, groups[index])
        yield index


def make_in_workers(maker, groups: list[list], missing: list[int], workers: int) -> Iterator[int]:
    """The same in several processes."""
    progress = maker.progress
    places = write_groups(maker.folder / GROUPS, (groups[index] for index in missing))
    arguments = (type(maker), maker.settings, maker.folder, progress.bytes_read, progress.tokens)
    context = multiprocessing.get_context("spawn")
    pool = concurrent.futures.ProcessPoolExecutor(workers, context, start_worker, arguments)
    pending: collections.deque = collections.deque()
    left = zip(missing, places)
    try:
        while True:
            # Enough beyond the first that no worker waits for it, and no more, because max_tokens may end the run.
            while len(pending) < 4 * workers and (task := next(left, None)) is not None:
                pending.append((task[0], pool.submit(make_in_worker, *task)))
            if not pending:
                return
            index, future = pending.popleft()
            future.result()
            yield index
    except BrokenProcessPool:
        raise InputError("a worker process died, perhaps because memory ran out; use fewer --workers")
    finally:
        for child in multiprocessing.active_children():
            child.terminate()
        # Waits, because at its end Python wakes the pool's thread, which must not be closing what wakes it.
        pool.shutdown(cancel_futures=True)


def write_groups(path: Path, groups: Iterable[list]) -> list[int]:
    """Where each group begins in the file. Workers read groups there: sent to them, one of many files would fill a pipe, and
    whoever ends them would wait for a write that nobody reads any more."""
    places = []
    with open(path, "wb") as file:
        for group in groups:
            places.append(file.tell())
            pickle.dump(group, file)
    return places


worker_maker = None  # of this process


def start_worker(kind: type, settings, folder: Path, bytes_read, tokens) -> None:
    global worker_maker
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process ends the others
    threading.Thread(target=end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a worker is one thread
    worker_maker = kind(settings, folder, Progress(bytes_read, tokens))


def end_with_parent() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def make_in_worker(index: int, place: int) -> None:
    with open(worker_maker.folder / GROUPS, "rb") as file:
        file.seek(place)
        group = pickle.load(file)
    worker_maker.make(index, group)
