"""The tokenizer's files, which go with token files so that runs on these can keep them."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path

from text_data.chat import ChatTemplate, template_texts, without_marks
from text_data.common import InputError, sync, sync_folder
from text_data.special_tokens import read_object
from text_data.tokenizer import JsonTokenizer

# Besides tokenizer.json; `parka import` and `parka export` carry these, too.
BESIDE = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "tokenizer_config.json",
)

# The tokens that begin and end a document.
ROLES = ("bos_token", "eos_token")


def copy_tokenizer(tokenizer: JsonTokenizer, folder: Path, named: dict[str, object]) -> None:
    """Makes `folder`, with the tokenizer's file as tokenizer.json and what lies beside it, durable. The copies say what begins
    and ends documents, so that `parka generate` and transformers know it: where no tokenizer_config.json lies beside the file
    one is made, and what is `named` by options takes the place of what the files say."""
    folder.mkdir(exist_ok=True)
    sources = {"tokenizer.json": tokenizer.path} | {name: tokenizer.path.with_name(name) for name in BESIDE}
    for name, source in sources.items():
        if source.is_file():
            with open(source, "rb") as original, open(folder / name, "wb") as copy:
                shutil.copyfileobj(original, copy)
                sync(copy)
    config = folder / "tokenizer_config.json"
    if not config.exists():
        write_object(config, {"tokenizer_class": "PreTrainedTokenizerFast"} | tokenizer.document_tokens())
    name_tokens(folder, named, tokenizer)
    sync_folder(folder)


def name_tokens(folder: Path, tokens: dict[str, object], tokenizer: JsonTokenizer) -> None:
    """Gives those tokens of the files in `folder` these names; what ends documents ends a continuation, too."""
    change_object(folder / "tokenizer_config.json", tokens)
    # Counts more than tokenizer_config.json in folders of an older form.
    change_object(folder / "special_tokens_map.json", {name: tokens[name] for name in tokens if name in ROLES})
    generation = folder / "generation_config.json"
    if "bos_token" in tokens:
        change_object(generation, {"bos_token_id": tokenizer.id_of(tokens["bos_token"])})
    if "eos_token" in tokens:
        put_end_first(generation, tokenizer.eos, ends_in(generation))


def keep_bos(folder: Path, tokenizer: JsonTokenizer) -> None:
    """Makes the copy of a tokenizer in `folder` begin texts as documents were begun."""
    path = folder / "tokenizer.json"
    tokenizer.write_bos(path)
    with open(path, "rb") as copy:
        sync(copy)


def keep_chat(template: ChatTemplate, folder: Path, tokenizer: JsonTokenizer) -> None:
    """Gives the copy of a tokenizer in `folder` the template that conversations were made with, and the token that ends a turn
    of the assistant, so that a model trained on them is prompted, and ends, as they do."""
    used = template.texts.get("default")
    if used is not None and used != carried_template(folder):
        write_text(folder / "chat_template.jinja", without_marks(used))
        config = folder / "tokenizer_config.json"
        if "chat_template" in (named := read_object(config)):
            write_object(config, {key: value for key, value in named.items() if key != "chat_template"})
    keep_end_of_turn(template, folder, tokenizer)


def keep_end_of_turn(template: ChatTemplate, folder: Path, tokenizer: JsonTokenizer) -> None:
    """Likewise only the token."""
    end = template.end_of_turn()
    generation = folder / "generation_config.json"
    known = ends_in(generation) or ends_in(tokenizer.path.with_name("config.json"))
    if end is not None and end not in known:
        own = tokenizer.id_of(tokenizer.special_tokens.get("eos_token", ""))
        put_end_first(generation, end, known or [own])
    sync_folder(folder)


def carried_template(folder: Path) -> str | None:
    jinja = folder / "chat_template.jinja"
    with contextlib.suppress(InputError):
        return template_texts(jinja if jinja.is_file() else folder / "tokenizer_config.json").get("default")
    return None


def ends_in(path: Path) -> list[int]:
    """The ids at which a generation_config.json or config.json ends a text."""
    ends = read_object(path).get("eos_token_id")
    return [id for id in (ends if isinstance(ends, list) else [ends]) if isinstance(id, int)]


def put_end_first(generation: Path, end: int, others: list[int | None]) -> None:
    """Also where there is no file: without one a model's config.json would count more than tokenizer_config.json."""
    ends = [end, *(id for id in others if id not in (None, end))]
    write_object(generation, read_object(generation) | {"eos_token_id": ends})


def change_object(path: Path, changes: dict[str, object]) -> None:
    """Gives those names of a JSON file's object other values; a file that there is none of stays so."""
    if changes and path.exists():
        write_object(path, read_object(path) | changes)


def write_object(path: Path, value: dict[str, object]) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def write_text(path: Path, text: str) -> None:
    with open(path, "wb") as file:
        file.write(text.encode())
        sync(file)
