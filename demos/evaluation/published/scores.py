"""What papers count of masks, and what it ought to be.

    Labelled            right and wrong cells of two classes, summed over a data set
    Confusion           the same of many classes
    iou_interval        the mean of single IoUs, and its 95 % interval
    ap_of_both          average precision of foreground and background together

Truth is uint8 ``[rows, cols]``; ``IGNORED`` is counted nowhere.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..measures import average_precision

IGNORED = 255
Mask = NDArray[np.bool_]
Labels = NDArray[np.uint8]
Floats = NDArray[np.floating]


class Confusion:
    """How often a cell of class ``i`` was taken for one of class ``j``.

    Args:
        classes: how many there are; 0 is the background.
    """

    def __init__(self, classes: int):
        self.counts = np.zeros((classes, classes), dtype=np.int64)

    def add(self, found: Labels, truth: Labels) -> None:
        """The cells of one image; both ``[rows, cols]``."""
        if found.shape != truth.shape:
            raise ValueError(f"Labels {found.shape} against a truth of {truth.shape}.")
        classes, known = len(self.counts), truth != IGNORED
        pairs = truth[known].astype(np.int64) * classes + found[known]
        self.counts += np.bincount(pairs, minlength=classes**2).reshape(classes, classes)

    @property
    def ious(self) -> list[float | None]:
        """Intersection over union of each class, summed over the data set; None for a class that
        is in no image and was found in none."""
        right = np.diag(self.counts)
        union = self.counts.sum(0) + self.counts.sum(1) - right
        return [int(a) / int(b) if b else None for a, b in zip(right, union, strict=True)]

    @property
    def mean_iou(self) -> float:
        """The mean over the classes that there are."""
        return _mean([iou for iou in self.ious if iou is not None])

    @property
    def accuracy(self) -> float:
        """Right cells in all cells that have a label."""
        total = int(self.counts.sum())
        return int(np.trace(self.counts)) / total if total else math.nan


class Labelled(Confusion):
    """Foreground (1) and background (0)."""

    def __init__(self) -> None:
        super().__init__(2)

    @property
    def printed_iou(self) -> float:
        """``acc / (2 - acc)``, which ConceptAttention's script prints as "mIoU": the IoU that a
        class of so many right cells would have if it were alone."""
        return self.accuracy / (2 - self.accuracy)

    @property
    def foreground_iou(self) -> float | None:
        return self.ious[1]


def iou(found: Mask, truth: Mask) -> float:
    """Of two masks; 1 where both are empty."""
    union = int((found | truth).sum())
    return int((found & truth).sum()) / union if union else 1.0


def iou_interval(ious: Sequence[float]) -> tuple[float, float]:
    """The mean, and ``1.96 s / sqrt(n)``; the half width is NaN for fewer than two."""
    values = np.asarray(ious, dtype=np.float64)
    if len(values) < 2:
        return _mean(ious), math.nan
    return float(values.mean()), float(1.96 * values.std(ddof=1) / math.sqrt(len(values)))


def ap_of_both(values: Floats, truth: Labels) -> float:
    """Average precision of ``stack(1 - c, c)`` against one-hot labels, ``c`` the values between
    their lowest (0) and highest (1). Source: Chefer et al., Transformer-Explainability, whose
    script ConceptAttention's follows."""
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / max(high - low, np.finfo(np.float64).tiny)
    known = truth != IGNORED
    ranked = np.concatenate([1 - scaled[known], scaled[known]]).astype(np.float64)
    labels = np.concatenate([truth[known] == 0, truth[known] == 1])
    return average_precision(ranked, labels)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else math.nan
