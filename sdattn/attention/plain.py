"""Attention summed over heads (in the dtype of ``total``) and its logsumexp, in plain torch.

Source: Dao et al. 2022, "FlashAttention", algorithm 1, for the logsumexp.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .device_copies import chosen

MAX_PROBS_AT_ONCE = 1 << 23  # probabilities computed at a time: all heads of SD 1.x, some of SD3
MAX_PROBS_ON_CPU = 1 << 18  # so few stay in its caches; half as many took longer
SLICE = 1 << 24  # scores in one slice of queries


def add_softmax(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    columns: Sequence[int] | None = None,
) -> None:
    """Add a softmax, summed over heads, to ``total``, see
    :func:`sdattn.attention.recording.record_softmax`."""
    for scores, rows, _ in _parts(query, key, mask, scale, total.dtype):
        shut = None if mask is None else scores.amax(-1, keepdim=True) == -math.inf
        probs = torch.softmax(scores, -1)  # in place it is slower on a CPU
        probs = probs if shut is None else probs.masked_fill_(shut, 0.0)
        shown = probs if columns is None else chosen(probs, -1, tuple(columns))
        rows.of(total).add_(_over_heads(shown))


def add_share(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    logsumexp: Tensor,
    columns: Sequence[int] | None = None,
) -> None:
    """Add ``exp(scale * query @ key.T + mask - logsumexp)``, summed over heads, to ``total``.

    The keys are some of a softmax's; ``logsumexp``, ``[B, heads, N]``, is over all of them. Other
    arguments as in :func:`sdattn.attention.recording.record_softmax`.
    """
    if columns is not None:
        key = chosen(key, 2, tuple(columns))
        mask = mask if mask is None else chosen(mask, -1, tuple(columns))
    of_rows = logsumexp.to(total.dtype).unsqueeze(-1)  # [B, heads, N, 1]
    if mask is not None:  # there may be rows whose keys are all excluded
        of_rows = of_rows.masked_fill(of_rows == -math.inf, 0.0)
    for scores, rows, heads in _parts(query, key, mask, scale, total.dtype):
        probs = scores.sub_(rows.of(of_rows)[:, heads]).exp_()
        rows.of(total).add_(_over_heads(probs))


def logsumexp(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the logsumexp of each query's scores, ``[B, heads, N]``, float32, in float64 for
    float64 inputs. A slice of queries is computed at a time; for a gradient its scores are
    recomputed, not kept."""
    images, heads, n, _ = query.shape
    step = max(1, SLICE // (images * heads * key.shape[-2]))
    dtype = torch.promote_types(query.dtype, torch.float32)
    scaled = key.to(dtype) * scale

    def of_slice(part: Tensor, scaled: Tensor, mask: Tensor | None) -> Tensor:
        scores = part.to(dtype) @ scaled.mT
        return (scores if mask is None else scores + mask).logsumexp(-1)

    parts = []
    for start in range(0, n, step):
        rows = slice(start, start + step)
        of_rows = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        # With a graph the scores of a slice are recomputed in the backward pass: all of them would
        # be [heads, N, T].
        given = query[:, :, rows], scaled, of_rows
        graph = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        parts.append(
            checkpoint(of_slice, *given, use_reentrant=False) if graph else of_slice(*given)
        )
    return torch.cat(parts, dim=2)


class _Rows(NamedTuple):
    """Rows of the batch that are computed at a time."""

    start: int
    number: int

    def of(self, x: Tensor) -> Tensor:
        start, number = self
        return x if number == x.shape[0] else x.narrow(0, start, number)


def _parts(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype
) -> Iterator[tuple[Tensor, _Rows, slice]]:
    """Yield the scores of some rows of the batch, or of some heads of one row, ``[rows, heads, N,
    T]`` in one buffer, which rows, and which heads."""
    batch, heads, n, _ = query.shape
    t = key.shape[2]
    at_once = at_a_time(query.device) // (n * t)  # heads
    step = min(batch, max(1, at_once // heads))
    head_step = min(heads, max(1, at_once))
    buffer = torch.empty(step * head_step, n, t, dtype=dtype, device=query.device)
    for first in range(0, batch, step):
        rows = _Rows(first, min(step, batch - first))
        for start in range(0, heads, head_step):
            some = slice(start, min(start + head_step, heads))
            keys = _folded(rows.of(key), some, dtype)
            out = buffer if buffer.shape[0] == keys.shape[0] else buffer[: keys.shape[0]]
            by_head = out.view(rows.number, -1, n, t)
            if mask is not None:
                of_mask = mask if mask.shape[0] == 1 else rows.of(mask)
                by_head.copy_(of_mask if of_mask.shape[1] == 1 else of_mask[:, some])
            queries = _folded(rows.of(query), some, dtype)
            out.baddbmm_(queries, keys.mT, beta=int(mask is not None), alpha=scale)
            yield by_head, rows, some


def at_a_time(device: torch.device) -> int:
    """Return how many probabilities are computed at a time."""
    return MAX_PROBS_ON_CPU if device.type == "cpu" else MAX_PROBS_AT_ONCE


def _over_heads(probs: Tensor) -> Tensor:
    """Return the sum over heads, ``[rows, N, T]``; of one it would be a copy."""
    return probs.squeeze(1) if probs.shape[1] == 1 else probs.sum(1)


def _folded(x: Tensor, heads: slice, dtype: torch.dtype) -> Tensor:
    x = x if heads.stop - heads.start == x.shape[1] else x[:, heads]
    if x.shape[0] > 1 and x.dtype != dtype:  # one copy, not two
        x = x.to(dtype, memory_format=torch.contiguous_format)
    return x.flatten(0, 1).to(dtype)
