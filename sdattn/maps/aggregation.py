"""Maps of layers -> one map a token: the formula that a preset is an entry of.

aggregate(layers, preset)          [images, rows, cols, tokens]
read_by(layers, preset)            which layers that is of
contrast(maps, columns, factor)    the softmax over words of Attend-and-Excite
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..hooks.passes import CaptureError
from .layermaps import LayerMap, LayerMaps, resize_maps
from .presets import Preset, nothing_read
from .refinement import spread


def aggregate(maps: LayerMaps, preset: Preset) -> Tensor:
    """Bring the layers that a preset reads to the finest grid among them and add them up:
    ``sum_l w_l R(A_l) / W`` with resizing ``R`` and the weights of :func:`_weights`.

    Returns:
        float32 ``[images, rows, cols, tokens]``, >= 0. In the default preset probabilities; where a
        preset sums over heads, layers or steps, their sums.

    Raises:
        CaptureError: none of the layers is one that the preset reads.
    """
    layers = list(read_by(maps, preset).values())
    finest = max((one.grid for one in layers), key=lambda grid: grid[0] * grid[1])
    weights, divisor = _weights(layers, preset)
    by_grid: dict[tuple[int, int], Tensor] = {}
    for one, weight in zip(layers, weights, strict=True):
        if preset.each_head:
            part = _resized(one.maps, finest, preset.resize).mean(1) * weight
        else:  # one resize a resolution: bilinear is linear
            part = one.maps * weight
        grid = finest if preset.each_head else one.grid
        by_grid[grid] = by_grid[grid] + part if grid in by_grid else part
    total = sum(_resized(part, finest, preset.resize) for part in by_grid.values())
    values = torch.as_tensor(total) / divisor
    if preset.refine:
        values = spread(values, maps)
    return values * maps.passes if preset.steps == "sum" else values


def read_by(maps: LayerMaps, preset: Preset) -> dict[str, LayerMap]:
    """The layers that a preset reads, by name, in the order in which they run.

    Raises:
        CaptureError: there are none.
    """
    every = maps.layers
    chosen = {name: one for name, one in every.items() if preset.reads(one.place, one.level)}
    if preset.or_all:
        chosen = chosen or dict(every)
    if not chosen:
        raise CaptureError(nothing_read(preset, [(one.place, one.level) for one in every.values()]))
    sides = {min(one.grid) for one in chosen.values()}
    if preset.cells is not None:
        wanted = preset.cells
        nearest = min(sides, key=lambda side: (max(side / wanted, wanted / side), -side))
        return {name: one for name, one in chosen.items() if min(one.grid) == nearest}
    least = min(preset.least_cells, max(sides))
    return {name: one for name, one in chosen.items() if min(one.grid) >= least}


def _weights(layers: Sequence[LayerMap], preset: Preset) -> tuple[list[int], int]:
    """Of each layer, whose maps are means over its heads, and what their sum is divided by."""
    heads = [1 if preset.heads == "mean" else one.heads for one in layers]
    if preset.heads == "pool":
        return heads, sum(heads)
    return heads, len(layers) if preset.layers == "mean" else 1


def _resized(maps: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """``[..., rows, cols, tokens]`` at another size; bicubic overshoots, so it is cut off at 0."""
    resized = resize_maps(maps.movedim(-1, -3), size, mode).movedim(-3, -1)
    return resized.clamp(min=0) if mode == "bicubic" else resized


def contrast(maps: Tensor, columns: Sequence[int], factor: float) -> Tensor:
    """The softmax over some columns of ``factor`` times the maps.

    Args:
        maps: ``[rows, cols, tokens]``.
        columns: those of the words.

    Returns:
        ``[rows, cols, len(columns)]``; a cell's sum is 1.
    """
    return (factor * maps[..., list(columns)]).softmax(-1)
