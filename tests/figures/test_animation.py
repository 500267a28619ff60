"""The maps over the steps as a moving image: its colours, its files, and what cannot be drawn."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.demo_words import PROMPT, THING
from helpers.overlays import overlaid
from helpers.tiers import tiered
from PIL import Image, ImageSequence

from sdattn import generate
from sdattn.figures.animation import HOLD, animate, save_animation

pytestmark = pytest.mark.slow

OPTIONS = {"height": 128, "width": 192, "num_inference_steps": 4}
SIDES = 384, 256  # (width, height) of a tile: the image's, four times
GAP = 6  # pixels around each tile


@pytest.fixture(scope="module")
def run(demo):
    return generate(demo, PROMPT, capture_options={"steps": "all"}, **OPTIONS)


@pytest.fixture(scope="module")
def frames(run):
    return animate(run.image_run(0), [THING, "blue"])


def tile(frame, row=0, column=0):
    """The image, or a word's, of a frame of two rows, without what is written below it."""
    left, top = GAP + column * (SIDES[0] + GAP), GAP + row * (frame.height - GAP) // 2
    return frame.crop((left, top, left + SIDES[0], top + SIDES[1]))


def maps_of(run, column):
    """A token's map in each step, ``[steps, 16, 24]``, float64."""
    finest = [
        maps[0].double().numpy()
        for name, maps in run.store.maps.items()
        if name.startswith("up") and maps.shape[-3:-1] == (16, 24)
    ]
    assert len(finest) == 3
    return np.mean(finest, axis=0)[..., column]


def highest_of(run, steps):
    """What any word but "a" and "of" reaches in some steps."""
    return max(maps_of(run, column)[list(steps)].max() for column in (2, 3, 4, 7, 8))


def bilinear(values, x, y):
    """At the centre of pixel (x, y) of a tile, 16 of whose pixels are a cell's side."""
    row, col = (y + 0.5) / 16 - 0.5, (x + 0.5) / 16 - 0.5
    top, left = int(row), int(col)
    part = values[top : top + 2, left : left + 2]
    return np.array([top + 1 - row, row - top]) @ part @ np.array([left + 1 - col, col - left])


def check_colours(frame, place, values, high):
    """At some pixels: the map of a step in colour, from 0 to high, over the image in grey."""
    image, shown = np.asarray(tile(frame)), np.asarray(tile(frame, *place))
    for x, y in ((24, 40), (120, 120), (200, 72), (300, 100), (360, 232)):
        wanted = overlaid(image[y, x], bilinear(values, x, y) / high)
        np.testing.assert_allclose(shown[y, x], wanted, atol=6)


# Frames


def test_a_frame_a_step_of_one_size(frames):
    assert len(frames) == 4
    assert {one.mode for one in frames} == {"RGB"}
    assert {one.width for one in frames} == {2 * (SIDES[0] + GAP) + GAP}
    assert len({one.height for one in frames}) == 1


def test_the_image_stays_and_the_step_below_it_is_told(run, frames):
    pixels = np.asarray(run.images[0].convert("RGB"), np.float64)
    shown = np.asarray(tile(frames[0]), np.float64)
    assert np.abs(shown.reshape(128, 2, 192, 2, 3).mean((1, 3)) - pixels).mean() < 2
    assert len({tile(one).tobytes() for one in frames}) == 1
    top, bottom = GAP + SIDES[1], frames[0].height // 2
    told = [one.crop((0, top, SIDES[0] + GAP, bottom)).tobytes() for one in frames]
    assert len(set(told)) == 4


@pytest.mark.parametrize(("place", "column"), [((0, 1), 3), ((1, 0), 7)])
def test_all_words_have_one_scale_in_all_frames(run, frames, place, column):
    high = highest_of(run, (0, 1, 2, 3))
    for frame, values in zip(frames, maps_of(run, column), strict=True):
        check_colours(frame, place, values, high)


def test_all_words_by_default_and_each_occurrence(run):
    frame, twice = (animate(run.image_run(0), words)[3] for words in (None, ["a"]))
    across, down = twice.width - GAP, twice.height - GAP  # of 3 tiles, in 2 rows
    assert frame.size == (2 * across + GAP, 3 * down // 2 + GAP)  # 9 tiles, 4 in a row


@pytest.mark.parametrize("size", [1600, 333])
def test_frames_are_at_most_so_large(run, size):
    found = animate(run.image_run(0), size=size)
    assert len(found) == 4
    assert {one.size for one in found} == {found[0].size}
    assert 0.9 * size < max(found[0].size) <= size


def test_chosen_steps_are_the_frames(demo, run):
    some = {"steps": [1, 3]}
    few = generate(demo, PROMPT, words=[THING], capture_options=some, **OPTIONS)
    shown, all_four = (animate(one.image_run(0), [THING]) for one in (few, run))
    maps = maps_of(run, 3)[[1, 3]]
    told = GAP, GAP + SIDES[1], GAP + SIDES[0], shown[0].height - GAP  # "step 2 of 4", say
    for frame, values, same in zip(shown, maps, all_four[1::2], strict=True):
        assert frame.crop(told).tobytes() == same.crop(told).tobytes()
        check_colours(frame, (0, 1), values, maps.max())


# Files


@pytest.fixture(params=["gif", "webp"])
def saved(request, frames, tmp_path):
    path = tmp_path / "new" / f"x.{request.param.upper()}"
    save_animation(frames, path, milliseconds=120)
    assert os.listdir(path.parent) == [path.name]
    with Image.open(path) as video:
        yield video


def test_a_file_holds_the_frames_and_their_times(saved, frames):
    assert saved.format == Path(saved.filename).suffix[1:]
    assert (saved.n_frames, saved.size) == (4, frames[0].size)
    assert saved.info["loop"] == 0  # for ever
    times = []
    for i, one in enumerate(ImageSequence.Iterator(saved)):
        one.load()
        times.append(one.info["duration"])
        shown = np.asarray(one.convert("RGB"), np.float64)
        far = [np.abs(shown - np.asarray(other)).mean() for other in frames]
        assert np.argmin(far) == i
        assert far[i] < 4
    assert times == [120, 120, 120, HOLD]


def test_the_last_frame_stands_as_long_as_others_where_these_stand_longer(frames, tmp_path):
    save_animation(frames[:2], tmp_path / "x.gif", milliseconds=2000)
    with Image.open(tmp_path / "x.gif") as video:
        assert [one.info["duration"] for one in ImageSequence.Iterator(video)] == [2000, 2000]


@pytest.mark.parametrize(("kind", "most"), [("gif", 655_350 // 4), ("webp", (2**24 - 1) // 4)])
@pytest.mark.parametrize("milliseconds", tiered(["most", 25.6, 20, 24, 33, 47, 1501], quick=0))
def test_every_time_that_is_taken_can_be_read(frames, tmp_path, kind, most, milliseconds):
    asked = most if milliseconds == "most" else milliseconds
    for four in (frames, [*frames[:1] * 3, frames[1]]):  # those that are alike may be one
        save_animation(four, tmp_path / f"x.{kind}", milliseconds=asked)
        times = []
        with Image.open(tmp_path / f"x.{kind}") as video:
            for one in ImageSequence.Iterator(video):
                one.load()
                times.append(one.info["duration"])
        unit = 10 if kind == "gif" else 1
        assert abs(sum(times[:-1]) / 3 - asked) <= unit / 2
        assert abs(times[-1] - max(asked, HOLD)) <= unit / 2


def test_the_frames_of_a_gif_have_one_palette(frames, tmp_path):
    save_animation(frames, tmp_path / "x.gif")
    with Image.open(tmp_path / "x.gif") as video:
        shown = [one.convert("RGB") for one in ImageSequence.Iterator(video)]
    colours = [{colour for _, colour in one.getcolors(1 << 20)} for one in shown]
    assert 100 < len(set.union(*colours)) <= 256
    assert len({tile(one).tobytes() for one in shown}) == 1  # what stays does not flicker


def test_the_same_frames_give_the_same_bytes(frames, tmp_path):
    for kind in ("gif", "webp"):
        for name in ("one", "two"):
            save_animation(frames, tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


# What cannot be drawn


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("x.png", {}, r"\.gif.*\.webp"),
        ("gif", {}, r"\.gif.*\.webp"),
        ("x.gif", {"milliseconds": 19}, "milliseconds=19"),
        ("x.webp", {"milliseconds": -200}, "milliseconds=-200"),
        ("x.gif", {"milliseconds": float("nan")}, "milliseconds=nan.*20"),
        ("x.webp", {"milliseconds": float("inf")}, "milliseconds=inf.*20"),
        ("x.gif", {"milliseconds": 200_000}, "163837"),
        ("x.webp", {"milliseconds": 2**24}, "4194303"),
    ],
)
def test_files_that_cannot_be(frames, tmp_path, name, options, message):
    with pytest.raises(ValueError, match=message):
        save_animation(frames, tmp_path / name, **options)
    assert os.listdir(tmp_path) == []


def test_words_that_are_not_there(run):
    with pytest.raises(KeyError, match="'cow'.*prompt"):
        animate(run.image_run(0), [THING, "cow"])
    with pytest.raises(ValueError, match=f"words='{THING}'"):
        animate(run.image_run(0), THING)


def test_a_run_without_its_steps(demo):
    run = generate(demo, PROMPT, capture_options={"heads": "all"}, **OPTIONS)
    with pytest.raises(ValueError, match="capture_options={'steps': 'all'}"):
        animate(run.image_run(0))
