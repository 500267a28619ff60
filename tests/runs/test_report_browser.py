"""The page of a run in a real browser: what is seen, what can be done, and what never happens."""

import math
import re
from dataclasses import replace
from io import BytesIO

import matplotlib
import numpy as np
import pytest
from browser import list_troubles, page_opener, start_browser, wait_for  # noqa: F401
from PIL import Image
from tiny_pipelines import make_pipeline

from sdattn import generate, load_pipeline
from sdattn.runs.imagerun import group_heatmaps, step_groups
from sdattn.runs.report import report
from sdattn.runs.report.command import command_of

pytestmark = pytest.mark.slow

PROMPT = "a red circle left of a blue square"
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
    """With a step, further texts and what changes without a word."""
    watch = {"steps": "all", "branch": "both"}
    return generate(
        demo, PROMPT, negative_prompt="yellow", ask="star ring", capture_options=watch,
        num_inference_steps=6,
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
    """What is to be seen at a part of the picture, after whatever was asked for is drawn."""
    box = page.locator("#stage").bounding_box()
    size = {"width": box["width"], "height": box["height"]}
    shot = page.screenshot(clip={"x": box["x"], "y": box["y"], **size})
    image = Image.open(BytesIO(shot)).convert("RGB")
    return np.array(image.getpixel((int(x * image.width), int(y * image.height))), dtype=int)


def expected(values, x, y, low=None, high=None):
    """Bilinear between the centres of cells, in inferno."""
    rows, cols = values.shape
    at = [min(max(part * n - 0.5, 0), n - 1) for part, n in ((y, rows), (x, cols))]
    (r, c), (dr, dc) = map(math.floor, at), (at[0] % 1, at[1] % 1)
    below, right = min(r + 1, rows - 1), min(c + 1, cols - 1)
    upper = values[r, c] * (1 - dc) + values[r, right] * dc
    lower = values[below, c] * (1 - dc) + values[below, right] * dc
    low, high = values.min() if low is None else low, values.max() if high is None else high
    place = (upper * (1 - dr) + lower * dr - low) / (high - low)
    return (np.array(matplotlib.colormaps["inferno"](float(place))[:3]) * 255).astype(int)


def set_slider(page, name, value):
    page.locator(f"#{name}").fill(str(value))


def word(page, number):
    return page.locator(f".word[data-word='{number}']")


def test_pointing_at_a_word_shows_its_heat_where_the_object_is(run, page_of):
    one = run.image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    plain = colour(page, 0.3, 0.5)
    set_slider(page, "opacity", 100)
    circle, square = (values(one.heatmaps)[i] for i in (2, 7))
    for number, own in ((2, circle), (7, square)):
        word(page, number).hover()
        hot = np.unravel_index(own.argmax(), own.shape)
        spots = [((hot[1] + 0.5) / 16, (hot[0] + 0.5) / 16), (0.1, 0.1), (0.9, 0.9), (0.5, 0.3)]
        for x, y in spots:
            seen, wanted = colour(page, x, y), expected(own, x, y)
            assert np.abs(seen - wanted).max() <= 12, (number, x, y, seen, wanted)
        assert colour(page, *spots[0])[:2].min() > 180  # the bright end of inferno
    page.mouse.move(1, 1)
    assert np.abs(colour(page, 0.3, 0.5) - plain).max() <= 2


def test_raw_scale_puts_all_words_on_one_range_and_tells_it(run, page_of):
    one = run.image_run(0)
    page = page_of(one, viewport={"width": 1280, "height": 900})
    set_slider(page, "opacity", 100)
    page.locator("input[value='raw']").check()
    own = values(one.heatmaps)
    low, high = min(m.min() for m in own), max(m.max() for m in own)
    for number in (1, 2):
        word(page, number).hover()
        for x, y in ((0.25, 0.5), (0.7, 0.4), (0.5, 0.9)):
            wanted = expected(own[number], x, y, low, high)
            assert np.abs(colour(page, x, y) - wanted).max() <= 12
        assert page.locator("#low").inner_text() == f"{float(f'{low:.2g}'):g}"
        assert page.locator("#high").inner_text() == f"{float(f'{high:.2g}'):g} share of attention"
    page.locator("input[value='own']").check()
    word(page, 2).hover()
    assert page.locator("#low").inner_text() == f"{float(f'{own[2].min():.2g}'):g}"


def test_pinned_words_have_colours_of_their_own_and_a_legend(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    set_slider(page, "opacity", 100)
    word(page, 2).click()
    assert word(page, 2).get_attribute("aria-pressed") == "true"
    word(page, 7).click()
    page.mouse.move(1, 1)
    assert page.locator("#pins li").all_inner_texts()[0].startswith("circle")
    own = values(run.heatmaps[0])
    for number, tint in ((2, (0xE6, 0x9F, 0x00)), (7, (0x56, 0xB4, 0xE9))):
        hot = np.unravel_index(own[number].argmax(), own[number].shape)
        seen = colour(page, (hot[1] + 0.5) / 16, (hot[0] + 0.5) / 16)
        assert np.abs(seen - tint).max() <= 25, (number, seen)
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
    page.locator("input[value='raw']").check()
    box = page.locator("#stage").bounding_box()
    for row, col in ((8, 4), (5, 11), (0, 15)):
        at = {"x": box["width"] * (col + 0.5) / 16, "y": box["height"] * (row + 0.5) / 16}
        page.locator("#stage").hover(position=at)
        own = [m[row, col] for m in values(one.heatmaps)]
        order = sorted(range(8), key=lambda i: -own[i])
        rows = page.locator("#spot-words li")
        assert rows.count() == 8
        shown = [float(text) for text in rows.locator(".number").all_inner_texts()]
        np.testing.assert_allclose(shown, [own[i] for i in order], rtol=0.06, atol=2e-3)
        first = rows.first.locator(".label").inner_text()
        assert first == PROMPT.split()[order[0]]
        assert (
            f"row {row + 1} of 16, column {col + 1} of 16"
            in page.locator("#spot-where").inner_text()
        )
        rest = 1 - sum(own)
        told = float(
            re.search(r"padding\): ([\d.]+)", page.locator("#spot-rest").inner_text())[1][:-1]
        )
        assert told == pytest.approx(rest, rel=0.06)
    page.locator("#stage").click(position=at)
    page.mouse.move(1, 1)
    assert page.locator("#spot-words li").count() == 8  # kept
    page.keyboard.press("Escape")
    assert page.locator("#spot-words li").count() == 0


def test_values_are_called_what_they_are(demo, page_of):
    """Of a preset that sums over steps: its groups of layers are means, and what changes without a
    word is no attention; words that caused nothing do not glow."""
    options = {"capture_options": {"steps": "all"}, "num_inference_steps": 4}
    run = generate(demo, "a red circle", preset="daam", causal=True, **options)
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
            assert colour(page, 0.5, 0.5).max() < 90


def test_escape_closes_a_list_and_leaves_the_pins(run, page_of):
    page = page_of(run.image_run(0))
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
    own = values(step_groups(one)["up 8x8"][step])[2]
    for x, y in ((0.25, 0.5), (0.7, 0.4), (0.5, 0.95)):
        assert np.abs(colour(page, x, y) - expected(own, x, y)).max() <= 12
    assert "up 8\u00d78 · step 5" in page.locator("#caption").inner_text()
    slider = page.locator("#group")
    assert slider.get_attribute("aria-valuetext") == "up 8\u00d78"
    slider.focus()
    page.keyboard.press("Home")
    assert page.locator("#group-name").inner_text() == "as in the heatmap"


def test_further_texts_have_maps_of_their_own(run, page_of):
    one = run.image_run(0)
    page = page_of(one, one.heatmaps.find("red circle"), viewport={"width": 1280, "height": 1000})
    set_slider(page, "opacity", 100)
    labels = page.locator(".word").all_inner_texts()
    assert labels[8:] == ["red circle", "yellow", "star", "ring", "<sos>", "<eos>", "<pad>"]
    for number, own in ((8, one.heatmaps["red circle"]), (11, one.more["asked"][1][1])):
        word(page, number).hover()
        wanted = expected(own.values.double().numpy(), 0.3, 0.55)
        assert np.abs(colour(page, 0.3, 0.55) - wanted).max() <= 12


def test_everything_can_be_done_from_the_keyboard(run, page_of):
    page = page_of(run.image_run(0), viewport={"width": 1280, "height": 900})
    for _ in range(4):  # theme, a, red, circle
        page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "circle"
    assert "“circle”" in page.locator("#caption").inner_text()  # focus shows
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
    assert page.evaluate("navigator.clipboard.readText()") == command_of(one)


@pytest.mark.parametrize("width", [320, 390])
def test_nothing_lies_beside_a_phone(run, page_of, width):
    page = page_of(run.image_run(0), viewport={"width": width, "height": 800}, has_touch=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    word(page, 2).tap()
    assert word(page, 2).get_attribute("aria-pressed") == "true"
    page.locator("#stage").tap(position={"x": 80, "y": 100})
    assert page.locator("#spot-words li").count() == 8
    heights = [button.bounding_box()["height"] for button in page.locator(".word").all()]
    assert min(heights) >= 24  # WCAG 2.2, target size


@pytest.fixture(scope="module")
def tiny():
    return make_pipeline()


@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
@pytest.mark.parametrize("prompt", HOSTILE, ids=range(len(HOSTILE)))
def test_prompts_are_text_and_nothing_else(tiny, page_of, tmp_path, prompt):
    made = generate(tiny, prompt, seed=1, **SMALL)
    one = made.image_run(0)
    page = page_of(one)
    shown = page.locator("#prompt").evaluate("e => e.textContent")
    assert shown == prompt
    cats = [i for i, label in enumerate(one.heatmaps.words) if label == "cat"]
    word(page, cats[0]).click()
    assert "“cat”" in page.locator("#caption").inner_text()
    assert page.evaluate("document.images.length") == 1
    assert page.evaluate("document.scripts.length") == 2  # the data and ours
    if cut := one.heatmaps.prompt.truncated:  # the first 100 each, the others as one text
        struck = page.locator("#prompt del").all_inner_texts()
        assert len(struck) == min(len(cut), 100) + (len(cut) > 100)
        assert " ".join(struck).split() == [word.text for word in cut]
    made.save(tmp_path / "run")
    names = [path.name for path in (tmp_path / "run" / "heatmaps").iterdir()]
    assert all(re.fullmatch(r"\d\d-[\w-]+\.png", name) for name in names)
