"""What ``run.json`` of a comparison says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...files.records import Record
from .matching import WordDifference

FORMAT = "sdattn-diff-1"


@dataclass(frozen=True)
class ComparedRun(Record):
    """One of the two runs; ``size`` is its image's (width, height)."""

    name: str
    prompt: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Largest(Record):
    """Where B - A is furthest from 0; ``cell`` is (row, col) on the grid of both."""

    value: float
    cell: tuple[int, int]


@dataclass(frozen=True)
class WordNumbers(Record):
    """How far the maps of a word are apart, see :class:`WordDifference`; None where one of the runs
    does not have the word.

    Attributes:
        mean: of A's map and of B's.
        grid: (rows, cols) that both were brought to.
    """

    word: str
    mean: tuple[float | None, float | None]
    correlation: float | None
    largest: Largest | None
    grid: tuple[int, ...] | None = None

    @classmethod
    def of(cls, word: WordDifference) -> WordNumbers:
        known = word.difference is not None and word.largest is not None
        return cls(
            word=word.label,
            mean=(word.mean_a, word.mean_b),
            correlation=word.correlation,
            largest=Largest(*word.largest) if known else None,  # type: ignore[misc]
            grid=tuple(word.difference.shape) if known else None,  # type: ignore[union-attr]
        )


@dataclass(frozen=True)
class DiffInfo(Record):
    """The document; ``settings`` has A's and B's of each that differs."""

    runs: Sequence[ComparedRun]
    settings: Mapping[str, tuple[object, object]]
    words: Sequence[WordNumbers]

    def to_json(self) -> dict[str, Any]:
        return {"format": FORMAT, **super().to_json()}
