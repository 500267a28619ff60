"""The page of a video in a real browser: it plays, its slider goes to a frame, and the words at a
spot are those of that frame."""

import re
from io import BytesIO

import numpy as np
import pytest
from helpers.browser import (  # noqa: F401
    faults_in_every_look,
    list_troubles,
    page_opener,
    start_browser,
    wait_for,
)
from helpers.tiers import tiered
from helpers.video_runs import disc_run
from PIL import Image

from sdattn.maps.notebook import framed
from sdattn.maps.strips import frame_means
from sdattn.runs.report import report

pytestmark = pytest.mark.slow

PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
SCREEN = {"viewport": {"width": 1280, "height": 900}}
SPOT = 0.54, 0.68  # inside a cell; the disc is there in the middle of the video
FRAMES = 9


@pytest.fixture(scope="module")
def run():
    return disc_run(frames=FRAMES, size=(192, 128), prompt="a red cat", steps=2, groups=2)


@pytest.fixture
def page_of(tmp_path, open_page):
    def opened(of, **options):
        path = tmp_path / "report.html"
        path.write_bytes(report(of))
        page = open_page(path, **options)
        wait_for(page, "'ready' in document.documentElement.dataset")
        return page

    return opened


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


def colour(page, x, y, name="#image"):
    shot = Image.open(BytesIO(page.locator(name).screenshot())).convert("RGB")
    return np.array(shot.getpixel((int(x * shot.width), int(y * shot.height))), int)


def no_scroll(page):
    return page.evaluate("document.documentElement.scrollWidth <= innerWidth")


@pytest.mark.parametrize("options", tiered([PHONE, SCREEN], 0, 1), ids=["390", "1280"])
def test_the_keyboard_goes_through_the_video_and_the_words_follow(run, page_of, options):
    page = page_of(run, **options)
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


@pytest.mark.parametrize("options", tiered([SCREEN, PHONE], 0, 1), ids=["1280", "390"])
def test_space_plays_stops_and_the_video_begins_again(run, page_of, options):
    page = page_of(run, **options)
    point(page)
    page.evaluate("document.activeElement.blur()")
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Pause"
    wait_for(page, "document.getElementById('frame').value === '8'")
    wait_for(page, "document.getElementById('frame').value === '1'")  # after the last the first
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    stopped = page.locator("#frame").input_value()
    page.wait_for_timeout(300)
    assert page.locator("#frame").input_value() == stopped
    agree(run, page, int(stopped) + 1)
    page.locator("#stage").focus()
    page.keyboard.press("Space")  # here it keeps a spot
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    page.locator("#frame").focus()
    page.keyboard.press("Space")
    assert page.locator("#play").get_attribute("aria-label") == "Pause"
    page.keyboard.press("Home")  # whoever looks for a frame stops the video
    assert page.locator("#play").get_attribute("aria-label") == "Play"
    agree(run, page, 1)


def test_a_finger_plays_slides_and_taps_a_strip(run, page_of):
    page = page_of(run, **PHONE)
    point(page, touch=True)
    agree(run, page, 5)
    page.locator("#play").tap()
    wait_for(page, "document.getElementById('frame').value === '7'")
    page.locator("#play").tap()
    agree(run, page, int(page.locator("#frame").input_value()) + 1)
    slider = page.locator("#frame").bounding_box()
    page.touchscreen.tap(slider["x"] + 2, slider["y"] + slider["height"] / 2)
    agree(run, page, 1)
    strip = page.locator("#strips .strip").first
    strip.scroll_into_view_if_needed()
    box = strip.bounding_box()
    assert box["height"] >= 24
    page.touchscreen.tap(box["x"] + box["width"] * 6.5 / FRAMES, box["y"] + 12)
    agree(run, page, 7)
    point(page, touch=True)


def test_each_frame_is_shown_in_its_colours_with_its_own_heat(run, page_of):
    page = page_of(run, **SCREEN)
    page.keyboard.press("Escape")
    page.mouse.move(1, 1)
    spots = [(0.15, 0.5), (0.5, 0.7), (0.85, 0.5), (0.3, 0.9)]
    for frame in (1, 5, 9):
        page.locator("#frame").fill(str(frame - 1))
        image = run.video[frame - 1]
        for x, y in spots:
            wanted = image.getpixel((int(x * image.width), int(y * image.height)))
            assert np.abs(colour(page, x, y, "canvas.original") - wanted).max() <= 12, (frame, x, y)
    page.locator(".word[data-word='2']").click()
    page.mouse.move(1, 1)
    for frame, hot in ((1, (0.15, 0.5)), (9, (0.85, 0.53))):
        page.locator("#frame").fill(str(frame - 1))
        assert np.ptp(colour(page, *hot)) > 60  # heat
        assert np.ptp(colour(page, 1 - hot[0], 0.5)) < 40  # grey, where the disc is not


def test_a_strip_is_the_mean_by_frame_of_what_is_chosen(run, page_of):
    page = page_of(run, **SCREEN)
    page.locator("#unpin").click()
    assert "Pin a word" in page.locator("#strips-note").inner_text()
    page.locator(".word[data-word='1']").click()
    page.mouse.move(1, 1)
    mean = frame_means(run.heatmaps["red"], FRAMES)
    text = page.locator("#strips .strip").get_attribute("aria-label")
    low, high = (float(one) for one in re.findall(r"from (\S+) to (\S+),", text)[0])
    assert (low, high) == pytest.approx((mean.min(), mean.max()), rel=0.06)
    assert text.endswith(f"highest in frame {mean.argmax() + 1}")
    pixels = "(e) => [...e.getContext('2d').getImageData(0, 0, e.width, 1).data]"
    strip = np.reshape(page.locator("#strips canvas").evaluate(pixels), (-1, 4))[:, :3]
    bright = strip.sum(1)
    assert len(strip) == FRAMES
    same = [mean[i] == mean[i + 1] for i in range(FRAMES - 1)]
    assert [bright[i] == bright[i + 1] for i in range(FRAMES - 1)] == same
    page.locator("#step").fill("1")
    other = page.locator("#strips .strip").get_attribute("aria-label")
    assert other != text
    page.locator(".word[data-word='2']").click()  # of several words each has its colour
    page.mouse.move(1, 1)
    strips, swatches = page.locator("#strips canvas").all(), page.locator("#pins i").all()
    for strip, swatch in zip(strips, swatches, strict=True):
        shades = np.reshape(strip.evaluate(pixels), (-1, 4))
        own = "(e) => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)"
        assert np.abs(shades[-1, :3] - swatch.evaluate(own)).max() <= 8
        assert np.ptp(shades[:, 3]) > 20


def test_a_frame_is_saved_with_its_number(run, page_of):
    page = page_of(run, **SCREEN)
    page.locator("#frame").fill("2")
    with page.expect_download() as waiting:
        page.locator("#save").click()
    assert waiting.value.suggested_filename.startswith("heatmap-Frame_3-")
    with Image.open(waiting.value.path()) as saved:
        assert saved.width == 512


def test_it_plays_in_a_notebooks_frame(run, tmp_path, open_page):
    (tmp_path / "around.html").write_text(f"<!doctype html>{framed(report(run))}", encoding="utf-8")
    page = open_page(tmp_path / "around.html", **SCREEN)
    inner = page.wait_for_selector("iframe").content_frame()
    wait_for(inner, "'ready' in document.documentElement.dataset")
    inner.locator("#play").click()
    wait_for(inner, "document.getElementById('frame').value === '7'")


def test_it_can_be_used_by_everyone(run, page_of):
    page = page_of(run, **SCREEN)
    page.locator(".word[data-word='1']").click()
    point(page)
    assert faults_in_every_look(page) == []
    page.set_viewport_size({"width": 390, "height": 844})
    assert no_scroll(page)
