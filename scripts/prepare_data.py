#!/usr/bin/env python3
"""Turns text into token files for Parka.

    parka prepare corpus/ --out data/corpus --eval-fraction 0.01
    parka prepare dolma/*.json.gz --jsonl-field text --tokenizer tokenizer.json --workers 8 --out data/dolma

    parka prepare chats.jsonl --chat chatml --tokenizer tokenizer.json --sequence-length 4096 --out data/chats

Inputs are files, or folders that are searched recursively in sorted order (hidden names and links to folders are left
out). A text file is one document, or several with --split-bytes. With --jsonl-field every input holds records, and the
text in this field of each is a document: JSON Lines, Parquet, or a data set that Hugging Face's datasets library saved to
disk. Text and JSON Lines may be compressed (.gz, .zst). A document gets the tokens before and after it that its tokenizer
asks for, see --bos and --eos; every document is followed by the end-of-document id.

With --chat each record is a conversation, {"messages": [{"role": "user", "content": "..."}, ...]}. A template (chatml,
llama2, llama3, a chat_template.jinja, a tokenizer_config.json, or the folder of a model with one of them) makes text of
it, of which only what the assistant says is a target. Whole conversations are packed into sequences of --sequence-length
tokens; longer ones are cut there.

Writes into the folder --out, which must not exist yet or be empty:
    train-00000.npy, ...   raw little-endian uint16 or uint32 ids, no header (the naming and form of OLMo)
    eval-00000.npy, ...    the same for held-out documents, with --eval-fraction
    train-00000.npy.mask   with --chat: a byte per token: 1 for a target, plus 2 for the first of a conversation
    data.json              what was made: counts, vocabulary, tokenizer, dtype, a checksum of each file
    tokenizer/             a copy of the tokenizer.json and what lies beside it, for `parka generate` and `parka export`;
                           with --chat its template and the token that ends a turn, too

The folder appears whole or not at all. Until then the tokens of finished files lie in the hidden folder .NAME.partial
beside it, and take as much room again. If a run is stopped, the same command continues: it reads only those files again
that were not finished (small files count as one up to 4 MiB). Remove .NAME.partial to start over.

Identical documents are kept once, and whether a document is held out depends on its content alone: neither another
order, other names nor more data move it between train and eval. --workers changes nothing in the files.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import collections
import json
import re
import sys
from pathlib import Path
from typing import Iterable

sys.path.insert(0, str(Path(__file__).resolve().parent))
from python_packages import HelpFormatter, command_name, require  # noqa: E402

require("numpy", "xxhash")
import numpy as np  # noqa: E402

from script_exit import print_last, run_script  # noqa: E402
from text_data import chat, parts  # noqa: E402
from text_data.common import InputError, Parser, evaluating, printable  # noqa: E402
from text_data.packing import ChatSplit  # noqa: E402
from text_data.partial import Partial, new_folder  # noqa: E402
from text_data.readers import MAX_DOCUMENT_BYTES, Reading, find_files  # noqa: E402
from text_data.token_writer import TokenWriter  # noqa: E402
from text_data.tokenizer import EOS_NAMES, padded_vocab_size, tokenizer_file  # noqa: E402
from tokenizer_files import copy_tokenizer, keep_bos, keep_chat  # noqa: E402

MOST_UNKNOWN = 0.01  # of tokens
USUAL_SEQUENCE = 2048  # the default of data.sequence_length


def print_line(text: str) -> None:
    print(f"{command_name().removesuffix('.py')}: {text}", file=sys.stderr, flush=True)


class Output:
    """Takes the documents of parts, in order, into the files of train and eval."""

    def __init__(self, options: argparse.Namespace, folder: Path, maker: parts.PartMaker):
        self._options, self._dtype = options, maker.dtype
        self._seen: set[int] = set()
        self._left = options.max_tokens if options.max_tokens is not None else sys.maxsize
        self.counts: collections.Counter = collections.Counter()
        self.splits = {}
        for split in ("train", "eval"):
            if options.chat is None:
                self.splits[split] = TokenWriter(folder, split, options.tokens_per_file)
            else:
                self.splits[split] = make_chat_split(folder, split, options, maker)

    def take(self, all_parts: Iterable[parts.Part]) -> None:
        for part in all_parts:
            self.counts.update(part.counts)
            self._take_part(part)
            if self._left == 0:
                break
        for split in self.splits.values():
            split.finish()

    def _take_part(self, part: parts.Part) -> None:
        ids = part.tokens(".ids", self._dtype)
        marks = part.tokens(".marks", "u1") if self._options.chat is not None else None
        last = 0
        for digest, length in zip(map(bytes, part.digests), part.lengths.tolist()):
            first, last = last, last + length
            if not self._options.keep_duplicates and not parts.is_new(digest, self._seen):
                self.counts["duplicate_documents"] += 1
                continue
            split = self.splits["eval" if parts.is_held_out(digest, self._options.eval_fraction) else "train"]
            if marks is not None:
                split.add(ids[first:last], marks[first:last])
                continue
            taken = ids[first : min(last, first + self._left)]
            split.write(taken)
            split.documents += 1
            self._left -= len(taken)
            if self._left == 0:
                return


def make_chat_split(folder: Path, split: str, options: argparse.Namespace, maker: parts.PartMaker) -> ChatSplit:
    length = options.sequence_length
    tokens_per_file = max(options.tokens_per_file // length, 1) * length
    writers = [TokenWriter(folder, split, tokens_per_file, suffix) for suffix in ("", ".mask")]
    return ChatSplit(*writers, length, maker.tokenizer.eos, maker.dtype)


def check_splits(output: Output, options: argparse.Namespace) -> None:
    train, held_out = output.splits["train"], output.splits["eval"]
    without = train.without_targets + held_out.without_targets if options.chat is not None else 0
    if train.tokens + held_out.tokens == 0 and without > 0:
        raise InputError(
            f"none of the {without} conversations has a target within {options.sequence_length} tokens; raise "
            f"--sequence-length, or give conversations in which the assistant speaks and its replies count"
        )
    if train.tokens + held_out.tokens == 0 and options.jsonl_field is not None and output.counts["empty_documents"]:
        fuller = sorted(printable(name.removeprefix("fuller "))[:60] for name in output.counts if name.startswith("fuller "))
        raise InputError(f'"{options.jsonl_field}" is empty in all records; name another field with --jsonl-field{fuller and f", as {fuller[0]}" or ""}')
    if train.tokens + held_out.tokens == 0:
        raise InputError(
            f"no text in {', '.join(map(str, options.input))}: {output.counts['files']} files matched, "
            f"{output.counts['binary_files']} of them binary; check the paths and --include"
        )
    if train.tokens == 0 and not output.counts["of_other_splits"]:
        raise InputError("every document is held out; lower --eval-fraction or give more documents")
    if options.eval_fraction > 0 and held_out.tokens == 0:
        raise InputError(
            f"none of the {train.documents} documents is held out; raise --eval-fraction, give more "
            f"documents, or cut text files into more with --split-bytes"
        )


def prepare(options: argparse.Namespace, partial: Partial) -> dict:
    """Writes everything into the folder `partial.staging` and returns what data.json holds."""
    reading = Reading(options.jsonl_field, options.chat is not None, options.split_bytes, options.eval_fraction > 0)
    settings = parts.Settings(
        reading, options.tokenizer, options.bos, options.eos, options.chat, options.max_tokens, options.keep_duplicates,
        options.utf8_only
    )
    progress = parts.make_progress()
    maker = parts.PartMaker(settings, partial.path, progress)
    for doubt in maker.template.doubts() if maker.template is not None else []:
        print_line(f"warning: {doubt}")
    texts = options.chat is None and options.jsonl_field is None
    files = [parts.stat_file(path) for path in find_files(options.input, options.include, options.out, print_line, texts)]
    groups = parts.groups_of(files)
    missing = [group for index, group in enumerate(groups) if not parts.is_made(maker.path(index, group))]
    if len(missing) < len(groups):
        print_line(f"continues: {len(groups) - len(missing)} of {len(groups)} parts are there")
    stop_reports = progress.report(sum(file.size for group in missing for file in group), print_line)
    output = Output(options, partial.staging, maker)
    try:
        output.take(map(parts.load_part, parts.make_parts(maker, groups, options.workers)))
    finally:
        stop_reports.set()
    try:
        check_splits(output, options)
    except InputError:
        partial.forget()
        raise
    warn_of_few_held_out(output.splits["eval"].tokens, options)
    tell_unread(output.counts, options, maker.template, sum(split.tokens for split in output.splits.values()))
    info = summary(options, maker, output)
    if options.tokenizer != "bytes":
        named = maker.tokenizer.given_tokens() if options.chat is None else {}  # of conversations --eos is padding
        kept = partial.staging / "tokenizer"
        copy_tokenizer(maker.tokenizer, kept, named)
        if maker.template is None:
            keep_bos(kept, maker.tokenizer)
        else:
            keep_chat(maker.template, kept, maker.tokenizer)
    partial.describe(info)
    return info


def warn_of_few_held_out(tokens: int, options: argparse.Namespace) -> None:
    """A run refuses a file that has not one sequence. Conversations are in sequences already."""
    if options.eval_fraction > 0 and options.chat is None and tokens < USUAL_SEQUENCE:
        print_line(
            f"warning: only {counted(tokens, 'tokens')} are held out, and a run refuses fewer than data.sequence_length "
            f"({USUAL_SEQUENCE} unless the config says another); raise --eval-fraction, or give more text"
        )


def tell_unread(counts: collections.Counter, options: argparse.Namespace, template: chat.ChatTemplate | None, tokens: int) -> None:
    """Says what records have that is not read, and what makes texts doubtful."""
    if counts["unknown_tokens"] > MOST_UNKNOWN * tokens:
        print_line(
            f"warning: {100 * counts['unknown_tokens'] / tokens:.0f} % of the tokens are the one for what the tokenizer does not know; give a "
            "tokenizer that was made for such text"
        )
    def keys(what: str) -> list[str]:
        return sorted(printable(name.removeprefix(what))[:60] for name in counts if name.startswith(what))

    if counts["lacking"]:
        print_line(
            f'warning: {counted(counts["lacking"], "records")} without "{options.jsonl_field}" counted as empty documents; such records have '
            f'{", ".join(keys("lacking ")) or "nothing"}'
        )
    doubts: dict[tuple[str, str], list] = {}
    for name, count in counts.items():
        if name.startswith("doubt "):
            of, what, place = name.removeprefix("doubt ").split("\n", 2)
            doubts.setdefault((of, what), [place, 0])[1] += count
    for (of, what), (place, count) in doubts.items():
        is_damage, of = of.startswith("damaged "), of.removeprefix("damaged ")
        if count > (parts.DAMAGED_SHARE * counts["texts"] if is_damage else counts["looked_at"] / 2 if of == "documents" else 0):
            of += f" of {counts['texts']:,}" if is_damage else ""
            print_line(f"warning: {counted(count, of)} (first: {printable(place)}): {what}")
    others = [key for key in keys("unread ") if not key.endswith(" of messages") or template.unread(key.removesuffix(" of messages"))]
    if others:
        print_line(f"not read: {', '.join(others)}")


def summary(options: argparse.Namespace, maker: parts.PartMaker, output: Output) -> dict:
    """What data.json holds."""
    tokenizer = maker.tokenizer
    info = {
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "vocab_size": tokenizer.vocab_size,
        "padded_vocab_size": padded_vocab_size(tokenizer.vocab_size),
        "bos": tokenizer.bos,
        "eos": tokenizer.eos,
        "dtype": {"<u2": "uint16", "<u4": "uint32"}[maker.dtype],
        "train": output.splits["train"].summary(),
        "eval": output.splits["eval"].summary(),
        "contents": output.splits["train"].contents() | output.splits["eval"].contents(),
        "left_out": {name: output.counts[name] for name in ("duplicate_documents", "empty_documents", "binary_files")},
    }
    if options.utf8_only:
        info["left_out"]["not_utf8_documents"] = output.counts["not_utf8_documents"]
    if options.chat is not None:
        info["chat"] = options.chat if options.chat in chat.MARKERS else Path(options.chat).name
        info["chat_template_sha256"] = maker.template.sha256
        info["sequence_length"] = options.sequence_length
        info["left_out"]["empty_answers"] = output.counts["empty_answers"]
        info["left_out"]["conversations_without_targets"] = sum(s.without_targets for s in output.splits.values())
    return info


def counted(count: int, what: str) -> str:
    """"2 files", "1 file"; of several words the first that is a plural changes: "1 conversation without targets"."""
    return f"{count:,} " + (re.sub(r"s( |$)", r"\1", what, count=1) if count == 1 else what)


def is_of_imported_model(tokenizer: str) -> bool:
    """Whether it lies where `parka import` puts it: that model's config.json has its own vocab_size, often a larger one."""
    folder = Path(tokenizer).absolute().parent
    return tokenizer != "bytes" and folder.name == "huggingface" and (folder.parent / "config.json").is_file()


def keys_of_documents(info: dict) -> dict[str, object]:
    """Of the config, for documents = separate. Where one token begins and ends documents, only both keys tell which it does."""
    keys: dict[str, object] = {"documents": "separate"}
    if info["bos"][:1] == [info["eos"]]:
        keys["document_start"] = info["eos"]
    return keys | {"document_end": info["eos"]}


def print_summary(info: dict, out: Path, for_imported_model: bool) -> None:
    for split in ("train", "eval"):
        counts = info[split]
        files = len(counts["files"])
        print(f"{split}: {counted(counts['documents'], 'documents')}, {counts['tokens']:,} tokens, {counted(files, 'files')}")
        if "targets" in counts:
            print(
                f"  {counts['targets']:,} targets, {counts['padding']:,} padding, "
                f"{counts['cut_conversations']:,} conversations cut"
            )
    left_out = info["left_out"]
    print("left out: " + ", ".join(counted(count, what.replace("_", " ")) for what, count in left_out.items()))
    paths = {split: [str(out / name) for name in info[split]["files"]] for split in ("train", "eval")}
    if "chat" not in info:
        bos = f"begin with {' '.join(map(str, info['bos']))}, " if info["bos"] else ""
        print(f"documents: {bos}end with {info['eos']}")
        print(f"to keep them apart, in section data: {json.dumps(keys_of_documents(info))[1:-1]}")
    config_of = "the config of a new model" if for_imported_model else "the config"
    print(f"vocabulary: {info['vocab_size']} ids, in {config_of} {info['padded_vocab_size']}")
    new = "" if for_imported_model or "chat" in info else f"parka config new --model 150m --tokens N --gpu h100 --data {out}, or "
    print(f"next: {new}parka train CONFIG --data {out}")
    print(f"--data {out} sets these keys{'' if for_imported_model else ', but for model.vocab_size'}:")
    config = {} if for_imported_model else {"model": {"vocab_size": info["padded_vocab_size"]}}
    given = {split: files for split, files in paths.items() if files or split == "eval"}
    config["data"] = {**given, "token_dtype": info["dtype"]}
    if "chat" in info:
        config["data"] |= {
            "sequence_length": info["sequence_length"],
            "loss_mask": True,
            "documents": "separate",
        }
    print(json.dumps(config | evaluating(paths["eval"]), indent=2))


def check_chat_options(options: argparse.Namespace) -> None:
    if options.chat is None:
        if options.sequence_length is not None:
            raise InputError("--sequence-length packs conversations; it needs --chat")
        return
    for name in ("jsonl_field", "split_bytes", "max_tokens", "bos"):
        if getattr(options, name) is not None:
            raise InputError(f"--{name.replace('_', '-')} cannot be used with --chat; leave it out")
    if options.sequence_length is None or options.sequence_length < 2:
        raise InputError("--chat packs conversations: give --sequence-length, the config's data.sequence_length")


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog=command_name(),
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("input", nargs="+", type=Path, help="files of text or records, or folders of them")
    add("--out", required=True, type=Path, help="folder to create")
    add(
        "--include",
        action="append",
        default=[],
        metavar="GLOB",
        help="take only files of folders whose name or relative path matches, as *.txt; may be repeated",
    )
    add("--jsonl-field", metavar="NAME", help="inputs are JSON Lines or tables with the text in this field or column")
    add("--chat", metavar="TEMPLATE", help="inputs are conversations: chatml, llama2, llama3, or a file or folder with one")
    add("--sequence-length", type=int, metavar="S", help="with --chat: tokens per sequence, as data.sequence_length")
    add("--split-bytes", type=int, metavar="N", help="cut text files into documents of about N bytes, at line ends")
    add("--tokenizer", default="bytes", type=tokenizer_file, help="bytes, or a tokenizer.json or its folder (default: bytes)")
    add(
        "--bos",
        metavar="NAME",
        help="token of a tokenizer.json that begins each document, or none (default: what add_bos_token in the "
        "tokenizer_config.json beside it says, else what the tokenizer itself puts there)",
    )
    add(
        "--eos",
        metavar="NAME",
        help="token of a tokenizer.json that ends each document (default: eos_token of the tokenizer_config.json beside "
        f"it, else {', '.join(EOS_NAMES)})",
    )
    add("--workers", type=int, default=1, metavar="N", help="tokenize N files at a time (default: 1, with all cores)")
    add("--eval-fraction", type=float, default=0.0, metavar="F", help="hold out this fraction of the documents")
    add("--max-tokens", type=int, metavar="N", help="stop after N tokens, train and eval together")
    add("--tokens-per-file", type=int, default=512 * 2**20, metavar="N", help="start another file after N tokens")
    add(
        "--keep-duplicates",
        action="store_true",
        help="keep identical documents, all in the same split (saves about 70 bytes of memory per document)",
    )
    add(
        "--utf8-only",
        action="store_true",
        help="leave out documents that are not UTF-8 (default: an error with a tokenizer.json or --chat)",
    )
    options = parser.parse_args(arguments)
    check_chat_options(options)
    for name in ("split_bytes", "max_tokens", "tokens_per_file", "workers"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise InputError(f"--{name.replace('_', '-')} is {value}; give a positive number")
    if not 0 <= options.eval_fraction < 1:
        raise InputError(f"--eval-fraction is {options.eval_fraction}; give a number from 0 to below 1")
    if options.split_bytes and options.split_bytes > MAX_DOCUMENT_BYTES:
        raise InputError(f"--split-bytes is {options.split_bytes}; give at most {MAX_DOCUMENT_BYTES}")
    if options.split_bytes and options.jsonl_field is not None:
        raise InputError("--split-bytes cuts text files; it cannot be used with --jsonl-field")
    options.out = new_folder(options.out)
    return options


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    with Partial(options.out, print_line) as partial:
        info = prepare(options, partial)
        partial.finish()
    print_last(lambda: print_summary(info, options.out, is_of_imported_model(options.tokenizer)))


def main() -> int:
    return run_script(run, print_line)


if __name__ == "__main__":
    sys.exit(main())
