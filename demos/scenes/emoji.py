"""Scenes of sprites: images whose every pixel is explained, and the words for them.

- ``Scene`` and ``Thing`` say what there is; ``random_scene`` makes one up.
- ``Scene.draw`` and ``Scene.covers`` give the image and how much of each pixel is each object's.
- ``Scene.prompts`` gives the ways of saying it; ``is_held_out`` keeps some for testing.

Places are (x, y) in fractions of the image's side, from the top left corner.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cache
from itertools import combinations

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from .grounds import DEFAULT, GROUNDS, draw_ground
from .shapes import DIRECTIONS, RELATIONS, Word, holds
from .sprites import COLOURABLE, COLOURS, colourable, coloured, hands, nouns
from .wording import article, ground_phrase, say

SIDE = 128  # of an image in pixels
CELLS = 16  # in a row: sizes and places are whole cells, those of the model's latents
SIZES = {1: (7, 12), 2: (5, 7), 3: (5, 5)}  # least and most, in cells, by the number of objects
HOW_MANY = {1: 0.2, 2: 0.7, 3: 0.1}
GAP = 1  # cells between two objects, at least
SIDEWAYS = 3  # cells that one of two objects may be off the other's line, at most
ADJECTIVES = 0.6  # part of the objects that could have a colour word and do
_HELD_OUT_ONE_IN = 8

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Thing:
    """One drawn object.

    ``radius`` is half its longer side; all of it lies within ``centre ± radius``. ``colour`` is
    None for a drawing in its own colours, of which the prompt then says nothing.
    """

    noun: str
    hand: str
    colour: str | None
    mirrored: bool
    centre: tuple[float, float]
    radius: float

    @property
    def name(self) -> str:
        """The object without its article: "blue car", "cat"."""
        return f"{self.colour} {self.noun}" if self.colour else self.noun

    @property
    def phrase(self) -> str:
        """The object with its article: "an apple"."""
        return f"{article(self.name)} {self.name}"

    def pixels(self, size: int = SIDE) -> tuple[slice, slice, NDArray[np.float64]]:
        """Return the rows and columns that it fills in an image, and RGBA float64 there, colours
        in [0, 255], alpha in [0, 1]."""
        side = max(1, round(2 * self.radius * size))
        left, top = (round(at * size - side / 2) for at in self.centre)
        drawn = _scaled(self.noun, self.hand, self.colour, side).astype(np.float64)
        drawn[..., 3] /= 255
        return (
            slice(top, top + side),
            slice(left, left + side),
            drawn[:, ::-1] if self.mirrored else drawn,
        )


@cache
def _scaled(noun: str, hand: str, colour: str | None, side: int) -> Pixels:
    """Return a drawing as RGBA uint8 [side, side, 4]."""
    image = Image.fromarray(coloured(noun, hand, colour))
    return np.asarray(image.resize((side, side), Image.Resampling.BILINEAR))


@dataclass(frozen=True)
class Scene:
    """One to three objects on a ground, none over another; ``relation`` is of the first to the
    second. ``seed`` decides the ground's blades, stars and flakes."""

    objects: tuple[Thing, ...]
    relation: str | None
    background: str
    seed: int

    def draw(self, size: int = SIDE) -> Pixels:
        """Return the image, uint8 [size, size, 3]."""
        image = draw_ground(self.background, size, np.random.default_rng(self.seed))
        for thing in self.objects:
            rows, cols, drawn = thing.pixels(size)
            part = image[rows, cols]
            part += drawn[..., 3:] * (drawn[..., :3] - part)
        return np.rint(image).astype(np.uint8)

    def covers(self, size: int = SIDE) -> NDArray[np.float64]:
        """Return how much of each pixel is each object's, float64 [objects, size, size]; what is
        left of 1 is the background's."""
        found = np.zeros((len(self.objects), size, size))
        for cover, thing in zip(found, self.objects, strict=True):
            rows, cols, drawn = thing.pixels(size)
            cover[rows, cols] = drawn[..., 3]
        return found

    def masks(self, size: int = SIDE) -> Mask:
        """Return where each object is, bool [objects, size, size]: at least half of the pixel."""
        return self.covers(size) >= 0.5

    def prompts(self) -> tuple[str, ...]:
        """Return the ways to say this scene; a gray background may be left unsaid."""
        return say([thing.phrase for thing in self.objects], self.relation, self.background)

    def caption(self, rng: np.random.Generator) -> str:
        """Return one of the prompts, by chance."""
        prompts = self.prompts()
        return prompts[int(rng.integers(len(prompts)))]

    def words(self, prompt: str) -> list[Word]:
        """Return the words that are about a part of the image, in the prompt's order."""
        found = [
            Word(text, kind, owner)
            for owner, thing in enumerate(self.objects)
            for kind, text in (("colour", thing.colour), ("noun", thing.noun))
            if text
        ]
        where, ground = ground_phrase(self.background), Word(self.background, "ground", -1)
        if prompt.startswith(where):
            return [ground, *found]
        return [*found, ground] if prompt.endswith(where) else found

    @property
    def is_held_out(self) -> bool:
        """Tell if this combination of nouns and relation, or one of a colour and a noun, is kept
        away from training. "A left of B" and "B right of A" say the same and are kept together."""
        return any(_kept(part) for part in self.combinations())

    def combinations(self) -> list[str]:
        """Return what a test may keep from training: all nouns with their relation, and each
        colour with its noun."""
        names, relation = [thing.noun for thing in self.objects], self.relation or "alone"
        turned = {"right of": "left of", "below": "above"}
        if relation in turned:
            names.reverse()
        if relation == "and":
            names.sort()
        colours = [thing.name for thing in self.objects if thing.colour]
        together = "|".join([turned.get(relation, relation), *names])
        return [together, *colours] if len(names) > 1 else colours


@cache
def _kept(combination: str) -> bool:
    """Tell if a combination is one of those that training never sees."""
    return hashlib.sha256(combination.encode()).digest()[0] % _HELD_OUT_ONE_IN == 0


def random_scene(rng: np.random.Generator, *, held_out: bool = False, n_objects: int = 0) -> Scene:
    """Return a scene by chance, from the training part or from the part that training never sees.

    Args:
        rng: the only source of chance.
        held_out: which part to draw from.
        n_objects: 1 to 3; 0 lets chance decide.
    """
    while True:
        count = n_objects or int(rng.choice(list(HOW_MANY), p=list(HOW_MANY.values())))
        relation = {1: None, 2: str(rng.choice(RELATIONS)), 3: "and"}[count]
        sizes = rng.integers(*SIZES[count], count, endpoint=True)
        names = rng.choice(nouns(), count, replace=False).tolist()
        places = _places(rng, sizes, relation)
        objects = tuple(
            _random_thing(rng, noun, place, size / CELLS / 2)
            for noun, place, size in zip(names, places, sizes.tolist(), strict=True)
        )
        ground = DEFAULT if rng.random() < 0.2 else str(rng.choice(GROUNDS))
        scene = Scene(objects, relation, ground, int(rng.integers(2**31)))
        if scene.is_held_out == held_out:
            return scene


def _random_thing(
    rng: np.random.Generator, noun: str, centre: tuple[float, float], radius: float
) -> Thing:
    """Return a drawing of a noun, at times in another colour."""
    colour = None
    if noun in COLOURABLE and rng.random() < ADJECTIVES:
        colour = str(rng.choice(list(COLOURS)))
    known = colourable(noun) if colour else tuple(hands()[noun])
    return Thing(noun, str(rng.choice(known)), colour, bool(rng.random() < 0.5), centre, radius)


def _places(
    rng: np.random.Generator, sizes: NDArray[np.int64], relation: str | None
) -> list[tuple[float, float]]:
    """Return centres for squares of so many cells: within the image, clear of each other and true
    to the relation of the first two."""
    while True:
        corners = rng.integers(0, CELLS - sizes[:, None], (len(sizes), 2), endpoint=True)
        middles = (corners + sizes[:, None] / 2).tolist()
        together = combinations(zip(middles, sizes.tolist(), strict=True), 2)
        if any(_near(*one, *other) for one, other in together):
            continue
        centres = [(x / CELLS, y / CELLS) for x, y in middles]
        if len(centres) != 2 or relation not in DIRECTIONS:
            return centres
        sideways = min(abs(one - other) for one, other in zip(*middles, strict=True))
        if sideways <= SIDEWAYS and holds(relation, *centres):
            return centres


def _near(one: list[float], size: int, other: list[float], its_size: int) -> bool:
    """Tell if two squares around middles, in cells, are nearer than ``GAP``."""
    apart = max(abs(one[0] - other[0]), abs(one[1] - other[1]))
    return apart < (size + its_size) / 2 + GAP
