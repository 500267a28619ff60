"""Sums and means over the steps of a store, place by place."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import refuse
from ..hooks.run_part import RunPart
from ..maps.folded import Maps, StepChoice
from ..models.values import whole


def chosen(kept: Sequence[Maps], steps: StepChoice) -> tuple[Maps, int]:
    """Return the mean of chosen steps among those kept one by one, and their number; raise
    ValueError for neither a step's number nor a part of the run."""
    numbers: list[int] = []
    if (step := whole(steps)) is not None:
        numbers = [step] if -len(kept) <= step < len(kept) else []
    elif part := RunPart.read(steps):
        numbers = part.passes(len(kept))
    if not numbers:
        there = f"0 to {len(kept) - 1}" if kept else "here none; make it with keep_steps=True"
        known = f"'mean', 'last', a part of the run such as (0.5, 1.0) or a step's number, {there}"
        raise refuse("steps", steps, known)
    chosen = [kept[i] for i in numbers]
    return {key: _mean([step[key] for step in chosen]) for key in chosen[0]}, len(chosen)


def added(sums: Maps, step: Maps) -> Maps | None:
    """Return the sums with a step added, or None if its maps have other shapes."""
    if not sums:
        return step
    if _shapes(sums) != _shapes(step):
        return None
    return {
        key: [a + b for a, b in zip(maps, step[key], strict=True)] for key, maps in sums.items()
    }


def _shapes(maps: Maps) -> dict[str, list[torch.Size]]:
    return {key: [one.shape for one in kept] for key, kept in maps.items() if kept}


def detached(step: Maps) -> Maps:
    """Return copies of a step's maps; a view would keep the rows that were left out alive."""
    return {key: [one.detach().clone() for one in kept] for key, kept in step.items()}


@torch.no_grad()
def averaged(sums: Maps, steps: int) -> Maps:
    return {key: [total / steps for total in kept] for key, kept in sums.items()}


@torch.no_grad()
def _mean(steps: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    return [torch.stack(list(maps)).mean(0) for maps in zip(*steps, strict=True)]
