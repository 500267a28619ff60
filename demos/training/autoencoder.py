"""Stage 2: images to latents and back."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from torch import Tensor
from torch.nn import functional as F

from ..scenes import emoji, shapes
from .data import SIZE, SceneMaker
from .fit import Fit, note, pick, rank, world
from .models import NARROW, new_vae

CROPPED = 0.8  # part of the steps that see crops
UNSEEN_SHAPES = partial(shapes.random_scene, held_out=True)
UNSEEN_SPRITES = partial(emoji.random_scene, held_out=True)


def as_pixels(images: Tensor) -> Tensor:
    """uint8 in [0, 255] to float32 in [-1, 1]; on a CPU channels last in memory: faster there."""
    pixels = images.float() / 127.5 - 1
    return pixels.contiguous(memory_format=torch.channels_last) if pixels.is_cpu else pixels


def window(rng: np.random.Generator, images: Tensor, side: int) -> Tensor:
    """One and the same ``side`` x ``side`` pixels, somewhere, of all images."""
    top, left = rng.integers(images.shape[-1] - side, size=2, endpoint=True)
    return images[..., top : top + side, left : left + side]


def train_vae(images: Tensor, work: Path, steps: int, seed: int) -> AutoencoderKL:
    """An autoencoder of the images, its latents as they come.

    Most steps see a quarter of each image, in a quarter of the time; the last see whole ones,
    since the norms' means are others there.
    """
    torch.manual_seed(seed)
    vae = new_vae()

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, torch.arange(len(images)), batch=8)
        side = SIZE // 2 if step < CROPPED * steps else SIZE
        pixels = as_pixels(window(rng, images[chosen], side))
        posterior = vae.encode(pixels).latent_dist
        again = vae.decode(posterior.sample()).sample
        return unlike(again, pixels) + 1e-7 * posterior.kl().mean()

    return fit_vae(vae, loss, work, steps)


def train_vae_of(
    latents: Tensor, images: Tensor, work: Path, steps: int, seed: int
) -> AutoencoderKL:
    """An autoencoder whose latents are given: its encoder learns to make them of the images, and
    its decoder to draw the images from them."""
    torch.manual_seed(seed)
    vae = new_vae()

    def loss(step: int) -> Tensor:
        _, chosen = pick(step, seed, torch.arange(len(images)), batch=4)
        pixels, given = as_pixels(images[chosen]), latents[chosen]
        posterior = vae.encode(pixels).latent_dist
        noisy = given + math.exp(NARROW / 2) * torch.randn_like(given)
        wide = (posterior.logvar - NARROW).square().mean()
        off = (posterior.mean - given).square().mean()
        return unlike(vae.decode(noisy).sample, pixels) + off + 0.01 * wide

    return fit_vae(vae, loss, work, steps)


def unlike(drawn: Tensor, pixels: Tensor) -> Tensor:
    """How far drawn images are from given ones."""
    error = drawn - pixels
    return error.abs().mean() + 2 * error.square().mean()


def fit_vae(
    vae: AutoencoderKL, loss: Callable[[int], Tensor], work: Path, steps: int
) -> AutoencoderKL:
    """Train it on a loss; the figures on the way are of images that it never sees."""

    def watch(step: int) -> None:
        note(work, "vae", step, decibels=vae_psnr(vae, seed=7, count=64))

    Fit("vae", {"vae": vae}, (2e-3,), loss, steps, 0.05, {}, watch).run(work)
    return vae.eval()


@torch.no_grad()
def vae_psnr(
    vae: AutoencoderKL, seed: int, count: int = 256, make: SceneMaker = UNSEEN_SHAPES
) -> float:
    """Return the mean decibels over scenes that the autoencoder never saw, at the size it is made
    for."""
    rng, side = np.random.default_rng(seed), vae.config.sample_size
    drawn = np.stack([make(rng).draw(side) for _ in range(count)])
    pixels = as_pixels(torch.from_numpy(drawn).permute(0, 3, 1, 2).to(vae.device))
    parts = [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in pixels.split(8)]
    again = torch.cat(parts).clamp(-1, 1)
    return float(-10 * torch.log10(((again - pixels) / 2).square().mean(dim=(1, 2, 3))).mean())


@torch.no_grad()
def make_latents(vae: AutoencoderKL, images: Tensor, work: Path) -> Tensor:
    """Latents [scenes, 4, 16, 16] of the images, or of smaller ones where it is made for these,
    with its scaling factor."""
    smaller, factor = SIZE // vae.config.sample_size, vae.config.scaling_factor
    kept = [work / f"latents-{index}-of-{world()}.pt" for index in range(world())]
    if not kept[rank()].exists():
        mine = images.chunk(world())[rank()].split(8 if vae.device.type == "cpu" else 128)
        small = (F.avg_pool2d(as_pixels(part.to(vae.device)), smaller) for part in mine)
        parts = [vae.encode(part).latent_dist.mode().cpu() for part in small]
        torch.save(factor * torch.cat(parts), f"{kept[rank()]}.new")
        os.replace(f"{kept[rank()]}.new", kept[rank()])
    if world() > 1:
        dist.barrier()
    return torch.cat([torch.load(path) for path in kept])


@torch.no_grad()
def even_out(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Give each channel of the latents [scenes, channels, rows, cols] the mean 0 and the deviation
    1, by way of the 1x1 convolutions in which the encoder ends and the decoder begins.

    The autoencoder is the same as before from image to image. With
    one factor for channels of 0.5 and 6, the small ones would drown in the noise of all times.
    """
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    count, ends, begins = len(mean), vae.quant_conv, vae.post_quant_conv
    ends.weight[:count] /= deviation[:, None, None, None]
    ends.bias[:count] = (ends.bias[:count] - mean) / deviation
    ends.bias[count:] -= 2 * deviation.log()  # log variances
    begins.bias += begins.weight[:, :, 0, 0] @ mean
    begins.weight *= deviation[:, None, None]
    return (latents - mean[:, None, None]) / deviation[:, None, None]


def polish_decoder(
    vae: AutoencoderKL, latents: Tensor, images: Tensor, work: Path, steps: int, seed: int
) -> None:
    """Train the decoder alone on the latents as they now stand; it is the cheaper half."""

    def loss(step: int) -> Tensor:
        _, chosen = pick(step, seed, torch.arange(len(images)), batch=8)
        return unlike(vae.decode(latents[chosen]).sample, as_pixels(images[chosen]))

    def watch(step: int) -> None:
        note(work, "decoder", step, decibels=vae_psnr(vae, seed=7, count=64))

    modules = {"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv}
    Fit("decoder", modules, (1e-3, 1e-3), loss, steps, 0.05, {}, watch).run(work)
