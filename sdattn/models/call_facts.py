"""Facts about a pipeline before it runs: its call's images, passes, guidance; limits of sdattn."""

import math
from collections import Counter

from ..errors import InvalidValueError
from .facts import PipelineFacts
from .families import edits_of, guidance_of
from .guidance import guided_order
from .guiders import guider_of, makes_negative
from .layers import find_denoiser
from .pipeline import Options, Pipeline
from .reading import read_prompts
from .values import EACH


def images_a_prompt(pipe: Pipeline | PipelineFacts, options: Options) -> int:
    """Return how many images, or videos, a run makes of one prompt."""
    facts = PipelineFacts.of(pipe)
    known = [name for name in EACH if name in facts.options]
    return math.prod(facts.option(options, name) or 1 for name in known)


def model_passes(pipe: Pipeline | PipelineFacts, options: Options) -> int:
    """Return how often a run will call the model; second-order schedulers do so twice a step."""
    facts = PipelineFacts.of(pipe)
    own = facts.pipe.scheduler
    # A scheduler of its own, since set_timesteps would change that of the pipeline.
    scheduler = type(own).from_config(own.config)
    # A shift that depends on the image's size moves timesteps and leaves their number.
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(facts.option(options, "num_inference_steps"), **shift)
    return len(scheduler.timesteps)


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
