"""Sizes of a pipeline's images and of their maps' cells; videos' frames and frames per second."""

import math

from ..errors import InvalidTypeError, OptionError, refuse
from ..files.videos import RATES, is_rate
from .facts import PipelineFacts
from .pipeline import Options, Pipeline
from .values import no_videos

# Names that pipelines have for the pixels per side of a latent cell
_FACTORS = (
    "vae_scale_factor",
    "vae_scale_factor_spatial",
    "vae_spatial_compression_ratio",
    "vae_spatial_scale_factor",
)


def cell_size(pipe: Pipeline | PipelineFacts) -> int:
    """Return the pixels per side of the maps' finest cell: a latent cell or a patch."""
    facts = PipelineFacts.of(pipe)
    denoiser = facts.denoiser
    return int(_latent_cell(facts.pipe) * denoiser.family.cell(denoiser.model))


def _latent_cell(pipe: Pipeline) -> int:
    """Return the pixels per side of a latent cell, by any name that pipelines have for it."""
    return next(int(getattr(pipe, name)) for name in _FACTORS if hasattr(pipe, name))


def size_unit(pipe: Pipeline | PipelineFacts) -> int:
    """Return the pixels that sides must be a multiple of, diffusers' own unit included."""
    facts = PipelineFacts.of(pipe)
    return math.lcm(facts.denoiser.family.size_unit, cell_size(facts))


def default_size(pipe: Pipeline | PipelineFacts) -> tuple[int, int]:
    """Return the default (height, width) in pixels of a pipeline's images."""
    facts = PipelineFacts.of(pipe)
    height, width = facts.options.get("height"), facts.options.get("width")
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    pipe, denoiser = facts.pipe, facts.denoiser
    if hasattr(pipe, "default_height"):  # Mochi
        return pipe.default_height, pipe.default_width
    size = getattr(pipe, "default_sample_size", None)
    config = denoiser.model.config
    size = size or getattr(config, "sample_size", None)
    if size is None and hasattr(config, "sample_height"):  # CogVideoX
        size = config.sample_height, config.sample_width
    if size is None:
        return denoiser.family.default_size, denoiser.family.default_size
    rows, cols = (size, size) if isinstance(size, int) else size
    return rows * _latent_cell(pipe), cols * _latent_cell(pipe)


def latent_size(pipe: Pipeline | PipelineFacts, options: Options | None = None) -> tuple[int, int]:
    """Return (rows, cols) of the finest cells for these options or by default; a video's per
    frame."""
    facts = PipelineFacts.of(pipe)
    height, width = default_size(facts)
    if options and "height" in options:
        height, width = options["height"], options["width"]
    cell = cell_size(facts)
    return height // cell, width // cell


# Names that pipelines have for the frames that a VAE codes together after the first
_UNITS = (
    "vae_scale_factor_temporal",
    "vae_temporal_compression_ratio",
    "vae_temporal_scale_factor",
)


def makes_videos(pipe: Pipeline | PipelineFacts) -> bool:
    """Check whether a pipeline makes videos, not images."""
    return PipelineFacts.of(pipe).makes_videos


def check_makes_images(pipe: Pipeline | PipelineFacts) -> None:
    """Refuse (TypeError) a pipeline that makes videos, for a feature that needs images."""
    facts = PipelineFacts.of(pipe)
    if facts.makes_videos:
        raise InvalidTypeError(
            f"{facts.name} makes videos, but edits, knockouts, comparisons and explain() "
            "need single images. Use `generate()` for a video's heatmaps."
        )


def frame_unit(pipe: Pipeline | PipelineFacts) -> int:
    """Return the unit of frames: a video has 1 plus a multiple of it. It is 1 if any number is
    possible."""
    facts = PipelineFacts.of(pipe)
    held = (getattr(facts.pipe, name) for name in _UNITS if hasattr(facts.pipe, name))
    return int(next(held, 1)) * facts.denoiser.family.frame_unit


def default_frames(pipe: Pipeline | PipelineFacts) -> int:
    """Return the default number of frames of a pipeline's videos."""
    facts = PipelineFacts.of(pipe)
    number = facts.demo.settings.get("num_frames") if facts.demo else None
    number = number or facts.options.get("num_frames")
    denoiser = facts.denoiser
    sample = getattr(denoiser.model.config, "sample_frames", None)
    return int(number or sample or denoiser.family.default_frames)


def frame_rate(pipe: Pipeline | PipelineFacts, options: Options) -> float:
    """Return the frames per second of a pipeline's videos: the call's option, or its family's rate;
    raise ValueError if no video format can hold it."""
    facts = PipelineFacts.of(pipe)
    told = facts.option(options, "frame_rate") if "frame_rate" in facts.options else None
    if told is None:
        denoiser = facts.denoiser
        own = denoiser.family.fps
        told = own(denoiser.model) if callable(own) else own
    if not is_rate(told):
        text = f"a number from {RATES[0]:g} to {RATES[1]:g}, the frames a second of every format"
        raise refuse("frame_rate", told, text)
    return float(told)


def check_frames(pipe: Pipeline | PipelineFacts, frames: int) -> None:
    """Refuse (ValueError) a number of frames that diffusers would change, or fail on after the
    first step; the message names the nearest possible numbers."""
    facts = PipelineFacts.of(pipe)
    if not facts.makes_videos:
        raise no_videos(frames, facts.name)
    unit = frame_unit(facts)
    if (frames - 1) % unit:
        lower = (frames - 1) // unit * unit + 1
        text = (
            f"this model makes 1 frame and a multiple of {unit}. The nearest are {lower} and "
            f"{lower + unit}."
        )
        raise OptionError("num_frames", frames, text)
    most = getattr(facts.denoiser.model.config, "motion_max_seq_length", None)
    if most is not None and frames > most and not getattr(facts.pipe, "free_noise_enabled", False):
        text = f"the motion module knows at most {most}. For more call pipe.enable_free_noise()."
        raise OptionError("num_frames", frames, text)
