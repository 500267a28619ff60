"""Several images of each unseen prompt, with their words' maps at every step, kept in files.

prompts_of(make, mixed, three, seed)  prompts as scenes come, then some of three things
draw(subject, asked, path, seeds)     draw a prompt from several seeds, into a file
read(pipe, asked, path, judge)        Drawn: what is in the images, and the nouns' maps
by_checker(see), by_eye(labels)       who judges: a checker, or somebody who looked at them
MEASURES                              what a map is judged by, higher for a word that is there
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor

import sdattn
from sdattn import Heatmap, Heatmaps
from sdattn.maps.aggregation import refining
from sdattn.maps.arrival import rival_of
from sdattn.models.reading import read_prompts
from sdattn.runs.imagerun import step_heatmaps

from .images import Asked, unseen_scenes
from .seeing import Checker, Subject, maps_of

SERIES = 100_000  # from one seed of a prompt to its next
FURTHER = 200  # number of the first further prompt
Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Judge = Callable[[Asked, Sequence[Image.Image]], tuple[Bools, Bools]]


def prompts_of(make: Callable[..., Any], mixed: int, three: int, seed: int) -> list[Asked]:
    """Return the first of :data:`FURTHER` unseen scenes as they come, then some of three things,
    each with one of its prompts."""
    found = unseen_scenes(make, FURTHER, seed)[:mixed]
    rng = np.random.default_rng(seed + 1)
    for number in range(FURTHER, FURTHER + three):
        scene = make(rng, held_out=True, n_objects=3)
        found.append((number, scene, scene.caption(rng)))
    return found


def draw(subject: Subject, asked: Asked, path: Path, seeds: int) -> None:
    """Draw a prompt from several seeds into a file, unless it is there.

    The file has ``images`` uint8 ``[seeds, height, width, 3]``, ``maps`` float16 ``[seeds, steps,
    rows, cols, columns]`` with their ``columns``, and ``affinity`` float16 ``[seeds, N, N]``, the
    self-attention in the second half of the steps.
    """
    if path.exists():
        return
    number, _, prompt = asked
    pipe = subject.pipe
    options: dict[str, Any] = {**subject.settings, "num_images_per_prompt": seeds}
    with sdattn.capture(pipe, kinds=("self",), layers=refining(pipe), steps=(0.5, 1.0)) as near:
        run = sdattn.generate(
            pipe,
            prompt,
            seed=[at * SERIES + number for at in range(seeds)],
            capture_options={"steps": "all"},
            **options,
        )
    steps = [step_heatmaps(one) for one in run]
    maps = torch.stack([torch.stack([step.maps for step in each]) for each in steps])
    affinity = torch.stack([layer.flatten(1, 2) for layer in near.maps.values()]).mean(0)
    tensors = {
        "images": torch.from_numpy(np.stack([np.asarray(image) for image in run.images])),
        "maps": maps.half().contiguous(),
        "columns": torch.tensor(steps[0][0].columns),
        "affinity": affinity.half().contiguous(),
    }
    save_file(tensors, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)


@dataclass(frozen=True)
class Drawn:
    """A prompt's images and their maps.

    Attributes:
        number: of its scene.
        nouns: things that were asked for.
        there: bool ``[seeds, nouns]``: the noun is in the image.
        right: bool ``[seeds]``: just these are, each once.
        images: one per seed.
        maps: float32 ``[seeds, steps, rows, cols, columns]``.
        affinity: float32 ``[seeds, N, N]``.
    """

    number: int
    scene: Any
    prompt: Any
    nouns: tuple[str, ...]
    there: Bools
    right: Bools
    images: Sequence[Image.Image]
    maps: Tensor
    columns: tuple[int, ...]
    affinity: Tensor

    def heatmaps(self, seed: int, first: float, last: float) -> Heatmaps:
        """Return the mean over the steps whose middle lies between two shares of the run."""
        steps = self.maps.shape[1]
        some = [i for i in range(steps) if first <= (i + 0.5) / steps <= last]
        return Heatmaps(self.prompt, self.maps[seed, some].mean(0), self.columns)

    def nouns_maps(self, seed: int, first: float, last: float) -> Tensor:
        """Return the nouns' maps, float32 ``[nouns, rows, cols]``."""
        heatmaps = self.heatmaps(seed, first, last)
        words = [word for word in self.scene.words(self.prompt.text) if word.kind == "noun"]
        return torch.stack([one.values for one in maps_of(words, heatmaps)])


def by_checker(see: Checker) -> Judge:
    """Return the judge that reads images with a checker."""

    def judge(asked: Asked, images: Sequence[Image.Image]) -> tuple[Bools, Bools]:
        scene = asked[1]
        seen = see([scene] * len(images), images)
        found = [{noun for noun, _ in one.things} for one in seen]
        there = [[thing.noun in nouns for thing in scene.objects] for nouns in found]
        return np.array(there), np.array([one.objects for one in seen])

    return judge


def by_eye(labels: Mapping[str, Sequence[str]]) -> Judge:
    """Return the judge that knows what somebody saw: by a prompt's number, for each image "" if it
    is as asked, or its missing nouns, and "more" if it has more than was asked for."""

    def judge(asked: Asked, images: Sequence[Image.Image]) -> tuple[Bools, Bools]:
        told = [label.split() for label in labels[str(asked[0])]]
        there = [[thing.noun not in one for thing in asked[1].objects] for one in told]
        return np.array(there), np.array([not one for one in told])

    return judge


def read(pipe: Any, asked: Asked, path: Path, judge: Judge) -> Drawn:
    """Return what :func:`draw` kept, and what is in its images."""
    number, scene, text = asked
    held = load_file(path)
    images = [Image.fromarray(one.numpy()) for one in held["images"]]
    there, right = judge(asked, images)
    [prompt] = read_prompts(pipe, text)
    return Drawn(
        number,
        scene,
        prompt,
        nouns=tuple(thing.noun for thing in scene.objects),
        there=there,
        right=right,
        images=images,
        maps=held["maps"].float(),
        columns=tuple(held["columns"].tolist()),
        affinity=held["affinity"].float(),
    )


# What a noun's map is judged by


def log_peak(maps: Tensor) -> Tensor:
    return maps.flatten(1).amax(1).log()


def log_top(maps: Tensor) -> Tensor:
    """Return the logarithm of the mean over the highest 1/32 of the cells: 8 of 16x16."""
    cells = maps.flatten(1)
    return cells.topk(math.ceil(cells.shape[1] / 32)).values.mean(1).log()


def one_place(maps: Tensor) -> Tensor:
    """Return minus the highest value away from each map's peak, as a share of the peak."""
    return torch.tensor([-rival_of(Heatmap("", one, ())) for one in maps])


def contrast(maps: Tensor) -> Tensor:
    return log_peak(maps) - maps.flatten(1).median(1).values.log()


def dominance(maps: Tensor) -> Tensor:
    """Return how far each map's peak is above the other nouns' maps there, as a logarithm; the
    contrast to its own median for a noun alone."""
    if len(maps) == 1:
        return contrast(maps)
    cells = maps.flatten(1)
    at_peaks = cells[:, cells.argmax(1)]  # [nouns, peaks]
    others = at_peaks.masked_fill(torch.eye(len(maps), dtype=torch.bool), 0).amax(0)
    return (at_peaks.diagonal() / others).log()


def area(maps: Tensor) -> Tensor:
    """Return the share of cells where a map is the highest of all and above half of the highest
    peak."""
    cells = maps.flatten(1)
    highest = cells.argmax(0) == torch.arange(len(cells))[:, None]
    return (highest & (cells > cells.max() / 2)).float().mean(1)


def order(maps: Tensor) -> Tensor:
    """Return minus the entropy of each map, in nats."""
    shares = maps.flatten(1) / maps.flatten(1).sum(1, keepdim=True)
    return torch.special.xlogy(shares, shares).sum(1)


MEASURES: dict[str, Callable[[Tensor], Tensor]] = {
    "peak": log_peak,
    "one place": one_place,
    "peak and one place": lambda maps: log_peak(maps) + one_place(maps),
    "top cells": log_top,
    "contrast": contrast,
    "dominance": dominance,
    "area": area,
    "order": order,
}


def measured(drawn: Drawn, seed: int, first: float, last: float) -> dict[str, Floats]:
    """Return each measure of the nouns' maps over a part of the run, ``[nouns]``; and ``"refined
    peak"``, of maps spread along the self-attention, and ``"order by step"``, the mean of the
    steps'."""
    maps = drawn.nouns_maps(seed, first, last)
    found = {name: measure(maps) for name, measure in MEASURES.items()}
    spread = (maps.flatten(1) @ drawn.affinity[seed].mT).reshape(maps.shape)
    found["refined peak"] = log_peak(spread)
    steps = drawn.maps.shape[1]
    middles = [(i + 0.5) / steps for i in range(steps)]
    some = [drawn.nouns_maps(seed, at, at) for at in middles if first <= at <= last]
    found["order by step"] = torch.stack([order(one) for one in some]).mean(0)
    return {name: values.double().numpy() for name, values in found.items()}
