"""What prepare_data.py --chat does with a conversation: template, loss marks, packing into sequences.

A conversation becomes pieces of text, each of which counts in the loss or not: the assistant's text does, up to the token
that ends its turn, and all other text does not. Pieces are tokenized one by one, so that a mark never falls into a token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import BinaryIO, Callable, Iterator

import numpy as np

MARK_TARGET, MARK_DOCUMENT_START = 1, 2
# Sequences that are filled at the same time. More waste less space at their ends, and move conversations further.
OPEN_SEQUENCES = 256

Piece = tuple[str, bool]  # text, whether it counts in the loss
Template = Callable[[list[dict]], list[Piece]]


class ChatError(Exception):
    """The user can fix it. One line: what is wrong and what to do, without the place."""


def messages_of(record: object) -> list[dict]:
    """The checked messages of a line {"messages": [{"role": ..., "content": ...}, ...]}."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        raise ChatError('has no list "messages" with a message in it; --chat wants one conversation per line')
    for number, message in enumerate(messages):
        texts = [message.get(key) for key in ("role", "content")] if isinstance(message, dict) else [None]
        if not all(isinstance(text, str) for text in texts):
            raise ChatError(f'message {number} has no strings "role" and "content"; fix it or leave it out')
    return messages


def chatml(messages: list[dict]) -> list[Piece]:
    pieces: list[Piece] = []
    for message in messages:
        pieces.append((f"<|im_start|>{message['role']}\n", False))
        pieces.append((message["content"] + "<|im_end|>", message["role"] == "assistant"))
        pieces.append(("\n", False))
    return pieces


def llama3(messages: list[dict]) -> list[Piece]:
    pieces: list[Piece] = [("<|begin_of_text|>", False)]
    for message in messages:
        pieces.append((f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n", False))
        pieces.append((message["content"].strip() + "<|eot_id|>", message["role"] == "assistant"))
    return pieces


def llama2(messages: list[dict]) -> list[Piece]:
    pieces: list[Piece] = []
    system = ""
    if messages[0]["role"] == "system":
        system = f"<<SYS>>\n{messages[0]['content']}\n<</SYS>>\n\n"
        messages = messages[1:]
    for number, message in enumerate(messages):
        if message["role"] != ("user", "assistant")[number % 2]:
            raise ChatError("the llama2 template wants user and assistant in turn, after one system message at most")
        if message["role"] == "user":
            pieces.append((f"<s>[INST] {system if number == 0 else ''}{message['content'].strip()} [/INST]", False))
        else:
            pieces.append((f" {message['content'].strip()} </s>", True))
    return pieces


TEMPLATES: dict[str, Template] = {"chatml": chatml, "llama2": llama2, "llama3": llama3}
MARKERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
}


class JinjaTemplate:
    """The chat_template of a tokenizer_config.json."""

    def __init__(self, path: Path):
        try:
            from jinja2 import TemplateError
            from jinja2.sandbox import ImmutableSandboxedEnvironment
        except ImportError:
            raise ChatError("a chat template needs the jinja2 package; install it with: pip install jinja2")
        try:
            config = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ChatError(f"{path}: cannot be read ({error.strerror}); give chatml, llama2, llama3 or a file")
        except ValueError as error:
            raise ChatError(f"{path}: is not JSON ({error}); give a tokenizer_config.json")
        source = config.get("chat_template") if isinstance(config, dict) else None
        if not isinstance(source, str):
            raise ChatError(f"{path}: has no chat_template; use chatml, llama2 or llama3")

        def refuse(message):
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = refuse
        self._error = TemplateError
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ChatError(f"{path}: its chat_template cannot be used ({error})")
        self._tokens = {name: token_text(config.get(name)) for name in ("bos_token", "eos_token")}

    def _render(self, messages: list[dict], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, **self._tokens
            )
        except self._error as error:
            raise ChatError(f"the chat template refuses the conversation ({error}); fix it or leave it out")

    def __call__(self, messages: list[dict]) -> list[Piece]:
        pieces: list[Piece] = []
        done = ""
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._render(messages[:number], add_generation_prompt=True)
            after = self._render(messages[: number + 1], add_generation_prompt=False)
            if not before.startswith(done) or not after.startswith(before):
                raise ChatError(
                    "the chat template changes what came before when a message is added, so that the assistant's "
                    "words cannot be told apart; use chatml, llama2 or llama3"
                )
            pieces += [(before[len(done) :], False), (after[len(before) :], True)]
            done = after
        whole = self._render(messages, add_generation_prompt=False)
        return pieces + ([(whole[len(done) :], False)] if whole.startswith(done) else [])


def token_text(token: object) -> str:
    """A special token in tokenizer_config.json is a string or an object with one."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else ""


def make_template(name: str) -> Template:
    return TEMPLATES[name] if name in TEMPLATES else JinjaTemplate(Path(name))


def mark_conversation(pieces: list[Piece], ids: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and marks of a conversation from the ids of its pieces."""
    marks = [np.full(len(part), MARK_TARGET if learnt else 0, np.uint8) for (_, learnt), part in zip(pieces, ids)]
    tokens, joined = np.concatenate(ids), np.concatenate(marks)
    if len(joined) > 0:
        # Nothing predicts the first token of a document.
        joined[0] = MARK_DOCUMENT_START
    return tokens, joined


class Packer:
    """Puts conversations into sequences of one length, each where it leaves the least space. None is cut in two."""

    def __init__(self, length: int, padding: int, write: Callable[[np.ndarray, np.ndarray], None]):
        self._length, self._padding, self._write = length, padding, write
        self._open: list[list[tuple[np.ndarray, np.ndarray]]] = []
        self._free: list[int] = []
        self.padding_tokens = 0

    def add(self, tokens: np.ndarray, marks: np.ndarray) -> None:
        """Of at most `length` tokens."""
        fitting = [i for i, free in enumerate(self._free) if free >= len(tokens)]
        if fitting:
            place = min(fitting, key=lambda i: self._free[i])
        else:
            if len(self._open) == OPEN_SEQUENCES:
                self._close(min(range(len(self._free)), key=lambda i: self._free[i]))
            place = len(self._open)
            self._open.append([])
            self._free.append(self._length)
        self._open[place].append((tokens, marks))
        self._free[place] -= len(tokens)
        if self._free[place] == 0:
            self._close(place)

    def finish(self) -> None:
        while self._open:
            self._close(0)

    def _close(self, place: int) -> None:
        parts, free = self._open.pop(place), self._free.pop(place)
        self.padding_tokens += free
        if free > 0:
            marks = np.zeros(free, np.uint8)
            marks[0] = MARK_DOCUMENT_START
            parts.append((np.full(free, self._padding, np.uint32), marks))
        self._write(np.concatenate([tokens for tokens, _ in parts]), np.concatenate([marks for _, marks in parts]))


class ChatSplit:
    """The packed conversations of a split, in token files and mask files, each through a writer that prepare_data
    makes."""

    def __init__(self, token_writer, mask_writer, length: int, padding: int, dtype: str):
        self._tokens, self._marks = token_writer, mask_writer
        self._length, self._dtype = length, dtype
        self._packer = Packer(length, padding, self._write)
        self._targets = self._cut = 0
        self.without_targets = 0

    def _write(self, tokens: np.ndarray, marks: np.ndarray) -> None:
        self._targets += int((marks & MARK_TARGET).sum())
        self._tokens.write(tokens.astype(self._dtype))
        self._marks.write(marks)

    def add(self, tokens: np.ndarray, marks: np.ndarray) -> None:
        cut = len(tokens) > self._length
        tokens, marks = tokens[: self._length], marks[: self._length]
        if not (marks & MARK_TARGET).any():
            self.without_targets += 1
            return
        self._cut += cut
        self._tokens.documents += 1
        self._packer.add(tokens, marks)

    def finish(self) -> None:
        self._packer.finish()
        self._tokens.finish()
        self._marks.finish()

    @property
    def tokens(self) -> int:
        return self._tokens.tokens

    @property
    def documents(self) -> int:
        return self._tokens.documents

    def summary(self) -> dict:
        counts = {"targets": self._targets, "padding": self._packer.padding_tokens, "cut_conversations": self._cut}
        return self._tokens.summary() | counts


def spelled_out_markers(template: str, encode: Callable[[list[bytes]], list[np.ndarray]]) -> list[str]:
    """The markers of a built-in template that are several tokens of a tokenizer, which was then not made for it."""
    markers = MARKERS.get(template, ())
    return [marker for marker, ids in zip(markers, encode([m.encode() for m in markers])) if len(ids) != 1]


def conversations(file: BinaryIO, max_bytes: int) -> Iterator[tuple[int, bytes]]:
    """(line number, messages as JSON in one form) of JSON Lines. A ChatError carries its line as `line`."""
    number = 0
    while line := file.readline(max_bytes + 1):
        number += 1
        if not line.strip():
            continue
        try:
            if len(line) > max_bytes:
                raise ChatError(f"a line of more than {max_bytes // 2**20} MiB; split this conversation")
            messages = messages_of(json.loads(line))
        except (ValueError, RecursionError) as error:
            mended = ChatError(f"is not JSON ({' '.join(str(error).split())}); --chat wants one object per line")
            mended.line = number
            raise mended
        except ChatError as error:
            error.line = number
            raise
        kept = [{"role": message["role"], "content": message["content"]} for message in messages]
        yield number, json.dumps(kept, ensure_ascii=False).encode("utf-8", "replace")
