"""What the tests of scripts/prepare_data.py share: a folder with inputs, and calls that succeed or are refused."""

import contextlib
import importlib.util
import io
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

import numpy as np

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "prepare_data.py"

spec = importlib.util.spec_from_file_location("prepare_data", SCRIPT)
prepare_data = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare_data)


class Preparation(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.out = self.folder / "out"

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def write_jsonl(self, name, texts, field="text"):
        return self.write(name, "".join(json.dumps({"id": 1, field: t}) + "\n" for t in texts))

    def call(self, *arguments, preexec=None):
        command = [sys.executable, str(SCRIPT), *map(str, arguments), "--out", str(self.out)]
        return subprocess.run(command, capture_output=True, text=True, timeout=300, preexec_fn=preexec)

    def call_in_this_process(self, *arguments):
        """Saves starting Python for each of many errors. Returns (exit code, standard error)."""
        error = io.StringIO()
        command = ["prepare_data.py", *map(str, arguments), "--out", str(self.out)]
        streams = contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO())
        with mock.patch.object(sys, "argv", command), streams[0], streams[1]:
            return prepare_data.main(), error.getvalue()

    def prepare(self, *arguments):
        """Runs it, which must succeed, and returns data.json."""
        result = self.call(*arguments)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertEqual(self.leftovers(), [])
        return json.loads((self.out / "data.json").read_text())

    def refuse(self, message, *arguments):
        """Runs it, which must end with exit code 2, one line that holds `message`, and no output."""
        code, error = self.call_in_this_process(*arguments)
        self.assertEqual(code, 2, error)
        self.assertRegex(error, r"\Aprepare_data: error: [^\n]+\n\Z")
        self.assertIn(message, error)
        self.assertFalse(self.out.exists())
        self.assertEqual(self.leftovers(), [])

    def leftovers(self):
        return [p.name for p in self.folder.iterdir() if p.name.startswith(".out")]

    def ids(self, name="train-00000.npy", dtype="<u2"):
        return np.fromfile(self.out / name, dtype).tolist()
