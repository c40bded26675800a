"""The tokenizer's files, which go with token files so that runs on these can keep them."""

from __future__ import annotations

import json
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


def copy_tokenizer(tokenizer_json: Path, folder: Path, special_tokens: dict[str, object]) -> None:
    """Makes `folder`, with the file as tokenizer.json and what lies beside it, durable. Where no tokenizer_config.json does,
    `special_tokens` becomes one, so that `parka generate` and transformers know where documents end."""
    folder.mkdir(exist_ok=True)
    sources = {"tokenizer.json": tokenizer_json} | {name: tokenizer_json.with_name(name) for name in BESIDE}
    for name, source in sources.items():
        if source.is_file():
            with open(source, "rb") as original, open(folder / name, "wb") as copy:
                shutil.copyfileobj(original, copy)
                copy.flush()
                os.fsync(copy.fileno())
    if not (folder / "tokenizer_config.json").exists():
        config = {"tokenizer_class": "PreTrainedTokenizerFast"} | special_tokens
        with open(folder / "tokenizer_config.json", "w", encoding="utf-8") as file:
            json.dump(config, file, indent=2, ensure_ascii=False)
            file.flush()
            os.fsync(file.fileno())
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
