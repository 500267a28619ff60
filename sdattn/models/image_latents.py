"""Given images as input of a family's text-to-image pipelines.

A family's record has one :class:`ImageLatents`. Below it are functions that several families share:
a VAE's latents of images, their scale, and the packing of 2x2 cells into one patch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from .pipeline import Model, Options, Pipeline

NoiseKind = Literal["diffusion", "flow"]


@dataclass(frozen=True, kw_only=True)
class ImageLatents:
    """Facts about pipelines that make an image from noise and prompts alone.

    Attributes:
        pipelines: class names, and the options with which each runs without guidance. A scale that
            the model itself takes as an input (FLUX) is not among them.
        encode: function from the pipeline and RGB pixels, float32 ``[B, 3, height, width]`` from -1
            to 1, to latents as the pipeline's call takes them, float32 ``[B, C, rows, cols]`` or
            packed ``[B, patches, C]``. The VAE is in float32 meanwhile.
        noise: how training mixed noise into latents: ``"diffusion"``, by the scheduler's betas (Ho
            et al. 2020), or ``"flow"``, along a straight line (Esser et al. 2024, eq. 13).
        invertible: True if :func:`sdattn.edit.invert` knows the way back to the noise.
    """

    pipelines: Mapping[str, Options] = field(default_factory=dict)
    encode: Callable[[Pipeline, Tensor], Tensor]
    noise: NoiseKind
    invertible: bool = False


def vae_latents(vae: Model, pixels: Tensor) -> Tensor:
    """Return a VAE's latents of pixels without randomness: the mode of its distribution."""
    encoded = vae.encode(pixels)
    if not hasattr(encoded, "latent_dist"):  # AutoencoderTiny's
        return encoded.latents
    return encoded.latent_dist.mode()


def shifted_latents(pipe: Pipeline, pixels: Tensor) -> Tensor:
    """Return ``(z - shift) * scale``, ``[B, C, rows, cols]``. Source: ``prepare_latents`` of
    pipeline_stable_diffusion_3_img2img.py, ``_encode_vae_image`` of pipeline_flux_img2img.py."""
    config = pipe.vae.config
    return (vae_latents(pipe.vae, pixels) - config.shift_factor) * config.scaling_factor


def packed(pipe: Pipeline, latents: Tensor) -> Tensor:
    """Return ``[B, C, rows, cols]`` as patches of 2x2 cells, ``[B, rows / 2 * cols / 2, 4 C]``, by
    the pipeline's own method, which FLUX.1 and Qwen-Image have."""
    return pipe._pack_latents(latents, *latents.shape)
