"""Reads the metrics.jsonl of a run that goes on.

A resumed run replaces the file by one without the records that came after its checkpoint; a run begun anew moves it away.
Then all records are read again, from the first. A file that was rotated away during the run goes on in the new one.
"""
import os

from run_metrics import parse_record

CHUNK = 16 << 20  # bytes of one poll
# What records of a kind have besides their step.
KEYS = {"eval": ("loss",), "eval_set": ("set", "loss"), "task": ("task", "metric", "score"), "quantization": ("tensors",),
        "moments": ("parameters",), "attention": ("blocks",), "warning": ("about", "raised")}


class NotARun(Exception):
    """What is being read is not a run's metrics.jsonl."""


class Batch:
    """anew: forget all earlier records. more: there is more to read already."""

    def __init__(self, records, anew=False, more=False):
        self.records, self.anew, self.more = records, anew, more


class Tail:
    def __init__(self, path):
        self.path = path
        self.file = None  # kept open, so that no other file gets its inode number
        self.rest = b""   # of a line that is being written
        self.last_step = -1
        self.start = None  # the newest record of a start
        self.unreadable = 0

    def poll(self):
        """The records that were written since the last poll. Raises OSError and NotARun; no file yet is no records."""
        try:
            status = os.stat(self.path)
        except FileNotFoundError:
            return Batch([]) if self.file is None else self.read()
        if self.file is None:
            return self.open_anew([])
        own = os.fstat(self.file.fileno())
        if (own.st_dev, own.st_ino) != (status.st_dev, status.st_ino):
            batch = self.read()
            return batch if batch.more else self.open_anew(batch.records)
        if status.st_size < self.file.tell():
            return self.open_anew([])
        return self.read()

    def open_anew(self, left):
        """Begins with the file that has the path now. `left` is what the file before still held: dropped, unless it goes on."""
        try:
            file = open(self.path, "rb")
        except FileNotFoundError:  # moved away just now
            return Batch(left)
        # A run whose file was moved away begins the new one with the record of its start; then the second is to tell.
        first = file.readline()
        says_start = self.start is not None and parse_record(first.decode("utf-8", "replace")) == self.start
        telling = file.readline() if says_start else first
        if not telling.endswith(b"\n"):  # made just now
            file.close()
            return Batch(left)
        file.seek(0)
        self.close()
        self.file, self.rest = file, b""
        before, self.last_step = self.last_step, -1
        batch = self.read()
        later = batch.records[1:] if says_start else batch.records
        goes_on = before >= 0 and later and later[0].get("kind") != "start" and later[0]["step"] > before
        return Batch(left + later if goes_on else batch.records, anew=not goes_on, more=batch.more)

    def read(self):
        chunk = self.file.read(CHUNK)
        *lines, self.rest = (self.rest + chunk).split(b"\n")
        records = []
        for line in lines:
            record = parse_record(line.decode("utf-8", "replace"))
            if record is not None and all(key in record for key in KEYS.get(record.get("kind"), ())):
                records.append(record)
                self.last_step = record["step"]
                if record.get("kind") == "start":
                    self.start = record
            elif self.last_step < 0:
                raise NotARun(f"{self.path}: not a record of a run; give a run folder")
            else:
                self.unreadable += 1  # a crash may have cut it; then the next resume removes it
        return Batch(records, more=len(chunk) == CHUNK)

    def close(self):
        if self.file is not None:
            self.file.close()
