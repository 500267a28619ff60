"""Several images of each unseen prompt, with their words' maps at every step, kept in files.

    prompts_of(subject, args)       the prompts: as scenes come, and more with three things
    draw(subject, asked, path, n)   draw a prompt from n seeds and keep what was seen
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

import sdattn
from sdattn.maps.aggregation import refining
from sdattn.runs.imagerun import step_heatmaps

from .images import Asked, unseen_scenes
from .seeing import Subject

SERIES = 100_000  # from a seed of a prompt to its next


def prompts_of(subject: Subject, mixed: int, three: int, seed: int) -> list[Asked]:
    """Return unseen scenes as they come, then some of three things, each with one of its
    prompts."""
    rng = np.random.default_rng(seed + 1)
    found = unseen_scenes(subject.make, mixed, seed)
    for number in range(mixed, mixed + three):
        scene = subject.make(rng, held_out=True, n_objects=3)
        found.append((number, scene, scene.caption(rng)))
    return found


def draw(subject: Subject, asked: Asked, path: Path, seeds: int) -> None:
    """Draw a prompt from several seeds and keep the images, the maps of each step and the
    self-attention of the second half; do nothing if the file is there.

    The file has ``images`` uint8 ``[seeds, height, width, 3]``, ``maps`` float16 ``[seeds, steps,
    rows, cols, columns]`` with their ``columns``, and ``affinity`` float16 ``[seeds, N, N]``.
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
    tensors: dict[str, Tensor] = {
        "images": torch.from_numpy(np.stack([np.asarray(image) for image in run.images])),
        "maps": maps.half().contiguous(),
        "columns": torch.tensor(steps[0][0].columns),
        "affinity": affinity.half().contiguous(),
    }
    save_file(tensors, path.with_suffix(".new"))
    os.replace(path.with_suffix(".new"), path)
