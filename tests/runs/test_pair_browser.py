"""The page of two images in a real browser: what is seen in both, and what can be done."""

import re
from dataclasses import replace
from io import BytesIO

import numpy as np
import pytest
from helpers import small_runs
from helpers.browser import (  # noqa: F401
    faults_in_every_look,
    list_troubles,
    page_opener,
    start_browser,
    wait_for,
)
from helpers.small_runs import small_run
from helpers.tiers import tiered
from PIL import Image

from sdattn import diff
from sdattn.runs.editrun import EditRun
from sdattn.runs.run import Run

pytestmark = pytest.mark.slow

WIDE = {"viewport": {"width": 1280, "height": 900}}
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}
TEXTS = ("a red cat", "a red dog", "a big red cat")
HOSTILE = '</script><script>alert(1)</script> "><img src=x onerror=alert(1)> cat \u202e קטן'


COLOURS = ((90, 150, 60), (200, 80, 120), (40, 60, 220))


def image_runs(*texts):
    """Each image of one colour, so that all else on it is heat."""
    runs = [small_run(seed, text) for seed, text in enumerate(texts, start=1)]
    plain = [Image.new("RGB", (96, 64), colour) for colour in COLOURS]
    return [replace(run, image=image) for run, image in zip(runs, plain, strict=False)]


@pytest.fixture
def page_of(tmp_path, open_page):
    """Open a page of two images, ready."""

    def opened(of, **options):
        (tmp_path / "pair.html").write_bytes(of.page())
        page = open_page(tmp_path / "pair.html", **{**WIDE, **options})
        wait_for(page, "'ready' in document.documentElement.dataset")
        return page

    return opened


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


def colour(page, place, x, y):
    """What is seen at a part of an element."""
    box = page.locator(place).bounding_box()
    clip = {"x": box["x"] + x * box["width"] - 2, "y": box["y"] + y * box["height"] - 2}
    shot = page.screenshot(clip={**clip, "width": 4, "height": 4})
    return np.asarray(Image.open(BytesIO(shot)).convert("RGB"), dtype=int)[2, 2]


def check_heat(page, part, heatmap):
    """Check that heat lies over the grey image at the highest value and hardly at the lowest."""
    values = heatmap.values.numpy()
    spots = [np.unravel_index(at, values.shape) for at in (values.argmax(), values.argmin())]
    rows, cols = values.shape
    hot, cold = (np.ptp(colour(page, part, (c + 0.5) / cols, (r + 0.5) / rows)) for r, c in spots)
    assert hot > cold + 15, (part, hot, cold)


def test_pointing_at_a_word_shows_it_in_one_image_and_the_linked_word_in_the_other(page_of):
    run = edited(*TEXTS[:2])
    page = page_of(run)
    clear(page)
    top = max(heatmaps.top for heatmaps in run.heatmaps)
    for side, number in ((0, 2), (1, 2)):  # cat, dog: either shows both
        word(page, side, number).hover()
        check_heat(page, "#a", run.heatmaps[0]["cat"])
        check_heat(page, "#b", run.heatmaps[1]["dog"])
        both = [page.locator(".word.shown").nth(i).inner_text() for i in (0, 1)]
        assert both == ["cat", "dog"]
    peaks = [float(f"{run.heatmaps[i][w].values.max():.2g}") for i, w in ((0, "cat"), (1, "dog"))]
    caption = page.locator("#caption").inner_text()
    assert caption == f"“cat” peak {peaks[0]:g} in source · “dog” peak {peaks[1]:g} in target"
    assert page.locator("#high").inner_text() == f"{float(f'{top:.2g}'):g} share of attention"
    word(page, 0, 1).hover()
    check_heat(page, "#b", run.heatmaps[1]["red"])


def test_it_opens_with_the_edited_word_pinned_in_both(page_of):
    page = page_of(edited(*TEXTS[:2]))
    pinned = page.locator(".word[aria-pressed='true']").all_inner_texts()
    assert pinned == ["cat", "dog"]
    assert page.locator("#pins li bdi").all_inner_texts() == ["cat → dog"]
    rows = [row.split("\t") for row in page.locator("#linked tr").all_inner_texts()]
    assert [[row[0], row[2]] for row in rows] == [["a", "a"], ["red", "red"], ["cat", "dog"]]


def test_both_images_are_there_in_their_own_colours_while_words_are_pinned(page_of):
    run = edited(*TEXTS)
    assert run.page().count(b"data:image/") == 3
    page = page_of(run)
    own = page.get_by_role("button", name="original colours")
    for other in (1, 2):
        page.locator("#other").select_option(str(other))
        page.locator("#opacity").fill("100")
        page.mouse.move(1, 1)
        for small, large, number in ((1, "#a", 0), (2, "#b", other)):
            bare, image = f"#own img:nth-child({small})", np.array(COLOURS[number])
            assert np.abs(colour(page, bare, 0.5, 0.5) - image).max() <= 4
            assert np.abs(colour(page, large, 0.05, 0.95) - image).max() > 25  # under heat
            own.hover()
            assert np.abs(colour(page, large, 0.05, 0.95) - image).max() <= 4
            page.mouse.move(1, 1)


def test_left_of_the_slider_is_one_image_and_right_of_it_the_other(page_of):
    run = edited(*TEXTS[:2])
    page = page_of(run)
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
    assert page.locator("#b").bounding_box() == right


def test_the_words_at_a_spot_are_told_for_both_images_by_share(page_of):
    run = edited(*TEXTS[:2])
    page = page_of(run)

    def check(x, y):
        """The numbers there, of both images."""
        for half, heatmaps in enumerate(run.heatmaps):
            shares = {}
            for heatmap in heatmaps.occurrences():
                values = heatmap.values.numpy()
                rows, cols = values.shape
                shares[heatmap.label] = values[int(y * rows), int(x * cols)], np.ptp(values)
            items = page.locator(f"#spot-{half} li").all_inner_texts()
            found = {
                name: float(share)
                for name, share in (item.split()[:: len(item.split()) - 1] for item in items)
            }
            assert list(found) == sorted(shares, key=lambda word: -shares[word][0]), (x, y)
            for name, (share, width) in shares.items():
                assert abs(found[name] - share) <= 0.06 * share + 0.01 * width

    for figure, x, y in (("#a", 0.2, 0.3), ("#b", 0.7, 0.8)):
        box = page.locator(figure).bounding_box()
        page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
        check(x, y)
        places = [cross.bounding_box() for cross in page.locator(".cross").all()]
        for name, place in zip("ab", places, strict=True):
            around = page.locator(f"#{name}").bounding_box()
            middle = (place["x"] + place["width"] / 2 - around["x"]) / around["width"]
            assert middle == pytest.approx(x, abs=0.01)
    page.mouse.down()
    page.mouse.up()
    page.mouse.move(1, 1)
    check(0.7, 0.8)  # a click keeps it
    page.locator("#stage").focus()
    page.keyboard.press("Escape")
    assert page.locator(".spot li").count() == 0
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    rows, cols = run.heatmaps[0]["cat"].values.shape
    check((cols // 2 + 1.5) / cols, (rows // 2 + 0.5) / rows)  # from the middle, a cell further
    assert "source: " in page.locator("#spot-told").inner_text()


def test_what_is_shown_is_saved_with_its_words(page_of):
    run = edited(*TEXTS[:2])
    page = page_of(run)

    def saved(name):
        with page.expect_download() as waiting:
            page.locator("#save").click()
        assert waiting.value.suggested_filename == f"{name}-source_and_target.png"
        return np.asarray(Image.open(waiting.value.path()).convert("RGB"), dtype=int)

    width, height = 512, 341
    alone = saved("heatmap-cat_dog")
    assert alone.shape[:2] == (24 + height + 6 + 24, 2 * width + 12)  # names, images, a word
    word(page, 0, 1).click()
    several = saved("heatmap-cat_dog-red")
    assert several.shape[0] == alone.shape[0] + 2 * 24  # and the scale
    for line, number in enumerate((0, 1)):
        swatch = several[24 + height + 6 + 24 * line + 12, 10]
        style = page.locator("#pins i").nth(number).get_attribute("style")
        assert list(swatch) == [int(part) for part in re.findall(r"\d+", style)]
        text = several[24 + height + 6 + 24 * line :][:24, 26:]
        assert 50 < (text.sum(-1) < 200).sum() < 4000  # something is written there
    page.keyboard.press("Escape")
    bare = saved("image")
    assert bare.shape[:2] == (24 + height, 2 * width + 12)
    for x, image in ((100, COLOURS[0]), (700, COLOURS[1])):
        assert np.abs(bare[200, x] - image).max() <= 2


def test_a_word_of_one_side_is_shown_there_alone_and_named(page_of):
    found = compared(*TEXTS[:2])
    page = page_of(found)
    pins = page.locator("#pins li").all_inner_texts()
    assert sorted(re.sub(r"peak [\d.]+", "", pin).split() for pin in pins) == [
        ["cat", ",", "only", "in", "A"], ["dog", ",", "only", "in", "B"],
    ]  # fmt: skip
    clear(page)
    word(page, 1, 2).hover()
    assert "not in A · “dog” peak" in page.locator("#caption").inner_text()
    for x, y in ((0.2, 0.2), (0.7, 0.6)):  # bare: grey and nothing on it
        assert np.ptp(colour(page, "#a", x, y)) <= 6
    check_heat(page, "#b", found.heatmaps[1]["dog"])
    assert "not in A" in word(page, 1, 2).get_attribute("title")
    assert page.locator(".word.alone").all_inner_texts() == ["cat", "dog"]
    assert "none\t\u2013\tdog" in page.locator("#linked tr").last.inner_text()
    settings = page.locator("section[aria-labelledby='differ-title'] tr").all_inner_texts()
    assert "seed\t1\t2" in settings


def test_each_target_is_compared_with_the_source(page_of):
    run = edited(*TEXTS)
    page = page_of(run)
    assert page.locator(".side:visible h2").all_inner_texts() == ["source", "target-1"]
    page.locator("#other").select_option("target-2")
    assert page.locator(".side:visible h2").all_inner_texts() == ["source", "target-2"]
    assert page.locator("#b-name").inner_text() == "target-2"
    assert page.locator(".word[aria-pressed='true']:visible").all_inner_texts() == ["cat", "cat"]
    clear(page)
    word(page, 0, 2).hover()
    check_heat(page, "#b", run.heatmaps[2]["cat"])


def test_images_of_two_sizes_stand_side_by_side(page_of):
    found = compared(*TEXTS[:2])
    found.image_b = found.image_b.resize((192, 96))
    page = page_of(found)
    assert page.locator("#wipe").count() == 0
    boxes = [page.locator(f"#{name} img:visible").bounding_box() for name in "ab"]
    ratios = [box["width"] / box["height"] for box in boxes]
    assert ratios == pytest.approx([1.5, 2.0], rel=0.02)


def test_it_can_be_done_from_the_keyboard(page_of):
    page = page_of(edited(*TEXTS[:2]))
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


@pytest.mark.parametrize("width", tiered([320, 390, 768], 0, 1))
def test_it_fits_a_phone_and_fingers(page_of, width):
    page = page_of(edited(*TEXTS), **{**PHONE, "viewport": {"width": width, "height": 844}})
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.locator("#unpin").tap()
    word(page, 1, 2).tap()
    assert word(page, 0, 2).get_attribute("aria-pressed") == "true"
    page.locator("#over").check()
    box = page.locator("#stage").bounding_box()
    page.locator("#stage").tap(position={"x": 0.25 * box["width"], "y": 50})
    assert page.locator("#wipe").input_value() == "25"
    for target in page.locator(":is(button, summary, select, input):visible").all():
        size = target.bounding_box()
        small = target.get_attribute("type") == "checkbox"  # its label is the target
        assert small or min(size["width"], size["height"]) >= 24, target.aria_snapshot()
    for control in page.locator(":is(button, input, select, [tabindex]):visible").all():
        assert re.search(r'"[^"]+"|: \S', control.aria_snapshot())
    assert "Tap" in page.locator(".words .hint").first.inner_text()


def test_axe_finds_no_fault(page_of):
    page = page_of(edited(*TEXTS))
    assert faults_in_every_look(page) == []
    page.locator("#over").check()
    assert faults_in_every_look(page) == []


@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
@pytest.mark.parametrize("theme", tiered(["dark", "light"], 0, 1))
def test_prompts_and_names_are_text(page_of, theme):
    found = compared(TEXTS[0], HOSTILE, names=("<script>alert(2)</script>", "b"))
    page = page_of(found, color_scheme=theme)
    assert page.locator(".prompt").nth(1).evaluate("e => e.textContent") == HOSTILE
    assert "<script>alert(2)</script>" in page.get_by_label("Table of what differs").inner_text()
    assert page.evaluate("document.images.length") == 4  # each image, large and small
    assert page.evaluate("document.scripts.length") == 2
