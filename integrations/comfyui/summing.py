"""Attention added to the sums of a run: to all steps', to a step's own, to each head's, to the
self-attention."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sdattn.attention import add_attention

from .layouts import Look
from .runs import Conditioning, Run, Settings, Sums

MOST_CELLS = 32 * 32  # largest grid whose self-attention is kept for spreading maps
NO_AFFINITY = "The image's self-attention did not fit into the bytes that Watch attention may keep."
NO_HEADS = (
    "The heads of the layers {} {}x{} did not fit into the bytes that Watch attention may keep; "
    "their mean was kept."
)


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
    """Add what a layer attends to in one text to the sums.

    Args:
        settings, run, chunk, look: what is kept, of which rows, and what the layer shows of them.
        query: the image's queries, ``[images, heads, cells, d]``.
        key: all keys, ``[images, heads, keys, d]``.
        mask: addend to the scores or bool, broadcast to ``[images, heads, cells, keys]``, or None.
        scale: factor of the scores; None for ``1 / sqrt(d)``.
    """
    conditioning = chunk.conditioning
    images, _, cells, _ = query.shape
    assert conditioning.facts is not None
    n_text = conditioning.facts.columns
    if look.texts:
        shape = images, 1, cells, n_text
        total = _sum(settings, run, conditioning, look, shape, query)
        add_to = _adder(total.shape[1] > 1, query, key, mask, scale)
        total = total.flatten(0, 1)
        if chunk.repeats == 1:
            for part, columns in zip(look.texts, _columns(look.texts, n_text), strict=True):
                add_to(total[..., columns], keys=part)
        else:
            every = total.new_zeros(len(total), cells, chunk.repeats * n_text)
            add_to(every, keys=look.texts[0])
            total += every.unflatten(-1, (chunk.repeats, -1)).sum(-2)
    is_read = look.place not in ("down", "mid") and cells <= MOST_CELLS
    if settings.spread and look.image is not None and is_read:
        shape = images, 1, cells, cells
        affinity = _affinity(settings, run, conditioning, look, shape, query)
        if affinity is not None:
            add_to = _adder(False, query, key, mask, scale)
            add_to(affinity.flatten(0, 1), keys=look.image)


def _adder(
    each_head: bool, query: Tensor, key: Tensor, mask: Tensor | None, scale: float | None
) -> Callable[..., None]:
    """Return what adds attention to ``[images, cells, keys]``; to ``[images * heads, cells, keys]``
    if each head is kept, as heads are then rows of a batch of one head."""
    if each_head:
        if mask is not None:
            mask = mask.expand(*query.shape[:2], -1, -1).flatten(0, 1)[:, None]
        query = query.flatten(0, 1)[:, None]
        key = key.flatten(0, 1)[:, None]
    return functools.partial(add_attention, query=query, key=key, mask=mask, scale=scale)


def _sum(
    settings: Settings,
    run: Run,
    conditioning: Conditioning,
    look: Look,
    shape: tuple[int, ...],
    query: Tensor,
) -> Tensor:
    """Return the sum that a layer's attention to the text is added to."""
    sums = conditioning.sums
    by_head = _by_head(shape, query) if settings.every_head else shape
    if settings.every_step and run.step not in run.over_budget:
        of_step = conditioning.by_step.setdefault(run.step, Sums())
        if _fits(settings, run, of_step, look, by_head):
            return _total(of_step, look, by_head, query)
        run.over_budget.add(run.step)
        for other in run.conditionings.values():
            other.sums += other.by_step.pop(run.step, Sums()).over_heads()
        sums = conditioning.sums
    if settings.every_head and not settings.every_step:
        if _fits(settings, run, sums, look, by_head):
            return _total(sums, look, by_head, query)
        run.notes[NO_HEADS.format(look.place, *look.grid)] = None
    return _total(sums, look, shape, query)


def _by_head(shape: tuple[int, ...], query: Tensor) -> tuple[int, ...]:
    return shape[0], query.shape[1], *shape[2:]


def _affinity(
    settings: Settings,
    run: Run,
    conditioning: Conditioning,
    look: Look,
    shape: tuple[int, ...],
    query: Tensor,
) -> Tensor | None:
    """Return the sum that a layer's self-attention is added to; None if it does not fit."""
    if not _fits(settings, run, conditioning.affinity, look, shape):
        run.notes[NO_AFFINITY] = None
        return None
    return _total(conditioning.affinity, look, shape, query)


def _fits(settings: Settings, run: Run, sums: Sums, look: Look, shape: tuple[int, ...]) -> bool:
    """Check whether a sum is there, in this shape, or fits into the bytes that may be kept."""
    total = sums.totals.get((look.place, look.grid))
    if total is not None:
        return total.shape == shape
    return run.kept_apart + 4 * math.prod(shape) <= settings.max_bytes


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


def rows_of(mask: Tensor | None, rows: slice, queries: slice) -> Tensor | None:
    """Return a part of a mask as ComfyUI broadcasts it: ``[N, T]``, ``[B, N, T]`` or with heads."""
    if mask is None:
        return None
    if mask.ndim == 2:
        mask = mask[None, None]
    elif mask.ndim == 3:
        mask = mask[:, None]
    mask = mask if len(mask) == 1 else mask[rows]
    return mask if mask.shape[2] == 1 else mask[:, :, queries]


def by_head(tensor: Tensor, dim: int, is_split: bool) -> Tensor:
    """Return ``[B, heads, N, d]`` of what an attention function was given."""
    return tensor if is_split else tensor.unflatten(-1, (-1, dim)).transpose(1, 2)


def grouped(key: Tensor, heads: int) -> Tensor:
    """Return keys with each head's own, for layers whose queries share them."""
    return key if key.shape[1] == heads else torch.repeat_interleave(key, heads // key.shape[1], 1)
