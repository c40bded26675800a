#!/usr/bin/env python3
"""Draws small pictures, and writes captions, questions and answers about them in LLaVA's form, for vision.sh.

    scripts/research/draw_pictures.py OUT [--pictures 6000] [--held-out 1000] [--seed 1]

A picture of 32 x 32 pixels has four places. It shows one to four of the same shape in one colour, or a digit, on grey. OUT
gets pictures/, and for `train` and `held_out`, which have other pictures, captions.SPLIT.json and questions.SPLIT.json: one
caption of each picture, and one question of each (of `train`: --questions). choices.json has all answers of each question.
Equal options give equal files.
"""
import json
import random
import sys
from pathlib import Path

from measured_runs import ScriptParser, positive, run_main

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from python_packages import require  # noqa: E402

require("pillow")
from PIL import Image, ImageDraw  # noqa: E402

SIZE = 32
CELL = SIZE // 2
PLACES = ("top left", "top right", "bottom left", "bottom right")
COLOURS = {"red": (214, 39, 40), "green": (44, 160, 44), "blue": (31, 79, 200), "yellow": (240, 215, 30)}
SHAPES = ("circle", "square", "triangle", "cross")
NUMBERS = ("one", "two", "three", "four")
# Rows of 3 pixels, as bits.
DIGITS = ("75557", "26227", "71747", "71717", "55711", "74717", "74757", "71111", "75757", "75717")
QUESTIONS = {
    "colour": ("What colour?", tuple(COLOURS)), "shape": ("What shape?", SHAPES), "number": ("How many?", NUMBERS),
    "place": ("Where?", PLACES), "digit": ("Which digit?", tuple("0123456789")),
}


def draw_shape(draw, shape, box, colour):
    left, top, right, bottom = box
    if shape == "circle":
        draw.ellipse(box, fill=colour)
    elif shape == "square":
        draw.rectangle(box, fill=colour)
    elif shape == "triangle":
        draw.polygon([((left + right) // 2, top), (left, bottom), (right, bottom)], fill=colour)
    else:
        middle, arm = (left + right) // 2, 1
        draw.rectangle((middle - arm, top, middle + arm, bottom), fill=colour)
        middle = (top + bottom) // 2
        draw.rectangle((left, middle - arm, right, middle + arm), fill=colour)


def draw_digit(draw, digit, left, top, colour):
    """6 x 10 pixels."""
    for y, row in enumerate(DIGITS[digit]):
        for x in range(3):
            if int(row) >> (2 - x) & 1:
                draw.rectangle((left + 2 * x, top + 2 * y, left + 2 * x + 1, top + 2 * y + 1), fill=colour)


def draw_scene(rng):
    """(picture, {question: answer}, caption)"""
    grey = rng.randrange(90, 170)
    picture = Image.new("RGB", (SIZE, SIZE), (grey, grey, grey))
    draw = ImageDraw.Draw(picture)
    colour = rng.choice(list(COLOURS))
    answers = {"colour": colour}

    def corner(place, width, height):
        """Of something in the middle of a place, but for a pixel."""
        left, top = place % 2 * CELL + (CELL - width) // 2, place // 2 * CELL + (CELL - height) // 2
        return left + rng.randint(-1, 1), top + rng.randint(-1, 1)

    if rng.random() < 0.4:
        digit, place = rng.randrange(10), rng.randrange(4)
        draw_digit(draw, digit, *corner(place, 6, 10), COLOURS[colour])
        answers |= {"digit": str(digit), "place": PLACES[place]}
        return picture, answers, f"a {colour} {digit} at the {PLACES[place]}"
    shape, count = rng.choice(SHAPES), rng.randint(1, 4)
    places = rng.sample(range(4), count)
    for place in places:
        side = rng.randint(10, 12)
        left, top = corner(place, side, side)
        draw_shape(draw, shape, (left, top, left + side - 1, top + side - 1), COLOURS[colour])
    answers |= {"shape": shape, "number": NUMBERS[count - 1]}
    plural = {"cross": "crosses"}.get(shape, f"{shape}s")
    if count > 1:
        return picture, answers, f"{NUMBERS[count - 1]} {colour} {plural}"
    return picture, answers | {"place": PLACES[places[0]]}, f"one {colour} {shape} at the {PLACES[places[0]]}"


def sample(number, name, asked, said):
    return {"id": str(number), "image": name,
            "conversations": [{"from": "human", "value": f"<image>\n{asked}"}, {"from": "gpt", "value": said}]}


def write_split(out, split, count, questions, rng):
    folder = out / "pictures" / split
    folder.mkdir(parents=True, exist_ok=True)
    captions, asked = [], []
    for number in range(count):
        name = f"{split}/{number:05d}.png"
        picture, answers, caption = draw_scene(rng)
        picture.save(out / "pictures" / name)
        captions.append(sample(number, name, "Describe it.", caption))
        for kind in rng.sample(list(answers), min(questions, len(answers))):
            asked.append(sample(f"{number}.{kind}", name, QUESTIONS[kind][0], answers[kind]))
    for what, samples in (("captions", captions), ("questions", asked)):
        (out / f"{what}.{split}.json").write_text(json.dumps(samples, indent=1) + "\n", encoding="utf-8")


def main():
    parser = ScriptParser(__doc__)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--pictures", type=positive, default=6000, help="to train on (default 6000)")
    parser.add_argument("--held-out", type=positive, default=1000, help="(default 1000)")
    parser.add_argument("--questions", type=positive, default=2, help="of each picture to train on (default 2)")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    rng = random.Random(arguments.seed)
    write_split(arguments.out, "train", arguments.pictures, arguments.questions, rng)
    write_split(arguments.out, "held_out", arguments.held_out, 1, rng)
    choices = {question: answers for question, answers in QUESTIONS.values()}
    (arguments.out / "choices.json").write_text(json.dumps(choices, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run_main(main)
