"""Special tokens of a tokenizer's folder, for prepared text and for prompts. Needs no package."""

from __future__ import annotations

import json
from pathlib import Path

from .common import InputError, one_line
from .formats import refuse_no_content


def tokenizer_config(folder: Path) -> dict:
    """What the tokenizer_config.json of a folder says, with the special_tokens_map.json of folders of an older form."""
    config = read_object(folder / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | read_object(folder / "special_tokens_map.json")


def read_object(path: Path) -> dict:
    """The object in a JSON file, empty where there is no such file."""
    refuse_no_content(path)
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); fix it or move it away")
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: is not JSON ({one_line(error)}); fix it or move it away")
    return value if isinstance(value, dict) else {}


def special_tokens_of(config: dict) -> dict[str, str]:
    """bos_token, eos_token and so on of a tokenizer_config.json, each a string or an object with one."""
    found = {}
    for key, token in config.items():
        if key.endswith("_token"):
            token = token.get("content") if isinstance(token, dict) else token
            if isinstance(token, str):
                found[key] = token
    return found


def tokens_named(folder: Path, config: dict) -> set[str]:
    """All tokens that the files of a folder name beside those in its tokenizer.json: transformers adds those that are not there."""
    listed = list(read_object(folder / "added_tokens.json"))
    for key in ("added_tokens_decoder", "additional_special_tokens", "extra_special_tokens"):
        value = config.get(key)
        listed += value.values() if isinstance(value, dict) else value if isinstance(value, list) else []
    texts = (token.get("content") if isinstance(token, dict) else token for token in listed)
    return {token for token in (*texts, *special_tokens_of(config).values()) if isinstance(token, str)}


def put_around(tokenizer) -> tuple[list[int], list[int]]:
    """The tokens that the post-processor puts before and after a text."""
    encoding = tokenizer.encode("a", add_special_tokens=True)
    is_special = encoding.special_tokens_mask
    first = [*is_special, 0].index(0)
    last = len(is_special) - [*is_special[::-1], 0].index(0)
    return encoding.ids[:first], encoding.ids[max(first, last) :]


def set_plain(tokenizer, path: Path) -> None:
    """A tokenizer.json may carry the settings of whoever saved it, which would damage text."""
    tokenizer.no_truncation()
    tokenizer.no_padding()
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise InputError(f"{path}: its model.dropout is {dropout:g}, which makes other tokens of one text each time; set it to null")


def bos_of(tokenizer, special_tokens: dict[str, str], add_bos_token: object) -> list[int]:
    """What begins a text: as `add_bos_token` of tokenizer_config.json says, or else what the post-processor puts there."""
    in_front, _ = put_around(tokenizer)
    if not isinstance(add_bos_token, bool):
        return in_front
    if not add_bos_token:
        return []
    own = tokenizer.token_to_id(special_tokens.get("bos_token", ""))
    return in_front if own is None or own in in_front else [own]
