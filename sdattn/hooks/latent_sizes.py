"""The size of each call's latent, and where picture and text are in its rows, with as few looks at
the device as can be."""

import math
from collections.abc import Sequence

from torch import Tensor

from ..attention.joint_processor import Spans
from ..models.denoiser_call import DenoiserCall, Size


class LatentSizes:
    """The grids of a model's calls, those of one model and run after the other.

    Of some models (FLUX) a grid follows from ids on the device, which waits when they are read.
    """

    def __init__(self) -> None:
        self._known: tuple[Tensor, int, Size] | None = None  # ids, version, their grid

    def of(self, call: DenoiserCall, in_run: bool) -> Size | None:
        """(rows, cols) of a call's queries. Ids from which it follows are read when they are other
        than before; in a run of a pipeline once, since its picture keeps its shape.

        Args:
            call: that begins now.
            in_run: whether it is of the run that the call before was of.
        """
        ids = call.grid_ids
        if ids is None:
            return call.latent_size
        version = _version(ids)
        if self._known is not None:
            known, known_version, size = self._known
            same = ids is known and version == known_version
            if same or (in_run and ids.shape == known.shape):
                return size
        if call.latent_size is not None:
            self._known = ids, version, call.latent_size
        return call.latent_size


class ReadSpans:
    """The spans of a model's calls, those of one model and run after the other."""

    def __init__(self) -> None:
        self._known: tuple[list[tuple[Tensor, int]], int, Sequence[Spans]] | None = None

    def of(
        self, call: DenoiserCall, size: Size | None, rows: Sequence[int]
    ) -> Sequence[Spans] | None:
        """Where the picture's cells, a grid of ``size``, and the text are: one pair where it is the
        same in all rows that are kept, else one for each row of the batch; None where the order of
        both says it."""
        found = None if size is None else self._read(call, math.prod(size))
        if found is None:
            return None
        kept = rows if len(found) > 1 else (0,)
        first = found[kept[0]]
        if all(found[row] == first for row in kept):
            return (first,)
        # nobody looks at the other rows
        return tuple(found[row] if row in kept else first for row in range(call.batch))

    def _read(self, call: DenoiserCall, cells: int) -> Sequence[Spans] | None:
        """Of each row. Masks from which they follow are read when one is another than before."""
        masks = [(mask, _version(mask)) for mask in call.spans_of]
        if call.spans is None or not masks:
            return call.spans and call.spans(cells)
        if self._known is not None:
            known, n, spans = self._known
            pairs = zip(masks, known, strict=True)
            if n == cells and all(a is b and new == old for (a, new), (b, old) in pairs):
                return spans
        spans = call.spans(cells)
        self._known = masks, cells, spans
        return spans


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
