"""The page of two images in a real browser: what is seen in both, and what can be done."""

from dataclasses import replace

import numpy as np
import pytest
from helpers import small_runs
from helpers.browser import (  # noqa: F401
    bytes_opener,
    colour,
    faults_in_every_look,
    glows,
    list_troubles,
    page_opener,
    start_browser,
)
from helpers.small_runs import small_run
from helpers.tiers import tiered
from PIL import Image

from sdattn import diff
from sdattn.runs.editrun import EditRun
from sdattn.runs.run import Run

pytestmark = pytest.mark.slow

WIDE = {"viewport": {"width": 1280, "height": 900}}
TEXTS = ("a red cat", "a red dog", "a big red cat")
HOSTILE = '</script><script>alert(1)</script> "><img src=x onerror=alert(1)> cat \u202e קטן'


COLOURS = ((90, 150, 60), (200, 80, 120), (40, 60, 220))


def image_runs(*texts):
    """Each image of one colour, so that all else on it is heat."""
    runs = [small_run(seed, text) for seed, text in enumerate(texts, start=1)]
    plain = [Image.new("RGB", (96, 64), colour) for colour in COLOURS]
    return [replace(run, image=image) for run, image in zip(runs, plain, strict=False)]


def edited(*texts, words=(("cat",), ("dog",), ("big",))):
    runs = image_runs(*texts)
    return EditRun(runs, None, None, [list(w) for w in words[: len(runs)]], small_runs.edited())


def compared(*texts, **options):
    return diff(*(Run([run], None, None) for run in image_runs(*texts)), **options)


def word(page, side, number):
    return page.locator(f".word[data-side='{side}'][data-word='{number}']")


def clear(page):
    page.locator("#unpin").click()
    page.locator("#opacity").fill("100")
    page.mouse.move(1, 1)


def test_pointing_at_a_word_shows_it_in_one_image_and_the_linked_word_in_the_other(open_bytes):
    run = edited(*TEXTS[:2])
    page = open_bytes(run.page(), **WIDE)
    clear(page)
    for side, number in ((0, 2), (1, 2)):  # cat, dog: either shows both
        word(page, side, number).hover()
        assert glows(page, "#a", run.heatmaps[0]["cat"].values.numpy())
        assert glows(page, "#b", run.heatmaps[1]["dog"].values.numpy())
        both = [page.locator(".word.shown").nth(i).inner_text() for i in (0, 1)]
        assert both == ["cat", "dog"]
    peaks = [float(f"{run.heatmaps[i][w].values.max():.2g}") for i, w in ((0, "cat"), (1, "dog"))]
    caption = page.locator("#caption").inner_text()
    assert caption == f"“cat” peak {peaks[0]:g} in source · “dog” peak {peaks[1]:g} in target"
    assert page.locator("#high").inner_text() == f"{max(peaks):g} share of attention"  # for both
    word(page, 0, 1).hover()
    assert glows(page, "#b", run.heatmaps[1]["red"].values.numpy())


def test_left_of_the_slider_is_one_image_and_right_of_it_the_other(open_bytes):
    run = edited(*TEXTS[:2])
    page = open_bytes(run.page(), **WIDE)
    clear(page)
    left, right = (page.locator(f"#{name}").bounding_box() for name in "ab")
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    assert not page.locator("#wipe").is_visible()
    page.locator("#over").check()
    slider = page.locator("#wipe")

    def seen(x):
        """Which image is there."""
        found = colour(page, "#stage", x, 0.5)
        return int(np.argmin([np.abs(found - image).max() for image in COLOURS]))

    for value in ("75", "25"):
        slider.fill(value)
        assert [seen(x) for x in (0.1, 0.9)] == [0, 1]
        assert seen(0.5) == (0 if value == "75" else 1)
    assert slider.get_attribute("aria-valuetext") == "25 % source, 75 % target"
    slider.focus()
    page.keyboard.press("End")
    assert [seen(x) for x in (0.1, 0.9)] == [0, 0]
    page.keyboard.press("Home")
    assert [seen(x) for x in (0.1, 0.9)] == [1, 1]
    box = page.locator("#stage").bounding_box()  # by dragging over the image
    page.mouse.move(box["x"] + 0.2 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 60)
    page.mouse.up()
    assert slider.input_value() == "80"
    page.locator("#over").uncheck()
    assert not slider.is_visible()
    again = [page.locator(f"#{name}").bounding_box() for name in "ab"]
    scrolled = left["y"] - again[0]["y"]  # to the checkbox
    assert [{**box, "y": box["y"] + scrolled} for box in again] == [left, right]


def test_it_can_be_done_from_the_keyboard(open_bytes):
    page = open_bytes(edited(*TEXTS[:2]).page(), **WIDE)
    page.locator("#unpin").focus()
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.textContent") == "a"
    for _ in range(2):
        page.keyboard.press("Tab")
    assert "“cat” peak" in page.locator("#caption").inner_text()
    page.keyboard.press("Enter")
    assert word(page, 1, 2).get_attribute("aria-pressed") == "true"
    page.keyboard.press("Escape")
    assert page.locator("[aria-pressed='true']").count() == 0


def test_axe_finds_no_fault(open_bytes):
    page = open_bytes(edited(*TEXTS).page(), **WIDE)
    assert faults_in_every_look(page) == []
    page.locator("#over").check()
    assert faults_in_every_look(page) == []


@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
@pytest.mark.parametrize("theme", tiered(["dark", "light"], quick=0))
def test_prompts_and_names_are_text(open_bytes, theme):
    found = compared(TEXTS[0], HOSTILE, names=("<script>alert(2)</script>", "b"))
    page = open_bytes(found.page(), color_scheme=theme, **WIDE)
    assert page.locator(".prompt").nth(1).evaluate("e => e.textContent") == HOSTILE
    assert "<script>alert(2)</script>" in page.get_by_label("Table of what differs").inner_text()
    assert page.evaluate("document.images.length") == 4  # each image, large and small
    assert page.evaluate("document.scripts.length") == 2
