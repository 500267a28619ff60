"""Facts about a pipeline before it runs: its call's images, passes, guidance; limits of sdattn."""

import math
from collections import Counter

from ..errors import InvalidValueError
from .call_options import call_options, option_of
from .families import edits_of, guidance_of
from .guidance import guided_order
from .guiders import guider_of, makes_negative
from .layers import find_denoiser
from .pipeline import Options, Pipeline
from .reading import read_prompts
from .values import EACH


def images_a_prompt(pipe: Pipeline, options: Options) -> int:
    """Return how many images, or videos, a run makes of one prompt."""
    known = call_options(pipe)
    return math.prod(option_of(pipe, options, name) or 1 for name in EACH if name in known)


def model_passes(pipe: Pipeline, options: Options) -> int:
    """Return how often a run will call the model; second-order schedulers do so twice a step."""
    # A scheduler of its own, since set_timesteps would change that of the pipeline.
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    # A shift that depends on the image's size moves timesteps and leaves their number.
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(option_of(pipe, options, "num_inference_steps"), **shift)
    return len(scheduler.timesteps)


def is_guided(pipe: Pipeline, options: Options) -> bool:
    """Check whether a run will have unconditional rows in its batch."""
    if guidance_of(pipe).known_by in ("calls", "guider"):  # in a batch of their own (FLUX)
        return False
    # A model that takes the guidance scale as an input (LCM) runs none.
    distilled = getattr(find_denoiser(pipe).model.config, "time_cond_proj_dim", None) is not None
    return bool(option_of(pipe, options, "guidance_scale") > 1 and not distilled)


def check_guidance(pipe: Pipeline, options: Options) -> None:
    """Refuse (ValueError) a negative prompt that the pipeline would silently ignore."""
    if not options.get("negative_prompt"):
        return
    guider = guider_of(pipe)
    if guider is not None and not makes_negative(guider):
        raise InvalidValueError(
            f"A {type(pipe).__name__} uses a negative prompt only where its guider has guidance; "
            f"found a {type(guider).__name__} without. Set pipe.guider.guidance_scale above 1 and "
            "call pipe.guider.enable(), or pass no negative prompt."
        )
    known = call_options(pipe)
    name = next((scale for scale in ("true_cfg_scale", "guidance_scale") if scale in known), None)
    if guider is not None or name is None:
        return
    scale = option_of(pipe, options, name)
    if isinstance(scale, (int, float)) and scale <= 1:
        raise InvalidValueError(
            f"A {type(pipe).__name__} uses a negative prompt only with `{name}` above 1; found "
            f"{scale}. Pass `{name}=4`, for example, or no negative prompt."
        )


UNSEEN = {
    "linear": "they have no softmax",
    "temporal": "they look at frames, not at the text",
    "text": "they are of the text alone",
    "audio": "their queries or keys are a video's sound",
}


def shortcomings(pipe: Pipeline) -> list[str]:
    """Return the features of sdattn that do not work with a pipeline, one line each."""
    kinds = Counter[str](layer.kind for layer in find_denoiser(pipe).layers)
    found = [
        f"{kinds[kind]} {kind} attention layers cannot be captured: {why}."
        for kind, why in UNSEEN.items()
        if kinds[kind]
    ]
    if kinds["joint"]:
        found.append("joint attention: the text's columns are captured, not the image's own.")
    for check in (guided_order, lambda pipe: read_prompts(pipe, "a")):
        try:
            check(pipe)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    try:
        edits_of(pipe)
    except TypeError as error:
        found.append(f"sdattn edit: {error}")
    return found
