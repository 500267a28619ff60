"""`best_of()`: one image from the best of several seeds, as the maps of the first steps tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import OptionError
from ..follow.first_calls import FirstCalls
from ..follow.run_part import RunPart
from ..keep.keep import Steps
from ..maps.heatmaps import Heatmaps
from ..maps.requirements import known_steps
from ..models.facts import PipelineFacts
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import named_bar
from .info import Candidate
from .preparing import Order, watch
from .run import Run
from .sampling import draw, make_maps, sample

CALLBACK = "callback_on_step_end"
IMAGES = "num_images_per_prompt"
DECIDE_AT = 0.4  # of the steps, where a run can be stopped by then


def checked_choice(order: Order, decide_at: float | None, at_once: bool) -> float:
    """Return the share of the steps by which a run chooses its seed, see :func:`decision`; raise
    ValueError for a run that cannot choose it so."""
    if len(order.seeds) != 1:
        text = "they are for one image of one prompt. Call `generate()` once for each."
        raise OptionError("candidates", len(order.seeds), text)
    if order.options.get("latents") is not None:
        text = "they differ in their noise, and `latents` sets it. Leave one of them out."
        raise OptionError("candidates", "with latents", text)
    share = decision(order.facts, order.options, decide_at)
    if at_once and share == 1:
        text = "it is for the steps before `decide_at`, and all are drawn whole here. Leave it out."
        raise OptionError("at_once", at_once, text)
    if at_once and IMAGES not in order.facts.options:
        text = f"a {order.facts.name} has no {IMAGES}. Leave it out."
        raise OptionError("at_once", at_once, text)
    return share


def decision(facts: PipelineFacts, options: Options, decide_at: float | None) -> float:
    """Return the share of the steps by which a run chooses its seed; by default 1.0, for whole
    runs, where it cannot be stopped by then. Raise ValueError for a given one by which it
    cannot choose."""
    if decide_at is not None:
        _check_decision(facts, options, decide_at)
        return decide_at
    try:
        _check_decision(facts, options, DECIDE_AT)
    except OptionError:
        return 1.0
    return DECIDE_AT


def _check_decision(facts: PipelineFacts, options: Options, decide_at: float) -> None:
    if decide_at == 1:
        return
    if CALLBACK not in facts.options:
        text = f"a {facts.name} cannot be stopped between steps. Pass 1.0: all are drawn."
        raise OptionError("decide_at", decide_at, text)
    steps = known_steps(facts, options)
    if not decide_at or (steps and not RunPart.of(decide_at).passes(steps)):
        of_run = f"of this run's {steps}" if steps else "of this run"
        least = f"{math.ceil(500 / steps) / 1000:g} or more" if steps else "more"
        text = f"no step {of_run} has its middle in that part. Pass {least}."
        raise OptionError("decide_at", decide_at, text)


def best_of(
    order: Order,
    seeds: Sequence[int],
    decide_at: float,
    at_once: bool,
    words: Sequence[str] | None,
) -> Run:
    """Return the run of the seed whose maps have the highest :meth:`sdattn.Heatmaps.score`; of
    equal ones the first.

    Each seed is drawn for the share ``decide_at`` of the steps, alone or ``at_once`` with the
    others, and judged by the last of them. Then the best one is drawn, and its first calls are
    given back if they were made for it alone and nothing is kept of them. With 1.0 each is drawn
    once, whole.
    """
    alone = [replace(order, seeds=[seed]) for seed in seeds]
    scores = list[float]()
    begun: FirstCalls | None = None
    best: Run | None = None
    if at_once:
        together = {**order.options, IMAGES: len(seeds)}
        every = early_heatmaps(replace(order, seeds=list(seeds), options=together), decide_at)
        scores = [heatmaps.score(words) for heatmaps in every]
    for one in alone[len(scores) :]:
        run, first = None, FirstCalls(order.facts.denoiser)
        if decide_at == 1:
            run = sample(one)
            heatmaps = run[0].heatmaps
        else:
            with first.recorded() if needs_none(order, decide_at) else nullcontext():
                [heatmaps] = early_heatmaps(one, decide_at)
        scores.append(heatmaps.score(words))
        if scores.index(max(scores)) == len(scores) - 1:
            begun, best = first, run
    if best is None:
        with nullcontext() if begun is None else begun.given_back():
            best = sample(alone[scores.index(max(scores))])
    judged = map(Candidate, seeds, scores)
    ranked = tuple(sorted(judged, key=lambda one: -one.score))
    settings = replace(best[0].settings, candidates=ranked, decide_at=decide_at)
    best.image_runs = [replace(best[0], settings=settings)]
    return best


def needs_none(order: Order, until: float) -> bool:
    """Check that a run keeps nothing of its steps up to the share ``until``."""
    part = order.keep.steps.part
    return part is not None and until < part.first and not order.may_stop


def early_heatmaps(order: Order, until: float) -> list[Heatmaps]:
    """Return each image's heatmaps of a run's last step up to the share ``until`` of its steps,
    after which it is stopped and not decoded. The layout forms in these steps: a mean over them
    says less."""
    part = RunPart.of(until)
    theirs = order.options.get(CALLBACK)

    def stop(pipe: Pipeline, step: int, timestep: object, given: dict[str, Tensor]) -> Any:
        told = theirs(pipe, step, timestep, given) if theirs else {}
        total = getattr(pipe, "num_timesteps", None) or len(pipe.scheduler.timesteps)
        if step + 1 >= len(part.passes(total)):
            pipe._interrupt = True
        return told

    early = replace(
        order,
        options={**order.options, CALLBACK: stop, "output_type": "latent"},
        preset=replace(order.preset, steps="last"),
        keep=replace(order.keep, steps=Steps.of("last"), branch="conditional"),
        ask=None,
        spots=False,
        may_stop=False,
    )
    with named_bar(order.facts.pipe, f"trying seed {', '.join(map(str, order.seeds))}"):
        drawn = draw(early, watch(early), {})
    return make_maps(early, drawn.stores).heatmaps
