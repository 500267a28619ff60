"""Several images of each unseen prompt, with their words' maps at every step, kept in files.

    prompts_of(make, mixed, three, seed)  prompts as scenes come, then some of three things
    draw(subject, asked, path, seeds)     draw a prompt from several seeds, into a file
    read(subject, asked, path)            Drawn: what the checker sees, and the nouns' maps
    MEASURES                              what a map is judged by, higher for a word that is there
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
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
from sdattn import Heatmaps
from sdattn.maps.aggregation import refining
from sdattn.models.reading import read_prompts
from sdattn.runs.imagerun import step_heatmaps

from .images import Asked, unseen_scenes
from .seeing import Subject, maps_of

SERIES = 100_000  # from one seed of a prompt to its next
Floats = NDArray[np.float64]


def prompts_of(make: Callable[..., Any], mixed: int, three: int, seed: int) -> list[Asked]:
    """Return unseen scenes as they come, then some of three things, each with one of its
    prompts."""
    found = unseen_scenes(make, mixed, seed)
    rng = np.random.default_rng(seed + 1)
    for number in range(mixed, mixed + three):
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
        there: bool ``[seeds, nouns]``: the checker finds the noun in the image.
        right: bool ``[seeds]``: it finds just these, each once.
        maps: float32 ``[seeds, steps, rows, cols, columns]``.
        affinity: float32 ``[seeds, N, N]``.
    """

    number: int
    scene: Any
    prompt: Any
    nouns: tuple[str, ...]
    there: NDArray[np.bool_]
    right: NDArray[np.bool_]
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


def read(subject: Subject, asked: Asked, path: Path) -> Drawn:
    """Return what :func:`draw` kept, as the checker sees it."""
    number, scene, text = asked
    held = load_file(path)
    images = [Image.fromarray(one.numpy()) for one in held["images"]]
    seen = subject.see([scene] * len(images), images)
    nouns = tuple(thing.noun for thing in scene.objects)
    found = [{noun for noun, _ in one.things} for one in seen]
    [prompt] = read_prompts(subject.pipe, text)
    return Drawn(
        number,
        scene,
        prompt,
        nouns,
        there=np.array([[noun in there for noun in nouns] for there in found]),
        right=np.array([one.objects for one in seen]),
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
