"""Images of scenes that training never saw, where each object is in them, and their maps.

    unseen_scenes(make, count, seed)            scenes, each with one of its prompts
    generated(subject, asked, seed)             drawn by the model; masks by the checker
    noised, inverted (subject, asked, seed)     composed by the script, exact masks, explained

A batch's maps are made by every variant from one run, which keeps every step and head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

import sdattn
from sdattn import Heatmaps, MapStore
from sdattn.maps.aggregation import refining
from sdattn.maps.from_stores import heatmaps_of
from sdattn.maps.layermaps import LayerMaps, layer_maps
from sdattn.maps.presets import Preset
from sdattn.maps.requirements import columns_around
from sdattn.models.facts import default_size
from sdattn.models.pipeline_call import call_pipeline, images_of
from sdattn.models.reading import read_prompts
from sdattn.prompts.tokens import Prompt

from .seeing import Scene, Seen, Subject, as_composed

BATCH = 10
FULL = {"steps": "all", "heads": "all", "kinds": ("cross", "self")}

Asked = tuple[int, Scene, str]  # a scene's number, the scene, what is said of it


@dataclass(frozen=True)
class Sample:
    """One image and what is known of it.

    Attributes:
        number: of its scene.
        seed: of its noise.
        image: PIL.
        seen: how it compares with the scene.
        heatmaps: by variant.
    """

    number: int
    scene: Scene
    prompt: str
    seed: int
    image: Image.Image
    seen: Seen
    heatmaps: Mapping[str, Heatmaps]

    @property
    def masks(self) -> NDArray[np.bool_] | None:
        """Where the objects are, bool ``[objects, 64, 64]``; None if not all can be found."""
        return self.seen.masks


def unseen_scenes(make: Callable[..., Any], count: int, seed: int) -> list[Asked]:
    """Return scenes of the part that training never saw, each with one of its prompts."""
    rng = np.random.default_rng(seed)
    scenes = [make(rng, held_out=True) for _ in range(count)]
    return [(i, scene, scene.caption(rng)) for i, scene in enumerate(scenes)]


def generated(
    subject: Subject, asked: Sequence[Asked], seed: int, variants: Mapping[str, Preset]
) -> Iterator[Sample]:
    """Yield the images that the model draws of the prompts; that of scene ``i`` from seed
    ``seed * 100000 + i``."""
    pipe = subject.pipe
    for part in batches(asked):
        prompts, seeds = said(part), seeds_of(part, seed)
        with ExitStack() as captures:
            stores = _stores(captures, pipe, prompts)
            images = images_of(call_pipeline(pipe, prompts, seeds, subject.settings))
        maps = _by_variant(stores, read_prompts(pipe, prompts), variants)
        yield from samples(subject, part, seeds, images, maps)


def noised(
    subject: Subject, asked: Sequence[Asked], seed: int, variants: Mapping[str, Preset]
) -> Iterator[Sample]:
    """Yield composed images, each noised to the default timesteps of :func:`sdattn.explain`."""
    pipe = subject.pipe
    for part in batches(asked):
        prompts, images = said(part), composed(pipe, part)
        with ExitStack() as captures:
            stores = _stores(captures, pipe, prompts)
            sdattn.explain(pipe, images, prompts, seed=seed * 100_000 + part[0][0])
        # all timesteps were chosen, so none of them is a part to be left out
        every = {n: replace(p, steps="mean") if _spans(p) else p for n, p in variants.items()}
        yield from _given(part, images, _by_variant(stores, read_prompts(pipe, prompts), every))


def inverted(
    subject: Subject, asked: Sequence[Asked], seed: int, variants: Mapping[str, Preset]
) -> Iterator[Sample]:
    """Yield composed images, each replayed from its inversion; ``seed`` has no effect."""
    pipe = subject.pipe
    settings = {**FULL, "layers": refining(pipe)}
    steps = {"num_inference_steps": subject.settings["num_inference_steps"]}
    kept = {name: preset for name, preset in variants.items() if not preset.among_words}
    for part in batches(asked):
        prompts, images = said(part), composed(pipe, part)
        run = sdattn.explain(pipe, images, prompts, invert=True, capture_options=settings, **steps)
        stores = run.store, run.store
        yield from _given(part, images, _by_variant(stores, read_prompts(pipe, prompts), kept))


def batches(asked: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
    """Yield as many scenes as run at once."""
    for start in range(0, len(asked), BATCH):
        yield asked[start : start + BATCH]


def said(part: Sequence[Asked]) -> list[str]:
    """Return the prompts."""
    return [prompt for _, _, prompt in part]


def seeds_of(part: Sequence[Asked], seed: int) -> list[int]:
    """Return a seed for each image, another in each series of noises."""
    return [seed * 100_000 + number for number, _, _ in part]


def composed(pipe: Any, part: Sequence[Asked]) -> list[Image.Image]:
    """Return the script's own images, in the size that the model makes."""
    size, _ = default_size(pipe)
    return [Image.fromarray(scene.draw(size)) for _, scene, _ in part]


def samples(
    subject: Subject,
    part: Sequence[Asked],
    seeds: Sequence[int],
    images: Sequence[Image.Image],
    maps: Sequence[Mapping[str, Heatmaps]],
) -> Iterator[Sample]:
    """Yield images that the model drew, as the checker sees them."""
    seen = subject.see([scene for _, scene, _ in part], images)
    for one, at, image, found, heatmaps in zip(part, seeds, images, seen, maps, strict=True):
        yield Sample(*one, at, image, found, heatmaps)


def _given(
    part: Sequence[Asked], images: Sequence[Image.Image], maps: Sequence[Mapping[str, Heatmaps]]
) -> Iterator[Sample]:
    for one, image, heatmaps in zip(part, images, maps, strict=True):
        yield Sample(*one, -1, image, as_composed(one[1]), heatmaps)


def _stores(captures: ExitStack, pipe: Any, prompts: Sequence[str]) -> tuple[MapStore, MapStore]:
    """Of the run that follows: every step and head; and the softmax over words, <sos>, <eos>."""
    full = captures.enter_context(sdattn.capture(pipe, layers=refining(pipe), **FULL))
    read = read_prompts(pipe, list(prompts))
    among = [columns_around(one) for one in read]
    return full, captures.enter_context(sdattn.capture(pipe, among=among))


def _by_variant(
    stores: tuple[MapStore, MapStore], read: Sequence[Prompt], variants: Mapping[str, Preset]
) -> list[dict[str, Heatmaps]]:
    """For each image of a batch its heatmaps by variant."""
    full, among = stores
    layers: dict[Any, LayerMaps] = {}  # variants differ in little of what they read
    found: list[dict[str, Heatmaps]] = [{} for _ in range(full.images)]
    for name, preset in variants.items():
        store = among if preset.among_words else full
        key = (preset.among_words, preset.steps == "sum" or preset.steps, preset.each_head)
        key = (*key, preset.refine)
        if key not in layers:
            layers[key] = layer_maps(store, preset)
        for held, one in zip(found, heatmaps_of(store, layers[key], preset, read), strict=True):
            held[name] = one
    return found


def _spans(preset: Preset) -> bool:
    return isinstance(preset.steps, tuple)
