"""Tests of scripts/prepare_images.py. Exits with 77 (skipped) where a package is missing."""

import os

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing

import contextlib
import gzip
import importlib.util
import io
import json
import re
import shutil
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    import numpy as np
    import tokenizers  # noqa: F401
    import transformers  # noqa: F401
    import xxhash
    from PIL import Image
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "prepare_images.py"
spec = importlib.util.spec_from_file_location("prepare_images", SCRIPT)
prepare_images = importlib.util.module_from_spec(spec)
spec.loader.exec_module(prepare_images)
from image_data import shards  # noqa: E402
from image_data.pictures import Fitting, PictureError, pixels_of  # noqa: E402
from image_data.processor import geometry_of  # noqa: E402
from text_data.tokenizer import JsonTokenizer  # noqa: E402

from chat_tokenizers import make_chat_tokenizer  # noqa: E402
from tiny_tokenizers import llama2_like  # noqa: E402

EOS, SLOT = 256, 257  # of the byte tokenizer
SIZE = 8
FITTING = Fitting("crop", SIZE, (122, 116, 104))
DEFAULTS = {"--tower": "clip", "--image-size": SIZE, "--patch-size": 4, "--chat": "plain", "--sequence-length": 64}


def sample(name, images, *said):
    """Of what human and gpt say in turn."""
    turns = [{"from": ("human", "gpt")[number % 2], "value": text} for number, text in enumerate(said)]
    record = {"id": name, "conversations": turns}
    return record if images is None else {**record, "image": images}


def saying(turn, **more):
    """A sample with keys beside what is said in this turn."""
    record = sample("x7", "1.png", "<image>?", "It")
    record["conversations"][turn] |= more
    return record


def caption(number):
    return sample(f"c{number}", f"{number}.png", "<image>\nWhat is this?", f"Picture {number}.")


class Preparation(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        self.out, self.pictures = self.folder / "out", self.folder / "pictures"
        self.pictures.mkdir()
        for number in range(7):
            random = np.random.default_rng(number)
            Image.fromarray(random.integers(0, 256, (9 + number, 12, 3)).astype(np.uint8)).save(self.pictures / f"{number}.png")

    def write(self, records, name="samples.json"):
        path = self.folder / name
        path.write_text(json.dumps(records) if name.endswith(".json") else "".join(json.dumps(r) + "\n" for r in records))
        return path

    def call(self, path, *flags, **options):
        """Returns (exit code, standard error without reports of progress, which a slow machine has time for)."""
        given = DEFAULTS | {f"--{name.replace('_', '-')}": value for name, value in options.items()}
        arguments = [str(part) for pair in given.items() for part in pair]
        command = [str(SCRIPT), str(path), "--image-folder", str(self.pictures), "--out", str(self.out), *arguments, *flags]
        error = io.StringIO()
        streams = contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO())
        with mock.patch.object(sys, "argv", command), streams[0], streams[1]:
            code = prepare_images.main()
        lines = error.getvalue().splitlines(keepends=True)
        return code, "".join(line for line in lines if not re.search(r" % of .* left$", line))

    def prepare(self, path, *flags, **options):
        """Runs it, which must succeed without a word, and returns data.json."""
        self.assertEqual(self.call(path, *flags, **options), (0, ""))
        self.assertEqual([p.name for p in self.folder.iterdir() if p.name.startswith(".out")], [])
        return json.loads((self.out / "data.json").read_text())

    def refuse(self, message, path, *flags, **options):
        """Runs it, which must end with exit code 2 and one line that holds `message`, and make no output."""
        code, error = self.call(path, *flags, **options)
        self.assertEqual(code, 2, error)
        *before, last = error.splitlines()
        self.assertRegex(last, r"\Aprepare_images: error: ")
        self.assertIn(message, last)
        self.assertTrue(all("finished files are kept" in line or "continues: " in line for line in before), error)
        self.assertFalse(self.out.exists())

    def read(self, name="train-00000"):
        """Ids and marks, and (first token, slots, pixels) of each image."""
        ids = np.fromfile(self.out / f"{name}.npy", "<u2")
        marks = np.fromfile(self.out / f"{name}.npy.mask", np.uint8)
        content = (self.out / f"{name}.npy.images").read_bytes()
        self.assertEqual(struct.unpack("<Q", content[-8:])[0], xxhash.xxh3_64_intdigest(content[:-8]))
        magic, version, token, slots, height, width, _, count = struct.unpack_from("<8sIIIIIIQ", content)
        self.assertEqual((magic, version, token, height, width), (b"PARKAIMG", 1, SLOT, SIZE, SIZE))
        self.assertEqual((slots, len(content)), (4, 64 + 32 * count + 8))
        references = [struct.unpack_from("<QQIIII", content, 64 + 32 * number) for number in range(count)]
        return ids, marks, [(r[0], r[4], self.pixels(shard=r[2], image=r[3], checksum=r[1])) for r in references]

    def pixels(self, shard, image, checksum):
        content = (self.out / f"images-{shard:05d}.pixels").read_bytes()
        magic, version, planes, height, width, count = struct.unpack_from("<8sIIIIQ", content)
        self.assertEqual((magic, version, planes, height, width), (b"PARKAPIX", 1, 3, SIZE, SIZE))
        self.assertEqual(len(content), 64 + count * 3 * SIZE * SIZE)
        self.assertLess(image, count)
        first = 64 + image * 3 * SIZE * SIZE
        found = content[first : first + 3 * SIZE * SIZE]
        self.assertEqual(checksum, xxhash.xxh3_64_intdigest(found))
        return np.frombuffer(found, np.uint8).reshape(3, SIZE, SIZE)

    def samples(self, name="train-00000"):
        """The text of each packed sample: targets in braces, and for an image [NUMBER] by the picture that it is of."""
        known = [pixels_of(self.pictures / f"{number}.png", FITTING) for number in range(7)]
        ids, marks, images = self.read(name)
        at = {}
        for first, slots, pixels in images:
            self.assertTrue((ids[first : first + slots] == SLOT).all())
            self.assertFalse(marks[first : first + slots].astype(int) @ np.ones(slots, int) & 1)
            at[first] = slots, [number for number, other in enumerate(known) if (other == pixels).all()][0]
        self.assertEqual(int((ids == SLOT).sum()), sum(slots for slots, _ in at.values()))
        found, position = [], 0
        while position < len(ids):
            if marks[position] & 2:
                found.append("")
            if position in at:
                slots, number = at[position]
                found[-1] += f"[{number}]" + ("" if slots == 4 else f"({slots})")
                position += slots
                continue
            text = chr(ids[position]) if ids[position] < 256 else "_"
            found[-1] += f"{{{text}}}" if marks[position] & 1 else text
            position += 1
        return [text.replace("}{", "") for text in found if not text.startswith("_")]


class Files(Preparation):
    def test_each_sample_has_its_images_and_learns_its_replies(self):
        records = [
            sample("a", "1.png", "<image>\nHi", "Ho"),
            sample("b", None, "Hm", "Well", "So", "No"),
            sample("c", ["2.png", "1.png", "0.png"], "<image> or <image>?", "Yes", "And <image>?", "No"),
        ]
        info = self.prepare(self.write(records), chat="vicuna_v1", system="Be.", sequence_length=192)
        self.assertEqual(self.samples(), [
            "<s>Be. USER: [1]\nHi ASSISTANT:{ Ho</s>}",
            "<s>Be. USER: Hm ASSISTANT:{ Well</s>}USER: So ASSISTANT:{ No</s>}",
            "<s>Be. USER: [2] or [1]? ASSISTANT:{ Yes</s>}USER: And [0]? ASSISTANT:{ No</s>}",
        ])
        self.assertEqual((info["images"]["count"], info["images"]["slots"], info["images"]["token"]), (3, 4, SLOT))
        self.assertEqual((info["vocab_size"], info["padded_vocab_size"]), (258, 272))
        self.assertEqual((info["train"]["images"], info["train"]["most_images_of_a_sequence"]), (4, 4))

    def test_replies_that_the_data_exclude_are_no_targets(self):
        for name, key in (("a", {"weight": 0}), ("b", {"train": False}), ("c", {"masked": True})):
            record = sample("a", "1.png", "<image>", "Bad", "Sure?", "Good")
            record["conversations"][1] |= key
            self.out = self.folder / name
            self.prepare(self.write([record]), chat="vicuna_v1", sequence_length=128)
            self.assertEqual(self.samples(), ["<s>USER: [1] ASSISTANT: Bad</s>USER: Sure? ASSISTANT:{ Good</s>}"])
        self.out = self.folder / "record"
        info = self.prepare(self.write([caption(1), caption(2) | {"weight": 0}, caption(3) | {"weight": 1}]))
        self.assertEqual((info["train"]["documents"], info["left_out"]["samples_without_targets"]), (2, 1))

    def test_all_templates(self):
        for chat, want in (
            ("plain", "[1]{Ho\n}"),
            ("chatml", "<|im_start|>user\n[1]\nHi<|im_end|>\n<|im_start|>assistant\n{Ho<|im_end|>}\n"),
            ("llama3", "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\n[1]\nHi<|eot_id|>"
             "<|start_header_id|>assistant<|end_header_id|>\n\n{Ho<|eot_id|>}"),
        ):
            with self.subTest(chat=chat):
                self.out = self.folder / chat
                self.prepare(self.write([sample("a", "1.png", "<image>\nHi", "Ho")]), chat=chat, sequence_length=192)
                self.assertEqual(self.samples(), [want])

    def test_the_forms_in_which_samples_come_give_the_same_files(self):
        records = [caption(number) for number in range(5)]
        packed = self.folder / "samples.json.gz"
        packed.write_bytes(gzip.compress(self.write(records).read_bytes()))
        paths = [self.write(records), self.write(records, "samples.jsonl"), packed]
        for name, indent in (("line.json", None), ("lines.json", 2)):  # that begin with a byte order mark
            paths.append(self.folder / name)
            paths[-1].write_text("\ufeff" + json.dumps(records, indent=indent), encoding="utf-8")
        outputs = []
        for number, path in enumerate(paths):
            self.out = self.folder / f"out{number}"
            self.prepare(path)
            outputs.append({p.name: p.read_bytes() for p in self.out.iterdir()})
        for path, output in zip(paths[1:], outputs[1:], strict=True):
            self.assertEqual(output, outputs[0], path)

    def test_images_at_the_front_of_their_turn(self):
        records = [sample("a", ["1.png", "2.png"], " Is <image> more than <image>? ", "No", "Hm", "Ha")]
        self.prepare(self.write(records), "--images-first", chat="vicuna_v1", sequence_length=128)
        self.assertEqual(self.samples(), [
            "<s>USER: [1]\n[2]\nIs  more than ? ASSISTANT:{ No</s>}USER: Hm ASSISTANT:{ Ha</s>}"
        ])

    def test_a_first_word_of_gpt_is_dropped(self):
        record = {"id": 1, "image": "3.png", "conversations": [
            {"from": "gpt", "value": "Hello."}, {"from": "human", "value": "<image>"}, {"from": "gpt", "value": "Three"}]}
        self.prepare(self.write([record]))
        self.assertEqual(self.samples(), ["[3]{Three\n}"])

    def test_a_long_sample_is_cut_also_within_an_image(self):
        records = [sample("a", ["1.png", "2.png", "3.png"], "<image>", "y" * 50, "<image><image>", "no")]
        info = self.prepare(self.write(records), chat="vicuna_v1", sequence_length=91)
        self.assertEqual(info["train"]["cut_conversations"], 1)
        text = f"<s>USER: [1] ASSISTANT:{{ {'y' * 50}</s>}}USER: "
        self.assertEqual(self.samples(), [text + "[2][3](2)"])

    def test_every_file_of_a_split_has_its_own_images(self):
        records = [sample(str(n), f"{n % 7}.png", "<image>", f"{n:02d}" * 6) for n in range(60)]
        info = self.prepare(self.write(records), sequence_length=64, eval_fraction=0.2, tokens_per_file=150)  # 2 sequences
        self.assertGreater(len(info["train"]["files"]), 4)
        found = []
        for split in ("train", "eval"):
            of_split = [text for name in info[split]["files"] for text in self.samples(name.removesuffix(".npy"))]
            self.assertEqual(len(of_split), info[split]["images"])
            self.assertGreater(len(of_split), 5)
            found += of_split
        self.assertEqual(sorted(found), sorted(f"[{n % 7}]{{{f'{n:02d}' * 6}\n}}" for n in range(60)))
        self.assertEqual(info["images"]["count"], 7)

    def test_sequences_have_no_more_images_than_they_may(self):
        records = [sample(str(n), f"{n % 7}.png", "<image>", f"{n:02d}") for n in range(20)]
        info = self.prepare(self.write(records), max_images=3)
        self.assertEqual((info["train"]["images"], info["train"]["most_images_of_a_sequence"]), (20, 3))
        self.assertEqual(len(self.samples()), 20)
        self.assertEqual(info["train"]["tokens"], 7 * 64)
        self.out = self.folder / "refused"
        records.append(sample("x7", ["1.png"] * 4, "<image>" * 4, "no"))
        self.refuse("id x7: has 4 images, more than --max-images 3", self.write(records), max_images=3)

    def test_equal_conversations_about_the_same_images_are_kept_once(self):
        records = [caption(1), caption(2) | {"id": "other"}, caption(1) | {"id": "again"}, sample("x", "3.png", "<image>", "Picture 1.")]
        info = self.prepare(self.write(records))
        self.assertEqual(self.samples(), ["[1]{Picture 1.\n}", "[2]{Picture 2.\n}", "[3]{Picture 1.\n}"])
        self.assertEqual(info["left_out"]["duplicate_samples"], 1)


class Read(Preparation):
    def parka_data(self):
        program = os.environ.get("PARKA_PROGRAM", str(ROOT / "build/release/parka"))
        files = [str(self.out / "train-00000.npy"), str(self.out / "train-00001.npy")]
        return subprocess.run([program, "data", *files], capture_output=True, text=True, timeout=300)

    def test_parka_reads_every_image(self):
        records = [sample(str(n), f"{n % 7}.png", "<image>", f"{n:02d}" * 6) for n in range(60)]
        self.prepare(self.write(records), tokens_per_file=640)
        result = self.parka_data()
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        for line in result.stdout.splitlines()[:2]:
            self.assertIn("raw, uint16, 640 tokens, ids 10 to 257, 30 documents, 390 targets, 30 images, checksum ", line)
        path = self.out / "images-00000.pixels"
        content = bytearray(path.read_bytes())
        content[-5] ^= 1
        path.write_bytes(content)
        result = self.parka_data()
        self.assertEqual((result.returncode, result.stdout), (2, ""))
        self.assertIn(f"{path}: image 6 has other pixels than when it was made; copy it again", result.stderr)


class Tokens(Preparation):
    def tokenizer(self):
        return llama2_like(self.folder / "tokenizer")

    def test_text_between_images_is_tokenized_piece_by_piece(self):
        path = self.tokenizer()
        self.prepare(self.write([sample("a", "1.png", "Look: <image>\nthe fox", "It is.")]), tokenizer=path, chat="vicuna_v1")
        ids = np.fromfile(self.out / "train-00000.npy", "<u2").tolist()
        tokenizer = JsonTokenizer(path)
        pieces = tokenizer.encode([b"<s>USER: Look: ", b"\nthe fox ASSISTANT: It is.</s>"])
        slot = tokenizer.vocab_size
        want = [*pieces[0].tolist(), *[slot] * 4, *pieces[1].tolist()]
        self.assertEqual(ids[: len(want)], want)
        marks = np.fromfile(self.out / "train-00000.npy.mask", np.uint8)[: len(want)]
        learnt = [i for i, mark in zip(want, marks.tolist()) if mark & 1]
        self.assertEqual(learnt, tokenizer.encode([b"It is."])[0].tolist() + [tokenizer.id_of("</s>")])

    def test_the_id_of_image_slots(self):
        path = self.write([sample("a", "1.png", "<image>", "ab")])
        self.assertEqual(self.prepare(path, image_token=300)["padded_vocab_size"], 304)
        ids = np.fromfile(self.out / "train-00000.npy", "<u2")
        self.assertEqual(ids[:7].tolist(), [300] * 4 + [*b"ab\n"])
        self.out = self.folder / "named"
        info = self.prepare(path, tokenizer=self.tokenizer(), image_token="<unk>")
        self.assertEqual(info["images"]["token"], 0)
        self.out = self.folder / "refused"
        self.refuse("--image-token <none>: is neither a token of the tokenizer nor an id", path, image_token="<none>")
        self.refuse("--image-token 256: is also the id that ends documents", path, image_token=256)
        self.refuse("samples.json: sample 1 of the array, id a: its text has id 97", path, image_token=97)


class Bad(Preparation):
    def test_bad_samples_are_refused_by_id_or_left_out_and_counted(self):
        good = caption(1)
        cases = [
            (sample("x7", "1.png", "What?", "It"), "id x7: has 1 images, but 0 <image> in its text"),
            (sample("x7", "1.png", "<image><image>", "It"), "id x7: has 1 images, but 2 <image>"),
            (sample("x7", None, "<image>", "It"), "id x7: has 0 images, but 1 <image>"),
            (sample("x7", None, "It", "<image>"), "id x7: has <image> outside of what the human says"),
            ({**sample("x7", None, "What?", "It"), "images": ["1.png"]}, 'id x7: has "images" and no "image", which is the key'),
            ({**sample("x7", [], "<image>", "It"), "video": "1.mp4"}, 'id x7: has "video" and no "image", which is the key'),
            (sample("x7", [3], "<image>", "It"), 'id x7: its "image" is neither a file name nor a list'),
            (sample("x7", "../pictures/1.png", "<image>", "It"), 'id x7: its "image" ../pictures/1.png does not lie in'),
            (sample("x7", "a/../1.png", "<image>", "It"), 'id x7: its "image" a/../1.png does not lie in'),
            (sample("x7", ["1.png", "/etc/passwd"], "<image><image>", "It"), 'id x7: its "image" /etc/passwd does not lie in'),
            (sample("x7", "a\0b.png", "<image>", "It"), 'id x7: its "image" is neither a file name nor a list'),
            (sample("x7", "1.png"), "id x7: human and gpt do not speak in turn"),
            ({"id": "x7", "conversations": [{"from": "human", "value": "a"}] * 2}, "id x7: human and gpt do not speak in turn"),
            ({"id": "x7", "conversations": [{"from": "cat", "value": "a"}]}, 'id x7: has no list "conversations"'),
            ({"id": "x7"}, 'id x7: has no list "conversations"'),
            (saying(1, weight=0.5), 'id x7: turn 2 has "weight": 0.5'),
            (saying(0, train=True), 'id x7: turn 1 has "train": true'),
            (saying(1, train_detail=[{"end_offset": 1, "train": False}]), 'id x7: turn 2 has "train_detail"'),
            (saying(1) | {"loss_mask": [0, 1]}, 'id x7: the record has "loss_mask"'),
            (sample("x\n7", "1.png", "What?", "It"), "id x 7: has 1 images, but 0 <image> in its text"),
            (7, "samples.json: sample 2 of the array: is no object"),
        ]
        for bad, message in cases:
            with self.subTest(message=message):
                self.refuse(message, self.write([good, bad]))
        info = self.prepare(self.write([good, *(bad for bad, _ in cases)]), "--skip-bad")
        self.assertEqual((info["train"]["documents"], info["left_out"]["bad_samples"]), (1, len(cases)))
        self.assertEqual(len(info["bad"]), len(cases))

    def test_lines_are_counted_from_the_beginning_of_their_file(self):
        path = self.folder / "lines.jsonl"
        path.write_text("\n \n" + json.dumps(caption(1)) + "\n\n7\n", encoding="utf-8")
        self.refuse("lines.jsonl:5: is no object", path)

    def test_samples_that_have_no_ids_are_refused_by_id_or_left_out_and_counted(self):
        dollar = ord("$")
        cases = [
            (sample("t", None, "a", "b"), "id t: the chat template refuses"),
            (sample("d", "none.png", "<image>", "5 $"), f"id d: its text has id {dollar}, which marks images"),
        ]
        for bad, message in cases:
            with self.subTest(message=message):
                path = self.write([caption(1), bad])
                self.refuse(f"sample 2 of the array, {message}", path, image_token=dollar)
                self.refuse("; --skip-bad leaves out such samples", path, image_token=dollar)
        records = [cases[0][0], caption(1), cases[1][0], caption(2)]
        info = self.prepare(self.write(records), "--skip-bad", image_token=dollar)
        self.assertEqual((info["train"]["documents"], info["images"]["count"]), (2, 2))
        self.assertEqual((info["left_out"]["bad_samples"], info["left_out"]["bad_images"]), (2, 0))
        for found, (_, message) in zip(info["bad"], cases):
            self.assertIn(message, found)
        text = np.fromfile(self.out / "train-00000.npy", "<u2")
        self.assertEqual(bytes(text[(text != dollar) & (text < EOS)].astype(np.uint8)), b"Picture 1.\nPicture 2.\n")

    def test_bad_images_are_refused_by_name_or_left_out_and_counted(self):
        whole = (self.pictures / "4.png").read_bytes()
        (self.pictures / "4.png").write_bytes(whole[:60])
        records = [caption(0), caption(4), caption(5), sample("m", ["0.png", "none.png"], "<image><image>", "Two")]
        path = self.write(records)
        self.refuse(f"{self.pictures}/4.png: cannot be read", path)
        info = self.prepare_after_a_stop(path, "--skip-bad")
        (self.pictures / "4.png").write_bytes(whole)
        self.assertEqual(self.samples(), ["[0]{Picture 0.\n}", "[5]{Picture 5.\n}"])
        self.assertEqual((info["left_out"]["bad_images"], info["left_out"]["samples_with_bad_images"]), (2, 2))
        self.assertEqual([line.split(":")[0] for line in info["bad"]], ["4.png", "none.png"])
        self.assertEqual(info["images"]["count"], 2)

    def test_what_is_no_picture_file_is_refused_at_once(self):
        os.mkfifo(self.pictures / "pipe.png")
        (self.pictures / "null.png").symlink_to("/dev/zero")
        (self.pictures / "loop.png").symlink_to("loop.png")
        (self.pictures / "pointer.png").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        bad = {"pipe.png": "is a pipe", "null.png": "is a pipe", "loop.png": "cannot be read", "pointer.png": "git lfs pull"}
        for name, word in bad.items():
            with self.subTest(name=name):
                path = self.write([caption(0), sample("x7", name, "<image>", "It")])
                self.refuse(f"{name}: {word}" if word != "git lfs pull" else word, path)
        records = [caption(0), *(sample(name, name, "<image>", "It") for name in bad)]
        info = self.prepare(self.write(records), "--skip-bad", "--workers", "2")
        self.assertEqual((info["left_out"]["bad_images"], info["images"]["count"]), (4, 1))

    def test_links_in_the_folder_are_followed(self):
        elsewhere = self.folder / "elsewhere"
        (self.pictures / "2.png").rename(elsewhere)
        (self.pictures / "2.png").symlink_to(elsewhere)
        self.assertEqual(self.prepare(self.write([caption(1), caption(2)]))["images"]["count"], 2)

    def test_a_key_that_is_there_twice(self):
        text = json.dumps([caption(1)])
        for twice in ('"image": "0.png", "image": "1.png"', '"conversations": [], "image": "1.png"'):
            path = self.folder / "samples.json"
            path.write_text(text.replace('"image": "1.png"', twice))
            self.refuse("several times", path)
        path.write_text(text.replace('"id": ', '"source": 1, "source": 2, "id": '))
        self.prepare(path)

    def test_files_that_hold_no_samples(self):
        for content, word in ((b"PAR1" + bytes(20), "is Parquet"), (b"<html></html>", "web page"), (b"PK\x03\x04" + bytes(20), "zip"),
                              (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull")):
            for name in ("samples.json", "samples.jsonl", "samples"):
                path = self.folder / name
                path.write_bytes(content)
                self.refuse(word, path)

    def test_bad_samples_are_blamed_where_nothing_else_is_left(self):
        no_ids, no_picture = sample("t", None, "a", "b"), sample("m", "none.png", "<image>", "One")
        long = sample("l", ["1.png"] * 17, "<image>" * 17, "the reply lies behind 68 slots")
        place, first = self.folder / "samples.json", "the first for this reason: "
        nothing = "no sample is left to train on; samples left out as bad: "
        for records, message in (
            ([7, {"id": "x7"}], f"{nothing}2, {first}{place}: sample 1 of the array: is no object"),
            ([no_ids], f"{nothing}1, {first}{place}: sample 1 of the array, id t: the chat template refuses"),
            ([no_picture, {**no_picture, "id": "equal"}, sample("o", "none.png", "<image>", "Two")], f"{nothing}2, {first}none.png: "),
            ([no_picture, 7], f"{nothing}2, {first}{place}: sample 2 of the array: is no object"),
            ([long, 7], f"raise it, give more samples, or lower --eval-fraction; samples left out as bad: 1, {first}"),
        ):
            with self.subTest(message=message):
                self.refuse(message, self.write(records), "--skip-bad")

    def prepare_after_a_stop(self, path, *flags, **options):
        code, error = self.call(path, *flags, **options)
        self.assertEqual(code, 0, error)
        self.assertTrue(all("continues: " in line for line in error.splitlines()), error)
        return json.loads((self.out / "data.json").read_text())

    def test_what_is_no_list_of_samples(self):
        path = self.folder / "samples.json"
        for content, message in (("[{}", "is neither a JSON array nor JSON Lines"), ("{", "is neither a JSON array"),
                                 ("", "no sample in"), ("[]", "no sample in")):
            path.write_text(content)
            self.refuse(message, path)
        self.refuse("no such file or folder", self.folder / "none.json")

    def test_options_that_cannot_be(self):
        path = self.write([caption(0)])
        for options, message in (
            ({"image_size": 0}, "--image-size is 0; give at least 1"),
            ({"patch_size": 9}, "--patch-size 9 is larger than --image-size 8"),
            ({"sequence_length": 1}, "--sequence-length is 1"),
            ({"eval_fraction": 1}, "--eval-fraction is 1.0"),
            ({"tower": "vit"}, "invalid choice: 'vit'"),
            ({"chat": "none"}, "--chat none: "),
            ({"system": "hi"}, "--chat plain has no system message; leave out --system"),
            ({"sequence_length": 4}, "--sequence-length is 4, and an image takes 4 slots: "),
            ({"sequence_length": 5, "chat": "vicuna_v1"}, "no sample has a reply within --sequence-length to train on"),
        ):
            with self.subTest(options=options):
                self.refuse(message, path, **options)

    def test_sequences_of_text_may_be_shorter_than_an_image(self):
        self.prepare(self.write([sample("a", None, "A", "B")]), chat="vicuna_v1", image_size=32, sequence_length=48)

    def test_the_kept_tokenizer_has_the_template_and_the_end_of_a_turn(self):
        tokenizer = make_chat_tokenizer("qwen25", self.folder / "model")
        config = tokenizer.with_name("tokenizer_config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": "of another form", "eos_token": "<|endoftext|>"}))
        path, end = self.write([caption(1), caption(2)]), JsonTokenizer(tokenizer).id_of("<|im_end|>")
        self.prepare(path, tokenizer=tokenizer, chat="chatml")
        kept = self.out / "tokenizer"
        self.assertIn("<|im_start|>", (kept / "chat_template.jinja").read_text())
        self.assertEqual(json.loads((kept / "generation_config.json").read_text())["eos_token_id"][0], end)
        shutil.rmtree(self.out)
        self.prepare(path, tokenizer=tokenizer)  # captions are no chats
        self.assertFalse((kept / "chat_template.jinja").exists())
        self.assertEqual((kept / "tokenizer_config.json").read_bytes(), config.read_bytes())

    def test_the_kept_processor_makes_the_pixels_of_the_data(self):
        from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
        from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
        from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

        tokenizer, path = llama2_like(self.folder / "model"), self.write([caption(1)])
        picture = Image.open(self.pictures / "1.png")  # wider than high
        for geometry, tower, kind in (("crop", "clip", CLIPImageProcessorPil), ("pad", "clip", LlavaImageProcessorPil),
                                      ("stretch", "siglip", SiglipImageProcessorPil)):
            with self.subTest(geometry):
                info = self.prepare(path, tokenizer=tokenizer, geometry=geometry, tower=tower)["images"]
                kept = self.out / "tokenizer"
                self.assertEqual(geometry_of(kept), geometry)
                named = json.loads((kept / "preprocessor_config.json").read_text())["image_processor_type"]
                self.assertEqual(f"{named}Pil", kind.__name__)
                got = kind.from_pretrained(str(kept))(picture, return_tensors="np")["pixel_values"][0]
                pixels = np.frombuffer((self.out / "images-00000.pixels").read_bytes()[64:], np.uint8).reshape(3, SIZE, SIZE)
                mean, deviation = (np.reshape(info[name], (3, 1, 1)) for name in ("mean", "deviation"))
                np.testing.assert_allclose(got, (pixels / 255 - mean) / deviation, atol=1e-6)
                shutil.rmtree(self.out)

    def test_text_alone_has_no_processor_of_images(self):
        self.prepare(self.write([sample("a", None, "A", "B")]), tokenizer=llama2_like(self.folder / "model"), chat="vicuna_v1")
        self.assertTrue((self.out / "tokenizer" / "tokenizer.json").exists())
        self.assertFalse((self.out / "tokenizer" / "preprocessor_config.json").exists())

    def test_held_out_pictures_are_in_no_training_conversation(self):
        questions = [sample(f"{number} {question}", f"{number}.png", f"<image>\n{question}?", f"{question} {number}.")
                     for number in range(7) for question in ("What", "Where", "Why")]
        text = [sample(f"t{number}", None, f"What is {number}?", f"It is {number}.") for number in range(9)]
        self.prepare(self.write(questions + text), "--eval-fraction", "0.4", chat="vicuna_v1", sequence_length=512)
        said = {}
        for split in ("train", "eval"):
            ids = np.fromfile(self.out / f"{split}-00000.npy", "<u2")
            said[split] = bytes(ids[ids < 256].astype(np.uint8).tolist()).decode()
        pictures = {split: set(re.findall(r"(?:What|Where|Why) (\d)\.", text)) for split, text in said.items()}
        self.assertTrue(pictures["train"] and pictures["eval"], pictures)
        self.assertEqual(pictures["train"] & pictures["eval"], set())
        for split in said:
            for picture in pictures[split]:
                self.assertEqual(len(re.findall(rf"(?:What|Where|Why) {picture}\.", said[split])), 3)
            self.assertIn("It is", said[split])


class Stopped(Preparation):
    def files(self):
        return {p.name: p.read_bytes() for p in self.out.iterdir()}

    def test_a_stopped_run_continues_and_makes_the_same_files(self):
        with mock.patch.object(shards, "SHARD_PICTURES", 2):
            path = self.write([caption(number) for number in range(7)])
            self.prepare(path)
            want = self.files()
            self.assertEqual(sum(name.endswith(".pixels") for name in want), 4)
            self.out = self.folder / "again"
            good = (self.pictures / "5.png").read_bytes()
            (self.pictures / "5.png").write_bytes(b"")
            self.refuse("5.png: is empty", path)
            (self.pictures / "5.png").write_bytes(good)
            code, error = self.call(path)
            self.assertEqual(code, 0, error)
            self.assertIn("continues: 1 of 1 parts of the text are there", error)
            self.assertIn("continues: 2 of 4 parts of the images are there", error)
        self.assertEqual(self.files(), want)

    def test_pictures_that_could_not_be_used_are_tried_again(self):
        def refuses(path, fitting):
            if path.name in bad:
                raise PictureError("cannot be read (Permission denied)")
            return pixels_of(path, fitting)

        path = self.write([caption(number) for number in range(7)])
        with mock.patch.object(shards, "SHARD_PICTURES", 2), mock.patch.object(shards, "pixels_of", refuses):
            for bad, made in (["3.png"], 0), (["3.png"], 2), (["4.png", "5.png"], 1):
                code, error = self.call(path)
                self.assertEqual((code, f"continues: {made} of 4 parts of the images" in error), (2, made > 0), error)
                self.assertIn(f"{bad[0]}: cannot be read (Permission denied)", error)
            bad = ["5.png"]
            code, error = self.call(path, "--skip-bad")
        self.assertIn("continues: 2 of 4 parts of the images are there", error)
        self.assertEqual((code, json.loads((self.out / "data.json").read_text())["images"]["count"]), (0, 6))

    def test_text_is_made_again_with_other_special_tokens(self):
        tokenizer, last = llama2_like(self.folder / "tokenizer"), (self.pictures / "2.png").read_bytes()
        path = self.write([caption(1), caption(2)])
        (self.pictures / "2.png").unlink()
        self.refuse("2.png: cannot be read", path, tokenizer=tokenizer)
        (self.pictures / "2.png").write_bytes(last)
        config = tokenizer.with_name("tokenizer_config.json")
        config.write_text(config.read_text().replace('"bos_token": "<s>"', '"bos_token": "<unk>"'))
        self.assertEqual(self.call(path, tokenizer=tokenizer)[0], 0)
        self.assertEqual(np.fromfile(self.out / "train-00000.npy", "<u2")[0], JsonTokenizer(tokenizer).id_of("<unk>"))

    def test_where_the_same_command_must_fail_again_it_is_not_advised(self):
        path = self.write([caption(number) for number in range(7)])
        for options, message in (({"sequence_length": 5, "chat": "vicuna_v1"}, "no sample has a reply"),
                                 ({"eval_fraction": 1e-9}, "no sample is held out")):
            with self.subTest(message=message):
                self.refuse(message, path, **options)
                code, error = self.call(path, **options)
                self.assertEqual((code, "the same command" in error), (2, False), error)
                self.assertIn(".out.partial: the command continues once what the error says is changed\n", error)
        code, error = self.call(path)
        self.assertEqual(code, 0, error)
        self.assertIn("continues: 1 of 1 parts of the images are there", error)

    def test_workers_make_the_same_files(self):
        path = self.write([caption(number) for number in range(7)])
        self.prepare(path)
        want = self.files()
        self.out = self.folder / "again"
        self.prepare(path, workers=2)
        self.assertEqual(self.files(), want)

    def test_slots_follow_tower_patch_and_projector(self):
        for (size, patch, downsample), want in (((336, 14, 1), 576), ((384, 14, 1), 729), ((384, 14, 2), 196),
                                                ((448, 14, 2), 256), ((448, 14, 3), 121)):
            self.assertEqual(prepare_images.slots_of(size, patch, downsample), want)

    def test_progress_counts_images(self):
        progress = prepare_images.parts.make_progress(shards.PictureProgress)
        progress.add(50, 0)
        self.assertEqual(progress.line(200, 5.0), "25.0 % of 200 images, 10 images/s, 0:00:15 left")


if __name__ == "__main__":
    unittest.main()
