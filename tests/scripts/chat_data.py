"""Conversations that scripts/prepare_data.py packs, and what of them is text and what is a target. Importing this exits with 77
(skipped) where a package is missing."""
import json
import os
import sys

os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing

try:
    import jinja2  # noqa: F401
    import numpy as np
    import pyarrow
    import pyarrow.parquet
    import tokenizers
    import transformers  # noqa: F401
except ImportError as error:
    print(f"skipped: {error.name} is missing")
    sys.exit(77)

from chat_tokenizers import make_chat_tokenizer
from script_runs import ScriptTest, run_here

from refusals import assert_ended_well, shown

FORMS = ("jsonl", "parquet")


def user(text, **more):
    return {"role": "user", "content": text, **more}


def assistant(text, **more):
    return {"role": "assistant", "content": text, **more}


class ChatData(ScriptTest):
    def setUp(self):
        super().setUp()
        self.tokenizer = make_chat_tokenizer("chatml", self.folder / "tokenizer")

    def write_chats(self, records, form="jsonl", name="chats"):
        """Each is a list of messages, or has such a list and more."""
        records = [record if isinstance(record, dict) else {"messages": record} for record in records]
        path = self.folder / f"{name}.{form}"
        if form == "jsonl":
            return self.write(path.name, "".join(json.dumps(record) + "\n" for record in records))
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
        return path

    def prepare(self, path, template="chatml", length=512, more=()):
        """`template` is a name, or the text of one."""
        if "{" in template:
            template = self.write("tokenizer/template.jinja", template)
        return run_here("prepare_data", path, "--chat", template, "--tokenizer", self.tokenizer, "--sequence-length", length,
                        "--out", self.new_out(), *more)

    def text_and_targets(self, result):
        """Of a call that ended well. Padding is not shown."""
        assert_ended_well(self, result)
        ids, marks = np.fromfile(self.out / "train-00000.npy", "<u2"), np.fromfile(self.out / "train-00000.npy.mask", "u1")
        tokenizer = tokenizers.Tokenizer.from_file(str(self.tokenizer))
        info = json.loads((self.out / "data.json").read_text())
        text, targets = (tokenizer.decode(some.tolist(), skip_special_tokens=False) for some in (ids, ids[(marks & 1) == 1]))
        padding = tokenizer.id_to_token(info["eos"])
        return text.removesuffix(padding * info["train"]["padding"]), targets

    def made_of(self, path, template="chatml"):
        """The bytes of tokens and masks."""
        result = self.prepare(path, template)
        assert_ended_well(self, result)
        files = sorted(self.out.glob("train-*"))
        self.assertTrue(files, shown(result))
        return [file.read_bytes() for file in files]
