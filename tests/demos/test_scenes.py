"""The drawn scenes against geometry done by hand, and the checker against the drawn scenes."""

from __future__ import annotations

import math
import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image, ImageFilter

from demos.scene_checker import find_objects, match
from demos.scenes import emoji
from demos.scenes.shapes import (
    SHAPES,
    Scene,
    SceneObject,
    random_scene,
)
from sdattn.models.demos import DEMOS, demo_named

pytestmark = pytest.mark.slow

RADIUS = 0.3


def alone(shape: str, colour: str = "red") -> Scene:
    return Scene((SceneObject(colour, shape, (0.5, 0.5), RADIUS),), None, "white")


def polygon_area(*corners: tuple[float, float]) -> float:
    x, y = np.array(corners).T
    return float(abs(x @ np.roll(y, -1) - y @ np.roll(x, -1))) / 2


def star_corners() -> list[tuple[float, float]]:
    turns = [math.pi * index / 5 for index in range(10)]
    reach = [1.0, 0.42] * 5
    return [(r * math.sin(a), -r * math.cos(a)) for r, a in zip(reach, turns, strict=True)]


AREAS = {
    "circle": math.pi,
    "ring": math.pi * (1 - 0.52**2),
    "square": 1.72**2,
    "cross": 2 * 2 * 0.64 - 0.64**2,
    "triangle": polygon_area((-1, 0.85), (1, 0.85), (0, -0.95)),
    "star": polygon_area(*star_corners()),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_a_mask_has_the_area_that_geometry_gives_the_shape(shape):
    mask = alone(shape).masks(800)[0]
    assert mask.mean() == pytest.approx(AREAS[shape] * RADIUS**2, rel=0.01)


@pytest.mark.parametrize("name", DEMOS)
def test_no_word_of_a_prompt_is_strange_and_words_of_none_are(name):
    unlearnt, make = (
        demo_named(name).unlearnt,
        random_scene if name == "demo-mmdit" else emoji.random_scene,
    )
    rng = np.random.default_rng(9)
    said = {word for _ in range(600) for text in make(rng).prompts() for word in text.split()}
    said = {word.strip(",") for word in said}
    assert unlearnt(said) == ""
    told = unlearnt(["a", "Zoo", "--", "a", "Zoo", "scene", "b", "(red)", "background", "😀"])
    assert "learnt 'Zoo', 'scene', 'b', '😀':" in told and len(told) < 250
    assert said == set(re.findall("[a-z]+", demo_named(name).learnt()))


def test_words_that_are_spelled_like_an_unknown_one_are_named():
    unlearnt = demo_named("demo").unlearnt
    assert unlearnt(["umbrela", "a"]).endswith("Spelled alike: umbrella.")
    assert "'w4' and 3 more words" in unlearnt(f"w{i}" for i in range(8))


def soften(image: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(0.8)))


@pytest.mark.parametrize("change", [lambda image: image, soften], ids=["drawn", "softened"])
def test_the_checker_recovers_drawn_scenes(change):
    rng = np.random.default_rng(8)
    scenes = [random_scene(rng) for _ in range(100)]
    right = 0
    for scene in scenes:
        found = find_objects(change(scene.draw()))
        wanted = Counter((thing.colour, thing.shape) for thing in scene.objects)
        chosen = match(scene, found)
        right += wanted == Counter((f.colour, f.shape) for f in found) and chosen is not None
        for mask, seen in zip(scene.masks(), chosen or (), strict=False):
            middle = (np.argwhere(mask).mean(0)[::-1] + 0.5) / 64  # x, y
            assert seen.centre == pytest.approx(tuple(middle), abs=0.02)
            assert (seen.mask & mask).sum() / (seen.mask | mask).sum() > 0.7
    assert right >= 98


def test_match_needs_every_colour_and_prefers_shape_then_place():
    left = SceneObject("red", "circle", (0.25, 0.5), 0.2)
    right = SceneObject("red", "circle", (0.75, 0.5), 0.2)
    found = find_objects(Scene((left, right), "left of", "gray").draw())
    chosen = match(Scene((right, left), "right of", "gray"), found)
    assert chosen is not None and chosen[0].centre[0] > chosen[1].centre[0]
    blue = SceneObject("blue", "circle", (0.25, 0.5), 0.2)
    assert match(Scene((left, blue), "and", "gray"), found) is None
