"""Attention added to the sums of a run: to all steps', to a step's own, to the self-attention."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdattn.attention import add_attention

from .layouts import Look
from .runs import Conditioning, Run, Settings, Sums

MOST_CELLS = 32 * 32  # largest grid whose self-attention is kept for spreading maps
NO_AFFINITY = "The image's self-attention did not fit into the bytes that Watch attention may keep."


@dataclass(eq=False)
class Chunk:
    """Rows of a call of the model that are drawn from one text."""

    conditioning: Conditioning
    rows: slice
    repeats: int  # of the text's columns, which ComfyUI repeats to batch it with a longer one


def add(
    settings: Settings,
    run: Run,
    chunk: Chunk,
    look: Look,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> None:
    one, cells = chunk.conditioning, query.shape[2]
    assert one.facts is not None
    n_text = one.facts.columns
    add_to = functools.partial(add_attention, query=query, key=key, mask=mask, scale=scale)
    if look.texts:
        total = _sum(settings, run, one, look, (len(query), cells, n_text), query)
        if chunk.repeats == 1:
            for part, columns in zip(look.texts, _columns(look.texts, n_text), strict=True):
                add_to(total[..., columns], keys=part)
        else:
            every = total.new_zeros(len(query), cells, chunk.repeats * n_text)
            add_to(every, keys=look.texts[0])
            total += every.unflatten(-1, (chunk.repeats, -1)).sum(-2)
    is_read = look.place not in ("down", "mid") and cells <= MOST_CELLS
    if settings.spread and look.image is not None and is_read:
        total = _affinity(settings, run, one, look, (len(query), cells, cells), query)
        if total is not None:
            add_to(total, keys=look.image)


def _sum(
    settings: Settings,
    run: Run,
    one: Conditioning,
    look: Look,
    shape: tuple[int, ...],
    query: Tensor,
) -> Tensor:
    """Return the sum that a layer's attention to the text is added to."""
    sums, step = one.sums, run.step
    if settings.every_step and step not in run.over_budget:
        sums = one.by_step.setdefault(step, Sums())
        is_new = (look.place, look.grid) not in sums.totals
        if is_new and run.kept_apart + 4 * math.prod(shape) > settings.max_bytes:
            run.over_budget.add(step)
            for other in run.conditionings.values():
                other.sums += other.by_step.pop(step, Sums())
            sums = one.sums
    return _total(sums, look, shape, query)


def _affinity(
    settings: Settings,
    run: Run,
    one: Conditioning,
    look: Look,
    shape: tuple[int, ...],
    query: Tensor,
) -> Tensor | None:
    """Return the sum that a layer's self-attention is added to; None if it does not fit."""
    is_new = (look.place, look.grid) not in one.affinity.totals
    if is_new and run.kept_apart + 4 * math.prod(shape) > settings.max_bytes:
        run.notes[NO_AFFINITY] = None
        return None
    return _total(one.affinity, look, shape, query)


def _total(sums: Sums, look: Look, shape: tuple[int, ...], query: Tensor) -> Tensor:
    key = look.place, look.grid
    if key not in sums.totals:
        sums.totals[key] = torch.zeros(shape, dtype=torch.float32, device=query.device)
    sums.heads[key] += query.shape[1]
    sums.calls[key] += 1
    return sums.totals[key]


def _columns(texts: Sequence[slice], n_text: int) -> Iterator[slice]:
    """Yield the columns that each part of the text is added to: the first part's, or for a
    repeated part the last ones."""
    yield slice(0, texts[0].stop - texts[0].start)
    for part in texts[1:]:
        yield slice(n_text - (part.stop - part.start), n_text)
