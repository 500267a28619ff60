"""The numbers of one word's map: how high it is, how much, where, and how spread out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..files.records import Record
from ..files.tables import library
from .masks import mask_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class WordStatistics(Record):
    """What the values ``v[r, c]`` of a heatmap with ``R`` rows and ``C`` columns come to.

    All sums are over the cells and in float64. Peak, mean and mass have the unit of the values, by
    default a share of the cell's attention. The centre and the area are parts of the picture, so
    they do not depend on the grid.

    Attributes:
        word: what the map shows.
        columns: the token columns that it comes from.
        peak: the largest value.
        mean: ``sum v / (R C)``.
        mass: ``sum v``, in cells: 3.5 is as much as three and a half cells that attend to nothing
            but the word.
        centre: (row, col), the mean place weighted by the values, from the top and from the left:
            ``sum v (r + 1/2) / (R sum v)`` and ``sum v (c + 1/2) / (C sum v)``, in (0, 1); None for
            a map that is 0 everywhere.
        area: the part of the cells above half of the range, those of :meth:`Heatmap.mask`, in
            [0, 1]; 0 for a map of one value.
        entropy: ``-sum p ln p`` with ``p = v / sum v``, in nats, from 0 for a single cell to
            ``ln(R C)`` for a map of one value; None for a map that is 0 everywhere.
    """

    word: str
    columns: tuple[int, ...]
    peak: float
    mean: float
    mass: float
    centre: tuple[float, float] | None
    area: float
    entropy: float | None

    @classmethod
    def of(cls, word: str, values: Tensor, columns: Sequence[int]) -> WordStatistics:
        """Those of a map ``[rows, cols]``.

        Raises:
            ValueError: a value that is not finite, or below 0.
        """
        area = float(mask_of(values.detach()).double().mean())  # refuses what is not finite
        held = values.detach().double()
        if (lowest := float(held.min())) < 0:
            raise ValueError(
                f"The map of {word!r} has values below 0, the least {lowest:.3g}. Statistics are "
                "of maps of attention or of change, which have none."
            )
        mass = float(held.sum())
        return cls(
            word,
            tuple(columns),
            peak=float(held.max()),
            mean=mass / held.numel(),
            mass=mass,
            centre=(_centre(held, 0), _centre(held, 1)) if mass else None,
            area=area,
            entropy=float(torch.special.entr(held / mass).sum()) if mass else None,
        )


def _centre(values: Tensor, axis: int) -> float:
    """The mean place along an axis of a map that is not 0 everywhere, as a part of its length."""
    along = values.sum(1 - axis)
    places = (torch.arange(len(along)).to(along) + 0.5) / len(along)
    return float((places * along).sum() / along.sum())


def correlation(a: Tensor, b: Tensor) -> float | None:
    """Pearson's, of two maps of one size cell by cell, in [-1, 1] and float64; None where a map is
    flat."""
    if any(bool(values.min() == values.max()) for values in (a, b)):
        return None
    a, b = (values.double() - values.double().mean() for values in (a, b))
    return max(-1.0, min(1.0, float((a * b).sum() / (a.norm() * b.norm()))))


def to_dataframe(rows: Sequence[WordStatistics]) -> pd.DataFrame:
    """A row each; the centre is two columns, ``centre_row`` and ``centre_col``, and what is None
    is NaN.

    Raises:
        ImportError: pandas is not installed.
    """
    nan = float("nan")
    centres = [row.centre or (nan, nan) for row in rows]
    numbers = {
        "peak": [row.peak for row in rows],
        "mean": [row.mean for row in rows],
        "mass": [row.mass for row in rows],
        "centre_row": [row for row, _ in centres],
        "centre_col": [col for _, col in centres],
        "area": [row.area for row in rows],
        "entropy": [nan if row.entropy is None else row.entropy for row in rows],
    }
    words = {"word": [row.word for row in rows], "columns": [row.columns for row in rows]}
    table = library("pandas").DataFrame(words | numbers)
    return table.astype(dict.fromkeys(numbers, "float64"))
