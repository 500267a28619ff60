"""What is handed to torch's ``scaled_dot_product_attention``, and the probabilities that follow.

A row of the softmax is ``exp(scores - logsumexp)``, where the logsumexp of a row is one number. So
where the logsumexp is known, the probabilities of some keys need the scores of those keys only. On
the CPU the kernel that makes the model's output gives the logsumexp as well; elsewhere it is
computed in slices of queries.

Source: Dao et al. 2022, "FlashAttention", algorithm 1, for the logsumexp.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ..attention import HALF_TYPES
from .attended import Attended, Columns, Rows

FLASH = 1  # of SDPBackend, what torch._fused_sdp_choice answers
SLICE = 1 << 24  # scores in one slice of queries, where the kernel gives no logsumexp
EXACT = 16  # of a larger logsumexp float32 holds too few digits for probabilities within 1e-5


@dataclass(eq=False)
class Seen:
    """One call of ``scaled_dot_product_attention``.

    Attributes:
        query: ``[B, heads, N, d]``.
        key: ``[B, heads, T, d]``.
        mask: None, or as torch takes it.
        scale: of the scores, ``1 / sqrt(d)`` by default.
        logsumexp: ``[B, heads, N]`` of the scaled scores, None where the kernel did not give it, or
            not exactly enough.
        plain: whether there was no dropout, no causal mask and a key head for each query head.
        value: ``[B, heads, T, d]``, and output, what was returned; set by those who need them.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    logsumexp: Tensor | None = None
    plain: bool = True
    value: Tensor = field(init=False)
    output: Tensor = field(init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, heads, queries, keys), where it was handed heads by themselves."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    def attended(self, queries: slice | None = None, keys: slice | None = None) -> Attended:
        """What some queries pay to some keys, None for all. The softmax is over all keys."""
        queries = queries or slice(0, self.shape[2])
        mask, logsumexp = self.mask, self.logsumexp
        if mask is not None:
            mask = mask[(None,) * (4 - mask.ndim)]
            mask = mask if mask.shape[2] == 1 else mask[:, :, queries]
        if logsumexp is not None:
            logsumexp = logsumexp[:, :, queries, None]
        query, keys = self.query[:, :, queries], keys or slice(0, self.shape[3])
        scale = 1 / math.sqrt(query.shape[-1]) if self.scale is None else self.scale
        return Handed(query, self.key, keys, mask, scale, logsumexp)


class Handed(Attended):
    """Of what was handed to ``scaled_dot_product_attention``.

    Args:
        query: ``[B, heads, N, d]``.
        key: ``[B, heads, all keys, d]``.
        keys: the T of them that are shown.
        mask: None, an addend ``[B or 1, heads or 1, N or 1, all keys]``, or bool.
        scale: of the scores.
        logsumexp: ``[B, heads, N, 1]`` of the scaled scores; None where it is to be computed.
    """

    def __init__(
        self,
        query: Tensor,
        key: Tensor,
        keys: slice,
        mask: Tensor | None,
        scale: float,
        logsumexp: Tensor | None,
    ):
        batch, heads, cells, _ = query.shape
        super().__init__(batch, heads, cells, keys.stop - keys.start)
        self.query, self.key, self.shown = query, key, keys
        self.mask, self.scale, self.logsumexp = mask, scale, logsumexp

    def of(self, rows: Rows) -> Attended:
        mask = self.mask if self.mask is None or len(self.mask) == 1 else self.mask[rows]
        logsumexp = None if self.logsumexp is None else self.logsumexp[rows]
        given = self.query[rows], self.key[rows], self.shown, mask
        return Handed(*given, self.scale, logsumexp)

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        query, key, mask = self.query[:, heads].float(), self.key[:, heads], self._addend
        mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        if self.logsumexp is not None:
            logsumexp = self.logsumexp[:, heads]
        else:
            logsumexp = _logsumexp(query, key.float() * self.scale, mask)
        scores = query @ (_chosen(key, self.shown, columns).float() * self.scale).mT
        if mask is not None:
            scores += _chosen(mask.mT, self.shown, columns).mT
        return scores.sub_(logsumexp).exp_()

    @cached_property
    def _addend(self) -> Tensor | None:
        mask = self.mask
        if mask is not None and mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)
        return None if mask is None else mask.float()


def exact_call(calls: Sequence[Seen], *shape: int) -> Seen | None:
    """The call, if there was one only, of this shape, and its kernel gave the logsumexp.

    In half types the kernel gives it with less precision than a softmax here has.
    """
    if len(calls) != 1 or calls[0].shape != shape or calls[0].query.dtype in HALF_TYPES:
        return None
    return calls[0] if calls[0].logsumexp is not None else None


def _chosen(every: Tensor, keys: slice, columns: Columns) -> Tensor:
    """Of ``[..., T, width]`` some keys, or some columns of those."""
    chosen = every[..., keys, :]
    return chosen if columns is None else chosen[..., list(columns), :]


def _logsumexp(query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
    """Of each query's scores over all keys, ``[images, heads, N, 1]``, a slice at a time.

    Where a gradient is needed, the scores of a slice are computed again for it, not kept.
    """
    images, heads, n, _ = query.shape
    step = max(1, SLICE // (images * heads * key.shape[-2]))

    def of_slice(part: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        scores = part @ key.mT
        return (scores if mask is None else scores + mask).logsumexp(-1, keepdim=True)

    parts = []
    for start in range(0, n, step):
        rows = slice(start, start + step)
        of_rows = mask if mask is None or mask.shape[2] == 1 else mask[:, :, rows]
        given = query[:, :, rows], key, of_rows
        graph = torch.is_grad_enabled() and (query.requires_grad or key.requires_grad)
        parts.append(
            checkpoint(of_slice, *given, use_reentrant=False) if graph else of_slice(*given)
        )
    return torch.cat(parts, dim=2)


class SdpaWatch(TorchFunctionMode):
    """See the calls of ``scaled_dot_product_attention`` in a block of code, in this thread only.

    The output of each is that of the very kernel that torch would choose.

    Attributes:
        calls: in their order.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not nn.functional.scaled_dot_product_attention:
            return func(*args, **kwargs)
        return self._attend(partial(func, *args, **kwargs), *args, **kwargs)

    def _attend(
        self,
        attend: Callable[[], Tensor],
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        plain = not (dropout_p or is_causal or enable_gqa)
        logsumexp = None
        if plain and attn_mask is None and _kernel_tells(query, key, value, scale):
            output, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                query, key, value, 0.0, False, scale=scale
            )
            logsumexp = logsumexp if logsumexp.abs().max() <= EXACT else None
        else:
            output = attend()
        self.calls.append(Seen(query, key, attn_mask, scale, logsumexp, plain))
        self.calls[-1].value = value
        return output


def _kernel_tells(query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> bool:
    """Whether torch would run the CPU's flash kernel, whose logsumexp is then free.

    With a mask it would too, but not without preparing it first; under autocast, not without
    casting; with a graph the logsumexp has no gradient.
    """
    given = query, key, value
    if query.device.type != "cpu" or torch.is_autocast_enabled("cpu"):
        return False
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given):
        return False
    return torch._fused_sdp_choice(*given, scale=scale) == FLASH
