#!/usr/bin/env python3
"""Replies that the data exclude from the loss are no targets: prepare_data.py learns what such keys mean, or refuses them by name.
Exits with 77 (skipped) where a package is missing."""
import unittest

from chat_data import FORMS, ChatData, assistant, user

from refusals import assert_refused

# Keys of a message, with the value that excludes it and the one that does not.
KEYS = {
    "weight": (0, 1), "train": (False, True), "training": (False, True), "trainable": (False, True), "loss": (False, True),
    "loss_mask": (0, 1), "masked": (True, False),
}
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
    "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
UNMARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class Excluded(ChatData):
    def assert_not_learnt(self, path, key, template="chatml", excluded="a bad answer", kept="a good one"):
        """Excluded, and still there to be read; or else refused by name."""
        result = self.prepare(path, template)
        if result.returncode != 0:
            assert_refused(self, result, path.name, key)
            return
        text, targets = self.text_and_targets(result)
        self.assertIn(excluded, text)
        self.assertNotIn(excluded, targets)
        self.assertIn(kept, targets)

    def test_with_the_built_in_template(self):
        for key, (no, yes) in KEYS.items():
            for form in FORMS:
                with self.subTest(key=key, form=form):
                    path = self.write_chats([[user("hi"), assistant("a bad answer", **{key: no}), user("again"), assistant("a good one", **{key: yes})]], form)
                    self.assert_not_learnt(path, key)

    def test_where_other_messages_lack_the_key(self):
        """In a table they have null."""
        for key, (no, _) in KEYS.items():
            for form in FORMS:
                with self.subTest(key=key, form=form):
                    path = self.write_chats([[user("hi"), assistant("a good one"), user("again"), assistant("a bad answer", **{key: no})]], form)
                    self.assert_not_learnt(path, key)

    def test_with_templates_of_models(self):
        for name, template in (("marked", MARKED), ("unmarked", UNMARKED)):
            for key in ("weight", "train", "masked"):
                with self.subTest(template=name, key=key):
                    no, yes = KEYS[key]
                    path = self.write_chats([[user("hi"), assistant("a bad answer", **{key: no}), user("again"), assistant("a good one", **{key: yes})]])
                    self.assert_not_learnt(path, key, template)

    def test_one_conversation_among_others(self):
        chats = [[user(f"question {number}"), assistant(f"answer {number}")] for number in range(5)]
        chats.insert(3, [user("hi"), assistant("a bad answer", weight=0), user("again"), assistant("a good one")])
        for form in FORMS:
            with self.subTest(form):
                self.assert_not_learnt(self.write_chats(chats, form), "weight", kept="answer 4")

    def test_one_conversation_twice_with_other_exclusions(self):
        """The same words are no duplicate where other replies count."""
        chats = [[user("hi"), assistant("first", weight=one), user("again"), assistant("second", weight=two)] for one, two in ((0, 1), (1, 0))]
        path = self.write_chats(chats)
        result = self.prepare(path)
        if result.returncode != 0:
            assert_refused(self, result, path.name, "weight")
        else:
            _, targets = self.text_and_targets(result)
            self.assertEqual(sorted(targets.split("<|im_end|>")), ["", "first", "second"])

    def test_a_call_of_a_tool(self):
        shown = UNMARKED.replace("{{ m.content }}", "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}</tool_call>{% endfor %}")
        call = {"type": "function", "function": {"name": "badly_chosen", "arguments": {}}}
        path = self.write_chats([[user("hi"), assistant("", tool_calls=[call], weight=0), {"role": "tool", "content": "an error"},
                                  assistant("a good one", weight=1)]])
        self.assert_not_learnt(path, "weight", shown, excluded="badly_chosen")

    def test_a_key_that_excludes_nothing_changes_nothing(self):
        want = self.made_of(self.write_chats([[user("hi"), assistant("one"), user("again"), assistant("two")]]))
        for key, (_, yes) in KEYS.items():
            for form in FORMS:
                with self.subTest(key=key, form=form):
                    path = self.write_chats([[user("hi"), assistant("one", **{key: yes}), user("again"), assistant("two", **{key: yes})]], form)
                    if key != "weight" and (result := self.prepare(path)).returncode != 0:
                        assert_refused(self, result, path.name, key)  # whatever it says
                    else:
                        self.assertEqual(self.made_of(path), want)


if __name__ == "__main__":
    unittest.main()
