"""Reads the metrics.jsonl of a run that continues.

A resumed run replaces the file by one without the records that came after its checkpoint; a run begun anew moves it away.
Then all records are read again, from the first. A file that was rotated away during the run continues in the new one; when all is
read again its records come first, as far as the run still has them. One that was cut (copytruncate) is read from its beginning.
"""
import os
import stat

from run_records import complete_record, read_object

CHUNK = 16 << 20  # bytes of one poll
MOST_LINE = 64 << 20
LAST = 256        # bytes by which a part is known again


class NotARun(Exception):
    """What is being read is not a run's metrics.jsonl."""


class Batch:
    """anew: forget all earlier records. more: there is more to read already."""

    def __init__(self, records, anew=False, more=False):
        self.records, self.anew, self.more = records, anew, more


def text_of(line):
    return line.decode("utf-8", "replace")


def label(record):
    """Within one timeline of a run no two records but those of starts have the same."""
    return record["step"], record.get("kind"), record.get("set"), record.get("task")


def opening(file):
    """(starts, record): the records of starts that a file begins with, and the first other one; None where it has none yet."""
    starts = []
    for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b"")):
        if not line.endswith(b"\n") and len(line) < MOST_LINE:
            break
        record = complete_record(text_of(line))
        if number == 0 and read_object(text_of(line)) is None:
            raise NotARun(f"{file.name}: not a record of a run; give a run folder")
        if record is None:
            continue
        if record.get("kind") != "start":
            return starts, record
        starts.append(record)
    return starts, None


class Part:
    """One of the files that a run's records are in: the one that has the path, or one that had it before."""

    def __init__(self, file):
        self.file = file  # kept open: it can be read again wherever it was moved, and no other file gets its inode number
        self.ends = []    # records that later files begin with: what this one has from there on is theirs
        self.rewind()

    def rewind(self):
        self.file.seek(0)
        self.rest = b""  # of a line that is being written
        self.last = b""  # of what was read
        self.has_begun = self.has_ended = False

    def was_cut(self):
        """Whether it was made shorter since the last read. It may have grown again, beyond what was read of it."""
        descriptor, end = self.file.fileno(), self.file.tell()
        return os.fstat(descriptor).st_size < end or os.pread(descriptor, len(self.last), end - len(self.last)) != self.last

    def ends_before(self, record):
        return record.get("kind") != "start" and any(record["step"] > end["step"] or label(record) == label(end) for end in self.ends)

    def is_needed(self):
        """Whether it has more than starts before it ends."""
        self.file.seek(0)
        first = opening(self.file)[1]
        return first is not None and not self.ends_before(first)


class Tail:
    def __init__(self, path):
        self.path = path
        self.parts = []  # in the order in which they are read; the last one had the path at the last look
        self.at = 0      # of the part that is being read
        self.unreadable = 0
        self.forget()

    def forget(self):
        self.last_step = -1
        self.labels = set()  # of the records of that step
        self.start = None    # the newest record of a start

    def poll(self):
        """The records that were written since the last poll. Raises OSError and NotARun; no file yet is no records."""
        if self.at < len(self.parts) - 1:
            return self.read()
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return self.read() if self.parts else Batch([])
        if not stat.S_ISREG(status.st_mode):
            raise NotARun(f"{self.path}: is no file; give a run folder")
        if not self.parts:
            return self.open_next([])
        file = self.parts[-1].file
        own = os.fstat(file.fileno())
        if (own.st_dev, own.st_ino) != (status.st_dev, status.st_ino):
            batch = self.read()
            return batch if batch.more else self.open_next(batch.records)
        if self.parts[-1].was_cut():
            self.parts.pop().file.close()  # what it held is no more
            self.at = max(0, len(self.parts) - 1)
            return self.open_next([])
        return self.read()

    def open_next(self, left):
        """Goes on with the file that has the path now. `left` is what the file before still held: given out if the new one goes
        on from there, or else read again as far as the run still has it."""
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:  # moved away just now
            return Batch(left)
        try:
            starts, first = opening(file)
        except NotARun:
            file.close()
            raise
        # A run whose file was moved away begins the new one with the record of its start, once more.
        is_same_start = starts in ([], [self.start])
        if is_same_start and first is None:  # made just now
            file.close()
            return Batch(left)
        begins = first or {"kind": "train", "step": starts[-1]["step"] + 1}
        for part in self.parts:
            part.ends.append(begins)
        if is_same_start and self.comes_next(begins):
            self.parts.append(Part(file))
            self.at = len(self.parts) - 1
            batch = self.read()
            return Batch(left + batch.records, more=batch.more)
        # A run that was begun anew has its first step. One that was resumed may have its earlier steps in files that were moved away.
        needed = [part for part in self.parts if begins["step"] > 1 and part.is_needed()]
        for part in self.parts:
            part.rewind() if part in needed else part.file.close()
        self.parts = [*needed, Part(file)]
        self.at = self.unreadable = 0
        self.forget()
        batch = self.read()
        return Batch(batch.records, anew=True, more=batch.more)

    def comes_next(self, record):
        """A file may be moved away between the records of one step, too: those of evaluations take their time."""
        return 0 <= self.last_step < record["step"] or self.last_step == record["step"] and label(record) not in self.labels

    def read(self):
        part = self.parts[self.at]
        chunk = part.file.read(CHUNK)
        part.last = (part.last + chunk)[-LAST:]
        *lines, part.rest = (part.rest + chunk).split(b"\n")
        if len(part.rest) > MOST_LINE:
            raise NotARun(f"{self.path}: has a line of more than {MOST_LINE >> 20} MiB, which is no record of a run; give a run folder")
        records = []
        for record in map(complete_record, map(text_of, lines)):
            if record is None:
                self.unreadable += 1  # a crash may have cut it; then the next resume removes it
            elif part.ends_before(record):
                part.has_ended = True
                break
            elif part.has_begun or record != self.start:
                records.append(record)
                self.note(record)
            part.has_begun = True
        more = len(chunk) == CHUNK and not part.has_ended
        if not more and self.at < len(self.parts) - 1:
            self.at += 1
            more = True
        return Batch(records, more=more)

    def note(self, record):
        if record["step"] != self.last_step:
            self.last_step, self.labels = record["step"], set()
        self.labels.add(label(record))
        if record.get("kind") == "start":
            self.start = record

    def close(self):
        for part in self.parts:
            part.file.close()
