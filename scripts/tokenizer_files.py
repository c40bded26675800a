"""The tokenizer's files, which go with token files so that runs on these can keep them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

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


def copy_tokenizer(tokenizer_json: Path, folder: Path) -> None:
    """Makes `folder`, with the file as tokenizer.json and what lies beside it, durable."""
    folder.mkdir(exist_ok=True)
    sources = {"tokenizer.json": tokenizer_json} | {name: tokenizer_json.with_name(name) for name in BESIDE}
    for name, source in sources.items():
        if source.is_file():
            with open(source, "rb") as original, open(folder / name, "wb") as copy:
                shutil.copyfileobj(original, copy)
                copy.flush()
                os.fsync(copy.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
