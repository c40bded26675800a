#!/usr/bin/env python3
"""Conversations with a message that the template leaves out are refused; those whose words it shows in its own way are not. Exits with
77 (skipped) where a package is missing."""
import unittest

from chat_data import FORMS, ChatData, assistant, user

from refusals import assert_ended_well, assert_refused

USERS_ALONE = (
    "{% for m in messages %}{% if m.role == 'user' %}<|im_start|>user\n{{ m.content }}<|im_end|>\n"
    "{% elif m.role == 'assistant' %}<|im_start|>assistant\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FIRST_SYSTEM = "{% if messages[0].role == 'system' %}<|im_start|>system\n{{ messages[0].content }}<|im_end|>\n{% endif %}" + USERS_ALONE
MARKED = USERS_ALONE.replace("assistant\n{{ m.content }}<|im_end|>", "assistant\n{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}")
ALL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ SHOWN }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def system(text, role="system"):
    return {"role": role, "content": text}


class Hidden(ChatData):
    def refuse(self, messages, template):
        for form in FORMS:
            with self.subTest(form):
                path = self.write_chats([[user("hello"), assistant("good day")], messages], form)
                assert_refused(self, self.prepare(path, template), f"{path.name}:2" if form == "jsonl" else f"{path.name}, row 2")

    def test_content_that_is_cut(self):
        """Its end, its begin, its middle, or the words of one role."""
        said = "One two three four five six seven eight nine ten eleven."
        for shown in ("m.content[:20]", "m.content[12:]", "m.content | truncate(20)", "m.content.split('. ')[0].split(' ')[-1]",
                      "m.content[:9] ~ m.content[-9:]", "m.content[:20] if m.role == 'user' else m.content", "m.content.split('five')[0]"):
            with self.subTest(shown):
                path = self.write_chats([[user(said), assistant(said + " And more.")]])
                assert_refused(self, self.prepare(path, ALL.replace("SHOWN", shown)), path.name)

    def test_white_space_at_the_ends(self):
        """Templates often strip it: that is told once, with the number of conversations."""
        for said, told in ((" yes\n", True), ("yes", False), ("ye  s", False)):
            for shown in ("m.content | trim", "m.content.strip()", "m.content.rstrip() | trim"):
                with self.subTest(said, shown=shown):
                    records = [[user("hi"), assistant("hello")]] + [[user(f"hi {i}"), assistant(said)] for i in range(2)]
                    result = self.prepare(self.write_chats(records), ALL.replace("SHOWN", shown))
                    assert_ended_well(self, result)
                    warnings = [line for line in result.stderr.splitlines() if "white space" in line]
                    self.assertEqual([line for line in warnings if " 2 " in line], warnings)
                    self.assertEqual(len(warnings), told)

    def test_words_that_are_written_in_another_way(self):
        said = "First line, \"quoted\".\n\nA <b>second</b> & last one: \u00e9t\u00e9.\t"
        for shown in ("m.content | tojson", "m.content | e", "m.content.replace('\\n', ' ')", "m.content | upper", "'[' ~ m.content ~ ']'"):
            with self.subTest(shown):
                path = self.write_chats([[user(said), assistant(said)]])
                assert_ended_well(self, self.prepare(path, ALL.replace("SHOWN", shown)))

    def test_a_system_message(self):
        self.refuse([system("Answer in French."), user("hi"), assistant("salut")], USERS_ALONE)

    def test_with_marks_of_targets(self):
        self.refuse([system("Answer in French."), user("hi"), assistant("salut")], MARKED)

    def test_a_message_of_a_developer(self):
        self.refuse([system("Answer in French.", "developer"), user("hi"), assistant("salut")], FIRST_SYSTEM)

    def test_a_result_of_a_tool(self):
        self.refuse([user("weather?"), assistant("I look."), system("It rains.", "tool"), assistant("Take a coat.")], FIRST_SYSTEM)

    def test_a_second_system_message(self):
        self.refuse([system("Be kind."), user("hi"), assistant("hello"), system("Answer in French."), user("again"), assistant("salut")], FIRST_SYSTEM)

    def test_a_system_message_that_does_not_come_first(self):
        self.refuse([user("hi"), system("Answer in French."), assistant("salut")], FIRST_SYSTEM)

    def test_a_second_question_in_a_row(self):
        last = "{% for m in messages %}{% if not loop.last and messages[loop.index].role == m.role %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
        template = last + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        self.refuse([user("My name is Ann."), user("Who am I?"), assistant("Ann.")], template)

    def test_words_that_another_message_has_too(self):
        """That they are somewhere in the text does not show them in their place."""
        self.refuse([system("hi"), user("hi there"), assistant("salut")], USERS_ALONE)
        self.refuse([user("weather?"), assistant("I look."), system("rain", "tool"), assistant("It will rain.")], FIRST_SYSTEM)

    def test_a_long_conversation_with_one_of_many_hidden(self):
        messages = [message for number in range(6) for message in (user(f"question {number}"), assistant(f"answer {number}"))]
        messages.insert(7, system("From here on in French.", "developer"))
        self.refuse(messages, FIRST_SYSTEM)


class Shown(ChatData):
    def assert_made(self, messages, template, *words):
        for form in FORMS:
            with self.subTest(form):
                text, _ = self.text_and_targets(self.prepare(self.write_chats([messages], form), template))
                for word in words:
                    self.assertIn(word, text)

    def test_without_the_space_around_it(self):
        self.assert_made([system("  Be kind.\n"), user(" hi\n"), assistant("hello")], ALL.replace("SHOWN", "m.content | trim"), "system\nBe kind.<|im_end|>")

    def test_with_its_characters_escaped(self):
        template = ALL.replace("SHOWN", "(m.content | tojson) if m.role == 'tool' else m.content")
        said = 'line one\nsays "no" \\ here'
        self.assert_made([user("weather?"), assistant("I look."), system(said, "tool"), assistant("Bad.")], template, '"line one\\nsays \\"no\\" \\\\ here"')

    def test_in_the_turn_of_another(self):
        template = (
            "{% if messages[0].role == 'system' %}{% set told = messages[0].content + '\n\n' %}{% set rest = messages[1:] %}{% else %}"
            "{% set told = '' %}{% set rest = messages %}{% endif %}{% for m in rest %}<|im_start|>{{ m.role }}\n"
            "{{ told if loop.first else '' }}{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        self.assert_made([system("Be kind."), user("hi"), assistant("hello")], template, "user\nBe kind.\n\nhi<|im_end|>")

    def test_without_the_reasoning_of_an_earlier_turn(self):
        template = ALL.replace("SHOWN", "m.content if loop.last else m.content.split('</think>')[-1]")
        thought = [user("1+1?"), assistant("<think>easy</think>2"), user("2+2?"), assistant("<think>also</think>4")]
        self.assert_made(thought, template, "assistant\n2<|im_end|>", "<think>also</think>4")

    def test_words_that_are_none(self):
        for content in ("", " \n"):
            with self.subTest(content):
                self.assert_made([system(content), user("hi"), assistant("hello")], USERS_ALONE, "user\nhi<|im_end|>")

    def test_the_same_words_twice(self):
        self.assert_made([system("hi"), user("hi"), assistant("hi"), user("hi"), assistant("hi")], ALL.replace("SHOWN", "m.content"), "system\nhi<|im_end|>")

    def test_with_the_built_in_templates(self):
        messages = [system("Be kind."), user("hi"), assistant("hello"), user("and?"), assistant("bye")]
        for template in ("chatml", "llama2", "llama3", "vicuna_v1"):
            with self.subTest(template):
                self.assert_made(messages, template, "Be kind.", "hello", "bye")


if __name__ == "__main__":
    unittest.main()
