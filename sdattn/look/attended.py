"""`Attended`: what the kept rows of one call of a layer attended to, computed on demand.

Its rows are chosen on the call, see :mod:`sdattn.attention.calls`; `view` makes it of a call. A
faster kernel is one more subclass, with ``probs`` and perhaps an ``add_to`` of its own.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property

import torch
from torch import Tensor

from ..attention import attention_probs, plain
from ..attention.calls import ALL, AttentionCall, row_index
from ..attention.device_copies import DeviceCopies, chosen
from ..attention.recording import FEW_KEYS, add_share, add_softmax, addend, logsumexp

Columns = Sequence[int] | None  # keys; None for all


class HeadSums(ABC):
    """Sums over the heads of one call of one layer: its rows, heads, N queries, T key columns."""

    def __init__(self, batch: int, heads: int, cells: int, keys: int):
        self.batch = batch
        self.heads = heads
        self.cells = cells
        self.keys = keys

    @abstractmethod
    def head_sums(self, columns: Columns) -> Iterator[Tensor]:
        """Yield sums over some heads each, float32 ``[batch, N, T]``; together, over all heads."""

    @abstractmethod
    def together(self, frames: int) -> HeadSums:
        """Return the same for videos whose frames are rows: one row each, frame by frame."""

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        """Add the sum over heads to ``total`` in place, float32 ``[batch, N, T]``, without
        gradient, and return it; None makes a new tensor."""
        for part in self.head_sums(columns):
            total = part if total is None else total.add_(part)
        assert total is not None
        return total


class Attended(HeadSums):
    """The attention of one call of one layer, head by head."""

    @abstractmethod
    def probs(self, heads: slice, columns: Columns) -> Tensor:
        """Return the probabilities of some heads and columns, float32 ``[batch, heads, N, T]``, in
        a new tensor; the softmax is over all keys."""

    def together(self, frames: int) -> Attended:
        return FramesTogether(self, frames)

    def every_head(self, columns: Columns) -> Tensor:
        first, *more = self._parts(columns)
        return torch.cat([first, *more], dim=1) if more else first

    def some_heads(self, heads: Sequence[int], columns: Columns) -> Tensor:
        """Return some heads as :meth:`every_head` does all."""
        return chosen(self.every_head(columns), 1, tuple(heads))

    def head_sums(self, columns: Columns) -> Iterator[Tensor]:
        for part in self._parts(columns):
            yield part.sum(1)

    def _parts(self, columns: Columns) -> Iterator[Tensor]:
        step = max(1, plain.MAX_PROBS_AT_ONCE // (self.batch * self.cells * self.keys))
        for start in range(0, self.heads, step):
            yield self.probs(slice(start, min(start + step, self.heads)), columns)


def chosen_columns(probs: Tensor, columns: Columns, dim: int = -1) -> Tensor:
    return probs if columns is None else chosen(probs, dim, tuple(columns))


class ByQuery(Attended):
    """The attention of one call as it is, whose queries can be chosen."""

    @abstractmethod
    def of_queries(self, queries: Columns) -> ByQuery:
        """Return the same for some queries, None for all."""

    def some_heads(self, heads: Sequence[int], columns: Columns) -> Tensor:
        # the others are neither computed nor copied
        span = row_index(tuple(heads))
        if isinstance(span, slice):
            return self.probs(span, columns)
        return torch.cat([self.probs(slice(n, n + 1), columns) for n in heads], dim=1)


class GivenProbs(ByQuery):
    """Probabilities ``[B, heads, N, T]`` that were made, any dtype; what is returned is a copy."""

    def __init__(self, given: Tensor):
        super().__init__(*given.shape)
        self.given = given

    def of_queries(self, queries: Columns) -> ByQuery:
        return GivenProbs(chosen_columns(self.given, queries, dim=2))

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        some = chosen_columns(self.given[:, heads], columns)
        return some.to(torch.float32, copy=columns is None)

    def head_sums(self, columns: Columns) -> Iterator[Tensor]:
        yield chosen_columns(self.given, columns).sum(1, dtype=torch.float32)


class Softmax(ByQuery):
    """The softmax of a call's query and key, ``[B, heads, ...]`` with a mask of four axes; ``keys``
    are the ones shown, out of all that it is over."""

    def __init__(self, call: AttentionCall, keys: slice = ALL):
        batch, heads, cells, every = call.shape
        first, last, _ = keys.indices(every)
        super().__init__(batch, heads, cells, last - first)
        self.call = call
        self.shown = slice(first, last)
        self._shows_all = last - first == every
        self.scale = 1 / math.sqrt(call.query.shape[-1]) if call.scale is None else call.scale

    def of_queries(self, queries: Columns) -> ByQuery:
        some = ALL if queries is None else tuple(queries)
        return Softmax(self.call.between(some), self.shown)

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        call = self.call
        mask = addend(self.call.mask)
        query = call.query[:, heads].float()
        key = call.key[:, heads]
        mask = mask if mask is None or mask.shape[1] == 1 else mask[:, heads]
        if call.logsumexp is None and self._shows_all:
            probs = attention_probs(query, key.float(), mask, scale=self.scale)
            return chosen_columns(probs, columns)
        # What _of_rows computes has no gradient.
        needs_graph = call.query.requires_grad or call.key.requires_grad
        if call.logsumexp is None and needs_graph and torch.is_grad_enabled():
            of_rows = plain.logsumexp(query, key, mask, self.scale)
        else:
            of_rows = self._of_rows[:, heads]
        shown = chosen_columns(key[:, :, self.shown], columns, dim=2)
        scores = query @ (shown.float() * self.scale).mT
        if mask is not None:
            scores += chosen_columns(mask[..., self.shown], columns)
        return scores.sub_(of_rows.unsqueeze(-1)).exp_()

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        call = self.call
        mask = addend(self.call.mask)
        if total is None:
            shape = self.batch, self.cells, self.keys if columns is None else len(columns)
            total = torch.zeros(shape, dtype=torch.float32, device=call.query.device)
        # One softmax over all keys is cheaper than a logsumexp and then each share.
        if call.logsumexp is None and (self._shows_all or call.key.shape[2] <= FEW_KEYS):
            if not self._shows_all:  # columns of the keys that are shown
                shown = range(self.shown.start, self.shown.stop)
                columns = list(shown) if columns is None else [shown[c] for c in columns]
            add_softmax(total, call.query, call.key, mask, self.scale, columns)
            return total
        # Many: exp(scores - logsumexp) for the shown keys only.
        key = call.key[:, :, self.shown]
        mask = mask if mask is None else mask[..., self.shown]
        add_share(total, call.query, key, mask, self.scale, self._of_rows, columns)
        return total

    @cached_property
    def _of_rows(self) -> Tensor:
        """The logsumexp ``[B, heads, N]``, computed if the kernel did not give it."""
        call = self.call
        if call.logsumexp is not None:
            return call.logsumexp
        return logsumexp(call.query, call.key, addend(call.mask), self.scale)


def softmax_of(call: AttentionCall, queries: slice = ALL, keys: slice = ALL) -> ByQuery:
    """Return the attention of some queries to some keys; the softmax is over all."""
    if call.probs is not None:
        return GivenProbs(call.probs[:, :, queries, keys])
    return Softmax(call.between(queries), keys)


def without_padding(call: AttentionCall, queries: slice, kept: DeviceCopies) -> AttentionCall:
    """Return a call of some queries; those not ``kept``, bool ``[B, 1, 1, N]``, have zero
    attention: exp(scores - inf)."""
    some = call.between(queries)
    if some.logsumexp is None:
        scale = 1 / math.sqrt(some.query.shape[-1]) if some.scale is None else some.scale
        some.logsumexp = plain.logsumexp(some.query, some.key, addend(some.mask), scale)
    padding = ~kept.on(some.query.device)[:, 0]
    some.logsumexp = some.logsumexp.masked_fill(padding, math.inf)
    return some


class SideBySide(Attended):
    """Several attentions of the same queries, key after key; n means n keys with zero attention."""

    def __init__(self, first: Attended, others: Sequence[Attended | int]):
        more = sum(other if isinstance(other, int) else other.keys for other in others)
        super().__init__(first.batch, first.heads, first.cells, first.keys + more)
        self.first = first
        self.others = others

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        parts = [self.first.probs(heads, None)]
        for other in self.others:
            if isinstance(other, int):
                parts.append(parts[0].new_zeros((*parts[0].shape[:-1], other)))
            else:
                parts.append(other.probs(heads, None))
        return chosen_columns(torch.cat(parts, dim=-1), columns)

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        # If only a prompt's words are kept, nothing need be joined.
        if columns is not None and all(column < self.first.keys for column in columns):
            return self.first.add_to(total, columns)
        return super().add_to(total, columns)


class Turned(Attended):
    """Attention turned round: the keys are its cells, and each query is a column."""

    def __init__(self, looks: ByQuery):
        super().__init__(looks.batch, looks.heads, looks.keys, looks.cells)
        self.looks = looks

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        return self.looks.of_queries(columns).probs(heads, None).mT

    def some_heads(self, heads: Sequence[int], columns: Columns) -> Tensor:
        return self.looks.of_queries(columns).some_heads(heads, None).mT


class FramesTogether(Attended):
    """A video whose ``frames`` are rows of the batch, as one row: its cells, frame by frame."""

    def __init__(self, single: Attended, frames: int):
        super().__init__(single.batch // frames, single.heads, frames * single.cells, single.keys)
        self.single = single
        self.frames = frames

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        return self._in_row(self.single.probs(heads, columns))

    def some_heads(self, heads: Sequence[int], columns: Columns) -> Tensor:
        return self._in_row(self.single.some_heads(heads, columns))

    def _in_row(self, probs: Tensor) -> Tensor:  # of [videos*frames, heads, N, T]
        return probs.unflatten(0, (self.batch, -1)).transpose(1, 2).flatten(2, 3)

    def head_sums(self, columns: Columns) -> Iterator[Tensor]:
        return map(self._together, self.single.head_sums(columns))

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        if total is not None:
            total = total.view(self.single.batch, self.single.cells, -1)
        return self._together(self.single.add_to(total, columns))

    def _together(self, sums: Tensor) -> Tensor:
        return sums.view(self.batch, self.cells, -1)


class AmongKeys(Attended):
    """The softmax over the text's ``kept`` keys, bool ``[B, 1, 1, T]``: the others' probabilities
    are removed and the rest is divided by its sum. Image prompts stay."""

    def __init__(self, whole: Attended, kept: DeviceCopies):
        super().__init__(whole.batch, whole.heads, whole.cells, whole.keys)
        self.whole = whole
        self.kept = kept

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        probs = self.whole.probs(heads, None)
        n_text = self.kept.own.shape[-1]
        text = probs[..., :n_text] * self.kept.on(probs.device)
        text = text / text.sum(-1, keepdim=True).clamp(min=torch.finfo(text.dtype).tiny)
        return chosen_columns(torch.cat([text, probs[..., n_text:]], dim=-1), columns)
