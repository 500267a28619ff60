"""What people see on the page of the demo: colours in CIELAB, sizes, print, direction."""

import io
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
from helpers.browser import (  # noqa: F401
    bytes_opener,
    list_troubles,
    page_opener,
    start_browser,
)
from helpers.lab import SEEN_BY, chroma, lab
from helpers.small_runs import small_run
from PIL import Image

from sdattn import edit_image, generate
from sdattn.maps.glow import WORD_COLORS
from sdattn.runs.report import report

pytestmark = pytest.mark.slow

SCREEN = {"viewport": {"width": 1280, "height": 720}}
PROMPT = "a cat left of a pizza"


@pytest.fixture(scope="module")
def run(demo):
    return generate(demo, PROMPT, seed=3, capture_options={"steps": "all"}).image_run(0)


@pytest.fixture(scope="module")
def places(run):
    """The cat, the pizza and the ground, bool at the image's pixels: what differs from its corner
    is a thing, left the cat; what lies near their edges is none of them."""
    pixels = np.asarray(run.image.convert("RGB"), dtype=float)
    apart = np.linalg.norm(lab(pixels) - lab(pixels[:4]).mean((0, 1)), axis=-1)
    half = pixels.shape[1] // 2
    left = np.arange(pixels.shape[1]) < half
    inner = apart > 25
    near = np.zeros_like(inner)
    for down in range(-12, 13, 2):
        for right in range(-12, 13, 2):
            near |= np.roll(apart > 10, (down, right), (0, 1))
    assert (inner & left).mean() > 0.05 and (inner & ~left).mean() > 0.05 and (~near).mean() > 0.3
    return {"cat": inner & left, "pizza": inner & ~left, "ground": ~near}


def seen(page, size):
    """RGB of the image with heat as it is on the screen, resized to the image's pixels."""
    page.mouse.move(1, 1)
    shot = Image.open(io.BytesIO(page.locator("#heated").screenshot())).convert("RGB")
    return np.asarray(shot.resize(size, Image.Resampling.BOX), dtype=float)


def test_the_first_view_has_its_things_in_saturated_colours_on_a_plain_ground(
    run, places, open_bytes
):
    page = open_bytes(report(run), **SCREEN)
    assert page.locator("#pins bdi").all_inner_texts() == ["pizza", "cat"]
    colours = seen(page, run.image.size)
    found = {name: np.median(chroma(colours[where])) for name, where in places.items()}
    assert found["cat"] >= 40 and found["pizza"] >= 40 and found["ground"] <= 12, found
    lights = {name: np.median(lab(colours[where])[..., 0]) for name, where in places.items()}
    assert min(lights["cat"], lights["pizza"]) > lights["ground"] + 10, lights
    for name, hex_color in zip(("pizza", "cat"), WORD_COLORS, strict=False):
        tint = lab([int(hex_color[i : i + 2], 16) for i in (1, 3, 5)])
        a, b = np.median(lab(colours[places[name]])[..., 1:], axis=0)
        turned = np.degrees(np.angle(complex(a, b) / complex(*tint[1:])))
        assert abs(turned) < 20, (name, turned)  # its own hue


def test_a_word_that_is_pointed_at_glows_on_its_thing_alone(run, places, open_bytes):
    page = open_bytes(report(run), **SCREEN)
    page.keyboard.press("Escape")
    for word, other in (("cat", "pizza"), ("pizza", "cat")):
        page.get_by_role("button", name=word, exact=True).first.click()
        colours = seen(page, run.image.size)
        found = {name: np.median(chroma(colours[where])) for name, where in places.items()}
        assert found[word] >= 40, (word, found)
        assert found["ground"] <= 12 and found[other] <= 12, (word, found)
        page.get_by_role("button", name=word, exact=True).first.click()
    for word in ("left", "of"):
        page.get_by_role("button", name=word, exact=True).first.click()
        assert np.quantile(chroma(seen(page, run.image.size)), 0.95) >= 8, word
        page.get_by_role("button", name=word, exact=True).first.click()


@pytest.mark.parametrize("people", SEEN_BY)
def test_words_are_told_apart_by_everyone(run, places, open_bytes, people):
    """Colours of the things from each other's and from the ground's, as these people see them."""
    page = open_bytes(report(run), **SCREEN)
    colours = seen(page, run.image.size)
    medians = [np.median(lab(colours[where], people), axis=(0,)) for where in places.values()]
    for one, other in combinations(medians, 2):
        assert np.linalg.norm(one - other) > 30
    tints = [[int(hex_color[i : i + 2], 16) for i in (1, 3, 5)] for hex_color in WORD_COLORS]
    apart = [
        np.linalg.norm(lab(one, people) - lab(other, people))
        for one, other in combinations(tints, 2)
    ]
    assert min(apart) > 30
    first = [np.linalg.norm(lab(a, people) - lab(b, people)) for a, b in combinations(tints[:3], 2)]
    assert min(first) > 60


def test_a_page_with_its_steps_is_small(run):
    assert len(run.details.calls) == 20
    assert len(report(run)) <= 700_000


def test_the_edit_shows_both_images_large_on_a_screen(demo, open_bytes):
    run = edit_image(demo, PROMPT, PROMPT.replace("cat", "dog"), seed=3, num_inference_steps=4)
    page = open_bytes(run.page(), **SCREEN)
    boxes = [one.bounding_box() for one in page.locator("#originals img, #a img, #b img").all()]
    assert len(boxes) == 4
    for box in boxes:
        assert min(box["width"], box["height"]) >= 240
        assert box["y"] + box["height"] <= 720
    for place, one in zip((0, 1), run, strict=True):
        shot = page.locator("#originals img").nth(place).screenshot()
        found = Image.open(io.BytesIO(shot)).convert("RGB").resize(one.image.size)
        middle = slice(20, -20), slice(20, -20)  # without round corners
        assert np.abs(np.asarray(found, float) - np.asarray(one.image, float))[middle].mean() < 8


def test_on_paper_colours_stay_controls_go_and_cards_are_whole(run, open_bytes):
    page = open_bytes(report(run), **SCREEN)
    page.emulate_media(media="print")
    for control in ("#theme", ".controls", "#unpin", "[data-copies]", ".hint", "details.help"):
        for one in page.locator(control).all():
            assert not one.is_visible(), control
    style = "(one) => [getComputedStyle(one).printColorAdjust, getComputedStyle(one).breakInside]"
    for coloured in (".word[aria-pressed=true]", "#pins i", "#stage", ".scale .bar"):
        assert page.locator(coloured).first.evaluate(style)[0] == "exact", coloured
    for whole in page.locator(".card:visible, #stage").all():
        assert whole.evaluate(style)[1] == "avoid"
    assert page.locator(".scroll").first.evaluate("(one) => one.scrollHeight <= one.clientHeight")
    assert page.pdf().startswith(b"%PDF")


@pytest.mark.parametrize(
    ("text", "direction"),
    [("חתול אדום left", "rtl"), ("قطة cat", "rtl"), ("a חתול", "ltr"), ("«1» חתול", "rtl")],
)
def test_a_prompt_from_the_right_is_read_from_the_right(open_bytes, text, direction):
    made = small_run(prompt=text)
    page = open_bytes(report(replace(made, more={})), **SCREEN)
    words = page.locator("#prompt .word").all()
    boxes = [one.bounding_box()["x"] for one in words]
    assert len(boxes) >= 2 and boxes == sorted(boxes, reverse=direction == "rtl")
    width = page.locator("#prompt").bounding_box()
    start = boxes[0] - width["x"]
    assert (start > width["width"] / 2) == (direction == "rtl")  # it starts at its own side
