"""Turns text into ids, with what a tokenizer puts before and after a document."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from pathlib import Path
from typing import Iterator

import numpy as np

from python_packages import advice

from .common import InputError, hub_advice, refuse_address, telling_failures
from .formats import refuse_pointer
from .special_tokens import bos_of, put_around, set_plain, special_tokens_of, tokenizer_config, tokens_named

# Names of the token that ends a document, where no tokenizer_config.json says which.
EOS_NAMES = ("<|endoftext|>", "</s>", "<|end_of_text|>")

Span = tuple[int, int]  # [first, last) characters of a text


class ByteTokenizer:
    """Ids 0-255 are the bytes themselves, 256 ends a document."""

    name = "bytes"
    sha256 = tokens_checksum = None
    vocab_size = 257
    bos: list[int] = []
    eos = 256
    special_tokens: dict[str, str] = {}
    added_tokens: tuple[str, ...] = ()
    lacking: set[str] = set()
    unknown = None

    def id_of(self, name: str) -> int | None:
        return None

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(text, np.uint8) for text in texts]

    def encode_marked(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of each text, and for each id whether it belongs to a span."""
        result = []
        for text, marked in zip(texts, spans):
            ids = np.frombuffer(text.encode(), np.uint8)
            mask = np.zeros(len(ids), bool)
            for first, last in marked:
                mask[len(text[:first].encode()) : len(text[:last].encode())] = True
            result.append((ids, mask))
        return result


class JsonTokenizer:
    """A tokenizer.json of Hugging Face's tokenizers library. A tokenizer_config.json beside it names the tokens that
    begin and end a document.

    `bos` is what comes before a document, none or more ids; `eos` ends it. `bos_name` and `eos_name` take the place of
    what the tokenizer says; a bos_name "none" is no token. Without `needs_eos`, eos may be None. `lacking` are tokens that
    files beside it name, and that transformers would add.
    """

    def __init__(self, path: Path, bos_name: str | None = None, eos_name: str | None = None, needs_eos: bool = True):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise InputError(f"--tokenizer needs the tokenizers package; {advice('tokenizers')}")
        refuse_pointer(path)
        with telling_failures(f"{path}: is not a tokenizer.json", "give another file"):
            self._tokenizer = Tokenizer.from_file(str(path))
            self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        if self.vocab_size == 0:
            raise InputError(f"{path}: has no tokens; give another file")
        set_plain(self._tokenizer, path)
        self.name, self.path = path.name, path
        self.sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        config = tokenizer_config(path.parent)
        self.special_tokens = special_tokens_of(config)
        self.lacking = {token for token in tokens_named(path.parent, config) if self.id_of(token) is None}
        added = self._tokenizer.get_added_tokens_decoder().values()
        self.added_tokens = tuple(token.content for token in added if not token.content.isspace())
        with self._told_failures():
            self.bos = self._find_bos(bos_name, config.get("add_bos_token"))
        self.eos = self._find_eos(eos_name, needs_eos)
        self._given = {"bos_token": bos_name, "eos_token": eos_name}
        unknown = self.id_of(getattr(self._tokenizer.model, "unk_token", None) or self.special_tokens.get("unk_token", "<unk>"))
        self.unknown = None if unknown in (*self.bos, self.eos) else unknown  # text that the tokenizer has no token for

    @property
    def tokens_checksum(self) -> str:
        """Of all tokens with their ids, by which Parka tells whether they are those of a model."""
        try:
            import xxhash
        except ImportError as error:
            raise InputError(f"needs the Python package xxhash ({error}); {advice('xxhash')}") from error

        content = json.loads(self.path.read_bytes())
        vocabulary = content["model"].get("vocab", {})
        if isinstance(vocabulary, dict):
            tokens = {id: token for token, id in vocabulary.items()}
        else:  # a list of tokens with their scores
            tokens = {id: token for id, (token, _) in enumerate(vocabulary)}
        tokens.update((token["id"], token["content"]) for token in content.get("added_tokens", []))
        return xxhash.xxh3_128_hexdigest("".join(f"{id} {token}\n" for id, token in sorted(tokens.items())).encode())

    def _find_bos(self, name: str | None, add_bos_token: object) -> list[int]:
        if name == "none":
            return []
        if name is not None:
            return [self._named(name, "--bos")]
        if add_bos_token is True:
            self._refuse_lacking("bos_token", "--bos")
        return bos_of(self._tokenizer, self.special_tokens, add_bos_token)

    def _find_eos(self, name: str | None, needed: bool) -> int | None:
        if name is not None:
            return self._named(name, "--eos")
        if needed:
            self._refuse_lacking("eos_token", "--eos")
        for known in (self.special_tokens.get("eos_token", ""), *EOS_NAMES):
            if (token := self.id_of(known)) is not None:
                return token
        if needed:
            raise InputError(
                f"{self.path}: has none of {', '.join(EOS_NAMES)}; name its end-of-document token with --eos"
            )
        return None

    def _refuse_lacking(self, role: str, option: str) -> None:
        if (token := self.special_tokens.get(role)) in self.lacking:
            raise InputError(f"{self.path}: lacks {token}, which files beside it name as its {role}; {self.advice_to_add()}, or give {option}")

    def advice_to_add(self) -> str:
        folder = self.path.parent
        return (
            "transformers gives such tokens ids of their own: have it write the file: "
            f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
        )

    def id_of(self, name: str) -> int | None:
        """Of a token, by its name; None where there is no such token."""
        return self._tokenizer.token_to_id(name)

    def document_tokens(self) -> dict[str, object]:
        """What begins and ends a document, as a tokenizer_config.json says it."""
        tokens: dict[str, object] = {"add_bos_token": bool(self.bos)}
        if len(self.bos) == 1:
            tokens["bos_token"] = self._tokenizer.id_to_token(self.bos[0])
        if self.eos is not None:
            tokens["eos_token"] = self._tokenizer.id_to_token(self.eos)
        return tokens

    def given_tokens(self) -> dict[str, object]:
        """Those of document_tokens() that bos_name and eos_name say."""
        with_bos = {"add_bos_token"} if self._given["bos_token"] is not None else set()
        names = with_bos | {name for name, given in self._given.items() if given is not None}
        return {name: value for name, value in self.document_tokens().items() if name in names}

    def write_bos(self, path: Path) -> None:
        """Makes the post-processor of a copy of the file put `bos` before a text: transformers asks it alone."""
        from tokenizers import Tokenizer, processors

        in_front, behind = put_around(self._tokenizer)
        if in_front == self.bos:
            return
        front, back = ([self._tokenizer.id_to_token(id) for id in ids] for ids in (self.bos, behind))
        single = [*front, "$A", *back]
        pair = [*single, *(f"{piece}:1" for piece in (*front, "$B", *back))]
        ids = [(self._tokenizer.id_to_token(id), id) for id in dict.fromkeys((*self.bos, *behind))]
        copy = Tokenizer.from_file(str(path))  # with the settings of whoever saved it
        old = copy.post_processor
        parts = list(old) if isinstance(old, processors.Sequence) else [old] if old is not None else []
        others = [part for part in parts if part.num_special_tokens_to_add(False) == 0]
        added = [processors.TemplateProcessing(single=single, pair=pair, special_tokens=ids)] if ids else []
        copy.post_processor = processors.Sequence([*others, *added])
        copy.save(str(path))

    def _named(self, name: str, option: str) -> int:
        if (token := self.id_of(name)) is None:
            raise InputError(f"{self.path}: has no token {name}; give {option} another name")
        is_own = name in self.added_tokens or re.fullmatch(r"[<\[|].*\w.*[>\]|]", name)
        if len(name) == 1 or name.isdigit() or not is_own:  # an id where a name is wanted, or a word or a sign of sentences
            raise InputError(f"{self.path}: {name} is a token of ordinary text (id {token}); give {option} the name of a special token")
        return token

    def _told_failures(self) -> contextlib.AbstractContextManager[None]:
        """A tokenizer without a token for what is unknown to it cannot encode every text."""
        return telling_failures(f"{self.path}: cannot tokenize a text", "give a tokenizer with an unknown token or with bytes")

    def encode(self, texts: list[bytes]) -> list[np.ndarray]:
        """Ids of each text, each tokenized as a whole, without bos and eos."""
        decoded = [text.decode("utf-8") for text in texts]
        with self._told_failures():
            encodings = self._tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        return [np.array(encoding.ids, np.uint32) for encoding in encodings]

    def encode_marked(self, texts: list[str], spans: list[list[Span]]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Ids of each text, and for each id whether a part of it belongs to a span."""
        with self._told_failures():
            encodings = self._tokenizer.encode_batch(texts, add_special_tokens=False)
        result = []
        for encoding, marked in zip(encodings, spans):
            offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
            mask = np.zeros(len(offsets), bool)
            for first, last in marked:
                mask |= (offsets[:, 0] < last) & (offsets[:, 1] > first)
            result.append((np.array(encoding.ids, np.uint32), mask))
        return result


def tokenizer_file(name: str) -> str:
    """The value of --tokenizer: bytes, or the path of a tokenizer.json, which may be given by its folder."""
    if name == "bytes":
        return name
    path = Path(name)
    refuse_address(path)
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file() and file.suffix != ".model":
        return str(file)
    if not os.path.exists(path):
        advice = hub_advice(name, "tokenizer.json tokenizer_config.json", "--tokenizer ")
        raise InputError(f"{path}: no such tokenizer file; {advice or 'give bytes, or the path of a tokenizer.json'}")
    if found := sorted(path.glob("snapshots/*/tokenizer.json")):
        raise InputError(f"{path}: is a folder of the hub's cache; give the tokenizer in it, {found[-1]}")
    folder = file.parent
    raise InputError(
        f"{path}: a tokenizer.json is needed{'' if file == path else ', and the folder has none'}; where the model has one, fetch it; "
        f"transformers makes one: AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
    )


def make_tokenizer(name: str, bos_name: str | None = None, eos_name: str | None = None, needs_eos: bool = True):
    """Of --tokenizer, --bos and --eos."""
    if name != "bytes":
        return JsonTokenizer(Path(name), bos_name, eos_name, needs_eos)
    for option, given in (("--bos", bos_name), ("--eos", eos_name)):
        if given is not None:
            raise InputError(f"{option} names a token of a tokenizer.json; the byte tokenizer ends documents with id 256")
    return ByteTokenizer()


def padded_vocab_size(vocab_size: int) -> int:
    """FP8 GEMMs want multiples of 16; with large vocabularies 128 costs nothing and fills whole tiles."""
    multiple = 16 if vocab_size <= 1024 else 128
    return -(-vocab_size // multiple) * multiple
