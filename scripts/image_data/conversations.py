"""Reads conversations about images in LLaVA's form: a JSON array, or JSON Lines, of

    {"id": "7", "image": "train/7.jpg", "conversations": [{"from": "human", "value": "<image>\\nWhat is this?"},
                                                          {"from": "gpt", "value": "A boat."}]}

`image` is a name relative to the folder of images, or a list of them; a sample without it is text only, and one with `images`
or `video` in its place is refused. Each <image> in what a human says stands for one image, in order.
"""

from __future__ import annotations

import codecs
import json
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from text_data.common import InputError, one_line
from text_data.conversations import TRAIN, is_empty, is_target
from text_data.readers import InputFile, KeyTwice, Reading, object_of, unreadable

PLACEHOLDER = "<image>"
ROLES = {"human": "user", "gpt": "assistant", "system": "system"}
KEYS_NOT_READ = ("images", "video")  # under which other data sets have what is to be seen


@dataclass(frozen=True)
class Sample:
    place: str  # file and id, for messages
    document: bytes  # {"messages": [...], "images": [...]} as JSON in one form

    def images(self) -> list[str]:
        return json.loads(self.document)["images"]


@dataclass(frozen=True)
class Conversion:
    """What is changed in every conversation, and what none may have."""

    system: str | None  # a system message for those without one
    max_images: float  # of a sample
    images_first: bool  # the images of a turn go to its front, with a line end after each


def read_records(path: Path) -> Iterator[tuple[str, object]]:
    """(place, record)"""
    try:
        with InputFile(path, Reading()).content() as file:
            first, number = file.readline().removeprefix(codecs.BOM_UTF8), 1
            while first and not first.strip():
                first, number = file.readline(), number + 1
            if first.lstrip().startswith(b"["):
                records = json.loads(first + file.read(), object_pairs_hook=object_of)
                yield from ((f"{path}: sample {number} of the array", record) for number, record in enumerate(records, 1))
                return
            while first:
                if first.strip():
                    yield f"{path}:{number}", json.loads(first, object_pairs_hook=object_of)
                first, number = file.readline(), number + 1
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is neither a JSON array nor JSON Lines ({one_line(error)}); fix it")
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error)


def sample_of(record: object, place: str, conversion: Conversion) -> Sample:
    """Raises InputError for what is no conversation about images, with its id."""
    if not isinstance(record, dict):
        raise InputError(f"{place}: is no object; give one for each sample")
    try:
        if "id" in record:
            place = f"{place}, id {record['id']}"
        images = images_of(record, place)
        messages = messages_of(record, place)
    except KeyTwice as error:
        raise InputError(f"{place}: {error}; keep one of them")
    if conversion.system is not None and messages[0]["role"] != "system":
        messages.insert(0, {"role": "system", "content": conversion.system})
    found = sum(m["content"].count(PLACEHOLDER) for m in messages if m["role"] == "user")
    if any(PLACEHOLDER in m["content"] for m in messages if m["role"] != "user"):
        raise InputError(f"{place}: has {PLACEHOLDER} outside of what the human says; move it there")
    if found != len(images):
        raise InputError(f"{place}: has {len(images)} images, but {found} {PLACEHOLDER} in its text; make them as many")
    if found > conversion.max_images:
        raise InputError(f"{place}: has {found} images, more than --max-images {conversion.max_images}; leave it out")
    if conversion.images_first:
        for message in messages:
            message["content"] = with_images_first(message["content"])
    content = {"messages": messages, "images": images}
    return Sample(place, json.dumps(content, ensure_ascii=False).encode("utf-8", "replace"))


def images_of(record: dict, place: str) -> list[str]:
    images = record.get("image")
    images = [] if images is None else images if isinstance(images, list) else [images]
    if not images and (key := key_not_read(record)) is not None:
        raise InputError(f'{place}: has "{key}" and no "image", which is the key that is read; rename it or leave it out')
    if not all(isinstance(name, str) and name and "\0" not in name for name in images):
        raise InputError(f'{place}: its "image" is neither a file name nor a list of them; fix it or leave it out')
    if other := next(filter(lies_elsewhere, images), None):
        raise InputError(f'{place}: its "image" {other} does not lie in --image-folder; name it relative to that, without ".."')
    return images


def lies_elsewhere(name: str) -> bool:
    """Whether a name leaves the folder that it is in. Links in the folder may: whoever made the folder made them."""
    return name.startswith("/") or ".." in name.split("/")


def key_not_read(record: dict) -> str | None:
    """Where a record without "image" has pictures or a video all the same: it would become text about what nobody sees."""
    return next((key for key in KEYS_NOT_READ if record.get(key)), None)


def messages_of(record: dict, place: str) -> list[dict]:
    turns = record.get("conversations")
    fine = isinstance(turns, list) and all(
        isinstance(t, dict) and t.get("from") in ROLES and isinstance(t.get("value"), str) for t in turns
    )
    if not fine:
        raise InputError(
            f'{place}: has no list "conversations" of objects with "from" ({", ".join(ROLES)}) and a text "value"; fix it'
        )
    is_for_training = is_target(record, f"{place}: the record", may_be=True)
    messages = [message_of(turn, f"{place}: turn {number}", is_for_training) for number, turn in enumerate(turns, 1)]
    said = 1 if messages and messages[0]["role"] == "system" else 0
    if len(messages) > said and messages[said]["role"] == "assistant":
        del messages[said]  # as LLaVA does
    roles = [message["role"] for message in messages[said:]]
    if not roles or any(role != ("user", "assistant")[number % 2] for number, role in enumerate(roles)):
        raise InputError(f"{place}: human and gpt do not speak in turn; fix it or leave it out")
    return messages


def message_of(turn: dict, place: str, is_for_training: bool) -> dict:
    message = {"role": ROLES[turn["from"]], "content": turn["value"]}
    is_of_assistant = message["role"] == "assistant"
    counts = is_target(turn, place, may_be=is_of_assistant) and is_for_training and not is_empty(message)
    return message if counts or not is_of_assistant else message | {TRAIN: False}


def with_images_first(text: str) -> str:
    count = text.count(PLACEHOLDER)
    return f"{PLACEHOLDER}\n" * count + text.replace(PLACEHOLDER, "").strip() if count else text
