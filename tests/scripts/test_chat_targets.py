#!/usr/bin/env python3
"""Tests that the targets of conversations are what the data say. Exits with 77 (skipped) where a package is missing."""

import os

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing

import json
import sys
import unittest

try:
    import numpy as np
    import pyarrow
    import pyarrow.parquet
    import transformers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

from preparation import Preparation

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

    def refuse_record(self, messages, record, *words, template="chatml"):
        """It must be refused with its line and all of the words."""
        good = {"messages": [user("hi"), assistant("hello")]}
        path = self.write("chats.jsonl", json.dumps(good) + "\n" + json.dumps({"messages": messages} | record) + "\n")
        if template != "chatml":
            template = self.write("tokenizer_config.json", json.dumps({"chat_template": template, "eos_token": "<|im_end|>"}))
        self.new_out()
        for word in ("chats.jsonl:2: ", *words):
            self.refuse(word, path, "--chat", template, "--sequence-length", 512)


class Marks(Targets):
    """Tags of targets in comments."""

    def test_a_tag_in_a_comment_is_none(self):
        chat = [user("hi"), assistant("a"), user("again"), assistant("b")]
        for comment in ("{# {% generation %} #}", "{#- with {% generation %}\n and {%- endgeneration -%} -#}",
                        "{% raw %}{% generation %}{% endraw %}"):
            with self.subTest(comment=comment):
                self.assertEqual(self.targets([{"messages": chat}], comment + PLAIN), "a<|im_end|>b<|im_end|>")
        self.assertEqual(self.targets([{"messages": chat}], MARKED.replace("{% gen", "{%+ gen")), "a<|im_end|>b<|im_end|>")


if __name__ == "__main__":
    unittest.main()
