"""Drawn scenes that move: films whose every frame is explained, and the words for them.

- ``MovingScene`` is a scene and the way that all of it goes; ``random_film`` makes one up.
- ``MovingScene.frames`` gives the scene of each frame, ``prompts`` the ways of saying it.
- ``way_of`` reads from an object's places, frame by frame, which way it went.

``demo-film`` is trained on these. Its words are the first demo model's, which knows no word for
movement: "to the right a red circle" is one that goes to the right. The way comes first because the
demo's text encoder and UNet, which stay as they are, hardly tell it where it comes last.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .scenes import Picture, Scene, random_scene

FRAMES = 8
WAYS = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
MARGIN = 0.02  # between objects and the border, as in scenes that stand still
SHORTEST, LONGEST = 0.3, 0.5  # of a film's way, as parts of the picture's side
STILL = 0.25  # of the films
ALONE = 0.6  # of the films that move: with one object
_STILL = "a picture of"


@dataclass(frozen=True)
class MovingScene:
    """A scene of which every object goes the same way, evenly, or stands still.

    Attributes:
        scene: the first frame.
        way: one of ``WAYS``; None for a film that stands still.
        length: of the way from the first frame to the last, as a part of the picture's side.
    """

    scene: Scene
    way: str | None = None
    length: float = 0.0

    def frames(self, count: int = FRAMES) -> list[Scene]:
        """The scene of each frame."""
        x, y = WAYS[self.way] if self.way else (0, 0)
        steps = [self.length * number / max(count - 1, 1) for number in range(count)]
        return [moved(self.scene, x * step, y * step) for step in steps]

    def draw(self, size: int, count: int = FRAMES) -> Picture:
        """The film, uint8 [frames, size, size, 3]."""
        return np.stack([scene.draw(size) for scene in self.frames(count)])

    def prompts(self) -> tuple[str, ...]:
        """The ways to say it: those of the scene, of a film that moves after where it goes."""
        said = self.scene.prompts("plain")
        if self.way is None:
            return said
        return tuple(f"to the {self.way} {text}" for text in said if not text.startswith(_STILL))

    def caption(self, rng: np.random.Generator) -> str:
        """One of the prompts, by chance."""
        prompts = self.prompts()
        return prompts[int(rng.integers(len(prompts)))]


def moved(scene: Scene, x: float, y: float) -> Scene:
    """The scene with all its objects elsewhere."""
    objects = tuple(
        replace(one, centre=(one.centre[0] + x, one.centre[1] + y)) for one in scene.objects
    )
    return replace(scene, objects=objects)


def random_film(rng: np.random.Generator, *, held_out: bool = False) -> MovingScene:
    """A film by chance, whose objects stay within the picture; ``held_out`` as of scenes."""
    if rng.random() < STILL:
        return MovingScene(random_scene(rng, held_out=held_out))
    way, alone = str(rng.choice(list(WAYS))), rng.random() < ALONE
    while True:
        scene = random_scene(rng, held_out=held_out, n_objects=1 if alone else 2)
        film = MovingScene(scene, way, float(rng.uniform(SHORTEST, LONGEST)))
        if all(one.is_within(MARGIN) for one in film.frames(2)[1].objects):
            return film


def way_of(places: Sequence[tuple[float, float]] | NDArray[np.float64]) -> str | None:
    """Which way an object went that had these places (x, y) in the frames; None if it moved by less
    than half the shortest way, or as far sideways."""
    x, y = np.asarray(places[-1]) - np.asarray(places[0])
    far = max(abs(x), abs(y))
    if far < SHORTEST / 2 or min(abs(x), abs(y)) > far / 2:
        return None
    axis = (np.sign(x), 0) if abs(x) > abs(y) else (0, np.sign(y))
    return next(way for way, to in WAYS.items() if to == axis)
