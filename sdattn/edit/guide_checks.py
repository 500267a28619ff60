"""Checks of :func:`sdattn.edit.guide`, all before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import (
    InvalidTypeError,
    InvalidValueError,
    OptionError,
    SdattnWarning,
    option_names,
    refuse,
    warn,
)
from ..follow.run_part import RunPart, Span
from ..maps.heatmaps import Heatmaps
from ..models.caches import is_cached
from ..models.facts import PipelineFacts
from ..models.families import edits_of
from ..models.pipeline import Options
from ..models.values import whole
from ..prompts.tokens import Prompt
from .given_samples import OTHERS
from .losses import Loss

OWN = (
    *("losses", "seed", "scale", "steps", "iterations", "enough", "maps"),
    *("preset", "refine", "max_bytes"),
)
_ROUNDING = 1e-6  # relative, of sums in float32
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
    if facts.denoiser.compiled_parts:
        raise InvalidTypeError(
            f"The {type(model).__name__} is compiled, and a graph that records attention with its "
            "gradient would be another one. Pass the pipeline before it is compiled."
        )
    if is_cached(facts.denoiser):
        raise InvalidTypeError(
            f"A cache of diffusers is on in the {type(model).__name__}, which would count the "
            "calls for the losses as steps of the run. Turn it off before, disable_cache()."
        )
    if getattr(model, "is_gradient_checkpointing", False):
        raise InvalidTypeError(
            f"The {type(model).__name__} has gradient checkpointing on, with which torch runs each "
            "layer again in the backward pass, where its maps are not recorded. Call "
            "disable_gradient_checkpointing() on it before."
        )
    if torch.is_inference_mode_enabled():
        raise InvalidValueError(
            "`guide()` needs gradients, which torch.inference_mode() rules out. Call it outside."
        )


def tried_losses(losses: Any, prompt: Prompt, grid: tuple[int, int], enough: float) -> list[Loss]:
    """Return the losses, tried on random maps: an unknown word is an error now, and so are losses
    whose sum no change of the maps lowers."""
    if callable(losses):
        losses = [losses]
    if not isinstance(losses, Sequence) or not all(map(callable, losses)):
        raise refuse("losses", losses, "a list of functions, such as [inside('cat', box)]")
    if not losses:
        return []
    generator = torch.Generator().manual_seed(0)
    for sharpness in (1.0, 0.1, 10.0):  # the first is enough, unless the losses are flat there
        logits = sharpness * torch.randn(*grid, len(prompt.tokens), generator=generator)
        maps = logits.softmax(-1).requires_grad_()
        with torch.enable_grad():
            total = torch.stack([_tried(loss, Heatmaps(prompt, maps)) for loss in losses]).sum()
        (gradient,) = torch.autograd.grad(total, maps, allow_unused=True)
        found = float(total.detach())
        if not found > enough or not is_flat(found, maps, gradient):
            return list(losses)
    cancel = f"The sum of these {len(losses)} losses, which cancel each other, is"
    raise InvalidValueError(
        f"{'The loss is' if len(losses) == 1 else cancel} {found:.3g} whatever the maps are, so no "
        "move of the latents lowers it. Ask for what some maps have and others have not."
    )


def _tried(loss: Loss, heatmaps: Heatmaps) -> Tensor:
    """Return the value of a loss; refuse one that is no scalar with a graph."""
    value = loss(heatmaps)
    if not isinstance(value, Tensor) or value.ndim or not value.requires_grad:
        raise InvalidTypeError(
            f"The loss {loss!r} returned {value!r} for maps that it was tried on. Return a scalar "
            "tensor computed from `heatmaps[word].values`, with its graph."
        )
    return value


def is_flat(loss: float, maps: Tensor, gradient: Tensor | None) -> bool:
    """Check whether a loss changes with maps by no more than rounding, by its ``gradient``; None if
    it does not depend on them."""
    if gradient is None:
        return True
    change = (gradient * maps.detach()).abs().sum()
    return bool(change <= _ROUNDING * abs(loss))


def chosen_steps(steps: Span, passes: int) -> frozenset[int]:
    """Return the numbers of the steps before which the latents are moved; refuse none."""
    steps_in_part = frozenset(RunPart.of(steps, passes).passes(passes)) - {0}
    if passes < 2:
        text = "this run has a single step, and latents are moved between two. Draw more steps."
        raise OptionError("num_inference_steps", passes, text)
    if not steps_in_part:
        text = (
            f"none of this run's {passes} steps after the first has its middle in that part. Pass "
            "1.0 for all of them, or draw more steps."
        )
        raise OptionError("steps", steps, text)
    return steps_in_part


def kept_moves(scheduler: Any, chosen: frozenset[int], given: frozenset[int]) -> frozenset[int]:
    """Return the ``chosen`` steps that are ``given`` their latents; warn of others, where moves
    would be lost, and refuse to lose all of them."""
    kind = type(scheduler).__name__
    found = chosen & given
    if not found:
        raise InvalidTypeError(
            f"A {kind} goes on from samples of its own in all of the {len(chosen)} chosen steps, "
            f"so the moves of the latents would be lost. {OTHERS}"
        )
    if lost := len(chosen) - len(found):
        warn(
            f"A {kind} goes on from samples of its own in {lost} of the {len(chosen)} chosen "
            f"steps, where moves of the latents would be lost. They are moved before the other "
            f"{len(found)} alone. {OTHERS}",
            SdattnWarning,
        )
    return found


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
