"""TensorBoard: an event file in DIR/NAME.

An event file is a sequence of frames: length (uint64), its checksum, an Event in protobuf's encoding, its checksum. The
checksum is CRC-32C, rotated and offset. Only the fields that scalars need are written (tensorboard/compat/proto/event.proto).
"""
import errno
import fcntl
import os
import struct
import time

from run_metrics import fail

from .scalars import WallTime, as_double, infinite, scalars

# By these ends of their names the files of earlier exports are known.
PREFIX, SUFFIX = "events.out.tfevents.", ".parka"
OWNER = "run.parka"  # says which run folder they are of; who writes them has it locked


def crc_table():
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


CRC_TABLE = crc_table()


def masked_crc32c(data):
    crc = 0xFFFFFFFF
    for byte in data:
        crc = CRC_TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def varint(value):
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def field(number, data):
    """A field of bytes: a string or a message."""
    return varint(number << 3 | 2) + varint(len(data)) + data


def event(wall_time, step, *fields):
    return b"\x09" + struct.pack("<d", wall_time) + b"\x10" + varint(step) + b"".join(fields)


def fp32(value):
    """TensorBoard has a place for infinities in a chart, beside its axis, as for what is not a number."""
    value = as_double(value)
    try:
        return struct.pack("<f", value)
    except OverflowError:
        return struct.pack("<f", infinite(value))


def summary(points):
    """Event.summary with a Value of a tag and a simple_value for each point."""
    return field(5, b"".join(field(1, field(1, tag.encode()) + b"\x15" + fp32(value)) for tag, value in points))


def frame(data):
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", masked_crc32c(length)) + data + struct.pack("<I", masked_crc32c(data))


class EventFile:
    """Records that a resume has removed cannot be taken out of an event file. So begin() starts another one, which replaces
    the one before when flush() is first called."""

    def __init__(self, folder, name, run):
        self.folder = os.path.join(folder, name)
        os.makedirs(self.folder, exist_ok=True)
        self.claim(os.fsencode(os.path.realpath(run)))
        self.draft = os.path.join(self.folder, "draft")  # TensorBoard reads only names with "tfevents"
        self.file, self.is_draft = None, False

    def claim(self, run):
        """Two runs of one name would remove each other's files. A folder of an older version does not say whose it is."""
        path = os.path.join(self.folder, OWNER)
        try:
            with open(path, "xb") as file:
                file.write(run)
        except FileExistsError:
            with open(path, "rb") as file:
                owner = file.read()
            if owner != run:
                fail(f"--tensorboard: {self.folder} is of the run {os.fsdecode(owner)}; give another --name or another DIR; if that run "
                     f"was moved to {os.fsdecode(run)}, remove {path}")
        self.lock = open(path, "rb")
        try:
            fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            fail(f"--tensorboard: another parka follow writes {self.folder}; end that one, or give another --name or another DIR")
        except OSError:
            pass  # a file system without locks

    def begin(self):
        self.close()
        self.file, self.is_draft, self.clock = open(self.draft, "wb"), True, WallTime()
        self.is_empty = True

    def add(self, records):
        for record in records:
            wall_time = self.clock.of(record)
            if self.is_empty:
                # A TensorBoard that is running has read the file before: the start of a session at step 0 makes it forget.
                self.file.write(frame(event(wall_time, 0, field(3, b"brain.Event:2"))))
                self.file.write(frame(event(wall_time, 0, field(7, b"\x08\x01"))))
                self.is_empty = False
            points = scalars(record)
            if points:
                self.file.write(frame(event(wall_time, record["step"], summary(points))))

    def flush(self):
        self.file.flush()
        if not self.is_draft and os.fstat(self.file.fileno()).st_nlink == 0:
            raise OSError(errno.ENOENT, "the file was removed while it was written; start again", self.folder)
        if self.is_draft and not self.is_empty:
            earlier = [name for name in os.listdir(self.folder) if name.startswith(PREFIX) and name.endswith(SUFFIX)]
            # A new name each time: a TensorBoard that is running would read on in the old file.
            os.replace(self.draft, os.path.join(self.folder, f"{PREFIX}{time.time_ns()}{SUFFIX}"))
            self.is_draft = False
            for name in earlier:
                os.remove(os.path.join(self.folder, name))

    def close(self):
        if self.file is None:
            return
        self.file.close()
        if self.is_draft:
            os.remove(self.draft)
            self.is_draft = False
