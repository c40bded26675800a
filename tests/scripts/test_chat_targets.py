#!/usr/bin/env python3
"""Tests that the targets of conversations are what the data say. Exits with 77 (skipped) where a package is missing."""

import os

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing

import json
import re
import shutil
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

try:
    import numpy as np
    import pyarrow
    import pyarrow.parquet
    import transformers
    from tokenizers import Tokenizer
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
from text_data import chat as chat_module, helper_process  # noqa: E402

from preparation import Preparation
from tiny_tokenizers import qwen_like

CALLS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "[{{ call.function.name }} {{ ARGUMENTS }}]{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
CONTENT = "message['role'] + '\n' + message['content']"
PLAIN = (
    "{% for message in messages %}{{ '<|im_start|>' + " + CONTENT + " + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


GOOD = [user("hi"), assistant("hello")]


def calling(arguments, content=""):
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    return [user("Weather?"), {"role": "assistant", "content": content, "tool_calls": [call]}, {"role": "tool", "content": "rain"},
            assistant("It rains.")]


class Targets(Preparation):
    def new_out(self):
        self.out = self.folder / f"out{len(list(self.folder.glob('out*')))}"

    def targets(self, records, template="chatml", table=False):
        """The text of what is trained on, of conversations in one sequence each."""
        if table:
            path = self.folder / "chats.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        else:
            path = self.write("chats.jsonl", "".join(json.dumps(record) + "\n" for record in records))
        if template != "chatml":
            config = {"chat_template": template, "eos_token": "<|im_end|>"}
            template = self.write("tokenizer_config.json", json.dumps(config))
        self.new_out()
        code, error = self.call_in_this_process(path, "--chat", template, "--sequence-length", 512)
        self.assertEqual((code, error), (0, ""))
        ids = np.array(self.ids())
        marks = np.fromfile(self.out / "train-00000.npy.mask", np.uint8)
        self.info = json.loads((self.out / "data.json").read_text())
        return bytes(ids[(marks & 1) == 1].astype("u1")).decode()

    def refuse_record(self, messages, record, *words, template="chatml", good=GOOD):
        """It must be refused with its line and all of the words."""
        path = self.write("chats.jsonl", json.dumps({"messages": good}) + "\n" + json.dumps({"messages": messages} | record) + "\n")
        if template != "chatml":
            template = self.write("tokenizer_config.json", json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
        self.new_out()
        for word in ("chats.jsonl:2: ", *words):
            self.refuse(word, path, "--chat", template, "--sequence-length", 512)


class Counting(Targets):
    """Keys of messages and records that say what counts in the loss."""

    def test_replies_that_do_not_count_are_no_targets(self):
        no = [{"weight": 0}, {"weight": 0.0}, {"train": False}, {"training": False}, {"trainable": False}, {"loss": False},
              {"loss_mask": 0}, {"step_loss_mask": 0}, {"masked": True}, {"weight": 0, "train": False}]
        yes = [{"weight": 1}, {"weight": 1.0}, {"train": True}, {"loss": None}, {"masked": False}, {}]
        good = "a good one<|im_end|>"
        twice = MARKED.replace("<|im_end|>{% endgen", "{% endgeneration %}{% generation %}<|im_end|>{% endgen")
        for template in ("chatml", MARKED, PLAIN, twice):
            for number, key in enumerate(no):
                counting = yes[number % len(yes)]
                chat = [user("hi"), assistant("a bad answer", **key), user("again", **(key if number % 2 else {})),
                        assistant("a good one", **counting)]
                for table in (False, True):
                    with self.subTest(template=template, key=key, counting=counting, table=table):
                        self.assertEqual(self.targets([{"messages": chat}], template, table), good)

    def test_the_text_is_the_same_with_such_keys_and_without(self):
        for key in ({"weight": 0}, {"train": False}, {"masked": True}):
            shown = PLAIN.replace(CONTENT, "message | tojson")
            bare = [user("hi"), assistant("bad"), user("again"), assistant("good")]
            ids = []
            for chat in (bare, [*bare[:1], bare[1] | key, *bare[2:]]):
                self.targets([{"messages": chat}], shown)
                ids.append(self.ids())
            self.assertEqual(*ids)

    def test_conversations_that_differ_in_what_counts_are_no_duplicates(self):
        chats = [[user("hi"), assistant("a"), user("?"), assistant("b", **key)] for key in ({}, {"weight": 0}, {"train": False}, {"loss": 1})]
        self.targets([{"messages": chat} for chat in chats])
        self.assertEqual((self.info["train"]["documents"], self.info["left_out"]["duplicate_documents"]), (2, 2))

    def test_a_record_that_does_not_count_has_no_targets(self):
        for table in (False, True):
            for key in ({"weight": 0}, {"train": False}, {"loss_mask": 0}):
                with self.subTest(key=key, table=table):
                    records = [{"messages": [user("hi"), assistant("bad")]} | key,
                               {"messages": [user("hi"), assistant("good")]} | {name: 1 - value for name, value in key.items()}]
                    if "train" in key:
                        records[1]["train"] = True
                    self.assertEqual(self.targets(records, table=table), "good<|im_end|>")
                    self.assertEqual(self.info["left_out"]["conversations_without_targets"], 1)

    def test_what_cannot_be_honoured_is_refused(self):
        for key, *words in (
            ({"weight": 0.5}, "message 2 has ", '"weight": 0.5'),
            ({"weight": 2}, '"weight": 2'),
            ({"loss_mask": [0, 1]}, '"loss_mask": [0, 1]'),
            ({"train": "no"}, '"train": "no"'),
            ({"masked": 0.1}, '"masked": 0.1'),
            ({"train_detail": [{"begin_offset": 0, "end_offset": 3, "train": False}]}, '"train_detail"'),
            ({"weight": 1, "train": False}, '"weight" and "train", which contradict'),
        ):
            with self.subTest(key=key):
                self.refuse_record([user("hi"), assistant("hello!", **key)], {}, *words)
        for key in ({"weight": 0.5}, {"loss": 1.25}, {"train": [True]}):
            with self.subTest(record=key):
                self.refuse_record([user("hi"), assistant("hello!")], key, "the record has ", f'"{next(iter(key))}"')
        for key in ({"weight": 1}, {"train": True}, {"masked": False}):
            with self.subTest(user=key):
                self.refuse_record([user("hi", **key), assistant("hello!")], {}, "message 1 has ", f'"{next(iter(key))}"')

    def test_parts_that_do_not_count_are_refused(self):
        for key, word in (({"train": False}, "message 2 has a part 1"), ({"weight": 0}, "message 2 has a part 1"), ({"masked": True}, "a part 1"),
                          ({"weight": 0.5}, 'message 2, part 1, has "weight": 0.5')):
            self.refuse_record([user("hi"), assistant([{"type": "text", "text": "hello", **key}, {"type": "text", "text": "!"}])], {}, word)

    def test_marks_that_do_not_go_with_turns_are_refused(self):
        chat = [user("hi"), assistant("a", weight=0), user("again"), assistant("b")]
        for template in (MARKED.replace("'assistant'", "'assistant' and loop.last"),
                         "{% generation %}" + PLAIN + "{% endgeneration %}"):
            self.refuse_record(chat, {}, "{% generation %}", template=template)


class Turns(Targets):
    """Where turns end."""

    def test_a_turn_does_not_end_in_another(self):
        """As in gpt-oss's template, where another token is behind the last turn."""
        chat = [{"role": "system", "content": "s"}, user("hi"), assistant("one"), user("again"), assistant("two"), user("so"), assistant("three")]
        written = PLAIN.replace("<|im_end|>\n'", "' + END")
        tokens = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|return|>")
        path = self.write("chats.jsonl", json.dumps({"messages": chat}) + "\n")
        is_last = "if loop.last and message.role == 'assistant' else"
        last = f"('<|return|>' {is_last} '<|im_end|>')"
        for end, want in ((last, "one<|im_end|>two<|im_end|>three<|return|>"),
                          (last + " + '\n'", "one<|im_end|>two<|im_end|>three<|return|>"),
                          (f"'<|im_end|>\n' + ('<|return|>' {is_last} '')", "one<|im_end|>two<|im_end|>three<|im_end|>")):
            with self.subTest(end=end):
                self.new_out()
                tokenizer = qwen_like(self.folder / "tokenizer", tokens, eos_token="<|return|>")
                template = self.write("own.jinja", written.replace("END", end))
                options = ("--chat", template, "--tokenizer", tokenizer, "--sequence-length", 256)
                self.assertEqual(self.call_in_this_process(path, *options), (0, ""))
                marks = np.fromfile(self.out / "train-00000.npy.mask", np.uint8)
                ids = np.array(self.ids())[(marks & 1) == 1]
                self.assertEqual(Tokenizer.from_file(str(tokenizer)).decode(ids.tolist(), skip_special_tokens=False), want)
        # Without the token that ends an earlier turn it is not known where that ends.
        end = f"'<|other|>\n' + ('<|im_end|>' {is_last} '')"
        self.refuse_record(chat, {}, "{% generation %}", template=written.replace("END", end))


class Unread(Targets):
    """What a record or a message has that would be passed over."""

    def test_keys_that_others_read_are_refused(self):
        for record in ({"system": "You are Al."}, {"system_prompt": "Be brief."}, {"functions": [{"name": "f"}]}, {"images": ["a.png"]}, {"audio": "a.wav"}):
            with self.subTest(record):
                self.refuse_record([user("hi"), assistant("hello")], record, f'"{next(iter(record))}"')
        self.refuse_record([user("hi") | {"image": "a.png"}, assistant("hello")], {}, "message 1", '"image"')
        self.targets([{"messages": GOOD, "images": [], "system": ""}])  # as tables have them that hold others, too

    def test_keys_that_may_exclude_a_reply_are_refused(self):
        for key in ("ignore", "mask", "Weight", "weights", "use_loss"):
            with self.subTest(key):
                self.refuse_record([user("hi"), assistant("hello") | {key: 0}], {}, "message 2", f'"{key}"', '"weight"')

    def test_roles_that_are_misspelt_are_refused(self):
        for role, meant in (("assistent", "assistant"), ("Assistant", "assistant"), ("assistant ", "assistant"), ("model", "assistant"), ("sytem", "system")):
            with self.subTest(role):
                self.refuse_record([user("hi"), assistant("hello"), {"role": role, "content": "x"}], {}, "message 3", f'"{role}"', f'"{meant}"')


class Content(Targets):
    """Content of messages that leaves no trace in the text."""

    def test_it_is_refused_by_its_number_and_role(self):
        two = [{"role": "system", "content": "Be brief."}, {"role": "system", "content": "Be kind."}, user("hi"), assistant("hello")]
        only = "{% for message in messages if message.role in ROLES %}"
        without = PLAIN.replace("{% for message in messages %}", only)
        first = PLAIN.replace(CONTENT, "message['role'] + '\n' + (message.content if message.role != 'system' or loop.first else '')")
        calls = CALLS.replace("ARGUMENTS", "1").replace("{{ m.content }}", "{{ m.content if not m.tool_calls else '' }}")
        for chat, template, words in (
            (two, without.replace("ROLES", "['user', 'assistant']"), "message 1 (system)"),
            (two, first, "message 2 (system)"),
            ([user("hi"), {"role": "developer", "content": "Hm."}, assistant("hello")], without.replace("ROLES", "['user', 'assistant']"),
             "message 2 (developer)"),
            (calling({}), CALLS.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}").replace("ARGUMENTS", "1"),
             "message 3 (tool)"),
            (calling({}, "Let me see."), calls, "message 2 (assistant)"),
            ([user("hi"), assistant("hello"), user("assistant")], PLAIN.replace("messages %}", "messages if message == messages[0] or message.role != 'user' %}"),
             "message 3 (user)"),
        ):
            with self.subTest(words=words, template=template):
                self.refuse_record(chat, {}, f"shows no content of {words}", template=template)

    def test_other_forms_of_it_are_fine(self):
        system = {"role": "system", "content": "Be 'brief'."}
        for change in ("| trim", "| tojson", "| upper", ".split('</think>')[-1]"):
            with self.subTest(change=change):
                template = PLAIN.replace("message['content']", f"message['content'] {change}")
                chat = [system, user("hi"), assistant("<think>\nHm</think>a"), {"role": "tool", "content": " "}, assistant("<think>\nHm</think>b")]
                self.assertIn("b", self.targets([{"messages": chat}], template).lower())

    def test_words_to_a_call_may_be_shown_in_the_last_turn_alone(self):
        """As in gpt-oss's template, where they are reasoning."""
        last = CALLS.replace("ARGUMENTS", "1").replace("{{ m.content }}", "{{ m.content if loop.last or not m.tool_calls }}")
        for words in ("Let me see.", "Hm.", "rain"):
            self.assertEqual(self.targets([{"messages": calling({}, words)}], last), "[weather 1]<|im_end|>It rains.<|im_end|>")

    def test_other_names_of_calls_and_reasoning_are_refused_too(self):
        for key, value in (("function_call", {"name": "weather", "arguments": "{}"}), ("reasoning", "Hm."), ("thinking", "Hm.")):
            with self.subTest(key=key):
                self.refuse_record([user("hi"), assistant("hello!", **{key: value})], {}, f"shows no {key}")
        twice = [user("hi"), assistant("2", reasoning="Hm.", reasoning_content="Hm.", thinking="Hm.")]
        shown = PLAIN.replace("message['content']", "(message.reasoning_content | default('')) + message['content']")
        self.assertEqual(self.targets([{"messages": twice}], shown), "Hm.2<|im_end|>")

    def test_parts_of_text_are_joined(self):
        parts = [{"type": "text", "text": "a b"}, {"type": "text", "text": "c"}]
        for table in (False, True):
            for chat in ([user([{"type": "text", "text": "hi"}]), assistant(parts)], [user(parts), assistant(parts[1:])],
                         [{"role": "system", "content": parts}, user(parts), assistant(parts[1:])]):
                joined = [m | {"content": "".join(part["text"] for part in m["content"])} for m in chat]
                self.targets([{"messages": chat}], table=table)
                ids = self.ids()
                self.targets([{"messages": joined}])
                self.assertEqual(ids, self.ids())
        for part, word in (({"type": "image_url", "image_url": {"url": "a.png"}}, "image_url"), ("words", "a text"),
                           ({"type": "text", "text": None}, "of type text"), ({"text": "a"}, "an object")):
            with self.subTest(part=part):
                self.refuse_record([user([*parts, part]), assistant("a")], {}, "message 1 has content in parts, and part 3 is ", word)


class Calls(Targets):
    """Arguments of calls, as objects and as JSON in strings."""

    def test_both_forms_give_the_same_text(self):
        objects = {"city": "Paris", "in": [1, {"é": None}]}
        as_json = json.dumps(objects, ensure_ascii=False)
        for written, want in (
            ("call.function.arguments | tojson", as_json),
            ("call.function | tojson", json.dumps({"name": "weather", "arguments": objects}, ensure_ascii=False)),
            ("call.function.arguments if call.function.arguments is string else call.function.arguments | tojson", as_json),
            ("call.function.arguments | items | map('first') | join", "cityin"),
            ("call.function.arguments", as_json),
            ("'' + call.function.arguments", as_json),
        ):
            for arguments in (objects, as_json):
                for table in (False, True) if isinstance(arguments, str) else (False,):
                    with self.subTest(written=written, arguments=arguments, table=table):
                        template = CALLS.replace("ARGUMENTS", written)
                        targets = self.targets([{"messages": calling(arguments)}], template, table)
                        self.assertEqual(targets, f"[weather {want}]<|im_end|>It rains.<|im_end|>")

    def test_the_text_of_a_template_for_texts_is_that_of_the_data(self):
        for arguments in ('{"city":"Paris"}', '{ "city": "Paris" }', "{}"):
            for written in ("call.function.arguments", "call.function.arguments + ''"):
                with self.subTest(arguments=arguments, written=written):
                    targets = self.targets([{"messages": calling(arguments)}], CALLS.replace("ARGUMENTS", written))
                    self.assertTrue(targets.startswith(f"[weather {arguments}]"), targets)

    def test_calls_may_be_a_text_of_json(self):
        chat = calling({"city": "Paris"})
        as_text = [m | {"tool_calls": json.dumps(m["tool_calls"])} if "tool_calls" in m else m for m in chat]
        template = CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
        want = self.targets([{"messages": chat}], template)
        for table in (False, True):
            self.assertEqual(self.targets([{"messages": as_text}], template, table), want)

    def test_calls_that_are_none_are_refused(self):
        template = CALLS.replace("ARGUMENTS", "call.function.arguments | tojson")
        for arguments in ("{city: Paris", "[1]", '"{}"'):
            with self.subTest(arguments=arguments):
                self.refuse_record(calling(arguments), {}, '"arguments"', "weather", template=template)
        for calls in ({"name": "weather"}, "weather()", '{"name": "weather"}'):
            with self.subTest(calls=calls):
                chat = [user("Weather?"), {"role": "assistant", "tool_calls": calls}]
                self.refuse_record(chat, {}, 'message 2: its "tool_calls" are ', template=template)


class Marks(Targets):
    """Tags of targets in comments."""

    def test_a_tag_in_a_comment_is_none(self):
        chat = [user("hi"), assistant("a"), user("again"), assistant("b")]
        for comment in ("{# {% generation %} #}", "{#- with {% generation %}\n and {%- endgeneration -%} -#}",
                        "{% raw %}{% generation %}{% endraw %}"):
            with self.subTest(comment=comment):
                self.assertEqual(self.targets([{"messages": chat}], comment + PLAIN), "a<|im_end|>b<|im_end|>")
        self.assertEqual(self.targets([{"messages": chat}], MARKED.replace("{% gen", "{%+ gen")), "a<|im_end|>b<|im_end|>")


class Recipes(Targets):
    """Commands of docs/data.md for data in other forms."""

    def converted(self, name, records):
        """The conversations that the command for this file makes of records."""
        page = (ROOT / "docs/data.md").read_text(encoding="utf-8")
        command = re.search(rf"^    jq (?:(?!^    jq ).)*? {name}.json > chats.jsonl$", page, re.DOTALL | re.MULTILINE)[0]
        self.write(f"{name}.json", json.dumps(records))
        subprocess.run(command, shell=True, check=True, cwd=self.folder)
        return [json.loads(line)["messages"] for line in (self.folder / "chats.jsonl").read_text().splitlines()]

    @unittest.skipUnless(shutil.which("jq"), "jq is missing")
    def test_they_make_conversations(self):
        given = [{"instruction": "Say hi.", "output": "Hi."} | more for more in ({}, {"input": None}, {"input": ""}, {"input": "Twice."})]
        want = [[user(text), assistant("Hi.")] for text in ["Say hi."] * 3 + ["Say hi.\n\nTwice."]]
        self.assertEqual(self.converted("alpaca_data", given), want)
        turns = [{"from": "system", "value": "s"}, {"from": "human", "value": "hi"}, {"from": "gpt", "value": "bad", "weight": 0},
                 {"from": "human", "value": "?"}, {"from": "gpt", "value": "good"}]
        (chat,) = self.converted("sharegpt", [{"conversations": turns}])
        self.assertEqual(self.targets([{"messages": chat}]), "good<|im_end|>")

    def test_records_in_other_forms_are_told_of_them(self):
        for record, form in (({"conversations": [{"from": "human", "value": "hi"}]}, "ShareGPT's"), ({"instruction": "a", "output": "b"}, "Alpaca's"),
                             ({"text": "a"}, "other forms")):
            self.refuse_record([], record, 'has no list "messages"', "docs/data.md", form)


class Limits(Targets):
    """Templates that take more time or memory than a conversation needs."""

    def test_they_are_refused_with_a_reason(self):
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{{ i }}{% endfor %}{% endfor %}"
        chat = [user("hi"), assistant("hello")]
        calls = CALLS.replace("ARGUMENTS", "1")
        with mock.patch.object(helper_process, "MOST_SECONDS", 0.3), mock.patch.object(chat_module, "MOST_TEXT", 10**6):
            for messages, template, word in (
                (chat, PLAIN + "{% if messages[0].content == 'hi' and messages | length == 2 %}" + endless + "{% endif %}", "more than 0.3 s"),
                (calling({}), calls + "{% if messages[1].tool_calls %}" + endless + "{% endif %}", "more than 0.3 s"),
                (chat, PLAIN + "{% if messages[0].content == 'hi' %}{{ 'a' * 10000000000 }}{% endif %}", "MemoryError"),
                (chat, PLAIN + "{% if messages[0].content == 'hi' %}{{ 'a' * 2000000 }}{% endif %}", "characters"),
            ):
                with self.subTest(template=template):
                    good = [user("well"), assistant("hello")]
                    self.refuse_record(messages, {}, word, template=template, good=good)


class Tokens(Targets):
    """Special tokens that a template has and the tokenizer lacks."""

    def call_chat(self, template, tokenizer):
        self.new_out()
        path = self.write("chats.jsonl", json.dumps({"messages": [user("hi"), assistant("hello")]}) + "\n")
        return self.call_in_this_process(path, "--chat", template, "--tokenizer", tokenizer, "--sequence-length", 512)

    def test_tokens_that_files_beside_it_name_are_refused(self):
        for number, config in enumerate((
            {"added_tokens_decoder": {"400": {"content": "<|im_start|>"}, "401": {"content": "<|im_end|>", "special": True}}},
            {"eos_token": "<|im_end|>"},
            {"additional_special_tokens": ["<|im_end|>"]},
            {"extra_special_tokens": {"end": "<|im_end|>"}},
            None,
        )):
            with self.subTest(config=config):
                path = qwen_like(self.folder / str(number), ("<|endoftext|>",), **(config or {}))
                if config is None:
                    path.with_name("added_tokens.json").write_text('{"<|im_end|>": 400}')
                for template in ("chatml", self.write("other.jinja", PLAIN)):
                    code, error = self.call_chat(template, path)
                    self.assertEqual(code, 2, error)
                    for word in (f"{path}: lacks ", "<|im_end|>", "save_pretrained"):
                        self.assertIn(word, error)
                code, error = self.call_chat("vicuna_v1", path)  # which has none of them
                self.assertEqual(code, 2 if "eos_token" in (config or {}) else 0, error)  # it would pad
                transformers.AutoTokenizer.from_pretrained(path.parent).save_pretrained(path.parent)
                code, error = self.call_chat("chatml", path)
                self.assertNotIn("lacks", error)

    def test_tokens_that_are_spelled_out_are_warned_of(self):
        path = qwen_like(self.folder / "base", ("<|endoftext|>",))
        own = self.write("own.jinja", PLAIN)
        for template, spelled in (("chatml", "<|im_start|>, <|im_end|>"), ("llama3", "<|eot_id|>"), ("vicuna_v1", "</s>"), (own, "")):
            with self.subTest(template=template):
                code, error = self.call_chat(template, path)
                self.assertEqual(code, 0, error)
                self.assertIn(spelled, error)
                self.assertEqual(len(re.findall("(?m)^prepare_data: warning: ", error)), 2 if spelled else 1, error)


if __name__ == "__main__":
    unittest.main()
