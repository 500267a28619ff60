"""Where a colour and a shape are read: what becomes of an object without the look at its words.

without_words(pipe, scene, prompt, seed, options)   what stays of the first object, word by word
stays(rows)                                         the parts of the images where it does
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

import sdattn

from ..scene_checker import find_objects
from ..scenes.shapes import Scene
from .landing import Kind, objects_right

Row = dict[Kind, tuple[bool, bool]]  # without the word of this kind: the colour stays, the shape


def tells_apart(scene: Scene) -> bool:
    """Whether a word of the first object is about no other."""
    first, *others = scene.objects
    return bool(others) and all(
        thing.colour != first.colour and thing.shape != first.shape for thing in others
    )


def without_words(
    pipe: Any, scene: Scene, prompt: str, seed: int, options: Mapping[str, Any]
) -> Row | None:
    """Draw the scene without the attention to the first object's colour word, and to its shape
    word, in all steps. None where the image was not right to begin with."""
    first, found = scene.objects[0], {}
    for kind in ("colour", "shape"):
        word = getattr(first, kind)
        removed = sdattn.knockout(pipe, prompt, word, seed, **options)
        if not all(objects_right(scene, find_objects(removed.image))):
            return None
        left = find_objects(removed.without)
        found[kind] = (
            any(thing.colour == first.colour for thing in left),
            any(thing.shape == first.shape for thing in left),
        )
    return found


def stays(rows: Iterable[Row]) -> dict[str, Any]:
    """The parts of the images in which the colour, and the shape, are still there."""
    held = list(rows)
    means = {
        kind: np.mean([row[kind] for row in held], axis=0).tolist() if held else None
        for kind in ("colour", "shape")
    }
    return {
        "images": len(held),
        **{f"without_{kind}": dict(zip(("colour", "shape"), mean or (None,) * 2, strict=True))
           for kind, mean in means.items()},
    }  # fmt: skip
