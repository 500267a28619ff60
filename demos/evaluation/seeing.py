"""Who says what is in a demo model's images, and which words are about what.

subject_of(model, checker)      Subject: a model, its scenes, and the checker of its images
seen_in(scene, image)           Seen: an image of shapes against its scene
maps_of(words, heatmaps)        the map of each word that is about a part of the image
function_peak(words, heatmaps)  how high the other words' maps are beside theirs
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

import sdattn
from scripts.benchmarks.machine import machine_name
from sdattn import Heatmap, Heatmaps
from sdattn.models.demos import DEMOS, RECORD

from ..scene_checker import SIDE, find_objects, match
from ..scenes import emoji, shapes
from ..scenes.shapes import DIRECTIONS, Word, holds
from ..sprite_checker import CELLS, Segmenter, asked_for, find_things, load_segmenter

assert SIDE == CELLS  # both checkers' masks have 64 x 64 cells

Scene = shapes.Scene | emoji.Scene


@dataclass(frozen=True)
class Seen:
    """An image against its scene.

    Attributes:
        objects: it has the objects that were asked for, and no others.
        relation: the first two stand as they should; None if no direction was asked for, or if
            the sprites that were asked for are not there.
        colours: for each sprite with an adjective, if it has that colour; for shapes one value for
            all of them.
        things: the noun and the colour of everything that is there.
        masks: bool [objects, 64, 64]; None if it cannot be told which object is which.
    """

    objects: bool
    relation: bool | None
    colours: tuple[bool, ...]
    things: tuple[tuple[str, str | None], ...]
    masks: NDArray[np.bool_] | None


Checker = Callable[[Sequence[Any], Sequence[Image.Image]], list[Seen]]


@dataclass(frozen=True)
class Subject:
    """A demo model to be measured.

    Attributes:
        pipe: its pipeline.
        settings: what it is drawn with.
        make: returns a scene of its kind, ``make(rng, held_out=True)``.
        see: compares images with their scenes.
    """

    pipe: Any
    settings: Mapping[str, Any]
    make: Callable[..., Any]
    see: Checker


@cache
def subject_of(model: str, checker: Path, device: str = "cpu") -> Subject:
    """Return a demo model, or a folder of one: of shapes for joint attention, else of sprites,
    whose images are read by the segmenter in the file ``checker``."""
    pipe: Any = sdattn.load_pipeline(model, device=device, dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    if is_joint(model):
        return Subject(pipe, own_settings(model), shapes.random_scene, see_shapes)
    see = partial(see_sprites, load_segmenter(checker))
    return Subject(pipe, own_settings(model), emoji.random_scene, see)


def machine(device: str = "cpu") -> str:
    """Return what a run was made on: the GPU, or the processor and its threads, and torch."""
    return f"{machine_name(device)}, torch {torch.__version__}"


def accuracy_of(checker: Path) -> dict[str, Any]:
    """Return what ``train_sprite_checker`` measured of a checker, which lies beside its weights;
    empty if it does not."""
    record = checker.with_suffix(".json")
    accuracy: dict[str, Any] = json.loads(record.read_text()) if record.exists() else {}
    return accuracy


def is_joint(model: str) -> bool:
    """Tell if the demo model of a name or folder has joint attention."""
    return (Path(DEMOS.get(model, model)) / "transformer").is_dir()


def own_settings(model: str | Path) -> dict[str, Any]:
    """Return what a demo model, or a folder of one just trained, says it is drawn with."""
    folder = DEMOS.get(str(model)) or Path(model)
    settings: dict[str, Any] = json.loads((folder / RECORD).read_text())["settings"]
    return settings


def see_shapes(scenes: Sequence[shapes.Scene], images: Sequence[Image.Image]) -> list[Seen]:
    """Return :func:`seen_in` of each image."""
    return [seen_in(*pair) for pair in zip(scenes, images, strict=True)]


def seen_in(scene: shapes.Scene, image: Image.Image) -> Seen:
    """Find the shapes in an image, by colour and outline alone; they are told apart by their
    colours."""
    found = find_objects(image)
    chosen = match(scene, found)
    there = Counter((thing.shape, thing.colour) for thing in found)
    expected = Counter((thing.shape, thing.colour) for thing in scene.objects)
    colours = Counter(thing.colour for thing in found)
    relation = None
    if scene.relation in DIRECTIONS:
        relation = bool(chosen) and holds(scene.relation, *(one.centre for one in chosen or ()))
    whole = chosen is not None and len(found) == len(scene.objects)
    return Seen(
        there == expected,
        relation,
        (colours == Counter(thing.colour for thing in scene.objects),),
        tuple(there),
        np.stack([thing.mask for thing in chosen]) if chosen and whole else None,
    )


def see_sprites(
    segmenter: Segmenter, scenes: Sequence[emoji.Scene], images: Sequence[Image.Image]
) -> list[Seen]:
    """Return what a segmenter finds in each image; sprites are told apart by their nouns."""
    seen = []
    for scene, found in zip(scenes, find_things(segmenter, list(images)), strict=True):
        verdict = asked_for(scene, found)
        masks = np.stack([one.mask for one in verdict.found]) if verdict.objects else None
        things = tuple((thing.noun, thing.colour) for thing in found)
        seen.append(Seen(verdict.objects, verdict.relation, verdict.colours, things, masks))
    return seen


def as_composed(scene: Scene) -> Seen:
    """Return the same of an image that the script composed, from the scene itself."""
    things = tuple(
        (thing.noun if isinstance(thing, emoji.Thing) else thing.shape, thing.colour)
        for thing in scene.objects
    )
    relation = True if scene.relation in DIRECTIONS else None
    return Seen(True, relation, (), things, scene.masks(SIDE))


def maps_of(words: Sequence[Word], heatmaps: Heatmaps) -> list[Heatmap]:
    """Return the map of each of a scene's words; of two equal words, "blue" of a car and of the
    background, the second has the second occurrence."""
    texts = [word.text for word in words]
    return [heatmaps.find(text)[texts[:i].count(text)] for i, text in enumerate(texts)]


def function_peak(words: Sequence[Word], heatmaps: Heatmaps) -> float:
    """Return the mean peak of the maps of "a", "of", "left" and their like, as a part of the mean
    peak of the objects' words. The words of the background count for neither."""
    ours = {word.text for word in words if word.owner >= 0}
    ground = {"background", *(word.text for word in words if word.owner < 0)}
    peaks: dict[bool, list[float]] = {True: [], False: []}
    for one in heatmaps.occurrences():
        if one.label not in ground:
            peaks[one.label in ours].append(float(one.values.max()))
    return float(np.mean(peaks[False]) / np.mean(peaks[True]))
