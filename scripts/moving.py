"""Drawn scenes that move: videos whose every frame is explained.

- ``MovingScene`` is a scene all of which goes to the right; ``random_video`` makes one up.
- ``MovingScene.frames`` gives the scene of each frame, ``draw`` the video.
- ``goes_right`` reads from an object's places, frame by frame, whether it went there.

``demo-video`` is trained on these. AnimateDiff's motion modules see no text, and the first demo's
UNet, which stays as it is, knows no word for movement. So a video is said as its scene is, and goes
one way, whatever is said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from .scenes.shapes import Pixels, Scene, SceneObject, random_scene

FRAMES = 8
MARGIN = 0.02  # between objects and the border, as in scenes that stand still
SHORTEST, LONGEST = 0.35, 0.5  # of the way where there is room, as parts of the image's side


@dataclass(frozen=True)
class MovingScene:
    """A scene of which every object goes to the right, evenly.

    Attributes:
        scene: the first frame.
        length: of the way from the first frame to the last, as a part of the image's side.
    """

    scene: Scene
    length: float

    def frames(self, count: int = FRAMES) -> list[Scene]:
        """The scene of each frame."""
        return [moved(self.scene, self.length * at / max(count - 1, 1)) for at in range(count)]

    def draw(self, size: int, count: int = FRAMES) -> Pixels:
        """The video, uint8 [frames, size, size, 3]."""
        return np.stack([scene.draw(size) for scene in self.frames(count)])

    def caption(self, rng: np.random.Generator) -> str:
        """One of the ways to say the scene, by chance."""
        prompts = self.scene.prompts("plain")
        return prompts[int(rng.integers(len(prompts)))]


def moved(scene: Scene, x: float) -> Scene:
    """The scene with all its objects so far to the right."""
    objects = tuple(
        replace(one, centre=(one.centre[0] + x, one.centre[1])) for one in scene.objects
    )
    return replace(scene, objects=objects)


def room(objects: Sequence[SceneObject]) -> tuple[float, float]:
    """How far objects can go to the left and to the right within the image."""
    left = min(one.centre[0] - one.radius for one in objects)
    right = max(one.centre[0] + one.radius for one in objects)
    return left - MARGIN, 1 - MARGIN - right


def random_video(
    rng: np.random.Generator, *, held_out: bool = False, n_objects: int = 0
) -> MovingScene:
    """A video by chance, whose objects stay within the image: two side by side go as far as there
    is room. ``held_out`` and ``n_objects`` as of scenes, but that 0 makes half of the videos of one
    object."""
    count = n_objects or int(rng.integers(1, 3))
    scene = random_scene(rng, held_out=held_out, n_objects=count)
    left, right = room(scene.objects)
    length = min(float(rng.uniform(SHORTEST, LONGEST)), left + right)
    return MovingScene(moved(scene, float(rng.uniform(0, left + right - length)) - left), length)


def goes_right(places: Sequence[tuple[float, float]], least: float = SHORTEST / 2) -> bool:
    """Whether an object with these places (x, y) in the frames went so far to the right from the
    first to the last, and half as far up or down at most."""
    x, y = np.asarray(places[-1]) - np.asarray(places[0])
    return bool(x >= least and abs(y) <= x / 2)
