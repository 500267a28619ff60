"""`PipelineFacts`: what is known of a pipeline before it runs, asked once and handed down; sizes of
its images and of their maps' cells, frames, and how often it calls its model."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import torch

from ..errors import InvalidTypeError, InvalidValueError, OptionError, refuse
from ..files.videos import RATES, is_rate
from .call_options import call_options, option_of
from .demos import Demo, demo_of
from .denoiser import Denoiser, find_denoiser
from .guidance import guidance_of, guider_of, makes_negative
from .pipeline import Options, Pipeline
from .values import EACH, no_videos


class PipelineFacts:
    """Facts of a pipeline, each read when it is first needed and then kept.

        facts = PipelineFacts.of(pipe)  # facts stay as they are

    Make them at the start of a run: another run may find other parts in the pipeline.

    Attributes:
        pipe: the pipeline.
    """

    def __init__(self, pipe: Pipeline):
        self.pipe = pipe

    @classmethod
    def of(cls, pipe: Pipeline | PipelineFacts) -> PipelineFacts:
        return pipe if isinstance(pipe, PipelineFacts) else cls(pipe)

    @property
    def name(self) -> str:
        """Name of the pipeline's class."""
        return type(self.pipe).__name__

    @cached_property
    def denoiser(self) -> Denoiser:
        """Model that is called once a step, with its family and its layers; raise TypeError for one
        of no known family."""
        return find_denoiser(self.pipe)

    @cached_property
    def device(self) -> torch.device:
        """Device that the pipeline computes on; its weights may be elsewhere (offload). Diffusers
        walks through all parts to tell it."""
        device: torch.device = self.pipe._execution_device
        return device

    @property
    def makes_videos(self) -> bool:
        return self.denoiser.family.video

    @cached_property
    def is_joint(self) -> bool:
        """True if some layers attend to text and image together."""
        return any(layer.kind == "joint" for layer in self.denoiser.layers)

    @cached_property
    def demo(self) -> Demo | None:
        """Demo model that the pipeline was loaded from, or None."""
        return demo_of(self.pipe)

    @cached_property
    def options(self) -> dict[str, Any]:
        """Options that the pipeline's call knows, name to default."""
        return call_options(self.pipe)

    def option(self, options: Options, name: str) -> Any:
        """Return an option's value, see :func:`.call_options.option_of`."""
        return option_of(self.pipe, options, name, self.options)


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
    height = facts.options.get("height")
    width = facts.options.get("width")
    if isinstance(height, int) and isinstance(width, int):
        return height, width
    pipe = facts.pipe
    if hasattr(pipe, "default_height"):  # Mochi
        return pipe.default_height, pipe.default_width
    config = facts.denoiser.model.config
    size = getattr(pipe, "default_sample_size", None) or getattr(config, "sample_size", None)
    if size is None and hasattr(config, "sample_height"):  # CogVideoX
        size = (config.sample_height, config.sample_width)
    if size is None:
        side = facts.denoiser.family.default_size
        return side, side
    rows, cols = (size, size) if isinstance(size, int) else size
    return rows * _latent_cell(pipe), cols * _latent_cell(pipe)


def size_doubt(facts: PipelineFacts, options: Options) -> str:
    """Return a warning of a size that was asked for and is over twice, or under half, the one that
    the model's own config tells; "" without a doubt, or where the config tells none."""
    own = getattr(getattr(facts.denoiser.model, "config", None), "sample_size", None)
    sides = [own, own] if isinstance(own, int) else list(own or ())
    if len(sides) != 2 or options.get("height") is None or options.get("width") is None:
        return ""
    height, width = (side * _latent_cell(facts.pipe) for side in sides)
    shares = options["height"] / height, options["width"] / width
    if min(shares) >= 0.5 and max(shares) <= 2:
        return ""
    asked = f"{options['width']}x{options['height']}"
    much = "over twice" if max(shares) > 2 else "under half of"
    return (
        f"This {facts.name} was trained at {width}x{height} pixels, by its own config, and a side "
        f"of {asked} is {much} that, where models repeat things or lose them. Ask for a size "
        f"nearer to {width}x{height}."
    )


def latent_size(pipe: Pipeline | PipelineFacts, options: Options | None = None) -> tuple[int, int]:
    """Return (rows, cols) of the finest cells for these options or by default; a video's per
    frame."""
    facts = PipelineFacts.of(pipe)
    height, width = default_size(facts)
    if options and "height" in options:
        height = options["height"]
        width = options["width"]
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
            f"{facts.name} makes videos, but edits, knockouts, comparisons and explanations "
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


def images_a_prompt(pipe: Pipeline | PipelineFacts, options: Options) -> int:
    """Return how many images, or videos, a run makes of one prompt."""
    facts = PipelineFacts.of(pipe)
    known = [name for name in EACH if name in facts.options]
    return math.prod(facts.option(options, name) or 1 for name in known)


def model_passes(pipe: Pipeline | PipelineFacts, options: Options) -> int:
    """Return how often a run will call the model; second-order schedulers do so twice a step."""
    return len(scheduler_of_run(pipe, options).timesteps)


def scheduler_of_run(pipe: Pipeline | PipelineFacts, options: Options) -> Any:
    """Return a scheduler like the pipeline's, with as many timesteps as a run will have."""
    facts = PipelineFacts.of(pipe)
    own = facts.pipe.scheduler
    # A scheduler of its own, since set_timesteps would change that of the pipeline.
    scheduler = type(own).from_config(own.config)
    # A shift that depends on the image's size moves timesteps and leaves their number.
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(facts.option(options, "num_inference_steps"), **shift)
    return scheduler


def is_guided(pipe: Pipeline | PipelineFacts, options: Options) -> bool:
    """Check whether a run will have unconditional rows in its batch."""
    facts = PipelineFacts.of(pipe)
    if guidance_of(facts.pipe).known_by in ("calls", "guider"):  # in a batch of their own (FLUX)
        return False
    # A model that takes the guidance scale as an input (LCM) runs none.
    config = facts.denoiser.model.config
    distilled = getattr(config, "time_cond_proj_dim", None) is not None
    return bool(facts.option(options, "guidance_scale") > 1 and not distilled)


def check_guidance(facts: PipelineFacts, options: Options) -> None:
    """Refuse (ValueError) a negative prompt that the pipeline would silently ignore."""
    if not options.get("negative_prompt"):
        return
    guider = guider_of(facts.pipe)
    if guider is not None and not makes_negative(guider):
        raise InvalidValueError(
            f"A {facts.name} uses a negative prompt only where its guider has guidance; "
            f"found a {type(guider).__name__} without. Set pipe.guider.guidance_scale above 1 and "
            "call pipe.guider.enable(), or pass no negative prompt."
        )
    scales = ("true_cfg_scale", "guidance_scale")
    name = next((scale for scale in scales if scale in facts.options), None)
    if guider is not None or name is None:
        return
    scale = facts.option(options, name)
    if isinstance(scale, (int, float)) and scale <= 1:
        raise InvalidValueError(
            f"A {facts.name} uses a negative prompt only with `{name}` above 1; found "
            f"{scale}. Pass `{name}=4`, for example, or no negative prompt."
        )
