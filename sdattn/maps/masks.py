"""Maps -> masks: smoothing, thresholds, connected components and a map of labels."""

import math
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidValueError, refuse

Index = NDArray[np.intp]


def smooth(maps: Tensor, sigma: float, radius: int | None = None) -> Tensor:
    """Blur maps with a Gaussian, reflected at the border.

    The border cell is the mirror and is not repeated: ``c b | a b c | b a``. A window wider than
    the grid is reflected as often as it takes, so any grid takes any radius; along an axis of one
    cell nothing changes. Gradients pass through.

    Args:
        maps: floating point ``[..., rows, cols]``.
        sigma: the Gaussian's standard deviation in cells; 0 changes nothing.
        radius: cells on each side of the middle that count, ``ceil(3 * sigma)`` by default. Their
            weights are scaled to sum to 1. ``smooth(maps, 0.5**0.5, radius=1)`` is what
            Attend-and-Excite does (Chefer et al. 2023, yuval-alaluf/Attend-and-Excite): its "sigma
            0.5" divides by ``(2 * sigma) ** 2`` where a Gaussian has ``2 * sigma**2``.

    Returns:
        Shape, dtype and device of ``maps``.

    Raises:
        ValueError: maps that are no floating point grid, a sigma or radius below 0 or infinite.
    """
    if maps.ndim < 2 or not maps.is_floating_point():
        raise InvalidValueError(
            f"Asked to smooth {maps.dtype} of shape {list(maps.shape)}. Pass floating point "
            "[..., rows, cols]."
        )
    if not 0 <= sigma < math.inf or (radius is not None and radius < 0):
        raise InvalidValueError(
            f"sigma={sigma}, radius={radius}: pass numbers of cells, 0 or more."
        )
    if sigma == 0:
        return maps
    reach = math.ceil(3 * sigma) if radius is None else radius
    steps = torch.arange(-reach, reach + 1, dtype=torch.float64)
    weights = torch.exp(-((steps / sigma) ** 2) / 2)
    rows, cols = (_blur_of(n, weights / weights.sum()).to(maps) for n in maps.shape[-2:])
    return rows @ maps @ cols.T


def _blur_of(n_cells: int, weights: Tensor) -> Tensor:
    """The blur of one axis as a matrix ``[to, from]`` whose rows sum to 1."""
    reach = len(weights) // 2
    targets = torch.arange(n_cells)[:, None] + torch.arange(-reach, reach + 1)  # [to, window]
    period = max(2 * (n_cells - 1), 1)  # there and back
    # Reflected at both borders as often as it takes: a walk to and fro has a period.
    targets = targets % period
    targets = torch.minimum(targets, period - targets)
    blur = torch.zeros(n_cells, n_cells, dtype=weights.dtype)
    return blur.scatter_add_(1, targets, weights.expand(n_cells, -1))


def otsu(values: Tensor) -> float:
    """The threshold that parts the values into two classes as far from each other as can be.

    Otsu 1979, "A threshold selection method from gray-level histograms": the cut with the largest
    variance between the classes, which is the one with the smallest variance within them. Every
    cut of the sorted values is tried, in float64; there are no histogram bins. Of cuts that are
    equally good the lowest is taken.

    Args:
        values: real numbers of any shape, at least one.

    Returns:
        The smallest value of the upper class, which is ``values >= otsu(values)``; ``inf`` where
        all the values are equal and there is no upper class.

    Raises:
        ValueError: there is no value, or one is NaN or infinite.
    """
    _check_finite(values)
    ordered = values.detach().flatten().double().sort().values
    if ordered[0] == ordered[-1]:
        return math.inf
    n = len(ordered)
    lower = torch.arange(1, n, device=ordered.device)  # how many are in the lower class
    # w0 * w1 * (mean1 - mean0)^2, where the sums of the two classes are opposite numbers
    between = (ordered - ordered.mean()).cumsum(0)[:-1] ** 2 / (lower * (n - lower))
    return float(ordered[between.argmax() + 1])


def threshold_level(values: Tensor, threshold: float | Literal["otsu"]) -> float:
    """The level that a threshold stands for, see :func:`mask_of`; the mask is ``values >= level``.

    It is ``inf``, which no value reaches, where all values are equal. Raises ValueError for a
    threshold that is not known, and for values as in :func:`otsu`.
    """
    if threshold == "otsu":
        return otsu(values)
    if isinstance(threshold, str) or not 0 <= threshold <= 1:
        raise refuse("threshold", threshold, "'otsu' or a share of the range, from 0 to 1")
    _check_finite(values)
    low, high = values.min(), values.max()
    level = min(low + threshold * (high - low), high)  # rounding might lift it above
    return float(level) if high > low else math.inf


def quantile_level(values: Tensor, quantile: float) -> float:
    """The smallest value at or above a quantile in [0, 1); ``inf`` where all values are equal.

    The quantile lies between two values in general (type 7 of Hyndman & Fan 1996, "Sample
    quantiles in statistical packages", as ``numpy.quantile``). The upper of the two splits the
    values the same way. Raises ValueError for another quantile, and for values as in :func:`otsu`.
    """
    if not 0 <= quantile < 1:
        raise refuse("quantile", quantile, "the share to leave out, from 0 to below 1")
    _check_finite(values)
    if values.min() == values.max():
        return math.inf
    rank = math.ceil(quantile * (values.numel() - 1))
    return float(values.flatten().kthvalue(rank + 1).values)


def mask_of(
    values: Tensor,
    threshold: float | Literal["otsu"] | None = None,
    *,
    quantile: float | None = None,
    largest: bool = False,
) -> Tensor:
    """Where a map is high.

    Args:
        values: real numbers ``[rows, cols]``, or ``[frames, rows, cols]`` of a video, which has one
            level for all frames.
        threshold: a share of the range from the lowest value to the highest, in [0, 1], or
            ``"otsu"``, see :func:`otsu`; 0.5 by default.
        quantile: in [0, 1), in place of ``threshold``: what lies at or above this quantile of the
            values, about ``1 - quantile`` of the cells, and more where many are equal to it.
        largest: keep only the largest connected part, see :func:`largest_component`; of a video
            that of each frame.

    Returns:
        bool, shaped like ``values``. All False for a map of one value, as nothing in it stands
        out.

    Raises:
        ValueError: a threshold or quantile that is none of these, or both; a map that is empty,
            holds NaN or infinity or, with ``largest``, is not ``[rows, cols]``.
    """
    if quantile is None:
        level = threshold_level(values, 0.5 if threshold is None else threshold)
    elif threshold is None:
        level = quantile_level(values, quantile)
    else:
        raise InvalidValueError(
            f"Asked for threshold={threshold!r} and quantile={quantile}, two ways to set one "
            "level. Pass one of them."
        )
    mask = values >= level
    if largest and mask.ndim == 3:
        return torch.stack([largest_component(frame) for frame in mask])
    return largest_component(mask) if largest else mask


def components(mask: Tensor) -> Tensor:
    """The connected parts of a mask; cells touch by sides and by corners.

    The cells of a row that follow each other are one run. Runs that touch are linked, and each
    takes the lowest name among those it can reach: the hooking and pointer jumping of Shiloach &
    Vishkin 1982, over runs in place of cells. The number of rounds grows with the logarithm of the
    number of runs, in a spiral too.

    Args:
        mask: bool ``[rows, cols]``.

    Returns:
        int64 ``[rows, cols]`` on the mask's device: 0 outside, and 1, 2, ... in the parts, in the
        order of their first cells, row by row.

    Raises:
        ValueError: the mask is not bool or not ``[rows, cols]``.
    """
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise InvalidValueError(
            f"Asked for the parts of a mask that is {mask.dtype} of shape {list(mask.shape)}. "
            "Pass bool [rows, cols], such as values >= level."
        )
    cells = mask.numpy(force=True)
    starts, ends, width = _runs(cells)
    # Runs of cells take the place of cells: an image has a few hundred of them.
    roots = _roots(len(starts), *_touching(starts, ends, width))
    _, names = np.unique(roots, return_inverse=True)  # a root is the first run of its part
    labels = np.zeros(cells.shape, dtype=np.int64)
    labels[cells] = np.repeat(names + 1, ends - starts)
    return torch.from_numpy(labels).to(mask.device)


def _runs(cells: NDArray[np.bool_]) -> tuple[Index, Index, int]:
    """First cell and end of each run, row by row, as places in rows of ``width`` cells.

    Rows are one cell wider than the mask, which keeps one row's end from the next one's start.
    """
    changes = np.diff(np.pad(cells, ((0, 0), (1, 1))), axis=1)  # [rows, cols + 1]
    borders = np.flatnonzero(changes)  # a start, an end, a start, ...
    return borders[::2], borders[1::2], changes.shape[1]


def _touching(starts: Index, ends: Index, width: int) -> tuple[Index, Index]:
    """Pairs of runs, one below the other, that share a side or a corner."""
    first = np.searchsorted(ends, starts - width)  # the first run above that ends late enough
    after = np.searchsorted(starts, ends - width, side="right")  # the first that begins too late
    links = after - first
    below = np.repeat(np.arange(len(starts)), links)
    above = np.arange(len(below)) + np.repeat(first - (np.cumsum(links) - links), links)
    return below, above


def _roots(count: int, first: Index, second: Index) -> Index:
    """The lowest of ``count`` runs that each can reach over links ``first[i] - second[i]``."""
    roots = np.arange(count)
    while len(first):
        hooks = np.arange(count)
        np.minimum.at(hooks, first, second)
        np.minimum.at(hooks, second, first)
        # Pointer jumping: a chain of hooks becomes half as long each time.
        while (hooks[hooks] != hooks).any():
            hooks = hooks[hooks]
        # Go on between the roots, with the links that still join two of them.
        roots, first, second = hooks[roots], hooks[first], hooks[second]
        apart = first != second
        first, second = first[apart], second[apart]
    return roots


def largest_component(mask: Tensor) -> Tensor:
    """The connected part of a mask (see :func:`components`) that has the most cells.

    Of parts of one size the one whose first cell comes first, row by row. Bool ``[rows, cols]`` in
    and out; all False stays all False. Raises ValueError for another dtype or shape.
    """
    labels = components(mask)
    sizes = torch.bincount(labels[mask], minlength=2)  # size 0 for label 0, then the parts
    return labels == sizes[1:].argmax() + 1


def label_map(values: Tensor, masks: Tensor) -> Tensor:
    """In each cell the number of the word that is strongest there, among those whose mask holds.

    Strength is where the value lies in the range of the word's own, from 0 to 1; 0 for a word that
    has one value everywhere.

    Args:
        values: real numbers ``[words, (frames,) rows, cols]``, at least one word.
        masks: bool ``[words, (frames,) rows, cols]``.

    Returns:
        int64 ``[(frames,) rows, cols]``: 0 where no mask holds, else 1 for the first word, 2 for
        the second, and so on. Of words of equal strength the first.

    Raises:
        ValueError: the shapes differ or are not these, there is no word, the
            masks are not bool, or a value is NaN or infinite.
    """
    if values.ndim not in (3, 4) or values.shape != masks.shape or masks.dtype != torch.bool:
        raise InvalidValueError(
            f"Asked for the labels of values {list(values.shape)} with masks {list(masks.shape)} "
            f"of {masks.dtype}. Pass both as [words, (frames,) rows, cols], the masks as bool."
        )
    _check_finite(values)
    low, high = (
        limit(values, tuple(range(1, values.ndim)), keepdim=True)
        for limit in (torch.amin, torch.amax)
    )
    strength = torch.where(high > low, (values - low) / (high - low), 0.0)
    strongest = strength.masked_fill(~masks, -math.inf).argmax(0) + 1
    return strongest * masks.any(0)


def _check_finite(values: Tensor) -> None:
    broken = int((~values.isfinite()).sum())
    if broken or not values.numel():
        raise InvalidValueError(
            f"Asked for a mask of a map of shape {list(values.shape)}, {broken} of whose "
            f"{values.numel()} values are NaN or infinite. Pass a map with values, all of them "
            "finite; NaN often comes from a model run in float16, which bfloat16 or float32 cures."
        )
