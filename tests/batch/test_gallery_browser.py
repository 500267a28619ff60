"""The gallery's pages in a browser."""

import functools
import http.server
import json
import random
import shlex
import threading
from dataclasses import replace
from urllib.parse import unquote

import matplotlib
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
from helpers.demo_words import OTHER, THING
from helpers.galleries import HOSTILE, data_of, failed, gallery_of, row, written
from helpers.small_runs import edited, small_run
from helpers.tiers import tiered
from helpers.video_runs import disc_run
from PIL import Image

from sdattn import explain, generate, load_pipeline
from sdattn.batch import gallery
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
    """A run of 10,000 items in 100 shards: (root, rows)."""
    root, numbers = tmp_path_factory.mktemp("many") / "a run", random.Random(5)
    data, [thumb] = make_sheet([tile(small_run(), ("image", "maps"))])
    (root / "shards").mkdir(parents=True)
    rows = []
    for line in range(1, 10_001):
        prompt = f"a {numbers.choice(('red', 'Green', 'blue'))} cat take-{line % 97}x"
        sheet = f"shards/{line // 100:06d}-5eed.webp"
        (root / sheet).write_bytes(data)
        changes = {"sheet": sheet, "thumb": thumb, "seed": numbers.randrange(2**63)}
        rows.append(row(line, prompt, width=96, **changes))
    for one in rows[:200:7]:
        (root / one["place"]).mkdir(parents=True)
        (root / one["place"] / "report.html").write_text("<title>a report</title>")
    return written(root, rows, save=("maps", "report")), rows


def test_of_ten_thousand_items_those_in_sight_are_drawn(many, open_page):
    root, rows = many
    page = open_page(root / "index.html", viewport={"width": 1280, "height": 900})
    ids = [one["id"] for one in rows]
    assert shown(page) == ids[:60]
    assert page.inner_text("#status") == "10,000 items"
    assert page.title() == "a run · sdattn" and page.inner_text("h1") == "a run"
    first = page.locator("#cards canvas").first
    wait_for(page, "document.querySelector('#cards canvas').width === 192")
    for expected in (120, 180, 240):
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        wait_for(page, f"document.querySelectorAll('#cards > li').length >= {expected}")
    wait_for(page, "document.querySelector('#cards canvas').width === 0")
    before = first.bounding_box()
    assert before["height"] > 100  # what is freed keeps its place
    drawn = "[...document.querySelectorAll('#cards canvas')].filter((one) => one.width).length"
    wait_for(page, f"{drawn} > 0")
    assert page.evaluate(drawn) < 120 and page.evaluate("sheets.size") <= 12
    assert shown(page)[:240] == ids[:240] and len(shown(page)) < 600


def test_a_search_finds_the_items_that_have_every_word(many, open_page):
    page = open_page(many[0] / "index.html")
    for words in ("take-96x blue", "GREEN e-13x", " 000123 ", "1234", "nothing like it"):
        ask(page, words)
        expected = [
            one["id"]
            for one in many[1]
            if all(
                word in f"{one['prompt']}\n{one['id']}\n{one['seed']}".lower()
                for word in words.lower().split()
            )
        ]
        assert page.inner_text("#status") == f"{len(expected):,} of 10,000 items"
        assert shown(page) == expected[:60]
        assert page.is_visible("#none") == (not expected)
    page.click("#clear")  # there was nothing like it
    assert page.inner_text("#status") == "10,000 items" and len(shown(page)) == 60
    # Of a quick scroll the browser tells together: that the end was far, that it is near
    page.evaluate("reached([{ isIntersecting: false }, { isIntersecting: true }])")
    page.evaluate("reached([{ isIntersecting: true }, { isIntersecting: false }])")
    assert len(shown(page)) == 120


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


def overlaid(grey, places):
    """The page's heat over grey: the higher, the more opaque."""
    colours = np.array(matplotlib.colormaps["inferno"](places))[..., :3] * 255
    opaque = 0.9 * places[..., None] ** 0.8
    return (1 - opaque) * grey + opaque * colours


def test_heat_and_masks_are_those_of_the_map(tmp_path, open_page):
    """Beside an independent resize and colour map, from a page on the disk and from a server."""
    run = replace(small_run(), image=Image.new("RGB", (96, 64), (200, 200, 200)))
    root = gallery_of(tmp_path / "run", [run], format="tar", masks=MaskSettings(threshold=0.4))
    page = open_page(root / "index.html")
    ask(page, "cat")
    seen = pixels(page, ".pane.heat")
    values = run.heatmaps["cat"].values.double().numpy()
    low, high = values.min(), values.max()
    places = (stretch(values, seen.shape[:2]) - low) / (high - low)
    inside = slice(6, -2), slice(2, -8)  # without the card's round corners
    assert np.abs(seen - overlaid(200 * 0.65, places))[inside].mean() < 4
    assert page.locator(".scale").inner_text().split() == ["cat", f"{low:.2g}", f"{high:.2g}"]
    page.click("text=Masks")
    seen = pixels(page, ".pane.mask")[..., 0]
    places = (stretch(values, seen.shape) - low) / (high - low)
    clear = np.abs(places - 0.4) > 0.04
    right = ((seen > 120) == (places >= 0.4))[inside][clear[inside]]
    assert right.mean() > 0.999 and clear.mean() > 0.5
    assert labels(page) == [f"Mask of “cat”, from {low + 0.4 * (high - low):.2g}"]


def test_a_page_is_the_same_from_a_server(tmp_path, open_page, troubles):
    root = gallery_of(tmp_path / "run", [small_run()], save=("image", "maps", "report"))
    serve = functools.partial(http.server.SimpleHTTPRequestHandler, directory=root)
    serve.log_message = serve.func.log_message = lambda *_: None
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        seen = [pixels(open_page(one), ".pane.heat") for one in (address, root / "index.html")]
        server.shutdown()
    assert np.array_equal(*seen)
    asked = {one.removeprefix(f"network: {address}").partition("?")[0] for one in troubles}
    place = data_of(root / "index.html")["rows"][0]["place"]
    assert asked == {"/", "/shards/000000-5eed.webp", f"/{place}/image.png"}
    troubles.clear()


@pytest.mark.parametrize("size", [(192, 96), (96, 192), (640, 400)])
def test_images_are_whole_in_each_format(tmp_path, open_page, size):
    run = small_run()
    runs = [
        replace(run, image=run.image.resize(size)),
        replace(run, image=run.image.resize((64, 64))),
    ]
    for format, several in (("tar", runs), ("folder", runs[:1])):
        root = gallery_of(tmp_path / format, several, format=format)
        page = open_page(root / "index.html")
        wait_for(page, PAINTED)
        boxes = "all => all.map((one) => one.offsetWidth / one.offsetHeight)"
        layers = page.locator("#cards li >> nth=0 >> .pane > *")
        ratio = size[0] / size[1]
        assert layers.evaluate_all(boxes) == pytest.approx([ratio] * layers.count(), rel=0.02)
        panes = page.locator(".pane").evaluate_all(boxes)
        expected = ratio if len(several) == 1 else 1
        assert panes == pytest.approx([expected] * len(panes), rel=0.02)


def test_a_word_that_is_searched_shows_its_map(tmp_path, open_page):
    runs = [
        small_run(n, prompt) for n, prompt in enumerate(("a red cat", "the Cat, a dog", "a dog"))
    ]
    page = open_page(gallery_of(tmp_path / "run", runs, format="tar") / "index.html")
    words = lambda: [label.split("“")[1].split("”")[0] for label in labels(page)]  # noqa: E731
    assert len(words()) == 3
    for asked, expected in (
        ("CAT", ["cat", "Cat"]),
        ("dog a", ["a", "a"]),
        ("a dog", ["dog", "dog"]),
    ):
        ask(page, asked)
        assert words() == expected
    page.reload()
    assert words() == ["dog", "dog"]
    page.click("text=Images")
    assert page.locator(".map").count() == 0 and page.locator("#cards canvas").count() == 2


@pytest.mark.filterwarnings("ignore:The demo model never learnt")
def test_runs_of_the_demo(tmp_path, open_page):
    """Drawn, explained and edited; noise is not called a dragon."""
    pipe, short = load_pipeline("demo", device="cpu"), {"num_inference_steps": 2}
    noise = np.random.default_rng(0).integers(0, 256, (128, 128, 3), np.uint8)
    drawn = generate(pipe, f"a red {THING} next to a blue {OTHER}", **short)[0]
    noisy = explain(pipe, Image.fromarray(noise), "a dragon", timesteps=[100])[0]
    edit = small_run(1, "a red dog", edited=edited())
    runs, sources = [drawn, noisy, edit], [None, None, small_run().image]
    root = gallery_of(tmp_path / "run", runs, sources=sources, others=[failed(4)], model="demo")
    page = open_page(root / "index.html")
    wait_for(page, "[...document.images].every((one) => one.naturalWidth > 0)")
    panes = [one.locator(".pane").count() for one in page.locator("#cards > li").all()]
    assert panes == [2, 2, 3, 0]
    assert page.locator(".without").inner_text().startswith("No heatmap")
    assert page.locator(".prompt").nth(2).inner_text() == "a red cat → a red dog"
    assert page.locator(".reason").inner_text() == "Failed: RuntimeError: no"
    assert page.is_visible("#learnt") and page.inner_text("#strange") == "Never learnt 1"
    ask(page, "dragon")
    assert page.locator(".scale bdi").inner_text() == "dragon, never learnt"


def test_failures_and_warnings_can_be_chosen(tmp_path, open_page):
    rows = [row(line, f"a cat {line}") for line in range(1, 8)] + [failed(8, "OSError: disk")]
    for n in (1, 3):
        rows[n]["truncated"] = ["late"]
    for n in (3, 5, 6):
        rows[n]["blanked"] = True
    page = open_page(written(tmp_path, rows, format="tar") / "index.html")
    assert [page.inner_text(f"#{one}") for one in ("failed", "truncated", "blanked")] == [
        "Failed 1", "Cut off 2", "Blanked 3",
    ]  # fmt: skip
    assert not page.is_visible("#strange")
    page.click("#truncated")
    assert shown(page) == ["000002", "000004"]
    assert page.locator("#cards .badge").all_inner_texts() == ["cut off", "cut off", "blanked"]
    page.click("#failed")
    assert shown(page) == ["000002", "000004", "000008"]
    page.reload()
    assert page.inner_text("#status") == "3 of 8 items"
    ask(page, "disk")
    assert shown(page) == ["000008"]


@pytest.mark.parametrize("save", [("image", "maps"), ("grid",)])
def test_hostile_prompts_are_text(tmp_path, open_page, save):
    data, [thumb] = make_sheet([tile(small_run(), save)])
    (tmp_path / "it's").write_bytes(data)
    rows = [
        row(n, one, item=f"h{n}", sheet="it's", thumb=thumb) for n, one in enumerate(HOSTILE, 1)
    ]
    rows[0] |= {
        "truncated": ["<img src=x onerror=alert(2)>"],
        "words": ["<b onclick=alert(3)>"] * 3,
    }
    rows[0]["statistics"] = [{"word": "<b onclick=alert(3)>", "peak": 1, "mean": 0}] * 3
    rows += [failed(99, "<img src=x onerror=alert(4)>", prompt="<b>")]
    root = written(tmp_path, rows, save=save, format="tar", model="<img src=x>")
    page = open_page(root / "index.html", viewport=PHONE)
    wait_for(page, "document.querySelector('#cards canvas').width > 0")
    said = page.locator("#cards .prompt")
    assert [one.text_content() for one in said.all()] == [*HOSTILE, "<b>"]
    directions = said.evaluate_all("all => all.map((one) => getComputedStyle(one).direction)")
    assert [n for n, one in enumerate(directions) if one == "rtl"] == [7, 8]
    assert page.evaluate(
        "[document.querySelectorAll('script').length, document.images.length]"
    ) == [2, 0]
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    ask(page, HOSTILE[1])
    assert shown(page) == ["h2"]


def test_a_place_is_a_path_below_the_page(tmp_path, open_page):
    """Whoever wrote the row: it opens nothing elsewhere and runs nothing."""
    locations = ("javascript:alert(1)//", "//example.org/x", "https://x.org/y", "a b#c?d%2F")
    rows = [row(line, place=location) for line, location in enumerate(locations, 1)]
    page = open_page(written(tmp_path / "run", rows, save=["grid"]) / "index.html")
    links = page.locator("#cards a").evaluate_all("all => all.map((one) => one.href)")
    below = (tmp_path / "run").as_uri() + "/"
    assert all(one.startswith(below) for one in links) and len(links) == 4
    assert links[3] == f"{below}a%20b%23c%3Fd%252F/grid.png"


def test_items_in_shards_are_opened_by_a_command(tmp_path, open_page):
    rows = [row(line, f"a {one} cat", item=one) for line, one in enumerate(("red", "o.k"), 1)]
    root = written(tmp_path / "it's my run", rows, format="webdataset")
    page = open_page(root / "index.html", permissions=["clipboard-read", "clipboard-write"])
    assert page.locator("#cards a").count() == 0
    page.locator("#cards button").nth(1).click()
    wait_for(page, "document.getElementById('said').textContent !== ''")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert shlex.split(copied) == [
        "sdattn", "show", "it's my run", "--item", "o.k", "--out", "o.k",
    ]  # fmt: skip
    assert page.inner_text("#command") == copied.replace("o.k", "ID")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject() }")
    page.click("#cards button")
    assert page.evaluate("String(getSelection())") == copied.replace("o.k", "red")


def test_a_sheet_that_is_gone_is_named(tmp_path, open_page, troubles):
    root = gallery_of(tmp_path / "run", [small_run()], format="tar")
    (root / "shards" / "000000-5eed.webp").unlink()
    page = open_page(root / "index.html")
    wait_for(page, "document.querySelector('.scale').textContent.includes('is missing')")
    assert all("ERR_FILE_NOT_FOUND" in trouble for trouble in troubles)
    troubles.clear()


def test_other_pages_go_on_with_the_search(tmp_path, monkeypatch, open_page):
    monkeypatch.setattr(gallery, "EACH", 4)
    rows = [row(line, f"a {('red', 'Green')[line % 2]} cat") for line in range(1, 9)]
    page = open_page(written(tmp_path, rows, format="tar") / "index.html")
    ask(page, "green")
    assert page.inner_text("#status") == "2 of 4 items on this page"
    page.click("nav a >> nth=1")
    wait_for(page, "location.pathname.endsWith('index-2.html')")
    assert shown(page) == ["000005", "000007"]
    assert page.input_value("#search") == "green"


def test_a_video_plays_under_the_pointer_and_the_keyboard_and_by_its_button(tmp_path, open_page):
    """Also by a finger; with less motion only when it is asked to."""
    runs, save = [disc_run(), disc_run()], ("video", "maps", "report")
    root = gallery_of(tmp_path / "run", runs, save=save, video_format="webp")
    page = open_page(root / "index.html", has_touch=True)

    def seen():
        images = page.locator(".image img").all()
        return [one.get_attribute("src").split("/")[-1] for one in images]

    still, video = ["image.png", "image.png"], ["preview.webp", "image.png"]
    assert seen() == still
    page.hover("#cards a >> nth=0")
    assert seen() == video
    page.mouse.move(0, 0)
    assert seen() == still
    page.focus("#cards a >> nth=0")
    assert seen() == video
    page.keyboard.press("Tab")  # to its button
    button = page.get_by_role("button", name="Play the video of 000001")
    for pressed, expected in (("true", video), ("false", still)):
        page.keyboard.press("Space")
        assert (button.get_attribute("aria-pressed"), seen()) == (pressed, expected)
    page.emulate_media(reduced_motion="reduce")
    page.focus("#cards a >> nth=0")
    assert seen() == still
    button.tap()
    assert seen() == video and page.url.endswith("index.html")
    assert faults_in_every_look(page) == []


@pytest.mark.parametrize("format", tiered(["folder", "tar"], 0, 1))
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
