"""How much of word A's map is on object B, for pairs that are alike, cat and dog, and for others.

paired_scenes(count, seed)           scenes of two objects: one of a pair alike, one of others
leakage(sample, setting, records)    the shares of each noun's map
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import combinations

import numpy as np

from ..scenes.emoji import random_scene
from ..scenes.sprites import hands, nouns
from .images import Asked, Sample
from .measures import shares
from .records import Records, at_side

ALIKE: Sequence[tuple[str, str]] = (  # by what they are
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


@cache
def paired_scenes(count: int, seed: int) -> tuple[Asked, ...]:
    """Return unseen scenes of two objects in their own colours: those with even numbers of a pair
    that is alike, the others of two nouns that are in no such pair together. About half of all
    pairs have a relation that training never saw, and can be in one."""
    rng = np.random.default_rng(seed)
    asked: list[Asked] = []
    while len(asked) < count:
        scene = random_scene(rng, held_out=bool(rng.integers(2)), n_objects=2)
        alike = len(asked) % 2 == 0
        chosen = ALIKE if alike else list(combinations(nouns(), 2))
        pair = rng.permutation(chosen[int(rng.integers(len(chosen)))]).tolist()
        things = tuple(
            replace(thing, noun=noun, hand=str(rng.choice(list(hands()[noun]))), colour=None)
            for thing, noun in zip(scene.objects, pair, strict=True)
        )
        scene = replace(scene, objects=things)
        if scene.is_held_out and are_alike(*pair) == alike:
            asked.append((len(asked), scene, scene.caption(rng)))
    return tuple(asked)


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
