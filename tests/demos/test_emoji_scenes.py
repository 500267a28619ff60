"""Scenes of sprites against compositions done here, and their words against their truth."""

import re
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from demos.scenes.emoji import Scene, random_scene
from demos.scenes.grounds import DEFAULT, GROUNDS, PLACES, draw_ground
from demos.scenes.shapes import DIRECTIONS
from demos.scenes.sprites import coloured

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def scenes():
    rng = np.random.default_rng(1)
    return [random_scene(rng) for _ in range(150)]


def composed(scene, size=128):
    """The scene by Pillow's own compositing, and each object's alpha in [0, 1]."""
    ground = draw_ground(scene.background, size, np.random.default_rng(scene.seed))
    image = Image.fromarray(np.rint(ground).astype(np.uint8)).convert("RGBA")
    alphas = []
    for thing in scene.objects:
        side = round(2 * thing.radius * size)
        sprite = Image.fromarray(coloured(thing.noun, thing.hand, thing.colour))
        sprite = sprite.resize((side, side), Image.Resampling.BILINEAR)
        if thing.mirrored:
            sprite = sprite.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        corner = tuple(round(at * size - side / 2) for at in thing.centre)
        layer = Image.new("RGBA", image.size)
        layer.paste(sprite, corner)
        image.alpha_composite(layer)
        alphas.append(np.asarray(layer.getchannel("A")) / 255)
    return np.asarray(image.convert("RGB")), np.stack(alphas)


def test_image_and_truth_agree_with_another_composition(scenes):
    for scene in scenes[:40]:
        image, alphas = composed(scene)
        assert abs(scene.draw().astype(int) - image).max() <= 2  # it rounds at each object
        assert scene.covers() == pytest.approx(alphas, abs=1e-9)
        assert (scene.masks() == (alphas >= 0.5)).all()


def test_relation_words_agree_with_the_middles_of_the_masks():
    rng = np.random.default_rng(2)
    sides = {"left of": (1, -1), "right of": (1, 1), "above": (0, -1), "below": (0, 1)}
    seen = Counter()
    for _ in range(300):
        scene = random_scene(rng, n_objects=2)
        seen[scene.relation] += 1
        if scene.relation in sides:
            axis, sign = sides[scene.relation]
            first, second = (np.argwhere(mask).mean(0) for mask in scene.masks())
            away = sign * (first - second)
            assert away[axis] > 0 and away[axis] > abs(away[1 - axis]) - 12
    assert set(seen) == {*DIRECTIONS, "and"} and min(seen.values()) > 25


def test_nothing_held_out_is_seen_in_training_however_it_is_said():
    rng = np.random.default_rng(3)
    turned = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    kept = [random_scene(rng, held_out=True) for _ in range(150)]
    used = [random_scene(rng) for _ in range(1500)]
    trained = {part for scene in used for part in scene.combinations()}
    for scene in kept:
        assert not set(scene.combinations()) <= trained
        if len(scene.objects) == 2:
            other = Scene(
                scene.objects[::-1], turned.get(scene.relation, "and"), scene.background, 0
            )
            assert other.is_held_out
    assert not {p for one in kept for p in one.prompts()} & {
        p for one in used for p in one.prompts()
    }


def test_words_are_those_of_the_prompt_in_its_order_with_whom_they_are_about(scenes):
    told = Counter()
    for scene in scenes:
        for prompt in scene.prompts():
            words = scene.words(prompt)
            texts = [word.text for word in words]
            assert [one for one in re.findall("[a-z]+", prompt) if one in texts] == texts
            about = {(word.kind, word.owner): word.text for word in words}
            for owner, thing in enumerate(scene.objects):
                assert about.pop(("noun", owner)) == thing.noun
                assert about.pop(("colour", owner), None) == thing.colour
            if about or scene.background != DEFAULT:
                assert about == {("ground", -1): scene.background}
            told.update(len(texts) - len({*texts}) for _ in about)
    assert told[0] and told[1]  # a blue car on a blue background too


def test_the_seed_decides_a_ground_and_an_unknown_one_is_refused():
    for name in GROUNDS:
        first, again, other = (draw_ground(name, 64, np.random.default_rng(n)) for n in (1, 1, 2))
        assert (first == again).all() and first.shape == (64, 64, 3)
        assert first.min() >= 0 and first.max() <= 255
        assert (first != other).any() == (name in PLACES)
    with pytest.raises(ValueError, match=r"'lawn'.*grass"):
        draw_ground("lawn", 64, np.random.default_rng(0))
