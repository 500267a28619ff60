"""Scenes that move against places worked out by hand, and how the maps of videos are judged."""

import numpy as np
import pytest
import torch
from PIL import Image

import sdattn
from scripts.evaluation.evaluate_demo_video import judge, summarise
from scripts.moving import FRAMES, SHORTEST, MovingScene, goes_right, random_video
from scripts.scene_checker import find_objects
from scripts.scenes.shapes import Scene, SceneObject
from sdattn import Heatmaps
from sdattn.files.videos import Video
from sdattn.maps.aggregation import aggregate
from sdattn.maps.layermaps import LayerMap, LayerMaps
from sdattn.maps.presets import PRESETS
from sdattn.models.reading import read_prompts
from sdattn.runs.imagerun import ImageRun
from sdattn.runs.settings import RunSettings

pytestmark = pytest.mark.slow

RED = SceneObject("red", "circle", (0.3, 0.4), 0.18)
BLUE = SceneObject("blue", "square", (0.3, 0.8), 0.18)


@pytest.fixture
def rng():
    return np.random.default_rng(11)


def test_all_objects_go_to_the_right_evenly():
    video = MovingScene(Scene((RED, BLUE), "above", "gray"), 0.2)
    places = np.array([[one.centre for one in scene.objects] for scene in video.frames(5)])
    np.testing.assert_allclose(places[0], [RED.centre, BLUE.centre])
    np.testing.assert_allclose(places[-1, 0], (0.5, 0.4), atol=1e-12)
    np.testing.assert_allclose(np.diff(places, axis=0, n=2), 0, atol=1e-12)
    np.testing.assert_allclose(places[:, 1] - places[:, 0], [(0, 0.4)] * 5, atol=1e-12)


def test_videos_by_chance_stay_in_the_image_and_are_of_one_part(rng):
    videos = [random_video(rng, held_out=bool(number % 2)) for number in range(80)]
    short = 0
    for number, video in enumerate(videos):
        assert video.scene.is_held_out == bool(number % 2)
        for scene in video.frames():
            for one in scene.objects:
                assert min(one.centre) - one.radius > -1e-9
                assert max(one.centre) + one.radius < 1 + 1e-9
        side_by_side = video.scene.relation in ("left of", "right of")
        assert video.length >= SHORTEST or side_by_side or video.scene.relation == "and"
        short += video.length < SHORTEST
        for thing in zip(*(scene.objects for scene in video.frames()), strict=True):
            assert goes_right([one.centre for one in thing], video.length - 1e-9)
    assert 0 < short < 40
    assert {len(video.scene.objects) for video in videos} == {1, 2}
    assert len(random_video(rng, n_objects=2).scene.objects) == 2


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


def test_the_checker_reads_the_frames_that_are_drawn(rng):
    video = random_video(rng)
    for scene, frame in zip(video.frames(), video.draw(128), strict=True):
        found = {(one.colour, one.shape): one.centre for one in find_objects(frame)}
        wanted = {(one.colour, one.shape): one.centre for one in scene.objects}
        assert found.keys() == wanted.keys()
        for name, place in wanted.items():
            np.testing.assert_allclose(found[name], place, atol=0.05)  # of a triangle's mass


def item(pipe, video, prompt, shown):
    """A run of the drawn video, the maps of whose words are the masks of their objects in the
    frames ``shown``."""
    read = read_prompts(pipe, [prompt])[0]
    maps = torch.full((1, FRAMES, 64, 64, len(read.tokens)), 0.01)
    scenes = video.frames()
    for at, number in enumerate(shown):
        for thing, mask in zip(scenes[number].objects, scenes[number].masks(64), strict=True):
            for name in (thing.colour, thing.shape):
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
    video = MovingScene(Scene((RED, BLUE), "above", "gray"), 0.4)
    prompt = video.scene.prompts()[0]
    verdict = judge(video, prompt, item(pipe, video, prompt, range(FRAMES)))
    found = summarise([verdict])
    assert found["way"] == found["frames"] == found["all frames"] == 1.0
    for kind in ("colour", "noun"):
        assert found[kind]["frame by frame"] == 1.0
        assert found[kind]["by frame"] == [1.0] * FRAMES
        assert found[kind]["mean of the frames"] < 1.0


def test_maps_that_stand_still_lose_it_where_the_object_has_gone(pipe):
    video = MovingScene(Scene((RED,), None, "gray"), 0.4)
    verdict = judge(video, "a red circle", item(pipe, video, "a red circle", [0] * FRAMES))
    by_frame = summarise([verdict])["colour"]["by frame"]
    assert by_frame[0] == 1.0 and by_frame[-1] == 0.0
    still = MovingScene(video.scene, 0.0)
    assert (
        judge(video, "a red circle", item(pipe, still, "a red circle", [0] * FRAMES)).way is False
    )
