"""Joint attention that calls its kernel for one row of the batch at a time, seen as one call.

Mochi attends so: each row's video and what the mask leaves of its text, joined without padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from .sdpa import SdpaCall


class RowCalls(SdpaCall):
    """Calls of a row each as one call of the batch: the image, then the whole text. Tokens that a
    row left out are masked, and their output is 0.

    Args:
        calls: for each row, its own tokens ``[1, heads, cells + words, d]`` in this order.
        cells: of the image.
        mask: ``[B, T]``, not 0 where a token of the text takes part; read on its device alone.

    Attributes:
        taken: bool ``[B, S]``, which of all tokens take part.
    """

    def __init__(self, calls: Sequence[SdpaCall], cells: int, mask: Tensor):
        self._calls = calls
        device = calls[0].query.device
        taken = mask.to(device) != 0
        image = torch.arange(cells, device=device).expand(len(calls), -1)
        # where each token is among its row's; one that was left out stands for another, masked
        text = cells - 1 + taken.cumsum(1)
        self._index = torch.cat([image, text], dim=1)  # [B, S]
        self.taken = torch.cat([image >= 0, taken], dim=1)
        query, key = self._all("query"), self._all("key")
        super().__init__(query, key, self.taken[:, None, None], calls[0].scale)
        self.dropout = any(call.dropout or call.causal for call in calls)
        if all(call.logsumexp is not None for call in calls):
            self.logsumexp = self._all("logsumexp")

    # Made when they are asked for: maps of attention need neither.
    @cached_property
    def value(self) -> Tensor:  # type: ignore[override]
        return self._all("value") * self.taken[:, None, :, None]

    @cached_property
    def output(self) -> Tensor:  # type: ignore[override]
        return self._all("output") * self.taken[:, None, :, None]

    def _all(self, name: str) -> Tensor:
        parts = [getattr(call, name) for call in self._calls]
        rows = zip(parts, self._index, strict=True)
        return torch.cat([part.index_select(2, index) for part, index in rows])


def as_one_call(calls: Sequence[Any], given: dict[str, Any]) -> Sequence[Any]:
    """What a processor called, in one call where it attended to a row at a time.

    Args:
        calls: of torch's attention, in order, and other products.
        given: the processor's arguments by name.
    """
    image, text = given["hidden_states"], given.get("encoder_hidden_states")
    mask = given.get("attention_mask")
    if text is None or text is image or mask is None or mask.shape != text.shape[:2]:
        return calls
    cells, longest = image.shape[1], image.shape[1] + text.shape[1]
    if len(calls) != len(image) or not all(_is_of_a_row(one, cells, longest) for one in calls):
        return calls
    return [RowCalls(calls, cells, mask)]


def _is_of_a_row(call: Any, cells: int, longest: int) -> bool:
    if not isinstance(call, SdpaCall) or call.mask is not None or len(call.shape) != 4:
        return False
    batch, _, queries, keys = call.shape
    return batch == 1 and queries == keys and cells <= keys <= longest
