"""How well maps point at objects: measures against masks, agreement of maps, and intervals.

    pointed, score (maps, masks)    a dict of arrays, one value a map
    lands_on_own(maps, own, other)  whether each word is higher on its own object
    shares(maps, masks)             how much of each map is on each mask
    rank_correlation(a, b)          Spearman's, with ties
    interval(values, groups)        95 % of a mean, by resampling groups (Efron 1979)
    wilson(hits, n)                 95 % of a share

Maps are float ``[maps, rows, cols]``, masks bool of the same shape.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray

from sdattn.maps.masks import otsu

Floats = NDArray[np.float64]
LEVELS = np.linspace(0.05, 0.95, 19).round(2)  # of a map's range, from its lowest to its highest
FIXED = 0.5


def pointed(maps: NDArray[np.floating], masks: NDArray[np.bool_]) -> dict[str, Floats]:
    """Each map against the mask of its object.

    Returns:
        ``"ious"`` ``[maps, levels]``: intersection over union of the mask and what lies above each
        of ``LEVELS``; ``"fixed"``: the same above half of the range; ``"pointing"``: 1 where the
        highest cell is on the object (Zhang et al. 2016).
    """
    flat, scaled, truth = _flat(maps, masks)
    ious = np.stack([_iou(scaled >= level, truth) for level in LEVELS], axis=1)
    on_object = truth[np.arange(len(flat)), flat.argmax(1)].astype(np.float64)
    return {"ious": ious, "fixed": _iou(scaled >= FIXED, truth), "pointing": on_object}


def score(maps: NDArray[np.floating], masks: NDArray[np.bool_]) -> dict[str, Floats]:
    """:func:`pointed`, and ``"otsu"``: IoU above Otsu's threshold; ``"precision"``: average
    precision of the cells ranked by the map, those of one value together."""
    flat, scaled, truth = _flat(maps, masks)
    cuts = [otsu(torch.from_numpy(one)) for one in scaled]
    return {
        **pointed(maps, masks),
        "otsu": _iou(scaled >= np.array(cuts)[:, None], truth),
        "precision": np.array([average_precision(*one) for one in zip(flat, truth, strict=True)]),
    }


def _flat(
    maps: NDArray[np.floating], masks: NDArray[np.bool_]
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Maps, maps scaled to [0, 1] and masks, ``[maps, cells]`` each."""
    flat = np.asarray(maps, dtype=np.float64).reshape(len(maps), -1)
    low, high = flat.min(1, keepdims=True), flat.max(1, keepdims=True)
    scaled = (flat - low) / np.maximum(high - low, np.finfo(np.float64).tiny)
    return flat, scaled, masks.reshape(len(masks), -1)


def _iou(found: NDArray[np.bool_], truth: NDArray[np.bool_]) -> Floats:
    return (found & truth).sum(1) / (found | truth).sum(1)


def average_precision(values: Floats, truth: NDArray[np.bool_]) -> float:
    """The mean over recall of the precision: ``sum_k (R_k - R_(k-1)) P_k`` over the distinct
    values from the highest down."""
    order = np.argsort(-values, kind="stable")
    ranked, hits = values[order], np.cumsum(truth[order])
    last = np.append(ranked[1:] != ranked[:-1], True)  # cells of one value count together
    precision = (hits / np.arange(1, len(hits) + 1))[last]
    gained = np.diff(hits[last], prepend=0) / hits[-1]
    return float((gained * precision).sum())


def lands_on_own(
    maps: NDArray[np.floating], own: NDArray[np.bool_], others: NDArray[np.bool_]
) -> Floats:
    """Return 1 for each word whose map's mean is higher on its own object than on the other ones,
    else 0."""
    triples = zip(maps, own, others, strict=True)
    higher = [float(one[here].mean()) > float(one[there].mean()) for one, here, there in triples]
    return np.array(higher, dtype=np.float64)


def shares(maps: NDArray[np.floating], masks: NDArray[np.bool_]) -> Floats:
    """Return how much of each map's sum is on each mask, ``[maps, masks]``: for masks that leave
    out no cell and share none, each row's sum is 1. Maps are >= 0."""
    flat = np.asarray(maps, dtype=np.float64).reshape(len(maps), -1)
    total = np.maximum(flat.sum(1, keepdims=True), np.finfo(np.float64).tiny)
    return (flat / total) @ masks.reshape(len(masks), -1).T.astype(np.float64)


def rank_correlation(a: NDArray[np.floating], b: NDArray[np.floating]) -> float:
    """Spearman's rank correlation of two maps, in [-1, 1]; NaN where one of them is flat."""
    ranks = [_ranks(np.asarray(one, dtype=np.float64).ravel()) for one in (a, b)]
    centred = [one - one.mean() for one in ranks]
    lengths = np.sqrt((centred[0] ** 2).sum() * (centred[1] ** 2).sum())
    return float((centred[0] * centred[1]).sum() / lengths) if lengths else float("nan")


def _ranks(values: Floats) -> Floats:
    """Equal values share the mean of their ranks."""
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return (ends - (counts - 1) / 2)[place]


def interval(
    values: Floats, groups: NDArray[np.int64], rounds: int = 2000, seed: int = 0
) -> tuple[float, float, float]:
    """The mean of some values and the ends of its 95 % interval, by resampling whole groups: the
    images of one scene are no independent evidence."""
    names, place = np.unique(groups, return_inverse=True)
    sums = np.bincount(place, weights=values, minlength=len(names))
    counts = np.bincount(place, minlength=len(names))
    rng = np.random.default_rng(seed)
    drawn = rng.integers(0, len(names), (rounds, len(names)))
    means = sums[drawn].sum(1) / counts[drawn].sum(1)
    low, high = np.percentile(means, [2.5, 97.5])
    return float(values.mean()), float(low), float(high)


def wilson(hits: int, n: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson 1927)."""
    z = 1.959964
    middle = (hits + z**2 / 2) / (n + z**2)
    half = z / (n + z**2) * math.sqrt(hits * (n - hits) / n + z**2 / 4)
    return middle - half, middle + half
