"""Scenes that move against places worked out by hand, and how the maps of videos are judged."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

import sdattn
from demos.evaluation.evaluate_demo_video import judge, summarise
from demos.evaluation.seeing import as_composed
from demos.moving import (
    FRAMES,
    LONGEST,
    SHORTEST,
    MovingScene,
    goes_right,
)
from demos.scenes.emoji import CELLS, Scene, Thing
from sdattn import Heatmaps
from sdattn.files.videos import Video
from sdattn.maps.aggregation import aggregate
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import PRESETS
from sdattn.models.reading import read_prompts
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.info import RunSettings

pytestmark = pytest.mark.slow

CAR = Thing("car", "noto", "red", False, (5 / 16, 4 / 16), 3 / 16)
PIZZA = Thing("pizza", "noto", None, False, (5 / 16, 12 / 16), 3 / 16)
BOTH = Scene((CAR, PIZZA), "above", "gray", 0)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def test_all_objects_go_to_the_right_evenly_by_whole_cells():
    video = MovingScene(BOTH, 4 / CELLS)
    places = np.array([[one.centre for one in scene.objects] for scene in video.frames(5)])
    np.testing.assert_allclose(places[0], [CAR.centre, PIZZA.centre])
    np.testing.assert_allclose(places[-1, 0], (9 / 16, 4 / 16))
    np.testing.assert_allclose(np.diff(places, axis=0), [[(1 / CELLS, 0)] * 2] * 4)
    slower = np.array([scene.objects[0].centre[0] for scene in video.frames()])
    assert set(np.diff(slower * CELLS).tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    ("last", "right"),
    [
        ((0.5 + SHORTEST, 0.5), True),
        ((0.5 - SHORTEST, 0.5), False),
        ((0.5, 0.5 - SHORTEST), False),
        ((0.55, 0.5), False),  # not far enough
        ((0.8, 0.6), True),
        ((0.8, 0.7), False),  # aslant
    ],
)
def test_where_an_object_goes_is_read_from_its_ends(last, right):
    assert goes_right([(0.5, 0.5), (0.0, 0.0), last]) is right


def seen_right(video):
    """A checker that is right: it says what each of the video's frames was composed of."""

    def see(scenes, frames):
        assert list(scenes) == [video.scene] * len(frames)
        return [as_composed(scene) for scene in video.frames()]

    return see


def item(pipe, video, prompt, shown):
    """A run of the drawn video, the maps of whose words are the masks of their objects in the
    frames ``shown``."""
    read = read_prompts(pipe, [prompt])[0]
    maps = torch.full((1, FRAMES, 64, 64, len(read.tokens)), 0.01)
    scenes = video.frames()
    for at, number in enumerate(shown):
        for thing, mask in zip(scenes[number].objects, scenes[number].masks(64), strict=True):
            for name in filter(None, (thing.colour, thing.noun)):
                [[column]] = read.find(name)
                maps[0, at, ..., column] += torch.from_numpy(mask)
    columns = tuple(range(len(read.tokens)))
    layers = LayerMaps({"up.0": LayerMap("up 1", 0, 2, maps, True)}, columns, passes=1)
    heatmaps = Heatmaps(read, aggregate(layers, PRESETS["default"])[0])
    frames = Video([Image.fromarray(frame) for frame in video.draw(128)], 8.0)
    settings = RunSettings(prompt=prompt, seed=0, pipeline="P", frames=FRAMES, frame_rate=8.0)
    return ImageRun(frames[0], heatmaps, layers, settings, video=frames)


@pytest.fixture(scope="module")
def pipe():
    return sdattn.load_pipeline("demo-video", device="cpu")


def test_maps_that_follow_their_objects_win_the_game_in_every_frame(pipe):
    video = MovingScene(BOTH, LONGEST)
    prompt = "a red car above a pizza"
    verdict = judge(video, prompt, item(pipe, video, prompt, range(FRAMES)), seen_right(video))
    found = summarise([verdict])
    assert found["way"] == found["frames"] == found["all frames"] == 1.0
    for kind, count in (("colour", FRAMES), ("noun", 2 * FRAMES)):  # no word for the pizza's colour
        assert len(verdict.hits[kind]) == count
        assert found[kind]["frame by frame"] == 1.0
        assert found[kind]["by frame"] == [1.0] * FRAMES
        assert found[kind]["mean of the frames"] < 1.0


def test_frames_without_the_objects_count_as_wrong_and_in_no_game(pipe):
    video, prompt = MovingScene(BOTH, LONGEST), "a red car above a pizza"
    right = [replace(as_composed(scene), colours=(True,)) for scene in video.frames()]
    other = replace(right[0], objects=False, colours=(), masks=None)
    faded = replace(right[3], colours=(False,))
    seen = [*right[:3], faded, *right[4:7], other]
    verdict = judge(video, prompt, item(pipe, video, prompt, range(FRAMES)), lambda *_: seen)
    found = summarise([verdict])
    assert verdict.way is None and found["way"] == found["all frames"] == 0.0
    assert found["frames"] == 7 / 8 and found["colours"] == 6 / 7
    assert {number for number, *_ in verdict.hits["noun"]} == set(range(7))
