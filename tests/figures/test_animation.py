"""The maps over the steps as a moving image: its colours, its files, and what cannot be drawn."""

import os
from pathlib import Path

import numpy as np
import pytest
from helpers.demo_words import PROMPT, THING
from helpers.tiers import tiered
from PIL import Image, ImageColor, ImageSequence

from sdattn import generate
from sdattn.figures.animation import HOLD, LARGEST, animate, save_animation
from sdattn.maps.glow import WORD_COLORS

pytestmark = pytest.mark.slow

OPTIONS = {"height": 128, "width": 192, "num_inference_steps": 4}


@pytest.fixture(scope="module")
def run(demo):
    return generate(demo, PROMPT, **OPTIONS)  # so small that it keeps its steps


@pytest.fixture(scope="module")
def frames(run):
    return animate(run.image_run(0), [THING, "blue"], size=1200)


def maps_of(run, column):
    """A token's map in each step, ``[steps, 16, 24]``, float64."""
    finest = [
        maps[0].double().numpy()
        for name, maps in run.store.maps.items()
        if name.startswith("up") and maps.shape[-3:-1] == (16, 24)
    ]
    assert len(finest) == 3
    return np.mean(finest, axis=0)[..., column]


# Frames


def test_a_frame_a_step_of_one_size(frames):
    assert len(frames) == 4
    assert {(one.mode, one.size) for one in frames} == {("RGB", (1200, 630))}


def test_the_image_stays_and_heat_and_step_change(run, frames):
    lower = [np.asarray(one)[130:560] for one in frames]
    changes = np.ptp(np.stack(lower).astype(int), axis=0).max((0, 2))  # by column
    assert changes[:460].max() == 0  # the image
    assert changes[480:900].min() > 0  # the heat
    last = {np.asarray(one)[570:].tobytes() for one in frames}
    assert len(last) == 4  # the step, and how far the run is
    lit = [
        (np.asarray(one)[-1] == ImageColor.getrgb(WORD_COLORS[0])).all(-1).sum() for one in frames
    ]
    assert lit == pytest.approx([300, 600, 900, 1200], abs=2)


def test_the_heat_is_that_of_the_step(run, frames):
    """Where a word is highest in a step its colour is strongest."""
    tile, left, top = 436, 478, 112  # of a card whose prompt has one line
    for frame, values in zip(frames, maps_of(run, 3), strict=True):  # the thing's: orange
        pixels = np.asarray(frame.crop((left, top, left + tile, top + tile * 2 // 3)), int)
        orange = np.asarray(
            Image.fromarray((pixels[..., 0] - pixels[..., 2]).clip(0).astype(np.uint8)).resize(
                (24, 16)
            )
        )
        seen = np.corrcoef(orange.ravel(), values.ravel())[0, 1]
        assert seen > 0.5


@pytest.mark.parametrize("size", [1000, 333])
def test_frames_are_at_most_so_large(run, size):
    found = animate(run.image_run(0), size=size)
    assert len(found) == 4
    assert {one.width for one in found} == {size}


def test_chosen_steps_are_the_frames(demo, run):
    some = {"steps": [1, 3]}
    few = generate(demo, PROMPT, words=[THING], capture_options=some, **OPTIONS)
    shown, all_four = (animate(one.image_run(0), [THING]) for one in (few, run))
    for frame, same in zip(shown, all_four[1::2], strict=True):
        heat, wanted = (np.asarray(one, int)[95:350, 360:680] for one in (frame, same))
        assert np.abs(heat - wanted).mean() < 1


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
    assert 50 < len(set.union(*colours)) <= 256
    stays = {one.crop((28, 112, 460, 400)).tobytes() for one in shown}
    assert len(stays) == 1  # it does not flicker


def test_a_file_is_at_most_three_megabytes(tmp_path):
    noise = np.random.default_rng(0).integers(0, 256, (8, 630, 1200, 3), np.uint8)
    save_animation([*map(Image.fromarray, noise)], tmp_path / "x.gif")
    assert 1_000_000 < (tmp_path / "x.gif").stat().st_size <= LARGEST
    with Image.open(tmp_path / "x.gif") as video:
        assert video.n_frames == 8 and video.width / video.height == pytest.approx(
            1200 / 630, abs=0.01
        )


def test_an_mp4_holds_the_last_step_longer(frames, tmp_path):
    av = pytest.importorskip("av")
    save_animation(frames, tmp_path / "x.mp4", milliseconds=250)
    with av.open(tmp_path / "x.mp4") as video:
        shown = [one.to_ndarray(format="rgb24").astype(int) for one in video.decode(video=0)]
    assert len(shown) == 3 + HOLD // 250
    for i, one in enumerate(shown):
        far = [np.abs(one - np.asarray(frame, int)).mean() for frame in frames]
        assert np.argmin(far) == min(i, 3)


def test_the_same_frames_give_the_same_bytes(frames, tmp_path):
    for kind in ("gif", "webp"):
        for name in ("one", "two"):
            save_animation(frames, tmp_path / f"{name}.{kind}")
        assert (tmp_path / f"one.{kind}").read_bytes() == (tmp_path / f"two.{kind}").read_bytes()


# What cannot be drawn


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("x.png", {}, r"\.gif.*\.webp.*\.mp4"),
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
    run = generate(demo, PROMPT, capture_options={"steps": "mean"}, **OPTIONS)
    with pytest.raises(ValueError, match="capture_options={'steps': 'all'}"):
        animate(run.image_run(0))
