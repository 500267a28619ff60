"""An autoencoder whose encoder is known from the first: the main components of 8x8 patches.

Trained from random weights, a small autoencoder of drawings needs an hour to become as good as the
sixteen main components (Pearson 1901) of each patch, and the latents that a UNet learns from move
all the while. So the encoder's weights are written down:

- each of three strided convolutions sorts 2x2 cells into channels, the last one weighs them;
- residual blocks add nothing;
- the last norm sees constants beside the components, so large that its deviation is theirs;
- its SiLU is undone by a second copy of each component, negated: silu(x) - silu(-x) = x.

It is diffusers' ``AutoencoderKL`` like any other; the decoder is trained.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from diffusers import AutoencoderKL
from torch import Tensor, nn
from torch.nn import functional as F

from .autoencoder import as_pixels
from .models import FACTOR, NARROW

CHANNELS = 16  # of a latent
BLOCKS = (16, 48, 96, 96)
GROUPS = 8
LOUD = 64.0  # the constants that outweigh the components in a norm
EVEN = 0.5  # how far the components' deviations are evened out: 0 not at all, 1 altogether


@dataclass(frozen=True)
class Patches:
    """Linear latents of 8x8 patches.

    Attributes:
        mean: of a patch, [192], by colour, row, column.
        weight: [CHANNELS, 192]; a latent is ``weight @ (patch - mean)``.
    """

    mean: Tensor
    weight: Tensor

    def encode(self, images: Tensor) -> Tensor:
        """Return latents [batch, CHANNELS, rows, cols] of images, uint8 [batch, 3, H, W]."""
        kernel = self.weight.unflatten(1, (3, FACTOR, FACTOR))
        return F.conv2d(as_pixels(images), kernel, -self.weight @ self.mean, stride=FACTOR)


def fit_patches(images: Tensor) -> Patches:
    """Return the main components of all patches of the images, uint8 [count, 3, H, W].

    Deviations are evened out half way, then scaled together to a mean square of 1: in full, noise
    would weigh as much as colour; not at all, edges would drown in the noise of all times.
    """
    cut = as_pixels(images).unfold(2, FACTOR, FACTOR).unfold(3, FACTOR, FACTOR)
    patches = cut.permute(0, 2, 3, 1, 4, 5).reshape(-1, 3 * FACTOR * FACTOR).double()
    mean = patches.mean(0)
    variances, vectors = torch.linalg.eigh(torch.cov(patches.T))
    main = vectors[:, -CHANNELS:].T.flip(0)
    deviations = variances[-CHANNELS:].flip(0).sqrt()
    scaled = main / deviations[:, None] ** EVEN
    scaled /= deviations.pow(2 - 2 * EVEN).mean().sqrt()
    return Patches(mean.float(), scaled.float())


def new_patch_vae(patches: Patches, size: int) -> AutoencoderKL:
    """Return an autoencoder with these latents and a decoder that has learnt nothing yet."""
    vae = AutoencoderKL(
        block_out_channels=BLOCKS,
        down_block_types=("DownEncoderBlock2D",) * len(BLOCKS),
        up_block_types=("UpDecoderBlock2D",) * len(BLOCKS),
        layers_per_block=1,
        norm_num_groups=GROUPS,
        latent_channels=CHANNELS,
        sample_size=size,
        mid_block_add_attention=False,
        scaling_factor=1.0,
    )
    for one in vae.modules():  # blocks begin by adding nothing: the decoder's learn to
        if hasattr(one, "conv_shortcut"):
            nn.init.zeros_(one.conv2.weight)
            nn.init.zeros_(one.conv2.bias)
    with torch.no_grad():
        _write_encoder(vae, patches)
    vae.encoder.requires_grad_(False)
    vae.quant_conv.requires_grad_(False)
    return vae


def _write_encoder(vae: AutoencoderKL, patches: Patches) -> None:
    """Write the weights by which the encoder's latents are those of the patches."""
    encoder, half = vae.encoder, CHANNELS * 2
    for parameter in [*encoder.parameters(), *vae.quant_conv.parameters()]:
        parameter.zero_()
    encoder.conv_in.weight[:3, :, 1, 1] = torch.eye(3)
    count = 3
    for block in encoder.down_blocks:
        shortcut = block.resnets[0].conv_shortcut
        if shortcut is not None:
            shortcut.weight[:count, :count, 0, 0] = torch.eye(count)
        if block is encoder.down_blocks[2]:
            break
        kernel = block.downsamplers[0].conv.weight
        for row in range(2):
            for column in range(2):  # channel c of the cell at (row, column) becomes c + count * n
                first = count * (2 * row + column)
                kernel[first : first + count, :count, row, column] = torch.eye(count)
        count *= 4
    last, places = encoder.down_blocks[2].downsamplers[0].conv, _places()
    for row in range(2):
        for column in range(2):
            last.weight[places, :count, row, column] = _part(patches, row, column).repeat(2, 1)
    last.weight[places[CHANNELS:]] *= -1
    offset = -patches.weight @ patches.mean
    last.bias[places] = torch.cat([offset, -offset])
    group = BLOCKS[-1] // GROUPS
    loud = [index for index in range(BLOCKS[-1]) if index % group >= 2 * CHANNELS // GROUPS]
    last.bias[loud] = LOUD * torch.tensor([1.0, -1.0]).repeat(len(loud) // 2)
    encoder.conv_norm_out.weight.fill_(LOUD * (len(loud) / BLOCKS[-1]) ** 0.5)
    encoder.conv_out.weight[:CHANNELS, places, 1, 1] = torch.cat(
        [torch.eye(CHANNELS), -torch.eye(CHANNELS)], dim=1
    )
    encoder.conv_out.bias[CHANNELS:] = NARROW
    vae.quant_conv.weight[:, :, 0, 0] = torch.eye(half)


def _places() -> list[int]:
    """Return the channels of the components and of their negatives: as many of both, and of
    constants, in each group of the norm."""
    group, each = BLOCKS[-1] // GROUPS, CHANNELS // GROUPS
    plus = [group * (index // each) + index % each for index in range(CHANNELS)]
    return [*plus, *(place + each for place in plus)]


def _part(patches: Patches, row: int, column: int) -> Tensor:
    """Return the components' weights [CHANNELS, 48] for one quarter of a patch, 4x4 pixels, whose
    channels are sorted as two strided convolutions leave them."""
    whole = patches.weight.unflatten(1, (3, FACTOR, FACTOR))
    quarter = whole[:, :, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4]
    # channel = colour + 3 * (inner row * 2 + inner column) + 12 * (outer row * 2 + outer column)
    split = quarter.reshape(CHANNELS, 3, 2, 2, 2, 2)  # colour, outer row, inner row, outer, inner
    return split.permute(0, 2, 4, 3, 5, 1).reshape(CHANNELS, -1)
