"""Drawn scenes: images whose every pixel is explained, and the words for them.

- ``Scene`` and ``SceneObject`` say what there is; ``random_scene`` makes one up.
- ``Scene.draw`` and ``Scene.masks`` give the image and the exact place of each object.
- ``Scene.prompts`` gives the ways of saying it; ``is_held_out`` keeps some for testing.

The demo model is trained on these, so its heatmaps can be measured against the truth;
``scene_checker`` finds the objects in an image that the model made.
Places are (x, y) in fractions of the image's side, from the top left corner.
"""

from __future__ import annotations

import hashlib
import math
import re
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

COLOURS = {
    "red": (215, 35, 35),
    "green": (35, 150, 50),
    "blue": (35, 65, 225),
    "yellow": (245, 220, 35),
    "purple": (135, 40, 175),
    "orange": (245, 130, 20),
    "pink": (255, 135, 195),
    "turquoise": (40, 205, 200),
}
BACKGROUNDS = {"gray": (125, 125, 125), "white": (250, 250, 250), "black": (8, 8, 8)}
SHAPES = ("circle", "square", "triangle", "star", "ring", "cross")
DIRECTIONS = {
    "left of": (-1, 0),
    "right of": (1, 0),
    "above": (0, -1),
    "below": (0, 1),
}
RELATIONS = (*DIRECTIONS, "and")
DEFAULT_BACKGROUND = "gray"  # what a prompt that names no background means

_PLAIN = {
    "left of": ("{a} left of {b}", "{a} to the left of {b}"),
    "right of": ("{a} right of {b}", "{a} to the right of {b}"),
    "above": ("{a} above {b}", "{a} over {b}"),
    "below": ("{a} below {b}", "{a} under {b}"),
    "and": ("{a} and {b}", "{a} with {b}"),
}
_PLACE_FIRST = {
    "left of": ("on the left {a}, on the right {b}", "left {a}, right {b}"),
    "right of": ("on the right {a}, on the left {b}", "right {a}, left {b}"),
    "above": ("at the top {a}, at the bottom {b}", "top {a}, bottom {b}"),
    "below": ("at the bottom {a}, at the top {b}", "bottom {a}, top {b}"),
}
_ALONE = ("{a}", "a picture of {a}")
_GROUND = "{scene} on a {background} background"
_FORMS = (
    *_ALONE,
    *(one for forms in (_PLAIN, _PLACE_FIRST) for some in forms.values() for one in some),
)
_FILLED = " ".join([*_FORMS, _GROUND]).format(a="a", b="an", scene="", background="")
FURTHER_WORDS = tuple(sorted(set(re.findall("[a-z]+", _FILLED))))
WORDS = {  # all that the demo model is taught
    "colours": tuple(COLOURS),
    "shapes": SHAPES,
    "backgrounds": tuple(BACKGROUNDS),
    "further": FURTHER_WORDS,
}
_HELD_OUT_ONE_IN = 8

Pixels = NDArray[np.uint8]
Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class Word:
    """A word of a prompt that is about one part of the image.

    ``kind`` is "noun", "colour" or "ground"; ``owner`` the number of the object that the word is
    about, -1 for the background.
    """

    text: str
    kind: str
    owner: int


@dataclass(frozen=True)
class SceneObject:
    """One drawn thing; ``radius`` is half its extent, all of it lies within ``centre ± radius``."""

    colour: str
    shape: str
    centre: tuple[float, float]
    radius: float

    @property
    def phrase(self) -> str:
        """The object with its article: "an orange star"."""
        article = "an" if self.colour[0] in "aeiou" else "a"
        return f"{article} {self.colour} {self.shape}"

    def covers(self, x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
        """Which of the points (x, y), in fractions of the side, lie on the object."""
        scale = 1 / self.radius
        return inside(self.shape, (x - self.centre[0]) * scale, (y - self.centre[1]) * scale)


@dataclass(frozen=True)
class Scene:
    """One or two objects on a plain ground; ``relation`` is of the first to the second."""

    objects: tuple[SceneObject, ...]
    relation: str | None
    background: str

    def draw(self, size: int = 64, supersample: int = 4) -> Pixels:
        """The image, uint8 [size, size, 3], each pixel the mean of ``supersample²`` points."""
        image = np.full((size, size, 3), BACKGROUNDS[self.background], dtype=np.float64)
        for thing in self.objects:
            rows, cols, cover = _cover(thing, size, supersample)
            part = image[rows, cols]
            part += cover[..., None] * (np.array(COLOURS[thing.colour]) - part)
        return np.rint(image).astype(np.uint8)

    def masks(self, size: int | tuple[int, int] = 64) -> Mask:
        """Where each object is: bool [objects, rows, cols], true where the cell's centre is on it.

        Objects never overlap, so this is also what can be seen of each.
        """
        return np.stack([thing.covers(*cell_centres(size)) for thing in self.objects])

    def prompts(self, wording: str = "any") -> tuple[str, ...]:
        """The ways to say this scene; ``wording`` is "any", "plain" or "place first".

        A gray background may be left unsaid.
        """
        phrases = {name: thing.phrase for name, thing in zip("ab", self.objects, strict=False)}
        if self.relation is None:
            forms: tuple[str, ...] = () if wording == "place first" else _ALONE
        else:
            plain = () if wording == "place first" else _PLAIN[self.relation]
            first = () if wording == "plain" else _PLACE_FIRST.get(self.relation, ())
            forms = plain + first
        said = [form.format(**phrases) for form in forms]
        full = tuple(_GROUND.format(scene=text, background=self.background) for text in said)
        return (*said, *full) if self.background == DEFAULT_BACKGROUND else full

    def caption(self, rng: np.random.Generator) -> str:
        """One of the prompts, by chance."""
        prompts = self.prompts()
        return prompts[int(rng.integers(len(prompts)))]

    def words(self, prompt: str) -> list[Word]:
        """Return the words that are about a part of the image, in the prompt's order."""
        found = [
            Word(text, kind, owner)
            for owner, thing in enumerate(self.objects)
            for kind, text in (("colour", thing.colour), ("noun", thing.shape))
        ]
        return [*found, Word(self.background, "ground", -1)] if "background" in prompt else found

    @property
    def is_held_out(self) -> bool:
        """Whether this combination of objects and relation is kept away from training.

        "A left of B" and "B right of A" say the same and are kept together.
        """
        names = [f"{thing.colour} {thing.shape}" for thing in self.objects]
        relation = self.relation or "alone"
        if relation in ("right of", "below") or (relation == "and" and names != sorted(names)):
            names.reverse()
            relation = {"right of": "left of", "below": "above"}.get(relation, relation)
        digest = hashlib.sha256("|".join([relation, *names]).encode()).digest()
        return digest[0] % _HELD_OUT_ONE_IN == 0


def inside(shape: str, x: NDArray[np.float64], y: NDArray[np.float64]) -> Mask:
    """Which points lie in a shape that fills the square from -1 to 1; y grows downwards."""
    if shape == "circle":
        return x**2 + y**2 <= 1
    if shape == "square":
        return np.maximum(abs(x), abs(y)) <= 0.86
    if shape == "triangle":
        return (y <= 0.85) & (abs(x) <= (y + 0.95) / 1.8)
    if shape == "ring":
        return (x**2 + y**2 <= 1) & (x**2 + y**2 >= 0.52**2)
    if shape == "cross":
        return (np.minimum(abs(x), abs(y)) <= 0.32) & (np.maximum(abs(x), abs(y)) <= 1)
    if shape == "star":
        return _in_star(x, y, inner=0.42)
    raise ValueError(f"No shape is called {shape!r}. Choose one of {', '.join(SHAPES)}.")


def random_scene(rng: np.random.Generator, *, held_out: bool = False, n_objects: int = 0) -> Scene:
    """A scene by chance: from the training part, or from the part that training never sees.

    Args:
        rng: the only source of chance.
        held_out: which part to draw from.
        n_objects: 1 or 2; 0 lets chance decide (one in eight has a single object).
    """
    while True:
        count = n_objects or (1 if rng.random() < 1 / 8 else 2)
        relation = str(rng.choice(RELATIONS)) if count == 2 else None
        radii = rng.uniform(0.17, 0.215, count)
        centres = _places(rng, radii, relation)
        objects = tuple(
            SceneObject(str(rng.choice(list(COLOURS))), str(rng.choice(SHAPES)), centre, radius)
            for centre, radius in zip(centres, radii.tolist(), strict=True)
        )
        scene = Scene(objects, relation, str(rng.choice(list(BACKGROUNDS), p=[0.4, 0.3, 0.3])))
        if scene.is_held_out == held_out:
            return scene


def holds(relation: str, first: tuple[float, float], second: tuple[float, float]) -> bool:
    """Whether centres (x, y) stand in the relation: farther that way than sideways."""
    if relation == "and":
        return True
    way = np.array(DIRECTIONS[relation])
    offset = np.array(first) - np.array(second)
    along = float(offset @ way)
    return along > 0 and along >= float(abs(offset @ way[::-1]))


def cell_centres(size: int | tuple[int, int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """x and y of every cell's centre, each [rows, cols], in fractions."""
    rows, cols = (size, size) if isinstance(size, int) else size
    y, x = np.meshgrid(
        (np.arange(rows) + 0.5) / rows, (np.arange(cols) + 0.5) / cols, indexing="ij"
    )
    return x, y


def _cover(
    thing: SceneObject, size: int, supersample: int
) -> tuple[slice, slice, NDArray[np.float64]]:
    """The rows and columns that an object lies in, and how much of each of their pixels it covers,
    float64 [rows, cols]."""
    (x, y), r = thing.centre, thing.radius
    rows, cols = (
        slice(*np.clip([math.floor((at - r) * size), math.ceil((at + r) * size)], 0, size).tolist())
        for at in (y, x)
    )
    fine = (np.arange(size * supersample) + 0.5) / (size * supersample)
    parts = [fine[part.start * supersample : part.stop * supersample] for part in (cols, rows)]
    x_fine, y_fine = np.meshgrid(*parts)
    cover = thing.covers(x_fine, y_fine)
    shape = (rows.stop - rows.start, supersample, cols.stop - cols.start, supersample)
    return rows, cols, cover.reshape(shape).mean(axis=(1, 3))


def _in_star(x: NDArray[np.float64], y: NDArray[np.float64], inner: float) -> Mask:
    """Five points, one up: folded onto one half-point, it is one side of a straight line."""
    tip = math.pi / 5
    angle = abs((np.arctan2(x, -y) + tip) % (2 * tip) - tip)
    along, across = np.hypot(x, y) * np.cos(angle), np.hypot(x, y) * np.sin(angle)
    notch_x, notch_y = inner * math.cos(tip), inner * math.sin(tip)
    return (1.0 - along) * notch_y >= across * (1.0 - notch_x)


def _places(
    rng: np.random.Generator, radii: NDArray[np.float64], relation: str | None
) -> list[tuple[float, float]]:
    """Centres for the radii: clear of the border and of each other, and true to the relation."""
    gap = 0.06
    lowest, highest = radii[:, None] + gap / 3, 1 - radii[:, None] - gap / 3
    while True:
        xy = rng.uniform(lowest, highest, (len(radii), 2))
        if relation is not None:
            near, far = sorted(abs(xy[0] - xy[1]).tolist())
            if far < radii.sum() + gap or (relation != "and" and near >= 0.2):
                continue
        centres = [(x, y) for x, y in xy.tolist()]
        if relation is None or holds(relation, *centres):
            return centres
