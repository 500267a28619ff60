"""Attention added to a running sum over heads, as one torch operation per layer.

    record_softmax(total, query, key, mask, scale)             total += softmax, summed over heads
    record_share(total, query, key, mask, scale, logsumexp)    the same for some of the keys
    logsumexp(query, key, mask, scale)                         input of the second

    add_softmax(...)       the first without the operation, for calls that are not compiled
    add_attention(total, query, key, keys=...)    whichever is cheaper, for a host of its own

Each is computed by torch's own operations, the same on every device
(:mod:`sdattn.attention.plain`), and registered with torch by ``torch.library.Library``, so that a
compiled model stays in one graph. The usual wrapper, ``custom_op``, loads torch's compiler at
the first call and takes longer for each.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from . import plain
from .modes import no_autocast

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


def add_softmax(*given: Any) -> None:
    """Do as `record_softmax`. torch takes as long to find an operation as a small layer to run."""
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), no_autocast():
        plain.add_softmax(*given)


def record_share(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    logsumexp: Tensor,
    columns: Sequence[int] | None = None,
) -> None:
    """Add ``exp(scale * query @ key.T + mask - logsumexp)``, summed over heads, to ``total``.

    The keys are some of a softmax's; ``logsumexp``, float32 ``[B, heads, N]``, is over all of them.
    Other arguments as in :func:`record_softmax`.
    """
    torch.ops.sdattn.record_share.default(total, query, key, mask, scale, logsumexp, columns)


@torch.no_grad()
def logsumexp(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """Return the logsumexp of each query's scores, float32 ``[B, heads, N]``; without gradient."""
    return torch.ops.sdattn.logsumexp.default(query, key, mask, scale)


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
    with no_autocast():
        of_rows = plain.logsumexp(query, key, mask, scale)
        mask = None if mask is None else mask[..., keys]
        plain.add_share(total, query, key[:, :, keys], mask, scale, of_rows)


def addend(mask: Tensor | None) -> Tensor | None:
    """Return a mask as an addend to the scores; in a bool mask, True takes part."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)


def _fake_logsumexp(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return query.new_empty(query.shape[:3], dtype=torch.float32)


def _nothing(*_: object) -> None: ...


def _outside_modes(implementation: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operation that no mode of its caller reaches."""

    def run(*given: Any) -> Any:
        with torch.no_grad(), no_autocast():
            return implementation(*given)

    return run


_CALL = "Tensor query, Tensor key, Tensor? mask, float scale"
_OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    f"record_softmax(Tensor(a!) total, {_CALL}, int[]? columns=None) -> ()": (
        plain.add_softmax,
        _nothing,
    ),
    f"record_share(Tensor(a!) total, {_CALL}, Tensor logsumexp, int[]? columns=None) -> ()": (
        plain.add_share,
        _nothing,
    ),
    f"logsumexp({_CALL}) -> Tensor": (plain.logsumexp, _fake_logsumexp),
}


_library = torch.library.Library("sdattn", "DEF")
for _schema, (_implementation, _fake) in _OPERATIONS.items():
    _name = _library.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(_name, _outside_modes(_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"sdattn::{_name}", _fake, lib=_library)
