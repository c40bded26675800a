"""Checks the conversations of records, and brings them into one form for chat templates."""

from __future__ import annotations

import json
import re

from .common import InputError, one_line

# Lists of messages in other forms, for advice.
OTHER_FORMS = {"conversations": "ShareGPT's", "instruction": "Alpaca's"}


def conversation_of(record: object, place: str, is_utf8: bool = True) -> bytes:
    """The checked messages of a record {"messages": [{"role": ..., "content": ...}, ...]}, with its tools if it has any,
    as JSON in one form. Keys without a value are left out, as tables have them."""
    messages = record.get("messages") if isinstance(record, dict) else None
    if not isinstance(messages, list) or not messages:
        forms = [form for key, form in OTHER_FORMS.items() if isinstance(record, dict) and key in record]
        advice = f"it looks like {forms[0]} form, for which" if forms else "for other forms"
        raise InputError(
            f'{place}: has no list "messages" with a message in it; --chat wants one conversation per record; {advice} docs/data.md has '
            "commands of jq (Fine-tuning: masks and documents)"
        )
    kept = {"messages": [message_of(m, f"{place}: message {number}") for number, m in enumerate(messages, 1)]}
    if (tools := list_of(record, "tools", f"{place}: its")) is not None:
        kept["tools"] = tools
    return in_one_form(kept, is_utf8)


def message_of(message: object, place: str) -> dict:
    """With content in one text, and calls of tools as a list."""
    if not isinstance(message, dict):
        raise InputError(f'{place} has no strings "role" and "content"; fix it or leave it out')
    kept = {key: value for key, value in message.items() if value is not None}
    if isinstance(kept.get("content"), list):
        kept["content"] = text_of_parts(kept["content"], place)
    if kept.get("tool_calls"):
        kept["tool_calls"] = list_of(kept, "tool_calls", f"{place}: its") or []
    # A call of tools may have no words.
    keys = ("role",) if kept.get("tool_calls") and "content" not in kept else ("role", "content")
    if not all(isinstance(kept.get(key), str) for key in keys):
        raise InputError(f'{place} has no strings "role" and "content"; fix it or leave it out')
    return kept


def text_of_parts(parts: list, place: str) -> str:
    """Of content as a list of {"type": "text", "text": ...}, one behind the other, as templates write them that take lists."""
    for number, part in enumerate(parts, 1):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"of type {kind}" if isinstance(kind, str) else kind_of(part)
            raise InputError(f'{place} has content in parts, and part {number} is {what}, not {{"type": "text", "text": ...}}; leave it out')
    return "".join(part["text"] for part in parts)


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
