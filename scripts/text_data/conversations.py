"""Checks the conversations of records, and brings them into one form for chat templates."""

from __future__ import annotations

import contextlib
import difflib
import functools
import itertools
import json
import re
from typing import Iterator

from .common import InputError, one_line, printable

# Keys under which other tools say whether a message, or a whole record, counts in the loss. Their value is true or false, or 1 or 0.
COUNTS = ("weight", "loss_weight", "loss_scale", "loss", "loss_mask", "step_loss_mask", "train", "training", "trainable")
MASKED = "masked"  # true where it does not count
PARTS_COUNT = ("train_detail", "training_detail")  # of parts of a message
TARGETS_KEYS = (*COUNTS, MASKED, *PARTS_COUNT)
# Words of other keys that seem to say so, of which it is not known whether true excludes.
UNCLEAR = {"ignore", "skip", "mask", "masks", "masked", "weight", "weights", "loss", "train", "training", "trainable", "kto"}
# Words of keys by which a record or a message is not to be learnt: those where they say something, these where they are false.
OUT = {"rejected", "deleted", "removed", "exclude", "excluded", "discarded", "invalid", "freeze", "frozen"}
IN = {"label", "chosen", "accepted", "approved", "keep", "valid", "learn", "learnable", "supervise", "supervised", "target", "predict"}
# Words of keys that have no others, which say the same where they are false and where they are true.
USED, UNUSED = {"is", "use", "used", "active", "enable", "enabled", "include", "included"}, {"is", "disabled", "inactive", "unused"}
STATUS = {"status", "state", "verdict"}  # of keys whose value may be one of OUT
SYSTEM = {"system", "sys", "prompt", "message", "instruction", "instructions"}  # words of keys with a system prompt
# The key of a checked message of which nothing is a target; the others do not have it.
TRAIN = "train"
# Keys that other tools read beside the messages of a record, or in one message. They are not read here, so they are refused.
UNREAD = ("system", "system_prompt", "functions", "documents", "context", "attachments", "image", "images", "video", "videos", "audio", "audios")
# The key of a record with what a template is given beside the messages, and what nobody gives it there.
KWARGS = "chat_template_kwargs"
NO_KWARGS = re.compile("messages|tools|documents|conversations|chat_template|return_assistant_tokens_mask|continue_final_message|add_generation_prompt|.*_token")
# The key of a checked conversation to evaluate on, as the record says; others do not have it.
HELD_OUT = "held_out"
CHECKED_WORDS = UNCLEAR | OUT | IN | STATUS | (USED | UNUSED) - {"is"} | {"system", "sys", "split"}
# Keys that a message may have beside its content; transformers takes one of the names of reasoning for another.
BESIDE_CONTENT = (
    ("tool_calls",), ("function_call",), ("refusal",),
    ("reasoning_content", "thinking", "reasoning", "reasoning_details", "reasoning_text", "thinking_content", "thinking_blocks", "thoughts",
     "thought", "think", "cot", "chain_of_thought"),
)
# Keys of a message by which a template shows something else than its content.
BESIDE_ROLE = (("channel",), ("text",), ("prefix",))
MESSAGE_KEYS = ("role", "content", *itertools.chain(*BESIDE_CONTENT))
ROLES = ("system", "developer", "user", "assistant", "tool", "function")
OF_ASSISTANT = ("model", "gpt", "bot", "ai", "chatbot")  # what others call it
# Lists of messages in other forms, for advice.
OTHER_FORMS = {"conversations": "ShareGPT's", "instruction": "Alpaca's"}


def conversation_of(record: object, place: str, is_utf8: bool = True, holds_out: bool = False) -> bytes:
    """The checked messages of a record {"messages": [{"role": ..., "content": ...}, ...]}, with its tools and arguments of the template if
    it has any, as JSON in one form. Keys without a value are left out, as tables have them. If the preparation `holds_out` records,
    those of another split than train are among them."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if isinstance(messages, str):
        raise InputError(f"{place}: its \"messages\" are a text, not a list; where that is JSON, make a list of it: jq -c '.messages |= fromjson'")
    if not isinstance(messages, list) or not messages:
        forms = [form for key, form in OTHER_FORMS.items() if isinstance(record, dict) and key in record]
        advice = f"it looks like {forms[0]} form, for which" if forms else "for other forms"
        raise InputError(
            f'{place}: has no list "messages" with a message in it; --chat wants one conversation per record; {advice} docs/data.md has '
            "commands of jq (Fine-tuning: masks and documents)"
        )
    is_held_out = any(is_of_other_split(words_of(key), value) for key, value in record.items())
    if is_held_out and not holds_out:
        raise InputError(f'{place}: the record has a "split" other than train; leave it out, or give --eval-fraction, which holds it out')
    refuse_unread(record, f"{place}: the record")
    is_for_training = is_target(record, f"{place}: the record", may_be=True)
    kept = {"messages": [message_of(m, f"{place}: message {number}", is_for_training) for number, m in enumerate(messages, 1)]}
    if (tools := list_of(record, "tools", f"{place}: its")) is not None:
        kept["tools"] = tools
    if kwargs := kwargs_of(record, place):
        kept[KWARGS] = kwargs
    if is_held_out:
        kept[HELD_OUT] = True
    return in_one_form(kept, is_utf8)


def kwargs_of(record: dict, place: str) -> dict:
    """What the template is given beside the messages: an object, or a text of JSON with one. Tables have null for keys of other rows."""
    kwargs = record.get(KWARGS) or {}
    with contextlib.suppress(ValueError, RecursionError):
        kwargs = (json.loads(kwargs) or {}) if isinstance(kwargs, str) else kwargs
    if not isinstance(kwargs, dict) or any(NO_KWARGS.fullmatch(key) for key in kwargs):
        raise InputError(f'{place}: its "{KWARGS}" are no object of arguments that a template may be given; fix them or leave them out')
    return {key: value for key, value in kwargs.items() if value is not None}


def message_of(message: object, place: str, is_for_training: bool) -> dict:
    """With content in one text, calls of tools as a list, and TRAIN false where it is no target though the assistant's."""
    if not isinstance(message, dict):
        raise InputError(f'{place} has no strings "role" and "content"; fix it or leave it out')
    kept = {key: value for key, value in message.items() if value is not None and key not in TARGETS_KEYS}
    if isinstance(kept.get("content"), list):
        kept["content"] = text_of_parts(kept["content"], place)
    if kept.get("tool_calls"):
        kept["tool_calls"] = list_of(kept, "tool_calls", f"{place}: its") or []
    # A call of tools may have no words.
    keys = ("role",) if kept.get("tool_calls") and "content" not in kept else ("role", "content")
    if not all(isinstance(kept.get(key), str) for key in keys):
        raise InputError(f'{place} has no strings "role" and "content"; fix it or leave it out')
    refuse_unread(message, place)
    refuse_misspelt(kept["role"], place)
    is_of_assistant = kept["role"] == "assistant"
    counts = is_target(message, place, may_be=is_of_assistant) and is_for_training and not is_empty(kept)
    return kept if counts or not is_of_assistant else kept | {TRAIN: False}


def is_empty(message: dict) -> bool:
    """Whether nothing is said, from which a model would learn to end its turn at once."""
    return not any(says_something(message.get(key)) for key in ("content", *itertools.chain(*BESIDE_CONTENT)))


def says_something(value: object) -> bool:
    return bool(value.strip() if isinstance(value, str) else value)


def empty_answers(document: bytes) -> int:
    """The number of replies in a checked conversation that say nothing."""
    if f'"{TRAIN}": false'.encode() not in document:
        return 0
    return sum(message["role"] == "assistant" and is_empty(message) for message in json.loads(document)["messages"])


def says_held_out(document: bytes) -> bool:
    return document.endswith(f'"{HELD_OUT}": true}}'.encode())  # it is the last key


@functools.lru_cache
def words_of(key: str) -> frozenset[str]:
    """"is_train", "isTrain" and "Train" have the word train."""
    return frozenset(re.findall("[a-z]+", re.sub("([a-z])([A-Z])", r"\1 \2", key).lower()))


def is_checked(key: str) -> bool:
    """Whether what a record has under the key is read, or may be a reason to refuse it."""
    return key in ("messages", "tools", KWARGS, *UNREAD, *TARGETS_KEYS) or not CHECKED_WORDS.isdisjoint(words_of(key))


def unread_keys(record: dict) -> Iterator[str]:
    """What says something in a record that was accepted and is not read; of messages a template may still read it."""
    yield from (f"{key} of records" for key in record if not is_checked(key))
    for message in record["messages"]:
        yield from (f"{key} of messages" for key in message if key not in (*MESSAGE_KEYS, *TARGETS_KEYS) and message[key] not in (None, "", [], {}))


def refuse_unread(said: dict, place: str) -> None:
    """A record or a message with pictures, say, with a system prompt that is no message, or with a key by which it is not to be learnt."""
    for key in said:
        words = words_of(key)
        is_system = words <= SYSTEM and not words.isdisjoint(("system", "sys"))
        if (is_system or key in UNREAD) and said[key]:
            advice = {"documents": "write them into a message, or leave it out", "context": "write it into a message, or leave it out"}
            told = "make it the first message, or leave it out" if is_system else advice.get(key, "leave it out, or the record")
            raise InputError(f'{place} has "{key}", which is not read; {told}')
        if key not in TARGETS_KEYS and not CHECKED_WORDS.isdisjoint(words) and excludes(words, said[key]):
            value = json.dumps(said[key], default=str)[:40]
            raise InputError(f'{place} has "{printable(key)}": {value}, as what is not to be learnt has; leave the record out, or the key')


def excludes(words: frozenset[str], value: object) -> bool:
    """Whether the value of a key with these words may mean that nothing is to be learnt, or something else than the messages."""
    is_preferred = "chosen" in words and isinstance(value, (str, list, dict)) and bool(value)
    is_out = not words.isdisjoint(STATUS) and isinstance(value, str) and value.strip().lower() in OUT
    says_in, says_out = not words.isdisjoint(IN) or words <= USED, not words.isdisjoint(OUT) or words <= UNUSED
    return is_preferred or is_out or (says_out and bool(value)) or (says_in and value is False)


def is_of_other_split(words: frozenset[str], value: object) -> bool:
    return "split" in words and isinstance(value, str) and not (value.strip() or "train").lower().startswith("train")


def is_unclear(key: str, value: object) -> bool:
    """Whether it may say what counts in the loss, in a way that is not read."""
    words = words_of(key)
    if key in TARGETS_KEYS or value is None or "id" in words:
        return False
    is_alone = words <= UNCLEAR or key.lower() in TARGETS_KEYS
    return is_alone or not (words.isdisjoint(UNCLEAR - {"ignore", "skip"}) or isinstance(value, (str, dict)))


def refuse_misspelt(role: str, place: str) -> None:
    """A role that stands for a usual one, whose words would be shown as those of somebody else and never learnt. Others are templates' own."""
    if role in ROLES:
        return
    plain = role.strip().lower()
    meant = "assistant" if plain in OF_ASSISTANT else plain if plain in ROLES else next(iter(difflib.get_close_matches(plain, ROLES, 1, 0.8)), None)
    if meant is not None:
        raise InputError(f'{place} has the role "{role}"; write "{meant}"')


def text_of_parts(parts: list, place: str) -> str:
    """Of content as a list of {"type": "text", "text": ...}, one after the other, as templates write them that take lists."""
    for number, part in enumerate(parts, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {kind}" if isinstance(kind, str) else kind_of(part)
            raise InputError(f'{place} has content in parts, and part {number} is {what}, not {{"type": "text", "text": ...}}; leave it out')
        if not is_target(part, f"{place}, part {number},", may_be=True):
            raise InputError(f"{place} has a part {number} that does not count in the loss, and all of a message counts or none; leave it out")
    return "".join(part["text"] for part in parts)


def is_target(said: dict, place: str, may_be: bool) -> bool:
    """Whether a message or a record counts in the loss as its keys say, if any of them does. Where it cannot be a target, as what a
    user says, none may say so."""
    for key in PARTS_COUNT:
        if said.get(key):
            raise InputError(f'{place} has "{key}", which is of parts of a message, and all of one counts or none; leave the key out')
    for key in said:
        if not UNCLEAR.isdisjoint(words_of(key)) and is_unclear(key, said[key]):
            raise InputError(f'{place} has "{key}", which may say what counts in the loss and is not read; write "weight", 0 or 1, or leave it out')
    answers = {key: flag_of(said[key], key, place) for key in COUNTS if said.get(key) is not None}
    if said.get(MASKED) is not None:
        answers[MASKED] = not flag_of(said[MASKED], MASKED, place)
    if len(set(answers.values())) > 1:
        keys = " and ".join(f'"{key}"' for key in answers)
        raise InputError(f"{place} has {keys}, which contradict each other; leave one of them out")
    for key, answer in answers.items():
        if answer and not may_be:
            value = json.dumps(said[key])
            raise InputError(
                f'{place} has "{key}": {value}, but only what the assistant says can be a target; leave the key out of other messages'
            )
    return all(answers.values())


def flag_of(value: object, key: str, place: str) -> bool:
    if isinstance(value, (bool, int, float)) and value in (0, 1):
        return bool(value)
    raise InputError(
        f'{place} has "{key}": {json.dumps(value, default=str)}, and a message counts in the loss or does not; give true or false, or '
        "leave the key out, or rename it if it says something else"
    )


def list_of(said: dict, key: str, place: str) -> list | None:
    """The value of the key: a list, or a text of JSON with one, as tables have where the elements are of different forms."""
    value = said.get(key)
    try:
        if isinstance(value, str):
            value = json.loads(value) if value.strip() else None
    except (ValueError, RecursionError) as error:
        raise InputError(f'{place} "{key}" are a text that is not JSON ({one_line(error)}); give a list, or JSON of one')
    if value is not None and not isinstance(value, list):
        raise InputError(f'{place} "{key}" are {kind_of(value)}; give a list, or JSON of one')
    return value


def in_one_form(conversation: dict, is_utf8: bool = True) -> bytes:
    return bytes_of(json.dumps(conversation, ensure_ascii=False), is_utf8)


def bytes_of(text: str, is_utf8: bool) -> bytes:
    """JSON can spell half of a surrogate pair, which no UTF-8 text can hold: it becomes a question mark. Without `is_utf8`
    U+DC80 to U+DCFF become the bad bytes that they stand for."""
    if is_utf8:
        return text.encode("utf-8", "replace")
    return re.sub(r"[\ud800-\udc7f\udd00-\udfff]", "?", text).encode("utf-8", "surrogateescape")


def kind_of(value: object) -> str:
    """What a message calls a value that is not text. A table has more types than JSON, as dates and bytes."""
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "an array",
             dict: "an object"}
    return names.get(type(value), f"of type {type(value).__name__}")
