"""Stage 2: pictures to latents and back."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from diffusers import AutoencoderKL
from scenes import random_scene
from torch import Tensor
from torch.nn import functional as F

from .data import SIZE
from .fit import Fit, note, pick, rank, world
from .models import new_vae

CROPPED = 0.8  # part of the steps that see crops
LIKENESS = 0.1  # how much the latents are held to those of a given autoencoder


def as_pixels(pictures: Tensor) -> Tensor:
    """uint8 in [0, 255] to float32 in [-1, 1], channels last in memory, which is faster."""
    return (pictures.float() / 127.5 - 1).contiguous(memory_format=torch.channels_last)


def window(rng: np.random.Generator, pictures: Tensor, side: int) -> Tensor:
    """One and the same ``side`` x ``side`` pixels, somewhere, of all pictures."""
    top, left = rng.integers(pictures.shape[-1] - side, size=2, endpoint=True)
    return pictures[..., top : top + side, left : left + side]


def train_vae(
    pictures: Tensor, work: Path, steps: int, seed: int, like: AutoencoderKL | None = None
) -> AutoencoderKL:
    """An autoencoder of the pictures, its latents as they come, or those of ``like``.

    Most steps see a quarter of each picture, in a quarter of the time; the last see whole ones,
    since the norms' means are others there. The latents of ``like`` are those of whole pictures,
    so with it all steps see these, half as many of them.
    """
    torch.manual_seed(seed)
    vae = new_vae()
    cropped, batch = (CROPPED, 8) if like is None else (0.0, 4)

    def loss(step: int) -> Tensor:
        rng, chosen = pick(step, seed, torch.arange(len(pictures)), batch=batch)
        side = SIZE // 2 if step < cropped * steps else SIZE
        pixels = as_pixels(window(rng, pictures[chosen], side))
        posterior = vae.encode(pixels).latent_dist
        error = vae.decode(posterior.sample()).sample - pixels
        seen = error.abs().mean() + 2 * error.square().mean() + 1e-7 * posterior.kl().mean()
        if like is None:
            return seen
        off = posterior.mean - small_latents(like, pixels)
        return seen + LIKENESS * off.square().mean()

    def watch(step: int) -> None:
        note(work, "vae", step, decibels=vae_psnr(vae, seed=7, count=64))

    Fit("vae", {"vae": vae}, (2e-3,), loss, steps, 0.05, {}, watch).run(work)
    return vae.eval()


@torch.no_grad()
def small_latents(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """The latents that an autoencoder of smaller pictures has of these, with its scaling factor;
    as many cells as the new one has."""
    small = F.avg_pool2d(pixels, SIZE // vae.config.sample_size)
    return vae.config.scaling_factor * vae.encode(small).latent_dist.mode()


@torch.no_grad()
def vae_psnr(vae: AutoencoderKL, seed: int, count: int = 256) -> float:
    """Mean decibels over scenes that the autoencoder never saw, at the size it is made for."""
    rng, side = np.random.default_rng(seed), vae.config.sample_size
    drawn = np.stack([random_scene(rng, held_out=True).draw(side) for _ in range(count)])
    pixels = as_pixels(torch.from_numpy(drawn).permute(0, 3, 1, 2))
    parts = [vae.decode(vae.encode(part).latent_dist.mode()).sample for part in pixels.split(8)]
    again = torch.cat(parts).clamp(-1, 1)
    return float(-10 * torch.log10(((again - pixels) / 2).square().mean(dim=(1, 2, 3))).mean())


@torch.no_grad()
def make_latents(vae: AutoencoderKL, pictures: Tensor, work: Path) -> Tensor:
    """Latents [scenes, 4, 16, 16] of the pictures."""
    kept = [work / f"latents-{index}-of-{world()}.pt" for index in range(world())]
    if not kept[rank()].exists():
        mine = pictures.chunk(world())[rank()].split(8)
        parts = [vae.encode(as_pixels(part)).latent_dist.mode() for part in mine]
        torch.save(torch.cat(parts), f"{kept[rank()]}.new")
        os.replace(f"{kept[rank()]}.new", kept[rank()])
    if world() > 1:
        dist.barrier()
    return torch.cat([torch.load(path) for path in kept])


@torch.no_grad()
def even_out(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Give each channel of the latents [scenes, channels, rows, cols] the mean 0 and the deviation
    1, by way of the 1x1 convolutions in which the encoder ends and the decoder begins.

    The autoencoder is the same as before from picture to picture, and its scaling factor is 1. With
    one factor for channels of 0.5 and 6, the small ones would drown in the noise of all times.
    """
    mean, deviation = latents.mean((0, 2, 3)), latents.std((0, 2, 3))
    count, ends, begins = len(mean), vae.quant_conv, vae.post_quant_conv
    ends.weight[:count] /= deviation[:, None, None, None]
    ends.bias[:count] = (ends.bias[:count] - mean) / deviation
    ends.bias[count:] -= 2 * deviation.log()  # log variances
    begins.bias += begins.weight[:, :, 0, 0] @ mean
    begins.weight *= deviation[:, None, None]
    vae.register_to_config(scaling_factor=1.0)
    return (latents - mean[:, None, None]) / deviation[:, None, None]


def polish_decoder(
    vae: AutoencoderKL, latents: Tensor, pictures: Tensor, work: Path, steps: int, seed: int
) -> None:
    """Train the decoder alone on the latents as they now stand; it is the cheaper half."""

    def loss(step: int) -> Tensor:
        _, chosen = pick(step, seed, torch.arange(len(pictures)), batch=8)
        error = vae.decode(latents[chosen]).sample
        error = error - as_pixels(pictures[chosen])
        return error.abs().mean() + 2 * error.square().mean()

    def watch(step: int) -> None:
        note(work, "decoder", step, decibels=vae_psnr(vae, seed=7, count=64))

    modules = {"decoder": vae.decoder, "post_quant_conv": vae.post_quant_conv}
    Fit("decoder", modules, (1e-3, 1e-3), loss, steps, 0.05, {}, watch).run(work)
    if rank() == 0:
        vae.save_pretrained(work / "vae")
