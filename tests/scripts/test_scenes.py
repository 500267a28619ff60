"""The drawn scenes against geometry done by hand, and the checker against the drawn scenes."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import product

import numpy as np
import pytest
from PIL import Image, ImageFilter

from scripts.scene_checker import find_objects, match
from scripts.scenes import emoji
from scripts.scenes.shapes import (
    BACKGROUNDS,
    COLOURS,
    DIRECTIONS,
    SHAPES,
    Scene,
    SceneObject,
    cell_centres,
    holds,
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


@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_stays_within_its_radius(shape):
    rows, cols = np.nonzero(alone(shape).masks(400)[0])
    for line in (rows, cols):
        assert (line.min() + 0.5) / 400 >= 0.5 - RADIUS
        assert (line.max() + 0.5) / 400 <= 0.5 + RADIUS


def test_the_image_has_the_palette_inside_and_the_ground_outside_the_masks():
    rng = np.random.default_rng(3)
    for _ in range(20):
        scene = random_scene(rng)
        image, masks = scene.draw(128), scene.masks(128)
        assert image.dtype == np.uint8 and image.shape == (128, 128, 3)
        exact = np.concatenate([masks, ~masks.any(0)[None]])
        paints = [COLOURS[thing.colour] for thing in scene.objects]
        for mask, paint in zip(exact, [*paints, BACKGROUNDS[scene.background]], strict=True):
            assert (np.median(image[mask], axis=0) == paint).all()


def test_edges_are_blends_in_proportion_to_what_is_covered():
    half = SceneObject("red", "square", (0.5, 0.5), 0.25 / 0.86 + 1 / 128)  # ends half a pixel on
    row = Scene((half,), None, "black").draw(64, supersample=8)[32].astype(float)
    wanted = (np.array(COLOURS["red"]) + BACKGROUNDS["black"]) / 2
    edge = row[[15, 48]]
    assert abs(edge - wanted).max() < 40
    assert edge.min() >= min(BACKGROUNDS["black"]) and edge[:, 0].max() < COLOURS["red"][0]


def test_an_image_is_the_mean_of_points_of_the_whole_square():
    rng = np.random.default_rng(8)
    beyond = SceneObject("pink", "star", (0.95, 0.02), 0.2)
    outside = SceneObject("blue", "ring", (2.0, -1.0), 0.2)
    scenes = [random_scene(rng) for _ in range(6)] + [Scene((beyond, outside), "and", "white")]
    for scene, (size, fine) in product(scenes, [(64, 4), (37, 3)]):
        wanted = np.full((size, size, 3), BACKGROUNDS[scene.background], dtype=float)
        for thing in scene.objects:
            points = thing.covers(*cell_centres(size * fine)).astype(float)
            cover = points.reshape(size, fine, size, fine).mean((1, 3))[..., None]
            wanted = wanted * (1 - cover) + np.array(COLOURS[thing.colour]) * cover
        assert abs(scene.draw(size, fine) - wanted).max() <= 0.5 + 1e-9


@pytest.mark.parametrize("name", DEMOS)
@pytest.mark.weekly
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
    assert "learnt 'Zoo', 'scene', 'b', '😀':" in told
    assert said == set(re.findall("[a-z]+", told.split("only: ")[1]))


def test_objects_never_touch_and_lie_wholly_in_the_image():
    rng = np.random.default_rng(4)
    for _ in range(200):
        masks = random_scene(rng, n_objects=2).masks(96)
        grown = np.pad(masks[0], 1)
        near = [grown[i : i + 96, j : j + 96] for i in range(3) for j in range(3)]
        assert not (np.logical_or.reduce(near) & masks[1]).any()
        assert not masks[:, [0, -1]].any() and not masks[:, :, [0, -1]].any()


def test_the_relation_is_true_of_the_centres():
    rng = np.random.default_rng(5)
    axis = {"left of": (0, -1), "right of": (0, 1), "above": (1, -1), "below": (1, 1)}
    seen = Counter()
    for _ in range(300):
        scene = random_scene(rng, n_objects=2)
        seen[scene.relation] += 1
        if scene.relation in axis:
            side, sign = axis[scene.relation]
            first, second = (thing.centre[side] for thing in scene.objects)
            assert sign * (first - second) > 0.3
            assert holds(scene.relation, *(thing.centre for thing in scene.objects))
    assert set(seen) == {*DIRECTIONS, "and"} and min(seen.values()) > 30


@pytest.mark.weekly
def test_nothing_held_out_is_ever_said_in_training():
    rng = np.random.default_rng(6)
    kept = {p for _ in range(300) for p in random_scene(rng, held_out=True).prompts()}
    used = {p for _ in range(1500) for p in random_scene(rng).prompts()}
    assert kept and used and not kept & used


def test_a_scene_said_the_other_way_round_shares_its_part():
    rng = np.random.default_rng(7)
    turned = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    for _ in range(200):
        scene = random_scene(rng, n_objects=2)
        other = Scene(scene.objects[::-1], turned.get(scene.relation, "and"), "black")
        assert other.is_held_out == scene.is_held_out


def test_about_one_combination_in_eight_is_held_out():
    things = [SceneObject(c, s, (0.5, 0.5), 0.2) for c in COLOURS for s in SHAPES]
    pairs = [Scene((a, b), "left of", "gray") for a in things for b in things]
    assert np.mean([pair.is_held_out for pair in pairs]) == pytest.approx(1 / 8, abs=0.02)


def test_prompts_say_what_is_there():
    things = (
        SceneObject("orange", "star", (0.3, 0.5), 0.2),
        SceneObject("turquoise", "ring", (0.7, 0.5), 0.2),
    )
    gray = Scene(things, "left of", "gray")
    assert "an orange star left of a turquoise ring" in gray.prompts()
    placed = "on the left an orange star, on the right a turquoise ring"
    assert placed in gray.prompts("place first")
    black = Scene(things, "left of", "black").prompts("plain")
    assert black and all(prompt.endswith(" on a black background") for prompt in black)
    assert gray.caption(np.random.default_rng(0)) in gray.prompts()


def test_words_are_those_of_the_prompt_in_its_order():
    rng = np.random.default_rng(7)
    for scene in (random_scene(rng) for _ in range(50)):
        for prompt in scene.prompts():
            texts = [word.text for word in scene.words(prompt)]
            said = prompt.replace(",", "").split()
            assert [one for one in said if one in {*COLOURS, *SHAPES, *BACKGROUNDS}] == texts
            owners = [word.owner for word in scene.words(prompt)]
            assert owners[:2] == [0, 0] and set(owners) <= {*range(len(scene.objects)), -1}


def test_an_unknown_shape_is_refused_with_the_ones_there_are():
    with pytest.raises(ValueError, match="hexagon.*circle, square"):
        alone("hexagon").draw()


def soften(image: np.ndarray) -> np.ndarray:
    return np.asarray(Image.fromarray(image).filter(ImageFilter.GaussianBlur(0.8)))


@pytest.mark.parametrize("change", [lambda image: image, soften], ids=["drawn", "softened"])
@pytest.mark.weekly
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


def test_the_checker_finds_nothing_in_an_empty_image_or_in_noise():
    rng = np.random.default_rng(9)
    assert find_objects(np.full((64, 64, 3), 125, np.uint8)) == []
    assert find_objects(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)) == []


def test_the_checker_tells_the_shapes_apart_at_any_size():
    for shape in SHAPES:
        (found,) = find_objects(Image.fromarray(alone(shape, "purple").draw(256)))
        assert (found.colour, found.shape) == ("purple", shape)


def test_match_needs_every_colour_and_prefers_shape_then_place():
    left = SceneObject("red", "circle", (0.25, 0.5), 0.2)
    right = SceneObject("red", "circle", (0.75, 0.5), 0.2)
    found = find_objects(Scene((left, right), "left of", "gray").draw())
    chosen = match(Scene((right, left), "right of", "gray"), found)
    assert chosen is not None and chosen[0].centre[0] > chosen[1].centre[0]
    blue = SceneObject("blue", "circle", (0.25, 0.5), 0.2)
    assert match(Scene((left, blue), "and", "gray"), found) is None
