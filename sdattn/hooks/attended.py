"""`Attended`: what one call of an attention layer attended to, computed when it is asked for.

A faster kernel is one more subclass, with ``of`` and ``probs``, and an ``add_to`` of its own where
it needs no heads for their sum.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..attention import attention_probs
from ..attention.controlled import mask_by_head
from ..attention.core import heads_of
from ..attention.device_copies import DeviceCopies, chosen
from ..attention.recording import record_softmax

Rows = slice | tuple[int, ...]  # of the batch
Columns = Sequence[int] | None  # of the keys; None for all
PART = 1 << 23  # probabilities that are computed at a time: all heads of SD 1.x, some of SD3
ALL = slice(None)


class Attended(ABC):
    """What one call of one layer attended to.

    Attributes:
        batch: rows of the batch.
        heads: of the layer.
        cells: N, the queries.
        keys: T, the key columns.
    """

    def __init__(self, batch: int, heads: int, cells: int, keys: int):
        self.batch, self.heads, self.cells, self.keys = batch, heads, cells, keys

    @abstractmethod
    def of(self, rows: Rows) -> Attended:
        """The same of some rows of the batch: a slice, or their numbers."""

    @abstractmethod
    def probs(self, heads: slice, columns: Columns) -> Tensor:
        """The probabilities of some heads and columns, float32 ``[batch, heads, N, T]``, a tensor
        of its own. The softmax is over all keys."""

    def among(self, kept: DeviceCopies, columns: Sequence[int]) -> Attended:
        """The same where only some keys of each image take part: bool ``kept`` ``[B, 1, 1, T]``;
        ``columns`` are those of any image."""
        return AmongKeys(self, kept)

    def every_head(self, columns: Columns) -> Tensor:
        """The probabilities of all heads."""
        first, *more = self._parts(columns)
        return torch.cat([first, *more], dim=1) if more else first

    def head_sums(self, columns: Columns) -> Iterator[Tensor]:
        """Sums over some heads each, float32 ``[batch, N, T]``, which add up to that over all."""
        for part in self._parts(columns):
            yield part.sum(1)

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        """``total`` with the sum over heads added in place, float32 ``[batch, N, T]``, without
        gradient; where it is None, a new tensor."""
        for part in self.head_sums(columns):
            total = part if total is None else total.add_(part)
        assert total is not None
        return total

    def _parts(self, columns: Columns) -> Iterator[Tensor]:
        step = max(1, PART // (self.batch * self.cells * self.keys))
        for start in range(0, self.heads, step):
            yield self.probs(slice(start, min(start + step, self.heads)), columns)


def row_index(rows: tuple[int, ...]) -> Rows:
    """Rows of a batch as a slice where they are in a row: what it picks is then a view."""
    first, last = rows[0], rows[-1]
    return slice(first, last + 1) if rows == tuple(range(first, last + 1)) else rows


def chosen_rows(tensor: Tensor, rows: Rows) -> Tensor:
    """Some rows of the batch of ``[B, ...]``."""
    return tensor[rows] if isinstance(rows, slice) else chosen(tensor, 0, rows)


def chosen_mask(mask: Tensor | None, rows: Rows) -> Tensor | None:
    """The same of a mask ``[B or 1, ...]``."""
    return mask if mask is None or len(mask) == 1 else chosen_rows(mask, rows)


def chosen_columns(probs: Tensor, columns: Columns, dim: int = -1) -> Tensor:
    """Some of the keys of ``[..., T]``, None for all."""
    return probs if columns is None else chosen(probs, dim, tuple(columns))


def new_sums(attended: Attended, like: Tensor, columns: Columns) -> Tensor:
    """Zeros for :meth:`Attended.add_to` to add to, on the device of ``like``."""
    width = attended.keys if columns is None else len(columns)
    shape = attended.batch, attended.cells, width
    return torch.zeros(shape, dtype=torch.float32, device=like.device)


def addend(mask: Tensor | None) -> Tensor | None:
    """A mask as an addend to the scores; in a bool mask, True takes part."""
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, device=mask.device).masked_fill(~mask, -math.inf)


class GivenProbs(Attended):
    """Of probabilities ``[B, heads, N, T]``, any dtype; what is given out is copied."""

    def __init__(self, given: Tensor):
        super().__init__(*given.shape)
        self.given = given

    def of(self, rows: Rows) -> Attended:
        return GivenProbs(chosen_rows(self.given, rows))

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        return chosen_columns(self.given[:, heads].to(torch.float32, copy=True), columns)


class QueryKey(Attended):
    """The softmax that follows from the query and key a layer used.

    Args:
        attn: the attention layer; its ``heads``, ``norm_q`` and ``norm_k`` are used.
        query: ``[B, N, heads*d]``, any floating dtype.
        key: ``[B, T, heads*d]``.
        mask: None or the addend to the scores, ``[B or 1, heads or 1, N or 1, T]``.
    """

    def __init__(self, attn: Any, query: Tensor, key: Tensor, mask: Tensor | None = None):
        super().__init__(len(query), attn.heads, query.shape[1], key.shape[1])
        self.attn, self.query, self.key, self.mask = attn, query, key, mask

    @classmethod
    def masked(cls, attn: Any, query: Tensor, key: Tensor, mask: Tensor | None) -> QueryKey:
        """With the layer's ``attention_mask``, in any of the shapes that diffusers hands on."""
        if mask is not None:
            mask = mask_by_head(mask, len(query), attn.heads, key.shape[1])
        return cls(attn, query, key, mask)

    def of(self, rows: Rows) -> Attended:
        query, key = chosen_rows(self.query, rows), chosen_rows(self.key, rows)
        return QueryKey(self.attn, query, key, chosen_mask(self.mask, rows))

    @cached_property
    def _by_head(self) -> tuple[Tensor, Tensor]:
        norm_q, norm_k = (getattr(self.attn, name, None) for name in ("norm_q", "norm_k"))
        return heads_of(self.query, self.heads, norm_q), heads_of(self.key, self.heads, norm_k)

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        query, key = self._by_head
        mask = self.mask if self.mask is None or self.mask.shape[1] == 1 else self.mask[:, heads]
        probs = attention_probs(query[:, heads].float(), key[:, heads].float(), mask)
        return chosen_columns(probs, columns)

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        query, key = self._by_head
        total = new_sums(self, query, columns) if total is None else total
        scale = 1 / math.sqrt(query.shape[-1])
        record_softmax(total, query, key, addend(self.mask), scale, columns)
        return total


class SideBySide(Attended):
    """Several attentions of the same queries, the keys of one behind those of the other.

    Args:
        first: at least one.
        others: the others; a number stands for so many keys that nothing is paid to.
    """

    def __init__(self, first: Attended, others: Sequence[Attended | int]):
        more = sum(other if isinstance(other, int) else other.keys for other in others)
        super().__init__(first.batch, first.heads, first.cells, first.keys + more)
        self.first, self.others = first, others

    def of(self, rows: Rows) -> Attended:
        others = [other if isinstance(other, int) else other.of(rows) for other in self.others]
        return SideBySide(self.first.of(rows), others)

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        parts = [self.first.probs(heads, None)]
        for other in self.others:
            if isinstance(other, int):
                parts.append(parts[0].new_zeros((*parts[0].shape[:-1], other)))
            else:
                parts.append(other.probs(heads, None))
        return chosen_columns(torch.cat(parts, dim=-1), columns)

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        # Where the words of a prompt alone are kept, nothing need be put together.
        if columns is not None and all(column < self.first.keys for column in columns):
            return self.first.add_to(total, columns)
        return super().add_to(total, columns)


class FramesTogether(Attended):
    """Of a video whose frames are rows of the batch one after the other: a row for each video, its
    cells frame by frame.

    Args:
        single: of the frames, ``frames`` rows for each video.
    """

    def __init__(self, single: Attended, frames: int):
        super().__init__(single.batch // frames, single.heads, frames * single.cells, single.keys)
        self.single, self.frames = single, frames

    def of(self, rows: Rows) -> Attended:
        videos = range(self.batch)[rows] if isinstance(rows, slice) else rows
        frames = range(self.frames)
        chosen_frames = tuple(video * self.frames + frame for video in videos for frame in frames)
        return FramesTogether(self.single.of(row_index(chosen_frames)), self.frames)

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        probs = self.single.probs(heads, columns)  # [videos*frames, heads, N, T]
        return probs.unflatten(0, (self.batch, -1)).transpose(1, 2).flatten(2, 3)

    def head_sums(self, columns: Columns) -> Iterator[Tensor]:
        return map(self._together, self.single.head_sums(columns))

    def add_to(self, total: Tensor | None, columns: Columns) -> Tensor:
        if total is not None:
            total = total.view(self.single.batch, self.single.cells, -1)
        return self._together(self.single.add_to(total, columns))

    def _together(self, sums: Tensor) -> Tensor:
        """A view ``[videos, frames*N, T]`` of ``[videos*frames, N, T]``."""
        return sums.view(self.batch, self.cells, -1)


class AmongKeys(Attended):
    """The softmax over some of the text's keys: the probabilities of the others taken away and what
    is left divided by its sum. Those of image prompts have a softmax of their own and stay.

    Args:
        whole: with the softmax over all keys.
        kept: bool ``[B, 1, 1, T]``, of the T keys of the text, which come first.
    """

    def __init__(self, whole: Attended, kept: DeviceCopies):
        super().__init__(whole.batch, whole.heads, whole.cells, whole.keys)
        self.whole, self.kept = whole, kept

    def of(self, rows: Rows) -> Attended:
        return AmongKeys(self.whole.of(rows), DeviceCopies(chosen_rows(self.kept.own, rows)))

    def probs(self, heads: slice, columns: Columns) -> Tensor:
        probs, n_text = self.whole.probs(heads, None), self.kept.own.shape[-1]
        text = probs[..., :n_text] * self.kept.on(probs.device)
        text = text / text.sum(-1, keepdim=True).clamp(min=torch.finfo(text.dtype).tiny)
        return chosen_columns(torch.cat([text, probs[..., n_text:]], dim=-1), columns)
