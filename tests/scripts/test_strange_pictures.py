#!/usr/bin/env python3
"""Names of pictures that lead to what is no file, or out of their folder: prepare_images.py and prepare_eval.py neither wait for them nor
read them. Exits with 77 (skipped) where a package is missing."""
import json
import os
import socket
import sys
import unittest

from chat_data import ChatData, np
from script_runs import SCRIPTS, run_here

from measured import GIB, assert_bounded, run_measured
from refusals import assert_ended_well, assert_refused

try:
    from PIL import Image
except ImportError:
    print("skipped: PIL is missing")
    sys.exit(77)

SECONDS = 20  # on a machine with other work


def python(name, *arguments):
    return run_measured([sys.executable, SCRIPTS / f"{name}.py", *arguments], SECONDS, address_space=5 * GIB)


class Pictures(ChatData):
    def setUp(self):
        super().setUp()
        self.pictures = self.folder / "pictures"
        self.pictures.mkdir()
        for number in range(3):
            colours = np.random.default_rng(number).integers(0, 256, (9, 12, 3)).astype(np.uint8)
            Image.fromarray(colours).save(self.pictures / f"{number}.png")
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(self.folder / "outside.png")
        (self.pictures / "sub").mkdir()

    def samples(self, name):
        """Two sound ones, and one with this picture, whose name may be a list."""
        count = len(name) if isinstance(name, list) else 1
        records = [{"id": str(number), "image": f"{number}.png", "conversations": [{"from": "human", "value": "<image>\nWhat is it?"},
                                                                                  {"from": "gpt", "value": f"Picture {number}."}]}
                   for number in range(2)]
        records.append({"id": "bad", "image": name, "conversations": [{"from": "human", "value": "<image>" * count + "\nWhat?"},
                                                                      {"from": "gpt", "value": "Bad."}]})
        return self.write("samples.json", json.dumps(records))

    def options(self, name):
        return (self.samples(name), "--image-folder", self.pictures, "--tower", "clip", "--image-size", 8, "--patch-size", 4, "--chat", "plain",
                "--sequence-length", 64, "--out", self.new_out())

    def questions(self, name):
        question = {"image": name, "question": "What?", "choices": ["one", "two"], "answer": 0}
        return (self.write("questions.jsonl", json.dumps(question) + "\n"), "--task", "image_choice", "--tower", "clip", "--image-size", 8,
                "--patch-size", 4, "--image-folder", self.pictures, "--out", self.folder / f"requests{self.made}.jsonl")

    def make_strange(self):
        """Names of what is no picture, each of another kind."""
        os.mkfifo(self.pictures / "pipe.png")
        (self.pictures / "to_pipe.png").symlink_to("pipe.png")
        (self.pictures / "loop.png").symlink_to("loop.png")
        (self.pictures / "one.png").symlink_to("two.png")
        (self.pictures / "two.png").symlink_to("one.png")
        (self.pictures / "folder.png").mkdir()
        (self.pictures / "zero.png").symlink_to("/dev/zero")
        with socket.socket(socket.AF_UNIX) as server:
            here = os.getcwd()
            os.chdir(self.pictures)  # names of sockets are short
            try:
                server.bind("socket.png")
            finally:
                os.chdir(here)
        return ("pipe.png", "to_pipe.png", "loop.png", "one.png", "folder.png", "zero.png", "socket.png", "none.png", "0.png/x.png")

    def run_on(self, name, script, *arguments):
        """In a process of its own where it might wait for ever."""
        if "pipe" not in name:
            return run_here(script, *arguments)
        result = python(script, *arguments)
        assert_bounded(self, result)
        return result

    def test_what_is_no_file_is_refused_at_once(self):
        for name in self.make_strange():
            with self.subTest(name):
                assert_refused(self, self.run_on(name, "prepare_images", *self.options(name)), name)

    def test_it_can_be_left_out(self):
        for name in self.make_strange():
            with self.subTest(name):
                assert_ended_well(self, self.run_on(name, "prepare_images", *self.options(name), "--skip-bad"))
                info = json.loads((self.out / "data.json").read_text())
                self.assertEqual(len(info["bad"]), 1, info)
                self.assertIn(name, info["bad"][0])

    def test_in_questions_about_pictures(self):
        for name in self.make_strange():
            with self.subTest(name):
                assert_refused(self, self.run_on(name, "prepare_eval", *self.questions(name)), name)

    def leaving(self):
        """Names that lead out of the folder."""
        return ("../outside.png", "sub/../../outside.png", str(self.folder / "outside.png"), str(self.pictures / "0.png"), ["1.png", "../outside.png"],
                "./../outside.png")

    def test_names_that_leave_the_folder_are_refused(self):
        for name in self.leaving():
            with self.subTest(name):
                assert_refused(self, run_here("prepare_images", *self.options(name)), name[-1] if isinstance(name, list) else name)
                self.assertFalse(self.out.exists())

    def test_they_can_be_left_out(self):
        for name in self.leaving()[:3]:
            with self.subTest(name):
                assert_ended_well(self, run_here("prepare_images", *self.options(name), "--skip-bad"))
                info = json.loads((self.out / "data.json").read_text())
                self.assertEqual(len(info["bad"]), 1, info)

    def test_names_that_leave_the_folder_in_questions(self):
        for name in self.leaving():
            with self.subTest(name):
                assert_refused(self, run_here("prepare_eval", *self.questions(name)), name[-1] if isinstance(name, list) else name)

    def test_names_within_the_folder_are_read(self):
        (self.pictures / "sub/..a").mkdir()
        for name in ("sub/..a/x.png", "sub/..b.png", "linked.png"):
            (self.pictures / name).write_bytes((self.pictures / "2.png").read_bytes())
        (self.pictures / "linked.png").unlink()
        (self.pictures / "linked.png").symlink_to(self.folder / "outside.png")  # a link that the user has made
        for name in ("2.png", "sub/..a/x.png", "sub/..b.png", "./2.png", ["1.png", "2.png"], "linked.png"):
            with self.subTest(name):
                assert_ended_well(self, run_here("prepare_images", *self.options(name)))
                assert_ended_well(self, run_here("prepare_eval", *self.questions(name)))


    def test_a_tokenizer_that_is_named_by_its_folder(self):
        """What lies beside it is found, too: here how pictures become squares."""
        self.write("tokenizer/preprocessor_config.json", json.dumps({
            "image_processor_type": "LlavaImageProcessor", "do_pad": True, "size": {"shortest_edge": 8}, "crop_size": {"height": 8, "width": 8}}))
        made = []
        for tokenizer in (self.tokenizer, self.tokenizer.parent):
            assert_ended_well(self, run_here("prepare_images", *self.options("2.png"), "--tokenizer", tokenizer))
            tokens = {path.name: path.read_bytes() for path in self.out.iterdir() if path.is_file()}
            questions = self.questions("2.png")
            assert_ended_well(self, run_here("prepare_eval", *questions, "--tokenizer", tokenizer))
            pixels = [path.read_bytes() for path in self.folder.glob(f"requests{self.made}*") if path != questions[-1]]
            self.assertEqual(len(pixels), 1)
            made.append((tokens, pixels))
        self.assertEqual(*made)


if __name__ == "__main__":
    unittest.main()
