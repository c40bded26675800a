#!/usr/bin/env python3
"""Tests of where scripts write: files, links, devices and pipes. Exits with 77 (skipped) where numpy is missing."""
import os
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

try:
    import numpy  # noqa: F401
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))
import prepare_eval  # noqa: E402
from text_data.common import InputError, require_writable, write_file  # noqa: E402

LINES = [b"one\n", b"two\n"]
TEXT = b"one\ntwo\n"


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.out = self.folder / "out"

    def device(self, minor):
        """A node of its own of a device such as /dev/null, which no failing test can harm."""
        try:
            os.mknod(self.out, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
            open(self.out, "wb").close()
        except OSError as error:
            self.skipTest(f"devices cannot be made here ({error.strerror})")


class WrittenFiles(Folder):
    def names(self):
        return sorted(path.name for path in self.folder.iterdir())

    def test_a_file_is_made_with_its_folder_and_replaced(self):
        path = self.folder / "a" / "b"
        write_file(path, LINES)
        first = path.stat().st_ino
        with open(path, "rb") as before:
            write_file(path, [b"x"])
            self.assertEqual((before.read(), path.read_bytes(), path.stat().st_ino == first), (TEXT, b"x", False))
        self.assertEqual(os.listdir(path.parent), ["b"])

    def test_a_link_stays_and_leads_to_the_new_file(self):
        (self.folder / "a").mkdir()
        target = self.folder / "a" / "target"
        (self.folder / "between").symlink_to("a/target")
        self.out.symlink_to(self.folder / "between")
        for there in (False, True):
            with self.subTest(there=there):
                if there:
                    target.write_bytes(b"old")
                write_file(self.out, LINES)
                self.assertEqual((self.out.is_symlink(), target.is_symlink(), target.read_bytes()), (True, False, TEXT))
        self.assertEqual((self.names(), os.listdir(target.parent)), (["a", "between", "out"], ["target"]))

    def test_a_device_is_written_into(self):
        self.device(3)  # null
        write_file(self.out, LINES)
        link = self.folder / "link"
        link.symlink_to(self.out)
        write_file(link, LINES)
        self.assertTrue(stat.S_ISCHR(self.out.stat().st_mode))
        self.assertEqual(self.names(), ["link", "out"])

    def test_a_device_that_is_full_is_an_error_of_writing(self):
        self.device(7)  # full
        with self.assertRaisesRegex(OSError, "No space left"):
            write_file(self.out, LINES)

    def test_a_pipe_is_written_into(self):
        os.mkfifo(self.out)
        read = []
        reader = threading.Thread(target=lambda: read.append(self.out.read_bytes()), daemon=True)
        reader.start()
        write_file(self.out, LINES)
        reader.join(30)
        self.assertEqual((read, stat.S_ISFIFO(self.out.stat().st_mode), self.names()), ([TEXT], True, ["out"]))

    def test_what_can_be_neither_replaced_nor_written_into_is_refused(self):
        self.out.mkdir()
        (self.folder / "circle").symlink_to("circle")
        (self.folder / "file").touch()
        for path in (self.out, self.folder / "circle", self.folder / "file" / "out"):
            for refuse, *arguments in ((write_file, path, LINES), (require_writable, path)):
                with self.subTest(path), self.assertRaisesRegex(InputError, f"^{path}: cannot be made \\(.*\\); give --out"):
                    refuse(*arguments)
        self.assertEqual(self.names(), ["circle", "file", "out"])

    def test_a_socket_is_refused(self):
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(self.out))
            with self.assertRaisesRegex(InputError, f"^{self.out}: is a socket or a disk"):
                write_file(self.out, LINES)
        self.assertEqual(self.names(), ["out"])


class StandardOutput(Folder):
    """By a link to it, which a failing test may replace."""

    def setUp(self):
        super().setUp()
        self.out.symlink_to("/proc/self/fd/1")
        self.text = self.folder / "a.py"
        self.text.write_text('def following(x):\n    """Returns the number that follows another one."""\n    return x + 1\n')

    def call(self, **options):
        command = [sys.executable, SCRIPTS / "research/make_instructions.py", self.text, "--least-characters", "1", "--out", self.out]
        result = subprocess.run(command, stderr=subprocess.PIPE, check=False, timeout=60, **options)
        self.assertEqual((result.returncode, result.stderr.decode()), (0, f"{self.out}: 1 functions\n"))
        self.assertTrue(self.out.is_symlink())
        return result.stdout

    def test_it_holds_the_lines_alone(self):
        self.assertRegex(self.call(stdout=subprocess.PIPE), rb'^{"messages":.*}\n$')

    def test_a_file_behind_it_keeps_what_is_in_it(self):
        want = b"before\n" + self.call(stdout=subprocess.PIPE)
        for mode in ("wb", "ab"):
            with self.subTest(mode), open(self.folder / mode, mode) as file:
                file.write(b"before\n")
                file.flush()
                self.call(stdout=file)
                file.write(b"after\n")
                file.flush()
                self.assertEqual((self.folder / mode).read_bytes(), want + b"after\n")


class Pixels(Folder):
    def setUp(self):
        super().setUp()
        try:
            from image_data.pictures import Fitting
            from image_data.requests import ImageRules, TaskImages
        except ImportError as error:
            self.skipTest(f"{error.name} is missing")
        self.images = lambda: TaskImages(ImageRules(7, 4, Fitting("crop", 8, (0, 0, 0)), self.folder), self.out)

    def test_a_link_stays(self):
        self.out.symlink_to("target")
        self.images().publish()
        self.assertTrue(self.out.is_symlink())
        self.assertEqual(sorted(os.listdir(self.folder)), ["out", "target"])

    def test_a_pipe_is_refused(self):
        os.mkfifo(self.out)
        with self.assertRaisesRegex(InputError, f"^{self.out}: is no file that can be replaced; give --out another name$"):
            self.images()
        with self.assertRaisesRegex(InputError, f"^--out {self.out}: is no file that pixels can lie beside; "):
            prepare_eval.write_with_images(self.out, {}, [], [], None)
        self.assertEqual(os.listdir(self.folder), ["out"])


if __name__ == "__main__":
    unittest.main()
