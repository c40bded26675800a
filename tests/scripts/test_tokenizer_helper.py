#!/usr/bin/env python3
"""Tests of scripts/tokenizer_helper.py. Exits with 77 (skipped) where the tokenizers package is missing."""

import importlib.util
import json
import random
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
except ImportError:
    print("skipped: tokenizers is missing")
    sys.exit(77)
try:
    import transformers
except ImportError:
    transformers = None

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "tokenizer_helper.py"
FIXTURES = ROOT / "tests" / "fixtures" / "text"

spec = importlib.util.spec_from_file_location("tokenizer_helper", SCRIPT)
helper = importlib.util.module_from_spec(spec)
spec.loader.exec_module(helper)


def sentencepiece_tokenizer():
    """Like Llama 2's: words begin with a mark that is no part of a text's beginning; unknown characters are bytes."""
    bytes_of = {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    words = {word: 259 + i for i, word in enumerate(["\u2581", "a", "b", "\u2581a", "\u2581b"])}
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **bytes_of, **words}
    tokenizer = Tokenizer(models.BPE(vocab, [("\u2581", "a"), ("\u2581", "b")], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in ("<unk>", "<s>", "</s>")])
    return tokenizer


class TokenizerFolder(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def write(self, tokenizer, **files):
        tokenizer.save(str(self.folder / "tokenizer.json"))
        for name, content in files.items():
            (self.folder / f"{name}.json").write_text(json.dumps(content))
        return helper.Text(self.folder)


class TextTest(TokenizerFolder):
    def test_what_stands_before_a_text(self):
        tokenizer = sentencepiece_tokenizer()
        ids = [262, 263]  # of "a b"
        tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
        self.assertEqual(self.write(tokenizer).encode("a b"), ids)
        self.assertEqual(self.write(tokenizer, tokenizer_config=tokens).encode("a b"), ids)
        self.assertEqual(self.write(tokenizer, tokenizer_config={"add_bos_token": True, **tokens}).encode("a b"), [1, *ids])
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
        other = {"add_bos_token": True, "bos_token": "<unk>"}
        self.assertEqual(self.write(tokenizer, tokenizer_config=other).encode("a b"), [0, *ids])
        self.assertEqual(self.write(tokenizer, tokenizer_config={"add_bos_token": False, **tokens}).encode("a b"), ids)
        # An end would be no prompt to continue.
        self.assertEqual(self.write(tokenizer, tokenizer_config=tokens).encode("a b"), [1, *ids])

    def test_a_text_that_is_written_with_its_first_token_has_it_once(self):
        text = self.write(sentencepiece_tokenizer(), tokenizer_config={"add_bos_token": True, "bos_token": "<s>"})
        self.assertEqual(text.encode("<s> a"), text.encode("a"))
        self.assertEqual(text.encode("<s><s> a"), [1, *text.encode("a")])
        self.assertEqual(text.encode("</s> a"), [1, 2, 262])
        self.assertEqual(text.encode_pieces(["<s> a", "a"]), [[1, 262], [262]])

    def test_a_text_without_tokens_begins_with_what_ends_documents(self):
        tokens = {"eos_token": "</s>"}
        self.assertEqual(self.write(sentencepiece_tokenizer(), tokenizer_config=tokens).encode(""), [2])

    def test_texts_between_images_are_encoded_each_by_itself(self):
        tokens = {"bos_token": {"content": "<s>"}, "eos_token": "</s>"}
        text = self.write(sentencepiece_tokenizer(), tokenizer_config={"add_bos_token": True, **tokens})
        self.assertEqual(text.encode_pieces(["a", "", "a b"]), [[1, 262], [], [262, 263]])
        self.assertEqual(text.encode_pieces(["", "a"]), [[1], [262]])
        without = self.write(sentencepiece_tokenizer(), tokenizer_config=tokens)
        self.assertEqual(without.encode_pieces(["", "a"]), [[], [262]])

    def test_where_a_continuation_ends(self):
        tokenizer, tokens = sentencepiece_tokenizer(), {"eos_token": "</s>"}
        self.assertEqual(self.write(tokenizer).stop, [])
        self.assertEqual(self.write(tokenizer, tokenizer_config=tokens).stop, [2])
        self.assertEqual(self.write(tokenizer, config={"eos_token_id": 7}).stop, [7])
        self.assertEqual(self.write(tokenizer, generation_config={"eos_token_id": [8, 9]}).stop, [8, 9])

    def test_a_run_ends_where_the_model_that_it_began_from_does(self):
        run, tokenizer = self.folder, sentencepiece_tokenizer()
        for name in ("huggingface", "tokenizer"):
            self.folder = run / name
            self.folder.mkdir()
            self.write(tokenizer, tokenizer_config={"eos_token": "</s>"})
        (run / "huggingface/config.json").write_text('{"eos_token_id": [2, 7]}')
        self.assertEqual(helper.Text(run / "tokenizer").stop, [2, 7])
        # Ids of another tokenizer are other tokens.
        tokenizer.add_tokens(["c"])
        self.assertEqual(self.write(tokenizer).stop, [2])
        self.assertEqual(helper.Text(run / "huggingface").stop, [2, 7])

    def pieces(self, prompt, tokens):
        text = self.write(sentencepiece_tokenizer())
        stream = helper.Stream(text.tokenizer, prompt)
        return [*(stream.push(token) for token in tokens), stream.end()]

    def test_a_space_between_prompt_and_continuation_stays(self):
        self.assertEqual(self.pieces([1, 262], [263, 262, 260]), [" b", " a", "a", ""])

    def test_half_characters_wait_for_their_rest(self):
        cat = [3 + byte for byte in "\U0001f431".encode()]
        self.assertEqual(self.pieces([262], [*cat, 260]), ["", "", "", "\U0001f431", "a", ""])
        self.assertEqual(self.pieces([262], cat[:2]), ["", "", "\ufffd\ufffd"])
        # What can no longer become a character does not wait for ever.
        *shown, rest = self.pieces([262], [3 + 0xFF] * 99)
        self.assertEqual("".join(shown) + rest, "\ufffd" * 99)
        self.assertLess(len(rest), 20)

    def test_characters_in_a_row_that_are_spelled_in_bytes(self):
        good = [3 + byte for byte in "\u597d".encode()]
        self.assertEqual(self.pieces([260], [*good, *good, 261]), ["", "", "\u597d"] * 2 + ["b", ""])
        # Also behind a prompt that is spelled so.
        self.assertEqual(self.pieces(good * 9, [*good, *good]), ["", "", "\u597d"] * 2 + [""])

    def test_a_token_without_a_text_takes_no_space_from_the_next(self):
        self.assertEqual(self.pieces([1, 262], [263, 2, 1, 263]), [" b", "", "", " b", ""])

    def test_pieces_are_what_all_tokens_decode_to(self):
        chance = random.Random(1)
        letters = ["a", "b", " ", "a b", "\u00e9", "\u597d", "\U0001f431", "\u65e5\u672c", "</s>"]
        for tokenizer in (self.write(sentencepiece_tokenizer()).tokenizer, helper.Text(FIXTURES / "llama3").tokenizer):
            for _ in range(300):
                ids = tokenizer.encode("".join(chance.choices(letters, k=12)), add_special_tokens=False).ids
                ends = [end for end in range(1, len(ids)) if helper.INCOMPLETE not in tokenizer.decode(ids[:end])]
                begin = chance.choice(ends)
                stream = helper.Stream(tokenizer, ids[:begin])
                text = "".join(stream.push(id) for id in ids[begin:]) + stream.end()
                self.assertEqual(tokenizer.decode(ids[:begin]) + text, tokenizer.decode(ids), (ids, begin))

    def test_pieces_of_a_continuation_are_its_text(self):
        cases = json.loads((FIXTURES / "expected.json").read_text(encoding="utf-8"))["prompts"]
        text = helper.Text(FIXTURES / "llama3")
        for case in cases:
            self.assertEqual(text.encode(case["prompt"]), case["ids"])
            stream = helper.Stream(text.tokenizer, case["ids"])
            pieces = [*(stream.push(token) for token in case["tokens"]), stream.end()]
            self.assertEqual("".join(pieces), case["continuation"])
            self.assertFalse(any(helper.INCOMPLETE in piece for piece in pieces[:-1]))


@unittest.skipIf(transformers is None, "transformers is missing")
class ChatTest(TokenizerFolder):
    TEMPLATE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}>{% endif %}"

    def chat(self, config):
        text = self.write(sentencepiece_tokenizer(), tokenizer_config={"bos_token": "<s>", **config})
        return helper.Chat(text), text

    def test_templates_of_every_form_give_what_transformers_does(self):
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=sentencepiece_tokenizer(), bos_token="<s>", chat_template=self.TEMPLATE)
        messages = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "\u00e9"}]
        want = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        several = [{"name": "tool_use", "template": "x"}, {"name": "default", "template": self.TEMPLATE}]
        for template in (self.TEMPLATE, several):
            self.assertEqual(self.chat({"chat_template": template})[0].encode(messages), want)
        (self.folder / "chat_template.jinja").write_text(self.TEMPLATE)
        self.assertEqual(self.chat({})[0].encode(messages), want)

    def test_prompts_are_those_of_transformers(self):
        tokenizer = sentencepiece_tokenizer()
        for single in (None, "<s> $A"):
            if single is not None:
                tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1)])
            text = self.write(tokenizer, tokenizer_config={"bos_token": "<s>", "tokenizer_class": "PreTrainedTokenizerFast"})
            theirs = transformers.AutoTokenizer.from_pretrained(self.folder)
            for words in ("a b", " a", "a\n\u00e9 b", "</s>b"):
                self.assertEqual(text.encode(words), theirs(words).input_ids, (single, words))

    def test_an_answer_ends_where_the_template_ends_a_turn(self):
        self.assertEqual(self.chat({"chat_template": self.TEMPLATE})[1].stop, [2])
        plain = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
        self.assertEqual(self.chat({"chat_template": plain, "eos_token": "<unk>"})[1].stop, [0])

    def test_no_template(self):
        for config in ({}, {"chat_template": None}, {"chat_template": [{"name": "rag", "template": "x"}]}):
            with self.assertRaises(helper.InputError) as raised:
                self.chat(config)
            self.assertIn("chat template", str(raised.exception))

    def test_a_template_that_does_not_end_is_refused(self):
        loop = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
        templates = {"that loops": loop.replace("BODY", ""), "that computes": loop.replace("BODY", "{% set x = a * b %}"),
                     "that sums": "{{ range(99999) | map('string') | map('length') | sum }}" + loop.replace("BODY", "")}
        for name, template in templates.items():
            with self.subTest(name), mock.patch("text_data.helper_process.MOST_SECONDS", 0.3):
                with self.assertRaises(helper.InputError) as raised:
                    self.chat({"chat_template": template})
                self.assertIn("0.3 s", str(raised.exception))

    def test_a_template_that_makes_gigabytes_is_refused(self):
        for template in ("{{ 'x' * 30000000000 }}", "{% set x = 'abc' * 20000000 %}{{ x }}", "{{ ('x' * 2000000000) | replace('x', 'yyyy') }}"):
            with self.subTest(template):
                with self.assertRaises(helper.InputError) as raised:
                    self.chat({"chat_template": template})
                self.assertNotIn("()", str(raised.exception))


class ProcessTest(TokenizerFolder):
    def run_helper(self, lines, folder=FIXTURES / "llama3"):
        return subprocess.run([sys.executable, SCRIPT, folder], input="".join(f"{json.dumps(line)}\n" for line in lines),
                              capture_output=True, text=True, timeout=60)

    def test_answers_are_lines(self):
        result = self.run_helper([{"encode": "The cat"}, {"begin": [300, 293]}, {"token": 284}, {"end": True}])
        self.assertEqual((result.returncode, result.stderr), (0, ""))
        self.assertEqual([json.loads(line) for line in result.stdout.splitlines()],
                         [{"stop": [301, 304]}, {"ids": [300, 293, 284]}, {"text": ""}, {"text": " cat"}, {"text": ""}])

    def test_an_error_at_the_start_ends_it(self):
        result = self.run_helper([], self.folder)
        self.assertEqual((result.returncode, result.stderr), (2, ""))
        self.assertIn("tokenizer.json: no such file", json.loads(result.stdout)["error"])
        (self.folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
        self.assertIn("tokenizer.json: is a Git LFS pointer", json.loads(self.run_helper([], self.folder).stdout)["error"])

    def test_a_panic_of_the_library_is_an_error(self):
        special = [{"SpecialToken": {"id": "[X]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        words = json.loads(Tokenizer(models.WordLevel({"a": 0, "bbb": 1}, unk_token="a")).to_str())
        for changes, code in (  # at the start, and at a request
            ({"post_processor": {"type": "TemplateProcessing", "single": special, "pair": special, "special_tokens": {}}}, 2),
            ({"decoder": {"type": "Strip", "content": "b", "start": 1, "stop": 2**40}}, 0),
        ):
            (self.folder / "tokenizer.json").write_text(json.dumps(words | changes))
            result = self.run_helper([{"begin": [1]}], self.folder)
            self.assertEqual(result.returncode, code)
            self.assertNotIn("most recent call", result.stderr)
            self.assertIn("error", json.loads(result.stdout.splitlines()[-1]))


if __name__ == "__main__":
    unittest.main()
