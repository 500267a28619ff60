"""Drawn scenes that move: videos whose every frame is explained.

- ``MovingScene`` is a scene all of which goes to the right; ``random_video`` makes one up.
- ``MovingScene.frames`` gives the scene of each frame, ``draw`` the video.
- ``goes_right`` reads from an object's places, frame by frame, whether it went there.

``demo-video`` is trained on these. AnimateDiff's motion modules see no text, and the demo's UNet,
which stays as it is, knows no word for movement: told of "a cat left to right" or "a cat to the
right", it draws two cats. So a video is said as its scene is, and goes one way, whatever is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .scenes.emoji import CELLS, Pixels, Scene, Thing, random_scene

FRAMES = 8
LONGEST = (FRAMES - 1) / CELLS  # the way where there is room, a cell from frame to frame
SHORTEST = 4 / CELLS  # the way of two side by side, at least
SIDE_BY_SIDE = ("left of", "right of")


@dataclass(frozen=True)
class MovingScene:
    """A scene of which every object goes to the right, by whole cells, which is all that the UNet
    has seen objects stand on.

    Attributes:
        scene: the first frame.
        length: of the way from the first frame to the last, as a part of the image's side.
    """

    scene: Scene
    length: float

    def frames(self, count: int = FRAMES) -> list[Scene]:
        """Return the scene of each frame."""
        ways = np.linspace(0, self.length * CELLS, count).round() / CELLS
        return [moved(self.scene, way) for way in ways.tolist()]

    def draw(self, size: int, count: int = FRAMES) -> Pixels:
        """Return the video, uint8 [frames, size, size, 3]."""
        return np.stack([scene.draw(size) for scene in self.frames(count)])

    def caption(self, rng: np.random.Generator) -> str:
        """Return one of the ways to say the scene, by chance."""
        return self.scene.caption(rng)


def moved(scene: Scene, x: float) -> Scene:
    """Return the scene with all its objects so far to the right."""
    objects = tuple(
        replace(one, centre=(one.centre[0] + x, one.centre[1])) for one in scene.objects
    )
    return replace(scene, objects=objects)


def room(objects: Sequence[Thing]) -> tuple[float, float]:
    """Return how far objects can go to the left and to the right within the image."""
    left = min(one.centre[0] - one.radius for one in objects)
    right = max(one.centre[0] + one.radius for one in objects)
    return left, 1 - right


def random_video(
    rng: np.random.Generator, *, held_out: bool = False, n_objects: int = 0
) -> MovingScene:
    """Return a video by chance, whose objects stay within the image: two side by side go as far as
    there is room, all others a cell a frame. ``held_out`` and ``n_objects`` as of scenes, but that
    0 makes half of the videos of one object."""
    count = n_objects or int(rng.integers(1, 3))
    while True:
        scene = random_scene(rng, held_out=held_out, n_objects=count)
        left, right = room(scene.objects)
        length = min(LONGEST, left + right)
        if length >= (SHORTEST if scene.relation in SIDE_BY_SIDE else LONGEST):
            cells = round((left + right - length) * CELLS)
            start = int(rng.integers(cells, endpoint=True)) / CELLS
            return MovingScene(moved(scene, start - left), length)


def goes_right(places: Sequence[tuple[float, float]], least: float = SHORTEST / 2) -> bool:
    """Tell if an object with these places (x, y) in the frames went so far to the right from the
    first to the last, and half as far up or down at most."""
    x, y = np.asarray(places[-1]) - np.asarray(places[0])
    return bool(x >= least and abs(y) <= x / 2)
