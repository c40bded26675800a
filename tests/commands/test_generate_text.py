"""generate with text and --chat, by the tokenizer that travels with import, run and export, and the process that reads it.
Exits with 77 (skipped) where Python's tokenizers package is missing."""
import json
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
import unittest

from parka_runs import PROGRAM, RunFolder, checkpoints, parka, tiny_config, tree_digest, write_tokens

try:
    import tokenizers
except ImportError:
    print("skipped: tokenizers is missing")
    sys.exit(77)
try:
    import transformers
except ImportError:
    transformers = None
try:
    import torch
except ImportError:
    torch = None

FIXTURES = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "fixtures", "text")
MODEL = os.path.join(FIXTURES, "llama3")
with open(os.path.join(FIXTURES, "expected.json"), encoding="utf-8") as expected_file:
    EXPECTED = json.load(expected_file)
TOKENIZER_FILES = ["chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]
GREEDY = ("--temperature", "0", "--set", "device.kind=cpu", "--set", "precision.recipe=fp32")
ENVIRONMENT = {**os.environ, "PARKA_PYTHON": sys.executable}
needs_transformers = unittest.skipIf(transformers is None, "transformers is missing")


def helpers_of(pid):
    """The children of a process."""
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        return [int(child) for child in file.read().split()]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_until(holds, seconds=20):
    deadline = time.monotonic() + seconds
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)
    return holds()


class TextFolder(RunFolder):
    def setUp(self):
        super().setUp()
        self.model = self.import_model(MODEL, "imported")

    def import_model(self, source, name):
        self.assert_exit(parka("import", source, "--out", self.path(name)), 0)
        return self.path(name)

    def edited(self, name, edit):
        """A copy of the imported model whose huggingface/ folder `edit` has changed."""
        shutil.copytree(self.model, self.path(name))
        edit(self.path(f"{name}/huggingface"))
        return self.path(name)

    def generate(self, model, *arguments, **options):
        return parka("generate", model, *arguments, *GREEDY, **{"env": ENVIRONMENT, **options})

    def start_chat(self, **options):
        return subprocess.Popen([PROGRAM, "--threads", "1", "generate", self.model, "--chat", *GREEDY], env=ENVIRONMENT,
                                **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options})

    def train_from(self, model, *overrides):
        """A run of one step that changes next to nothing."""
        write_tokens(self.path("tokens.npy"), 64, seed=4, vocab=300)
        overrides = (f'data.train=["{self.path("tokens.npy")}"]', "data.sequence_length=128", "training.steps=1",
                     "training.global_batch_size=1", "optimizer.lr=1e-9", "optimizer.schedule.warmup_steps=0",
                     f"checkpoint.folder={self.path('run')}", "device.kind=cpu", "data.sequence_length=32", *overrides)
        return parka("train", f"{model}/config.json", *[word for one in overrides for word in ("--set", one)])


class Numerics(TextFolder):
    def test_runs_in_fp8_are_sampled_in_bf16_unless_the_command_asks(self):
        for recipe in ("parka", "coat", "fp8_linear"):
            with self.subTest(recipe):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                self.assert_exit(self.train_from(self.model, f"precision.recipe={recipe}"), 0)
                arguments = ("--prompt", "The", "--tokens", "8")
                usual, same, bf16 = (parka("generate", self.path("run"), *arguments, "--temperature", "0", *asked, env=ENVIRONMENT) for asked in
                                     ((), ("--set", "precision.eval=same"), ("--set", "precision.eval=bf16")))
                self.assertRegex(usual.stderr, "numerics: bf16")
                self.assertRegex(same.stderr, f"numerics: .*{recipe}")
                self.assertEqual(usual.stdout, bf16.stdout)
                evaluated = parka("eval", self.path("run"), "--data", self.path("tokens.npy"))
                self.assertRegex(evaluated.stderr, f"numerics: .*{recipe}")
        evaluated = parka("eval", self.path("run"), "--data", self.path("tokens.npy"), "--set", "precision.eval=bf16")
        self.assertRegex(evaluated.stderr, "numerics: bf16")
        self.assertEqual(self.generate(self.model, "--prompt", "The").stderr, "")  # there is nothing to choose


@needs_transformers
class Helpers(TextFolder):
    def test_they_end_with_the_command_though_a_template_loops(self):
        def loop(folder):
            with open(os.path.join(folder, "chat_template.jinja"), "w", encoding="utf-8") as file:
                file.write("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}")
        model = self.edited("loops", loop)
        commands = {ended_by: subprocess.Popen([PROGRAM, "generate", model, "--chat", *GREEDY], env=ENVIRONMENT, stdin=subprocess.PIPE,
                                               stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
                    for ended_by in (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)}
        helpers = {}
        for ended_by, command in commands.items():
            self.assertTrue(wait_until(lambda: helpers_of(command.pid)))
            (helpers[ended_by],) = helpers_of(command.pid)

        def seconds(helper):
            with open(f"/proc/{helper}/stat", encoding="utf-8") as file:
                return int(file.read().rpartition(")")[2].split()[11]) / os.sysconf("SC_CLK_TCK")
        for ended_by, command in commands.items():
            with self.subTest(ended_by):
                self.assertTrue(wait_until(lambda: seconds(helpers[ended_by]) > 4, 100))  # more than it takes to begin
                command.send_signal(ended_by)
                command.communicate(timeout=60)
                self.assertTrue(wait_until(lambda: not is_running(helpers[ended_by])))


class Prompts(TextFolder):
    def test_greedy_text_is_that_of_transformers(self):
        for case in EXPECTED["prompts"]:
            with self.subTest(case["prompt"]):
                result = self.generate(self.model, "--prompt", case["prompt"], "--tokens", str(case["count"]))
                self.assert_exit(result, 0)
                self.assertEqual(result.stdout, case["prompt"] + case["continuation"] + "\n")

    def test_lines_of_json_are_of_the_same_text(self):
        cases = [case for case in EXPECTED["prompts"] if case["count"] == 80]
        prompts = [word for case in cases for word in ("--prompt", case["prompt"])]
        result = self.generate(self.model, *prompts, "--tokens", "80")
        self.assert_exit(result, 0)
        for case, line in zip(cases, map(json.loads, result.stdout.splitlines()), strict=True):
            self.assertEqual((line["prompt_tokens"], line["text"], line["tokens"], line["stopped"]),
                             (case["ids"], case["continuation"], case["tokens"], case["stopped"]))

    @unittest.skipIf(torch is None or transformers is None, "torch or transformers is missing")
    def test_transformers_generates_what_is_recorded(self):
        model = transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32, attn_implementation="eager")
        tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
        for prompt in ("Once upon", "The dog", "Nothing stops"):
            ids = tokenizer(prompt, return_tensors="pt")
            out = model.generate(**ids, max_new_tokens=20, do_sample=False, pad_token_id=0)[0]
            result = self.generate(self.model, "--prompt", prompt, "--tokens", "20")
            self.assertEqual(result.stdout, tokenizer.decode(out, skip_special_tokens=True) + "\n")

    def test_characters_are_shown_whole(self):
        case = EXPECTED["prompts"][1]
        with subprocess.Popen([PROGRAM, "--threads", "1", "generate", self.model, "--prompt", case["prompt"], *GREEDY],
                              env=ENVIRONMENT, stdout=subprocess.PIPE) as process:
            pieces = []
            while piece := os.read(process.stdout.fileno(), 4096):
                pieces.append(piece.decode("utf-8"))  # raises at half a character
        self.assertEqual("".join(pieces), case["prompt"] + case["continuation"] + "\n")
        self.assertGreater(len(pieces), 1)

    def test_a_long_prompt_is_seen_by_a_model_that_is_made_for_it(self):
        shutil.copytree(MODEL, self.path("long"))
        with open(f"{MODEL}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        with open(self.path("long/config.json"), "w", encoding="utf-8") as file:
            json.dump(config | {"max_position_embeddings": 8192}, file)
        model = self.import_model(self.path("long"), "long_imported")
        ids = [(7 * i + i * i // 3) % 300 for i in range(4200)]

        def of(tokens, *options):
            return self.generate(model, "--prompt-tokens", ",".join(map(str, tokens)), "--tokens", "12", *options)
        whole, cut = of(ids), of(ids, "--set", "data.sequence_length=64")
        self.assert_exit(whole, 0)
        self.assertNotIn("the model sees", whole.stderr)
        self.assertEqual(whole.stdout, of(ids, "--set", "data.sequence_length=8192").stdout)
        self.assertIn("a prompt has 4200 tokens, of which the model sees the last 64", cut.stderr)
        self.assertIn("sees the last 4096", of(ids, "--set", "data.sequence_length=4096").stderr)  # though it is what the import proposes
        self.assertEqual(cut.stdout, of(ids[-64:], "--set", "data.sequence_length=64").stdout)

    def test_without_a_prompt_a_document_begins(self):
        result = self.generate(self.model, "--json", "--tokens", "3")
        self.assert_exit(result, 0)
        self.assertEqual(json.loads(result.stdout)["prompt_tokens"], [300])  # <|begin_of_text|>

    def test_where_no_token_begins_documents_one_begins_behind_the_last(self):
        def edit(folder):
            os.remove(f"{folder}/generation_config.json")
            with open(f"{folder}/tokenizer.json", encoding="utf-8") as file:
                tokenizer = json.load(file)
            ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
            self.end = ids["<|end_of_text|>"]
            for name, content in (("tokenizer.json", {**tokenizer, "post_processor": None}),
                                  ("tokenizer_config.json", {"eos_token": "<|end_of_text|>", "add_bos_token": False})):
                with open(f"{folder}/{name}", "w", encoding="utf-8") as file:
                    json.dump(content, file)
        result = self.generate(self.edited("endings", edit), "--json", "--tokens", "3")
        self.assert_exit(result, 0)
        self.assertEqual(json.loads(result.stdout)["prompt_tokens"], [self.end])

    def test_a_tokenizer_by_name(self):
        without = self.edited("without", lambda folder: os.remove(f"{folder}/tokenizer.json"))
        case = EXPECTED["prompts"][0]
        for path in (MODEL, f"{MODEL}/tokenizer.json"):
            result = self.generate(without, "--prompt", case["prompt"], "--tokenizer", path)
            self.assertEqual(result.stdout, case["prompt"] + case["continuation"] + "\n", result.stderr)


@needs_transformers
class Chat(TextFolder):
    def test_two_turns_from_a_pipe(self):
        for chat in EXPECTED["chats"]:
            with self.subTest(chat["system"]):
                system = ("--system", chat["system"]) if chat["system"] else ()
                lines = "\n\n".join(user for user, _ in chat["turns"])
                result = self.generate(self.model, "--chat", *system, input=lines)
                self.assert_exit(result, 0)
                self.assertEqual(result.stdout, "".join(f"{answer}\n" for _, answer in chat["turns"]))
                self.assertEqual(result.stderr, "")

    def test_two_turns_on_a_terminal(self):
        terminal, other_end = pty.openpty()
        process = self.start_chat(stdin=other_end, stdout=other_end)
        too_long = "who " * 300
        os.close(other_end)
        shown = b""

        def show_until(words):
            nonlocal shown
            while words not in shown:
                self.assertTrue(select.select([terminal], [], [], 60)[0], shown)
                shown += os.read(terminal, 4096)
            before, _, shown = shown.partition(words)
            return before.decode("utf-8")

        try:
            show_until(b"> ")
            for user, answer in EXPECTED["chats"][0]["turns"]:
                os.write(terminal, user.encode() + b"\n")
                self.assertEqual(show_until(b"\r\n> "), f"{user}\r\n{answer}")
                # What is too long is not answered, and the chat goes on as if it had not been said.
                os.write(terminal, too_long.encode() + b"\n")
                self.assertEqual(show_until(b"\r\n> "), too_long)
            os.write(terminal, b"\x04")  # the end of input
            self.assertEqual(process.wait(30), 0)
        finally:
            os.close(terminal)
            process.kill()
            process.communicate()

    def test_an_answer_that_is_cut_off_is_reported(self):
        result = self.generate(self.model, "--chat", "--tokens", "3", input="Who are you?\n")
        self.assert_exit(result, 0)
        self.assertEqual(result.stdout, "I am\n")
        self.assertIn("--tokens", result.stderr)

    def test_the_oldest_turns_are_forgotten(self):
        turns = EXPECTED["chats"][0]["turns"]
        lines = "".join(f"{user}\n" for user, _ in [*turns, *turns])
        # A turn takes about 60 tokens, the context is 256, and a quarter of it is for the answer.
        result = self.generate(self.model, "--chat", input=lines)
        self.assert_exit(result, 0)
        self.assertEqual(result.stderr.count("forgotten"), 1, result.stderr)
        self.assertTrue(result.stdout.startswith(turns[0][1] + "\n" + turns[1][1] + "\n"), result.stdout)
        result = self.generate(self.model, "--chat", "--set", "data.sequence_length=20", input=lines)
        self.assert_exit(result, 2)
        self.assertIn("write less", result.stderr)


class HelperProcess(TextFolder):
    def setUp(self):
        super().setUp()
        if transformers is None:
            self.skipTest("transformers is missing")
        self.chat = self.start_chat()
        self.addCleanup(self.chat.communicate)
        self.addCleanup(self.chat.kill)
        user, answer = EXPECTED["chats"][0]["turns"][0]
        self.say(user)
        self.assertEqual(self.chat.stdout.readline().decode("utf-8"), answer + "\n")
        (self.helper,) = helpers_of(self.chat.pid)

    def say(self, text):
        self.chat.stdin.write(text.encode() + b"\n")
        self.chat.stdin.flush()

    def test_its_death_is_an_error(self):
        os.kill(self.helper, signal.SIGKILL)
        self.say("And now?")
        errors = self.chat.communicate(timeout=30)[1].decode()
        self.assertEqual(self.chat.returncode, 4, errors)
        self.assertEqual(errors.count("\n"), 1, errors)
        self.assertIn("signal 9", errors)

    def test_it_ends_with_the_chat(self):
        self.chat.communicate(timeout=30)
        self.assertEqual(self.chat.returncode, 0)
        self.assertFalse(is_running(self.helper))

    def test_it_ends_when_the_program_is_killed(self):
        self.chat.kill()
        self.assertTrue(wait_until(lambda: not is_running(self.helper)))

    def test_it_is_killed_where_it_does_not_end(self):
        os.kill(self.helper, signal.SIGSTOP)
        self.chat.communicate(timeout=30)
        self.assertEqual(self.chat.returncode, 0)
        self.assertFalse(is_running(self.helper))

    def test_a_signal_of_the_terminal_does_not_reach_it(self):
        self.assertNotEqual(os.getpgid(self.helper), os.getpgid(self.chat.pid))


class Travels(TextFolder):
    def check_prompt(self, model):
        case = EXPECTED["prompts"][0]
        result = self.generate(model, "--prompt", case["prompt"], "--set", "data.sequence_length=64")
        self.assert_exit(result, 0)
        self.assertEqual(result.stdout, case["prompt"] + case["continuation"] + "\n")

    def test_with_a_run_from_an_imported_model_and_its_export(self):
        self.assert_exit(self.train_from(self.model), 0)
        # Nothing that the run came from is left.
        os.rename(self.model, self.path("elsewhere"))
        os.remove(self.path("tokens.npy"))
        run = self.path("run")
        self.check_prompt(run)
        self.check_prompt(os.path.join(run, checkpoints(run)[-1]))
        exported = self.path("exported")
        result = parka("export", run, "--out", exported)
        self.assert_exit(result, 0)
        self.assertNotIn("--like", result.stderr)
        carried = lambda path: path in TOKENIZER_FILES
        self.assertEqual(tree_digest(exported, carried), tree_digest(MODEL, carried))
        self.assertEqual(len(tree_digest(exported, carried)), 4)
        with open(f"{exported}/config.json", encoding="utf-8") as file:
            config = json.load(file)
        self.assertEqual((config["bos_token_id"], config["eos_token_id"]), (300, [301, 304]))
        # And back.
        self.check_prompt(self.import_model(exported, "again"))

    @needs_transformers
    def test_an_export_loads_with_its_tokenizer(self):
        self.assert_exit(self.train_from(self.model), 0)
        self.assert_exit(parka("export", self.path("run"), "--out", self.path("exported"), "--dtype", "fp32"), 0)
        tokenizer = transformers.AutoTokenizer.from_pretrained(self.path("exported"))
        case = EXPECTED["prompts"][0]
        self.assertEqual(tokenizer(case["prompt"]).input_ids, case["ids"])
        if torch is None:
            return
        model = transformers.AutoModelForCausalLM.from_pretrained(self.path("exported"), dtype=torch.float32)
        out = model.generate(**tokenizer(case["prompt"], return_tensors="pt"), max_new_tokens=80, do_sample=False, pad_token_id=0)
        self.assertEqual(tokenizer.decode(out[0], skip_special_tokens=True), case["prompt"] + case["continuation"])

    def test_with_a_run_on_prepared_data(self):
        """scripts/prepare_data.py has left it beside the token files; the model was never imported."""
        os.makedirs(self.path("data"))
        write_tokens(self.path("data/train-00000.npy"), 64, seed=4, vocab=300)
        shutil.copytree(MODEL, self.path("data/tokenizer"), ignore=shutil.ignore_patterns("*.safetensors", "config.json", "gen*"))
        # As folders of an older form have it.
        with open(self.path("data/tokenizer/special_tokens_map.json"), "w", encoding="utf-8") as file:
            json.dump({"pad_token": {"content": "<|end_of_text|>"}}, file)
        config = tiny_config(self.folder, "fp32", steps=1)
        config["model"]["vocab_size"] = 320
        config["data"]["train"], config["data"]["eval"] = [self.path("data/*.npy")], []
        config["training"].update(eval_interval=0, global_batch_size=2)
        config["optimizer"]["schedule"]["warmup_steps"] = 0
        self.assert_exit(self.train(config), 0)
        shutil.rmtree(self.path("data"))
        result = parka("generate", self.path("run"), "--prompt", "The cat", "--json", "--tokens", "2", env=ENVIRONMENT)
        self.assert_exit(result, 0)
        self.assertEqual(json.loads(result.stdout)["prompt_tokens"], [300, 293, 284])
        self.assert_exit(parka("export", self.path("run"), "--out", self.path("exported")), 0)
        self.assertIn("tokenizer.json", os.listdir(self.path("exported")))
        with open(self.path("exported/config.json"), encoding="utf-8") as file:
            config = json.load(file)
        self.assertEqual((config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]), (300, 301, 301))

    def test_what_the_data_says_of_the_models_tokenizer_goes_with_the_run(self):
        """The chat template and the ends of turns that the data were made with are what the run learns."""
        os.makedirs(self.path("data"))
        write_tokens(self.path("data/train-00000.npy"), 64, seed=4, vocab=300)
        beside, kept = self.path("data/tokenizer"), self.path("run/tokenizer")
        shutil.copytree(MODEL, beside, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
        for name, text in (("chat_template.jinja", "another"), ("generation_config.json", '{"eos_token_id": [305]}')):
            with open(f"{beside}/{name}", "w", encoding="utf-8") as file:
                file.write(text)
        with open(f"{beside}/tokenizer.json", encoding="utf-8") as file:
            tokenizer = json.load(file)
        for change, taken in (({}, ("chat_template.jinja", "generation_config.json")),
                              ({"post_processor": None}, TOKENIZER_FILES), ({"normalizer": {"type": "NFC"}}, ())):
            with self.subTest(change=change):
                shutil.rmtree(self.path("run"), ignore_errors=True)
                if change:
                    with open(f"{beside}/tokenizer.json", "w", encoding="utf-8") as file:
                        json.dump(tokenizer | change, file)
                result = self.train_from(self.model, f'data.train=["{self.path("data/*.npy")}"]')
                self.assert_exit(result, 0)
                self.assertEqual("differs from the tokenizer of the model" in result.stderr, not taken)
                digests = {folder: tree_digest(folder) for folder in (beside, MODEL, kept)}
                self.assertEqual(digests[kept], {name: digests[beside if name in taken else MODEL][name] for name in TOKENIZER_FILES})

    def test_data_tokenizer_names_another_and_a_copy_stays(self):
        result = self.train_from(self.model, f"data.tokenizer={self.path('nowhere')}")
        self.assert_exit(result, 2)
        self.assertIn("data.tokenizer", result.stderr)
        shutil.copytree(MODEL, self.path("other"), ignore=shutil.ignore_patterns("*.safetensors", "chat*"))
        self.assert_exit(self.train_from(self.model, f"data.tokenizer={self.path('other')}/tokenizer.json"), 0)
        self.assertEqual(sorted(os.listdir(self.path("run/tokenizer"))), TOKENIZER_FILES[1:])
        before = tree_digest(self.path("run/tokenizer"))
        result = self.train_from(self.model, f"data.tokenizer={MODEL}", "training.steps=2")
        self.assert_exit(result, 0)
        self.assertIn("stays as it is", result.stderr)
        self.assertEqual(tree_digest(self.path("run/tokenizer")), before)

    def test_special_tokens_of_an_export_are_those_of_the_runs_own_tokenizer(self):
        shutil.copytree(MODEL, self.path("other"), ignore=shutil.ignore_patterns("*.safetensors", "config.json", "gen*"))
        with open(self.path("other/tokenizer.json"), "r+", encoding="utf-8") as file:
            tokenizer = json.load(file)
            tokenizer["truncation"] = {"direction": "Right", "max_length": 99, "strategy": "LongestFirst", "stride": 0}
            file.seek(0)
            json.dump(tokenizer, file)
            file.truncate()
        with open(self.path("other/tokenizer_config.json"), "w", encoding="utf-8") as file:
            json.dump({"bos_token": "<|end_of_text|>", "eos_token": "<|begin_of_text|>"}, file)
        self.assert_exit(self.train_from(self.model, f"data.tokenizer={self.path('other')}"), 0)
        self.assert_exit(parka("export", self.path("run"), "--out", self.path("exported")), 0)
        with open(self.path("exported/config.json"), encoding="utf-8") as file:
            config = json.load(file)
        self.assertEqual((config["bos_token_id"], config["eos_token_id"]), (301, 300))
        self.assertNotIn("generation_config.json", os.listdir(self.path("exported")))


class BadInput(TextFolder):
    def refused(self, result, *words):
        self.assert_exit(result, 2)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        self.assertEqual(result.stdout, "")
        for word in words:
            self.assertIn(word, result.stderr)

    def with_python(self, script):
        """The environment in which the helper's Python is this shell script."""
        with open(self.path("python"), "w", encoding="utf-8") as file:
            file.write(f"#!/bin/sh\n{script}\n")
        os.chmod(self.path("python"), 0o755)
        return {**os.environ, "PARKA_PYTHON": self.path("python")}

    def test_no_tokenizer(self):
        without = self.edited("without", lambda folder: os.remove(f"{folder}/tokenizer.json"))
        # Its vocabulary is as small as one of bytes.
        self.assert_exit(self.generate(without, "--prompt", "a"), 0)
        self.refused(self.generate(without, "--chat", input=""), "--tokenizer")
        self.refused(self.generate(without, "--prompt", "a", "--tokenizer", self.path("nowhere")), "nowhere", "tokenizer.json")
        self.refused(self.generate(self.model, "--prompt-tokens", "1", "--tokenizer", MODEL), "--tokenizer", "--prompt-tokens")

    def test_a_broken_tokenizer(self):
        broken = self.edited("broken", lambda folder: os.truncate(f"{folder}/tokenizer.json", 1000))
        self.refused(self.generate(broken, "--prompt", "a"), "broken/huggingface/tokenizer.json", "is not a tokenizer.json")
        config = self.edited("config", lambda folder: os.truncate(f"{folder}/tokenizer_config.json", 20))
        self.refused(self.generate(config, "--prompt", "a"), "tokenizer_config.json", "is not JSON")

    def test_a_tokenizer_of_another_model(self):
        def add_token(folder):
            tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")
            tokenizer.add_tokens([f"<{i}>" for i in range(30)])
            tokenizer.save(f"{folder}/tokenizer.json")
        larger = self.edited("larger", add_token)
        self.refused(self.generate(larger, "--prompt", "<29>"), "334", "320")

    def test_no_python_or_package(self):
        self.refused(self.generate(self.model, "--prompt", "a", env={**os.environ, "PARKA_PYTHON": "/nowhere/python3"}),
                     "/nowhere/python3", "PARKA_PYTHON")
        bare = self.with_python(f'exec "{sys.executable}" -I -S "$@"')
        self.refused(self.generate(self.model, "--prompt", "a", env=bare), "tokenizers", "pip install")

    def test_a_python_that_is_none(self):
        result = self.generate(self.model, "--prompt", "a", env=self.with_python("exit 3"))
        self.assert_exit(result, 4)
        self.assertIn("ended with exit code 3", result.stderr)
        result = self.generate(self.model, "--prompt", "a", env=self.with_python("echo hello"))
        self.assert_exit(result, 4)
        self.assertIn('"hello"', result.stderr)

    def test_text_that_is_not_utf_8(self):
        self.refused(self.generate(self.model, "--prompt", b"a\xff"), "UTF-8")

    @needs_transformers
    def test_chat_templates(self):
        def no_template(folder):
            os.remove(f"{folder}/chat_template.jinja")
        self.refused(self.generate(self.edited("none", no_template), "--chat", input=""), "none/huggingface", "chat_template.jinja")

        def template(text):
            def write(folder):
                with open(f"{folder}/chat_template.jinja", "w", encoding="utf-8") as file:
                    file.write(text)
            return write
        wrong = self.edited("wrong", template("{% if %}"))
        self.refused(self.generate(wrong, "--chat", input=""), "wrong/huggingface/chat_template.jinja")
        no_system = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ messages[0]['content'] }}"
        refusing = self.edited("refusing", template(no_system))
        self.refused(self.generate(refusing, "--chat", "--system", "a", input="b\n"), "no system")


if __name__ == "__main__":
    unittest.main()
