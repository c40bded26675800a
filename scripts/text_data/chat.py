"""Makes text of a conversation, and says which of it counts in the loss.

Chat templates are rendered by the transformers library, so that a model is trained on the text that it is prompted with.
The text is tokenized as a whole. What the assistant says is a target, up to the token that ends its turn.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Callable, Iterator

import numpy as np

from python_packages import advice

from .common import InputError, hub_advice, one_line, printable, tell
from .conversations import BESIDE_CONTENT, BESIDE_ROLE, HELD_OUT, KWARGS, TRAIN, in_one_form, says_something
from .formats import refuse_no_content
from .helper_process import limited, reason_of
from .readers import MAX_DOCUMENT_BYTES
from .special_tokens import read_object, special_tokens_of, tokenizer_config
from .tokenizer import ByteTokenizer, Span

MARK_TARGET, MARK_DOCUMENT_START = 1, 2
BUILT_IN = Path(__file__).resolve().parent / "templates"
# Tokens that the text of a built-in template needs.
MARKERS = {
    "chatml": ("<|im_start|>", "<|im_end|>"),
    "llama2": ("<s>", "</s>"),
    "llama3": ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"),
    "vicuna_v1": ("<s>", "</s>"),
    "plain": (),  # of captions: pictures, and then what is said of them
}
# Tags of what is a target, and what may hold the text of one without being one.
COMMENTS = r"\{#.*?#\}|\{%[-+]?\s*raw\s*[-+]?%\}.*?\{%[-+]?\s*endraw\s*[-+]?%\}"
TARGET_TAGS = re.compile(COMMENTS + r"|\{%([-+]?)\s*(?P<tag>(?:end)?generation)\s*([-+]?)%\}", re.DOTALL)
# Tags that end reasoning within content, up to which templates cut earlier turns; and tags that they may write in another form.
END_OF_REASONING = re.compile(
    r"[<\[\u25c1][/|]?[^<>\[\]\n]{0,30}(?:think|thought|reason|channel|message|response|final|answer)[^<>\[\]\n]{0,30}[>\]\u25b7]", re.IGNORECASE
)
TAGS = re.compile(r"<[^<>\n]{1,40}>")
# Marks that templates put around messages.
MARKS = re.compile(
    r"\[/?INST\]|<</?SYS>>|<\|(?:im_start|im_end|start_header_id|end_header_id|eot_id|system|user|assistant)\|>|<(?:start|end)_of_turn>|"
    r"^### ?(?:Instruction|Response|Human|Assistant):", re.MULTILINE
)
# Replies that programs write where there is none, and names in templates of data that nobody has filled in.
NO_REPLIES = {"none", "nan", "null", "undefined", "<na>"}
UNFILLED = re.compile(r"\{\{?\s*(?:instruction|input|output|question|answer|prompt|response|context|query)\s*\}")
# Replies of a part among which one is again and again, and bytes of a question that a reply seldom repeats.
SAMPLE, FEWEST_REPLIES, LONG_QUESTION = 1000, 8, 20
# Characters of a conversation, of which a template may write what it is given more than once.
MOST_TEXT = 4 * MAX_DOCUMENT_BYTES
# A conversation by which a template shows how turns end.
EXCHANGE = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "Parka"}]
# Arguments of a call by which it shows how a template writes them.
PROBE = {"parka": "probe"}


class ChatError(Exception):
    """What is wrong with a conversation and what to do, without its place."""


class TooMuchError(ChatError):
    """The template takes more time or memory than any conversation needs, whatever else is tried with it."""


def import_renderer():
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # else it says that PyTorch is missing
    try:
        from jinja2 import TemplateSyntaxError
        from transformers.utils.chat_template_utils import render_jinja_template
    except ImportError as error:
        raise InputError(f"--chat needs the transformers and jinja2 packages ({one_line(error)}); {advice('transformers and jinja2')}")
    return render_jinja_template, TemplateSyntaxError


def template_texts(path: Path) -> dict[str, str]:
    """The templates in a file by name: a .jinja file has one, "default"; a tokenizer_config.json has one or a list."""
    refuse_no_content(path)
    try:
        if path.suffix == ".jinja":
            others = sorted(path.parent.glob("additional_chat_templates/*.jinja")) if path.name == "chat_template.jinja" else []
            return {"default": path.read_text(encoding="utf-8")} | {other.stem: other.read_text(encoding="utf-8") for other in others}
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        name = str(path)
        advice = hub_advice(name, "--include '*.json' '*.jinja'", "--chat ") if "/" in name else ""
        give_another = f"give {', '.join(MARKERS)}, a file or a folder"
        raise InputError(f"--chat {path}: cannot be read ({error.strerror}); {advice or give_another}")
    except (ValueError, RecursionError) as error:
        raise InputError(f"--chat {path}: is not JSON ({one_line(error)}); give a .jinja or a tokenizer_config.json")
    found = config.get("chat_template") if isinstance(config, dict) else None
    if isinstance(found, str):
        return {"default": found}
    if isinstance(found, list) and all(isinstance(t, dict) and {"name", "template"} <= t.keys() for t in found):
        return {template["name"]: template["template"] for template in found}
    beside = path.with_name("chat_template.jinja")
    if beside.is_file():
        return template_texts(beside)
    raise InputError(f"--chat {path}: has no chat_template; use {', '.join(MARKERS)} or a .jinja file")


def refuse_two(folder: Path) -> None:
    """Raises an InputError if the files of a folder have different templates: some programs take one, some the other."""
    jinja, config = folder / "chat_template.jinja", folder / "tokenizer_config.json"
    if not jinja.is_file() or not read_object(config).get("chat_template"):
        return
    first, second = (template_texts(path).get("default", "").rstrip("\n") for path in (jinja, config))
    if first != second:
        raise InputError(f"--chat {folder}: {jinja.name} and {config.name} have different chat templates; give --chat one of these files")


def without_marks(template: str) -> str:
    """The same text for programs that do not know the tags of targets. What is left of a tag is an empty comment, which takes
    the space around it as the tag did."""
    return TARGET_TAGS.sub(lambda found: f"{{#{found[1]} {found[3]}#}}" if found["tag"] else found[0], template)


@functools.lru_cache
def has_marks(template: str) -> bool:
    return any(found["tag"] for found in TARGET_TAGS.finditer(template))


class ChatTemplate:
    """One of the built-in templates, or that of a file or a folder of a model."""

    def __init__(self, name: str, tokenizer):
        path = BUILT_IN / f"{name}.jinja" if name in MARKERS else Path(name)
        if path.is_dir():
            refuse_two(path)
            jinja = path / "chat_template.jinja"
            path = jinja if jinja.is_file() else path / "tokenizer_config.json"
        self._name, self._place = name, f"--chat {name}"
        self.texts = template_texts(path)
        config = tokenizer_config(path.parent)
        self._kwargs = [key for key, value in config.items() if key.endswith(KWARGS) and value]
        self._special_tokens = tokenizer.special_tokens | special_tokens_of(config)
        self._tokenizer = tokenizer
        ends = set(tokenizer.added_tokens) | {self._special_tokens.get("eos_token", "")}
        ends = sorted(ends - {""}, key=len, reverse=True)  # the longest of those that begin alike
        self._own_token = re.compile("|".join(map(re.escape, ends)) or "(?!)")
        self.told: collections.Counter = collections.Counter()  # of conversations that are doubtful, see common.tell
        self._replies: collections.Counter = collections.Counter()  # last replies of the first conversations
        self._places: dict[str, str] = {}  # where each was first
        self._render_template, self._syntax_error = import_renderer()
        if lacking := [token for token in sorted(tokenizer.lacking) if self._has(token)]:
            raise InputError(
                f"{tokenizer.path}: lacks {', '.join(lacking)}, which the chat template has and files beside it name; {tokenizer.advice_to_add()}"
            )

    def _has(self, token: str) -> bool:
        """Whether the template has a special token, spelled out or under its name."""
        names = [re.escape(name) for name, value in self._special_tokens.items() if value == token]
        pattern = re.compile("|".join((re.escape(token), *(rf"\b{name}\b" for name in names))))
        used = (re.sub(COMMENTS, "", self.texts[name], flags=re.DOTALL) for name in ("default", "tool_use") if name in self.texts)
        return any(pattern.search(text) for text in used)

    def doubts(self) -> list[str]:
        """What makes it doubtful that a model trained on its text ends its turns; nothing for bytes, and for captions, which are no turns."""
        if isinstance(self._tokenizer, ByteTokenizer) or self._name == "plain":
            return []
        markers = MARKERS.get(self._name, ())  # templates of models spell out what their tokenizers do not have
        spelled_out = [marker for marker, ids in zip(markers, self._tokenizer.encode([m.encode() for m in markers])) if len(ids) != 1]
        told = [f"the tokenizer has no single token for {', '.join(spelled_out)}"] if spelled_out else []
        told += [f'"{key}" in the tokenizer_config.json of --chat {self._name} is not read; give records "{KWARGS}"' for key in self._kwargs]
        with contextlib.suppress(ChatError, InputError):
            if self._end_of_turn_in(EXCHANGE) is None:
                told.append("the assistant's turns end with no special token of the tokenizer, so that nothing tells a model to stop")
            template = self._template_for({})
            text, prompt = self._render(template, EXCHANGE, {})[0], self._render(template, EXCHANGE[:1], {}, add_generation_prompt=True)[0]
            told += self._doubts_of_targets(text, prompt)
            if self._render("{% macro strftime_now(form) %}zqtimeqz{% endmacro %}" + template, EXCHANGE, {})[0].count("zqtimeqz"):
                told.append("the chat template writes the time of now into every conversation; write a fixed one in its place")
            if not text.startswith(prompt):
                same = len(os.path.commonprefix((text, prompt)))
                told.append(
                    f"the chat template's prompt for a reply ends with {prompt[same:]!r} where a written turn has {text[same:][:40]!r}: replies "
                    "that do not begin with the former are learnt otherwise than a model is asked for them"
                )
        return told

    def _doubts_of_targets(self, text: str, prompt: str) -> list[str]:
        """Of EXCHANGE and the prompt for its reply."""
        reply, (_, spans) = text.rfind(EXCHANGE[1]["content"]), self.text_and_spans(EXCHANGE)
        if not any(first <= reply < last for first, last in spans):
            return ["the targets that the chat template marks with {% generation %} leave out what the assistant says; move the marks there"]
        header = text[spans[-1][0] : reply]
        if header.strip() and self._render(self._template_for({}), EXCHANGE[:1], {})[0] == prompt:
            return [
                f"the chat template has no prompt for a reply (add_generation_prompt), so that {header!r} before it is learnt, too; give one that "
                "has, or mark the targets with {% generation %}"
            ]
        return []

    def unread(self, key: str) -> bool:
        """Whether the template does not name this key of messages."""
        return not any(re.search(rf"\b{re.escape(key)}\b", text) for text in self.texts.values())

    def known(self) -> list:
        """What of it decides the text and its targets, beside the tokenizer."""
        return [self.texts, sorted(self._special_tokens.items())]

    @property
    def sha256(self) -> str:
        """The checksum of all that decides the text."""
        texts = {name: without_marks(text).strip() for name, text in self.texts.items()}
        return hashlib.sha256(json.dumps([texts, sorted(self._special_tokens.items())], sort_keys=True).encode()).hexdigest()

    @functools.cache
    def end_of_turn(self) -> int | None:
        """The token of the tokenizer's own at which the targets of a turn end; None where they end with none."""
        with contextlib.suppress(ChatError, InputError):  # it may be for conversations of another form
            return self._end_of_turn_in(EXCHANGE)
        return None

    def _end_of_turn_in(self, messages: list[dict]) -> int | None:
        text, spans = self.text_and_spans(messages)
        spans = [(first, len(text[:last].rstrip())) for first, last in spans]  # a line end may be a target, too
        ((ids, targets),) = self._tokenizer.encode_marked([text], [spans])
        last = ids[targets][-1:].tolist()
        own = [self._tokenizer.id_of(token) for token in self._tokenizer.added_tokens]
        return last[0] if last and last[0] in own else None

    def mark(self, documents: list[bytes], places: list[str]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Tokens and marks of conversations, as readers.conversation_of writes them, from these places."""
        texts, spans = [], []
        for document, place in zip(documents, places):
            conversation = json.loads(document)
            try:
                text, marked = self.text_and_spans(**conversation)
            except ChatError as error:
                raise InputError(f"{place}: {error}")
            for doubt in self._doubts_of(conversation["messages"], text, place):
                tell(self.told, "conversations", doubt, place)
            for damage in damages_of(conversation["messages"]):
                tell(self.told, "damaged conversations", damage, place)
            texts.append(text)
            spans.append(marked)
        result = []
        for ids, targets in self._tokenizer.encode_marked(texts, spans):
            marks = np.where(targets, MARK_TARGET, 0).astype(np.uint8)
            marks[:1] = MARK_DOCUMENT_START  # nothing predicts the first token of a document
            result.append((ids, marks))
        return result

    def take_told(self) -> collections.Counter:
        """What conversations since the last call give reason to tell."""
        (reply, count), *_ = self._replies.most_common(1) or [("", 0)]
        if count >= FEWEST_REPLIES and 2 * count > self._replies.total():
            self.told[f"doubt conversations\nthe reply is the same, {printable(reply)[:40]!r}; check what the data have as replies\n{self._places[reply]}"] += count
        told, self.told, self._replies, self._places = self.told, collections.Counter(), collections.Counter(), {}
        return told

    def _doubts_of(self, messages: list[dict], text: str, place: str) -> Iterator[str]:
        """What a conversation says that may not be meant. A reply that calls tools, or is in another channel, may follow another."""
        contents, template = [message.get("content", "") for message in messages], "".join(self.texts.values())
        if any(content not in text and content.strip() in text for content in contents):
            yield "the chat template strips white space from the ends of messages"
        if any(mark not in template for content in contents for mark in MARKS.findall(content)):
            yield "messages hold the marks of another chat template, as text that it made; take them out"
        are_replies = [
            message["role"] == "assistant" and counts(message) and not any(message.get(key) for key in ("tool_calls", "function_call", "channel"))
            for message in messages
        ]
        replies = [content.strip() for content, is_reply in zip(contents, are_replies) if is_reply]
        if replies and self._replies.total() < SAMPLE:
            self._replies[replies[-1]] += 1
            self._places.setdefault(replies[-1], place)
        if any(reply.lower() in NO_REPLIES for reply in replies):
            yield "a reply is None, nan or null, as programs write where there is none; leave such records out"
        before = {message["role"] for message in messages[: are_replies.index(True)]} if any(are_replies) else {"user"}
        if before <= {"system", "developer", "assistant"}:
            yield "a reply is learnt before anybody has asked; check the order of the messages"
        if any(map(all, zip(are_replies, are_replies[1:]))):
            yield 'two replies follow each other, and both are learnt; leave one out, or give it "weight": 0'

    def digest(self, document: bytes, place: str) -> bytes:
        """Of a conversation, in two halves. The first, for parts.is_held_out, is of roles and words alone: whatever else
        messages have, as times or the ids of calls, those with the same words are in the same split with every template, unless a
        record says that it is held out. The
        second, for parts.is_new, is of what is trained on: only what gives the same text is a duplicate."""
        conversation = json.loads(document)
        is_held_out = conversation.pop(HELD_OUT, False)
        digest = self._digest_of(conversation, place)
        return bytes(8) + digest[8:] if is_held_out else digest

    def _digest_of(self, conversation: dict, place: str) -> bytes:
        words = {"messages": [{"role": m["role"], "content": m.get("content", "")} for m in conversation["messages"]]}
        of_words = hashlib.blake2b(in_one_form(words), digest_size=16).digest()
        if conversation == words:
            return of_words
        excluded = [number for number, message in enumerate(conversation["messages"]) if not counts(message)]
        try:
            given = given_beside(**conversation)
            shown = self._shown(self._as_shown(conversation["messages"], given), given)
        except ChatError as error:
            raise InputError(f"{place}: {error}")
        with contextlib.suppress(ChatError, InputError):  # a template may need what the words alone do not have
            if not excluded and self._shown(words["messages"], {}) == shown:
                return of_words
        known = [*shown, excluded] if excluded else shown
        return of_words[:8] + hashlib.blake2b(json.dumps(known).encode(), digest_size=8).digest()

    def text_and_spans(self, messages: list[dict], **beside: object) -> tuple[str, list[Span]]:
        """The text of a conversation, and where in it the targets are."""
        self._refuse_ends_in(messages)
        given, written = given_beside(**beside), messages
        messages = self._as_shown(messages, given)
        text, marked = self._shown(messages, given)
        spans = list(self._assistant_spans(text, messages, given)) if marked is None else marked
        if all(counts(message) for message in written):
            return text, spans
        turn_of = self._turns_of(spans, messages, given)
        return text, [span for span, number in zip(spans, turn_of) if counts(written[number])]

    def _refuse_ends_in(self, messages: list[dict]) -> None:
        """Raises a ChatError if content has the token that ends turns, as text that a template made before: it would end a turn."""
        for number, message in enumerate(messages, 1):
            written = set(self._own_token.findall(message.get("content", "")))
            if written and (end := self.end_of_turn()) is not None and end in map(self._tokenizer.id_of, written):
                raise ChatError(f"the content of message {number} has a token that ends turns ({' '.join(sorted(written))}); take it out, or leave the message out")

    def _turns_of(self, spans: list[Span], messages: list[dict], given: dict) -> list[int]:
        """For each of all targets, the message that it is of. A template may mark several parts of a message."""
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        if len(spans) == len(turns):
            return turns
        template = self._template_for(given)

        def marked(last: int) -> int:
            return len(self._render(template, messages[:last], given, return_assistant_tokens_mask=True)[1]) if last else 0

        found = [number for number in turns for _ in range(marked(number + 1) - marked(number))]
        if len(found) == len(spans):
            return found
        raise ChatError(
            f"the chat template marks {len(spans)} parts with {{% generation %}}, and the assistant speaks {len(turns)} times, so that what "
            "the data exclude from the loss cannot be told apart; mark each message once"
        )

    def _as_shown(self, messages: list[dict], given: dict) -> list[dict]:
        """As the template takes them: the arguments of calls are objects, of which each template writes JSON in its own way, unless it
        is for a text of JSON, since it refuses objects or writes them as Python does."""
        messages = [{key: value for key, value in message.items() if key != TRAIN} for message in messages]
        if not any(message.get("tool_calls") for message in messages):
            return messages
        as_objects, probing, as_texts = (
            [with_arguments(message, change) for message in messages] for change in (arguments_of, lambda call: PROBE, text_of_arguments)
        )
        template = self._template_for(given)
        probed = self._text_or_none(template, probing, given)
        if probed is None:  # it may need those that are there
            probed = self._text_or_none(template, as_objects, given)
        takes_objects = probed is not None and str(PROBE) not in probed
        return as_objects if takes_objects or self._text_or_none(template, as_texts, given) is None else as_texts

    def _shown(self, messages: list[dict], given: dict) -> tuple[str, list[Span] | None]:
        """The text, and the targets if the template marks them."""
        template = self._template_for(given)
        marks = has_marks(template)
        text, marked = self._render(template, messages, given, return_assistant_tokens_mask=marks)
        hidden = [f"{key} of {KWARGS}" for key in given if key != "tools" and not re.search(rf"\b{re.escape(key)}\b", template)]
        hidden += ["tools"] if given.get("tools") and self._text_or_none(template, messages, {**given, "tools": None}) == text else []
        for keys in (*BESIDE_CONTENT, *BESIDE_ROLE):
            hidden += self._hidden_of(template, keys, text, messages, given)
        if unseen := self._unseen(template, text, messages, given):
            hidden.append(f"content of message {unseen[0]} ({messages[unseen[0] - 1]['role']})")
        if hidden:
            raise ChatError(
                f"the chat template shows no {' or '.join(hidden)}; give --chat a template that does, as the model's own, "
                "or leave that out of the data"
            )
        if self._name != "plain":  # it leaves out questions about pictures
            self._refuse_cut(text, messages)
        return text, marked if marks else None

    def _unseen(self, template: str, text: str, messages: list[dict], given: dict) -> list[int]:
        """The numbers of messages with content that leaves no trace in the text. What a template cuts from the front of content, as
        earlier reasoning, is no case of that, nor is what the assistant says to a call of tools if only the last turn shows it."""
        saying = [number for number, message in enumerate(messages, 1) if says_something(message.get("content"))]

        def marked(some: list[int], kept: str, last: int | None = None) -> str | None:
            changed = [
                {**message, "content": kept.format(message["content"], f"zq{number}qz")} if number in some else message
                for number, message in enumerate(messages[:last], 1)
            ]
            return self._text_or_none(template, changed, given)

        def is_unseen(number: int) -> bool:
            if marked([number], "{1}") != text:
                return False
            return not messages[number - 1].get("tool_calls") or marked([number], "{1}", number) == marked([], "", number)

        together = marked(saying, "{}{}") or ""
        # A template may ask what the content is, or show another part of it.
        return [number for number in saying if f"zq{number}qz" not in together and is_unseen(number)]

    def _refuse_cut(self, text: str, messages: list[dict]) -> None:
        """Raises a ChatError if words of content are lost. Earlier reasoning may be, up to its end, and so may words that the assistant
        says to a call of tools. A template may write the words in its own way, as in JSON."""
        contents = ["" if message.get("tool_calls") else message.get("content", "").strip() for message in messages]
        last = 0
        for content in contents:
            if (found := text.find(content, last)) < 0:
                break
            last = found + len(content)
        else:
            return
        kept = [END_OF_REASONING.split(content)[-1].strip() for content in contents if content]
        for number, (message, content) in enumerate(zip(messages, contents), 1):
            if not content:
                continue
            # What another message repeats must be there twice.
            is_whole = text.count(content) >= sum(other.count(content) for other in kept) if content in text else has_words(text, content)
            if not (is_whole or END_OF_REASONING.search(content) and has_words(text, END_OF_REASONING.split(content)[-1])):
                raise ChatError(
                    f"the chat template shows only a part of the content of message {number} ({message['role']}); give --chat a template that "
                    "shows all of it, or leave the record out"
                )

    def _hidden_of(self, template: str, keys: tuple[str, ...], text: str, messages: list[dict], given: dict) -> list[str]:
        """The first of the keys under which messages say something, if the template shows nothing of what is under any."""
        having = [number for number, message in enumerate(messages, 1) if any(says_something(message.get(key)) for key in keys)]
        without = [{name: value for name, value in message.items() if name not in keys} for message in messages]
        if not having or self._text_or_none(template, without, given) != text:
            return []
        # A template may show only the reasoning of the last turn.
        last = having[-1]
        if self._text_or_none(template, without[:last], given) != self._text_or_none(template, messages[:last], given):
            return []
        return [next(key for key in keys if says_something(messages[last - 1].get(key)))]

    def _text_or_none(self, template: str, messages: list[dict], given: dict) -> str | None:
        """None if the template refuses the messages, as it may without the calls to which a tool replies."""
        try:
            return self._render(template, messages, given)[0]
        except TooMuchError:
            raise
        except ChatError:
            return None

    def _template_for(self, given: dict) -> str:
        """As transformers chooses among several."""
        name = "tool_use" if given.get("tools") is not None and "tool_use" in self.texts else "default"
        if name not in self.texts:
            raise InputError(
                f"{self._place}: has the chat templates {', '.join(self.texts)} and none named default; "
                "write one of them into a .jinja file"
            )
        return self.texts[name]

    def _render(self, template: str, messages: list[dict], given: dict, **options) -> tuple[str, list[Span]]:
        # A template may ask for the content of a message that has calls of tools alone.
        messages = [{**message, "content": message.get("content", "")} for message in messages]
        try:
            with limited():
                texts, spans = self._render_template(
                    [messages], **given, chat_template=template, **self._special_tokens, **options
                )
        except (TimeoutError, MemoryError) as error:
            raise TooMuchError(f"the chat template takes too much for the conversation ({reason_of(error)}); give --chat another")
        except self._syntax_error as error:
            raise InputError(f"{self._place}: its chat template cannot be used ({one_line(error)}); give another")
        except Exception as error:  # whatever the template's expressions raise
            raise ChatError(f"the chat template refuses the conversation ({reason_of(error)}); fix it or leave it out")
        if len(texts[0]) > MOST_TEXT:
            raise TooMuchError(f"the chat template makes {len(texts[0]):,} characters of the conversation; give --chat another")
        return texts[0], spans[0] if spans else []

    def _assistant_spans(self, text: str, messages: list[dict], given: dict) -> Iterator[Span]:
        """A turn begins where the prompt for it ends, and ends with the token that the template puts after its words."""
        template = self._template_for(given)
        for number, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            first = self._begin_of_turn(template, text, messages[:number], given)
            so_far, _ = self._render(template, messages[: number + 1], given)
            behind = self._behind_the_words(template, so_far, messages[: number + 1], number, given)
            end = self._end_of_turn(behind, message)
            if text.startswith(so_far):
                last = len(so_far) - len(behind) + len(end)
            else:
                last = self._end_of_earlier_turn(template, text, messages, number, given, end, first)
            if first < 0 or last < first:
                raise ChatError(
                    "the chat template changes what came before when a message is added, so that the assistant's "
                    "words cannot be told apart; mark them in it with {% generation %}"
                )
            yield first, last

    def _end_of_earlier_turn(
        self, template: str, text: str, messages: list[dict], number: int, given: dict, end: str, first: int
    ) -> int:
        """The end of a turn that differs from a last one, without its reasoning or with another token after it; -1 if unknown."""
        behind = self._behind_the_words(template, text, messages, number, given)
        if not behind:  # none of its words is left
            found = text.find(end, max(first, 0)) if end else -1
            last = found + len(end) if found >= 0 else -1
        else:
            if not behind.startswith(end) and self._own_token.search(end) and not messages[number].get("tool_calls"):
                end = self._end_of_turn(behind, messages[number])
            last = len(text) - len(behind) + len(end) if end and behind.startswith(end) else -1
        if number + 1 == len(messages):
            return last
        next_said = {**messages[number + 1], "content": "a" + messages[number + 1].get("content", "")}
        other = self._text_or_none(template, [*messages[: number + 1], next_said, *messages[number + 2 :]], given)
        return last if other is None or last <= len(os.path.commonprefix((text, other))) else -1

    def _begin_of_turn(self, template: str, text: str, before: list[dict], given: dict) -> int:
        """Where the prompt for a turn ends in the text; -1 if the text has what came before the turn in another way."""
        prompt, _ = self._render(template, before, given, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt)
        # The prompt may end with what a written turn does not have, as with the begin of reasoning.
        so_far, _ = self._render(template, before, given)
        if not text.startswith(so_far):
            return -1
        first = len(os.path.commonprefix((prompt, text)))
        for shown in (prompt, text):
            inside = (m.start() for m in self._own_token.finditer(shown, len(so_far)) if m.start() < first < m.end())
            first = next(inside, first)
        return first if first >= len(so_far) else -1

    def _behind_the_words(self, template: str, text: str, messages: list[dict], number: int, given: dict) -> str:
        """The text that the template puts after the words of a message: that stays in the text where they become longer."""
        words = messages[number].get("content", "")
        longer = {**messages[number], "content": words + ("a" if not words.rstrip().endswith("a") else "b")}
        other, _ = self._render(template, [*messages[:number], longer, *messages[number + 1 :]], given)
        return os.path.commonprefix((text[::-1], other[::-1]))[::-1] if other != text else ""

    def _end_of_turn(self, rest: str, message: dict) -> str:
        """`rest` up to its first token of the tokenizer's own, after the last one where it holds calls of tools."""
        ends = [match.end() for match in self._own_token.finditer(rest)]
        if not ends:
            return rest
        return rest[: ends[-1] if message.get("tool_calls") else ends[0]]


def damages_of(messages: list[dict]) -> Iterator[str]:
    """What a few conversations may say and many do not."""
    if any(UNFILLED.search(message.get("content", "")) for message in messages):
        yield "messages have places as {input} that nobody has filled in; fill them"
    said = [(message["role"], message.get("content", "").strip(), counts(message)) for message in messages]
    for (_, question, _), (role, reply, is_learnt) in zip(said, said[1:]):
        if role == "assistant" and is_learnt and question and (reply == question or len(question) >= LONG_QUESTION and reply.startswith(question)):
            yield "a reply repeats what was said before it; leave that out of it"
            return


def given_beside(tools: list | None = None, chat_template_kwargs: dict | None = None, **_: object) -> dict:
    """What a template is given of a checked conversation, beside the messages."""
    return {"tools": tools, **(chat_template_kwargs or {})}


def has_words(text: str, content: str) -> bool:
    """Whether the text has the words of the content in their order."""
    text, last = text.casefold(), 0
    for word in re.findall(r"\w+", TAGS.sub(" ", content.casefold())):
        if (found := text.find(word, last)) < 0:
            return False
        last = found + len(word)
    return True


def counts(message: dict) -> bool:
    """Whether what it says is a target, if it is the assistant's."""
    return message.get(TRAIN, True)


def with_arguments(message: dict, change: Callable[[dict], object]) -> dict:
    """The message with the arguments of its calls changed."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [changed_call(call, change) for call in calls]}


def changed_call(call: object, change: Callable[[dict], object]) -> object:
    """Of a call as OpenAI's, or of its function alone."""
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        return {**call, "function": changed_call(call["function"], change)}
    return {**call, "arguments": change(call)} if isinstance(call, dict) and "arguments" in call else call


def arguments_of(call: dict) -> object:
    """The object that they are, or that their text holds."""
    arguments = call["arguments"]
    if not isinstance(arguments, str):
        return arguments
    with contextlib.suppress(ValueError, RecursionError):
        if isinstance(found := json.loads(arguments or "{}"), dict):
            return found
    raise ChatError(f'the "arguments" of a call of {call.get("name")} are a text that is not JSON of an object; fix it or leave it out')


def text_of_arguments(call: dict) -> object:
    arguments = call["arguments"]
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
