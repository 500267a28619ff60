"""Triton's kernels launched for tensors: their tiling, and which shapes and strides they get."""

from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
from torch import Tensor

from ..device_copies import index_on
from . import kernels

CHUNK = 16  # of a head's width that is multiplied at a time; the width is not constexpr: a loop
# that is unrolled would take all registers for its addresses
TILE = 2048  # scores of one head that a program holds
ROWS = 32  # queries of a program that holds some of the keys
OPTIONS = {"num_warps": 8, "enable_fp_fusion": True}  # the default of the second is to change


def add_softmax(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    columns: Sequence[int] | None = None,
) -> None:
    """As :func:`sdattn.attention.recording.record_softmax`; no column may come twice."""
    (batch, heads, n, width), t = query.shape, key.shape[2]
    block_t = tiling(t)
    block_n = max(16, TILE // block_t)
    # Where there is no mask or no choice of columns the key stands in: a kernel takes no None.
    slots = key if columns is None else _on(total.device, _slots(tuple(columns), t))
    with torch.cuda.device_of(total):
        kernels.softmax_sums[triton.cdiv(n, block_n), batch](
            total,
            query,
            key,
            key if mask is None else mask,
            slots,
            scale,
            heads,
            n,
            t,
            *total.stride(),
            *query.stride(),
            *key.stride(),
            *_strides(mask, query, t),
            masked=mask is not None,
            chosen=columns is not None,
            widened=_widened(query),
            width=width,
            chunk=CHUNK,
            block_n=block_n,
            block_t=block_t,
            **OPTIONS,
        )


def add_share(
    total: Tensor,
    query: Tensor,
    key: Tensor,
    mask: Tensor | None,
    scale: float,
    logsumexp: Tensor,
    columns: Sequence[int] | None = None,
) -> None:
    """As :func:`sdattn.attention.recording.record_share`."""
    batch, heads, n, width = query.shape
    t = total.shape[2]
    block_t = min(64, tiling(t))
    block_n = ROWS
    with torch.cuda.device_of(total):
        kernels.share_sums[triton.cdiv(n, block_n), triton.cdiv(t, block_t), batch](
            total,
            query,
            key,
            key if mask is None else mask,
            key if columns is None else _on(total.device, columns),
            logsumexp,
            scale,
            heads,
            n,
            t,
            *total.stride(),
            *query.stride(),
            *key.stride(),
            *_strides(mask, query, key.shape[2]),
            *logsumexp.stride(),
            masked=mask is not None,
            chosen=columns is not None,
            widened=_widened(query),
            width=width,
            chunk=CHUNK,
            block_n=block_n,
            block_t=block_t,
            **OPTIONS,
        )


def logsumexp(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """As :func:`sdattn.attention.recording.logsumexp`."""
    (batch, heads, n, width), t = query.shape, key.shape[2]
    out = torch.empty(batch, heads, n, dtype=torch.float32, device=query.device)
    block_n, block_t = logsumexp_tile(query.dtype)
    with torch.cuda.device_of(query):
        kernels.row_logsumexp[triton.cdiv(n, block_n), heads, batch](
            out,
            query,
            key,
            key if mask is None else mask,
            scale,
            n,
            t,
            *out.stride()[:2],
            *query.stride(),
            *key.stride(),
            *_strides(mask, query, t),
            masked=mask is not None,
            widened=_widened(query),
            width=width,
            chunk=CHUNK,
            block_n=block_n,
            block_t=min(block_t, tiling(t)),
            **OPTIONS,
        )
    return out


def logsumexp_tile(dtype: torch.dtype) -> tuple[int, int]:
    """Queries and keys of a program: the largest of which no register is spilled."""
    return (16, 32) if dtype == torch.float32 else (ROWS, 64)


def tiling(keys: int) -> int:
    """Keys in a block that holds them all: a power of two, at least the 16 that a product needs."""
    return max(16, triton.next_power_of_2(keys))


def _widened(query: Tensor) -> bool:
    """Whether to multiply in float32: Triton's interpreter would multiply the bits of bfloat16."""
    return query.dtype == torch.bfloat16 and not query.is_cuda


def _strides(mask: Tensor | None, query: Tensor, keys: int) -> tuple[int, ...]:
    if mask is None:
        return 0, 0, 0, 0
    return mask.expand(*query.shape[:3], keys).stride()


@lru_cache(maxsize=64)
def _slots(columns: tuple[int, ...], keys: int) -> tuple[int, ...]:
    """Where each key's sums go, -1 for nowhere."""
    slots = [-1] * keys
    for slot, column in enumerate(columns):
        slots[column] = slot
    return tuple(slots)


def _on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    return index_on(device, tuple(numbers), torch.int32)
