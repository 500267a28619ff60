"""`guide()`: draw an image whose heatmaps are as asked, by moving its latents between the steps.

Before a chosen step the model runs once for the prompt alone, with a graph from its attention back
to the latents, and the latents go down the gradient of the losses. Sources: Chefer et al. 2023,
"Attend-and-Excite" (arXiv:2301.13826), section 3; Xie et al. 2023, "BoxDiff" (arXiv:2307.10816).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..errors import (
    InvalidTypeError,
    InvalidValueError,
    OptionError,
    RunError,
    option_names,
    refuse,
)
from ..follow.pass_reader import PassReader
from ..follow.passes import own_calls
from ..follow.run_part import RunPart, Span
from ..inversion.nulltext import frozen, rows_of
from ..inversion.stand_ins import in_place
from ..keep.budget import Budget
from ..loading.pipelines import facts_of
from ..maps.aggregation import aggregate, finish
from ..maps.capture import capture
from ..maps.heatmaps import Heatmaps
from ..maps.presets import Preset, preset_for
from ..maps.requirements import capture_settings
from ..models.denoiser_call import arguments, is_compiled
from ..models.facts import PipelineFacts, images_a_prompt, latent_size, model_passes
from ..models.families import edits_of
from ..models.pipeline import Model, Pipeline
from ..models.pipeline_call import checked_options, one_at_a_time
from ..models.reading import read_prompts
from ..models.values import seeds_of, whole
from ..prompts.tokens import Prompt
from ..runs.calls import check_call
from ..runs.run import Run
from ..runs.sampling import sample
from ..runs.watched import warn_of_unlearnt
from .losses import Loss

_OWN = (
    *("losses", "seed", "scale", "steps", "iterations", "enough", "maps"),
    *("preset", "refine", "max_bytes"),
)
_SET_HERE = ("callback_on_step_end", "callback_on_step_end_tensor_inputs")


@one_at_a_time
def guide(
    pipe: Pipeline | str | Path,
    prompt: str,
    losses: Sequence[Loss],
    *,
    seed: int | None = 0,
    scale: float = 0.05,
    steps: Span = 0.7,
    iterations: int = 5,
    enough: float = 0.13,
    maps: str | Preset = "default",
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    max_bytes: int | Budget | None = None,
    **options: Any,
) -> Run:
    """Draw an image whose heatmaps are as some losses ask: a word in a box, two words apart.

        box = (0, 0, 0.5, 0.5)  # left, top, right, bottom: the upper left quarter
        run = sdattn.edit.guide(pipe, "a cat", [sdattn.edit.inside("cat", box)])
        sdattn.edit.share_inside(run[0].heatmaps["cat"].values, box)

    Between two steps the latents go down the gradient of the sum of the losses, which takes a call
    of the model with a graph and its backward pass for each iteration, and the memory of both. A
    first step cannot be chosen: the latents are moved after it at the earliest.

    Args:
        pipe: a text-to-image pipeline that :func:`edit` knows, in eager mode; or a model to load,
            ``"demo"``.
        prompt: one text. One image is drawn.
        losses: functions of the coming step's :class:`sdattn.Heatmaps` that return a scalar tensor,
            0 if all is as asked: :func:`inside`, :func:`boxdiff`, :func:`excite`, :func:`apart`, or
            your own. They are tried on even maps before anything runs.
        seed: as for :func:`sdattn.generate`.
        scale: length of a move, as its root mean square in the unit of the latents, whose noise has
            1. With 0, or without losses, the image is the one of :func:`sdattn.generate`.
        steps: part of the run before whose steps the latents are moved, 0.7 or ``(0.2, 0.8)``.
        iterations: moves before a step at most.
        enough: sum of the losses that is low enough, so that no further move is made in this step.
        maps: preset of the maps that the losses read. In joint attention the default's are spread
            along the image, so that a whole object moves.
        preset, refine, max_bytes, options: as for :func:`sdattn.generate`.

    Returns:
        Run: the image, with the heatmaps of the run that drew it.

    Raises:
        TypeError: another kind of pipeline, a compiled model, a loss that is no function of the
            maps, latents that take no gradient through the model (some quantized ones).
        ValueError: an impossible number, box or option, steps with none in them, a scheduler that
            calls the model several times a step.
        KeyError: a word that is not in the prompt. All but a missing gradient are raised before the
            first step.
    """
    facts = facts_of(
        pipe,
        prompt,
        before=lambda model: check_call(
            model,
            prompt,
            options,
            seed=seed,
            preset=preset,
            refine=refine,
            max_bytes=max_bytes,
            own=_OWN,
        ),
    )
    options = _checked(facts, prompt, options)
    [read] = read_prompts(facts.pipe, prompt, **options)
    warn_of_unlearnt(facts, [read])
    chosen = preset_for(facts.denoiser, preset, refine)
    budget = Budget.of(max_bytes)
    descent = _Descent(
        facts=facts,
        prompt=read,
        losses=_tried(losses, read, latent_size(facts, options)),
        scale=_number("scale", scale),
        steps=_chosen(steps, model_passes(facts, options)),
        iterations=_count(iterations),
        enough=_number("enough", enough),
        preset=preset_for(facts.denoiser, maps),
        options=options,
    )
    with ExitStack() as undo:
        python: list[str] = []
        if descent.losses and descent.scale:
            options = {**options, **descent.begin(undo)}
            python = ["losses"]
        return sample(
            facts, [read], seeds_of(seed), options, preset=chosen, budget=budget, python=python
        )


@dataclass
class _Descent:
    """The moves of one run, made by its ``callback_on_step_end``."""

    facts: PipelineFacts
    prompt: Prompt
    losses: Sequence[Loss]
    scale: float
    steps: frozenset[int]  # before which the latents are moved
    iterations: int
    enough: float
    preset: Preset
    options: dict[str, Any]
    given: dict[str, Any] = field(default_factory=dict)  # the last call's arguments, by name

    def begin(self, undo: ExitStack) -> dict[str, Any]:
        """Follow the run's calls until ``undo``; return the options that its call needs."""
        reader = PassReader(self.facts.denoiser, "conditional", counts_gradients=False)
        reader.listen()
        undo.callback(reader.close)

        def before_pass(model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = reader.read(model, args, kwargs)
            if call.rows:
                given = arguments(model, args, kwargs)
                self.given = given if call.kept is None else rows_of(given, call.kept, call.batch)

        undo.enter_context(in_place(self.facts.pipe, self.facts.pipe.scheduler, before_pass))
        undo.enter_context(frozen(self.facts.denoiser.model))
        return {_SET_HERE[0]: self.after_step, _SET_HERE[1]: ["latents"]}

    def after_step(
        self, pipe: Pipeline, step: int, _timestep: object, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Move the latents before the coming step, if it was chosen."""
        if step + 1 not in self.steps:
            return {}
        latents = tensors["latents"].detach()
        with own_calls(), torch.enable_grad():
            for _ in range(self.iterations):
                latents.requires_grad_()
                loss = self.loss(latents, pipe.scheduler.timesteps[step + 1])
                if float(loss.detach()) <= self.enough:
                    break
                latents = self.moved(latents, loss)
        return {"latents": latents.detach()}

    def loss(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Return the sum of the losses of latents at a timestep, with its graph."""
        heatmaps = self.heatmaps(latents, timestep)
        return torch.stack([loss(heatmaps) for loss in self.losses]).sum()

    def heatmaps(self, latents: Tensor, timestep: Tensor) -> Heatmaps:
        """Return the heatmaps of the prompt for latents at a timestep, with their graph."""
        model, family = self.facts.denoiser.model, self.facts.denoiser.family
        scaled = getattr(self.facts.pipe.scheduler, "scale_model_input", lambda sample, _: sample)
        name = next(name for name in family.names.timestep if self.given.get(name) is not None)
        at = (float(timestep) - family.timestep_start) / family.timestep_unit
        given = {
            **self.given,
            family.names.latents: scaled(latents, timestep),
            name: torch.full_like(torch.as_tensor(self.given[name]), at),
        }
        settings = capture_settings(self.facts, self.preset, [self.prompt], self.options)
        settings.pop("steps", None)  # this is one of them
        with capture(model, grad=True, **settings) as store:
            model(**given)
        averaged = aggregate(store.layer_maps(self.preset), self.preset)[0]
        return finish(averaged, self.prompt, self.preset, store.tokens)

    def moved(self, latents: Tensor, loss: Tensor) -> Tensor:
        """Return the latents a step of :attr:`scale` further down the loss."""
        kind = type(self.facts.denoiser.model).__name__
        if not loss.requires_grad:
            raise InvalidTypeError(
                f"The latents take no gradient through this {kind}. A quantized model may have no "
                "backward pass: load it in float32 or bfloat16."
            )
        (gradient,) = torch.autograd.grad(loss, latents)
        size = gradient.float().square().mean().sqrt()
        if not 0 < float(size) < float("inf"):
            raise RunError(
                f"The gradient of the losses through this {kind} is {float(size):g} in "
                f"{latents.dtype}. Choose losses that change with the maps, or load the model in "
                "float32 or bfloat16."
            )
        return (latents.detach().float() - self.scale * gradient.float() / size).to(latents.dtype)


def _checked(facts: PipelineFacts, prompt: object, options: dict[str, Any]) -> dict[str, Any]:
    """Return the checked options of a run that can be guided."""
    edits_of(facts.pipe)
    if not isinstance(prompt, str):
        raise InvalidTypeError(
            f"`guide()` draws one image of one text, and was given a {type(prompt).__name__}. "
            "Call it once for each prompt."
        )
    ours = {*_SET_HERE, "timesteps", "sigmas", "denoising_end"}
    if refused := sorted(ours & set(options)):
        raise InvalidValueError(f"`guide()` sets {option_names(refused)} itself. Leave it out.")
    options = checked_options(facts, options, own=_OWN)
    if (images := images_a_prompt(facts, options)) != 1:
        text = "one image is guided at a time. Call `guide()` once for each seed."
        raise OptionError("num_images_per_prompt", images, text)
    model, scheduler = facts.denoiser.model, facts.pipe.scheduler
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
    return options


def _tried(losses: Any, prompt: Prompt, grid: tuple[int, int]) -> list[Loss]:
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


def _chosen(steps: Span, passes: int) -> frozenset[int]:
    """Return the numbers of the steps before which the latents are moved; refuse none."""
    found = frozenset(RunPart.of(steps, passes).passes(passes)) - {0}
    if not found:
        text = (
            f"none of this run's {passes} steps after the first has its middle in that part. Pass "
            "0.7, for example, or draw more steps."
        )
        raise OptionError("steps", steps, text)
    return found


def _number(name: str, value: object) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf:
        return float(value)
    raise refuse(name, value, "a number from 0")


def _count(iterations: Any) -> int:
    number = whole(iterations)
    if number is None or number < 1:
        raise refuse("iterations", iterations, "a whole number from 1")
    return number
