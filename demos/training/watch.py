"""Images and figures while the demo model trains."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from diffusers import DiffusionPipeline, StableDiffusionPipeline
from PIL import Image
from torch import Tensor

import sdattn

from ..evaluation.measures import lands_on_own
from ..evaluation.records import at_side
from ..evaluation.seeing import seen_in
from ..scenes.shapes import random_scene
from .fit import note, rank, world
from .losses import Caption, diffusion_loss, text_states


@torch.no_grad()
def report_use_of_text(
    pipe: StableDiffusionPipeline,
    scenes: list[Any],
    latents: Tensor,
    stage: str,
    step: int,
    work: Path,
    count: int = 64,
) -> None:
    """Note the loss at t = 850 with each scene's own prompt and with another's."""
    rng = np.random.default_rng(0)
    said = [Caption(scene.caption(rng), 0, ()) for scene in scenes[:count]]
    states = text_states(pipe.text_encoder, pipe.tokenizer, said)
    known = latents[:count].to(states.device)
    t = torch.full((count,), 850, device=states.device)
    losses = []
    for shift in (0, 1):
        torch.manual_seed(0)
        wrong = states.roll(shift, 0)
        losses.append(diffusion_loss(pipe.unet, pipe.scheduler, known, wrong, t).item())
    note(work, stage, step, own_prompt=losses[0], others_prompt=losses[1])


def report_images(
    pipe: DiffusionPipeline,
    stage: str,
    step: int,
    work: Path,
    options: Mapping[str, Any],
    count: int = 32,
) -> None:
    """Draw unseen prompts in each process with these options, note how many are right and how many
    words are on their own objects, keep a sheet of them."""
    rng = np.random.default_rng((99, rank()))
    scenes = [random_scene(rng, held_out=True, n_objects=2) for _ in range(count)]
    prompts = [scene.caption(rng) for scene in scenes]
    run = sdattn.generate(pipe, prompts, seed=count * rank(), **options)
    counts = torch.zeros(5, 2)  # right, of how many
    for scene, prompt, image, maps in zip(scenes, prompts, run.images, run.heatmaps, strict=True):
        seen, words = seen_in(scene, image), scene.words(prompt)
        flags: list[list[Any]] = [[*seen.colours], [seen.objects], [seen.relation]]
        for kind in ("colour", "noun"):
            ours = [word for word in words if word.kind == kind]
            own = (
                []
                if seen.masks is None
                else lands_on_own(at_side(ours, maps), seen.masks, seen.masks[::-1]).tolist()
            )
            flags.append(own)
        known = [[flag for flag in some if flag is not None] for some in flags]
        counts += torch.tensor([[sum(some), len(some)] for some in known])
    if world() > 1:
        dist.all_reduce(counts)
    names = ("colours", "shapes", "relation", "colour_words", "shape_words")
    parts = (counts[:, 0] / counts[:, 1].clamp(min=1)).tolist()
    note(work, stage, step, **dict(zip(names, parts, strict=True)))
    if rank() == 0:
        tiles = [np.asarray(image) for image in run.images]
        rows = [np.hstack(tiles[start : start + 8]) for start in range(0, count, 8)]
        Image.fromarray(np.vstack(rows)).save(work / f"{stage}-{step:06}.png")
