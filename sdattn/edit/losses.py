"""Losses on heatmaps, for :func:`sdattn.edit.guide`: plain functions that anybody can write.

A loss takes the :class:`sdattn.Heatmaps` of one image and returns a scalar tensor, 0 when the maps
are as asked. Add losses by listing them, or write your own::

    def low(heatmaps):  # the cat in the lower half
        return 1 - share_inside(heatmaps["cat"].values, (0, 0.5, 1, 1))
"""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidTypeError, refuse
from ..follow.run_part import items_of
from ..maps.heatmaps import Heatmaps
from ..maps.masks import smooth
from ..models.values import number

Box = tuple[float, float, float, float]
Loss = Callable[[Heatmaps], Tensor]


def inside(word: str, box: Box) -> Loss:
    """Return the loss of a word whose attention belongs in a box: the share outside, in [0, 1].

    Chen et al. 2023, "Training-Free Layout Control with Cross-Attention Guidance"
    (arXiv:2304.03373), whose energy is its square.

    Args:
        word: word or phrase of the prompt, all its occurrences together.
        box: (left, top, right, bottom) in fractions of the image's width and height.

    Raises:
        ValueError: the box is empty or leaves the image.
        TypeError: no word.
    """
    _check_words("inside", word)
    checked_box(box)
    return lambda heatmaps: 1 - share_inside(heatmaps[word].values, box)


def boxdiff(word: str, box: Box, part: float = 0.2) -> Loss:
    """Return BoxDiff's loss of a word in a box: inner box, outer box and corners, in [0, 4].

    Xie et al. 2023, "BoxDiff" (arXiv:2307.10816); showlab/BoxDiff,
    ``pipeline/sd_pipeline_boxdiff.py``. It compares peaks with 1, which plain shares of attention
    do not reach: ``maps="attend-and-excite"`` in :func:`guide` reads the maps as they do.

    Args:
        word, box: as for :func:`inside`.
        part: share of the cells inside, and of the cells outside, that count: the highest. In
            (0, 1].

    Raises:
        ValueError: the box is empty or leaves the image, or an impossible part.
        TypeError: no word.
    """
    _check_words("boxdiff", word)
    checked_box(box)
    if not 0 < (number(part) or 0) <= 1:
        raise refuse("part", part, "a share of cells above 0, at most 1")

    def loss(heatmaps: Heatmaps) -> Tensor:
        values = heatmaps[word].values  # [rows, cols]
        cells = coverage(box, values)
        inner = 1 - _top(values * cells, part * float(cells.sum()))
        outer = _top(values * (1 - cells), part * float((1 - cells).sum()))
        return inner + outer + _corners(values, cells)

    return loss


def excite(*words: str) -> Loss:
    """Return Attend-and-Excite's loss: 1 minus the peak of the most neglected word, in [0, 1].

    Chefer et al. 2023, "Attend-and-Excite" (arXiv:2301.13826), section 3. Maps are shares among the
    prompt's words, smoothed over 3x3 cells. The paper takes the softmax of 100 times the attention
    instead: ``maps="attend-and-excite"`` in :func:`guide`.

    Args:
        words: words or phrases of the prompt, one at least.

    Raises:
        TypeError: no word, or something else than words.
    """
    _check_words("excite", *words)

    def loss(heatmaps: Heatmaps) -> Tensor:
        every = torch.stack([one.values for one in heatmaps.occurrences()]).sum(0)
        shares = torch.stack([heatmaps[word].values for word in words]) / every  # [words, r, c]
        if not heatmaps.preset.sigma:  # else they are smooth already
            shares = smooth(shares, math.sqrt(0.5), radius=1)
        return 1 - shares.amax((-2, -1)).min()

    return loss


def apart(word: str, other: str) -> Loss:
    """Return the overlap of two words, ``2 sum min(a, b) / sum (a + b)``, in [0, 1].

    Twice the attention segregation of Agarwal et al. 2023, "A-STAR" (arXiv:2306.14544).

    Args:
        word, other: words or phrases of the prompt.

    Raises:
        TypeError: something else than words.
    """
    _check_words("apart", word, other)

    def loss(heatmaps: Heatmaps) -> Tensor:
        one = heatmaps[word].values
        two = heatmaps[other].values
        return 2 * torch.minimum(one, two).sum() / (one + two).sum()

    return loss


def share_inside(values: Tensor, box: Box) -> Tensor:
    """Return the share of a map ``[rows, cols]`` that lies in a box, a scalar in [0, 1]; a cell on
    the border counts in part. Raise ValueError as :func:`inside` does."""
    if not isinstance(values, Tensor) or values.ndim != 2:
        raise refuse("values", values, "a map [rows, cols], such as heatmap.values")
    return (values * coverage(box, values)).sum() / values.sum()


def coverage(box: Box, values: Tensor) -> Tensor:
    """Return the share of each cell of a map that a box covers, ``[rows, cols]`` in [0, 1]."""
    left, top, right, bottom = checked_box(box)
    rows, cols = values.shape
    return torch.outer(_along(rows, top, bottom), _along(cols, left, right)).to(values)


def _check_words(who: str, *words: object) -> None:
    if not words or not all(isinstance(word, str) for word in words):
        raise InvalidTypeError(f"{who}{words!r}: pass words of the prompt, one at least.")


def checked_box(box: Any) -> Box:
    """Return a box as four floats; raise ValueError if it is empty or leaves the image."""
    items = items_of(box)
    if len(items) == 4 and all(isinstance(item, Real) for item in items):
        left, top, right, bottom = map(float, items)
        if 0 <= left < right <= 1 and 0 <= top < bottom <= 1:
            return left, top, right, bottom
    known = "(left, top, right, bottom) in fractions of the image, such as (0, 0, 0.5, 0.5)"
    raise refuse("box", box, known)


def _along(n_cells: int, start: float, end: float) -> Tensor:
    """Return the share of each of ``n_cells`` cells on an axis that lies between two fractions."""
    edges = torch.arange(n_cells + 1, dtype=torch.float64).clamp(start * n_cells, end * n_cells)
    return edges.diff()


def _top(values: Tensor, number: float) -> Tensor:
    """Return the mean of the highest values, one at least."""
    return values.flatten().topk(max(1, int(number))).values.mean()


def _corners(values: Tensor, cells: Tensor) -> Tensor:
    """Return BoxDiff's corner constraint: on each axis, the mean over its cells of how far the
    highest values are from the box's outline, within a cell of either of its ends."""
    total = values.new_zeros(())
    for axis in (0, 1):
        extent = cells.amax(axis)
        within = extent.nonzero().flatten()
        first = int(within[0])
        last = int(within[-1]) + 1
        near = torch.zeros_like(extent)
        near[max(first - 1, 0) : first + 2] = 1
        near[max(last - 1, 0) : last + 2] = 1
        total = total + ((values.amax(axis) - extent).abs() * near).mean()
    return total
