"""Find the objects in an image of a scene, by colour and outline alone.

``find_objects`` knows nothing of how the image was made, nor of what was asked for;
``match`` then says which of its finds are the objects of a scene.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from sdattn.maps.masks import components

from .scenes.shapes import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Mask,
    Pixels,
    Scene,
    SceneObject,
    cell_centres,
    holds,
    inside,
)

SIDE = 64  # images are looked at in 64 x 64
SOLID = 6  # pixels of one colour, neighbours and all, that no blurred edge has


@dataclass(frozen=True)
class Found:
    """What the checker saw: ``centre`` (x, y) in fractions, ``mask`` bool [64, 64]."""

    colour: str
    shape: str
    centre: tuple[float, float]
    mask: Mask


def find_objects(
    image: Image.Image | Pixels,
    min_area: float = 0.012,
    colours: Mapping[str, tuple[int, int, int]] = COLOURS,
) -> list[Found]:
    """The objects in an image, biggest first, by colour and outline alone.

    Every pixel takes the nearest colour of the palette; blends at edges count for the colours
    they lie between. Each connected patch is then named after the shape that, at the patch's own
    area and centre of mass, overlaps it best.

    Args:
        image: PIL image or uint8 [rows, cols, 3]; looked at in 64 x 64.
        min_area: the least part of the image that counts as an object.
        colours: that an object can have.
    """
    opened = image if isinstance(image, Image.Image) else Image.fromarray(image)
    small = opened.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BOX)
    labels = _label_colours(np.asarray(small, dtype=np.float64), colours)
    found = []
    for index, colour in enumerate(colours):
        patches = components(torch.from_numpy(labels == index)).numpy()
        for patch in (patches == number for number in range(1, patches.max() + 1)):
            if patch.mean() >= min_area and _eroded(patch).sum() >= SOLID:
                x, y = cell_centres(SIDE)
                centre = (float(x[patch].mean()), float(y[patch].mean()))
                found.append(Found(colour, _name_shape(patch, centre), centre, patch))
    return sorted(found, key=lambda thing: -int(thing.mask.sum()))


def match(scene: Scene, found: list[Found]) -> tuple[Found, ...] | None:
    """The finds that stand for the scene's objects, in order; None if a colour has no find.

    Among finds of the right colours the right shapes go first, then the right places.
    """

    def agreement(chosen: tuple[Found, ...]) -> tuple[int, bool]:
        pairs = zip(chosen, scene.objects, strict=True)
        shapes = sum(thing.shape == expected.shape for thing, expected in pairs)
        places = [thing.centre for thing in chosen]
        return shapes, scene.relation is None or holds(scene.relation, *places)

    expected = [thing.colour for thing in scene.objects]
    choices = permutations(found, len(expected))
    fitting = [chosen for chosen in choices if [thing.colour for thing in chosen] == expected]
    return max(fitting, key=agreement, default=None)


def _label_colours(
    image: NDArray[np.float64], colours: Mapping[str, tuple[int, int, int]]
) -> NDArray[np.int64]:
    """The palette's index for each pixel [64, 64]; backgrounds come after the colours.

    Only colours with a solid patch are let in: red fading into white passes through pink, and
    that is no pink object.
    """
    palette = np.array([*colours.values(), *BACKGROUNDS.values()], dtype=np.float64)
    distance = ((image[:, :, None] - palette) ** 2).sum(-1)  # [64, 64, colours]
    nearest = distance.argmin(-1)
    solid = [int(_eroded(nearest == index).sum()) for index in range(len(palette))]
    absent = [index for index, cells in enumerate(solid) if cells < SOLID]
    if len(absent) < len(palette):
        distance[:, :, absent] = np.inf
    return distance.argmin(-1)


def _eroded(mask: Mask) -> Mask:
    """The cells whose eight neighbours are all in the mask."""
    padded = np.pad(mask, 1)
    rows, cols = mask.shape
    shifts = [padded[i : i + rows, j : j + cols] for i in range(3) for j in range(3)]
    return np.logical_and.reduce(shifts)


def _name_shape(patch: Mask, centre: tuple[float, float]) -> str:
    """The shape whose outline, moved and scaled onto the patch, overlaps it best."""
    return max(SHAPES, key=partial(_overlap, patch=patch, centre=centre))


def _overlap(shape: str, patch: Mask, centre: tuple[float, float]) -> float:
    """IoU of the patch with ``shape`` of the same area and centre of mass."""
    x, y = cell_centres(200)
    unit = inside(shape, 2.2 * (x - 0.5), 2.2 * (y - 0.5))
    area = float(unit.mean()) * 2.2**2
    middle = (2.2 * float((x[unit] - 0.5).mean()), 2.2 * float((y[unit] - 0.5).mean()))
    radius = math.sqrt(float(patch.mean()) / area)
    centre = (centre[0] - radius * middle[0], centre[1] - radius * middle[1])
    drawn = SceneObject("red", shape, centre, radius).covers(*cell_centres(patch.shape))
    return float((drawn & patch).sum() / (drawn | patch).sum())
