"""`AttentionCall`: what one layer computed, as far as it was seen. Rows are chosen here, before
anything is computed of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import Tensor

from .core import causal_mask, split_heads
from .device_copies import DeviceCopies, chosen

Rows = slice | tuple[int, ...]  # of the batch
Spans = tuple[slice, slice]  # positions of the image's tokens and of the text's
ALL = slice(None)
UNKNOWN: Any = None  # in place of a tensor that was not seen


class LayerCall(Protocol):
    """A call of a layer, of which some rows are shown.

    Attributes:
        batch: rows of the batch that the model was called for.
        rows_apart: how far each row's keys are from every row's own, in self-attention.
    """

    @property
    def batch(self) -> int: ...

    @property
    def rows_apart(self) -> Mapping[str, Tensor]: ...

    def of_rows(self, rows: Rows) -> AttentionCall:
        """Return the inputs of the probabilities for some rows of the batch."""


@dataclass(eq=False)
class AttentionCall:
    """One call of an attention layer: its inputs and what it computed, as far as seen.

    Unknown values are None. A kernel shows everything but ``probs``; a layer's projections show
    only query and key; a product with the values shows everything but query and key.

    Attributes:
        query: ``[B, heads, N, d]``, normed and rotated; a kernel's may have further axes before the
            last two.
        key, value: ``[B, heads, T, d]``.
        mask: as torch takes it: added to the scores, or bool where True takes part.
        scale: factor of the scores, or None for ``1 / sqrt(d)``.
        logsumexp: ``[B, heads, N]`` of the scaled scores; None if the kernel's is not exact enough.
        probs: ``[B, heads, N, T]``, which made the output.
        output: ``[B, heads, N, d]``, before the output projection.
        text: position of the text among the T tokens of joint attention, if the layer says it.
        causal: a causal mask comes in addition to ``mask``.
        spans: positions of the image's queries and the text's keys; None where all queries are the
            image's and all keys the text's (in self-attention, the image's).
        tokens: bool ``[B, 1, 1, T]``, the text's tokens, where rows are padded to the longest text.
        beside: attention of the same queries to further keys in a softmax of their own; n means n
            keys with zero attention.
        frames: rows for each row of the model's batch, if a video's frames are rows here only.
        rows_apart: distances of rows' keys in self-attention, see :mod:`sdattn.look.key_owners`.
    """

    query: Tensor = UNKNOWN
    key: Tensor = UNKNOWN
    value: Tensor = UNKNOWN
    mask: Tensor | None = None
    scale: float | None = None
    logsumexp: Tensor | None = None
    probs: Tensor | None = None
    output: Tensor = UNKNOWN
    text: slice | None = None
    dropout: bool = False
    causal: bool = False
    spans: Spans | None = None
    tokens: DeviceCopies | None = None
    beside: Sequence[AttentionCall | int] = ()
    frames: int = 1
    rows_apart: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        return self.shape[0] // self.frames

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @property
    def shape(self) -> tuple[int, ...]:
        if self.probs is not None:
            return tuple(self.probs.shape)
        return (*self.query.shape[:-1], self.key.shape[-2])

    def by_head(self, batch: int, heads: int) -> AttentionCall | None:
        """Return a kernel's call with the axes ``[batch, heads, ...]``, whatever it folded or
        shared; None if it was not for that many rows and heads."""
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

        mask = self.mask
        if self.causal:
            mask = causal_mask(self.query.shape[-2], self.key.shape[-2], self.query.device)
        elif mask is not None and mask.ndim > 2:
            mask = spread(mask)
        logsumexp = None if self.logsumexp is None else self.logsumexp.reshape(*shape, -1)
        query, key, value = (spread(part) for part in self.inputs)
        call = AttentionCall(query, key, value, mask, self.scale, logsumexp)
        call.output = spread(self.output)
        return call

    def of_rows(self, rows: Rows) -> AttentionCall:
        """Return the inputs of the probabilities for some rows of the batch."""
        some = self._inputs_of(rows)
        some.spans = self.spans
        some.frames = self.frames
        if self.tokens is not None:
            some.tokens = DeviceCopies(chosen_rows(self.tokens.own, rows))
        some.beside = [one if isinstance(one, int) else one.of_rows(rows) for one in self.beside]
        return some

    def _inputs_of(self, rows: Rows) -> AttentionCall:
        if self.probs is not None:
            return AttentionCall(probs=chosen_rows(self.probs, rows))
        mask = four_axes(self.mask)
        logsumexp = self.logsumexp
        if mask is not None and len(mask) > 1:
            mask = chosen_rows(mask, rows)
        if logsumexp is not None:
            logsumexp = chosen_rows(logsumexp, rows)
        query = chosen_rows(self.query, rows)
        key = chosen_rows(self.key, rows)
        return AttentionCall(query, key, mask=mask, scale=self.scale, logsumexp=logsumexp)

    def between(self, queries: Rows, keys: slice = ALL) -> AttentionCall:
        """Return the same for some queries, with some keys alone in the softmax."""
        if queries == keys == ALL and self.mask is None:
            return self
        if self.probs is not None:
            return AttentionCall(probs=chosen_rows(self.probs, queries, 2)[..., keys])
        mask = four_axes(self.mask)
        logsumexp = self.logsumexp
        if mask is not None:
            mask = mask[..., keys]
            mask = mask if mask.shape[2] == 1 else chosen_rows(mask, queries, 2)
        if logsumexp is not None:
            logsumexp = chosen_rows(logsumexp, queries, 2) if keys == ALL else None
        query = chosen_rows(self.query, queries, 2)
        key = self.key[:, :, keys]
        return AttentionCall(query, key, mask=mask, scale=self.scale, logsumexp=logsumexp)


class ProjectedCall:
    """The query ``[B, N, heads*d]`` and key ``[B, T, heads*d]`` of a plain layer, as its
    projections gave them: to split them for each layer would cost more than a small layer."""

    rows_apart: Mapping[str, Tensor] = {}

    def __init__(self, query: Tensor, key: Tensor, heads: int):
        self.query = query
        self.key = key
        self.heads = heads
        self.batch = query.shape[0]
        self.cells = query.shape[1]
        self.keys = key.shape[1]

    def of_rows(self, rows: Rows) -> AttentionCall:
        query = chosen_rows(self.query, rows)
        key = chosen_rows(self.key, rows)
        return AttentionCall(split_heads(query, self.heads), split_heads(key, self.heads))


def four_axes(mask: Tensor | None) -> Tensor | None:
    return mask if mask is None else mask[(None,) * (4 - mask.ndim)]


def row_index(rows: tuple[int, ...]) -> Rows:
    """Return rows of a batch, as a slice (which gives a view) if they follow each other."""
    span = range(rows[0], rows[-1] + 1)
    return slice(span.start, span.stop) if rows == tuple(span) else rows


def chosen_rows(tensor: Tensor, rows: Rows, dim: int = 0) -> Tensor:
    """Return some entries of one axis: rows of a batch, or queries; a view for a slice."""
    if not isinstance(rows, slice):
        return chosen(tensor, dim, rows)
    if rows == ALL:
        return tensor
    first, last, step = rows.indices(tensor.shape[dim])
    if step != 1:
        return tensor[(ALL,) * dim + (rows,)]
    return tensor.narrow(dim, first, max(0, last - first))  # one operation, where indexing is more
