"""`guide()`: draw an image whose heatmaps are as asked, by moving its latents between the steps.

Before a chosen step the model runs once for the prompt alone, with a graph from its attention back
to the latents, and the latents go down the gradient of the losses. Sources: Chefer et al. 2023,
"Attend-and-Excite" (arXiv:2301.13826), section 3; Xie et al. 2023, "BoxDiff" (arXiv:2307.10816).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from ..attention.calls import ALL
from ..errors import InvalidTypeError, OptionError, RunError
from ..follow.doubts import own_calls
from ..follow.passes import Pass
from ..follow.run import Subscriber, follow
from ..follow.run_part import Span
from ..inversion.nulltext import frozen, rows_of
from ..keep.keep import Keep
from ..maps.aggregation import aggregate, finish
from ..maps.capture import capture_kept
from ..maps.heatmaps import Heatmaps
from ..maps.presets import Preset, preset_for
from ..maps.requirements import capture_settings
from ..models.denoiser_call import arguments
from ..models.facts import latent_size
from ..models.finite import check_latents, check_maps
from ..models.pipeline import Model, Pipeline
from ..models.pipeline_call import one_at_a_time
from ..runs.preparing import Order, loaded_facts, prepare
from ..runs.run import Run
from ..runs.sampling import sample
from .given_samples import asked_scheduler
from .guide_checks import (
    OWN,
    SET_HERE,
    check_guided,
    checked_count,
    checked_number,
    chosen_steps,
    is_flat,
    kept_moves,
    tried_losses,
)
from .losses import Loss


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
    max_bytes: int | None = None,
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
            your own. They are tried on random maps before anything runs.
        seed: as for :func:`sdattn.generate`.
        scale: length of a move: its root mean square in the latents as the model gets them, of
            about 1. With 0, or without losses, the image is the one of :func:`sdattn.generate`.
        steps: part of the run before whose steps the latents are moved, 0.5 or ``(0.2, 0.8)``.
        iterations: moves before a step at most.
        enough: sum of the losses that is low enough, so that no further move is made in this step.
        maps: preset of the maps that the losses read. In joint attention the default's are spread
            along the image, so that a whole object moves.
        preset, refine, max_bytes, options: as for :func:`sdattn.generate`.

    Returns:
        Run: the image, with the heatmaps of the run that drew it.

    Raises:
        TypeError: another kind of pipeline; a compiled model, one with gradient checkpointing or a
            cache; a loss that is no function of the maps; a scheduler that goes on from samples of
            its own in all chosen steps (UniPC); latents that take no gradient through the model
            (some quantized ones).
        ValueError: an impossible number, box or option, steps with none in them, losses that cancel
            each other. :class:`sdattn.NotFiniteError`, a subclass, for latents or maps with NaN or
            infinity.
        KeyError: a word that is not in the prompt.
        RuntimeError: a loss, or its gradient, that is not finite or zero for the maps of this run.

    What the run itself shows (numbers that are not finite, a missing gradient) is raised while it
    runs, all else before the first step. In steps in which the scheduler goes on from a sample of
    its own (every second call of Heun, PNDM's second) latents are not moved, with a
    :class:`sdattn.SdattnWarning`.
    """
    of_call: dict[str, Any] = {"seed": seed, "preset": preset, "refine": refine}
    of_call |= {"max_bytes": max_bytes, "own": OWN}
    facts = loaded_facts(pipe, prompt, options, **of_call)
    check_guided(facts, prompt, options)
    order = prepare(facts, prompt, options, **of_call)
    if len(order.seeds) != 1:
        text = "one image is guided at a time. Call `guide()` once for each seed."
        raise OptionError("num_images_per_prompt", len(order.seeds), text)
    size = latent_size(facts, order.options)
    low = checked_number("enough", enough)
    passes, given = asked_scheduler(facts, order.options)
    read = preset_for(facts.denoiser, maps)
    if read.part is not None:  # the coming step need not lie in it
        read = replace(read, steps="mean")
    keep = capture_settings(facts, read, order.prompts, order.options, {"grad": True})
    descent = _Descent(
        order=order,
        losses=tried_losses(losses, order.prompts[0], size, low),
        scale=checked_number("scale", scale),
        steps=chosen_steps(steps, passes),
        iterations=checked_count(iterations),
        enough=low,
        preset=read,
        keep=keep,
    )
    with ExitStack() as undo:
        if descent.losses and descent.scale:
            descent.steps = kept_moves(facts.pipe.scheduler, descent.steps, given)
            guided = {**order.options, **descent.begin(undo)}
            order = replace(order, options=guided, python=["losses"])
        return sample(order)


@dataclass(eq=False)
class _Descent(Subscriber):
    """The moves of one run, made by its ``callback_on_step_end``."""

    order: Order
    losses: Sequence[Loss]
    scale: float
    steps: frozenset[int]  # before which the latents are moved
    iterations: int
    enough: float
    preset: Preset
    keep: Keep  # of a call for a loss
    running: dict[str, Any] = field(default_factory=dict)  # arguments of the last call, by name
    given: dict[str, Any] = field(default_factory=dict)  # the same for the prompt's rows alone
    maps: Tensor = field(init=False)  # of the last loss, with their graph

    def begin(self, undo: ExitStack) -> dict[str, Any]:
        """Follow the run's calls until ``undo``; return the options that its call needs."""
        facts = self.order.facts
        model = facts.denoiser.model
        run = follow(facts.denoiser, branch="conditional", counts_gradients=False)
        run.subscribe(self)
        note = torch.compiler.disable(self.note_arguments)
        undo.callback(model.register_forward_pre_hook(note, with_kwargs=True).remove)
        undo.enter_context(run.installed)
        run.watch(model)
        undo.enter_context(frozen(model))
        return {SET_HERE[0]: self.after_step, SET_HERE[1]: ["latents"]}

    def note_arguments(self, model: Model, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.running = arguments(model, args, kwargs)

    def begin_pass(self, begun: Pass) -> None:
        """Keep the arguments of the prompt's rows, with which the model is called for a loss."""
        if begun.rows:
            self.given = rows_of(self.running, begun.kept or ALL, begun.batch)

    def after_step(
        self, pipe: Pipeline, step: int, _timestep: object, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """Move the latents before the coming step, if it was chosen."""
        if step + 1 not in self.steps:
            return {}
        latents = tensors["latents"].detach()
        check_latents(latents, step + 1, pipe, self.order.options)
        timestep = pipe.scheduler.timesteps[step + 1]
        seen = self.scaled(latents, timestep)
        length = self.scale * float(latents.float().norm() / seen.float().norm())
        with own_calls(), torch.enable_grad():
            for _ in range(self.iterations):
                latents.requires_grad_()
                loss = self.loss(latents, timestep)
                if float(loss.detach()) <= self.enough:
                    break
                latents = self.moved(latents, loss, length)
        return {"latents": latents.detach()}

    def scaled(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Return latents as the model gets them at a timestep: Euler's have another scale."""
        scale = getattr(self.order.facts.pipe.scheduler, "scale_model_input", None)
        return latents if scale is None else scale(latents, timestep)

    def loss(self, latents: Tensor, timestep: Tensor) -> Tensor:
        """Return the sum of the losses of latents at a timestep, with its graph."""
        heatmaps = self.heatmaps(latents, timestep)
        self.maps = heatmaps.maps
        check_maps({"the coming step": self.maps}, self.order.facts.pipe, self.order.options)
        values = []
        for loss in self.losses:
            values.append(loss(heatmaps))
            if not math.isfinite(float(values[-1].detach())):
                raise RunError(
                    f"The loss {loss!r} is {float(values[-1].detach())} for maps that are finite. "
                    "Look for a division by zero or a logarithm of zero in it."
                )
        return torch.stack(values).sum()

    def heatmaps(self, latents: Tensor, timestep: Tensor) -> Heatmaps:
        """Return the heatmaps of the prompt for latents at a timestep, with their graph."""
        order = self.order
        model = order.facts.denoiser.model
        family = order.facts.denoiser.family
        name = next(name for name in family.names.timestep if self.given.get(name) is not None)
        at = (float(timestep) - family.timestep_start) / family.timestep_unit
        arguments_now = {
            **self.given,
            family.names.latents: self.scaled(latents, timestep),
            name: torch.full_like(torch.as_tensor(self.given[name]), at),
        }
        with capture_kept(model, self.keep) as store:
            model(**arguments_now)
        averaged = aggregate(store.layer_maps(self.preset), self.preset)[0]
        return finish(averaged, order.prompts[0], self.preset, store.tokens)

    def moved(self, latents: Tensor, loss: Tensor, length: float) -> Tensor:
        """Return the latents, moved down the loss by ``length``, a root mean square."""
        kind = type(self.order.facts.denoiser.model).__name__
        if not loss.requires_grad:
            raise InvalidTypeError(
                f"The latents take no gradient through this {kind}. A quantized model may have no "
                "backward pass: load it in float32 or bfloat16."
            )
        gradient, of_maps = torch.autograd.grad(loss, (latents, self.maps), allow_unused=True)
        is_finite = of_maps is not None and bool(of_maps.isfinite().all())
        if not is_finite or is_flat(float(loss.detach()), self.maps, of_maps):
            found = "zero" if of_maps is None or is_finite else "not finite"
            raise RunError(
                f"The gradient of the losses with respect to the maps is {found}, where their sum "
                f"is {float(loss.detach()):.3g}, so that it does not say how to lower them. Choose "
                "losses with a slope for all maps."
            )
        size = gradient.float().square().mean().sqrt()
        if not 0 < float(size) < float("inf"):
            raise RunError(
                f"The losses change with the maps, but their gradient through this {kind} is "
                f"{float(size):g} in {latents.dtype}. Load the model in float32 or bfloat16."
            )
        return (latents.detach().float() - length * gradient.float() / size).to(latents.dtype)
