"""One image of a scene and its words' maps: is it right, and do the words land?

seen_in(scene, image)                  Seen: right or not, where its objects are
landings(scene, masks, heatmaps, kind)    Landing: a word's map against its object, one an object
function_peak(heatmaps)                   how high the other words' maps are beside theirs
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from sdattn import Heatmaps

from ..scene_checker import SIDE, Found, find_objects, match
from ..scenes.shapes import BACKGROUNDS, COLOURS, DIRECTIONS, SHAPES, Scene, holds

THRESHOLDS = np.linspace(0.05, 0.95, 19).round(2)
OBJECT_WORDS = {*COLOURS, *SHAPES}
GROUND_WORDS = {*BACKGROUNDS, "background"}

Kind = Literal["colour", "shape"]


@dataclass(frozen=True)
class Seen:
    """An image against its scene.

    Attributes:
        colours: the objects found have the colours that were asked for, and no others.
        shapes: and each has the shape that was asked for.
        relation: the two stand as they should; None if no direction was asked for.
        masks: bool [objects, 64, 64]; None if the image has not just the colours asked for.
    """

    colours: bool
    shapes: bool
    relation: bool | None
    masks: NDArray[np.bool_] | None


@dataclass(frozen=True)
class Landing:
    """A word's map against its object.

    Attributes:
        own: its mean on the object is higher than on the other; None if there is no other.
        ious: of the object and the cells above each of THRESHOLDS times the peak.
    """

    own: bool | None
    ious: tuple[float, ...]


def seen_in(scene: Scene, image: Image.Image) -> Seen:
    """Find the objects in the image, by colour and outline alone."""
    found = find_objects(image)
    chosen = match(scene, found)
    colours, shapes = objects_right(scene, found)
    whole = chosen is not None and len(found) == len(scene.objects)
    masks = np.stack([thing.mask for thing in chosen]) if chosen and whole else None
    return Seen(colours, shapes, related(scene, chosen), masks)


def objects_right(scene: Scene, found: list[Found]) -> tuple[bool, bool]:
    """Whether the colours are right, and whether colours with their shapes are."""
    seen = Counter((thing.colour, thing.shape) for thing in found)
    wanted = Counter((thing.colour, thing.shape) for thing in scene.objects)
    colours = Counter(thing.colour for thing in found)
    return colours == Counter(thing.colour for thing in scene.objects), seen == wanted


def related(scene: Scene, chosen: tuple[Found, ...] | None) -> bool | None:
    """Whether the found objects stand in the relation; None if no direction was asked for."""
    if scene.relation not in DIRECTIONS:
        return None
    return chosen is not None and holds(scene.relation, *(thing.centre for thing in chosen))


def landings(
    scene: Scene, masks: NDArray[np.bool_] | None, heatmaps: Heatmaps, kind: Kind
) -> list[Landing]:
    """How the colour words or the shape words land, one an object; none without masks."""
    if masks is None:
        return []
    made = []
    for index, values in enumerate(word_maps(scene, heatmaps, kind)):
        here, others = torch.from_numpy(masks[index]), np.delete(masks, index, axis=0)
        there = torch.from_numpy(others.any(0))
        own = bool(values[here].mean() > values[there].mean()) if len(others) else None
        parts = [values >= float(level) * values.max() for level in THRESHOLDS]
        ious = tuple(float((part & here).sum() / (part | here).sum()) for part in parts)
        made.append(Landing(own, ious))
    return made


def word_maps(scene: Scene, heatmaps: Heatmaps, kind: Kind) -> list[torch.Tensor]:
    """The map of each object's word at the checker's size, float32 [64, 64]."""
    names = [getattr(thing, kind) for thing in scene.objects]
    return [
        heatmaps.find(name)[names[:index].count(name)].resize((SIDE, SIDE))
        for index, name in enumerate(names)
    ]


def function_peak(heatmaps: Heatmaps) -> float:
    """The mean peak of the maps of "a", "of", "left" and their like, as a part of the mean peak
    of the colours' and shapes'. The words of the background count for neither."""
    peaks: dict[bool, list[float]] = {True: [], False: []}
    for one in heatmaps.occurrences():
        if one.label not in GROUND_WORDS:
            peaks[one.label in OBJECT_WORDS].append(float(one.values.max()))
    return float(np.mean(peaks[False]) / np.mean(peaks[True]))
