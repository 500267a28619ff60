"""Attention added to a running sum over heads.

    record_softmax(total, query, key, mask, scale)        total += softmax, summed over heads
    add_softmax(total, query, key, mask, scale)           the same where nothing is compiled
    add_share(total, query, key, mask, scale, logsumexp)  the same for some of the keys
    logsumexp(query, key, mask, scale)                    input of the last
    add_attention(total, query, key, keys=...)            whichever is cheaper, for others' code

Each is computed by torch's own operations, the same on every device
(:mod:`sdattn.attention.plain`). The first is one operation to torch, so that a compiled model stays
in one graph; it is registered by ``torch.library.Library``, since the usual wrapper, ``custom_op``,
loads torch's compiler at the first call and takes longer for each. Where nothing is compiled, to
find an operation takes torch as long as a small layer.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import update_wrapper
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

from . import plain
from .modes import no_autocast

P = ParamSpec("P")
R = TypeVar("R")
FEW_KEYS = 512  # up to which one softmax is made if the kernel gives no logsumexp


def record_softmax(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    columns: Sequence[int] | None = None,
) -> None:
    """Add ``softmax(scale * query @ key.T + mask)``, summed over heads, to ``total``; no gradient.

    Args:
        total: float32 ``[B, N, T]``, or only ``columns`` of it if given.
        query: ``[B, heads, N, d]``, any floating dtype and strides.
        key: ``[B, heads, T, d]``.
        mask: None or the addend to the scores, ``[B or 1, heads or 1, N or 1, T]``, floating. A row
            that may attend to nothing adds nothing.
        columns: keys to add; the softmax is over all keys.
    """
    torch.ops.sdattn.record_softmax.default(total, query, key, mask, scale, columns)


def _outside_modes(implementation: Callable[P, R]) -> Callable[P, R]:
    """Return a function that no mode of its caller reaches, and that has no gradient."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), no_autocast():
            return implementation(*args, **kwargs)

    return update_wrapper(run, implementation)


add_softmax = _outside_modes(plain.add_softmax)
add_share = _outside_modes(plain.add_share)
logsumexp = _outside_modes(plain.logsumexp)


@torch.no_grad()
def add_attention(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None = None,
    scale: float | None = None,
    keys: slice = slice(None),
) -> None:
    """Add the attention to some keys, summed over heads, to ``total``; no gradient.

        total = torch.zeros(1, 4096, 512)              # FLUX: the image's attention to the text
        add_attention(total, query[:, :, 512:], key, keys=slice(0, 512))

    Nothing as large as ``[heads, N, T]`` is made for all heads of a large layer.

    Args:
        total: float32 ``[B, N, shown keys]``.
        query: ``[B, heads, N, d]``, any floating dtype and strides.
        key: ``[B, heads, T, d]``, all keys that the softmax is over.
        mask: as torch takes it, broadcast to ``[B, heads, N, T]``: added to the scores, or bool
            where True takes part.
        scale: factor of the scores (default: ``1 / sqrt(d)``).
        keys: keys to show.
    """
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    first, last, _ = keys.indices(key.shape[2])
    if mask is not None:
        mask = addend(mask[(None,) * (4 - mask.ndim)])
    # One softmax over all keys is cheaper than a logsumexp and then each share.
    if key.shape[2] <= FEW_KEYS:
        columns = None if last - first == key.shape[2] else range(first, last)
        add_softmax(total, query, key, mask, scale, columns)
        return
    of_rows = logsumexp(query, key, mask, scale)
    mask = None if mask is None else mask[..., keys]
    add_share(total, query, key[:, :, keys], mask, scale, of_rows)


def addend(mask: Tensor | None) -> Tensor | None:
    """Return a mask as an addend to the scores; in a bool mask, True takes part."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)


def _nothing(*_: object) -> None: ...


_library = torch.library.Library("sdattn", "DEF")
_NAME = _library.define(
    "record_softmax(Tensor(a!) total, Tensor query, Tensor key, Tensor? mask, float scale, "
    "int[]? columns=None) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl(_NAME, add_softmax, "CompositeExplicitAutograd")
torch.library.register_fake(f"sdattn::{_NAME}", _nothing, lib=_library)
