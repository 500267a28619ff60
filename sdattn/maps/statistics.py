"""Statistics of one word's map: how high it is, how much, where, and how spread out."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from ..errors import InvalidValueError
from ..files.records import Record
from ..files.tables import library
from .masks import mask_of

if TYPE_CHECKING:
    import pandas as pd

# The statistics of a word as columns of a table, see WordStatistics.flat()
NUMBERS = ("peak", "mean", "mass", "centre_row", "centre_col", "area", "entropy")
_DIGITS = 6  # significant digits in files; float16 maps have three to four


@dataclass(frozen=True)
class WordStatistics(Record):
    """Statistics of a heatmap's values ``v[r, c]`` with ``R`` rows and ``C`` columns; for a video
    with ``F`` frames ``v[f, r, c]``, summed over frames too.

    Sums are over cells, in float64, and do not depend on the number of threads. Peak, mean and mass
    have the unit of the values, by default a share of the cell's attention.

    Attributes:
        columns: the token columns that it comes from.
        peak: the largest value.
        mean: ``sum v / (R C)``, for a video ``sum v / (F R C)``.
        mass: ``sum v``, in cells: 3.5 means as much as three and a half cells that attend only to
            the word.
        centre: (row, col), the mean position weighted by the values, from the top and from the
            left: ``sum v (r + 1/2) / (R sum v)`` and ``sum v (c + 1/2) / (C sum v)``, in (0, 1);
            None for an all-zero map.
        area: share of the cells above half of the range, as in :meth:`Heatmap.mask`, in [0, 1]; 0
            for a flat map.
        entropy: ``-sum p ln p`` with ``p = v / sum v``, in nats, from 0 for a single cell to ``ln(R
            C)`` for a flat map, ``ln(F R C)`` for a video; None for an all-zero map.
        frames: mass of each frame of a video; None for an image.
    """

    word: str
    columns: tuple[int, ...]
    peak: float
    mean: float
    mass: float
    centre: tuple[float, float] | None
    area: float
    entropy: float | None
    frames: tuple[float, ...] | None = None

    @classmethod
    def of(cls, word: str, values: Tensor, columns: Sequence[int]) -> WordStatistics:
        """Return the statistics of a map ``[rows, cols]`` or ``[frames, rows, cols]``; raise
        ValueError for a value that is not finite, or below 0."""
        area = float(mask_of(values.detach()).double().mean())  # refuses what is not finite
        cells = np.ascontiguousarray(values.detach().cpu().double())
        lowest = float(cells.min())
        if lowest < 0:
            raise InvalidValueError(
                f"The map of {word!r} has values below 0, down to {lowest:.3g}. Statistics need "
                "maps of attention or of change, which have none."
            )
        mass = float(cells.sum())
        return cls(
            word,
            tuple(columns),
            peak=float(cells.max()),
            mean=mass / cells.size,
            mass=mass,
            centre=(_centre(cells, -2), _centre(cells, -1)) if mass else None,
            area=area,
            entropy=_entropy(cells / mass) if mass else None,
            frames=tuple(cells.sum((1, 2)).tolist()) if cells.ndim == 3 else None,
        )

    def rounded(self) -> WordStatistics:
        """Round to six significant digits, as in files."""
        names = ("peak", "mean", "mass", "centre", "area", "entropy", "frames")
        return replace(self, **{name: _rounded(getattr(self, name)) for name in names})

    def flat(self) -> dict[str, Any]:
        """Return ``word`` and the numbers by ``NUMBERS``; a missing number is None."""
        row, col = self.centre or (None, None)
        numbers = self.peak, self.mean, self.mass, row, col, self.area, self.entropy
        return {"word": self.word, **dict(zip(NUMBERS, numbers, strict=True))}


def _centre(values: np.ndarray, axis: int) -> float:
    """Return the weighted mean position along an axis, -2 or -1, as a fraction of its length."""
    axes = set(range(values.ndim)) - {values.ndim + axis}
    along = values.sum(tuple(axes))
    centres = (np.arange(len(along)) + 0.5) / len(along)
    return float((centres * along).sum() / along.sum())


def _entropy(shares: np.ndarray) -> float:
    some = shares[shares > 0]
    return abs(float((some * np.log(some)).sum()))


def _rounded(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_rounded, value))
    return None if value is None else float(f"{value:.{_DIGITS}g}")


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Return Pearson's correlation of two maps of one size, or None if a map is flat."""
    if any(bool(values.min() == values.max()) for values in (a, b)):
        return None
    a, b = (values.double() - values.double().mean() for values in (a, b))
    return max(-1.0, min(1.0, float((a * b).sum() / (a.norm() * b.norm()))))


def to_dataframe(rows: Iterable[Mapping[str, Any]], labels: Sequence[str]) -> pd.DataFrame:
    """Return a pandas table, read row by row, with the columns ``labels`` and ``NUMBERS``."""
    table = library("pandas").DataFrame
    nan = float("nan")
    held: dict[str, list[Any]] = {name: [] for name in labels}
    numbers = {name: array("d") for name in NUMBERS}
    for row in rows:
        for name, column in held.items():
            column.append(row[name])
        for name, values in numbers.items():
            values.append(nan if row[name] is None else row[name])
    return table({**held, **{name: np.asarray(values) for name, values in numbers.items()}})
