"""The page of a run in a real browser: what is seen, what can be done, and what never happens."""

import re
from dataclasses import replace
from io import BytesIO
from itertools import combinations, pairwise

import matplotlib
import numpy as np
import pytest
from helpers.browser import (  # noqa: F401
    faults_in_every_look,
    list_troubles,
    page_opener,
    start_browser,
    wait_for,
)
from helpers.demo_words import PROMPT, THING, THIRD
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline
from PIL import Image

from sdattn import generate, load_pipeline
from sdattn.maps.notebook import framed
from sdattn.runs.imagerun import group_heatmaps, head_heatmaps, step_groups
from sdattn.runs.report import report

pytestmark = pytest.mark.slow

HINTS = (".words .hint", "#spot-where")
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
WIDTHS = "all => all.map((e) => parseFloat(e.style.width))"
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
def demo():
    return load_pipeline("demo", device="cpu")


@pytest.fixture(scope="module")
def run(demo):
    """With each step, further texts and where spots looked."""
    watch = {"steps": "all", "branch": "both"}
    return generate(
        demo, PROMPT, negative_prompt="yellow", ask=f"star {THIRD}", capture_options=watch,
        num_inference_steps=6, spots=True,
    )  # fmt: skip


@pytest.fixture
def page_of(tmp_path, open_page):
    """Open the page of a run, ready."""

    def opened(of, phrases=(), **options):
        path = tmp_path / "report.html"
        path.write_bytes(report(of, phrases))
        page = open_page(path, **options)
        wait_for(page, "'ready' in document.documentElement.dataset")
        return page

    return opened


def values(heatmaps):
    return [one.values.double().numpy() for one in heatmaps.occurrences()]


def colour(page, x, y):
    """What is to be seen at a part of the image, after whatever was asked for is drawn."""
    box = page.locator("#heated").bounding_box()
    size = {"width": box["width"], "height": box["height"]}
    shot = page.screenshot(clip={"x": box["x"], "y": box["y"], **size})
    image = Image.open(BytesIO(shot)).convert("RGB")
    return np.array(image.getpixel((int(x * image.width), int(y * image.height))), dtype=int)


def glows(page, values):
    """Check that heat lies over the grey image at the highest value and hardly at the lowest."""
    spots = [np.unravel_index(at, values.shape) for at in (values.argmax(), values.argmin())]
    rows, cols = values.shape
    hot, cold = (np.ptp(colour(page, (c + 0.5) / cols, (r + 0.5) / rows)) for r, c in spots)
    return hot > cold + 15


def highest(maps):
    """Of the prompt's words without "a" and "of"."""
    return max(maps[i].max() for i in (1, 2, 3, 6, 7))


def set_slider(page, name, value):
    page.locator(f"#{name}").fill(str(value))


def word(page, number):
    return page.locator(f".word[data-word='{number}']")


def test_pointing_at_a_word_shows_its_heat_where_the_object_is(run, page_of):
    one = run.image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    plain = colour(page, 0.3, 0.5)
    set_slider(page, "opacity", 100)
    for number in (2, 7):
        word(page, number).hover()
        assert glows(page, values(one.heatmaps)[number]), number
    page.mouse.move(1, 1)
    assert np.abs(colour(page, 0.3, 0.5) - plain).max() <= 2


def test_a_word_that_means_nothing_leaves_the_image_bare_until_it_is_stretched(run, page_of):
    one = run.image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    set_slider(page, "opacity", 100)
    maps, of = values(one.heatmaps), 4
    word(page, of).hover()
    assert not glows(page, maps[of])
    top = float(f"{highest(maps):.2g}")
    assert page.locator("#low").inner_text() == "0"
    assert page.locator("#high").inner_text() == f"{top:g} share of attention"
    assert f"peak {float(f'{maps[of].max():.2g}'):g}" in page.locator("#caption").inner_text()
    page.locator("#stretch").check()
    word(page, of).hover()
    assert glows(page, maps[of])
    assert page.locator("#low").inner_text() == f"{float(f'{maps[of].min():.2g}'):g}"


def test_a_bar_below_each_word_is_its_peak(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    bar = "e => parseFloat(getComputedStyle(e, '::after').width) / e.clientWidth"
    maps = values(run.heatmaps[0])
    for number, own in enumerate(maps):
        wide = word(page, number).evaluate(bar)
        assert wide == pytest.approx(min(1, own.max() / highest(maps)), abs=0.02)


def test_it_opens_with_the_strongest_things_of_different_places_pinned(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    page.mouse.move(1, 1)
    maps = values(run.heatmaps[0])
    pinned = [
        int(button.get_attribute("data-word"))
        for button in page.locator(".word[aria-pressed='true']").all()
    ]
    strongest = max((2, 7), key=lambda i: maps[i].max())
    assert strongest in pinned and {*pinned} <= {2, 7}  # never "red", "left" or "blue"
    assert all(maps[i].max() >= 0.5 * maps[strongest].max() for i in pinned)
    for i, j in combinations(pinned, 2):
        assert np.corrcoef(maps[i].ravel(), maps[j].ravel())[0, 1] < 0.5
    legend = page.locator("#pins li").all_inner_texts()
    assert sorted(text.split()[0] for text in legend) == sorted(PROMPT.split()[i] for i in pinned)
    for i in pinned:  # in a colour of its own, and not grey
        row, col = np.unravel_index(maps[i].argmax(), maps[i].shape)
        assert np.ptp(colour(page, (col + 0.5) / 16, (row + 0.5) / 16)) > 30


@pytest.mark.parametrize("width", tiered([1280, 390, 768], 0, 2))
def test_the_image_in_its_own_colours_is_beside_its_heat(run, page_of, width):
    one = run.image_run(0)
    assert report(one).count(b"data:image/") == 1
    page = page_of(one, viewport={"width": width, "height": 844})
    own, heated = (page.locator(name).bounding_box() for name in ("#original", "#heated"))
    assert own["width"] == pytest.approx(heated["width"], abs=1)
    assert own["width"] > min(250, 0.45 * width)
    assert own["y"] == heated["y"] and own["x"] + own["width"] < heated["x"]
    assert heated["y"] + heated["height"] <= 844  # seen as soon as the page is opened
    image = one.image.convert("RGB")
    shot = Image.open(BytesIO(page.locator("#original").screenshot())).convert("RGB")
    for x, y in ((0.25, 0.5), (0.7, 0.4), (0.5, 0.9)):
        seen = shot.getpixel((int(x * shot.width), int(y * shot.height)))
        wanted = image.getpixel((int(x * 128), int(y * 128)))
        assert np.abs(np.subtract(seen, wanted)).max() <= 12
    page.locator("#original").hover(position={"x": own["width"] / 4, "y": own["height"] / 2})
    assert page.locator("#spot-words li").count() == 8  # as over its heat
    assert page.locator(".cross:visible").count() == 2


def test_a_refined_map_leaves_the_ground_bare(demo, page_of):
    """Refined maps are above 0 everywhere."""
    one = generate(demo, PROMPT, refine="self", num_inference_steps=4).image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    word(page, 2).click()
    page.mouse.move(1, 1)
    own = values(one.heatmaps)[2]
    assert own.min() > 0.1 * own.max()
    low = np.quantile(own, 0.2)
    tints = [
        np.ptp(colour(page, (col + 0.5) / 16, (row + 0.5) / 16))
        for row, col in np.argwhere(own <= low)
    ]
    assert max(tints) <= 8
    row, col = np.unravel_index(own.argmax(), own.shape)
    assert np.ptp(colour(page, (col + 0.5) / 16, (row + 0.5) / 16)) > 40


def save(page):
    """The name and the pixels, ``[rows, cols, 3]``, of the view that is saved."""
    page.mouse.move(1, 1)
    with page.expect_download() as waiting:
        page.locator("#save").click()
    image = Image.open(waiting.value.path()).convert("RGB")
    return waiting.value.suggested_filename, np.array(image, dtype=int)


def test_the_view_is_saved_as_it_is_seen(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    word(page, 2).click()
    name, saved = save(page)
    assert name == f"heatmap-{THING}-in_{PROMPT.replace(' ', '_')}.png"
    assert saved.shape == (512 + 6 + 24, 512, 3)  # below it is the word
    for x, y in ((0.25, 0.5), (0.7, 0.4), (0.5, 0.9), (0.05, 0.05)):
        assert np.abs(saved[int(y * 512), int(x * 512)] - colour(page, x, y)).max() <= 8


def test_what_is_saved_has_the_ring_and_is_named_after_what_it_shows(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    assert save(page)[0] == f"image-in_{PROMPT.replace(' ', '_')}.png"
    page.locator("#looks").uncheck()
    word(page, 2).click()
    set_slider(page, "step", 3)
    bare = save(page)[1]
    box = page.locator("#heated").bounding_box()
    at = {"x": box["width"] * (4 + 0.5) / 16, "y": box["height"] * (11 + 0.5) / 16}
    page.locator("#heated").click(position=at)
    name, saved = save(page)
    assert re.match(rf"heatmap-{THING}-step_3-at_3[56]_9[12]-in_a_red", name)
    changed = np.argwhere(np.abs(saved - bare).max(-1) > 30)
    x, y = (4 + 0.5) / 16 * 512, (11 + 0.5) / 16 * 512
    distance = np.hypot(changed[:, 0] + 0.5 - y, changed[:, 1] + 0.5 - x)
    assert len(changed) > 150 and distance.min() > 6 and distance.max() < 16


def test_the_opening_scale_is_that_of_the_pinned_words(demo, page_of):
    """On the scale of "red", which nobody pinned, "umbrella" was nearly black."""
    one = generate(demo, "a red umbrella", seed=0).image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 720})
    assert page.locator("h1").inner_text() == "a red umbrella"
    pinned = page.locator("#prompt .word[aria-pressed='true']").all_inner_texts()
    end = page.locator("#high")

    def told(*words):
        most = max(one.heatmaps[name].values.max().item() for name in words)
        return f"{float(f'{most:.2g}'):g} share of attention"

    assert pinned == ["umbrella"] and end.inner_text() == told("umbrella") != told("red")
    word(page, 1).hover()  # a stronger word is not cut off
    assert end.inner_text() == told("red")
    word(page, 1).click()
    page.mouse.move(1, 1)
    assert end.inner_text() == told("red", "umbrella")
    word(page, 1).click()
    page.mouse.move(1, 1)
    assert end.inner_text() == told("umbrella")


RAMP = """() => {
  const ramp = $("ramp"), rows = ramp.height;
  return [rows, ...ramp.getContext("2d").getImageData(0, 0, 256, rows).data];
}"""


def test_the_colour_bar_is_drawn_as_the_map_is(run, page_of):
    """By a formula of our own: colour over grey, opaque by value; each pinned word has a row."""
    one = run.image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    image = np.asarray(one.image.convert("RGB"), dtype=float)
    grey = 66 + 0.6325 * (image @ (0.2126, 0.7152, 0.0722)).mean()
    place = np.arange(256)[:, None] / 255

    def bar():
        rows, *pixels = page.evaluate(RAMP)
        return np.array(pixels, dtype=float).reshape(rows, 256, 4)

    tints = page.locator("#pins i").evaluate_all(
        "all => all.map((e) => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number))"
    )
    opaque = 0.85 * place**1.5
    rows = bar()
    assert len(rows) == len(tints) == 2
    for row, tint in zip(rows, tints, strict=True):
        wanted = opaque * np.array(tint) + (1 - opaque) * grey
        assert np.abs(row[:, :3] - wanted).max() <= 4
    page.keyboard.press("Escape")
    word(page, 2).click()
    page.mouse.move(1, 1)
    heat = matplotlib.colormaps["inferno"](np.arange(256))[:, :3] * 255
    wanted = 0.85 * place * heat + (1 - 0.85 * place) * grey
    assert np.abs(bar()[0, :, :3] - wanted).max() <= 4
    assert (bar()[..., 3] == 255).all()
    page.locator("#stretch").check()
    lowest = values(one.heatmaps)[2].ravel().argmin()
    alpha = page.evaluate(ALPHA)
    assert alpha[lowest] / max(alpha) < 0.03  # transparent, never black


def test_with_nothing_pinned_the_right_half_says_what_to_do(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 720})
    assert not page.locator(".todo").is_visible()
    page.keyboard.press("Escape")
    assert "Point at a word" in page.locator(".todo").inner_text()
    assert np.ptp(colour(page, 0.3, 0.5)) < 12  # no second copy
    word(page, 2).hover()
    assert not page.locator(".todo").is_visible()


def test_the_first_screen_has_what_is_needed(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 720})
    for name in ("#prompt", "#heated", "#ramp", "#group", "#step", "#opacity", "#pins"):
        box = page.locator(name).bounding_box()
        assert box["y"] >= 0 and box["y"] + box["height"] <= 720, name
    bottoms = [page.locator(name).bounding_box() for name in (".show", ".controls", ".facts")]
    for above, below in pairwise(bottoms):  # nothing lies empty
        assert below["y"] - above["y"] - above["height"] < 120


@pytest.mark.parametrize(("width", "height"), tiered([(390, 844), (320, 568)], 0, 1))
def test_the_image_stays_in_sight_on_a_phone(run, page_of, width, height):
    page = page_of(run.image_run(0), viewport={"width": width, "height": height}, has_touch=True)
    for target in ("#spot-words", "#opacity"):
        page.locator(target).evaluate("(e) => e.scrollIntoView({ block: 'end' })")
        shown, controls = (page.locator(name).bounding_box() for name in (".show", target))
        assert shown["y"] >= 0 and shown["height"] <= 0.45 * height, target
        assert page.locator("#heated").bounding_box()["y"] >= 0
        assert controls["y"] + controls["height"] > shown["y"] + shown["height"]


def test_words_that_are_saved_have_their_colours_below_the_image(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    pins = page.locator("#pins i").all()
    sheet = save(page)[1]
    assert sheet.shape == (512 + 6 + 24 * (len(pins) + 1), 512, 3) and len(pins) == 2
    scale = sheet[512 + 6 + 24 * len(pins) :][:24]
    assert (scale[:, 80:].sum(-1) < 200).sum() > 50  # its ends
    for line, swatch in enumerate(pins):
        wanted = swatch.evaluate(
            "(e) => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)"
        )
        middle = 512 + 6 + 24 * line + 12
        assert list(sheet[middle, 10]) == wanted
        assert (sheet[middle - 12 : middle + 12, 26:].sum(-1) < 200).sum() > 50  # its name
    page.locator("#unpin").click()
    word(page, 2).click()
    page.mouse.move(1, 1)
    seen = np.array(page.evaluate(RAMP)[1:]).reshape(256, 4)[:, :3]
    ramp = save(page)[1][512 + 6 + 12, 4:76]
    assert np.abs(ramp - seen[np.arange(72) * 256 // 72 + 1]).max() <= 8


@pytest.mark.parametrize("width", tiered([320, 390], 0, 1))
def test_the_head_of_a_phones_page_is_low(run, page_of, width):
    page = page_of(run.image_run(0), viewport={"width": width, "height": 844})
    assert page.locator("header").bounding_box()["height"] <= 56


def test_a_frame_that_is_shown_later_has_the_image_and_the_prompt(run, tmp_path, open_page):
    """A frame that is not laid out is 0 high while the page's script runs."""
    frame = framed(report(run.image_run(0))).replace('style="', 'style="display:none;', 1)
    (tmp_path / "around.html").write_text(f"<!doctype html>{frame}", encoding="utf-8")
    page = open_page(tmp_path / "around.html", viewport={"width": 1280, "height": 844})
    inner = page.wait_for_selector("iframe", state="attached").content_frame()
    wait_for(inner, "'ready' in document.documentElement.dataset")
    page.evaluate("document.querySelector('iframe').style.display = 'block'")
    image, prompt = (inner.locator(name).bounding_box() for name in ("#heated", "#prompt"))
    assert min(image["width"], image["height"]) > 300
    assert prompt["height"] > 30


def test_a_head_that_was_kept_can_be_chosen(demo, page_of):
    kept = {"capture_options": {"heads": [1]}, "num_inference_steps": 2}
    one = generate(demo, PROMPT, **kept).image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    set_slider(page, "opacity", 100)
    options = page.locator("#head option").all_inner_texts()
    heads = head_heatmaps(one)
    assert len(options) == 1 + len(heads)
    assert all(re.fullmatch(r"up [\d.]+, head 1", text) for text in options[1:])
    page.locator("#head").select_option("2")
    page.locator("#stretch").check()
    word(page, 2).hover()
    own = values(list(heads.values())[1][1])[2]
    assert glows(page, own)
    assert f"peak {float(f'{own.max():.2g}'):g}" in page.locator("#caption").inner_text()
    assert options[2] in page.locator("#caption").inner_text()
    assert page.locator("#group").is_disabled()


def test_on_a_phone_it_says_tap(run, page_of):
    phone = {"viewport": {"width": 390, "height": 800}, "has_touch": True, "is_mobile": True}
    page = page_of(run.image_run(0), **phone)
    hints = (
        page.locator(".words .hint").first.inner_text() + page.locator("#spot-where").inner_text()
    )
    assert "Tap" in hints and "Point" not in hints and "Click" not in hints
    for target in page.locator(":is(button, summary, select, input):visible").all():
        box = target.bounding_box()
        small = target.get_attribute("type") == "checkbox"  # its label is the target
        assert small or min(box["width"], box["height"]) >= 24, target.aria_snapshot()


def test_pinned_words_have_colours_of_their_own_and_a_legend(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    page.keyboard.press("Escape")
    set_slider(page, "opacity", 100)
    word(page, 2).click()
    assert word(page, 2).get_attribute("aria-pressed") == "true"
    word(page, 7).click()
    page.mouse.move(1, 1)
    assert page.locator("#pins li").all_inner_texts()[0].startswith(THING)
    swatch = "e => getComputedStyle(e).backgroundColor.match(/\\d+/g).map(Number)"
    for number, pin in zip((2, 7), page.locator("#pins i").all(), strict=True):
        own = values(run.heatmaps[0])[number]
        row, col = np.unravel_index(own.argmax(), own.shape)
        seen = colour(page, (col + 0.5) / 16, (row + 0.5) / 16)  # its colour over grey
        assert list(np.argsort(seen)) == list(np.argsort(pin.evaluate(swatch)))
    for number in (0, 1, 3, 4, 5):
        word(page, number).click()
    word(page, 6).click()
    assert page.locator("#pins li").count() == 7
    assert "unpin one" in page.locator("#full").inner_text()
    page.locator("#unpin").click()
    assert page.locator("[aria-pressed='true']").count() == 0
    assert not page.locator("#legend").is_visible()


def test_a_spot_lists_the_words_that_act_there(run, page_of):
    one = run.image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    box = page.locator("#heated").bounding_box()
    for row, col in ((8, 4), (5, 11), (0, 15)):
        at = {"x": box["width"] * (col + 0.5) / 16, "y": box["height"] * (row + 0.5) / 16}
        page.locator("#heated").hover(position=at)
        own = [m[row, col] for m in values(one.heatmaps)]
        order = sorted(range(8), key=lambda i: -own[i])
        rows = page.locator("#spot-words li")
        assert rows.count() == 8
        shown = [float(text) for text in rows.locator(".number").all_inner_texts()]
        np.testing.assert_allclose(shown, [own[i] for i in order], rtol=0.06, atol=2e-3)
        first = rows.first.locator(".label").inner_text()
        assert first == PROMPT.split()[order[0]]
        bars = rows.locator(".fill").evaluate_all(
            "all => all.map((e) => parseFloat(e.style.width))"
        )
        most = max(m.max() for m in values(one.heatmaps))
        np.testing.assert_allclose(bars, [100 * own[i] / most for i in order], atol=1.5)
        assert (
            f"row {row + 1} of 16, column {col + 1} of 16"
            in page.locator("#spot-where").inner_text()
        )
        rest = 1 - sum(own)
        told = float(
            re.search(r"padding\): ([\d.]+)", page.locator("#spot-rest").inner_text())[1][:-1]
        )
        assert told == pytest.approx(rest, rel=0.06)
    page.locator("#heated").click(position=at)
    page.mouse.move(1, 1)
    assert page.locator("#spot-words li").count() == 8  # kept
    page.keyboard.press("Escape")
    assert page.locator("#spot-words li").count() == 0


def test_a_click_shows_where_a_spot_looked(run, page_of):
    page, spots = page_of(run[0]), run[0].details.spots
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


def test_values_are_called_what_they_are(demo, page_of):
    """Of a preset that sums over steps: its groups of layers are means, and what changes without a
    word is no attention; words that caused nothing do not glow."""
    options = {"capture_options": {"steps": "all"}, "num_inference_steps": 4}
    run = generate(demo, f"a red {THING}", preset="daam", causal=True, **options)
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    unit, caption, name = (page.locator(f"#{one}") for one in ("high", "caption", "step-name"))
    word(page, 2).hover()
    assert unit.inner_text().endswith(" attention, summed over steps")
    assert name.inner_text() == "sum of 4 steps"
    set_slider(page, "group", 1)
    word(page, 2).hover()
    assert unit.inner_text().endswith(" share of attention")
    assert "mean of 4 steps" in caption.inner_text() and name.inner_text() == "mean of 4 steps"
    most = max(one.values.max().item() for one in run.causal_heatmaps[0])
    for number, one in enumerate(run.causal_heatmaps[0], start=3):
        word(page, number).hover()
        assert page.locator("#low").inner_text() == "0"
        assert unit.inner_text() == f"{float(f'{most:.2g}'):g} mean change of colour"
        if one.range[1] < most / 20:
            assert np.ptp(colour(page, 0.5, 0.5)) < 20  # grey: nothing lies over the image


def test_escape_closes_a_list_and_leaves_the_pins(run, page_of):
    page = page_of(run.image_run(0))
    page.locator("#unpin").click()
    word(page, 2).click()
    page.locator("#colormap").focus()
    page.keyboard.press("Escape")
    assert page.locator("[aria-pressed='true']").count() == 1
    page.locator("#unpin").focus()
    page.keyboard.press("Escape")
    assert page.locator("[aria-pressed='true']").count() == 0


def test_sliders_choose_layers_and_steps(run, page_of):
    one = run.image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    set_slider(page, "opacity", 100)
    groups = list(group_heatmaps(one))
    group, step = groups.index("up 8x8"), 4
    set_slider(page, "group", group + 1)
    set_slider(page, "step", step + 1)
    assert page.locator("#group-name").inner_text() == "up 8\u00d78"
    assert page.locator("#step-name").inner_text().startswith("step 5, t = ")
    word(page, 2).hover()
    assert glows(page, values(step_groups(one)["up 8x8"][step])[2])
    assert "up 8\u00d78 · step 5" in page.locator("#caption").inner_text()
    slider = page.locator("#group")
    assert slider.get_attribute("aria-valuetext") == "up 8\u00d78"
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("#group-name").inner_text() == "preset default: up 16\u00d716"


def test_further_texts_have_maps_of_their_own(run, page_of):
    one = run.image_run(0)
    page = page_of(one, one.heatmaps.find(f"red {THING}"), viewport={"width": 1280, "height": 1000})
    set_slider(page, "opacity", 100)
    labels = page.locator(".word").all_inner_texts()
    assert labels[8:] == [f"red {THING}", "yellow", "star", THIRD, "<sos>", "<eos>", "<pad>"]
    for number, own in ((8, one.heatmaps[f"red {THING}"]), (11, one.more["asked"].maps[1])):
        word(page, number).hover()
        assert glows(page, own.values.double().numpy()), number


def test_everything_can_be_done_from_the_keyboard(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
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


def test_controls_have_names_and_text_has_contrast(run, page_of):
    for theme in ("light", "dark"):
        page = page_of(run.image_run(0), color_scheme=theme)
        for control in page.locator(":is(button, input, select, [tabindex]):visible").all():
            snapshot = control.aria_snapshot()
            assert re.search(r'"[^"]+"|: \S', snapshot), snapshot
        low = page.evaluate(CONTRAST)
        assert low == []


def test_axe_finds_no_fault(run, page_of):
    page = page_of(run.image_run(0))
    page.locator("#heated").click(position={"x": 80, "y": 100})
    for summary in page.locator("summary").all():
        summary.click()
    assert faults_in_every_look(page) == []


CONTRAST = """() => {
  const linear = (s) => (s /= 255) <= 0.04045 ? s / 12.92 : ((s + 0.055) / 1.055) ** 2.4;
  const light = ([r, g, b]) => 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const ground = (e) => {
    for (; e; e = e.parentElement) {
      const colour = rgb(getComputedStyle(e).backgroundColor);
      if (colour.length < 4 || colour[3] > 0.99) return colour;
    }
    return [255, 255, 255];
  };
  const low = [];
  const texts = "p, h1, h2, h3, dt, dd, td, th, label, button, pre, output, del";
  for (const e of document.querySelectorAll(texts)) {
    if (!e.textContent.trim() || !e.offsetParent) continue;
    const a = light(rgb(getComputedStyle(e).color)), b = light(ground(e));
    const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (ratio < 4.5) low.push([e.tagName, e.textContent.trim().slice(0, 30), ratio]);
  }
  return low;
}"""


def test_the_theme_can_be_chosen(run, page_of):
    page = page_of(run.image_run(0), color_scheme="light")
    paper = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.locator("#theme").click()
    page.locator("#theme").click()
    assert page.locator("#theme").inner_text() == "Theme: dark"
    assert page.evaluate(paper) != light


def test_the_command_is_copied(run, page_of):
    one = replace(run.image_run(0), more={})
    page = page_of(one, permissions=["clipboard-read", "clipboard-write"])
    page.locator("#copy").click()
    wait_for(page, "document.getElementById('copied').textContent === 'copied'")
    assert page.evaluate("navigator.clipboard.readText()") == "sdattn generate --config run.json"


@pytest.mark.parametrize("width", tiered([320, 390], 0, 1))
def test_nothing_lies_beside_a_phone(run, page_of, width):
    page = page_of(run.image_run(0), viewport={"width": width, "height": 800}, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#unpin").tap()
    word(page, 2).tap()
    assert word(page, 2).get_attribute("aria-pressed") == "true"
    page.locator("#heated").tap(position={"x": 80, "y": 100})
    assert page.locator("#spot-words li").count() == 8
    heights = [button.bounding_box()["height"] for button in page.locator(".word").all()]
    assert min(heights) >= 24  # WCAG 2.2, target size


@pytest.fixture(scope="module")
def tiny():
    return make_pipeline()


@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
@pytest.mark.parametrize("prompt", tiered(HOSTILE, 0), ids=range(len(HOSTILE)))
def test_prompts_are_text_and_nothing_else(tiny, page_of, tmp_path, prompt):
    made = generate(tiny, prompt, seed=1, **SMALL)
    one = made.image_run(0)
    page = page_of(one)
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
