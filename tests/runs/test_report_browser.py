"""The page of a run in a real browser: what is seen, what can be done, and what never happens."""

import re

import numpy as np
import pytest
from helpers.bilinear import stretch
from helpers.browser import (  # noqa: F401
    bytes_opener,
    colour,
    faults_in_every_look,
    glows,
    list_troubles,
    page_opener,
    start_browser,
)
from helpers.demo_words import PROMPT, THING, THIRD
from helpers.overlays import overlaid, own_place, spotlit, tinted
from helpers.page_data import data_of, maps_of, values_of
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

from sdattn import generate
from sdattn.maps.glow import WORD_COLORS
from sdattn.prompts.words import is_content_word
from sdattn.runs.imagerun import group_heatmaps, step_groups
from sdattn.runs.report import report

pytestmark = pytest.mark.slow

# luma of the canvas with the heat in each of 16x16 cells, summed; 0 without heat
LIGHT = """() => {
  const sums = Array(256).fill(0), { width, height } = canvas, cell = width / 16;
  const { data } = canvas.getContext("2d").getImageData(0, 0, width, height);
  for (let i = 0; i < data.length; i += 4) {
    const at = i / 4, place = Math.floor(at / width / cell) * 16 + Math.floor((at % width) / cell);
    sums[place] += 0.2126 * data[i] + 0.7152 * data[i + 1] + 0.0722 * data[i + 2];
  }
  return sums;
}"""
SMALL = {"height": 128, "width": 192, "num_inference_steps": 3}
HOSTILE = [
    "<script>alert(1)</script> cat",
    '"><img src=x onerror=alert(1)> cat',
    "</script><script>alert(1)</script> cat",
    "' onmouseover='alert(1) cat",
    "{{ 7*7 }} {% raw %} ${alert(1)} cat",
    "<!-- cat --> ]]> \u2028 \u2029 cat",
    "חתול אדום next to a cat קטן",
    "قطة حمراء cat",
    "a 🐈‍⬛ cat 🔴 emoji",
    "cat " * 500,
]


@pytest.fixture(scope="module")
def run(demo):
    """With each step, further texts and where spots looked."""
    watch = {"steps": "all", "branch": "both"}
    return generate(
        demo, PROMPT, negative_prompt="yellow", ask=f"star {THIRD}", capture_options=watch,
        num_inference_steps=6, spots=True,
    )  # fmt: skip


def word(page, number):
    return page.locator(f".word[data-word='{number}']")


def test_pointing_at_a_word_shows_its_heat_where_the_object_is(run, open_bytes):
    one = run.image_run(0)
    page = open_bytes(report(one), viewport={"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    plain = colour(page, "#heated", 0.3, 0.5)
    page.locator("#opacity").fill("100")
    for number in (2, 7):
        word(page, number).hover()
        assert glows(page, "#heated", values_of(one.heatmaps)[number]), number
    page.mouse.move(1, 1)
    assert np.abs(colour(page, "#heated", 0.3, 0.5) - plain).max() <= 2


# every fifth pixel of the canvas with the heat, and of the image as the browser scales it
VIEW = """([box, shown]) => {
  const [heat, image] = [`${box} canvas`, shown].map((one) => document.querySelector(one));
  const { width, height } = heat, bare = document.createElement("canvas"), found = [];
  Object.assign(bare, { width, height });
  for (const one of [heat, image]) {
    bare.getContext("2d").drawImage(one, 0, 0, width, height);
    const { data } = bare.getContext("2d").getImageData(0, 0, width, height);
    for (let y = 2; y < height; y += 5)
      for (let x = 2; x < width; x += 5)
        for (const part of [0, 1, 2]) found.push(data[4 * (y * width + x) + part]);
  }
  return [width, height, ...found];
}"""


def seen(page, box="#heated", image="#image"):
    """RGB of the canvas, RGB of the image below it, and how maps are resized to them."""
    width, height, *found = page.evaluate(VIEW, [box, image])
    rows, cols = len(range(2, height, 5)), len(range(2, width, 5))
    canvas, below = np.array(found, dtype=float).reshape(2, rows, cols, 3)
    return canvas, below, lambda values: stretch(values, (height, width))[2::5, 2::5]


def test_the_page_draws_by_the_formula_of_overlay(run, open_bytes):
    """In float64, from the maps that the page holds, on the image as the browser scales it."""
    one = run.image_run(0)
    html = report(one)
    page = open_bytes(html, viewport={"width": 1280, "height": 900})
    maps = maps_of(data_of(html))[: len(one.heatmaps.occurrences())]
    top = one.heatmaps.top
    pins = [int(i) for i in page.evaluate("state.pinned")]
    canvas, image, resized = seen(page)
    tints = [[int(hex[i : i + 2], 16) for i in (1, 3, 5)] for hex in WORD_COLORS[: len(pins)]]
    own = [resized(own_place(maps[i], top)) for i in pins]
    far = np.all([abs(place - place.max() / 2) > 0.08 * place.max() for place in own], axis=0)
    assert far.mean() > 0.7 and len(pins) == 2  # all but the outlines
    assert np.abs(canvas - tinted(image, own, tints))[far].max() <= 2
    for number, values in enumerate(maps):
        word(page, number).hover()
        canvas, image, _ = seen(page)
        expected = overlaid(image, resized(own_place(values, top)))
        assert np.abs(canvas - expected).max() <= 4, number  # a colormap has 256 colours
    page.locator("#shared").check()
    word(page, 3).hover()
    canvas, image, _ = seen(page)
    assert np.abs(canvas - overlaid(image, resized(maps[3] / top))).max() <= 4
    page.locator("#spotlight").check()
    word(page, 2).hover()
    canvas, image, _ = seen(page)
    assert np.abs(canvas - spotlit(image, resized(maps[2] / top))).max() <= 2


PARTS = {
    None: 1,  # which is not told
    **{"three quarters": 3 / 4, "two thirds": 2 / 3, "three fifths": 3 / 5, "half": 1 / 2},
    **{
        "a third": 1 / 3,
        "a quarter": 1 / 4,
        "a fifth": 1 / 5,
        "a sixth": 1 / 6,
        "an eighth": 1 / 8,
    },
    **{"a tenth": 1 / 10, "a twentieth": 1 / 20, "a fiftieth": 1 / 50},
}


def test_a_weak_word_says_how_weak_and_is_drawn(run, open_bytes):
    one = run.image_run(0)
    page = open_bytes(report(one), viewport={"width": 1280, "height": 900})
    maps = one.heatmaps.occurrences()
    strongest = max((h for h in maps if is_content_word(h.label)), key=lambda h: h.peak)
    told = 0
    for number, heatmap in enumerate(maps):
        word(page, number).hover()
        caption = page.locator("#caption").inner_text()
        found = re.search(r"peak ([\d.]+)(?:, ([a-z ]+) of (\w+).s)? · ", caption)
        part = heatmap.peak / strongest.peak
        assert found[2] == min(PARTS, key=lambda text: abs(np.log(PARTS[text] / part)))
        assert found[3] in (None, strongest.label)
        told += bool(found[2])
        canvas = seen(page)[0]
        assert (np.ptp(canvas, -1) > 20).any()  # some colour, however weak
    assert told >= 4


RAMP = """() => {
  const ramp = $("ramp"), rows = ramp.height;
  return [rows, ...ramp.getContext("2d").getImageData(0, 0, 256, rows).data];
}"""


def test_the_colour_bar_is_drawn_as_the_map_is_up_to_the_words_peak(run, open_bytes):
    one = run.image_run(0)
    page = open_bytes(report(one), viewport={"width": 1280, "height": 900})
    mean = np.asarray(one.image, dtype=float).mean((0, 1))
    assert page.evaluate(RAMP)[0] == page.locator("#pins i").count() == 2  # a row for each
    page.keyboard.press("Escape")
    for heatmap, number in zip(one.heatmaps.occurrences(), range(8), strict=True):
        word(page, number).hover()
        end = np.sqrt(min(1, heatmap.peak / one.heatmaps.top))
        expected = overlaid(np.tile(mean, (256, 1)), end * np.arange(256) / 255)
        shown = np.array(page.evaluate(RAMP)[1:]).reshape(256, 4)
        assert np.abs(shown[:, :3] - expected).max() <= 4
        assert page.locator("#low").inner_text() == "0"
        high = page.locator("#high").inner_text().split()[0]
        assert float(high) == pytest.approx(heatmap.peak, rel=0.06)


def test_a_click_shows_where_a_spot_looked(run, open_bytes):
    page, spots = open_bytes(report(run[0])), run[0].details.spots
    page.keyboard.press("Escape")
    image = page.locator("#image").bounding_box()

    def click(row, col):
        side = image["width"] / 16
        page.mouse.click(image["x"] + (col + 0.5) * side, image["y"] + (row + 0.5) * side)
        page.mouse.move(2, 2)
        return spots[row, col], page.locator("#caption").inner_text(), heat()

    def heat():
        """Where the heat is strongest, (row, col) in cells, and its mean."""
        light = np.array(page.evaluate(LIGHT)).reshape(16, 16)
        return np.unravel_index(light.argmax(), light.shape), light.mean()

    for row, col in ((3, 9), (11, 4)):  # row and column differ
        looked, caption, (strongest, _) = click(row, col)
        assert caption == "Where this spot looked"
        best = np.unravel_index(looked.argmax(), looked.shape)
        assert max(abs(a - b) for a, b in zip(strongest, best, strict=True)) <= 1
    low, high = (page.locator(f"#{end}").inner_text() for end in ("low", "high"))
    assert float(low) == pytest.approx(float(looked.min()), rel=0.06)
    assert float(high.split()[0]) == pytest.approx(float(looked.max()), rel=0.06)
    with page.expect_download() as waiting:
        page.get_by_role("button", name="Save this view as PNG").click()
    assert "Where_this_spot_looked" in waiting.value.suggested_filename
    page.locator(f".word:has-text('{THING}')").first.hover()  # a word comes first
    assert THING in page.locator("#caption").inner_text()
    page.mouse.move(2, 2)
    assert page.locator("#caption").inner_text() == "Where this spot looked"
    page.locator("#looks").uncheck()
    assert page.locator("#caption").inner_text() == "" and heat()[1] == 0


def test_sliders_choose_layers_and_steps(run, open_bytes):
    one = run.image_run(0)
    page = open_bytes(report(one), viewport={"width": 1280, "height": 900})
    page.locator("#opacity").fill("100")
    groups = list(group_heatmaps(one))
    group, step = groups.index("up 8x8"), 4
    page.locator("#group").fill(str(group + 1))
    page.locator("#step").fill(str(step + 1))
    assert page.locator("#group-name").inner_text() == "up 8\u00d78"
    assert page.locator("#step-name").inner_text().startswith("step 5, t = ")
    word(page, 2).hover()
    assert glows(page, "#heated", values_of(step_groups(one)["up 8x8"][step])[2])
    assert "up 8\u00d78 · step 5" in page.locator("#caption").inner_text()
    slider = page.locator("#group")
    assert slider.get_attribute("aria-valuetext") == "up 8\u00d78"
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("#group-name").inner_text() == "preset default: up 16\u00d716"


def test_everything_can_be_done_from_the_keyboard(run, open_bytes):
    page = open_bytes(report(run.image_run(0)), viewport={"width": 1280, "height": 900})
    page.locator("#unpin").click()
    page.locator("#theme").focus()
    for _ in range(3):  # a, red, circle
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == THING
    assert f"“{THING}” peak" in page.locator("#caption").inner_text()  # focus shows
    page.keyboard.press("Enter")
    assert word(page, 2).get_attribute("aria-pressed") == "true"
    page.locator("#stage").focus()
    page.keyboard.press("ArrowRight")  # the crosshair begins in the middle
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowUp")
    assert "row 8 of 16, column 10 of 16" in page.locator("#spot-where").inner_text()
    said = page.locator("#spot-told").inner_text()
    assert "row 8" in said
    assert re.search(r"\w+ 0\.\d+", said)
    page.keyboard.press("Escape")
    assert page.locator("#spot-words li").count() == 0


def test_axe_finds_no_fault(run, open_bytes):
    page = open_bytes(report(run.image_run(0)))
    page.locator("#heated").click(position={"x": 80, "y": 100})
    for summary in page.locator("summary").all():
        summary.click()
    assert faults_in_every_look(page) == []


@pytest.fixture(scope="module")
def tiny():
    return make_pipeline()


@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
@pytest.mark.parametrize("prompt", tiered(HOSTILE, quick=0), ids=range(len(HOSTILE)))
def test_prompts_are_text_and_nothing_else(tiny, open_bytes, tmp_path, prompt):
    made = generate(tiny, prompt, seed=1, **SMALL)
    one = made.image_run(0)
    page = open_bytes(report(one))
    shown = page.locator("#prompt").evaluate("e => e.textContent")
    assert shown == prompt
    cats = [i for i, label in enumerate(one.heatmaps.words) if label == "cat"]
    page.keyboard.press("Escape")
    word(page, cats[0]).click()
    assert "“cat” peak" in page.locator("#caption").inner_text()
    assert page.evaluate("document.images.length") == 2  # the image, large and small
    assert page.evaluate("document.scripts.length") == 2  # the data and ours
    if cut := one.heatmaps.prompt.truncated:  # the first 100 each, the others as one text
        struck = page.locator("#prompt del").all_inner_texts()
        assert len(struck) == min(len(cut), 100) + (len(cut) > 100)
        assert " ".join(struck).split() == [word.text for word in cut]
    made.save(tmp_path / "run")
    names = [path.name for path in (tmp_path / "run" / "heatmaps").iterdir()]
    assert all(re.fullmatch(r"\d\d-[\w-]+\.png", name) for name in names)
