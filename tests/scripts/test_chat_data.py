#!/usr/bin/env python3
"""Tests of prepare_data.py --chat. Exits with 77 (skipped) where a package is missing."""

import os
import re

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing

import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from unittest import mock

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is missing")
    sys.exit(77)

try:
    import tokenizers
    import transformers
except ImportError:
    print("skipped: tokenizers or transformers is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from text_data import parts  # noqa: E402
from text_data.chat import ChatError, ChatTemplate, without_marks  # noqa: E402
from text_data.common import InputError  # noqa: E402
from text_data.packing import Packer  # noqa: E402
from text_data.readers import conversation_of  # noqa: E402
from text_data.tokenizer import ByteTokenizer, make_tokenizer  # noqa: E402

from chat_tokenizers import make_chat_tokenizer  # noqa: E402
from preparation import Preparation  # noqa: E402

FIXTURES = ROOT / "tests/fixtures"
EOS = 256  # of the byte tokenizer
DIALOGUE = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "Bye"},
    {"role": "assistant", "content": "Bye!"},
]
QUESTION = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]
CHATML_JINJA = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


CALL = {"type": "function", "function": {"name": "weather", "arguments": {}}}
CALLING = [
    {"role": "user", "content": "Weather?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "content": "rain"},
    {"role": "assistant", "content": "It rains."},
]


def with_tools(tools):
    return json.dumps({"messages": QUESTION, "tools": tools})


def marked(name, messages):
    """The text of a conversation with the targets in braces."""
    text, spans = ChatTemplate(str(name), ByteTokenizer()).text_and_spans(messages)
    for first, last in reversed(spans):
        text = text[:first] + "{" + text[first:last] + "}" + text[last:]
    return text


class Templates(unittest.TestCase):
    def setUp(self):
        temporary = tempfile.TemporaryDirectory()
        self.addCleanup(temporary.cleanup)
        self.folder = Path(temporary.name)

    def config(self, chat_template, **more):
        path = self.folder / "tokenizer_config.json"
        path.write_text(json.dumps({"chat_template": chat_template, "bos_token": {"content": "<s>"}, **more}))
        return path

    def test_chatml(self):
        self.assertEqual(
            marked("chatml", DIALOGUE[:3]),
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
            "{Hello.<|im_end|>}\n",
        )

    def test_llama3(self):
        self.assertEqual(
            marked("llama3", DIALOGUE[1:4]),
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n{Hello.<|eot_id|>}"
            "<|start_header_id|>user<|end_header_id|>\n\nBye<|eot_id|>",
        )

    def test_llama2(self):
        self.assertEqual(
            marked("llama2", DIALOGUE),
            "<s>[INST] <<SYS>>\nBe brief.\n<</SYS>>\n\nHi [/INST]{ Hello. </s>}<s>[INST] Bye [/INST]{ Bye! </s>}",
        )
        with self.assertRaisesRegex(ChatError, "user and assistant in turn"):
            marked("llama2", DIALOGUE[2:])

    def test_a_built_in_template_prompts_for_what_it_makes_targets_of(self):
        for name in ("chatml", "llama2", "llama3", "vicuna_v1"):
            with self.subTest(name=name):
                template = ChatTemplate(name, ByteTokenizer())
                text, ((first, _),) = template.text_and_spans(QUESTION)
                prompt, _ = template._render(template.texts["default"], QUESTION[:1], {}, add_generation_prompt=True)
                self.assertEqual(prompt, text[:first])

    def test_a_template_without_generation_marks_up_to_the_token_that_ends_the_turn(self):
        path = self.config(CHATML_JINJA, eos_token="<|im_end|>")
        for messages in (DIALOGUE, QUESTION, DIALOGUE[:4], DIALOGUE[:2]):
            with self.subTest(messages=len(messages)):
                self.assertEqual(marked(path, messages), marked("chatml", messages))
        self.assertEqual(marked(self.config("{{ bos_token }}{{ messages[0].content }}"), QUESTION[:1]), "<s>1+1?")

    def test_an_earlier_turn_may_be_shown_in_another_way_than_the_last(self):
        shorter = CHATML_JINJA.replace(
            "message['content']", "(message['content'] if loop.last else message['content'].split('</think>')[-1])"
        )
        thinking = [{**m, "content": "<think>Hm</think>" + m["content"]} for m in DIALOGUE]
        messages = [m if m["role"] == "user" else t for m, t in zip(DIALOGUE, thinking)][1:]
        self.assertEqual(
            marked(self.config(shorter, eos_token="<|im_end|>"), messages),
            marked("chatml", DIALOGUE[1:4] + thinking[4:]),
        )
        with self.assertRaisesRegex(ChatError, "mark them in it with {% generation %}"):
            marked(self.config("{{ messages | length }}{{ messages | map(attribute='content') | join }}"), DIALOGUE)

    def test_what_the_template_does_not_show_is_refused(self):
        thinking = [QUESTION[0], QUESTION[1] | {"thinking": "Hm."}]
        reasoning = [QUESTION[0], QUESTION[1] | {"reasoning_content": "Hm."}]
        own = self.config(CHATML_JINJA, eos_token="<|im_end|>")
        for name in ("chatml", "llama3", str(own)):
            template = ChatTemplate(name, ByteTokenizer())
            for messages, tools, hidden in (
                (CALLING, None, "tool_calls"),
                (QUESTION, [CALL], "tools"),
                (CALLING, [CALL], "tools or tool_calls"),
                (thinking, None, "thinking"),
                (reasoning + QUESTION, None, "reasoning_content"),
            ):
                with self.subTest(name=name, hidden=hidden):
                    with self.assertRaisesRegex(ChatError, f"shows no {hidden}; give --chat a template that does"):
                        template.text_and_spans(messages, tools=tools)
                    record = {"messages": messages} | ({"tools": tools} if tools else {})
                    with self.assertRaisesRegex(InputError, f"here: the chat template shows no {hidden};"):
                        template.digest(conversation_of(record, "here"), "here")
            empty = [QUESTION[0], QUESTION[1] | {"tool_calls": [], "thinking": "\n"}]
            self.assertEqual(template.text_and_spans(empty, tools=[]), template.text_and_spans(QUESTION))

    def test_reasoning_may_be_shown_in_the_last_turn_alone(self):
        last = CHATML_JINJA.replace("message['content']", "(message.thinking | default('') if loop.last else '') + message.content")
        path = self.config(last, eos_token="<|im_end|>")
        thinking = [QUESTION[0], QUESTION[1] | {"thinking": "Hm. "}]
        reasoned = [QUESTION[0], QUESTION[1] | {"content": "Hm. 2"}]
        self.assertEqual(marked(path, thinking * 2), marked("chatml", QUESTION + reasoned))
        self.assertEqual(marked(path, thinking + QUESTION), marked("chatml", QUESTION * 2))

    def test_calls_of_tools_whose_content_is_null_have_an_empty_one(self):
        calls = "message['content'] + (message.tool_calls | default([], true) | map(attribute='function.name') | join)"
        path = self.config(CHATML_JINJA.replace("message['content']", calls), eos_token="<|im_end|>")
        null = [m | {"content": m["content"] or None} for m in CALLING]
        missing = [{key: value for key, value in m.items() if value is not None} for m in null]
        want = marked("chatml", [CALLING[0], {"role": "assistant", "content": "weather"}, *CALLING[2:]])
        for messages in (CALLING, null, missing):
            with self.subTest(messages=messages):
                kept = json.loads(conversation_of({"messages": messages}, "here"))
                self.assertEqual(marked(path, kept["messages"]), want)

    def test_a_prompt_may_end_with_what_a_written_turn_does_not_have(self):
        """As DeepSeek-R1-Distill's does with the begin of the reasoning."""
        written = CHATML_JINJA.replace("message['content']", "message['content'].split('</think>')[-1]")
        path = self.config(written.replace("assistant\n", "assistant\n<think>\n"), eos_token="<|im_end|>")
        reasoned = [m if m["role"] != "assistant" else m | {"content": "Hm</think>" + m["content"]} for m in DIALOGUE]
        for messages in (QUESTION, DIALOGUE, reasoned):
            with self.subTest(messages=messages):
                want = marked("chatml", DIALOGUE if messages is reasoned else messages)
                self.assertEqual(marked(path, messages), want)
        other = self.config("{{ messages | length }}" + written, eos_token="<|im_end|>")
        with self.assertRaisesRegex(ChatError, "changes what came before"):
            marked(other, QUESTION)

    def test_an_earlier_turn_may_lack_what_the_prompt_and_the_last_turn_have(self):
        """As in Qwen 3's template of models that always reason."""
        thought = "'<think>\n' if loop.last and message.role == 'assistant' else ''"
        shown = CHATML_JINJA.replace("message['content']", f"({thought}) + message['content']")
        path = self.config(shown.replace("assistant\n", "assistant\n<think>\n"), eos_token="<|im_end|>")
        want = marked("chatml", QUESTION * 2)
        last = want.rindex("{")
        self.assertEqual(marked(path, QUESTION * 2), want[:last] + "<think>\n" + want[last:])

    def test_a_turn_does_not_begin_inside_a_token(self):
        path = self.config(CHATML_JINJA.replace("assistant\n", "assistant\n<think>"), eos_token="<|im_end|>")
        tokenizer = ByteTokenizer()
        tokenizer.added_tokens = ("<think>", "<tool>")
        for words in ("<tool>", "<tha"):
            messages = [QUESTION[0], {"role": "assistant", "content": words}]
            text, ((first, last),) = ChatTemplate(str(path), tokenizer).text_and_spans(messages)
            self.assertEqual(text[first:last], words + "<|im_end|>")

    def test_all_forms_in_which_models_have_their_template(self):
        want = marked("chatml", DIALOGUE)
        listed = [{"name": "rag", "template": "{{ 1 }}"}, {"name": "default", "template": CHATML_JINJA}]
        self.assertEqual(marked(self.config(listed, eos_token="<|im_end|>"), DIALOGUE), want)
        self.assertEqual(marked(self.folder, DIALOGUE), want)
        self.config(None, eos_token="<|im_end|>")
        jinja = self.folder / "chat_template.jinja"
        jinja.write_text(CHATML_JINJA)
        for name in (jinja, self.folder, self.folder / "tokenizer_config.json"):
            self.assertEqual(marked(name, DIALOGUE), want)

    def test_expressions_of_transformers_are_there(self):
        source = (
            "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m | tojson }}{% endfor %}"
            "{{ strftime_now('%Y') | length }}{% generation %}<&>{{ messages[1].content }}{% endgeneration %}"
        )
        messages = [{"role": "user", "content": "<é&>"}, {"role": "assistant", "content": "b"}]
        self.assertEqual(marked(self.config(source), messages), '{"role": "user", "content": "<é&>"}4{<&>b}')

    def test_the_text_without_marks_is_the_same(self):
        for opened, closed in (("{% generation %}", "{% endgeneration %}"), ("{%- generation -%}", "{%- endgeneration -%}"),
                               ("{%generation%}", "{%+ endgeneration +%}"), ("{%-generation %}", "{% endgeneration-%}")):
            source = f"a \n  {opened}\n b \n  {closed} \n c{{{{ messages[0].content }}}}"
            with self.subTest(source=source):
                plain = without_marks(source)
                self.assertNotIn("generation", plain)
                texts = [ChatTemplate(str(self.config(s)), ByteTokenizer()).text_and_spans(QUESTION[:1])[0] for s in (source, plain)]
                self.assertEqual(*texts)

    def test_bad_templates(self):
        for source, kind, message in (
            ("{{ raise_exception('no system') }}", ChatError, "no system"),
            ("{{ 1 + 'a' }}", ChatError, "refuses the conversation"),
            ("{% if %}", InputError, "cannot be used"),
            (None, InputError, "has no chat_template"),
            ([{"name": "rag", "template": "x"}], InputError, "has the chat templates rag and none named default"),
        ):
            with self.subTest(source=source), self.assertRaisesRegex(kind, message):
                marked(self.config(source), DIALOGUE)


class Fixtures(unittest.TestCase):
    def check(self, template_of):
        """Ids and marks by a template, which template_of makes of (folder, text) and which is given by the path that it
        returns, against those of transformers."""
        fixture = json.loads((FIXTURES / "chat_templates.json").read_text())
        self.assertGreaterEqual(len(fixture), 10)
        for name, cases in fixture.items():
            with tempfile.TemporaryDirectory() as folder:
                tokenizer_path = make_chat_tokenizer(name, Path(folder))
                path = template_of(Path(folder), (FIXTURES / "chat_templates" / f"{name}.jinja").read_text())
                template = ChatTemplate(str(path), make_tokenizer(str(tokenizer_path)))
                for number, case in enumerate(cases):
                    with self.subTest(name=name, number=number):
                        document = conversation_of(case["record"], "here")
                        ((ids, marks),) = template.mark([document], ["here"])
                        self.assertEqual(ids.tolist(), case["ids"])
                        self.assertEqual((marks & 1)[1:].tolist(), case["mask"][1:])
                        self.assertEqual(marks[0], 2)

    def test_ids_and_masks_are_those_of_transformers(self):
        def jinja(folder, text):
            (folder / "chat_template.jinja").write_text(text)
            return folder

        def in_config(folder, text):
            path = folder / "tokenizer_config.json"
            path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": text}))
            return path

        self.check(jinja)
        self.check(in_config)
        self.check(lambda folder, text: in_config(folder, [{"name": "default", "template": text}]))

    def test_turns_end_with_the_token_of_the_model(self):
        ends = {"chatml": "<|im_end|>", "llama3": "<|eot_id|>", "gemma": "<end_of_turn>", "phi3": "<|end|>", "mistral": "</s>"}
        for name, end in ends.items():
            with self.subTest(name=name), tempfile.TemporaryDirectory() as folder:
                tokenizer = make_tokenizer(str(make_chat_tokenizer(name, Path(folder))))
                template = ChatTemplate(str(FIXTURES / "chat_templates" / f"{name}.jinja"), tokenizer)
                self.assertEqual(template.end_of_turn(), tokenizer.id_of(end))
        for name in ("chatml", "plain"):
            self.assertIsNone(ChatTemplate(name, ByteTokenizer()).end_of_turn())

    def test_calls_of_tools_are_targets(self):
        call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": "<é>"}}}
        record = {"messages": [
            {"role": "user", "content": "1 + 1?"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "2"},
            {"role": "assistant", "content": "It is 2."},
        ], "tools": [call]}
        with tempfile.TemporaryDirectory() as folder:
            tokenizer = make_tokenizer(str(make_chat_tokenizer("qwen25", Path(folder))))
            template = ChatTemplate(str(FIXTURES / "chat_templates/qwen25.jinja"), tokenizer)
            as_text = record | {"tools": json.dumps(record["tools"])}
            self.assertEqual(conversation_of(as_text, "here"), conversation_of(record, "here"))
            text, spans = template.text_and_spans(**json.loads(conversation_of(record, "here")))
        self.assertIn(json.dumps(call, ensure_ascii=False), text)
        calls = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "<é>"}}\n</tool_call><|im_end|>'
        self.assertEqual([text[first:last] for first, last in spans], [calls, "It is 2.<|im_end|>"])


    def test_no_tools(self):
        for tools in (None, "", "null"):
            self.assertNotIn("tools", json.loads(conversation_of(json.loads(with_tools(tools)), "here")))


class Packing(unittest.TestCase):
    def test_every_conversation_is_in_one_sequence_once(self):
        random = np.random.default_rng(1)
        written = []
        packer = Packer(64, EOS, lambda tokens, marks, _: written.append((tokens, marks)))
        given = {}
        for number in range(1000, 4000):
            given[number] = int(random.integers(1, 65))
            marks = np.ones(given[number], np.uint8)
            marks[0] = 2
            packer.add(np.full(given[number], number, np.uint32), marks)
        packer.finish()
        found = {}
        padding = 0
        for tokens, marks in written:
            self.assertEqual((len(tokens), len(marks)), (64, 64))
            starts = [*np.flatnonzero(marks & 2).tolist(), 64]
            self.assertEqual(starts[0], 0)
            for begin, end in zip(starts, starts[1:]):
                (number,) = set(tokens[begin:end].tolist())
                if number == EOS:
                    self.assertEqual((marks[begin + 1 : end] != 0).sum(), 0)
                    padding += end - begin
                else:
                    self.assertNotIn(number, found)
                    found[number] = end - begin
        self.assertEqual(found, given)
        self.assertEqual(packer.padding_tokens, padding)
        self.assertLess(padding, 0.03 * 64 * len(written))


class Files(Preparation):
    def write_chats(self, conversations):
        return self.write("chats.jsonl", "".join(json.dumps({"messages": c, "id": 1}) + "\n\n" for c in conversations))

    def prepare(self, *arguments):
        """Runs it, which must succeed without a word, and returns data.json."""
        code, told = self.call_in_this_process(*arguments)
        self.assertEqual((code, re.sub("prepare_data: not read: .*\n", "", told)), (0, ""))
        return json.loads((self.out / "data.json").read_text())

    def read(self, name="train-00000"):
        return np.fromfile(self.out / f"{name}.npy", "<u2"), np.fromfile(self.out / f"{name}.npy.mask", np.uint8)

    def test_files_hold_the_template_with_its_marks(self):
        info = self.prepare(self.write_chats([QUESTION]), "--chat", "chatml", "--sequence-length", 128)
        tokens, marks = self.read()
        text = b"<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n"
        self.assertEqual(tokens.tolist(), [*text, *[EOS] * (128 - len(text))])
        expected = [0] * 128
        first = text.index(b"2<|im_end|>")
        expected[first : len(text) - 1] = [1] * len("2<|im_end|>")
        expected[0] = expected[len(text)] = 2
        self.assertEqual(marks.tolist(), expected)
        self.assertEqual(info["train"]["targets"], len("2<|im_end|>"))
        self.assertEqual((info["train"]["padding"], info["train"]["cut_conversations"]), (128 - len(text), 0))
        self.assertEqual((info["chat"], info["sequence_length"]), ("chatml", 128))

    def test_what_is_cut_and_what_is_left_out(self):
        long = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y" * 200}]
        late = [{"role": "user", "content": "x" * 200}, {"role": "assistant", "content": "y"}]
        silent = [{"role": "user", "content": "nobody answers"}]
        chats = self.write_chats([long, late, silent, QUESTION, QUESTION])
        info = self.prepare(chats, "--chat", "llama3", "--sequence-length", 160)
        self.assertEqual((info["train"]["documents"], info["train"]["cut_conversations"]), (2, 1))
        self.assertEqual(info["left_out"]["conversations_without_targets"], 2)
        self.assertEqual(info["left_out"]["duplicate_documents"], 1)
        self.assertEqual(info["train"]["tokens"] % 160, 0)

    def test_held_out_conversations_and_several_files(self):
        chats = [[{"role": "user", "content": str(i)}, {"role": "assistant", "content": "y" * i}] for i in range(1, 201)]
        info = self.prepare(self.write_chats(chats), "--chat", "chatml", "--sequence-length", 400, "--eval-fraction", 0.2,
                            "--tokens-per-file", 4500)  # 11 sequences
        self.assertEqual(info["train"]["documents"] + info["eval"]["documents"], 200)
        self.assertGreater(info["eval"]["documents"], 20)
        self.assertGreater(len(info["train"]["files"]), 2)
        for split in ("train", "eval"):
            for name in info[split]["files"]:
                tokens, marks = self.read(name.removesuffix(".npy"))
                self.assertEqual(len(tokens) % 400, 0)
                self.assertEqual(len(marks), len(tokens))
                self.assertTrue((marks.reshape(-1, 400)[:, 0] == 2).all())

    def write_beside(self, chats, beside):
        """Conversations, and behind them the same with what `beside`(number of the copy) adds to each message."""
        copies = [[message | beside(number) for message in chat] for number in range(3) for chat in chats]
        return self.write_chats([*chats, *copies])

    def test_conversations_that_differ_in_what_is_not_trained_on_are_duplicates(self):
        chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"yes, {i}"}] for i in range(100)]
        options = ("--chat", "chatml", "--sequence-length", 64, "--eval-fraction", 0.3)
        self.prepare(self.write_chats(chats), *options)
        want = [self.read(split)[0].tolist() for split in ("train-00000", "eval-00000")]
        turned = [[dict(reversed(message.items())) for message in chat] for chat in chats]
        for name, duplicates, write in (
            ("other keys", 300, lambda: self.write_beside(chats, lambda number: {"timestamp": number, "tool_calls": []})),
            ("keys in another order", 100, lambda: self.write_chats([*chats, *turned])),
        ):
            with self.subTest(name):
                self.out = self.folder / name
                info = self.prepare(write(), *options)
                self.assertEqual(info["left_out"]["duplicate_documents"], duplicates)
                self.assertEqual([self.read(split)[0].tolist() for split in ("train-00000", "eval-00000")], want)

    def test_conversations_of_the_same_words_are_in_one_split(self):
        """Also those that are no duplicates, because the template shows more of them."""
        shown = CHATML_JINJA.replace("message['content']", "message['content'] + message.id | default('') | string")
        config = {"chat_template": [{"name": "default", "template": shown}], "eos_token": "<|im_end|>"}
        template = self.write("tokenizer_config.json", json.dumps(config))
        chats = [[{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": f"yes, {i}"}] for i in range(50)]
        path = self.write_beside(chats, lambda number: {"id": number, "timestamp": number})
        info = self.prepare(path, "--chat", template, "--sequence-length", 64, "--eval-fraction", 0.3)
        self.assertEqual(info["left_out"]["duplicate_documents"], 0)
        self.assertEqual(info["train"]["documents"] + info["eval"]["documents"], 200)
        numbers = [{text.split("?")[0] for text in bytes(self.read(split)[0].astype("u1")).decode().split("user\n")[1:]}
                   for split in ("train-00000", "eval-00000")]
        self.assertEqual((len(numbers[0] | numbers[1]), numbers[0] & numbers[1]), (50, set()))

    def test_the_digest_of_mere_words_is_that_of_the_record(self):
        """By which earlier versions held conversations out."""
        template = ChatTemplate("chatml", ByteTokenizer())
        document = conversation_of({"messages": DIALOGUE}, "here")
        self.assertEqual(template.digest(document, "here"), hashlib.blake2b(document, digest_size=16).digest())
        with_tools_of_none = conversation_of({"messages": DIALOGUE, "tools": []}, "here")
        self.assertEqual(template.digest(with_tools_of_none, "here"), template.digest(document, "here"))

    def test_a_template_for_conversations_with_tools_alone(self):
        listed = [{"name": "tool_use", "template": "{{ tools[0].name }}" + CHATML_JINJA}]
        template = self.write("tokenizer_config.json", json.dumps({"chat_template": listed, "eos_token": "<|im_end|>"}))
        path = self.write("chats.jsonl", "\n".join(with_tools([{"name": tool}]) for tool in ("a", "b", "b")))
        info = self.prepare(path, "--chat", template, "--sequence-length", 128)
        self.assertEqual((info["train"]["documents"], info["left_out"]["duplicate_documents"]), (2, 1))

    def kept(self, name):
        return (self.out / "tokenizer" / name).read_text()

    def test_the_template_and_the_end_of_turns_go_with_the_tokenizer(self):
        tokenizer = make_chat_tokenizer("llama3", self.folder / "model")
        own = make_tokenizer(str(tokenizer))
        end, document_end = own.id_of("<|eot_id|>"), own.id_of("<|end_header_id|>")
        config = tokenizer.with_name("tokenizer_config.json")
        config.write_text(config.read_text().replace("<|eot_id|>", "<|end_header_id|>"))
        arguments = (self.write_chats([QUESTION]), "--tokenizer", tokenizer, "--sequence-length", 64)
        for before, after in ((None, {"eos_token_id": [end, document_end]}),
                              ({"top_k": 5, "eos_token_id": 3}, {"top_k": 5, "eos_token_id": [end, 3]}),
                              ({"eos_token_id": [3, end]}, {"eos_token_id": [3, end]})):
            with self.subTest(before=before):
                if before is not None:
                    tokenizer.with_name("generation_config.json").write_text(json.dumps(before))
                self.prepare(*arguments, "--chat", "llama3")
                self.assertEqual(json.loads(self.kept("generation_config.json")), after)
                served = transformers.AutoTokenizer.from_pretrained(self.out / "tokenizer")
                ids = served.apply_chat_template(QUESTION, return_dict=False)
                prompt = served.apply_chat_template(QUESTION[:1], add_generation_prompt=True, return_dict=False)
                tokens, marks = self.read()
                self.assertEqual(tokens[: len(ids)].tolist(), ids)
                self.assertEqual(tokens[: list(marks & 1).index(1)].tolist(), prompt)
                self.assertNotIn("generation ", self.kept("chat_template.jinja").replace("add_generation_prompt", ""))
                shutil.rmtree(self.out)

    def test_the_template_that_the_tokenizer_carries_stays_as_it_is(self):
        tokenizer = make_chat_tokenizer("qwen25", self.folder / "model")
        source = "{% generation %}" + CHATML_JINJA + "{% endgeneration %}"
        arguments = (self.write_chats([QUESTION]), "--tokenizer", tokenizer, "--sequence-length", 64)
        config = tokenizer.with_name("tokenizer_config.json")
        config.write_text(json.dumps(json.loads(config.read_text()) | {"chat_template": source}))
        self.prepare(*arguments, "--chat", config)
        self.assertEqual(self.kept("tokenizer_config.json"), config.read_text())
        self.assertFalse((self.out / "tokenizer/chat_template.jinja").exists())
        shutil.rmtree(self.out)
        jinja = self.write("model/chat_template.jinja", source)
        self.prepare(*arguments, "--chat", jinja)
        self.assertEqual(self.kept("chat_template.jinja"), source)
        shutil.rmtree(self.out)
        self.prepare(*arguments, "--chat", self.write("other.jinja", source + "{# other #}"))
        self.assertEqual(self.kept("chat_template.jinja"), "{# #}" + CHATML_JINJA + "{# #}{# other #}")

    def test_markers_that_are_no_tokens_are_told(self):
        words = {"<|im_start|>": 0, "<|im_end|>": 1, "<|endoftext|>": 2, "[UNK]": 3, "user": 4, "1+1?": 5, "assistant": 6, "2": 7}
        tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
        tokenizer.save(str(self.folder / "tokenizer.json"))
        arguments = (self.write_chats([QUESTION]), "--tokenizer", self.folder / "tokenizer.json", "--sequence-length", 16)
        self.prepare(*arguments, "--chat", "chatml")
        tokens, marks = self.read()
        # <|im_start|> user / 1+1? <|im_end|> / <|im_start|> assistant / 2 <|im_end|>
        self.assertEqual(tokens.tolist(), [0, 4, 5, 1, 0, 6, 7, 1] + [2] * 8)
        self.assertEqual(marks.tolist(), [2, 0, 0, 0, 0, 0, 1, 1, 2] + [0] * 7)

    def test_a_run_that_continues_makes_text_again_with_other_special_tokens(self):
        tokenizer = make_chat_tokenizer("smollm3", self.folder / "model")
        template = self.write("bos.jinja", "{{ bos_token }}" + CHATML_JINJA)
        chats, bad = self.write_chats([QUESTION]), self.write("z.jsonl", "{")
        arguments = (chats, bad, "--tokenizer", tokenizer, "--chat", template, "--sequence-length", 64)
        with mock.patch.object(parts, "GROUP_BYTES", 1):
            code, error = self.call_in_this_process(*arguments)
            self.assertEqual(code, 2, error)
            self.assertIn("finished files are kept", error)
            bad.write_text("")
            config = tokenizer.with_name("tokenizer_config.json")
            config.write_text(config.read_text().replace('"bos_token": "<|begin_of_text|>"', '"bos_token": "<|im_start|>"'))
            self.prepare(*arguments)
        self.assertEqual(self.read()[0][0], make_tokenizer(str(tokenizer)).id_of("<|im_start|>"))

    def test_parka_trains_on_them(self):
        chats = [[{"role": "user", "content": str(i)}, {"role": "assistant", "content": "y" * i}] for i in range(90)]
        self.prepare(self.write_chats(chats), "--chat", "chatml", "--sequence-length", 160)
        program = os.environ.get("PARKA_PROGRAM", "build/release/parka")
        config = {
            "device": {"kind": "cpu"},
            "model": {"vocab_size": 272, "d_model": 32, "num_layers": 1, "num_heads": 2, "d_ffn": 64},
            "precision": {"recipe": "coat"},
            "data": {
                "train": [f"{self.out}/train-*.npy"],
                "sequence_length": 160,
                "loss_mask": True,
                "documents": "separate",
            },
            "training": {"steps": 2, "global_batch_size": 4, "micro_batch_size": 2},
            "checkpoint": {"folder": f"{self.folder}/run"},
        }
        path = self.folder / "config.json"
        path.write_text(json.dumps(config))
        trained = subprocess.run([program, "train", path], capture_output=True, text=True, timeout=300)
        self.assertEqual(trained.returncode, 0, trained.stderr)
        data = subprocess.run([program, "data", path], capture_output=True, text=True, timeout=300)
        self.assertEqual(data.returncode, 0, data.stderr)
        info = json.loads((self.out / "data.json").read_text())
        self.assertGreater(info["train"]["padding"], 0)
        self.assertIn(f", {info['train']['documents']} documents, {info['train']['targets']} targets", data.stdout)

    def test_bad_input_is_named_with_its_line(self):
        good = json.dumps({"messages": QUESTION})
        path = self.folder / "chats.jsonl"
        for line, message in (
            ("{", "is not JSON"),
            ('{"text": "x"}', 'has no list "messages"'),
            ('{"messages": []}', 'has no list "messages"'),
            ('{"messages": [{"role": "user"}]}', 'message 1 has no strings "role" and "content"'),
            ('{"messages": [{"role": "user", "content": "a"}, "x"]}', 'message 2 has no strings "role" and "content"'),
            (with_tools({}), 'its "tools" are an object; give a list'),
            (with_tools("{}"), 'its "tools" are an object; give a list'),
            (with_tools("[{"), 'its "tools" are a text that is not JSON'),
            (json.dumps({"messages": CALLING}), "the chat template shows no tool_calls"),
        ):
            with self.subTest(line=line):
                path.write_text(f"{good}\n{line}\n")
                self.refuse(f"chats.jsonl:2: {message}", path, "--chat", "chatml", "--sequence-length", 64)
        path.write_text(good)
        for arguments, message in (
            (("--chat", "chatml"), "give --sequence-length"),
            (("--chat", "chatml", "--sequence-length", 1), "give --sequence-length"),
            (("--chat", "chatml", "--sequence-length", 64, "--max-tokens", 5), "--max-tokens cannot be used with --chat"),
            (("--chat", "chatml", "--sequence-length", 64, "--jsonl-field", "x"), "--jsonl-field cannot be used"),
            (("--chat", "chatml", "--sequence-length", 64, "--bos", "<s>"), "--bos cannot be used with --chat"),
            (("--sequence-length", 64), "it needs --chat"),
            (("--chat", "no-such-template", "--sequence-length", 64), "--chat no-such-template: "),
            (("--chat", "chatml", "--sequence-length", 8), "none of the 1 conversations has a target within 8 tokens"),
        ):
            with self.subTest(arguments=arguments):
                self.refuse(message, path, *arguments)


if __name__ == "__main__":
    unittest.main()
