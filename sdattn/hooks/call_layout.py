"""`CallLayout`: the grid of each call's latent, and where image and text are in its rows, with as
few looks at the device as can be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..attention.joint_processor import Spans
from ..models.denoiser_call import DenoiserCall, Size


class CallLayout:
    """Of a model's calls, those of one model and run after the other.

    Of some models it follows from values on the device, which waits when they are read: of ids
    (FLUX), of masks (HunyuanVideo). They are read when they are others than before.
    """

    def __init__(self) -> None:
        self._sizes, self._spans = _ReadOnce(), _ReadOnce()

    def size(self, call: DenoiserCall, in_run: bool) -> Size | None:
        """Return (rows, cols) of a call's queries.

        Args:
            call: that begins now.
            in_run: True if it is of the run that the call before was of, whose image keeps its
                shape, so that ids of the same shape are not read again.
        """
        if call.grid_ids is None:
            return call.latent_size
        return self._sizes.of((call.grid_ids,), lambda: call.latent_size, trusts_shape=in_run)

    def spans(
        self, call: DenoiserCall, size: Size | None, rows: Sequence[int]
    ) -> Sequence[Spans] | None:
        """Return where the image's cells, a grid of ``size``, and the text are: one pair where it
        is the same in all rows that are kept, else one for each row of the batch; None where the
        order of both says it."""
        found = None if size is None else self._read_spans(call, math.prod(size))
        if found is None:
            return None
        kept = rows if len(found) > 1 else (0,)
        first = found[kept[0]]
        if all(found[row] == first for row in kept):
            return (first,)
        # nobody looks at the other rows
        return tuple(found[row] if row in kept else first for row in range(call.batch))

    def _read_spans(self, call: DenoiserCall, cells: int) -> Sequence[Spans] | None:
        spans = call.spans
        if spans is None or not call.spans_of:
            return spans and spans(cells)
        return self._spans.of(call.spans_of, lambda: spans(cells), about=cells)


class _ReadOnce:
    """What follows from the values of tensors."""

    def __init__(self) -> None:
        self._known: tuple[list[tuple[Tensor, int]], Any, Any] | None = None

    def of(
        self,
        tensors: Sequence[Tensor],
        read: Callable[[], Any],
        about: Any = None,
        trusts_shape: bool = False,
    ) -> Any:
        """Return what was read before of these very tensors, if they were not written to since;
        else read anew.

        Args:
            about: what it depends on besides.
            trusts_shape: True if others of the same shapes say the same.
        """
        given = [(one, 0 if one.is_inference() else one._version) for one in tensors]
        if self._known is not None:
            before, same, found = self._known
            pairs = list(zip(given, before, strict=True))
            is_known = all(a is b and v == w for (a, v), (b, w) in pairs)
            if trusts_shape:
                is_known = is_known or all(a.shape == b.shape for (a, _), (b, _) in pairs)
            if is_known and same == about:
                return found
        found = read()
        self._known = given, about, found
        return found
