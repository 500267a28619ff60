"""Stages 3 to 5: the text encoder, diffusion, and both together.

A ``Recipe`` says what differs between the demo of shapes and the one of sprites."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, UNet2DConditionModel
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

from .fit import FLAT, Fit, note, pick
from .losses import (
    LAST_READINGS,
    READINGS,
    Mistake,
    captions,
    diffusion_loss,
    middle_times,
    noisy_times,
    text_states,
)
from .models import SETTINGS, LatentReader, PlaceProbe, assemble, new_text_encoder, new_unet
from .watch import report_images, report_use_of_text

report_shapes = partial(report_images, options=SETTINGS)


@dataclass(frozen=True)
class Recipe:
    """What a demo model is made of, where demos differ.

    Attributes:
        unet: makes the UNet.
        mistakes: make mistaken scenes, about all objects or about the first; None for shapes'.
        report: draws unseen prompts with a pipeline, and notes what it can tell of the images.
        channels: of a latent.
        compiled: compile the UNet, which halves a step and takes a minute to begin.
        context: entered around each pass of a model that learns, for example autocast.
    """

    unet: Callable[[], UNet2DConditionModel] = new_unet
    mistakes: tuple[Mistake, Mistake] | None = None
    report: Callable[[StableDiffusionPipeline, str, int, Path], None] = report_shapes
    channels: int = 4
    compiled: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext


SHAPES = Recipe()


def train_text(
    tokenizer: CLIPTokenizer,
    scenes: list[Any],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
    recipe: Recipe = SHAPES,
) -> CLIPTextModel:
    """A text encoder from whose states the latent's mean can be read."""
    torch.manual_seed(seed)  # whatever was done before in this sitting
    text, reader = new_text_encoder(tokenizer), LatentReader(channels=recipe.channels)

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, torch.arange(len(scenes)), batch=64)
        said = captions(rng, scenes, chosen, mistakes=recipe.mistakes)
        with recipe.context():
            foretold = reader(text_states(text, tokenizer, said))
        return F.mse_loss(foretold.float(), F.avg_pool2d(latents[chosen], 2))

    modules = {"text": text, "reader": reader}
    Fit("text", modules, (1e-3, 1e-3), loss, steps, FLAT["text"], {}, lambda step: None).run(work)
    return text


def train_unet(
    vae: AutoencoderKL,
    text: CLIPTextModel,
    tokenizer: CLIPTokenizer,
    scenes: list[Any],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
    recipe: Recipe = SHAPES,
) -> StableDiffusionPipeline:
    """A pipeline with a UNet that knows its places; images on the way are of the running mean
    of its weights.

    As with Stable Diffusion, the text encoder stays as it is: while the UNet cannot yet use what
    it knows of left and right, learning on would make it forget that.
    """
    torch.manual_seed(seed)
    pipe = assemble(vae, text, tokenizer, recipe.unet())
    mean: dict[str, nn.Module] = {"unet": copy.deepcopy(pipe.unet)}
    averaged = assemble(pipe.vae, pipe.text_encoder, pipe.tokenizer, mean["unet"])
    probe, shown = PlaceProbe(pipe.unet), often(scenes)
    if recipe.compiled:
        pipe.unet.compile()

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, shown, batch=32)
        said = captions(rng, scenes, chosen, mistakes=recipe.mistakes)
        t = noisy_times(rng, len(said))
        with recipe.context():
            with torch.no_grad():
                states = text_states(pipe.text_encoder, pipe.tokenizer, said)
            error = diffusion_loss(pipe.unet, pipe.scheduler, latents[chosen], states, t, hush=True)
        misplaced = probe()
        if step % 100 == 99:
            note(work, "unet", step + 1, places=misplaced.item())
        return error + 0.5 * misplaced

    def watch(step: int) -> None:
        report_use_of_text(averaged, scenes, latents, "unet", step, work)
        if step % 1000 == 0 or step == steps:
            recipe.report(averaged, "unet", step, work)

    modules = {"unet": pipe.unet, "probe": probe}
    Fit("unet", modules, (1e-3, 1e-3), loss, steps, FLAT["unet"], mean, watch).run(work)
    probe.leave()
    return pipe


def often(scenes: list[Any]) -> Tensor:
    """Numbers of the scenes; twice of those of "and", which leaves open what goes where."""
    counts = [1 + (scene.relation == "and") for scene in scenes]
    return torch.arange(len(scenes)).repeat_interleave(torch.tensor(counts))


def refine(
    pipe: StableDiffusionPipeline,
    scenes: list[Any],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
    again: bool = False,
    recipe: Recipe = SHAPES,
) -> StableDiffusionPipeline:
    """Train UNet and text encoder together; returns a pipeline with their running means.

    ``again``: the words have found their objects in an earlier run, so prompts are mostly read as
    they are from the first step, and at half the rates.
    """
    shown = often(scenes)
    modules = {"unet": pipe.unet, "text": pipe.text_encoder}
    mean = copy.deepcopy(modules)
    averaged = assemble(pipe.vae, mean["text"], pipe.tokenizer, mean["unet"])
    first = 0 if again else 0.4 * steps

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, shown, batch=32)
        readings = READINGS if step < first else LAST_READINGS
        said = captions(rng, scenes, chosen, readings, recipe.mistakes)
        t = middle_times(rng, len(said))
        with recipe.context():
            states = text_states(pipe.text_encoder, pipe.tokenizer, said)
            return diffusion_loss(pipe.unet, pipe.scheduler, latents[chosen], states, t)

    def watch(step: int) -> None:
        report_use_of_text(averaged, scenes, latents, "refine", step, work)
        recipe.report(averaged, "refine", step, work)

    rates, flat = (4e-4, 2.5e-4) if again else (8e-4, 5e-4), FLAT["refine"]
    Fit("refine", modules, rates, loss, steps, flat, mean, watch, memory=0.998).run(work)
    return averaged
