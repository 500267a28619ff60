"""An attention call of a model of no known family, by row and head."""

from __future__ import annotations

import math

from ..attention import merge_heads
from ..attention.calls import AttentionCall, LayerCall, ProjectedCall
from ..attention.core import level_grids
from ..models.denoiser_call import Size
from .told import LEVELS, Placed


def by_head(call: AttentionCall, batch: int, size: Size) -> AttentionCall | str:
    """Return a call with the axes ``[B, heads, ...]`` for a model's call of ``batch`` rows and a
    grid of ``size``; with ``B*frames`` rows if a video's frames are rows. Or why it has other axes.
    """
    tensor = call.query if call.probs is None else call.probs
    *leading, queries, _ = tensor.shape
    rows = batch * _frames_in_rows(queries, size)
    if len(leading) == 1 and leading[0] % rows == 0:
        leading = [rows, leading[0] // rows]
    if len(leading) != 2 or leading[0] != rows:
        return f"axes {list(tensor.shape)}, of {rows} rows"
    if rows > batch > 1:
        return "frames of several videos are rows of its batch"
    if call.probs is not None:
        return AttentionCall(probs=call.probs.reshape(*leading, *call.probs.shape[-2:]))
    return call.by_head(*leading) or "dropout"


def placed(call: AttentionCall, place: Placed, frames: int) -> LayerCall:
    """Return a call with the places of its image and keys, for a video of ``frames`` rows. A plain
    one of all its keys may wait for its pass to end, see :mod:`sdattn.keep.queue`."""
    stops = place.image.stop, place.keys.stop
    is_whole = call.shape[2:] == stops and place.image.start == place.keys.start == 0
    known = (call.probs, call.mask, call.scale)
    if frames == 1 and is_whole and all(value is None for value in known):
        heads = call.query.shape[1]
        return ProjectedCall(merge_heads(call.query), merge_heads(call.key), heads)
    call.spans = place.image, place.keys
    call.frames = frames
    return call


def _frames_in_rows(queries: int, size: Size) -> int:
    """Return the frames of a grid if so many queries are one of them; else 1."""
    if len(size) < 3:
        return 1
    per_frame = {math.prod(grid[1:]) for grid in level_grids(size, LEVELS)}
    return size[0] if queries in per_frame else 1
