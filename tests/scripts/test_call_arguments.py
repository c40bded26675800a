#!/usr/bin/env python3
"""Arguments of tool calls are an object, or JSON of one in a string as OpenAI's format has them: both give the same tokens and targets.
Exits with 77 (skipped) where a package is missing."""
import copy
import json
import unittest

from chat_data import FORMS, ChatData, assistant, user

from refusals import assert_refused, shown
from script_runs import ROOT

QWEN25 = (ROOT / "tests/fixtures/chat_templates/qwen25.jinja").read_text()
BEGIN, END = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}", (
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "as JSON": BEGIN + "<tool_call>\n{\"name\": \"{{ c.function.name }}\", \"arguments\": {{ c.function.arguments | tojson }}}\n</tool_call>" + END,
    "item by item": BEGIN + "<tool_call>{{ c.function.name }}({% for k, v in c.function.arguments | items %}{{ k }}={{ v | tojson }};{% endfor %})</tool_call>" + END,
    "either": BEGIN + "<tool_call>{{ c.function.name }}: {% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
              "{{ c.function.arguments | tojson }}{% endif %}</tool_call>" + END,
    "Qwen 2.5": QWEN25,
}


def call(name, arguments, flat=False):
    function = {"name": name, "arguments": arguments}
    return function if flat else {"id": f"call_{name}", "type": "function", "function": function}


def conversation(*calls):
    return [user("weather?"), assistant(None, tool_calls=list(calls)), {"role": "tool", "content": "sunny"}, assistant("It is sunny.")]


def as_strings(messages, **style):
    """With the arguments of all calls in strings."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for one in message.get("tool_calls") or []:
            function = one.get("function", one)
            function["arguments"] = json.dumps(function["arguments"], **style)
    return messages


SIMPLE = conversation(call("get_weather", {"city": "Paris"}))
RICH = conversation(call("search", {"query": "caf\u00e9 \"noir\"\n", "limit": 3, "deep": {"a": [1, 2.5, None, True]}, "z": "", "a": {}}))
SEVERAL = conversation(call("get_weather", {"city": "Paris", "days": 2}), call("get_time", {"zone": "CET"}), call("now", {}))


class Arguments(ChatData):
    def test_a_string_is_no_string_in_the_target(self):
        for form in FORMS:
            with self.subTest(form):
                path = self.write_chats([as_strings(SIMPLE)], form)
                _, targets = self.text_and_targets(self.prepare(path, TEMPLATES["as JSON"]))
                self.assertIn('{"name": "get_weather", "arguments": {"city": "Paris"}}', targets)
                self.assertNotIn('\\"', targets)

    def test_both_forms_give_the_same_bytes(self):
        for name, template in TEMPLATES.items():
            for what, messages in (("simple", SIMPLE), ("rich", RICH), ("several", SEVERAL)):
                with self.subTest(template=name, calls=what):
                    want = self.made_of(self.write_chats([messages]), template)
                    self.assertEqual(self.made_of(self.write_chats([as_strings(messages)]), template), want)
                    compact = as_strings(messages, separators=(",", ":"), ensure_ascii=False)
                    self.assertEqual(self.made_of(self.write_chats([compact]), template), want)

    def test_a_table_has_strings_alone(self):
        """Calls of different tools have no common form otherwise."""
        for name, template in TEMPLATES.items():
            for what, messages in (("simple", SIMPLE), ("rich", RICH), ("several", SEVERAL)):
                with self.subTest(template=name, calls=what):
                    want = self.made_of(self.write_chats([messages]), template)
                    self.assertEqual(self.made_of(self.write_chats([as_strings(messages)], "parquet"), template), want)

    def test_calls_without_a_function_around_them(self):
        messages = conversation(call("get_weather", {"city": "Paris"}, flat=True), call("get_time", {"zone": "CET"}, flat=True))
        template = TEMPLATES["as JSON"].replace("c.function.", "c.")
        for name, text in (("own", template), ("Qwen 2.5", QWEN25)):
            with self.subTest(name):
                want = self.made_of(self.write_chats([messages]), text)
                self.assertEqual(self.made_of(self.write_chats([as_strings(messages)]), text), want)
                self.assertEqual(self.made_of(self.write_chats([as_strings(messages)], "parquet"), text), want)

    def test_of_earlier_turns_too(self):
        """What is no target is read as the prompt."""
        messages = SIMPLE + [user("and tomorrow?")] + SEVERAL[1:]
        want = self.made_of(self.write_chats([messages]), TEMPLATES["as JSON"])
        self.assertEqual(self.made_of(self.write_chats([as_strings(messages)]), TEMPLATES["as JSON"]), want)

    def test_the_two_forms_are_duplicates(self):
        result = self.prepare(self.write_chats([SIMPLE, as_strings(SIMPLE)]), TEMPLATES["as JSON"])
        text, _ = self.text_and_targets(result)
        self.assertEqual(text.count("Paris"), 1, shown(result))

    def test_a_string_that_is_no_object_is_kept_or_refused(self):
        for arguments in ("", "Paris", "[1, 2]", '"Paris"', "{", "null"):
            with self.subTest(arguments):
                path = self.write_chats([conversation(call("get_weather", arguments))])
                result = self.prepare(path, TEMPLATES["as JSON"])
                if result.returncode != 0:
                    assert_refused(self, result, path.name)


if __name__ == "__main__":
    unittest.main()
