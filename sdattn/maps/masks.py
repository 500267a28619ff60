import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidValueError, refuse
from ..prompts.words import folded

Index = NDArray[np.intp]


@dataclass(frozen=True)
class MaskSettings:
    """Which words get masks, and where their maps are cut.

    Attributes:
        words: single words, in any case, whose every occurrence gets a mask; None for all words. An
            item without them gets none.
        threshold: as for :func:`mask_of`, but a share is above 0 and below 1; None for half of the
            range.
    """

    words: tuple[str, ...] | None = None
    threshold: float | Literal["otsu"] | None = None

    def __post_init__(self) -> None:
        words = self.words
        if isinstance(words, str) or any(len(word.split()) != 1 for word in words or ()):
            raise refuse("mask_words", words, "a tuple of single words, such as ('cat', 'sofa')")
        share = self.threshold
        if share not in ("otsu", None) and (isinstance(share, str) or not 0 < share < 1):
            known = "a share of the range above 0 and below 1, or 'otsu'"
            raise refuse("mask_threshold", share, known)

    def selects(self, word: str) -> bool:
        """Check whether a word gets a mask."""
        return self.words is None or folded(word) in map(folded, self.words)

    def level(self, values: Tensor) -> float:
        """Return the lowest value inside a mask, ``inf`` for a flat map, see
        :func:`threshold_level`."""
        return threshold_level(values, 0.5 if self.threshold is None else self.threshold)


def smooth(maps: Tensor, sigma: float, radius: int | None = None) -> Tensor:
    """Blur floating point maps ``[..., rows, cols]`` with a Gaussian, reflected at the border.

     a b c  | a b c | b a``. A window wider than the grid is reflected repeatedly, so any radius
    works on any grid; an axis of one cell does not change. Gradients pass through.

    Args:
        sigma: standard deviation of the Gaussian, in cells; 0 changes nothing.
        radius: number of cells used on each side (default: ``ceil(3 * sigma)``), with weights that
            sum to 1. ``smooth(maps, 0.5**0.5, radius=1)`` is what Attend-and-Excite does (Chefer et
            al. 2023, yuval-alaluf/Attend-and-Excite): its "sigma 0.5" divides by ``(2 * sigma) **
            2`` where a Gaussian has ``2 * sigma**2``.
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
    """Return the blur of one axis as a matrix ``[to, from]`` whose rows sum to 1."""
    reach = len(weights) // 2
    targets = torch.arange(n_cells)[:, None] + torch.arange(-reach, reach + 1)  # [to, window]
    period = max(2 * (n_cells - 1), 1)  # there and back
    # Reflected at both borders repeatedly: a walk to and fro has a period.
    targets = targets % period
    targets = torch.minimum(targets, period - targets)
    blur = torch.zeros(n_cells, n_cells, dtype=weights.dtype)
    return blur.scatter_add_(1, targets, weights.expand(n_cells, -1))


def otsu(values: Tensor) -> float:
    """Return the smallest value of the upper of the two most different classes; ``inf`` if all are
    equal. Raise ValueError if there is no value, or one is not finite.

    Otsu 1979, "A threshold selection method from gray-level histograms": the lowest cut with the
    largest variance between the classes, over all cuts of the values, in float64.
    """
    _check_finite(values)
    ordered = values.detach().flatten().double().sort().values
    if ordered[0] == ordered[-1]:
        return math.inf
    n = len(ordered)
    lower = torch.arange(1, n, device=ordered.device)  # size of the lower class
    # w0 * w1 * (mean1 - mean0)^2; the sums of the two classes differ only in sign
    between = (ordered - ordered.mean()).cumsum(0)[:-1] ** 2 / (lower * (n - lower))
    return float(ordered[between.argmax() + 1])


def threshold_level(values: Tensor, threshold: float | Literal["otsu"]) -> float:
    """Return the level that a threshold stands for, ``inf`` if all values are equal; raise
    ValueError for an unknown threshold, and as :func:`otsu`."""
    if threshold == "otsu":
        return otsu(values)
    if isinstance(threshold, str) or not 0 <= threshold <= 1:
        raise refuse("threshold", threshold, "'otsu' or a share of the range, from 0 to 1")
    _check_finite(values)
    low = values.min()
    high = values.max()
    level = min(low + threshold * (high - low), high)  # rounding might lift it above
    return float(level) if high > low else math.inf


def quantile_level(values: Tensor, quantile: float) -> float:
    """Return the smallest value at or above a quantile in [0, 1); ``inf`` if all are equal.

    The quantile is type 7 of Hyndman & Fan 1996, as ``numpy.quantile``.
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
    """Return a mask of the cells where a map is high.

    Args:
        values: real numbers ``[rows, cols]``, or ``[frames, rows, cols]`` for a video, which has
            one level for all frames.
        threshold: a share of the range from the lowest value to the highest, in [0, 1], or
            ``"otsu"``, see :func:`otsu` (default: 0.5).
        quantile: in [0, 1), instead of ``threshold``: keep the values at or above this quantile.
        largest: keep only the largest connected part, in a video each frame's.

    Returns:
        bool, shaped like ``values``; all False for a flat map.

    Raises:
        ValueError: a threshold or quantile out of range, or both; an empty or not finite map.
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
    """Label the connected parts of a mask, bool ``[rows, cols]``, that touch by sides or corners.

    Runs of a row that touch are linked, and each takes the lowest name that it can reach: the
    hooking and pointer jumping of Shiloach & Vishkin 1982, logarithmic even for a spiral.

    Returns:
        int64 ``[rows, cols]``: 0 outside, and 1, 2, ... by the parts' first cells, row by row.
    """
    if mask.ndim != 2 or mask.dtype != torch.bool:
        raise InvalidValueError(
            f"Asked for the parts of a mask that is {mask.dtype} of shape {list(mask.shape)}. "
            "Pass bool [rows, cols], such as values >= level."
        )
    cells = mask.numpy(force=True)
    starts, ends, width = _runs(cells)
    # Runs instead of cells: an image has a few hundred of them.
    roots = _roots(len(starts), *_touching(starts, ends, width))
    _, names = np.unique(roots, return_inverse=True)  # a root is the first run of its part
    labels = np.zeros(cells.shape, dtype=np.int64)
    labels[cells] = np.repeat(names + 1, ends - starts)
    return torch.from_numpy(labels).to(mask.device)


def _runs(cells: NDArray[np.bool_]) -> tuple[Index, Index, int]:
    """Return start and end of each run, row by row, as positions in rows of ``width`` cells: one
    wider than the mask, which separates one row's end from the next one's start."""
    changes = np.diff(np.pad(cells, ((0, 0), (1, 1))), axis=1)  # [rows, cols + 1]
    borders = np.flatnonzero(changes)  # a start, an end, a start, ...
    return borders[::2], borders[1::2], changes.shape[1]


def _touching(starts: Index, ends: Index, width: int) -> tuple[Index, Index]:
    """Return pairs of runs, one below the other, that share a side or a corner."""
    first = np.searchsorted(ends, starts - width)  # the first run above that ends late enough
    after = np.searchsorted(starts, ends - width, side="right")  # the first that begins too late
    links = after - first
    below = np.repeat(np.arange(len(starts)), links)
    above = np.arange(len(below)) + np.repeat(first - (np.cumsum(links) - links), links)
    return below, above


def _roots(count: int, first: Index, second: Index) -> Index:
    """Return the lowest run that each of ``count`` can reach over ``first[i] - second[i]``."""
    roots = np.arange(count)
    while len(first):
        hooks = np.arange(count)
        np.minimum.at(hooks, first, second)
        np.minimum.at(hooks, second, first)
        # Pointer jumping: each round halves the chains of hooks.
        while (hooks[hooks] != hooks).any():
            hooks = hooks[hooks]
        # Go on between the roots, with the links that still join two of them.
        roots = hooks[roots]
        apart = hooks[first] != hooks[second]
        first = hooks[first][apart]
        second = hooks[second][apart]
    return roots


def largest_component(mask: Tensor) -> Tensor:
    """Return a mask's largest component, bool ``[rows, cols]``; the first of equals."""
    labels = components(mask)
    sizes = torch.bincount(labels[mask], minlength=2)  # size 0 for label 0, then the parts
    return labels == sizes[1:].argmax() + 1


def label_map(values: Tensor, masks: Tensor) -> Tensor:
    """Return, for each cell, the number of the strongest word among those whose mask holds it:
    int64 ``[(frames,) rows, cols]``, 0 for none, 1 for the first word; ties go to the first.

    Strength is the value's position in the word's own range, from 0 to 1. Values and bool masks are
    ``[words, (frames,) rows, cols]``.
    """
    if values.ndim not in (3, 4) or values.shape != masks.shape or masks.dtype != torch.bool:
        raise InvalidValueError(
            f"Asked for the labels of values {list(values.shape)} with masks {list(masks.shape)} "
            f"of {masks.dtype}. Pass both as [words, (frames,) rows, cols], the masks as bool."
        )
    _check_finite(values)
    axes = tuple(range(1, values.ndim))
    low = values.amin(axes, keepdim=True)
    high = values.amax(axes, keepdim=True)
    strength = torch.where(high > low, (values - low) / (high - low), 0.0)
    strongest = strength.masked_fill(~masks, -math.inf).argmax(0) + 1
    return strongest * masks.any(0)


def _check_finite(values: Tensor) -> None:
    broken = int((~values.isfinite()).sum())
    if broken or not values.numel():
        raise InvalidValueError(
            f"Asked for a mask of a map of shape {list(values.shape)}, in which {broken} of "
            f"{values.numel()} values are NaN or infinite. Pass a map with values, all of them "
            "finite; NaN often comes from a model run in float16: use bfloat16 or float32."
        )
