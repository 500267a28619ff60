"""Lines of text: prompts are drawn as they stand, and what is no prompt never is."""

import re

import pytest
from helpers.item_lines import check_message

from sdattn.batch.input.items import read_items

# Each looks a little like something else, and is a prompt
NATURAL = [
    "a red\tcircle",
    "\ta cat, indented",
    "a cat -- no dogs",
    "a cat--a red one--on a sofa",
    "-- a cat",
    "--a cat sat--",
    "he said --no way-- and left",
    "a road sign --> turn left",
    "a terminal that shows --help",
    "a sign with --v written on it",
    "a dance class. Steps: 3 people climbing, 2 falling",
    "Steps: how to draw a cat",
    "Steps: 1, 2, 3 painted on stairs",
    "Steps: 1 wake up, Steps: 2 sleep",
    "a poster, Steps: 20 of them, in the rain",
    "Seed: the movie, a poster",
    "Plant guide, Seed: sunflower, Size: large",
    "a negative prompt written on a wall",
    "prompt: a, b",
    "prompt",
    "a prompt,id",
    "id,x",
    "text, logo, flat design",
    "caption, text, seed",
    "name;text",
    'The words "Fly an airplane" are written on the wall',
    '"G I G G L E" painted in thick colorful lettering',
    'a 5" wide cat',
    "a cat's hat, Salvador Dalí's",
    "{red|blue} cat",
    "[a cat] on a sofa",
    "(masterpiece:1.2), 1girl, <lora:x:0.8>",
    "a man, 16:9, 8k, f/1.8",
    "42",
    "U.S. 101",
    "Supreme Court Justices play a baseball game with the FBI. The FBI is at bat; 3-2.",
    "größer 🦊",
    "# a heading",
    "a, b, c",
]


@pytest.mark.parametrize("kind", ["txt", "auto"])
def test_natural_prompts_are_drawn_as_they_stand(kind):
    items, bad = read_items("\n".join(NATURAL).encode(), kind)
    assert bad == []
    assert [item.prompt for item in items] == NATURAL
    assert all(item.options == {} and item.negative_prompt is None for item in items)


@pytest.mark.parametrize("prompt", NATURAL)
def test_a_natural_prompt_alone_is_drawn_as_it_stands(prompt):
    for kind in ("txt", "auto"):
        [item], bad = read_items(f"{prompt}\n".encode(), kind)
        assert (item.prompt, bad) == (prompt, [])


@pytest.mark.parametrize("kind", ["txt", "auto"])
def test_lines_of_options_are_read(kind):
    lines = [
        '--prompt "a red circle" --steps 3 --seed 5',
        "--prompt a blue square, big --negative_prompt 'blurry, ugly' --cfg_scale 7.5",
        '--width 64 --height 128 --prompt "a cat\'s hat"',
        "a plain one",
    ]
    items, bad = read_items("\n".join(lines).encode(), kind, seed=10)
    assert bad == []
    found = [(item.prompt, item.negative_prompt, item.seed, item.options) for item in items]
    assert found == [
        ("a red circle", None, 5, {"num_inference_steps": 3}),
        ("a blue square, big", "blurry, ugly", 11, {"guidance_scale": 7.5}),
        ("a cat's hat", None, 12, {"width": 64, "height": 128}),
        ("a plain one", None, 13, {}),
    ]


BLOCK = (
    "a red circle,\nin the rain\nNegative prompt: blurry,\nugly\n"
    "Steps: 20, Sampler: DPM++ 2M, Schedule type: Karras, CFG scale: 7, Seed: 5, Size: 512x512\n"
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("--prompt 'a cat' --sampler_name 'Euler a'", "choose a scheduler for the whole run"),
        ("--prompt 'a cat' --n_iter 4", "write a line for each image"),
        ("--prompt 'a cat' --seed -1", "seed=-1.*leave seed out"),
        ("--prompt 'a cat' --seed 5 --seed 6", "'--seed' occurs twice"),
        ("--prompt 'a cat' --steps many", "num_inference_steps='many'"),
        ('--prompt "a cat --seed 5', "No closing quotation"),
        ("--steps 3", "the prompt is missing"),
        ("a cat --steps 20 --seed 5", "holds an option, --steps"),
        ("a cat --negative_prompt dog", "holds an option, --negative_prompt"),
        ("a cat --ar 16:9 --v 5", "holds an option, --ar"),
        ("a cat —ar 16:9", "holds an option, —ar"),
        ("a cat --restore_faces", "holds an option, --restore_faces"),
        ('txt2img.py --prompt "a cat"', "holds an option, --prompt"),
        ("a red circle\rNegative", "carriage return"),
        ("a cat Negative prompt: dog", "settings of an image"),
        ("Negative prompt: dog", "settings of an image"),
        ("negative_prompt: dog", "settings of an image"),
        ("a cat Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5", "settings of an image"),
        ("Steps: 20, Sampler: Euler a, CFG scale: 7, Seed: 5, Size: 64x64", "settings of"),
        (BLOCK, "settings of an image"),
        ("a red circle\nNegative prompt: blurry,\nugly", "settings of an image"),
        (BLOCK.replace("\n", "\r\n"), "settings of an image"),
        ('{"prompt": "a cat"}', "is a JSON object that names prompt"),
        ("photo of {prompt}, video", "is a style"),
    ],
)
def test_what_is_no_prompt_is_refused_by_its_line(text, reason):
    for kind in ("txt", "auto"):
        items, [bad] = read_items(f"a cat\n\n{text}\n\na dog\n".encode(), kind)
        assert [item.prompt for item in items] == ["a cat", "a dog"]
        assert bad.line == 3
        check_message(bad)
        assert re.search(reason, bad.reason)


def test_the_settings_of_several_images_are_told_apart():
    items, bad = read_items((BLOCK * 2 + "a cat\na dog\n\n" + BLOCK).encode(), "txt")
    assert [(item.line, item.prompt) for item in items] == [(11, "a cat"), (12, "a dog")]
    assert [one.line for one in bad] == [1, 6, 14]


@pytest.mark.parametrize("kind", ["jsonl", "csv", "tsv", "txt", "auto"])
def test_lines_may_end_in_a_carriage_return_alone(kind):
    lines = {"jsonl": ['{"prompt": "a cat"}', '{"prompt": "a dog"}']}.get(kind, ["a cat", "a dog"])
    head = ["prompt"] if kind in ("csv", "tsv") else []
    for end in ("\r", "\r\n", "\n"):
        items, bad = read_items(end.join([*head, *lines, ""]).encode(), kind)
        assert ([item.prompt for item in items], bad) == (["a cat", "a dog"], [])


@pytest.mark.parametrize(
    ("table", "kind"),
    [
        ("Prompt\tCategory\tChallenge\tNote\nbond\tAbstract\tBasic\t\n", "tsv"),
        ("Prompt\tCategory\nbroken row\nbond\tAbstract\n", "tsv"),
        ("Prompts,Category\nA red car.,Colors\n", "csv"),
        ("PROMPT;seed\na cat;5\n", "csv"),
        ("image_name|caption\na.jpg|a cat\n", "csv"),
        ("caption,image_id\na cat,5\n", "csv"),
        ("Scene\tLevel\na cat on a mat\thard\n", "tsv"),
        ("image_id\tthe caption\n5\ta cat\n", "tsv"),
    ],
)
def test_a_table_is_no_text(table, kind):
    for data in (table, f"\n{table}", f"\ufeff{table}", table.replace("\n", "\r\n")):
        with pytest.raises(ValueError, match=f"input_format='{kind}'"):
            read_items(data.encode(), "txt")
    outcomes = [outcome(table.encode(), one) for one in (kind, "auto")]
    assert outcomes[0] == outcomes[1]
    assert "the prompt is missing" in outcomes[0] or outcomes[0][0]


def outcome(data, kind):
    try:
        return read_items(data, kind)
    except ValueError as error:
        return str(error)
