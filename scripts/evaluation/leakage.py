"""How much of word A's map is on object B, for pairs that are alike, cat and dog, and for others.

paired_scenes(count, seed)           scenes of two objects: one of a pair alike, one of others
leakage(sample, setting, records)    the shares of each noun's map
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from ..scenes.emoji import Scene, random_scene
from ..scenes.sprites import hands, nouns
from .images import Asked, Sample
from .measures import shares
from .records import Records, at_side

ALIKE = (  # by what they are
    ("cat", "dog"),
    ("sun", "moon"),
    ("moon", "star"),
    ("apple", "strawberry"),
    ("banana", "lemon"),
    ("car", "bus"),
    ("bird", "owl"),
    ("owl", "penguin"),
    ("frog", "turtle"),
    ("sunflower", "tulip"),
    ("tree", "cactus"),
    ("pizza", "hamburger"),
    ("ball", "balloon"),
)


def paired_scenes(count: int, seed: int) -> list[Asked]:
    """Return unseen scenes of two objects in their own colours: those with even numbers of a pair
    that is alike, each pair in turn, the others of two nouns that are in no such pair together."""
    rng = np.random.default_rng(seed)
    asked: list[Asked] = []
    while len(asked) < count:
        number = len(asked)
        if number % 2 == 0:
            pair = rng.permutation(ALIKE[number // 2 % len(ALIKE)]).tolist()
        else:
            pair = rng.choice(nouns(), 2, replace=False).tolist()
            if are_alike(*pair):
                continue
        scene = _scene_of(rng, pair)
        asked.append((number, scene, scene.caption(rng)))
    return asked


def _scene_of(rng: np.random.Generator, pair: list[str]) -> Scene:
    """Return an unseen scene of two nouns."""
    while True:
        scene = random_scene(rng, held_out=bool(rng.integers(2)), n_objects=2)
        drawn = [str(rng.choice(list(hands()[noun]))) for noun in pair]
        things = tuple(
            replace(thing, noun=noun, hand=hand, colour=None)
            for thing, noun, hand in zip(scene.objects, pair, drawn, strict=True)
        )
        scene = replace(scene, objects=things)
        if scene.is_held_out:
            return scene


def are_alike(one: str, other: str) -> bool:
    """Tell if two nouns are a pair of ``ALIKE``."""
    return (one, other) in ALIKE or (other, one) in ALIKE


def leakage(sample: Sample, setting: str, records: Records) -> None:
    """Record of each noun's map in a scene of two the shares on the other object and on its own,
    and the other object's share of the image, which a map without any aim would have."""
    if sample.masks is None:
        return
    words = [word for word in sample.scene.words(sample.prompt) if word.kind == "noun"]
    kind = "alike" if are_alike(*(word.text for word in words)) else "others"
    for variant, heatmaps in sample.heatmaps.items():
        on = shares(at_side(words, heatmaps), sample.masks)  # [words, objects]
        found = {"own": np.diag(on), "leaked": on[[0, 1], [1, 0]]}
        found["area"] = sample.masks[::-1].mean((1, 2))
        for measure, values in found.items():
            records.add((setting, kind, variant, measure), sample.number, values)
