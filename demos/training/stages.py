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

from .fit import CPU, FLAT, Fit, note, pick
from .losses import (
    LAST_READINGS,
    READINGS,
    Caption,
    Mistake,
    captions,
    diffusion_loss,
    ids_and_places,
    middle_times,
    noisy_times,
    states_at,
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
        batch: scenes a step; text encoders see twice as many, decoders half.
        device: where it learns.
        compiled: compile the UNet on a CPU, which halves a step and takes a minute to begin.
        context: entered around each pass of a model that learns, for example autocast.
    """

    unet: Callable[[], UNet2DConditionModel] = new_unet
    mistakes: tuple[Mistake, Mistake] | None = None
    report: Callable[[StableDiffusionPipeline, str, int, Path], None] = report_shapes
    channels: int = 4
    batch: int = 32
    device: torch.device = CPU
    compiled: bool = False
    context: Callable[[], AbstractContextManager[object]] = nullcontext

    @property
    def on_gpu(self) -> bool:
        """Tell if it learns on a GPU."""
        return self.device.type == "cuda"

    def read(self, tokenizer: CLIPTokenizer, said: list[Caption]) -> tuple[Tensor, Tensor]:
        """Return ``ids_and_places`` of captions; on a GPU always as many texts."""
        return ids_and_places(tokenizer, said, 1 + 3 * len(said) if self.on_gpu else 0)


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
    text = new_text_encoder(tokenizer).to(recipe.device)
    reader = LatentReader(channels=recipe.channels).to(recipe.device)
    known = latents.to(recipe.device)

    def sample(step: int) -> tuple[Tensor, ...]:
        rng, chosen = pick(step, seed, torch.arange(len(scenes)), batch=2 * recipe.batch)
        said = captions(rng, scenes, chosen, mistakes=recipe.mistakes)
        return (chosen, *recipe.read(tokenizer, said))

    def loss(chosen: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        with recipe.context():
            foretold = reader(states_at(text, ids, places))
        return F.mse_loss(foretold.float(), F.avg_pool2d(known[chosen], 2))

    Fit(
        "text",
        {"text": text, "reader": reader},
        (1e-3, 1e-3),
        loss,
        steps,
        FLAT["text"],
        {},
        lambda step: None,
        sample=sample,
        device=recipe.device,
    ).run(work)
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
    pipe = assemble(vae, text, tokenizer, recipe.unet()).to(recipe.device)
    mean: dict[str, nn.Module] = {"unet": copy.deepcopy(pipe.unet)}
    averaged = assemble(pipe.vae, pipe.text_encoder, pipe.tokenizer, mean["unet"])
    probe, shown, known = PlaceProbe(pipe.unet), often(scenes), latents.to(recipe.device)
    misplaced = torch.zeros((), device=recipe.device)  # in the last step
    probe.to(recipe.device)
    if recipe.compiled and not recipe.on_gpu:
        pipe.unet.compile()

    def sample(step: int) -> tuple[Tensor, ...]:
        rng, chosen = pick(step, seed, shown, batch=recipe.batch)
        said = captions(rng, scenes, chosen, mistakes=recipe.mistakes)
        return (chosen, noisy_times(rng, len(said)), *recipe.read(tokenizer, said))

    def loss(chosen: Tensor, t: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        with recipe.context():
            with torch.no_grad():
                states = states_at(pipe.text_encoder, ids, places)
            error = diffusion_loss(pipe.unet, pipe.scheduler, known[chosen], states, t, hush=True)
        off = probe()
        misplaced.copy_(off.detach())
        return error + 0.5 * off

    def watch(step: int) -> None:
        note(work, "unet", step, places=misplaced.item())
        report_use_of_text(averaged, scenes, latents, "unet", step, work)
        recipe.report(averaged, "unet", step, work)

    Fit(
        "unet",
        {"unet": pipe.unet, "probe": probe},
        (1e-3, 1e-3),
        loss,
        steps,
        FLAT["unet"],
        mean,
        watch,
        sample=sample,
        device=recipe.device,
    ).run(work)
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
    rates: tuple[float, float] = (8e-4, 5e-4),
) -> StableDiffusionPipeline:
    """Train UNet and text encoder together; returns a pipeline with their running means.

    ``again``: the words have found their objects in an earlier run, so prompts are mostly read as
    they are from the first step.
    """
    shown, known = often(scenes), latents.to(recipe.device)
    modules = {"unet": pipe.unet, "text": pipe.text_encoder}
    mean = copy.deepcopy(modules)
    averaged = assemble(pipe.vae, mean["text"], pipe.tokenizer, mean["unet"])
    first = 0 if again else 0.4 * steps

    def sample(step: int) -> tuple[Tensor, ...]:
        rng, chosen = pick(step, seed, shown, batch=recipe.batch)
        readings = READINGS if step < first else LAST_READINGS
        said = captions(rng, scenes, chosen, readings, recipe.mistakes)
        return (chosen, middle_times(rng, len(said)), *recipe.read(pipe.tokenizer, said))

    def loss(chosen: Tensor, t: Tensor, ids: Tensor, places: Tensor) -> Tensor:
        with recipe.context():
            states = states_at(pipe.text_encoder, ids, places)
            return diffusion_loss(pipe.unet, pipe.scheduler, known[chosen], states, t)

    def watch(step: int) -> None:
        report_use_of_text(averaged, scenes, latents, "refine", step, work)
        recipe.report(averaged, "refine", step, work)

    Fit(
        "refine",
        modules,
        rates,
        loss,
        steps,
        FLAT["refine"],
        mean,
        watch,
        memory=0.998,
        sample=sample,
        device=recipe.device,
    ).run(work)
    return averaged
