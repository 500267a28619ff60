"""Joint attention whose rows have texts of their own lengths, shown in one order for all rows.

Some models join each row's text to its image without padding, so the same token is at another
position in each row. `RowOrder` puts all rows in one order: the image, the text filled up to the
longest, then the rest.

Mochi calls its kernel for each row of the batch. `RowCalls` shows these calls as one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..attention.calls import AttentionCall, Spans
from ..attention.device_copies import DeviceCopies
from .layer import Arguments


class RowOrder:
    """Common token order for all rows of a batch.

    Args:
        spans: places of the image's and the text's tokens, for each row.
        length: S, tokens per row.

    Attributes:
        image, text: their places in that order.
        tokens: bool ``[B, 1, 1, T]``, True for a row's own text columns, False for padding.
    """

    def __init__(self, spans: Sequence[Spans], length: int):
        self.spans = spans
        self.length = length
        cells = spans[0][0].stop - spans[0][0].start
        n_text = max(text.stop - text.start for _, text in spans)
        self.image = slice(0, cells)
        self.text = slice(cells, cells + n_text)
        lengths = torch.tensor([text.stop - text.start for _, text in spans])
        own = torch.arange(n_text) < lengths[:, None]
        self.tokens = DeviceCopies(own[:, None, None])
        rows = []
        for image, text in spans:
            numbers = list(range(length))
            first, last = sorted((image, text), key=lambda span: span.start)
            rest = numbers[: first.start] + numbers[first.stop : last.start] + numbers[last.stop :]
            fill = [-1] * (n_text - len(numbers[text]))
            rows.append([*numbers[image], *numbers[text], *fill, *rest])
        most = max(map(len, rows))
        index = torch.tensor([row + [-1] * (most - len(row)) for row in rows])
        # padding gets no attention
        self._index = DeviceCopies(index.clamp_min(0))
        self._is_token = DeviceCopies(index >= 0)

    def __call__(self, call: AttentionCall) -> AttentionCall:
        """Return a call in this order, ``[B, heads, S', d]``."""
        index = self._index.on(call.query.device)
        is_token = self._is_token.on(call.query.device)[:, None]  # [B, 1, S']
        query, key = (_taken(tensor, index, 2) for tensor in (call.query, call.key))
        logsumexp = None if call.logsumexp is None else _taken(call.logsumexp, index, 2)
        mask = self._masked(call.mask, index, is_token[:, None])
        ordered = replace(call, query=query, key=key, mask=mask, logsumexp=logsumexp)
        ordered.output = _taken(call.output, index, 2) * is_token[..., None]
        ordered.spans = self.image, self.text
        ordered.tokens = self.tokens
        return ordered

    def _masked(self, mask: Tensor | None, index: Tensor, is_token: Tensor) -> Tensor:
        """Return the mask, ``[B, heads or 1, N or 1, S']``, with everything but tokens masked."""
        if mask is None:
            return is_token
        mask = _taken(mask[(None,) * (4 - mask.ndim)].expand(len(index), -1, -1, -1), index, 3)
        mask = mask if mask.shape[2] == 1 else _taken(mask, index, 2)
        if mask.dtype == torch.bool:
            return mask & is_token
        return mask.masked_fill(~is_token, -torch.inf)


def _taken(tensor: Tensor, index: Tensor, dim: int) -> Tensor:
    """Return entries ``[B, S']`` of each row along one axis of ``[B, ...]``."""
    shape = [1] * tensor.ndim
    shape[0], shape[dim] = index.shape
    sizes = list(tensor.shape)
    sizes[dim] = index.shape[1]
    return tensor.gather(dim, index.reshape(shape).expand(sizes))


class RowCalls(AttentionCall):
    """Calls for one row each, as one call of the batch: the image, then the whole text. Tokens that
    a row left out are masked.

    Args:
        calls: for each row its own tokens ``[1, heads, cells + words, d]`` in this order.
        cells: number of image tokens.
        mask: ``[B, T]``, nonzero where a token of the text takes part; read on its device only.

    Attributes:
        taken: bool ``[B, S]``, tokens that take part.
    """

    def __init__(self, calls: Sequence[AttentionCall], cells: int, mask: Tensor):
        self._calls = calls
        device = calls[0].query.device
        taken = mask.to(device) != 0
        image = torch.arange(cells, device=device).expand(len(calls), -1)
        # each token's position in its row; one that was left out points to another, masked
        text = cells - 1 + taken.cumsum(1)
        self._index = torch.cat([image, text], dim=1)  # [B, S]
        self.taken = torch.cat([image >= 0, taken], dim=1)
        super().__init__(self._all("query"), self._all("key"))
        del self.value, self.output  # made on demand: maps of attention need neither
        self.mask = self.taken[:, None, None]
        self.scale = calls[0].scale
        self.dropout = any(call.dropout or call.causal for call in calls)
        if all(call.logsumexp is not None for call in calls):
            self.logsumexp = self._all("logsumexp")

    @cached_property
    def value(self) -> Tensor:  # type: ignore[override]
        return self._all("value") * self.taken[:, None, :, None]

    @cached_property
    def output(self) -> Tensor:  # type: ignore[override]
        return self._all("output") * self.taken[:, None, :, None]

    def _all(self, name: str) -> Tensor:
        parts = [getattr(call, name) for call in self._calls]
        rows = zip(parts, self._index, strict=True)
        return torch.cat([tensor.index_select(2, index) for tensor, index in rows])


def as_one_call(calls: Sequence[AttentionCall], arguments: Arguments) -> Sequence[AttentionCall]:
    """Return a processor's calls as one call if it attended to one row at a time."""
    image = arguments["hidden_states"]
    text = arguments.get("encoder_hidden_states")
    mask = arguments.get("attention_mask")
    if text is None or text is image or mask is None or mask.shape != text.shape[:2]:
        return calls
    cells = image.shape[1]
    longest = image.shape[1] + text.shape[1]
    if len(calls) != len(image):
        return calls
    for call in calls:
        if call.probs is not None or call.mask is not None or len(call.shape) != 4:
            return calls
        batch, _, queries, keys = call.shape
        if batch != 1 or queries != keys or not cells <= keys <= longest:
            return calls
    return [RowCalls(calls, cells, mask)]


def with_every_query(call: AttentionCall) -> AttentionCall:
    """Return a call in which only the last tokens ask as one of all tokens. The others' queries are
    zeros, and are not to be shown."""
    before = call.shape[3] - call.shape[2]
    rows = 0, 0, before, 0  # padding of the axis of queries
    logsumexp = call.logsumexp
    filled = replace(
        call,
        query=pad(call.query, rows),
        logsumexp=None if logsumexp is None else pad(logsumexp, (before, 0)),
    )
    filled.output = pad(call.output, rows)
    return filled
