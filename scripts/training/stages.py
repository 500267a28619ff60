"""Stages 3 to 5: the text encoder, diffusion, and both together."""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from diffusers import StableDiffusionPipeline
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import CLIPTextModel, CLIPTokenizer

from sdattn.scenes import Scene

from .fit import Fit, pick, say
from .losses import (
    LAST_READINGS,
    READINGS,
    captions,
    diffusion_loss,
    middle_times,
    noisy_times,
    text_states,
)
from .models import LatentReader, PlaceProbe, assemble, new_text_encoder
from .watch import report_pictures, report_use_of_text


def train_text(
    tokenizer: CLIPTokenizer,
    scenes: list[Scene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
) -> CLIPTextModel:
    """A text encoder from whose states the latent's mean can be read."""
    text, reader = new_text_encoder(tokenizer), LatentReader()

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, len(scenes), batch=64)
        said = captions(rng, scenes, chosen)
        states = text_states(text, tokenizer, *said)
        return F.mse_loss(reader(states), F.avg_pool2d(latents[chosen], 2))

    modules = {"text": text, "reader": reader}
    Fit("text", modules, (1e-3, 1e-3), loss, steps, 0.3, {}, lambda step: None).run(work)
    return text


def train_unet(
    pipe: StableDiffusionPipeline,
    scenes: list[Scene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
) -> None:
    """Train the pipeline's UNet; pictures on the way are of the running mean of its weights.

    As with Stable Diffusion, the text encoder stays as it is: while the UNet cannot yet use what
    it knows of left and right, learning on would make it forget that.
    """
    mean: dict[str, nn.Module] = {"unet": copy.deepcopy(pipe.unet)}
    averaged = assemble(pipe.vae, pipe.text_encoder, pipe.tokenizer, mean["unet"])
    probe = PlaceProbe(pipe.unet)

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, len(scenes), batch=32)
        prompts, mistaken, reading = captions(rng, scenes, chosen)
        with torch.no_grad():
            states = text_states(pipe.text_encoder, pipe.tokenizer, prompts, mistaken, reading)
        t = noisy_times(rng, len(prompts))
        error = diffusion_loss(pipe.unet, pipe.scheduler, latents[chosen], states, t, hush=True)
        misplaced = probe()
        if step % 100 == 99:
            say(f"     places {misplaced.item():.3f}")
        return error + 0.5 * misplaced

    def watch(step: int) -> None:
        report_use_of_text(averaged, scenes, latents)
        if step % 1000 == 0 or step == steps:
            report_pictures(averaged, step, work)

    modules = {"unet": pipe.unet, "probe": probe}
    Fit("unet", modules, (1e-3, 1e-3), loss, steps, 0.78, mean, watch).run(work)
    probe.leave()


def refine(
    pipe: StableDiffusionPipeline,
    scenes: list[Scene],
    latents: Tensor,
    work: Path,
    steps: int,
    seed: int,
) -> StableDiffusionPipeline:
    """Train UNet and text encoder together; returns a pipeline with their running means."""
    modules = {"unet": pipe.unet, "text": pipe.text_encoder}
    mean = copy.deepcopy(modules)
    averaged = assemble(pipe.vae, mean["text"], pipe.tokenizer, mean["unet"])

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, len(scenes), batch=32)
        readings = READINGS if step < 0.8 * steps else LAST_READINGS
        prompts, mistaken, reading = captions(rng, scenes, chosen, readings)
        states = text_states(pipe.text_encoder, pipe.tokenizer, prompts, mistaken, reading)
        t = middle_times(rng, len(prompts))
        return diffusion_loss(pipe.unet, pipe.scheduler, latents[chosen], states, t)

    def watch(step: int) -> None:
        report_use_of_text(averaged, scenes, latents)
        report_pictures(averaged, step, work)

    fit = Fit("refine", modules, (8e-4, 5e-4), loss, steps, 0.3, mean, watch, memory=0.998)
    fit.run(work)
    return averaged
