#!/usr/bin/env python3
"""Tests of scripts/research/make_instructions.py, and of scripts/research/finetune_recipes.sh with a tiny model. Exits with 77 (skipped) where
numpy, matplotlib, tokenizers or transformers is missing."""
import json
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

try:
    import matplotlib  # noqa: F401
    import numpy  # noqa: F401
    import tokenizers  # noqa: F401
    import transformers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error}")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = ROOT / "scripts/research"
sys.path.insert(0, str(ROOT / "tests" / "commands"))
from parka_runs import PROGRAM  # noqa: E402

MODULE = '''\
"""Of a module, not a function."""

def plain(a, b):
    """Adds."""
    # and says so
    total = a + b
    return total

class Shape:
    """Of a class."""

    @property
    async def area(self):
        """The area,
        in squares.
        """
        return await self.width * self.height

    def without(self):
        return "a body of more than forty characters, without a docstring"

def only_a_docstring():
    """Nothing follows it, however long what is said here may be."""

def on_one_line(): "Both."; return "a body of more than forty characters, behind a semicolon"

def brief():
    """Too short a body."""
    return 1
'''
PLAIN = ("def plain(a, b):\n    \"\"\"Adds.\"\"\"", "    # and says so\n    total = a + b\n    return total")
AREA = ("async def area(self):\n    \"\"\"The area,\n    in squares.\n    \"\"\"", "    return await self.width * self.height")


class Folder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory(prefix="parka-test-")
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)
        (self.folder / "text").mkdir()

    def write(self, name, text):
        (self.folder / "text" / name).write_text(text, encoding="utf-8")

    def script(self, *arguments):
        return subprocess.run([sys.executable, SCRIPTS / "make_instructions.py", self.folder / "text", "--out", self.folder / "out.jsonl", *arguments],
                              capture_output=True, text=True, timeout=120)

    def functions(self, *arguments):
        result = self.script(*arguments)
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        made = []
        for line in (self.folder / "out.jsonl").read_text(encoding="utf-8").splitlines():
            user, assistant = json.loads(line)["messages"]
            self.assertEqual((user["role"], assistant["role"]), ("user", "assistant"))
            request, _, head = user["content"].partition("\n\n")
            self.assertEqual(request, "Write the rest of this Python function.")
            made.append((head, assistant["content"]))
        return made


class Instructions(Folder):
    def test_documented_functions_are_split_behind_their_docstrings(self):
        self.write("a.py", MODULE)
        made = self.functions()
        self.assertEqual(made, [PLAIN, AREA])
        for head, rest in made:
            compile(f"{head}\n{rest}", "made", "exec")

    def test_equal_functions_count_once_and_other_files_are_left_out(self):
        self.write("a.py", MODULE)
        self.write("b.py", MODULE.replace("squares", "acres"))
        self.write("broken.py", "def f(:\n")
        self.write("c.txt", MODULE.replace("Adds", "Sums"))
        acres = (AREA[0].replace("squares", "acres"), AREA[1])
        self.assertEqual(self.functions(), [PLAIN, AREA, acres])
        self.assertEqual(self.functions("--include", "c.txt")[0][0], PLAIN[0].replace("Adds", "Sums"))

    def test_lines_are_those_of_the_parser_and_nothing_is_cut(self):
        odd = MODULE.replace("# and says so", "# a form feed \f and a next line \x85 end no line of Python").replace("import", "\fimport")
        self.write("a.py", "import os\n\f\n" + odd)
        self.assertEqual([head for head, _ in self.functions()], [PLAIN[0], AREA[0]])
        self.assertIn("\f and a next line \x85 end", self.functions()[0][1])
        # A string that reaches further to the left than the method cannot move with it.
        left = MODULE.replace("return await self.width", 'text = """\nleft"""\n        return await self.width')
        self.write("a.py", left)
        self.assertEqual(self.functions(), [PLAIN])
        inner = 'def outer():\n    """Of two."""\n    def inner():\n        """Of one, which is not taken by itself."""\n        return "a body of more than forty characters"\n    return inner\n'
        self.write("a.py", inner)
        self.assertEqual([head for head, _ in self.functions()], ['def outer():\n    """Of two."""'])

    def test_sources_are_decoded_as_python_decodes_them(self):
        expected = (PLAIN[0].replace("Adds", "Ad\xeds"), PLAIN[1])
        text = MODULE.replace("Adds", "Ad\xeds")
        for name, encoded in (("mark", text.encode("utf-8-sig")), ("latin", b"# -*- coding: latin-1 -*-\n" + text.encode("latin-1")),
                              ("second line", b"#!/usr/bin/python\n# vim: set fileencoding=cp1252 :\n" + text.encode("cp1252")),
                              ("ends of lines", text.replace("\n", "\r\n").encode())):
            with self.subTest(name):
                (self.folder / "text" / "a.py").write_bytes(encoded)
                self.assertEqual(self.functions(), [expected, AREA])

    def test_sources_that_python_cannot_decode_are_left_out_and_counted(self):
        self.write("a.py", MODULE)
        whole = MODULE.replace("Adds", "Ad\xeds")
        first = self.folder / "text" / "b.py"
        first.write_bytes(whole.encode("latin-1"))
        result = self.script()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, rf"^make_instructions: .*\b1 file\b.*{first}\n$")
        for name, encoding in (("c.py", "klingon"), ("d.py", "hex"), ("e.py", "ascii")):
            (self.folder / "text" / name).write_bytes(f"# coding: {encoding}\n{whole}".encode())
        result = self.script()
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertRegex(result.stderr, rf"^make_instructions: .*\b4 files\b.*{first}\n$")
        self.assertEqual(len((self.folder / "out.jsonl").read_text().splitlines()), 2)

    def test_lengths(self):
        self.write("a.py", MODULE)
        self.assertEqual(self.functions("--most-characters", "50"), [AREA])
        self.assertEqual([rest for _, rest in self.functions("--least-characters", "1")], [PLAIN[1], AREA[1], "    return 1"])

    def test_bad_input(self):
        self.write("a.py", "x = 1\n")
        for message, *arguments in (("function", ), ("-characters", "--least-characters", "0"),
                                    ("-characters", "--least-characters", "9", "--most-characters", "8")):
            with self.subTest(message):
                result = self.script(*arguments)
                self.assertEqual(result.returncode, 2)
                self.assertRegex(result.stderr, f"^make_instructions: error: .*{message}.*\n$")
        self.assertFalse((self.folder / "out.jsonl").exists())


class Recipes(Folder):
    def setUp(self):
        super().setUp()
        for number in range(240):
            self.write(f"m{number}.py", "".join(
                f'def f{number}_{i}(value):\n    """Gives {i} times the value of {number}."""\n    result = {i} * value + {number}\n    return result\n\n'
                for i in range(3)))
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "BASE"}, "MPLCONFIGDIR": str(self.folder), "PARKA": os.path.abspath(PROGRAM),
            "PYTHON": sys.executable, "CONFIG": "configs/tiny-olmo.json", "TOKENS": "7680", "BATCH": "2", "LENGTH": "128", "SEEDS": "1 2", "VOCABULARY": "320",
            "EPOCHS": "1", "RATE": "3e-3", "MODEL": "device.kind=cpu training.micro_batch_size=2"}

    def recipes(self, out, run, **environment):
        return subprocess.run([SCRIPTS / "finetune_recipes.sh", out, "text", run], capture_output=True, text=True,
                              env={**self.environment, **environment}, cwd=self.folder, timeout=600)

    def records(self, folder, kind):
        return [record for record in map(json.loads, (self.folder / folder / "metrics.jsonl").read_text().splitlines()) if record["kind"] == kind]

    def test_a_tiny_model_from_text_to_figures_and_again_without_training(self):
        out = self.folder / "out"
        first = self.recipes(out, "lean=parka,optimizer.master=fp32")
        self.assertEqual(first.returncode, 0, first.stdout + first.stderr)
        figures = {line["name"]: line for line in map(json.loads, (out / "held_out.jsonl").read_text().splitlines())}
        gap = figures["held_out.tiny-olmo.instructions.lean.vs_bf16"]
        self.assertEqual(list(gap["seeds"]), ["1", "2"])
        self.assertTrue(all(0 < abs(value) < 0.1 for value in gap["seeds"].values()))
        for name in ("held_out.png", "runs.png", "held_out.txt", "base/metrics.jsonl", "lean.2/config.json"):
            self.assertTrue((out / name).exists(), name)

        # All begin with the weights of the base: those of bf16 lose the same before the first step, and learn.
        held_out = {name: [record["loss"] for record in self.records(out / name, "eval")] for name in ("bf16.1", "bf16.2", "lean.1")}
        self.assertEqual(held_out["bf16.1"][0], held_out["bf16.2"][0])
        self.assertAlmostEqual(held_out["bf16.1"][0], held_out["lean.1"][0], delta=0.05)
        self.assertTrue(all(losses[-1] < losses[0] - 0.2 for losses in held_out.values()))
        # Only what the assistant writes is a target.
        of_base, of_run = self.records(out / "base", "train")[0]["targets"], self.records(out / "bf16.1", "train")[0]["targets"]
        self.assertLess(of_run, 0.8 * of_base)
        made = (out / "held_out.jsonl").read_text()
        self.assertEqual(self.recipes(out, "lean=parka,optimizer.master=fp32").returncode, 0)
        self.assertEqual((out / "held_out.jsonl").read_text(), made)
        result = self.recipes("other", "lean=parka", BATCH="60")
        self.assertEqual((result.returncode, "BATCH" in result.stderr), (2, True), result.stderr)

    def test_from_a_base_with_its_model_and_tokenizer(self):
        first = self.recipes("out", "again=bf16", SEEDS="1")
        self.assertEqual(first.returncode, 0, first.stdout + first.stderr)
        shutil.move(self.folder / "out" / "work" / "base", self.folder / "small")
        config = json.loads((ROOT / "configs" / "tiny-olmo.json").read_text().partition("\n")[2])  # without its comment
        config["model"] = {"d_model": 32, "qk_norm": "full", "rope_theta": 500}
        config["data"]["token_dtype"] = "uint32"
        (self.folder / "other.json").write_text(json.dumps(config))
        checkpoint, = self.folder.glob("small/step_*")
        # The same text gives the same conversations, and the same bits from the same weights.
        for name, base in (("run", "small"), ("checkpoint", f"small/{checkpoint.name}/")):
            with self.subTest(name):
                result = self.recipes(name, "again=bf16", SEEDS="1", BASE=base, CONFIG="other.json", TOKENS="none")
                self.assertEqual(result.returncode, 0, result.stdout + result.stderr)
                for kind in ("train", "eval"):
                    of_first, of_base = ([record["loss"] for record in self.records(f"{out}/bf16.1", kind)] for out in ("out", name))
                    self.assertEqual(of_base, of_first)
                made = sorted(path.name for path in (self.folder / name / "work").iterdir())
                self.assertEqual(made, ["again.1", "base.json", "bf16.1", "chats", "functions.jsonl", "lock"])
                self.assertIn("held_out.small.instructions.again.vs_bf16", (self.folder / name / "held_out.jsonl").read_text())
        for gone, message in (("tokenizer", ".*tokenizer/tokenizer.json"), ("config.json", ".*config.json.*BASE")):
            (self.folder / "small" / gone).rename(self.folder / "gone")
            for base in ("small", f"small/{checkpoint.name}"):
                with self.subTest(gone=gone, base=base):
                    result = self.recipes("refused", "again=bf16", BASE=base)
                    self.assertEqual((result.returncode, result.stdout), (2, ""), result.stderr)
                    self.assertRegex(result.stderr, f"^finetune_recipes.sh: {self.folder.resolve()}/small: {message}.*\n$")
            (self.folder / "gone").rename(self.folder / "small" / gone)
        self.assertEqual(list((self.folder / "refused" / "work").iterdir()), [])


if __name__ == "__main__":
    unittest.main()
