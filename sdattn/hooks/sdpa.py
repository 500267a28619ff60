"""What is handed to torch's ``scaled_dot_product_attention``, and the probabilities that follow.

A row of the softmax is ``exp(scores - logsumexp)``, where the logsumexp of a row is one number. So
where the logsumexp is known, the probabilities of some keys need the scores of those keys only. The
kernel that makes the model's output gives it as well, in the cases of
:mod:`sdattn.hooks.kernel_logsumexp`; elsewhere it is computed beside it.

Source: Dao et al. 2022, "FlashAttention", algorithm 1, for the logsumexp.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..attention import HALF_TYPES, plain
from ..attention.core import causal_mask
from ..attention.recording import logsumexp, record_share, record_softmax
from .attended import (
    Attended,
    Columns,
    Rows,
    addend,
    chosen_columns,
    chosen_mask,
    chosen_rows,
    new_sums,
)
from .kernel_logsumexp import Operands, attend_with_logsumexp, backend_with_logsumexp
from .replaced import TORCHS, outer_mode, unlike_torchs

FEW = 512  # keys, of which a softmax is made at once where the kernel gives no logsumexp


@dataclass(eq=False)
class SdpaCall:
    """One call of ``scaled_dot_product_attention``.

    Attributes:
        query: ``[B, heads, N, d]``; with other axes before the last two as well, see
            :meth:`by_head`.
        key: ``[B, heads, T, d]``.
        mask: None, or as torch takes it.
        scale: of the scores, ``1 / sqrt(d)`` by default.
        logsumexp: ``[B, heads, N]`` of the scaled scores, None where the kernel did not give it, or
            not exactly enough.
        dropout, causal: whether there was any; a causal mask comes beside ``mask``.
        value: ``[B, heads, T, d]``.
        output: what was returned, ``[B, heads, N, d]``.
    """

    query: Tensor
    key: Tensor
    mask: Tensor | None = None
    scale: float | None = None
    logsumexp: Tensor | None = None
    dropout: bool = False
    causal: bool = False
    value: Tensor = field(init=False)
    output: Tensor = field(init=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """(batch, heads, queries, keys), where it was handed heads by themselves."""
        return (*self.query.shape[:-1], self.key.shape[-2])

    def by_head(self, batch: int, heads: int) -> "SdpaCall | None":
        """Return the call with the axes ``[batch, heads, ...]``, whichever ones torch was handed:
        heads folded into the batch, keys or a mask that stand for several rows or heads, a causal
        mask. None where it was not for so many rows and heads."""
        shape = (batch, heads)
        if self.query.shape[:-2] == self.key.shape[:-2] == shape and not self.causal:
            return None if self.dropout else self
        leading = self.output.shape[:-2]
        if self.dropout or leading.numel() != batch * heads:
            return None

        def spread(part: Tensor) -> Tensor:
            if part.ndim > 2 and part.shape[-3] < leading[-1] > 1 < part.shape[-3]:  # grouped
                part = part.repeat_interleave(leading[-1] // part.shape[-3], dim=-3)
            return part.expand(*leading, -1, -1).reshape(*shape, *part.shape[-2:])

        mask, logsumexp = self.mask, self.logsumexp
        if self.causal:
            mask = causal_mask(self.query.shape[-2], self.key.shape[-2], self.query.device)
        elif mask is not None and mask.ndim > 2:
            mask = spread(mask)
        if logsumexp is not None:
            logsumexp = logsumexp.reshape(*shape, -1)
        call = SdpaCall(spread(self.query), spread(self.key), mask, self.scale, logsumexp)
        call.value, call.output = spread(self.value), spread(self.output)
        return call

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
        return SdpaAttended(query, self.key, keys, mask, scale, logsumexp)


class SdpaAttended(Attended):
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
        query, key = chosen_rows(self.query, rows), chosen_rows(self.key, rows)
        logsumexp = None if self.logsumexp is None else chosen_rows(self.logsumexp, rows)
        mask = chosen_mask(self.mask, rows)
        return SdpaAttended(query, key, self.shown, mask, self.scale, logsumexp)

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        query, key = self.query[:, heads].float(), self.key[:, heads]
        mask = addend(self.mask)
        mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        # The operation behind _of_rows has no gradient; where one is wanted torch's own does it.
        if self.logsumexp is None and self._has_graph:
            of_rows = plain.logsumexp(query, key, mask, self.scale).unsqueeze(-1)
        else:
            of_rows = self._of_rows[:, heads]
        shown = chosen_columns(key[:, :, self.shown], columns, dim=2)
        scores = query @ (shown.float() * self.scale).mT
        if mask is not None:
            scores += chosen_columns(mask[..., self.shown], columns)
        return scores.sub_(of_rows).exp_()

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        total = new_sums(self, self.query, columns) if total is None else total
        query, key, mask = self.query, self.key, addend(self.mask)
        # Few keys: one softmax over all of them is cheaper than a logsumexp first.
        if self.logsumexp is None and key.shape[2] <= FEW:
            shown = range(self.shown.start, self.shown.stop)
            of_all = shown if columns is None else [shown[column] for column in columns]
            every = list(of_all) == list(range(key.shape[2]))
            record_softmax(total, query, key, mask, self.scale, None if every else list(of_all))
            return total
        # Many: exp(scores - logsumexp) of the keys that are shown, and of no others.
        mask = mask if mask is None else mask[..., self.shown]
        of_rows = self._of_rows.squeeze(-1)
        record_share(total, query, key[:, :, self.shown], mask, self.scale, of_rows, columns)
        return total

    @cached_property
    def _of_rows(self) -> Tensor:
        """The logsumexp, computed where the kernel did not give it, ``[B, heads, N, 1]``."""
        if self.logsumexp is not None:
            return self.logsumexp
        return logsumexp(self.query, self.key, addend(self.mask), self.scale).unsqueeze(-1)

    @property
    def _has_graph(self) -> bool:
        return torch.is_grad_enabled() and (self.query.requires_grad or self.key.requires_grad)


def exact_call(calls: Sequence[SdpaCall], *shape: int) -> SdpaCall | None:
    """The call, if there was one only, of this shape, and its kernel gave the logsumexp.

    In half types the kernel gives it with less precision than a softmax here has.
    """
    if len(calls) != 1 or calls[0].shape != shape or calls[0].query.dtype in HALF_TYPES:
        return None
    return calls[0] if calls[0].logsumexp is not None else None


class SdpaWatch(TorchFunctionMode):
    """See the calls of ``scaled_dot_product_attention`` in a block of code, in this thread only.

    The output of each is that of the very kernel that torch would choose.

    Attributes:
        calls: in their order.
        unlike: what answered in the place of torch's function, a call each, and how far its output
            is from torch's, see :func:`sdattn.hooks.replaced.unlike_torchs`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.unlike: list[tuple[Any, Tensor]] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not TORCHS:
            return func(*args, **kwargs)
        return self.attend(partial(func, *args, **kwargs), outer_mode(), *args, **kwargs)

    def attend(
        self,
        attend: "partial[Tensor]",
        by: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        **unknown: Any,
    ) -> Tensor:
        """Have ``attend`` make the output, of the arguments that follow ``by``, and note it."""
        call, logsumexp, inside = Operands(query, key, value, scale), None, len(self.calls)
        plain = attn_mask is None and not (dropout_p or is_causal or enable_gqa or unknown)
        if plain and by is None and (backend := backend_with_logsumexp(call)):
            output, logsumexp = attend_with_logsumexp(attend, backend, call)
        else:
            output = attend()
        if by is not None:
            del self.calls[inside:]  # it is judged by what it was given, not by what it calls
            unlike = torch.tensor(math.inf)  # with dropout, which would draw random numbers again
            if not dropout_p:
                unlike = unlike_torchs(output, attend.args, attend.keywords)
            self.unlike.append((by, unlike))
        seen = SdpaCall(query, key, attn_mask, scale, logsumexp, bool(dropout_p), is_causal)
        seen.value, seen.output = value, output
        self.calls.append(seen)
        return output
