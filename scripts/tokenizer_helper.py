#!/usr/bin/env python3
"""Turns text into token ids and back for `parka generate`, which starts it and ends it.

    tokenizer_helper.py FOLDER [--chat]

FOLDER holds a tokenizer.json and, where the model has them, tokenizer_config.json, generation_config.json, config.json and
chat_template.jinja. Requests and answers are lines of JSON on standard input and output. The first answer comes unasked:
    {"stop": [ids]}         the tokens at which a continuation ends; with --chat those of a turn of the assistant too
then, for each request,
    {"encode": TEXT}        {"ids": [...]}: of a prompt, with what the tokenizer puts before a text
    {"pieces": [TEXT, ...]} {"ids": [[...], ...]}: of the texts between images, the first with what is put before a text
    {"chat": MESSAGES}      {"ids": [...]}: of a conversation by the model's template, up to where the assistant speaks
    {"begin": [ids]}        {"text": ""}: a continuation of this prompt follows
    {"token": ID}           {"text": TEXT}: what can be shown after this token. Half a character waits for its rest
    {"end": true}           {"text": TEXT}: what was still waiting
or, to any of them, {"error": TEXT}: one line for the user. It ends with its input, or after an error at its start.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from text_data.common import InputError, one_line, telling_failures  # noqa: E402
from text_data.formats import refuse_pointer  # noqa: E402
from text_data.helper_process import advice_to_user, limited, reason_of, run, serve  # noqa: E402
from text_data.special_tokens import bos_of, read_object, set_plain, special_tokens_of, tokenizer_config  # noqa: E402

# A character in UTF-8 decodes to this while bytes of it are missing, once or for each byte that is there. If bytes are tokens,
# all characters before it that are spelled in bytes decode to these, too.
INCOMPLETE = "\ufffd"
# Characters of a conversation; its tokens take some hundred times as much memory.
MOST_TEXT = 1 << 24
# Stands for the assistant's words.
WORDS = "Parka"


def load_tokenizer(path: Path):
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise InputError(
            f"text needs Python's tokenizers package, which {sys.executable} lacks; {advice_to_user('tokenizers')}"
        )
    if not path.is_file():
        raise InputError(f"{path}: no such file; put the model's tokenizer.json there")
    refuse_pointer(path)
    with telling_failures(f"{path}: is not a tokenizer.json", "replace it with the model's"):
        tokenizer = Tokenizer.from_file(str(path))
    set_plain(tokenizer, path)
    return tokenizer


class Text:
    """Prompts of text, and the ids at which a continuation ends."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.tokenizer = load_tokenizer(folder / "tokenizer.json")
        config = tokenizer_config(folder)
        self.special_tokens = special_tokens_of(config)
        self.stop = self._find_stop()
        self._bos = bos_of(self.tokenizer, self.special_tokens, config.get("add_bos_token"))

    def _find_stop(self) -> list[int]:
        """As transformers' generate, which asks the model's configs and not the tokenizer."""
        for path in (self.folder / "generation_config.json", *self._model_configs()):
            ids = read_object(path).get("eos_token_id")
            ids = ids if isinstance(ids, list) else [ids]
            if ids and all(isinstance(id, int) for id in ids):
                return ids
        own = self.tokenizer.token_to_id(self.special_tokens.get("eos_token", ""))
        return [] if own is None else [own]

    def _model_configs(self) -> list[Path]:
        """A run keeps that of the model that it began from beside its tokenizer, which may be another one."""
        origin = self.folder.parent / "huggingface"
        if not (origin / "tokenizer.json").is_file():
            return [self.folder / "config.json"]
        is_same = (origin / "tokenizer.json").read_bytes() == (self.folder / "tokenizer.json").read_bytes()
        return [self.folder / "config.json"] + ([origin / "config.json"] if is_same else [])

    def encode(self, text: str) -> list[int]:
        """Tokens that a tokenizer puts after a text are left out: the text continues."""
        ids = self._with_bos(self.tokenizer.encode(text, add_special_tokens=False).ids)
        return ids or self.stop[:1]  # what stands before a document, too

    def encode_pieces(self, pieces: list[str]) -> list[list[int]]:
        """Text between images, each piece by itself, as prepared data has it."""
        ids = [self.tokenizer.encode(piece, add_special_tokens=False).ids for piece in pieces]
        ids[0] = self._with_bos(ids[0])
        return ids

    def _with_bos(self, ids: list[int]) -> list[int]:
        """A text may be written with it, as one that a chat template made."""
        return ids if ids[: len(self._bos)] == self._bos else self._bos + ids


class Chat:
    """The model's template, rendered by the transformers library."""

    def __init__(self, text: Text):
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"  # else it says that PyTorch is missing
        self._text = text
        self._place, self._template = self._find_template(text.folder)
        try:
            from transformers.utils.chat_template_utils import render_jinja_template
            import jinja2  # noqa: F401, transformers asks for it only when it renders
        except ImportError as error:
            raise InputError(
                f"--chat needs Python's transformers and jinja2 packages ({one_line(error)}); "
                f"{advice_to_user('--upgrade transformers jinja2')}"
            )
        self._render_template = render_jinja_template
        text.stop = text.stop + [id for id in self._ends_of_turn() if id not in text.stop]

    @staticmethod
    def _find_template(folder: Path) -> tuple[Path, str]:
        path = folder / "chat_template.jinja"
        if path.is_file():
            refuse_pointer(path)
            return path, path.read_text(encoding="utf-8")
        path = folder / "tokenizer_config.json"
        found = read_object(path).get("chat_template")
        if isinstance(found, list):  # several by name
            found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}.get("default")
        if not isinstance(found, str):
            raise InputError(
                f"{folder}: the tokenizer has no chat template, so the model was not made for --chat; use --prompt, or put a "
                "chat_template.jinja there"
            )
        return path, found

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        try:
            with limited():
                texts, _ = self._render_template(
                    [messages],
                    chat_template=self._template,
                    add_generation_prompt=add_generation_prompt,
                    **self._text.special_tokens,
                )
        except Exception as error:  # whatever the template's expressions raise
            raise InputError(f"{self._place}: the chat template refuses the conversation ({reason_of(error)})")
        if len(texts[0]) > MOST_TEXT:
            raise InputError(f"{self._place}: the chat template makes {len(texts[0])} characters of the conversation, more than {MOST_TEXT}")
        return texts[0]

    def _ends_of_turn(self) -> list[int]:
        """The special token that the template puts after the assistant's words, if it does."""
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": WORDS}]
        _, _, behind = self._render(messages, add_generation_prompt=False).rpartition(WORDS)
        ids = self._text.tokenizer.encode(behind, add_special_tokens=False).ids
        special = self._text.tokenizer.get_added_tokens_decoder()
        return ids[:1] if ids and ids[0] in special and special[ids[0]].special else []

    def encode(self, messages: list[dict]) -> list[int]:
        text = self._render(messages, add_generation_prompt=True)
        return self._text.tokenizer.encode(text, add_special_tokens=False).ids


class Stream:
    """The text of a continuation, token by token.

    A token's text may depend on those before it, so text is decoded from some tokens back, and what of it has been shown is
    left out: the first `known` characters of the text of ids[prefix:]. All text of ids[:shown] has been. A byte that belongs to no
    character spoils the bytes before it, so that it may be shown as several replacement characters.
    """

    CONTEXT = 8  # tokens of the prompt, and those that their first character began with
    MOST_OF_CHARACTER = 4  # bytes
    # The context may be spelled in bytes, and what follows it.
    MOST_WAITING = CONTEXT + 2 * MOST_OF_CHARACTER

    def __init__(self, tokenizer, prompt: list[int]):
        self._tokenizer = tokenizer
        self._without_text = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        self._ids = self._context_of(prompt)
        self._prefix, self._shown = 0, len(self._ids)
        self._known = len(tokenizer.decode(self._ids))

    def _context_of(self, prompt: list[int]) -> list[int]:
        first = max(len(prompt) - self.CONTEXT, 0)
        for before in range(first, max(first - self.MOST_OF_CHARACTER, -1), -1):
            if not self._tokenizer.decode(prompt[before:]).startswith(INCOMPLETE):
                return prompt[before:]
        return prompt[first:]

    def push(self, id: int) -> str:
        # The text after it might else be decoded as the beginning of all, without its space.
        if id in self._without_text:
            return ""
        self._ids.append(id)
        text = self._tokenizer.decode(self._ids[self._prefix :])[self._known :]
        waiting = min(len(text) - len(text.rstrip(INCOMPLETE)), self.MOST_WAITING)
        text = text[: len(text) - waiting]
        self._known += len(text)
        if waiting == 0:
            self._prefix, self._shown = self._shown, len(self._ids)
            self._known = len(self._tokenizer.decode(self._ids[self._prefix :]))
        return text

    def end(self) -> str:
        return self._tokenizer.decode(self._ids[self._prefix :])[self._known :]


class Helper:
    def __init__(self, folder: Path, chat: bool):
        self._text = Text(folder)
        self._chat = Chat(self._text) if chat else None
        self._stream = Stream(self._text.tokenizer, [])
        self.stop = self._text.stop

    def answer(self, request: dict) -> dict:
        ((kind, value),) = request.items()
        if kind == "encode":
            return {"ids": self._text.encode(value)}
        if kind == "pieces":
            return {"ids": self._text.encode_pieces(value)}
        if kind == "chat":
            return {"ids": self._chat.encode(value)}
        if kind == "begin":
            self._stream = Stream(self._text.tokenizer, value)
            return {"text": ""}
        return {"text": self._stream.push(value) if kind == "token" else self._stream.end()}


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument("--chat", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    options = parse_options(arguments)
    return serve(f"{options.folder}/tokenizer.json", lambda: Helper(options.folder, options.chat), lambda helper: {"stop": helper.stop})


if __name__ == "__main__":
    run(main)
