"""The gallery's pages in a browser."""

import json
from dataclasses import replace
from urllib.parse import unquote

import numpy as np
import pytest
from helpers.bilinear import stretch
from helpers.browser import (  # noqa: F401
    faults_in_every_look,
    list_troubles,
    page_opener,
    start_browser,
    wait_for,
)
from helpers.galleries import HOSTILE, failed, gallery_of, row, written
from helpers.overlays import overlaid, own_place
from helpers.small_runs import small_run
from helpers.tiers import tiered
from PIL import Image

from sdattn.batch.gallery.sheets import make_sheet, tile
from sdattn.maps.masks import MaskSettings

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}
PAINTED = (
    "[...document.querySelectorAll('#cards canvas')].every((one) => parts.has(one) && one.width)"
)


def shown(page):
    """Ids of the cards that are there."""
    return page.locator("#cards > li .meta .mono").all_inner_texts()


def ask(page, text):
    """Write into the search, and wait until the page has answered."""
    page.fill("#search", text)
    address = "(new URLSearchParams(location.hash.slice(1)).get('q') ?? '')"
    wait_for(page, f"{address} === {json.dumps(text)}")


def labels(page):
    wait_for(page, "document.querySelectorAll('#cards .map').length > 0")
    return [one.get_attribute("aria-label") for one in page.locator("#cards .map").all()]


def pixels(page, chosen):
    """RGB of an element as it is seen."""
    from io import BytesIO

    wait_for(page, PAINTED)
    page.evaluate("document.activeElement.blur()")
    return np.asarray(Image.open(BytesIO(page.locator(chosen).first.screenshot())).convert("RGB"))


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of 400 items in 4 shards: (root, rows)."""
    root = tmp_path_factory.mktemp("many") / "a run"
    data, [thumb] = make_sheet([tile(small_run(), ("image", "maps"))])
    (root / "shards").mkdir(parents=True)
    rows = []
    for line in range(1, 401):
        sheet = f"shards/{line // 100:06d}-5eed.webp"
        (root / sheet).write_bytes(data)
        changes = {"sheet": sheet, "thumb": thumb, "width": 96}
        rows.append(row(line, f"a red cat take-{line % 97}x", **changes))
    report = root / rows[0]["place"] / "report.html"
    report.parent.mkdir(parents=True)
    report.write_text("<title>a report</title>")
    return written(root, rows, save=("maps", "report")), rows


def test_items_in_sight_are_drawn_and_those_far_away_let_go(many, open_page):
    root, rows = many
    page = open_page(root / "index.html", viewport={"width": 1280, "height": 900})
    ids = [one["id"] for one in rows]
    assert shown(page) == ids[:60]
    assert page.inner_text("#status") == "400 items"
    assert page.title() == "a run · sdattn" and page.inner_text("h1") == "a run"
    wait_for(page, "document.querySelector('#cards canvas').width === 192")
    for expected in (120, 180, 240):
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        wait_for(page, f"document.querySelectorAll('#cards > li').length >= {expected}")
    wait_for(page, "document.querySelector('#cards canvas').width === 0")
    assert page.locator("#cards canvas").first.bounding_box()["height"] > 100  # it keeps its place
    assert shown(page)[:240] == ids[:240] and len(shown(page)) < 400


def test_a_card_is_reached_and_opened_by_keys_and_the_way_back_keeps_the_search(many, open_page):
    page = open_page(many[0] / "index.html")
    page.keyboard.press("/")
    page.keyboard.type("/")  # a sign like others where one writes
    assert page.input_value("#search") == "/"
    page.keyboard.press("Control+a")
    page.keyboard.type("take-1x")
    wait_for(page, "location.hash === '#q=take-1x'")
    found = shown(page)
    page.keyboard.press("Tab")
    page.keyboard.press("ArrowRight")
    wait_for(page, "location.hash === '#q=take-1x&view=mask'")
    page.keyboard.press("Tab")
    focused = "document.activeElement.matches('a.item:focus-visible')"
    assert page.evaluate(focused)
    assert page.evaluate("document.activeElement === document.querySelector('#cards a')")
    assert page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.title() == "a report"
    expected = f"file://{many[0]}/{many[1][0]['place']}/report.html"
    assert unquote(page.url) == expected
    page.go_back()
    assert shown(page) == found and page.input_value("#search") == "take-1x"
    assert page.is_checked("input[value=mask]")


# What is seen


def test_heat_and_masks_are_those_of_the_map(tmp_path, open_page):
    """Beside an independent resize and colour map, from a page on the disk and from a server."""
    run = replace(small_run(1), image=Image.new("RGB", (96, 64), (200, 200, 200)))
    root = gallery_of(tmp_path / "run", [run], format="tar", masks=MaskSettings(threshold=0.4))
    page = open_page(root / "index.html")
    ask(page, "red")
    seen = pixels(page, ".pane.heat")
    values = run.heatmaps["red"].values.double().numpy()
    low, high = values.min(), values.max()
    top = run.heatmaps["cat"].peak
    places = stretch(own_place(values, top), seen.shape[:2])
    assert run.heatmaps.top == top > 1.05 * high  # so that it is dimmed
    inside = slice(6, -2), slice(2, -8)  # without the card's round corners
    assert np.abs(seen - overlaid([200] * 3, places))[inside].mean() < 4
    assert page.locator(".scale").inner_text().split() == ["red", f"{low:.2g}", f"{high:.2g}"]
    page.click("text=Masks")
    seen = pixels(page, ".pane.mask")[..., 0]
    places = (stretch(values, seen.shape) - low) / (high - low)
    clear = np.abs(places - 0.4) > 0.04
    right = ((seen > 120) == (places >= 0.4))[inside][clear[inside]]
    assert right.mean() > 0.999 and clear.mean() > 0.5
    assert labels(page) == [f"Mask of “red”, from {low + 0.4 * (high - low):.2g}"]


@pytest.mark.parametrize(("save", "format"), [(("image", "maps"), "tar"), (("grid",), "folder")])
def test_hostile_prompts_are_text(tmp_path, open_page, save, format):
    data, [thumb] = make_sheet([tile(small_run(), save)])
    (tmp_path / "it's").write_bytes(data)
    sheet = {"sheet": "it's", "thumb": thumb}
    rows = [row(n, one, item=f"h{n}", **sheet) for n, one in enumerate(HOSTILE, 1)]
    rows[0] |= {"truncated": ["<img src=x onerror=alert(2)>"], "place": "javascript:alert(1)//"}
    rows[0] |= {"words": ["<b onclick=alert(3)>"] * 3}
    rows[1] |= {"place": "//example.org/a b#c?d%2F"}
    rows[0]["statistics"] = [{"word": "<b onclick=alert(3)>", "peak": 1, "mean": 0}] * 3
    rows += [failed(99, "<img src=x onerror=alert(4)>", prompt="<b>")]
    root = written(tmp_path, rows, save=save, format=format, model="<img src=x>")
    page = open_page(root / "index.html", viewport=PHONE)
    wait_for(page, "document.querySelector('#cards canvas').width > 0")
    links = page.locator("#cards a").evaluate_all("all => all.map((one) => one.href)")
    assert all(one.startswith(f"{root.as_uri()}/") for one in links)
    if format == "folder":  # whose cards open files
        assert "example.org/a%20b%23c%3Fd%252F/" in links[1]
    said = page.locator("#cards .prompt")
    assert [one.text_content() for one in said.all()] == [*HOSTILE, "<b>"]
    directions = said.evaluate_all("all => all.map((one) => getComputedStyle(one).direction)")
    assert [n for n, one in enumerate(directions) if one == "rtl"] == [7, 8]
    counts = "[document.querySelectorAll('script').length, document.images.length]"
    assert page.evaluate(counts) == [2, 0]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    ask(page, HOSTILE[1])
    assert shown(page) == ["h2"]


@pytest.mark.parametrize("format", tiered(["folder", "tar"], quick=0))
def test_axe_finds_no_fault(tmp_path, open_page, format):
    runs = [small_run(n, prompt) for n, prompt in enumerate(("a red cat", "a dragon"))]
    runs[1] = replace(runs[1], settings=replace(runs[1].settings, blanked=True))
    others = [failed(3)]
    root = gallery_of(
        tmp_path / "run", runs, others=others, format=format, model="demo", bad_lines=1
    )
    page = open_page(root / "index.html")
    wait_for(page, PAINTED)
    assert faults_in_every_look(page) == []
    page.click("text=Masks")
    assert faults_in_every_look(page) == []


def test_without_scripts_the_page_says_what_to_do(tmp_path, open_page):
    page = open_page(written(tmp_path, [row(1)]) / "index.html", java_script_enabled=False)
    assert "metadata.jsonl, which has a row for each item" in page.inner_text("main")
    assert not page.is_visible("#find")


def test_items_that_lack_a_word_are_found_and_say_the_seeds_they_are_from(tmp_path, open_page):
    chosen = [{"seed": 2**60 + 1, "score": -1.5}, {"seed": 4, "score": -2.25}]
    whole = row(1, score=-1.5, missing=[], candidates=chosen)
    lacking = row(2, score=-3.25, missing=["<b>cat</b>", "hat"])
    page = open_page(
        written(tmp_path, [whole, lacking, row(3)], format="webdataset") / "index.html"
    )
    texts = page.locator("#cards .meta").all_inner_texts()
    assert ["score" in text for text in texts] == [True, True, False]
    assert "score -1.50, best of 2 seeds" in texts[0] and "missing" not in texts[0]
    assert "missing? <b>cat</b>, hat" in texts[1] and "best of" not in texts[1]
    seeds = page.locator("#cards .meta span[title*='seed']").first.get_attribute("title")
    assert seeds == f"seed {2**60 + 1}: -1.50\nseed 4: -2.25"
    assert page.inner_text("#missing") == "Word missing 1"
    page.click("#missing")
    assert shown(page) == [lacking["id"]] and page.evaluate("location.hash") == "#missing=1"
