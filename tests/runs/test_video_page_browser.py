"""The page of a video in a real browser: it plays, its slider goes to a frame, and the words at a
spot are those of that frame."""

import numpy as np
import pytest
from helpers.browser import (  # noqa: F401
    bytes_opener,
    colour,
    faults_in_every_look,
    list_troubles,
    page_opener,
    start_browser,
)
from helpers.tiers import tiered
from helpers.video_runs import disc_run

from sdattn.runs.report import report

pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SCREEN = {"viewport": {"width": 1280, "height": 900}}
SPOT = 0.54, 0.68  # inside a cell; the disc is there in the middle of the video
FRAMES = 9


@pytest.fixture(scope="module")
def run():
    return disc_run(frames=FRAMES, size=(192, 128), prompt="a red cat", steps=2, groups=2)


def told(page):
    """The words at the spot and their numbers, as the page lists them."""
    items = page.locator("#spot-words li").all()
    pairs = ([one.inner_text() for one in item.locator("bdi, .number").all()] for item in items)
    return {word: float(number) for word, number in pairs}


def expected(run, frame, spot=SPOT):
    """The values of the cell at a spot in one of the video's frames, which are counted from 1."""
    found = {}
    for heatmap in run.heatmaps.occurrences():
        values = heatmap.of_frames(FRAMES)[frame - 1].numpy()
        rows, cols = values.shape
        found[heatmap.label] = values[int(spot[1] * rows), int(spot[0] * cols)]
    return found


def agree(run, page, frame):
    assert page.locator("#frame-name").inner_text().startswith(f"Frame {frame} of {FRAMES} ·")
    assert page.locator("#spot-where").inner_text().startswith(f"Frame {frame} ·")
    shown, wanted = told(page), expected(run, frame)
    assert shown.keys() == wanted.keys()
    for word, value in shown.items():
        spread = float(np.ptp(run.heatmaps[word].values.numpy()))
        # a byte a cell, and two digits of a number
        assert abs(value - wanted[word]) <= 0.51 / 255 * spread + 0.051 * wanted[word]


def point(page, spot=SPOT, touch=False):
    box = page.locator("#image").bounding_box()
    at = box["x"] + spot[0] * box["width"], box["y"] + spot[1] * box["height"]
    (page.touchscreen.tap if touch else page.mouse.click)(*at)


def no_scroll(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("options", tiered([PHONE, SCREEN], quick=0), ids=["390", "1280"])
def test_the_keyboard_goes_through_the_video_and_the_words_follow(run, open_bytes, options):
    page = open_bytes(report(run), **options)
    assert no_scroll(page)
    assert page.locator("#play").get_attribute("aria-label") == "Play"  # it never starts by itself
    point(page)
    agree(run, page, 5)
    page.locator("#frame").focus()
    seen = []
    for key, frame in (("Home", 1), ("ArrowRight", 2), ("End", 9), ("ArrowLeft", 8)):
        page.keyboard.press(key)
        agree(run, page, frame)
        seen.append(told(page)["cat"])
    assert seen[0] != seen[1] != seen[2]
    at = page.locator("#frame").get_attribute("aria-valuetext")
    assert at == "Frame 8 of 9 · 0.88 s"
    page.locator("#stage").focus()
    page.keyboard.press("ArrowRight")
    where = page.locator("#spot-told").inner_text()
    assert where.startswith("Frame 8 ·") and "cat" in where


def test_each_frame_is_shown_in_its_colours_with_its_own_heat(run, open_bytes):
    page = open_bytes(report(run), **SCREEN)
    page.keyboard.press("Escape")
    page.mouse.move(1, 1)
    spots = [(0.15, 0.5), (0.5, 0.7), (0.85, 0.5), (0.3, 0.9)]
    for frame in (1, 5, 9):
        page.locator("#frame").fill(str(frame - 1))
        image = run.video[frame - 1]
        for x, y in spots:
            wanted = image.getpixel((int(x * image.width), int(y * image.height)))
            assert np.abs(colour(page, "canvas.original", x, y) - wanted).max() <= 12, (frame, x, y)
    page.locator(".word[data-word='2']").click()
    page.mouse.move(1, 1)
    for frame, hot in ((1, (0.15, 0.5)), (9, (0.85, 0.53))):
        page.locator("#frame").fill(str(frame - 1))
        assert np.ptp(colour(page, "#image", *hot)) > 60  # heat
        assert np.ptp(colour(page, "#image", 1 - hot[0], 0.5)) < 40  # grey, where the disc is not


def test_it_can_be_used_by_everyone(run, open_bytes):
    page = open_bytes(report(run), **SCREEN)
    page.locator(".word[data-word='1']").click()
    point(page)
    assert faults_in_every_look(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert no_scroll(page)
