#!/usr/bin/env python3
"""Turns the documents of a multiple-choice task into a request file for `parka eval --tasks`.

    parka prepare-eval --task hellaswag --tokenizer tokenizer.json validation.jsonl --out hellaswag.requests.jsonl
    parka prepare-eval --task piqa --tokenizer bytes validation.jsonl --out piqa.requests.jsonl
    parka prepare-eval --task image_choice --tower clip --image-folder images/ --prompt 'USER: {question} ASSISTANT:' \\
      --tokenizer tokenizer.json questions.jsonl --out questions.requests.jsonl

The input is JSON Lines with the fields that the task's data set has on Hugging Face; of arc_easy, arc_challenge and
openbook_qa the form of their original files is read too. Prompts, continuations and metric are those of OLMo's
zero-shot evaluation. The model must have been trained with the same tokenizer: a run has it as
tokenizer/tokenizer.json, an imported model as huggingface/tokenizer.json, with its processor of images, which says
how pictures become squares. docs/evaluation.md describes prompts, metrics and the request file. Documents of
image_choice are {"image": NAME or NAMES, "question": TEXT, "choices": [TEXT, ...], "answer": NUMBER or LETTER};
<image> in the question is where a picture stands; without any, pictures come before it. Their pixels go to the file
OUT.pixels. Those of text_choice are {"context": TEXT, "choices": [TEXT, ...], "answer": NUMBER}, each choice with the
white space that it begins with (scripts/research/make_questions.py makes them). --out appears whole or not at all; an existing
file is replaced, and a device or a pipe is written into.

Exit codes: 0 done, 1 a defect of the script, 2 something is wrong with the input or the options, 4 writing failed.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import re
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator

sys.path.insert(0, str(Path(__file__).resolve().parent))
from python_packages import HelpFormatter, advice, command_name, require  # noqa: E402

require("numpy", "xxhash")
from image_data.conversations import PLACEHOLDER, key_not_read, lies_elsewhere  # noqa: E402
from script_exit import run_script  # noqa: E402
from text_data.common import InputError, Parser, file_behind, one_line, print_made, refuse_to_replace, write_lines  # noqa: E402
from text_data.readers import InputFile, Reading, object_of, unreadable  # noqa: E402
from text_data.tokenizer import make_tokenizer, tokenizer_file  # noqa: E402

METRICS = ("acc", "len_norm", "pmi_dc")
MOST_EQUAL = 0.01  # of documents: the share with equal choices
FEWEST = 8  # documents that tell whether labels differ
LETTERS = "ABCDEFGHIJ"
# Options of image_choice alone, with their defaults. Others are the tower's, or the tokenizer's.
OPTIONS_OF_IMAGES = {"prompt": "{question}\nAnswer:", "tower": None, "image_folder": Path("."), "image_size": None, "patch_size": None,
                     "geometry": None, "downsample": 1, "image_token": None}


def print_line(text: str) -> None:
    print(f"{command_name().removesuffix('.py')}: {text}", file=sys.stderr, flush=True)


@dataclass
class Request:
    """What a document asks. Every continuation begins with white space. One context for all continuations or one each;
    `domains`, of which the same is true, is what pmi_dc puts in the place of the context."""

    contexts: list[str]
    continuations: list[str]
    domains: list[str]
    label: int
    images: tuple[str, ...] = ()  # names of pictures; each context has <image> for each


def question_and_choices(doc: dict) -> tuple[str, list[str]]:
    """Of ARC and OpenBookQA, whose original files nest what Hugging Face has in flat fields."""
    if isinstance(doc.get("question"), dict):
        return doc["question"]["stem"], [choice["text"] for choice in doc["question"]["choices"]]
    return doc["question_stem"] if "question_stem" in doc else doc["question"], doc["choices"]["text"]


def texts_of(value: object, what: str) -> list[str]:
    """Raises ValueError for what is no list of texts, as one text, of which each character would be a choice."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError(f"its {what} are no list of texts")
    return value


def spaced(texts: list[str]) -> list[str]:
    return [" " + text for text in texts_of(texts, "choices")]


def number_of(letter: object) -> int:
    if not isinstance(letter, str) or len(letter) != 1 or letter not in LETTERS:
        raise ValueError(f"the answer is {letter!r}, which is no choice's letter: does this split have labels?")
    return LETTERS.index(letter)


def label_of(value: object) -> int:
    """Of a whole number, or of its digits: int() would make one of 0.9 and of true, too."""
    if isinstance(value, str) and value.isascii() and value.isdigit():
        return int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"the answer is {value!r}, which is no whole number: does this split have labels?")
    return value


def arc(doc: dict) -> Request:
    question, choices = question_and_choices(doc)
    key = str(doc["answerKey"])
    label = int(key) - 1 if key.isdigit() else number_of(key)
    return Request([f"Question: {question}\nAnswer:"], spaced(choices), ["Answer:"], label)


def boolq(doc: dict) -> Request:
    context = f"{doc['passage']}\nQuestion: {doc['question']}?\nAnswer:"
    answer = doc["answer"] if "answer" in doc else doc["label"]  # as SuperGLUE calls it
    if answer not in (False, True):
        raise ValueError(f"the answer is {answer!r}, not true or false: does this split have labels?")
    return Request([context], [" yes", " no"], ["Answer:"], 0 if answer else 1)


def copa(doc: dict) -> Request:
    connector = {"cause": "because", "effect": "therefore"}[doc["question"]]
    choices = [choice[0].lower() + choice[1:] for choice in (doc["choice1"], doc["choice2"])]
    return Request([f"{doc['premise'].strip()[:-1]} {connector}"], spaced(choices), [connector], label_of(doc["label"]))


def hellaswag_text(text: str) -> str:
    """Without the marks that the data set's WikiHow part is left with."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def hellaswag(doc: dict) -> Request:
    start = doc["ctx_b"].capitalize()
    context = hellaswag_text(f"{doc['activity_label']}: {doc['ctx_a']} {start}")
    domain = hellaswag_text(start) or hellaswag_text(doc["ctx_a"]).split(" ")[-1]
    endings = [hellaswag_text(ending) for ending in texts_of(doc["endings"], "endings")]
    return Request([context], spaced(endings), [domain], label_of(doc["label"]))


def openbook_qa(doc: dict) -> Request:
    question, choices = question_and_choices(doc)
    return Request([question], spaced(choices), [question.strip().split(" ")[-1]], number_of(doc["answerKey"].strip()))


def piqa(doc: dict) -> Request:
    return Request([f"Question: {doc['goal']}\nAnswer:"], spaced([doc["sol1"], doc["sol2"]]), ["Answer:"], label_of(doc["label"]))


def image_choice(doc: dict) -> Request:
    images = doc.get("image")
    images = texts_of([images] if isinstance(images, str) else images or [], "images")
    if not all(images):
        raise ValueError("a name of its images is empty")
    if other := next(filter(lies_elsewhere, images), None):
        raise ValueError(f"its image {other!r} does not lie in --image-folder")
    if not images and (key := key_not_read(doc)) is not None:
        raise ValueError(f"it has {key!r} and no 'image', which is the key that is read")
    question, answer = doc["question"], doc["answer"]
    if PLACEHOLDER not in question:
        question = f"{PLACEHOLDER}\n" * len(images) + question
    choices = spaced(doc["choices"])
    if question.count(PLACEHOLDER) != len(images) or any(PLACEHOLDER in choice for choice in choices):
        raise ValueError(f"{len(images)} images for {question.count(PLACEHOLDER)} {PLACEHOLDER} of the question")
    answer = answer.strip() if isinstance(answer, str) else answer
    label = number_of(answer) if isinstance(answer, str) and not answer.isdigit() else label_of(answer)
    return Request([question], choices, ["Answer:"], label, tuple(images))


def sciq(doc: dict) -> Request:
    choices = [doc["distractor1"], doc["distractor2"], doc["distractor3"], doc["correct_answer"]]
    return Request([f"{doc['support'].strip()}\nQuestion: {doc['question']}\nAnswer:"], spaced(choices), ["Answer:"], 3)


def text_choice(doc: dict) -> Request:
    choices = texts_of(doc["choices"], "choices")
    if not all(choice[:1].isspace() for choice in choices):
        raise ValueError("a choice does not begin with white space")
    if not isinstance(doc["context"], str):
        raise ValueError("its context is no text")
    return Request([doc["context"]], choices, ["\n"], label_of(doc["answer"]))


def winogrande(doc: dict) -> Request:
    """Both options in turn stand for the blank, and what follows it is the continuation of both."""
    before, after = doc["sentence"].split("_", 1)
    options = [doc["option1"], doc["option2"]]
    return Request([before + option for option in options], spaced([after.strip()] * 2), options, label_of(doc["answer"]) - 1)


# For each task, the function that makes a request of a document, and OLMo's metric.
TASKS: dict[str, tuple[Callable[[dict], Request], str]] = {
    "arc_challenge": (arc, "len_norm"),
    "arc_easy": (arc, "acc"),
    "boolq": (boolq, "acc"),
    "copa": (copa, "acc"),
    "hellaswag": (hellaswag, "len_norm"),
    "image_choice": (image_choice, "acc"),
    "openbook_qa": (openbook_qa, "len_norm"),
    "piqa": (piqa, "len_norm"),
    "sciq": (sciq, "acc"),
    "text_choice": (text_choice, "acc"),
    "winogrande": (winogrande, "acc"),
}


def read_requests(path: Path, task: str, prompt: str) -> Iterator[Request]:
    """The requests of a file, each checked. `prompt` has {question} in the place of an image_choice's question."""
    make_request, _ = TASKS[task]
    with contextlib.closing(lines_of(path)) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            where = f"{path}, line {number}"
            try:
                doc = json.loads(line, object_pairs_hook=object_of)
            except (ValueError, RecursionError) as error:
                raise InputError(f"{where}: is not JSON ({one_line(error)}); give a JSON Lines file, a document per line")
            try:
                request = make_request(doc)
            except KeyError as error:
                raise InputError(f"{where}: has no {one_line(error)}, or not as {task} has it; give {task}'s documents")
            except (AttributeError, IndexError, TypeError, ValueError) as error:
                raise InputError(f"{where}: is not a document of {task} ({one_line(error)}); give {task}'s documents")
            check(request, where)
            if task == "image_choice":
                request.contexts = [prompt.replace("{question}", context) for context in request.contexts]
            check_unicode(request, where)
            yield request


def lines_of(path: Path) -> Iterator[str]:
    try:
        with InputFile(path, Reading()).content() as file, io.TextIOWrapper(file, encoding="utf-8-sig") as text:
            yield from text  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: is not UTF-8 text ({one_line(error)}); give a JSON Lines file")
    except (OSError, EOFError, zlib.error) as error:
        raise unreadable(path, error)


def check(request: Request, where: str) -> None:
    if not 0 <= request.label < len(request.continuations):
        raise InputError(f"{where}: the right choice is number {request.label} of {len(request.continuations)}; "
                         "give a split that has labels")
    if len(request.continuations) < 2:
        raise InputError(f"{where}: has fewer than two choices; remove the line")
    if not all(request.contexts) or not all(request.domains) or not all(len(c) > 1 for c in request.continuations):
        raise InputError(f"{where}: a prompt or a choice is empty; remove the line")


def check_choices(requests: list[Request], options: argparse.Namespace) -> None:
    """Published tasks have a document or two in which choices are equal."""
    equal = [number for number, request in enumerate(requests, 1) if has_equal_choices(request)]
    told = f"{options.input}: document {equal[0]} and {len(equal) - 1:,} others have two equal choices" if equal else ""
    if len(equal) > MOST_EQUAL * len(requests):
        raise InputError(f"{told}; give each choice its own text")
    if equal:
        print_line(f"warning: {told}")
    if len(requests) >= FEWEST and options.task != "sciq" and all(request.label == requests[0].label for request in requests):
        print_line(f"warning: {options.input}: choice {requests[0].label + 1} is right in all documents; check that they have their own labels")


def has_equal_choices(request: Request) -> bool:
    return len(set(zip(for_each_choice(request), request.continuations))) < len(request.continuations)


def check_unicode(request: Request, where: str) -> None:
    try:
        for text in (*request.contexts, *request.continuations, *request.domains):
            text.encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair, which JSON can hold
        raise InputError(f"{where}: holds text that is not Unicode ({one_line(error)}); remove it")


@dataclass
class RequestIds:
    """The ids of a request: a context and a continuation for each choice, and of each of `domains`."""

    contexts: list[list[int]]
    continuations: list[list[int]]
    domains: list[list[int]]


def tokenize(requests: list[Request], tokenizer, slots: list[int]) -> list[RequestIds]:
    """A context and its continuation are tokenized as one text, because a tokenizer may begin every text with a space.
    A token with a character of the continuation belongs to it. Text between images is tokenized piece by piece, and `slots`
    are the ids in the place of each image."""
    domains = iter(tokenizer.encode([domain.encode() for request in requests for domain in request.domains]))
    texts, spans = [], []
    for request in requests:
        for context, continuation in zip(for_each_choice(request), request.continuations):
            *before, last = context.split(PLACEHOLDER) if request.images else [context]
            texts += [*before, last + continuation]
            spans += [[] for _ in before] + [[(len(last), len(last + continuation))]]
    encoded = iter(tokenizer.encode_marked(texts, spans))
    result = []
    for request in requests:
        own = RequestIds([], [], [tokenizer.bos + next(domains).tolist() for _ in request.domains])
        for _ in request.continuations:
            context = list(tokenizer.bos)
            for _ in request.images:
                context += next(encoded)[0].tolist() + slots
            ids, of_continuation = next(encoded)
            first = int(of_continuation.argmax())
            own.contexts.append(context + ids[:first].tolist())
            own.continuations.append(ids[first:].tolist())
        result.append(own)
    return result


def for_each_choice(request: Request) -> list[str]:
    return request.contexts * (len(request.continuations) if len(request.contexts) == 1 else 1)


def document(request: Request, metric: str, ids: RequestIds, images: list[dict]) -> dict:
    """A line of the request file."""
    own = {"context": ids.contexts}
    if metric == "pmi_dc":
        own["domain"] = ids.domains
    shared = {key: lists[0] for key, lists in own.items() if all(one == lists[0] for one in lists)}
    result = {"label": request.label} | ({"images": images} if images else {}) | shared | {"choices": []}
    for i, continuation in enumerate(request.continuations):
        choice = {key: lists[i] for key, lists in own.items() if key not in shared}
        choice["continuation"] = ids.continuations[i]
        choice["characters"] = len(continuation) - 1
        choice["bytes"] = len(continuation[1:].encode())
        result["choices"].append(choice)
    return result


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(
        prog=command_name(),
        description=__doc__,
        formatter_class=HelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("input", type=Path, help="JSON Lines file with the task's documents, also as .gz or .zst")
    add("--out", required=True, type=Path, help="request file to create")
    add("--task", required=True, choices=sorted(TASKS), help="the task that the documents belong to")
    add("--tokenizer", default="bytes", type=tokenizer_file, help="bytes, or a tokenizer.json or its folder (default: bytes)")
    add("--bos", metavar="NAME", help="token that begins each context, or none (default: as parka prepare)")
    add("--metric", choices=METRICS, help="how a choice is made (default: as OLMo does for the task)")
    add("--prompt", help=f"of image_choice: what stands around {{question}} (default: {OPTIONS_OF_IMAGES['prompt']!r})")
    add("--tower", choices=("clip", "siglip"), help="of image_choice: whose defaults of the next four to use")
    add("--image-folder", type=Path, metavar="FOLDER", help="of image_choice: where names of pictures begin (default: here)")
    add("--image-size", type=int, metavar="PIXELS", help="side of the squares that the tower sees (default: 336; 384)")
    add("--patch-size", type=int, metavar="PIXELS", help="side of a patch (default: 14)")
    add("--geometry", choices=("crop", "pad", "stretch"), help="how pictures become squares (default: as the processor of images "
        "beside --tokenizer makes them, or else crop; stretch)")
    add("--downsample", type=int, metavar="K", help="K x K patches become a token (default: 1)")
    add("--image-token", metavar="NAME", help="token, or id, of image slots (default: as parka prepare-images)")
    add("--name", help="name of the task in results (default: that of --task)")
    options = parser.parse_args(arguments)
    if options.name is not None and not options.name.strip():
        raise InputError("--name is empty; give the task a name")
    for name, default in OPTIONS_OF_IMAGES.items():
        if getattr(options, name) is None:
            setattr(options, name, default)
        elif options.task != "image_choice":
            raise InputError(f"--{name.replace('_', '-')} is of --task image_choice, and {options.task} has no pictures; leave it out")
    if options.task == "image_choice" and options.tower is None:
        raise InputError("--task image_choice needs --tower; give the one that the model has")
    if "{question}" not in options.prompt or PLACEHOLDER in options.prompt:
        raise InputError(f"--prompt {options.prompt!r}: has no {{question}}, or has {PLACEHOLDER}; put the former in its place")
    return options


def image_rules(options: argparse.Namespace, tokenizer):
    try:
        from image_data.pictures import TOWERS, Fitting, colour_of, slots_of
        from image_data.processor import geometry_of
        from image_data.requests import ImageRules
        from image_data.samples import image_token_of
    except ImportError as error:
        raise InputError(f"--tower needs Python's pillow, numpy and xxhash packages ({one_line(error)}); {advice('pillow, numpy, xxhash')}")

    tower = TOWERS[options.tower]
    size = tower.size if options.image_size is None else options.image_size
    patch = tower.patch if options.patch_size is None else options.patch_size
    if not 0 < patch <= size or options.downsample < 1:
        raise InputError(f"--image-size {size}, --patch-size {patch} and --downsample {options.downsample} fit no tower; change them")
    of_model = None if options.tokenizer == "bytes" else geometry_of(Path(options.tokenizer).parent)
    fitting = Fitting(options.geometry or of_model or tower.geometry, size, colour_of(tower.mean))
    token = image_token_of(options.image_token, tokenizer)
    return ImageRules(token, slots_of(size, patch, options.downsample), fitting, options.image_folder)


def run(arguments: list[str]) -> None:
    options = parse_options(arguments)
    refuse_to_replace(options.input, options.out)
    tokenizer = make_tokenizer(options.tokenizer, options.bos, needs_eos=False)
    metric = options.metric or TASKS[options.task][1]
    requests = list(read_requests(options.input, options.task, options.prompt))
    if not requests:
        raise InputError(f"{options.input}: has no documents; give a JSON Lines file, a document per line")
    check_choices(requests, options)
    rules = image_rules(options, tokenizer) if options.tower else None
    ids = tokenize(requests, tokenizer, [rules.token] * rules.slots if rules else [])
    header = {
        "kind": "parka requests",
        "version": 2 if rules else 1,
        "task": options.name or options.task,
        "metric": metric,
        "tokenizer": tokenizer.name,
        "tokenizer_sha256": tokenizer.sha256,
        "tokens_xxh3_128": tokenizer.tokens_checksum,
        "documents": len(requests),
    }
    made = f"{len(requests):,} documents of {options.task}"
    if rules:
        made += f", {write_with_images(options.out, header, requests, ids, rules):,} pictures ({rules.fitting.geometry})"
    else:
        write_lines(options.out, [header] + [document(request, metric, own, []) for request, own in zip(requests, ids)])
    print_made(options.out, f"{made}, metric {metric}")


def write_with_images(path: Path, header: dict, requests: list[Request], ids: list[RequestIds], rules) -> int:
    """Returns the number of pictures, of which each counts once. The pixels come first: requests that do not belong to them are
    refused by the checksums."""
    from image_data.requests import TaskImages

    try:
        if file_behind(path) is None:
            raise InputError(f"--out {path}: is no file that pixels can lie beside; give it another name")
        images = TaskImages(rules, path.with_name(path.name + ".pixels"))
    except OSError as error:
        raise InputError(f"{path}: cannot be made ({error.strerror}); give --out a place that you may write to")
    try:
        lines = [header | {"images": rules.header()}]
        for number, (request, own) in enumerate(zip(requests, ids), 1):
            placed = [images.add(name, f"document {number}") for name in request.images]
            if not has_slots_of(own, rules.token, rules.slots * len(placed), header["metric"]):
                raise InputError(f"document {number}: its text has id {rules.token}, which marks images; give --image-token another")
            lines.append(document(request, header["metric"], own, placed))
        images.publish()
        write_lines(path, lines)
        return len(images)
    finally:
        images.remove()


def has_slots_of(ids: RequestIds, token: int, slots: int, metric: str) -> bool:
    """Whether each context has `slots` of the id `token`, and what else is written for `metric` has none, as `parka eval` wants it."""
    without = ids.continuations + (ids.domains if metric == "pmi_dc" else [])
    return all(context.count(token) == slots for context in ids.contexts) and not any(token in text for text in without)


def main() -> int:
    return run_script(run, print_line)


if __name__ == "__main__":
    sys.exit(main())
