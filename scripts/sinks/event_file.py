"""TensorBoard: an event file in DIR/NAME."""
import errno
import fcntl
import os
import time

from python_packages import missing
from run_metrics import fail

from .scalars import WallTime, as_double, scalars

# By these ends of their names the files of earlier exports are known.
PREFIX, SUFFIX = "events.out.tfevents.", ".parka"
OWNER = "run.parka"  # says which run folder they are of; who writes them has it locked


class EventFile:
    """Records that a resume has removed cannot be taken out of an event file. So begin() starts another one, which replaces
    the one before when flush() is first called."""

    def __init__(self, folder, name, run):
        try:
            from tensorboardX.proto import event_pb2
            from tensorboardX.record_writer import RecordWriter
        except ImportError:
            fail(f"--tensorboard: {missing('tensorboardX')}")
        self.proto, self.writer_of = event_pb2, RecordWriter
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
        self.file, self.is_draft, self.clock = self.writer_of(self.draft), True, WallTime()
        self.is_empty = True

    def add_event(self, wall_time, step=0, **content):
        self.file.write(self.proto.Event(wall_time=wall_time, step=step, **content).SerializeToString())

    def add(self, records):
        for record in records:
            wall_time = self.clock.of(record)
            if self.is_empty:
                # A TensorBoard that is running has read the file before: the start of a session at step 0 makes it forget.
                self.add_event(wall_time, file_version="brain.Event:2")
                self.add_event(wall_time, session_log={"status": self.proto.SessionLog.START})
                self.is_empty = False
            points = [{"tag": tag, "simple_value": as_double(value)} for tag, value in scalars(record)]
            if points:
                self.add_event(wall_time, record["step"], summary={"value": points})

    def flush(self):
        self.file.flush()
        if not self.is_draft and not os.path.exists(self.path):
            raise OSError(errno.ENOENT, "the file was removed while it was written; start again", self.folder)
        if self.is_draft and not self.is_empty:
            earlier = [name for name in os.listdir(self.folder) if name.startswith(PREFIX) and name.endswith(SUFFIX)]
            # A new name each time: a TensorBoard that is running would read on in the old file.
            self.path = os.path.join(self.folder, f"{PREFIX}{time.time_ns()}{SUFFIX}")
            os.replace(self.draft, self.path)
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
