"""What a call of a pipeline will do: how many pictures, how many passes, with guidance or not."""

import inspect
import math
from collections.abc import Mapping
from typing import Any

from .encoders import option_of
from .families import guidance_of
from .layers import find_denoiser

# The options that say how many pictures, or films, are made of one prompt
EACH = ("num_images_per_prompt", "num_videos_per_prompt")


def images_a_prompt(pipe: Any, options: Mapping[str, Any]) -> int:
    """How many pictures, or films, a run makes of one prompt."""
    known = inspect.signature(pipe.__call__).parameters
    return math.prod(option_of(pipe, options, name) or 1 for name in EACH if name in known)


def model_passes(pipe: Any, options: Mapping[str, Any]) -> int:
    """How often a run will call the model; second-order schedulers do so twice a step."""
    # A scheduler of its own, since set_timesteps would change that of the pipeline.
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    # A shift that depends on the picture's size moves timesteps and leaves their number.
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(option_of(pipe, options, "num_inference_steps"), **shift)
    return len(scheduler.timesteps)


def is_guided(pipe: Any, options: Mapping[str, Any]) -> bool:
    """Whether a run will have unconditional rows in its batch."""
    if guidance_of(pipe).known_by == "calls":  # in a batch of their own (FLUX)
        return False
    # A model that takes the guidance scale as an input (LCM) runs none.
    distilled = getattr(find_denoiser(pipe).model.config, "time_cond_proj_dim", None) is not None
    return bool(option_of(pipe, options, "guidance_scale") > 1 and not distilled)
