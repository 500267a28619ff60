"""The page of a run in a real browser: what is seen, what can be done, and what never happens."""

import re

import matplotlib
import numpy as np
import pytest
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
from helpers.page_data import values_of
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

from sdattn import generate
from sdattn.runs.imagerun import group_heatmaps, step_groups
from sdattn.runs.report import report

pytestmark = pytest.mark.slow

# opacity of the heat in each of 16x16 cells, summed
ALPHA = """() => {
  const sums = Array(256).fill(0), cell = canvas.width / 16;
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
  for (let i = 3; i < pixels.length; i += 4) {
    const at = (i - 3) / 4, x = at % canvas.width, y = Math.floor(at / canvas.width);
    sums[Math.floor(y / cell) * 16 + Math.floor(x / cell)] += pixels[i];
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


RAMP = """() => {
  const ramp = $("ramp"), rows = ramp.height;
  return [rows, ...ramp.getContext("2d").getImageData(0, 0, 256, rows).data];
}"""


def test_the_colour_bar_is_drawn_as_the_map_is(run, open_bytes):
    """By a formula of our own: colour over grey, opaque by value."""
    one = run.image_run(0)
    page = open_bytes(report(one), viewport={"width": 1280, "height": 900})
    grey = 66 + 0.6325 * (np.asarray(one.image, dtype=float) @ (0.2126, 0.7152, 0.0722)).mean()
    assert page.evaluate(RAMP)[0] == page.locator("#pins i").count() == 2  # a row for each
    page.keyboard.press("Escape")
    word(page, 2).click()
    page.mouse.move(1, 1)
    place = np.arange(256)[:, None] / 255
    heat = matplotlib.colormaps["inferno"](np.arange(256))[:, :3] * 255
    shown = np.array(page.evaluate(RAMP)[1:]).reshape(256, 4)
    assert np.abs(shown[:, :3] - (0.85 * place * heat + (1 - 0.85 * place) * grey)).max() <= 4
    page.locator("#stretch").check()
    lowest = values_of(one.heatmaps)[2].ravel().argmin()
    alpha = page.evaluate(ALPHA)
    assert alpha[lowest] / max(alpha) < 0.03  # transparent, never black


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
        alpha = np.array(page.evaluate(ALPHA)).reshape(16, 16)
        return np.unravel_index(alpha.argmax(), alpha.shape), alpha.mean()

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
