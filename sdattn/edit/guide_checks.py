"""Checks of :func:`sdattn.edit.guide`, all before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidTypeError, InvalidValueError, OptionError, option_names, refuse
from ..follow.run_part import RunPart, Span
from ..maps.heatmaps import Heatmaps
from ..models.denoiser_call import is_compiled
from ..models.facts import PipelineFacts
from ..models.families import edits_of
from ..models.pipeline import Options
from ..models.values import whole
from ..prompts.tokens import Prompt
from .losses import Loss

OWN = (
    *("losses", "seed", "scale", "steps", "iterations", "enough", "maps"),
    *("preset", "refine", "max_bytes"),
)
SET_HERE = ("callback_on_step_end", "callback_on_step_end_tensor_inputs")


def check_guided(facts: PipelineFacts, prompt: object, options: Options) -> None:
    """Refuse a run that cannot be guided."""
    edits_of(facts.pipe)
    if not isinstance(prompt, str):
        raise InvalidTypeError(
            f"`guide()` draws one image of one text, and was given a {type(prompt).__name__}. "
            "Call it once for each prompt."
        )
    ours = {*SET_HERE, "timesteps", "sigmas", "denoising_end"}
    refused = sorted(ours & set(options))
    if refused:
        raise InvalidValueError(f"`guide()` sets {option_names(refused)} itself. Leave it out.")
    model = facts.denoiser.model
    scheduler = facts.pipe.scheduler
    if is_compiled(model):
        raise InvalidTypeError(
            f"The {type(model).__name__} is compiled, and a graph that records attention with its "
            "gradient would be another one. Pass the pipeline before it is compiled."
        )
    if scheduler.order > 1:
        raise InvalidTypeError(
            f"A {type(scheduler).__name__} calls the model several times a step, between which its "
            "latents cannot be moved. Set pipe.scheduler to one of first order, such as "
            "EulerDiscreteScheduler."
        )
    if torch.is_inference_mode_enabled():
        raise InvalidValueError(
            "`guide()` needs gradients, which torch.inference_mode() rules out. Call it outside."
        )


def tried_losses(losses: Any, prompt: Prompt, grid: tuple[int, int]) -> list[Loss]:
    """Return the losses, each tried on even maps, so that an unknown word is an error now."""
    if callable(losses):
        losses = [losses]
    if not isinstance(losses, Sequence) or not all(map(callable, losses)):
        raise refuse("losses", losses, "a list of functions, such as [inside('cat', box)]")
    tokens = len(prompt.tokens)
    even = torch.full((*grid, tokens), 1 / tokens, requires_grad=True)
    with torch.enable_grad():
        for loss in losses:
            value = loss(Heatmaps(prompt, even))
            if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
                raise InvalidTypeError(
                    f"The loss {loss!r} returned {value!r} for even maps. Return a scalar tensor "
                    "computed from `heatmaps[word].values`, with its graph."
                )
    return list(losses)


def chosen_steps(steps: Span, passes: int) -> frozenset[int]:
    """Return the numbers of the steps before which the latents are moved; refuse none."""
    steps_in_part = frozenset(RunPart.of(steps, passes).passes(passes)) - {0}
    if not steps_in_part:
        text = (
            f"none of this run's {passes} steps after the first has its middle in that part. Pass "
            "0.7, for example, or draw more steps."
        )
        raise OptionError("steps", steps, text)
    return steps_in_part


def checked_number(name: str, value: object) -> float:
    """Return a number from 0 as a float."""
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise refuse(name, value, "a number from 0")


def checked_count(iterations: Any) -> int:
    """Return a number of moves."""
    number = whole(iterations)
    if number is None or number < 1:
        raise refuse("iterations", iterations, "a whole number from 1")
    return number
