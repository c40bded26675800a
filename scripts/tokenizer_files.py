"""The tokenizer's files, which go with token files so that runs on these can keep them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from text_data.common import sync, sync_folder
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
        old = read_object(generation)
        ends = old.get("eos_token_id")
        ends = ends if isinstance(ends, list) else [ends]
        others = [id for id in ends if isinstance(id, int) and id != tokenizer.eos]
        # Also where there was no file: without one a model's config.json would count more than tokenizer_config.json.
        write_object(generation, old | {"eos_token_id": [tokenizer.eos, *others]})


def change_object(path: Path, changes: dict[str, object]) -> None:
    """Gives those names of a JSON file's object other values; a file that there is none of stays so."""
    if changes and path.exists():
        write_object(path, read_object(path) | changes)


def write_object(path: Path, value: dict[str, object]) -> None:
    with open(path, "wb") as file:
        file.write((json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())
        sync(file)
