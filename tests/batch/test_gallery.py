"""Sheets of thumbnails and maps, and the gallery's pages: what they hold."""

import base64
import hashlib
import html
import io
import math
import pickle
import re
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch
from helpers.galleries import HOSTILE, Data, data_of, failed, ids_of, row, row_of, written
from helpers.small_runs import edited, small_run
from helpers.video_runs import disc_run
from PIL import Image

from sdattn import Heatmaps
from sdattn.batch import gallery
from sdattn.batch.gallery import sheets
from sdattn.batch.gallery.sheets import make_sheet, tile
from sdattn.maps.heatmap import latent_frames
from sdattn.maps.masks import MaskSettings

BOTH = ("image", "maps")


def opened(data):
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGBA"))


def cut(sheet, place):
    left, top, width, height = place
    return sheet[top : top + height, left : left + width]


def with_maps(run, values):
    """The run with other maps, ``[(frames,) rows, cols, tokens]``."""
    return replace(run, heatmaps=Heatmaps(run.heatmaps.prompt, values))


def shades_of(values):
    """From 0 for the lowest value to 255 for the highest, in float64."""
    values = np.asarray(values, dtype=np.float64)
    return np.rint(255 * (values - values.min()) / (values.max() - values.min()))


# Sheets


def test_maps_are_in_the_sheet_exactly_and_images_nearly():
    runs = [small_run(n, prompt) for n, prompt in enumerate(("a red cat", "a dog, a cat"))]
    smooth = Image.new("RGB", (96, 64), "teal")
    data, places = make_sheet([tile(replace(run, image=smooth), BOTH) for run in runs])
    sheet = opened(data)
    for run, place in zip(runs, places, strict=True):
        image = cut(sheet, place["image"])
        assert image.shape == (64, 96, 4) and (image[..., 3] == 255).all()
        assert np.abs(image[..., :3] - np.array([0, 128, 128.0])).mean() < 1
        words = [*dict.fromkeys(run.heatmaps.words)]
        maps = np.split(cut(sheet, place["maps"])[..., 3], len(words), axis=1)
        for word, found, (low, high, share) in zip(words, maps, place["ranges"], strict=True):
            assert np.array_equal(found, np.pad(found[1:-1, 1:-1], 1, mode="edge"))
            first = run.heatmaps.find(word)[0]
            off = np.abs(found[1:-1, 1:-1] - shades_of(first.values))
            assert off.max() <= 1  # a tie of float32
            assert (low, high) == pytest.approx(first.range, rel=5e-3) and share == 0.5
    assert len(places[1]["ranges"]) == 4  # "a" once


def test_large_maps_are_averaged_to_few_cells():
    fine = torch.rand(32, 48, 77, generator=torch.Generator().manual_seed(0))
    run = with_maps(small_run(), fine)
    for one, heatmap in zip(tile(run, ["maps"]).maps, run.heatmaps.occurrences(), strict=True):
        values = heatmap.values.double().numpy()
        averaged = values.reshape(16, 2, 24, 2).mean((1, 3))
        shades = 255 * (averaged - values.min()) / (values.max() - values.min())
        assert np.abs(one - shades).max() < 0.51  # in the range of the map as it was
    assert {one.shape for one in tile(with_maps(run, fine[:10]), ["maps"]).maps} == {(5, 24)}


@pytest.mark.parametrize(
    ("parts", "images", "maps"),
    [
        (["image"], ["image"], 0),
        (["maps"], [], 3),
        (["image", "overlays"], ["image"], 3),
        (["report"], [], 3),
        (["video"], ["image"], 0),
    ],
)
def test_a_tile_has_what_is_saved(parts, images, maps):
    found = tile(small_run(), parts)
    assert ([*found.images], len(found.maps), len(found.ranges)) == (images, maps, maps)


def test_an_edit_has_its_source_too():
    source = Image.new("RGB", (96, 64), "red")
    data, [place] = make_sheet([tile(small_run(), BOTH, source=source)])
    assert cut(opened(data), place["source"])[32, 48, 0] > 240


def test_a_video_is_its_middle_frame_on_the_scale_of_all():
    run = disc_run(frames=9, latent=3)
    found = tile(run, ("video", "maps"))
    assert np.array_equal(found.images["image"], run.video[4])
    for one, heatmap, (low, high, share) in zip(
        found.maps, run.heatmaps.occurrences(), found.ranges, strict=True
    ):
        middle = latent_frames(3, 9)[4]
        assert np.abs(one - shades_of(heatmap.values)[middle]).max() <= 1
        assert (low, high, share) == (*map(lambda v: float(f"{v:.3g}"), heatmap.range), 0.5)


def best_cut(values):
    """The level with the largest variance between the classes, of all of them."""
    values = np.asarray(values, dtype=np.float64).ravel()
    classes = {level: (values[values < level], values[values >= level]) for level in set(values)}
    del classes[values.min()]
    spread = lambda a, b: len(a) * len(b) * (a.mean() - b.mean()) ** 2  # noqa: E731
    return max(classes, key=lambda level: spread(*classes[level]))


@pytest.mark.parametrize("threshold", [0.3, "otsu", None])
def test_a_mask_begins_where_the_masks_of_the_run_do(threshold):
    run = small_run()
    ranges = tile(run, BOTH, MaskSettings(threshold=threshold)).ranges
    for heatmap, (*_, share) in zip(run.heatmaps.occurrences(), ranges, strict=True):
        low, high = heatmap.range
        otsu = (best_cut(heatmap.values) - low) / (high - low)
        assert share == pytest.approx({"otsu": otsu, None: 0.5}.get(threshold, 0.3), abs=6e-4)


def test_a_flat_map_has_an_empty_mask_and_one_that_is_not_finite_is_refused():
    found = tile(with_maps(small_run(), torch.full((4, 6, 77), 0.25)), BOTH)
    assert {one.max() for one in found.maps} == {0}
    assert found.ranges == [(0.25, 0.25, None)] * 3
    with pytest.raises(ValueError, match="NaN or infinite"):
        tile(with_maps(small_run(), torch.full((4, 6, 77), math.nan)), BOTH)


def test_parts_of_a_sheet_do_not_overlap_and_its_bytes_are_the_same_again(monkeypatch):
    tiles = [tile(small_run(n), BOTH if n % 3 else ["maps"]) for n in range(12)]
    tiles[4] = None
    for most in (20_000_000, 9_000):  # where all are smaller, with fewer words
        monkeypatch.setattr(sheets, "MOST_PIXELS", most)
        data, places = make_sheet(tiles)
        height, width, _ = opened(data).shape
        assert places[4] is None and "image" not in places[0]
        named = [item for place in places if place for item in place.items()]
        boxes = [box for name, box in named if name != "ranges"]
        for left, top, wide, high in boxes:
            assert min(left, top) >= 0 and left + wide <= width and top + high <= height
        for (a, b, c, d), (e, f, g, h) in combinations(boxes, 2):
            assert a + c <= e or e + g <= a or b + d <= f or f + h <= b
        assert make_sheet(pickle.loads(pickle.dumps(tiles))) == (data, places)
    assert places[1]["image"][2:] == [35, 24] or max(places[1]["image"][2:]) <= 37


def test_a_shard_without_images_and_maps_has_no_sheet():
    assert make_sheet([None, tile(small_run(), [])]) == (b"", [None, None])


# Pages


def digest_of(text):
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def pages_of(path):
    """What the links between pages read."""
    [inside] = re.findall("<nav.*</nav>", path.read_text(), re.DOTALL)
    return " ".join(re.sub("<[^>]*>", " ", inside).replace("\u2013", "-").split())


def text_of(path):
    return " ".join(Data(path).text.split())


def test_a_page_holds_what_the_rows_say(tmp_path):
    rows = [row(n, one, seed=2**63 - n, truncated=["late"]) for n, one in enumerate(HOSTILE, 1)]
    rows[2] |= {"blanked": True, "item": "c", "thumb": {"image": [0, 0, 9, 9]}, "sheet": "s.webp"}
    rows += [failed(99, "</script><b>no")]
    data = data_of(written(tmp_path / "run", rows) / "index.html")
    assert data["sheets"] == ["s.webp"]
    for one, found in zip(rows, data["rows"], strict=True):
        words = [*dict.fromkeys(one.get("words", ()))]
        expected = {**one, "seed": str(one["seed"]), "words": words}
        for name in ("id", "place", "prompt", "seed", "words", "truncated", "blanked", "failed"):
            assert (found.get(name) or None) == (expected.get(name) or None)
    assert data["rows"][2]["sheet"] == 0 and data["rows"][2]["thumb"] == rows[2]["thumb"]


def test_the_policy_allows_our_script_and_images_beside_the_page(tmp_path):
    """The whole of it, with the hashes of what is in the page."""
    page = (written(tmp_path / "run", [row(1)]) / "index.html").read_text(encoding="utf-8")
    [policy] = re.findall('http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    [style], [script] = (
        re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL) for tag in ("style", "script")
    )
    assert html.unescape(policy) == (
        f"default-src 'none'; img-src data: 'self' file:; style-src '{digest_of(style)}'; "
        f"script-src '{digest_of(script)}'; base-uri 'none'; form-action 'none'"
    )
    assert (page.count("<script"), page.count("<style"), page.count("<link")) == (2, 1, 1)
    assert not re.search("<(iframe|object|base)", page)


@pytest.mark.parametrize(
    ("save", "format", "opens"),
    [
        (["image", "grid", "report"], "folder", ["report.html", "grid.png", "image.png"]),
        (["grid", "maps"], "folder", ["grid.png"]),
        (["maps", "masks"], "folder", []),
        (["image", "maps", "grid", "report"], "webdataset", []),
        (["video", "maps"], "folder", ["video.mp4", "image.png"]),
    ],
)
def test_what_a_card_opens_follows_from_what_was_saved(tmp_path, save, format, opens):
    about = {"save": save, "format": format} | ({"video_format": "mp4"} if "video" in save else {})
    page = written(tmp_path / "run", [row(1)], **about)
    assert data_of(page / "index.html")["opens"] == opens


def test_the_head_tells_of_the_run_and_what_failed(tmp_path):
    root, rows = tmp_path / "run", [row(line) for line in range(1, 1235)]
    text = text_of(written(root, rows, model="some/<model>") / "index.html")
    assert "1,234 items · model some/<model> · preset plain, refined" in text
    assert "failed" not in text and "could not be read" not in text
    text = text_of(written(root, [rows[0], failed(2)], items=7, bad_lines=3) / "index.html")
    assert "1 of 7 items · model" in text and "To open an item" not in text
    assert "1 item failed, see errors.jsonl. 3 lines could not be read, see bad_l" in text
    text = text_of(written(root, [], items=1, format="webdataset") / "index.html")
    assert "0 of 1 item · model" in text and "No item has been drawn yet." in text
    assert "To open an item" in text
    text = text_of(written(root, rows[:1], save=["maps"], format="webdataset") / "index.html")
    assert "To open an item" not in text  # there is no image to draw on


def test_words_that_the_demo_never_learnt_are_named_and_not_chosen(tmp_path):
    prompts = ("a dragon", "a dragon, a red cat", "a Cat.", "of the")
    rows = [row_of(small_run(n, prompt), n, "x") for n, prompt in enumerate(prompts, 1)]
    for model, strange, best in (
        ("demo", [["dragon"], ["dragon"], None, None], [None, "cat", "Cat", None]),
        ("m", [None] * 4, ["dragon", None, "Cat", None]),
    ):
        page = written(tmp_path / model, rows, model=model) / "index.html"
        found = data_of(page)["rows"]
        assert [one.get("strange") for one in found] == strange
        expected = [one.get("best") for one in found]
        assert [a or b for a, b in zip(best, expected, strict=True)] == expected
        assert ("It knows only: cat, dog" in text_of(page)) == (model == "demo")


def test_the_word_that_stands_out_is_chosen_and_of_an_edit_a_new_one(tmp_path):
    peaks = {"a": 0.9, "dog": 0.5, "and": 0.8, "cat": 0.6, "red": 0.7, "house": 0.2}
    prompt = "a dog and a cat, red house"
    words = ["a", "dog", "and", "a", "cat", ",", "red", "house"]
    numbers = [{"word": one, "peak": peaks.get(one, 0.9), "mean": 0.1} for one in words]
    drawn = row(1, prompt, words=words, statistics=numbers)
    edit = {**drawn, "source_prompt": "a bird and a Cat, red tree"}
    colour = row(2, "a red", words=["a", "red"], statistics=[numbers[0], numbers[6]])
    found = data_of(written(tmp_path, [drawn, edit, colour]) / "index.html")["rows"]
    assert [one["best"] for one in found] == ["cat", "dog", "red"]
    run = small_run(edited=edited())
    assert row_of(run, 1, "x")["source_prompt"] == "a red cat"


# Several pages


def test_many_pages_link_the_ends_and_their_neighbours(tmp_path, monkeypatch):
    monkeypatch.setattr(gallery, "EACH", 1)
    root = written(tmp_path / "run", [row(line) for line in range(1, 31)])
    assert pages_of(root / "index.html") == "Lines 1-1 2-2 3-3 … 30-30"
    assert pages_of(root / "index-4.html") == "Lines 1-1 2-2 3-3 4-4 5-5 6-6 … 30-30"
    assert pages_of(root / "index-15.html") == "Lines 1-1 … 13-13 14-14 15-15 16-16 17-17 … 30-30"
    links = re.findall('class="button" href="([^"]*)" aria-c', (root / "index-4.html").read_text())
    assert links == ["index-4.html"] and ids_of(root / "index-4.html") == ["000004"]
    assert "30 items · model" in text_of(root / "index-4.html")
    monkeypatch.setattr(gallery, "EACH", 3)
    one = written(tmp_path / "one", [row(line) for line in (1, 2, 3)])  # as large as the run
    assert [path.name for path in one.glob("*.html")] == ["index.html"]
    assert "<nav" not in (one / "index.html").read_text()
    assert pages_of(root / "index-29.html") == "Lines 1-1 … 27-27 28-28 29-29 30-30"
