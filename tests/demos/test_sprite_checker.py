"""The checker of images of sprites, given segmenters that are right or wrong in known ways."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from demos.scenes.emoji import Scene, Thing, random_scene
from demos.scenes.sprites import nouns
from demos.sprite_checker import (
    asked_for,
    find_things,
    true_labels,
)

pytestmark = pytest.mark.slow

GROUND = len(nouns())


class Told(nn.Module):
    """A segmenter that says what it is told to, image by image."""

    def __init__(self, *given):
        super().__init__()
        self.given = torch.from_numpy(np.stack(given))

    def forward(self, pixels):
        seen, self.given = self.given[: len(pixels)], self.given[len(pixels) :]
        return nn.functional.one_hot(seen, GROUND + 1).permute(0, 3, 1, 2).float()


def drawn(scene):
    return Image.fromarray(scene.draw())


@pytest.fixture(scope="module")
def scenes():
    rng = np.random.default_rng(7)
    return [random_scene(rng) for _ in range(60)]


def test_a_segmenter_that_is_right_makes_every_scene_right(scenes):
    segmenter = Told(*(true_labels(scene) for scene in scenes))
    found = find_things(segmenter, [drawn(scene) for scene in scenes])
    for scene, things in zip(scenes, found, strict=True):
        verdict = asked_for(scene, things)
        assert verdict.objects and verdict.relation in (None, True)
        for thing, seen in zip(scene.objects, verdict.found, strict=True):
            assert seen.noun == thing.noun
            assert seen.centre == pytest.approx(thing.centre, abs=0.75 * thing.radius)
    coloured = [
        flag for s, t in zip(scenes, found, strict=True) for flag in asked_for(s, t).colours
    ]
    assert len(coloured) > 8 and np.mean(coloured) > 0.9


def thing(noun, x, colour=None, radius=3 / 16):
    return Thing(noun, "noto", colour, False, (x, 0.5), radius)


def row(*names):
    """A scene of three, side by side; the car is blue."""
    places = zip(names, (0.2, 0.5, 0.8), strict=True)
    return Scene(
        tuple(thing(name, x, "blue" if name == "car" else None, 0.12) for name, x in places),
        "and",
        "gray",
        0,
    )


def test_what_is_missing_added_doubled_or_elsewhere_is_wrong():
    asked = Scene((thing("cat", 0.25), thing("car", 0.75, "blue")), "left of", "gray", 0)
    turned = Scene((thing("cat", 0.75), thing("car", 0.25, "blue")), "right of", "gray", 0)
    others = {
        "missing": Scene((thing("cat", 0.25),), None, "gray", 0),
        "another": Scene((thing("cat", 0.25), thing("bus", 0.75)), "left of", "gray", 0),
        "added": row("cat", "car", "bus"),
        "doubled": row("cat", "car", "cat"),
    }
    for scene in others.values():
        [things] = find_things(Told(true_labels(scene)), [drawn(scene)])
        assert asked_for(asked, things) == asked_for(asked, [])
        assert not asked_for(asked, things).objects
    [things] = find_things(Told(true_labels(turned)), [drawn(turned)])
    verdict = asked_for(asked, things)
    assert verdict.objects and verdict.relation is False and verdict.colours == (True,)
    red = replace(asked, objects=(asked.objects[0], thing("car", 0.75, "red")))
    [things] = find_things(Told(true_labels(red)), [drawn(red)])
    assert asked_for(asked, things).colours == (False,)
