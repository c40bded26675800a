"""Help: it comes from the tree of commands and options, and says defaults."""
import os
import re
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

from parka_runs import PROGRAM, on_terminal

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ["train", "plan", "eval", "generate", "import", "export", "bench", "tune", "tune-precision", "data", "config", "version",
            "prepare", "prepare-images", "prepare-eval", "tokenizer", "follow", "plot", "compare", "scores"]
PYTHON_COMMANDS = COMMANDS[COMMANDS.index("prepare"):]


def output(*arguments):
    result = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=60)
    if result.returncode != 0:
        raise AssertionError(result.stderr)
    return result.stdout


def shown_on_a_terminal(columns, *arguments):
    """The lines that the program prints there."""
    return on_terminal(columns, None, *arguments)[1].splitlines()


class Help(unittest.TestCase):
    def test_every_command_is_listed(self):
        listed = re.findall(r"^  ([\w-]+) ", output("--help").split("Subcommands:")[1], re.MULTILINE)
        self.assertEqual(listed, COMMANDS)

    def test_defaults_are_shown(self):
        for command, defaults in (("plan", ["(default: 1)", "(default: 80)", "(default: 340; needs --measured)"]),
                                  ("bench", ["(default: 5)"]), ("tune", ["(default: 64)", "(default: 150)"]),
                                  ("generate", ["(default: 200)", "(default: 8)"])):
            text = output(command, "--help")
            for default in defaults:
                self.assertIn(default, text)
            self.assertNotIn("[]", text)
        for command in COMMANDS:  # a default that stands for something else is not shown
            self.assertNotRegex(output(command, "--help"), r"default: -1|default: 0; needs --measured\)\s+--link")

    def test_a_terminal_breaks_no_word(self):
        """What continues a line stands below the text of its option."""
        for columns in (80, 120):
            lines = shown_on_a_terminal(columns, "train", "--help")
            self.assertEqual([line for line in lines if len(line) > columns], [])
            (first,) = [line for line in lines if line.startswith("  --set KEY=VALUE ...")]
            self.assertRegex(lines[lines.index(first) + 1], r"^ {30}\S")
            words = " ".join(lines).split()
            self.assertEqual(words, output("train", "--help").split())
            self.assertLessEqual(max(map(len, shown_on_a_terminal(columns, "--help"))), columns)

    def test_commands_in_python_go_by_their_names(self):
        for command in PYTHON_COMMANDS:
            with self.subTest(command):
                self.assertIn(f"usage: parka {command} ", output("help", command))
                refused = subprocess.run([PROGRAM, command, "--no-such-option"], capture_output=True, text=True, timeout=60)
                self.assertEqual(refused.returncode, 2, refused.stderr)
                self.assertIn(f"parka {command}: error: ", refused.stderr)

    def test_commands_in_python_say_what_they_lack(self):
        """A Python without packages, and none at all."""
        bare = os.path.join(self.enterContext(tempfile.TemporaryDirectory(prefix="parka-test-")), "python")
        Path(bare).write_text(f"#!/bin/sh\nexec {sys.executable} -S \"$@\"\n", encoding="utf-8")
        os.chmod(bare, 0o755)
        for python, named in ((bare, "-m pip install numpy"), ("/nowhere/python", "PARKA_PYTHON")):
            refused = subprocess.run([PROGRAM, "compare", "a"], capture_output=True, text=True, timeout=60, env=os.environ | {"PARKA_PYTHON": python})
            self.assertEqual(refused.returncode, 2)
            self.assertRegex(refused.stderr, rf"\A[^\n]*error: [^\n]*{named}[^\n]*\n\Z")

    def test_bash_completes_what_help_lists(self):
        script = "source scripts/completion.bash; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); _parka; echo \"${COMPREPLY[@]}\""
        for words, completed in ((["pre"], "prepare prepare-images prepare-eval"), (["config", "sch"], "schema"), (["follow", "--t"], "--tensorboard"),
                                 (["train", "x.json", "--gp"], "--gpus"), (["--threads", "2", "ver"], "version")):
            result = subprocess.run(["bash", "-c", script, "bash", PROGRAM, *words], capture_output=True, text=True, timeout=60, cwd=ROOT)
            self.assertEqual((result.stdout.strip(), result.stderr), (completed, ""), words)

    def test_help_is_a_command_too(self):
        self.assertEqual(output("help", "train"), output("train", "--help"))
        self.assertEqual(output("help"), output("--help"))


class Version(unittest.TestCase):
    def test_the_short_forms_agree(self):
        self.assertEqual({output("version"), output("--version"), output("-V")}, {output("version")})
        self.assertRegex(output("version"), r"\Aparka \d+\.\d+\.\d+\n\Z")

    def test_verbose_has_what_a_bug_report_needs(self):
        lines = output("version", "--verbose").splitlines()
        self.assertEqual(lines[0], output("version").strip())
        facts = dict(line.split(maxsplit=1) for line in lines[1:])
        self.assertEqual([name for name in ("commit", "compiler", "build", "CUDA", "architectures", "NCCL", "system", "CPU", "GPU")
                          if name not in facts], [])
        self.assertRegex(facts["commit"], r"^([0-9a-f]{7,}|unknown|v?\d)")
        self.assertIn("-march=", facts["build"])


class Schema(unittest.TestCase):
    def test_the_shipped_schema_is_the_program_s(self):
        self.assertEqual((ROOT / "configs/parka.schema.json").read_text(encoding="utf-8"), output("config", "schema"))


class OtherNames(unittest.TestCase):
    """What users of other programs write."""

    def refused(self, *arguments):
        result = subprocess.run([os.path.abspath(PROGRAM), *arguments], capture_output=True, text=True, timeout=60, cwd=ROOT)
        self.assertEqual(result.returncode, 2, result.stderr)
        self.assertEqual(len(result.stderr.splitlines()), 1, result.stderr)
        return result.stderr

    def test_they_are_told_what_it_is_called_here(self):
        for arguments, says in {("train", "c.json", "--resume"): "by itself",
                                ("train", "c.json", "--resume_from_checkpoint=x"): "by itself",
                                ("generate", "run", "hello"): "--prompt",
                                ("generate", "run", "--max-tokens", "5"): "--tokens",
                                ("generate", "run", "--max_new_tokens=5"): "--tokens",
                                ("train", "c.json", "--epochs", "3"): "--training.steps",
                                ("plan", "c.json", "--learning-rate=1e-3"): "--optimizer.lr",
                                ("bench", "c.json", "--batch-size", "8"): "--training.global_batch_size",
                                ("eval", "run", "--device", "cpu"): "--device.kind",
                                ("plan", "c.json"): "config new", ("plan", "150m"): "config new",
                                ("plan", "configs"): "--data",
                                ("plan", "configs/quickstart.json", "--training.epochs=3"): "training.steps",
                                ("plan", "configs/quickstart.json", "--memory-limit", "4090"): "--card",
                                ("finetune", "x"): "--finetune", ("init",): "config new", ("chat", "run"): "--chat",
                                ("eval", "run", "--tasks", "hellaswag"): "parka prepare-eval",
                                ("eval", "run", "--tasks", "mmlu", "arc_easy"): "parka prepare-eval"}.items():
            with self.subTest(arguments):
                self.assertIn(says, self.refused(*arguments))

    def test_data_in_other_forms_is_told_what_becomes_of_it(self):
        folder = self.enterContext(tempfile.TemporaryDirectory(prefix="parka-test-"))
        sharegpt, alpaca, text = (os.path.join(folder, name) for name in ("sharegpt.jsonl", "alpaca.jsonl", "a.txt"))
        for path, content in ((sharegpt, '{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}'),
                              (alpaca, '{"instruction": "a", "input": "", "output": "b"}'), (text, "a")):
            Path(path).write_text(content + "\n", encoding="utf-8")
        chat = ("--chat", "chatml", "--sequence-length", "64", "--tokenizer", "bytes")
        for arguments, says in {(text, "--tokenizer", "gpt2"): "hf download gpt2", ("HuggingFaceFW/fineweb-edu", "--tokenizer", "bytes"): "hf download",
                                (sharegpt, *chat): "docs/data.md", (alpaca, *chat): "docs/data.md"}.items():
            with self.subTest(arguments):
                self.assertIn(says, self.refused("prepare", *arguments, "--out", os.path.join(folder, "out")))

    def test_a_batch_that_cannot_be_divided_is_the_first_line_of_a_plan(self):
        self.assertIn("training.global_batch_size", output("plan", os.path.join(ROOT, "configs/quickstart.json"), "--gpus", "3").splitlines()[0])

    def test_no_command_at_all_is_a_question_for_help(self):
        for arguments in ((), ("--threads", "2")):
            result = subprocess.run([PROGRAM, *arguments], capture_output=True, text=True, timeout=60)
            self.assertEqual((result.returncode, result.stderr), (2, ""))
            self.assertIn("generate", result.stdout)

    def test_a_name_of_thousands_of_characters_makes_no_such_line(self):
        for arguments in (("eval", "x" * 100000), ("generate", "run", "y" * 50000), ("train", "--" + "\u00e9" * 30000)):
            line = self.refused(*arguments)
            self.assertLess(len(line), 4200)
        for hidden in ("\x1b[31mred", "\x9b31mred", "bell\x07"):
            self.assertFalse(any(ord(c) < 32 and c != "\n" or 126 < ord(c) < 160 for c in self.refused("eval", hidden)))


if __name__ == "__main__":
    unittest.main()
