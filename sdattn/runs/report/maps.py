"""Pack the maps of a page into few bytes, so that the file opens at once.

A map is kept in 256 shades between its own lowest and highest value, which are stored with it, so a
number on the page is within 0.2 % of the map's range. The map of a video covers all frames.
"""

import base64
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TypeVar

import numpy as np
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ...maps.heatmap import Heatmap
from ...maps.heatmaps import Heatmaps
from ..imagerun import (
    ImageRun,
    group_heatmaps,
    head_heatmaps,
    short_name,
    step_groups,
    step_heatmaps,
)

_Item = TypeVar("_Item")

# Cells at most of the heatmaps, of the groups of layers, of the steps, heads, further texts and of
# where spots looked: together, however noisy, they leave room for an image in a page of 3 MB.
_BUDGETS = {
    "heatmaps": 450_000,
    "groups": 300_000,
    "steps": 500_000,
    "heads": 200_000,
    "further": 150_000,
    "spots": 270_000,
}
_COARSEST = 8  # times fewer rows and columns
Shape = tuple[int, int, float, float]  # rows, cols, lowest and highest value


@dataclass(frozen=True, eq=False)
class PageMaps:
    """Maps of a page.

    Attributes:
        groups: names of the groups of layers that can be chosen instead of the heatmap.
        heads: names of the single heads that can be chosen, with their layers.
        calls: model calls, counted from 0, that can be chosen instead of the mean.
        left_out: what was kept for a video but does not fit: "layers", "steps", "heads".
        maps: (rows, cols, lowest, highest) of each map. Order: the mean, then each call; in each,
            the heatmap, then each group; in each, the words in the order of
            ``Heatmaps.occurrences()``. Then each head, word by word; then further texts; then
            where each spot looked, row by row.
        data: the maps' cells in that order, frame by frame and row by row, one byte each: the first
            of a row, then differences to the left neighbour modulo 256; a zlib stream as base64.
    """

    groups: list[str]
    heads: list[str]
    calls: list[int]
    left_out: list[str]
    maps: list[Shape]
    data: str


def page_maps(run: ImageRun, further: Sequence[Heatmap]) -> PageMaps:
    """Return the maps of a run's page; maps of ``further`` words come last.

    Maps that do not fit are made coarser by averaging neighbours, and of very many steps some are
    left out, evenly. A long video may lose groups of layers, heads and all steps.
    """
    groups = group_heatmaps(run)
    of_steps = step_groups(run)
    steps = step_heatmaps(run)
    names = [name for name in groups if len(groups) > 1 and (not steps or name in of_steps)]
    of_groups = list[Tensor]()
    for name in names:
        of_groups += _values(groups[name])
    left_out = []
    if run.video and not _has_room(of_groups, "groups"):
        names = []
        of_groups = []
        left_out = ["layers"]
    looks = []
    for i, step in enumerate(steps):
        look = [*_values(step)]
        for name in names:
            look += _values(of_steps[name][i])
        looks.append(look)
    heads = []
    of_heads = list[Tensor]()
    for layer, numbered in head_heatmaps(run).items():
        for number, head in numbered.items():
            heads.append(f"{short_name(run, layer)}, head {number}")
            of_heads += _values(head)
    if run.video and looks and not _has_room([*chain(*looks[:2])], "steps"):
        looks = []
        left_out = [*left_out, "steps"]
    if run.video and not _has_room(of_heads, "heads"):
        heads = []
        of_heads = []
        left_out = [*left_out, "heads"]
    # A page has room for some of a thousand steps, even with the coarsest maps.
    calls = _evenly(run.details.calls if looks else (), _most(looks))
    looks = _evenly(looks, _most(looks))
    parts = {
        "heatmaps": _values(run.heatmaps),
        "groups": of_groups,
        "steps": [*chain(*looks)],
        "heads": of_heads,
        "further": [heatmap.values for heatmap in further],
        "spots": [] if run.details.spots is None else [*run.details.spots.flatten(0, 1)],
    }
    # Each kind has a number of cells of its own, so that many steps do not make the heatmaps
    # coarse.
    few = list[Tensor]()
    for part, maps in parts.items():
        few += _coarse_enough(maps, _BUDGETS[part])
    return PageMaps(names, heads, calls, left_out, *_packed(few))


def packed_heatmaps(heatmaps: Sequence[Heatmap]) -> tuple[list[Shape], str]:
    """Return heatmaps alone as :attr:`PageMaps.maps` and :attr:`PageMaps.data`."""
    return _packed(_coarse_enough([hm.values for hm in heatmaps], _BUDGETS["heatmaps"]))


def _packed(maps: Sequence[Tensor]) -> tuple[list[Shape], str]:
    shapes: list[Shape] = []
    cells = []
    for values in maps:
        low = float(values.min())
        high = float(values.max())
        scale = 255 / (high - low) if high > low else 0.0
        shades = np.rint((values.numpy() - low) * scale).astype(np.uint8)  # [(frames,) rows, cols]
        shapes.append((*shades.shape[-2:], float(f"{low:.5g}"), float(f"{high:.5g}")))
        # Neighbours of a smooth map differ by little, which packs into fewer bytes.
        cells.append(np.diff(shades, axis=-1, prepend=np.uint8(0)).tobytes())
    return shapes, base64.b64encode(zlib.compress(b"".join(cells), 6)).decode()


def _values(heatmaps: Heatmaps) -> list[Tensor]:
    return [heatmap.values for heatmap in heatmaps.occurrences()]


def _most(looks: Sequence[Sequence[Tensor]]) -> int:
    """Return how many steps fit at the coarsest size; at least 8 for an image."""
    if not looks:
        return 0
    cells = sum(values.numel() for values in looks[0]) / _COARSEST**2
    least = 2 if any(values.ndim == 3 for values in looks[0]) else 8
    return max(least, int(_BUDGETS["steps"] / max(cells, 1)))


def _has_room(maps: Sequence[Tensor], kind: str) -> bool:
    return sum(values.numel() for values in maps) <= _BUDGETS[kind] * _COARSEST**2


def _evenly(items: Sequence[_Item], most: int) -> list[_Item]:
    number = min(len(items), most)
    return [items[round(i * (len(items) - 1) / max(number - 1, 1))] for i in range(number)]


def _coarse_enough(maps: Sequence[Tensor], most: int) -> list[Tensor]:
    """Divide rows and columns of all maps by one power of 2 until there are few enough cells."""
    factor = 1
    cells = sum(values.numel() for values in maps)
    of_video = any(values.ndim == 3 for values in maps)
    while cells > most * factor**2 and (of_video or factor < _COARSEST):
        factor *= 2
    if factor == 1:
        return list(maps)
    coarse = []
    for values in maps:
        rows, cols = values.shape[-2:]
        size = math.ceil(rows / factor), math.ceil(cols / factor)
        # frames are in place of channels, which torch's layer does not mix
        pooled = adaptive_avg_pool2d(values.reshape(-1, rows, cols), size)
        coarse.append(pooled.reshape(*values.shape[:-2], *size))
    return coarse
