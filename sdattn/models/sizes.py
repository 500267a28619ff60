"""Sizes of a pipeline's images, and of the cells of their maps."""

import math

from .call_options import call_options
from .layers import find_denoiser
from .pipeline import Options, Pipeline

# Names that pipelines have for the pixels per side of a latent cell
_FACTORS = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
)


def cell_size(pipe: Pipeline) -> int:
    """Return the pixels per side of the maps' finest cell: a latent cell or a patch."""
    denoiser = find_denoiser(pipe)
    return int(_latent_cell(pipe) * denoiser.family.cell(denoiser.model))


def _latent_cell(pipe: Pipeline) -> int:
    """Return the pixels per side of a latent cell, by any name that pipelines have for it."""
    return next(int(getattr(pipe, name)) for name in _FACTORS if hasattr(pipe, name))


def size_unit(pipe: Pipeline) -> int:
    """Return the pixels that sides must be a multiple of, diffusers' own unit included."""
    return math.lcm(find_denoiser(pipe).family.size_unit, cell_size(pipe))


def default_size(pipe: Pipeline) -> tuple[int, int]:
    """Return the default (height, width) in pixels of a pipeline's images."""
    known = call_options(pipe)
    height, width = known.get("height"), known.get("width")
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    if hasattr(pipe, "default_height"):  # Mochi
        return pipe.default_height, pipe.default_width
    denoiser = find_denoiser(pipe)
    size = getattr(pipe, "default_sample_size", None)
    config = denoiser.model.config
    size = size or getattr(config, "sample_size", None)
    if size is None and hasattr(config, "sample_height"):  # CogVideoX
        size = config.sample_height, config.sample_width
    if size is None:
        return denoiser.family.default_size, denoiser.family.default_size
    rows, cols = (size, size) if isinstance(size, int) else size
    return rows * _latent_cell(pipe), cols * _latent_cell(pipe)


def latent_size(pipe: Pipeline, options: Options | None = None) -> tuple[int, int]:
    """Return (rows, cols) of the finest cells for these options or by default; a video's per
    frame."""
    height, width = default_size(pipe)
    if options and "height" in options:
        height, width = options["height"], options["width"]
    cell = cell_size(pipe)
    return height // cell, width // cell
