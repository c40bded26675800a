"""Tests of hash_runs.py: a program agrees with itself, and what differs is found and named."""
import dataclasses
import json
import os
import struct
import subprocess
import sys
import tempfile
import unittest

import hash_runs
from run_cases import all_cases

PROGRAM = os.environ.get("PARKA_PROGRAM", "build/release/parka")


def write_safetensors(path, tensors, pieces=None):
    """Of name: bytes; `pieces` is what parka_pieces says."""
    header, data = {"__metadata__": {"parka_pieces": json.dumps(pieces or {})}}, b""
    for name, values in tensors.items():
        header[name] = {"dtype": "U8", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)


class HashRuns(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = temporary.name

    def path(self, name):
        return os.path.join(self.folder, name)

    def hash_runs(self, *arguments, program=PROGRAM, only="olmo.parka*resumed"):
        script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "hash_runs.py")
        command = [sys.executable, script, program, "--only", only, *arguments]
        result = subprocess.run(command, capture_output=True, text=True)
        self.assertIn(result.returncode, (0, 1, 2), result.stderr)
        return result.returncode, result.stdout + result.stderr

    def hashes_of(self, *files):
        """Of a checkpoint of these files, each given as write_safetensors takes it."""
        with tempfile.TemporaryDirectory(dir=self.folder) as run:
            os.mkdir(os.path.join(run, "step_00000004"))
            for i, (tensors, pieces) in enumerate(files):
                write_safetensors(os.path.join(run, "step_00000004", f"rank_{i}_shard_0.safetensors"), tensors, pieces)
            return hash_runs.hash_checkpoints(run)

    def test_a_program_agrees_with_itself_and_a_changed_record_is_named(self):
        recorded = self.path("recorded.json")
        self.assertEqual(self.hash_runs("--json", recorded)[0], 0)
        code, output = self.hash_runs("--check", recorded)
        self.assertEqual(code, 0, output)
        self.assertIn("2 of 2 runs are as recorded", output)
        with open(recorded, encoding="utf-8") as file:
            content = json.load(file)
        content["made_on"]["cpu_flags"] = "avx"
        content["runs"]["olmo.parka.resumed"].update(losses="0", train_losses=["1"])
        content["runs"]["olmo.parka.masks.resumed"].update(tensors="0", checkpoint="0")
        with open(recorded, "w", encoding="utf-8") as file:
            json.dump(content, file)
        code, output = self.hash_runs("--check", recorded)
        self.assertEqual(code, 1, output)
        self.assertIn("not as recorded: cpu_flags is", output)
        self.assertIn("differs: olmo.parka.resumed: losses from step 1 on (", output)
        self.assertIn("differs: olmo.parka.masks.resumed: tensors\n", output)

    def test_bytes_formats_and_places_of_tensors_count(self):
        whole = self.hashes_of(({"a": b"1234", "b": b"56"}, {}))
        self.assertEqual(self.hashes_of(({"b": b"56", "a": b"1234"}, {})), whole)
        for other in ({"a": b"1235", "b": b"56"}, {"a": b"1234", "c": b"56"}, {"a": b"123", "b": b"456"}):
            for new, old in zip(self.hashes_of((other, {})), whole):
                self.assertNotEqual(new, old)

        def piece(begin):
            return {"a": {"shape": [4], "begin": begin}}

        in_pieces = self.hashes_of(({"a": b"12", "b": b"56"}, piece(0)), ({"a": b"34"}, piece(2)))
        self.assertEqual(in_pieces[1], whole[1])
        self.assertNotEqual(in_pieces[0], whole[0])
        swapped = self.hashes_of(({"a": b"34"}, piece(2)), ({"a": b"12", "b": b"56"}, piece(0)))
        self.assertEqual(swapped[1], whole[1])
        self.assertNotEqual(swapped[0], in_pieces[0])

    def test_runs_that_promise_the_same_bits_are_compared(self):
        cases = [case for case in all_cases() if case.name in ("olmo.parka", "olmo.parka.recompute")]
        same = hash_runs.Hashes("1", "2", "3", ["4.5"])
        results = {case.name: same for case in cases}
        self.assertEqual(hash_runs.check_promises(cases, results), 0)
        results["olmo.parka.recompute"] = dataclasses.replace(same, tensors="4")
        self.assertEqual(hash_runs.check_promises(cases, results), 1)

    def test_every_case_has_a_name_of_its_own_and_compares_with_one_that_is_there(self):
        names = [case.name for case in all_cases()]
        self.assertEqual(len(set(names)), len(names))
        self.assertLessEqual({case.same_as for case in all_cases()} - {""}, set(names))

    def test_a_program_that_fails_is_a_difference_and_bad_input_is_said(self):
        code, output = self.hash_runs(program="/bin/false")
        self.assertEqual(code, 1, output)
        self.assertIn("olmo.parka.resumed  failed: exit code 1", output)
        for arguments, message in (({"only": "nothing"}, "no run has a name like nothing"),
                                   ({"program": "/nowhere/parka"}, "/nowhere/parka is no program")):
            code, output = self.hash_runs(**arguments)
            self.assertEqual(code, 2, output)
            self.assertIn(f"hash_runs.py: error: {message}", output)


if __name__ == "__main__":
    unittest.main()
