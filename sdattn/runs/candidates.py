"""`best_of()`: one image from the best of several seeds, as the maps of the first steps tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from ..errors import OptionError
from ..follow.run_part import RunPart
from ..keep.keep import Steps
from ..maps.heatmaps import Heatmaps
from ..maps.requirements import known_steps
from ..models.pipeline import Pipeline
from .info import Candidate
from .preparing import Order, watch
from .run import Run
from .sampling import draw, make_maps, sample

CALLBACK = "callback_on_step_end"


def check_candidates(order: Order, decide_at: float) -> None:
    """Raise ValueError for a run that cannot choose its seed by the first steps."""
    if len(order.seeds) != 1:
        text = "they are for one image of one prompt. Call `generate()` once for each."
        raise OptionError("candidates", len(order.seeds), text)
    if order.options.get("latents") is not None:
        text = "they differ in their noise, and `latents` sets it. Leave one of them out."
        raise OptionError("candidates", "with latents", text)
    if decide_at == 1:
        return
    if CALLBACK not in order.facts.options:
        text = f"a {order.facts.name} cannot be stopped between steps. Pass 1.0: all are drawn."
        raise OptionError("decide_at", decide_at, text)
    steps = known_steps(order.facts, order.options)
    if not decide_at or (steps and not RunPart.of(decide_at).passes(steps)):
        text = f"no step of this run's {steps or ''} has its middle in that part. Pass more."
        raise OptionError("decide_at", decide_at, text)


def best_of(
    order: Order, seeds: Sequence[int], decide_at: float, words: Sequence[str] | None
) -> Run:
    """Return the run of the seed whose maps have the highest :meth:`sdattn.Heatmaps.score`.

    Each seed is drawn for the share ``decide_at`` of the steps and judged by the last of them; then
    the best one is drawn from its first step, so that the image is the one of its seed alone. With
    1.0 each is drawn once, whole.
    """
    judged: list[Candidate] = []
    best: Run | None = None
    for seed in seeds:
        one = replace(order, seeds=[seed])
        if decide_at < 1:
            score = early_heatmaps(one, decide_at).score(words)
        else:
            run = sample(one)
            score = run[0].heatmaps.score(words)
            if all(score > other.score for other in judged):
                best = run
        judged.append(Candidate(seed, score))
    ranked = tuple(sorted(judged, key=lambda one: -one.score))  # of equal ones the first
    best = best or sample(replace(order, seeds=[ranked[0].seed]))
    settings = replace(best[0].settings, candidates=ranked, decide_at=decide_at)
    best.image_runs = [replace(best[0], settings=settings)]
    return best


def early_heatmaps(order: Order, until: float) -> Heatmaps:
    """Return the heatmaps of a run's last step up to the share ``until`` of its steps, after which
    it is stopped and not decoded. The layout forms in these steps: a mean over them says less."""
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
    drawn = draw(early, watch(early), {})
    return make_maps(early, drawn.stores).heatmaps[0]
