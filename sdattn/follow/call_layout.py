"""The grid of each call's latent, and the places of image and text in its rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..attention.joint_processor import Spans
from ..models.denoiser_call import DenoiserCall, Size


class CallLayout:
    """Layout of one model's calls. Values on the device (ids in FLUX, masks in HunyuanVideo) are
    read again only when they change, since the device waits for that."""

    def __init__(self) -> None:
        self._sizes = _ReadOnce()
        self._spans = _ReadOnce()

    def size(self, call: DenoiserCall, in_run: bool) -> Size | None:
        """Return (rows, cols) of a call's queries. ``in_run``: it belongs to the same run as the
        previous call, so ids of the same shape are not read again."""
        if call.grid_ids is None:
            return call.latent_size
        return self._sizes.get((call.grid_ids,), lambda: call.latent_size, trusts_shape=in_run)

    def spans(
        self, call: DenoiserCall, size: Size | None, rows: Sequence[int]
    ) -> Sequence[Spans] | None:
        """Return the places of the image's cells, a grid of ``size``, and of the text: one pair if
        all kept rows share it, else one per row; None if their order is enough."""
        spans = None if size is None else self._read_spans(call, math.prod(size))
        if spans is None:
            return None
        if len(spans) == 1:
            return tuple(spans)
        first = spans[rows[0]]
        if all(spans[row] == first for row in rows):
            return (first,)
        # nobody looks at the other rows
        return tuple(spans[row] if row in rows else first for row in range(call.batch))

    def _read_spans(self, call: DenoiserCall, cells: int) -> Sequence[Spans] | None:
        spans = call.spans
        if spans is None or not call.spans_of:
            return spans and spans(cells)
        return self._spans.get(call.spans_of, lambda: spans(cells), about=cells)


class _ReadOnce:
    """Result of reading tensors' values, kept until they change."""

    def __init__(self) -> None:
        self._known: tuple[list[tuple[Tensor, int]], Any, Any] | None = None

    def get(
        self,
        tensors: Sequence[Tensor],
        read: Callable[[], Any],
        about: Any = None,
        trusts_shape: bool = False,
    ) -> Any:
        """Return the last result if these tensors were not written to since; otherwise read again.

        Args:
            about: anything else that the result depends on.
            trusts_shape: True if other tensors of the same shapes give the same result.
        """
        versions = [(one, 0 if one.is_inference() else one._version) for one in tensors]
        if self._known is not None:
            before, same, result = self._known
            pairs = list(zip(versions, before, strict=True))
            is_known = all(a is b and v == w for (a, v), (b, w) in pairs)
            if trusts_shape:
                is_known = is_known or all(a.shape == b.shape for (a, _), (b, _) in pairs)
            if is_known and same == about:
                return result
        result = read()
        self._known = versions, about, result
        return result
