"""``index.html`` of a batch run in a browser."""

import json
import os
import random
import shlex
from urllib.parse import unquote

import pytest
from helpers.browser import (  # noqa: F401
    faults_in_every_look,
    list_troubles,
    page_opener,
    start_browser,
    wait_for,
)
from helpers.demo_words import OTHER, THING
from helpers.galleries import FAILED, HOSTILE, USUAL, ids_of, row, written
from helpers.small_runs import small_run
from PIL import Image

from sdattn.batch import gallery
from sdattn.files.videos import Video, preview
from sdattn.files.writing import write_files
from sdattn.runs.folder import pack_with_page

pytestmark = pytest.mark.slow

PHONE = {"width": 390, "height": 844}
COLOURS, SHAPES = ("red", "Green", "blue", "yellow"), ("circle", "square", "triangle")


def give_images(root, rows):
    """Each item's folder is a link to one that holds what a run saves."""
    (root / "one").mkdir()
    for name in ("image.png", "grid.png"):
        Image.new("RGB", (64, 64), "teal").save(root / "one" / name)
    (root / "one" / "report.html").write_text("<title>a report</title>")
    for one in rows:
        (root / one["place"]).parent.mkdir(parents=True, exist_ok=True)
        os.symlink(root / "one", root / one["place"])


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    """A run of 10,000 items: (root, rows)."""
    root, numbers = tmp_path_factory.mktemp("many") / "a run", random.Random(5)
    root.mkdir()
    rows = []
    for line in range(1, 10_001):
        colours, shapes = numbers.choices(COLOURS, k=2), numbers.choices(SHAPES, k=2)
        prompt = f"a {colours[0]} {shapes[0]} left of a {colours[1]} {shapes[1]}, take-{line % 97}x"
        rows.append(row(line, prompt, seed=numbers.randrange(2**63)))
    give_images(root, rows)
    return written(root, rows, save=[*USUAL, "report"]), rows


def shown(page):
    """Ids of the cards that are there."""
    return page.locator("#cards > li .meta .mono").all_inner_texts()


def ask(page, text):
    """Write into the search, and wait until the page has answered."""
    page.fill("#search", text)
    address = "(new URLSearchParams(location.hash.slice(1)).get('q') ?? '')"
    wait_for(page, f"{address} === {json.dumps(text)}")


def show_all(page):
    """Scroll until no more cards come."""
    end = "document.querySelectorAll('#cards > li').length === found.length"
    page.evaluate("document.documentElement.style.scrollBehavior = 'auto'")
    while not page.evaluate(end):
        before = page.locator("#cards > li").count()
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        wait_for(page, f"document.querySelectorAll('#cards > li').length > {before}")


@pytest.mark.weekly
def test_of_ten_thousand_items_more_come_as_they_are_scrolled_to(many, open_page):
    root, rows = many
    page = open_page(root / "index.html", viewport={"width": 1280, "height": 900})
    ids = [one["id"] for one in rows]
    assert shown(page) == ids[:60]
    assert page.inner_text("#status") == "10,000 items"
    assert page.title() == "a run · sdattn" and page.inner_text("h1") == "a run"
    for expected in (120, 180):
        page.evaluate("scrollTo(0, document.body.scrollHeight)")
        wait_for(page, f"document.querySelectorAll('#cards > li').length >= {expected}")
    assert shown(page)[:180] == ids[:180] and len(shown(page)) < 600
    seen = page.locator("#cards img").first
    assert seen.evaluate("one => [one.naturalWidth, one.loading, one.width > 0]") == [
        64, "lazy", True,
    ]  # fmt: skip


def test_cards_come_also_where_the_browser_tells_late(many, open_page):
    """Of a quick scroll it tells together: that the end was far, that it is near."""
    page = open_page(many[0] / "index.html")
    page.evaluate("near([{ isIntersecting: true }, { isIntersecting: false }])")
    assert len(shown(page)) == 60
    page.evaluate("near([{ isIntersecting: false }, { isIntersecting: true }])")
    assert len(shown(page)) == 120


SEARCHES = (
    "take-96x yellow", "GREEN circle e-13x", "  000123 ", "1234", "circle, take", "nothing like it",
)  # fmt: skip


def test_a_search_finds_the_items_that_have_every_word(many, open_page):
    root, rows = many
    page = open_page(root / "index.html")
    for words in SEARCHES:
        ask(page, words)
        expected = [
            one["id"]
            for one in rows
            if all(
                word in f"{one['prompt']}\n{one['id']}\n{one['seed']}".lower()
                for word in words.lower().split()
            )
        ]
        assert page.inner_text("#status") == f"{len(expected):,} of 10,000 items"
        if len(expected) < 600:
            show_all(page)
        assert shown(page) == expected[: len(shown(page))]
        assert len(shown(page)) == len(expected) or len(shown(page)) % 60 == 0
        assert page.is_visible("#none") == (not expected)
    page.click("#clear")  # there was nothing like it
    assert page.inner_text("#status") == "10,000 items" and len(shown(page)) == 60


def test_a_click_opens_the_report_and_the_way_back_keeps_the_search(many, open_page):
    root, rows = many
    page = open_page(root / "index.html")
    page.keyboard.press("/")
    page.keyboard.type("take-7x")
    wait_for(page, "location.hash === '#q=take-7x'")
    show_all(page)
    found, wanted = shown(page), page.locator("#cards a").last
    [expected] = [one for one in rows if one["id"] == found[-1]]
    with page.expect_navigation():
        wanted.click()
    assert page.title() == "a report"
    assert unquote(page.url) == f"file://{root}/{expected['place']}/report.html"
    page.go_back()
    assert shown(page) == found
    assert page.input_value("#search") == "take-7x"
    wait_for(page, "scrollY > 1000")


def test_every_card_is_reached_by_keys(many, open_page):
    page = open_page(many[0] / "index.html")
    page.focus("#search")
    page.keyboard.press("/")  # a sign like others where one writes
    assert page.input_value("#search") == "/"
    page.keyboard.press("Control+a")
    page.keyboard.type("take-5x")
    wait_for(page, "location.hash === '#q=take-5x'")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "word"
    page.keyboard.press("Tab")
    focused = "document.activeElement.matches('a.item:focus-visible')"
    assert page.evaluate(focused)
    assert page.evaluate("document.activeElement === document.querySelector('#cards a')")
    width = page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)")
    assert width >= 2
    page.keyboard.press("Tab")
    assert page.evaluate(focused)
    with page.expect_navigation():
        page.keyboard.press("Enter")
    assert page.url.endswith("/report.html")


@pytest.mark.parametrize("save", [USUAL, ("maps",)])
def test_hostile_prompts_are_text(tmp_path, open_page, save):
    rows = [row(line, prompt, item=f"h{line}") for line, prompt in enumerate(HOSTILE, 1)]
    rows[0] |= {"truncated": ["<img src=x onerror=alert(2)>"], "words": ["<b onclick=alert(3)>"]}
    give_images(tmp_path, rows)
    page = open_page(written(tmp_path, rows, save=[*save], model="<img src=x>") / "index.html")
    said = page.locator("#cards .prompt")
    assert [one.text_content() for one in said.all()] == [*HOSTILE]
    assert [one.get_attribute("title") for one in said.all()] == [*HOSTILE]
    directions = said.evaluate_all("all => all.map((one) => getComputedStyle(one).direction)")
    assert [n for n, one in enumerate(directions) if one == "rtl"] == [7, 8]
    assert page.evaluate("document.querySelectorAll('script').length") == 2
    images = page.evaluate("[...document.images].map((one) => one.getAttribute('src'))")
    expected = [f"./{one['place']}/image.png" for one in rows] if "image" in save else []
    assert images == expected
    ask(page, HOSTILE[1])
    assert shown(page) == ["h2"]


def test_a_place_is_a_path_below_the_page(tmp_path, open_page):
    """Whoever wrote the row: it opens nothing elsewhere and runs nothing."""
    locations = ("javascript:alert(1)//", "//example.org/x", "items/a b#c?d%2F", "https://x.org/y")
    rows = [row(line, place=location) for line, location in enumerate(locations, 1)]
    page = open_page(written(tmp_path / "run", rows, save=["grid"]) / "index.html")
    links = page.evaluate("[...document.querySelectorAll('#cards a')].map((one) => one.href)")
    below = (tmp_path / "run").as_uri() + "/"
    assert all(one.startswith(below) for one in links) and len(links) == 4
    assert links[2] == f"{below}items/a%20b%23c%3Fd%252F/grid.png"


def test_items_in_shards_are_shown_by_a_command(tmp_path, open_page):
    rows = [row(line, f"a {one} cat", item=one) for line, one in enumerate(("red", "o.k"), 1)]
    for one in rows:
        one["place"] = "shards/0123.tar"
        del one["file_name"]
    root = written(tmp_path / "it's my run", rows, format="webdataset")
    page = open_page(root / "index.html", permissions=["clipboard-read", "clipboard-write"])
    assert page.locator("#cards img, #cards a").count() == 0
    assert shown(page) == ["red", "o.k"]
    assert page.locator(".words").all_inner_texts() == ["a · red · cat", "a · o.k · cat"]
    page.locator("#cards button").nth(1).click()
    wait_for(page, "document.getElementById('said').textContent !== ''")
    copied = page.evaluate("navigator.clipboard.readText()")
    assert shlex.split(copied) == [
        "sdattn", "show", "it's my run", "--item", "o.k", "--out", "o.k",
    ]  # fmt: skip
    assert page.inner_text("#command") == copied.replace("o.k", "ID")
    ask(page, "red")
    page.evaluate("() => { navigator.clipboard.writeText = () => Promise.reject() }")
    page.click("#cards button")
    assert page.inner_text("#cards code") == copied.replace("o.k", "red")
    assert page.evaluate("String(getSelection())") == copied.replace("o.k", "red")


def test_what_was_cut_off_and_blanked_can_be_chosen(tmp_path, open_page):
    rows = [row(line, f"a cat {line}") for line in range(1, 9)]
    for n in (1, 3):
        rows[n]["truncated"] = ["late"]
    for n in (3, 5, 6):
        rows[n]["blanked"] = True
    give_images(tmp_path, rows)
    page = open_page(written(tmp_path, rows) / "index.html")
    assert page.inner_text("#cut") == "Cut off 2" and page.inner_text("#blanked") == "Blanked 3"
    page.click("#cut")
    assert shown(page) == ["000002", "000004"]
    assert page.get_attribute("#cut", "aria-pressed") == "true"
    page.click("#blanked")
    assert shown(page) == ["000004"]
    assert page.locator("#cards .badge").all_inner_texts() == ["cut off", "blanked"]
    page.click("#cut")
    assert shown(page) == ["000004", "000006", "000007"]
    assert page.inner_text("#status") == "3 of 8 items"
    page.reload()
    assert shown(page) == ["000004", "000006", "000007"]


def drawn(root, prompts):
    """Rows of items whose images and overlays are what a run writes."""
    rows = []
    for line, prompt in enumerate(prompts, 1):
        made = small_run(line, prompt)
        rows.append(row(line, prompt, words=[*made.heatmaps.words], width=96, height=64))
        location = root / rows[-1]["place"]
        location.mkdir(parents=True)
        write_files(location, pack_with_page(made, ("image", "overlays")).files)
    return rows


def type_word(page, text):
    page.fill("#word", text)
    address = "(new URLSearchParams(location.hash.slice(1)).get('word') ?? '')"
    wait_for(page, f"{address} === {json.dumps(text)}")
    wait_for(page, "[...document.images].every((one) => one.complete)")


SOURCES = "all => all.map((one) => [one.getAttribute('src').split('/').at(-1), one.alt])"
DIMMED = "all => all.map((one) => getComputedStyle(one.querySelector('img')).opacity < 1)"
SEEN = "all => all.every((one) => one.naturalWidth > 0)"


def test_a_typed_word_shows_its_heatmaps_over_the_items_that_have_it(tmp_path, open_page):
    rows = drawn(tmp_path, ["a red cat", "a red dog", "the girl's <i>Cat</i>, cat"])
    page = open_page(written(tmp_path, rows) / "index.html")
    images = page.locator("#cards img")
    plain = ["image.png", ""]
    assert images.evaluate_all(SOURCES) == [plain] * 3
    type_word(page, " CAT")
    third = rows[2]["words"].index("Cat") + 1
    first, second = ["03-cat.png", "Heatmap of “cat”"], [f"{third:02d}-Cat.png", "Heatmap of “Cat”"]
    assert images.evaluate_all(SOURCES) == [first, plain, second]
    assert images.evaluate_all(SEEN)
    assert page.inner_text("#shown") == "“CAT” over 2 of 3"
    heat, bare = (images.nth(i).bounding_box() for i in (0, 1))
    assert heat["height"] == bare["height"]  # cards do not jump
    assert page.locator(".item").evaluate_all(DIMMED) == [False, True, False]
    type_word(page, "girl's")
    assert images.evaluate_all(SOURCES)[2] == ["02-girl-s.png", "Heatmap of “girl's”"]
    type_word(page, "<")
    assert images.evaluate_all(SOURCES)[2][0] == "03-sign.png" and images.evaluate_all(SEEN)
    page.reload()
    assert page.input_value("#word") == "<"
    assert images.evaluate_all(SOURCES)[2][0] == "03-sign.png"
    type_word(page, "red  CAT")  # a phrase: each of its words, where an item has all of them
    first = [["02-red.png", "Heatmap of “red”"], ["03-cat.png", "Heatmap of “cat”"]]
    assert images.evaluate_all(SOURCES) == [*first, plain, plain]
    assert page.inner_text("#shown") == "“red CAT” over 1 of 3"
    assert images.evaluate_all(SEEN)
    left, right = (images.nth(i).bounding_box() for i in (0, 1))
    assert left["x"] + left["width"] <= right["x"] and left["y"] == right["y"]
    assert page.locator(".heats").bounding_box()["height"] == bare["height"]
    type_word(page, "a dog")  # not beside each other
    assert images.evaluate_all(SOURCES)[1:3] == [
        ["01-a.png", "Heatmap of “a”"],
        ["03-dog.png", "Heatmap of “dog”"],
    ]
    for missing in ("blue cat", "constructor"):
        type_word(page, missing)
        assert page.inner_text("#shown").startswith(f"no item here has “{missing}”")
        assert images.evaluate_all(SOURCES) == [plain] * 3
    type_word(page, "")
    assert not page.is_visible("#shown")


def test_the_words_of_a_phrase_are_those_that_stand_together(tmp_path, open_page):
    rows = drawn(tmp_path, ["a red dog and a red cat"])
    page = open_page(written(tmp_path, rows) / "index.html")
    type_word(page, "red cat")
    files = [src for src, _ in page.locator("#cards img").evaluate_all(SOURCES)]
    assert files == ["06-red.png", "07-cat.png"]
    type_word(page, "red")
    assert page.locator("#cards img").evaluate_all(SOURCES)[0][0] == "02-red.png"


def test_an_overlay_that_is_gone_leaves_the_image(tmp_path, open_page, troubles):
    rows = drawn(tmp_path, ["a red cat"])
    (tmp_path / rows[0]["place"] / "heatmaps" / "03-cat.png").unlink()
    page = open_page(written(tmp_path, rows) / "index.html")
    type_word(page, "cat")
    wait_for(page, "document.images[0].src.endsWith('image.png')")
    assert all("ERR_FILE_NOT_FOUND" in trouble for trouble in troubles)
    troubles.clear()


def test_a_run_without_overlays_says_that_it_has_none(tmp_path, open_page):
    rows = [row(1)]
    give_images(tmp_path, rows)
    page = open_page(written(tmp_path, rows, save=["image", "maps"]) / "index.html")
    assert page.locator("#word").count() == 0
    assert "saved no heatmaps as images" in page.inner_text("main")


def test_other_pages_go_on_with_the_search(tmp_path, monkeypatch, open_page):
    monkeypatch.setattr(gallery, "EACH", 4)
    rows = [row(line, f"a {COLOURS[line % 2]} cat") for line in range(1, 9)]
    give_images(tmp_path, rows)
    page = open_page(written(tmp_path, rows) / "index.html")
    assert not page.is_visible("#cut") and not page.is_visible("#blanked")
    ask(page, "green")
    assert page.inner_text("#status") == "2 of 4 items on this page"
    page.click("nav a >> nth=1")
    wait_for(page, "location.pathname.endsWith('index-2.html')")
    assert shown(page) == ["000005", "000007"]
    assert page.input_value("#search") == "green"


@pytest.mark.parametrize("kind", ["folder", "webdataset"])
def test_a_phone_scrolls_one_way_only(tmp_path, open_page, kind):
    prompts = [*HOSTILE, "a cat"]
    rows = [row(n, one, item="i" * 98 + str(10 + n)) for n, one in enumerate(prompts, 1)]
    rows[0] |= {"truncated": ["late"], "blanked": True, "seed": 2**63 - 1}
    give_images(tmp_path, rows)
    root = written(tmp_path, rows, format=kind, model="m" * 200, errors=[FAILED])
    page = open_page(root / "index.html", viewport=PHONE)
    assert page.evaluate("document.documentElement.scrollWidth") == PHONE["width"]
    tops = page.locator("#cards > li").evaluate_all("all => all.map((one) => one.offsetTop)")
    assert tops.count(tops[0]) == (2 if kind == "folder" else 1)
    ends = page.evaluate(
        "[...document.querySelectorAll('main *')].map((one) => one.getBoundingClientRect().right)"
    )
    assert max(ends) <= PHONE["width"]


def test_the_theme_is_chosen_and_kept(tmp_path, open_page):
    page = open_page(written(tmp_path, []) / "index.html", color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: light"
    light = page.evaluate(ground)
    assert light != dark
    page.reload()
    page.wait_for_function(f"{ground} === '{light}'")  # the page's script may run a little later
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: dark" and page.evaluate(ground) == dark
    page.click("#theme")
    assert page.inner_text("#theme") == "Theme: auto" and page.evaluate(ground) == dark


def test_axe_finds_no_fault(tmp_path, open_page):
    rows = [row(line, f"a red cat, number {line}") for line in range(1, 6)]
    (tmp_path / "run").mkdir()
    give_images(tmp_path / "run", rows)
    location = written(tmp_path / "run", rows, save=[*USUAL, "report"]) / "index.html"
    page = open_page(location)
    assert len(shown(page)) == 5
    assert faults_in_every_look(page) == []


@pytest.fixture
def videos(tmp_path):
    """A run of two videos, its gallery's page: (page, the still and the preview of the first)."""
    rows = [row(line, f"a red cat, number {line}") for line in (1, 2)]
    (tmp_path / "run").mkdir()
    give_images(tmp_path / "run", rows)
    frames = [Image.new("RGB", (64, 64), colour) for colour in ("red", "green", "blue")]
    (tmp_path / "run" / "one" / "preview.webp").write_bytes(preview(Video(frames, 2.0)))
    save = [*USUAL, "video", "report"]
    page = written(tmp_path / "run", rows, save=save, video_format="mp4") / "index.html"
    return page, *(f"./{rows[0]['place']}/{name}" for name in ("image.png", "preview.webp"))


def test_a_video_plays_under_the_pointer_and_the_keyboard_and_by_its_button(videos, open_page):
    """Also by a finger; the other card's stays still."""
    location, still, video = videos
    page = open_page(location, has_touch=True)
    seen = lambda: [one.get_attribute("src") for one in page.locator("#cards img").all()]  # noqa: E731
    other = seen()[1]
    assert seen() == [still, other]
    page.hover("#cards a >> nth=0")
    assert seen() == [video, other]
    assert page.locator("#cards img").first.evaluate(
        "one => one.decode().then(() => one.width > 0)"
    )
    page.mouse.move(0, 0)
    assert seen() == [still, other]
    page.focus("#cards a >> nth=0")
    assert seen() == [video, other]
    page.keyboard.press("Tab")  # to its button
    assert seen() == [still, other]
    button = page.get_by_role("button", name="Play the video of 000001")
    for pressed, expected in (("true", video), ("false", still)):
        page.keyboard.press("Space")
        assert (button.get_attribute("aria-pressed"), seen()) == (pressed, [expected, other])
    for expected in (video, still):
        button.tap()
        assert seen() == [expected, other]
    assert page.url.endswith("index.html")  # nothing was followed


def test_with_less_motion_a_video_plays_when_it_is_asked_to(videos, open_page):
    location, still, video = videos
    page = open_page(location, reduced_motion="reduce")
    first = page.locator("#cards img").first
    page.hover("#cards a >> nth=0")
    page.focus("#cards a >> nth=0")
    assert first.get_attribute("src") == still
    page.click(".play >> nth=0")
    assert first.get_attribute("src") == video
    assert faults_in_every_look(page) == []


def test_images_keep_their_shape(tmp_path, open_page):
    """A run of one size shows it; of several each is whole in a square."""
    for sizes, expected in (([(64, 32)] * 2, 2.0), ([(64, 32), (32, 64)], 1.0)):
        root = tmp_path / str(expected)
        root.mkdir()
        rows = [row(n, width=w, height=h) for n, (w, h) in enumerate(sizes, 1)]
        give_images(root, rows)
        page = open_page(written(root, rows) / "index.html")
        ratios = page.evaluate("[...document.images].map((one) => one.width / one.height)")
        assert ratios == pytest.approx([expected] * 2, rel=0.02)
        assert page.locator("img").first.evaluate("i => getComputedStyle(i).objectFit") == "contain"


def test_without_scripts_the_page_says_what_to_do(tmp_path, open_page):
    page = open_page(written(tmp_path, [row(1)]) / "index.html", java_script_enabled=False)
    assert "metadata.jsonl, which has a row for each item" in page.inner_text("main")
    assert not page.is_visible("#find")


def test_a_page_that_misbehaves_is_noticed(tmp_path, open_page, troubles):
    """The guard of the tests above."""
    (tmp_path / "bad.html").write_text(
        "<script>alert(1); console.error('oh'); fetch('http://127.0.0.1:9/x').catch(() => 0);"
        "setTimeout(() => { document.title = 'done'; throw new Error('no'); })</script>"
    )
    page = open_page(tmp_path / "bad.html")
    wait_for(page, "document.title === 'done'")
    assert {one.partition(":")[0] for one in troubles} == {"dialog", "console", "network", "error"}
    troubles.clear()


def test_the_gallery_of_a_run_that_the_command_drew(invoke, tmp_path, open_page):
    lines = [{"prompt": f"a red {OTHER}"}, {"prompt": 5}, {"prompt": f"a <b> {THING}", "id": "own"}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    options = (
        "--steps",
        "2",
        "--device",
        "cpu",
        "--batch-size",
        "1",
        "--save",
        "image,maps,report",
    )
    code, _, _ = invoke("batch", "in.jsonl", "--out", "parts", "--part", "1/2", *options)
    assert code == 1  # for the line
    invoke("batch", "in.jsonl", "--out", "others", "--part", "2/2", *options)
    invoke("merge", "parts", "others", "--out", "run")
    assert ids_of(tmp_path / "parts" / "index.html") == ["000001"]
    page = open_page(tmp_path / "run" / "index.html")
    assert shown(page) == ["000001", "own"]
    assert "2 items · model demo · preset default" in page.inner_text(".about")
    assert "1 line could not be read" in page.inner_text(".about")
    wait_for(page, "[...document.images].every((one) => one.naturalWidth === 128)")
    with page.expect_navigation():
        page.locator("#cards a").nth(1).click()
    assert page.url.endswith("/run/items/0000/own/report.html")
    assert f"a <b> {THING}" in page.title()
