"""Attention summed over heads (in the dtype of ``total``) and its logsumexp, in plain torch.

Source: Dao et al. 2022, "FlashAttention", algorithm 1, for the logsumexp.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .device_copies import chosen

PART = 1 << 23  # probabilities computed at a time: all heads of SD 1.x, some of SD3
SLICE = 1 << 24  # scores in one slice of queries


def add_softmax(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    columns: Sequence[int] | None = None,
) -> None:
    sums = total if columns is None else total.new_zeros(*total.shape[:2], key.shape[2])
    for scores, _ in _parts(query, key, mask, scale, sums.dtype):
        shut = None if mask is None else scores.amax(-1, keepdim=True) == -math.inf
        probs = torch.softmax(scores, -1)  # in place it is slower on a CPU
        sums.add_((probs if shut is None else probs.masked_fill_(shut, 0.0)).sum(1))
    if columns is not None:
        total.add_(chosen(sums, -1, tuple(columns)))


def add_share(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    logsumexp: Tensor,
    columns: Sequence[int] | None = None,
) -> None:
    if columns is not None:
        key = chosen(key, 2, tuple(columns))
        mask = mask if mask is None else chosen(mask, -1, tuple(columns))
    of_rows = logsumexp.to(total.dtype).unsqueeze(-1)  # [B, heads, N, 1]
    of_rows = of_rows.masked_fill(of_rows == -math.inf, 0.0)  # rows whose keys are all excluded
    for scores, heads in _parts(query, key, mask, scale, total.dtype):
        total.add_(scores.sub_(of_rows[:, heads]).exp_().sum(1))


def logsumexp(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return :func:`sdattn.attention.recording.logsumexp`, a slice of queries at a time, in float64
    for float64 inputs; for a gradient, a slice's scores are recomputed, not kept."""
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


def _parts(
    query: Tensor, key: Tensor, mask: Tensor | None, scale: float, dtype: torch.dtype
) -> Iterator[tuple[Tensor, slice]]:
    """Yield the scores of a few heads at a time, ``[B, heads, N, T]`` in one buffer, and which."""
    (batch, heads, n, _), t = query.shape, key.shape[2]
    step = min(heads, max(1, PART // (batch * n * t)))
    buffer = torch.empty(batch * step, n, t, dtype=dtype, device=query.device)
    for start in range(0, heads, step):
        some, all_at_once = slice(start, min(start + step, heads)), step == heads
        of_keys = _folded(key if all_at_once else key[:, some], dtype)
        out = buffer[: len(of_keys)]
        by_head = out.view(batch, -1, n, t)
        if mask is not None:
            by_head.copy_(mask if mask.shape[1] == 1 else mask[:, some])
        of_queries = _folded(query if all_at_once else query[:, some], dtype)
        out.baddbmm_(of_queries, of_keys.mT, beta=int(mask is not None), alpha=scale)
        yield by_head, some


def _folded(x: Tensor, dtype: torch.dtype) -> Tensor:
    if len(x) == 1:
        return x[0].to(dtype)
    return x.to(dtype, memory_format=torch.contiguous_format).flatten(0, 1)
