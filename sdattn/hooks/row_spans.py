"""Joint attention whose rows have texts of their own lengths, shown in one order.

Some models join each row's text to its image without padding between them, so that the same
token is elsewhere in each row. Here the tokens of all rows are put in one order, which a softmax
does not mind: the image, the text filled up to the longest, then all that is neither.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..attention.device_copies import DeviceCopies
from ..attention.joint_processor import Spans
from .sdpa import SdpaCall


class RowOrder:
    """The one order of the tokens of all rows of a batch.

    Args:
        spans: for each row where the image's tokens and the text's are.
        length: S, tokens of a row.

    Attributes:
        image, text: where they are in that order.
        tokens: bool ``[B, 1, 1, T]``, which columns of the text are a row's own, and no filling.
    """

    def __init__(self, spans: Sequence[Spans], length: int):
        self.of = tuple(spans), length
        cells = spans[0][0].stop - spans[0][0].start
        n_text = max(text.stop - text.start for _, text in spans)
        self.image, self.text = slice(0, cells), slice(cells, cells + n_text)
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
        # what stands for no token gets no attention
        self._index = DeviceCopies(index.clamp_min(0))
        self._is_token = DeviceCopies(index >= 0)

    def __call__(self, call: SdpaCall) -> SdpaCall:
        """A call of torch's attention in this order, ``[B, heads, S', d]``."""
        index = self._index.on(call.query.device)
        is_token = self._is_token.on(call.query.device)[:, None]  # [B, 1, S']
        query, key = (_taken(part, index, 2) for part in (call.query, call.key))
        logsumexp = None if call.logsumexp is None else _taken(call.logsumexp, index, 2)
        mask = self._masked(call.mask, index, is_token[:, None])
        ordered = replace(call, query=query, key=key, mask=mask, logsumexp=logsumexp)
        ordered.output = _taken(call.output, index, 2) * is_token[..., None]
        return ordered

    def _masked(self, mask: Tensor | None, index: Tensor, is_token: Tensor) -> Tensor:
        """The mask, ``[B, heads or 1, N or 1, S']``, without what is no token."""
        if mask is None:
            return is_token
        mask = mask[(None,) * (4 - mask.ndim)].expand(len(index), -1, -1, -1)
        mask = _taken(mask, index, 3)
        mask = mask if mask.shape[2] == 1 else _taken(mask, index, 2)
        if mask.dtype == torch.bool:
            return mask & is_token
        return mask.masked_fill(~is_token, -torch.inf)


def _taken(part: Tensor, index: Tensor, dim: int) -> Tensor:
    """Along one axis of ``[B, ...]``, the entries ``[B, S']`` of each row."""
    shape = [1] * part.ndim
    shape[0], shape[dim] = index.shape
    sizes = list(part.shape)
    sizes[dim] = index.shape[1]
    return part.gather(dim, index.reshape(shape).expand(sizes))
