"""Match the words of two runs: the n-th occurrence with the n-th."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import zip_longest

from torch import Tensor

from ...errors import NotFoundError
from ...maps.heatmap import Heatmap
from ...maps.heatmaps import Heatmaps
from ...maps.statistics import correlation
from ...prompts.words import split_phrase


@dataclass(frozen=True, eq=False)
class WordDifference:
    """One word, phrase or occurrence in two runs; at least one of them has it.

    Attributes:
        label: text in the prompt of A, or in B's if A does not have it.
        a, b: the heatmap in each run on its own grid, or None.
    """

    label: str
    a: Heatmap | None
    b: Heatmap | None

    @cached_property
    def _pair(self) -> tuple[Tensor, Tensor] | None:
        """Return both maps on the finer grid, float32 ``[rows, cols]``, bilinear."""
        if self.a is None or self.b is None:
            return None
        finer = max((self.a.map, self.b.map), key=Tensor.numel)
        rows, cols = finer.shape
        return self.a.resize((rows, cols)), self.b.resize((rows, cols))

    @property
    def difference(self) -> Tensor | None:
        """B - A, float32 ``[rows, cols]`` on the finer of the two grids, in the maps' unit: by
        default a share of attention, so values are in [-1, 1]. None if a run lacks the word."""
        return None if self._pair is None else self._pair[1] - self._pair[0]

    @property
    def correlation(self) -> float | None:
        """Pearson's correlation of the two maps, cell by cell, in [-1, 1]; None if a map is flat or
        missing."""
        if self._pair is None:
            return None
        return correlation(*self._pair)

    @property
    def mean_a(self) -> float | None:
        """Mean of the map in A."""
        return None if self.a is None else float(self.a.values.double().mean())

    @property
    def mean_b(self) -> float | None:
        """Mean of the map in B."""
        return None if self.b is None else float(self.b.values.double().mean())

    @property
    def largest(self) -> tuple[float, tuple[int, int]] | None:
        """The difference furthest from zero, signed, and its (row, col)."""
        difference = self.difference
        if difference is None:
            return None
        row, col = divmod(int(difference.abs().argmax()), difference.shape[1])
        return float(difference[row, col]), (row, col)

    def to_json(self) -> dict[str, object]:
        """Return the means in A and B and how far the maps are apart, as ``run.json`` has them:
        ``largest`` is the value of B - A furthest from 0, at (row, col) of the common ``grid``."""
        numbers: dict[str, object] = {
            "word": self.label,
            "mean": (self.mean_a, self.mean_b),
            "correlation": self.correlation,
            "largest": None,
        }
        if self.difference is not None and self.largest is not None:
            value, cell = self.largest
            numbers["largest"] = {"value": value, "cell": cell}
            numbers["grid"] = tuple(self.difference.shape)
        return numbers


def match_words(a: Heatmaps, b: Heatmaps) -> list[WordDifference]:
    """Return all words: A's in order, then words that only B has."""
    of_a, of_b = (_numbered(maps.occurrences()) for maps in (a, b))
    labels = {key: heatmap.label for key, heatmap in (of_b | of_a).items()}
    return [WordDifference(labels[key], of_a.get(key), of_b.get(key)) for key in of_a | of_b]


def _numbered(maps: Sequence[Heatmap]) -> dict[tuple[tuple[str, ...], int], Heatmap]:
    """Key maps by their text in folded case and the number of the occurrence."""
    seen: Counter[tuple[str, ...]] = Counter()
    numbered = {}
    for heatmap in maps:
        text = tuple(split_phrase(heatmap.label))
        numbered[text, seen[text]] = heatmap
        seen[text] += 1
    return numbered


def choose_words(a: Heatmaps, b: Heatmaps, phrase: str) -> list[WordDifference]:
    """Return each occurrence of a word or phrase, the n-th of A with the n-th of B; raise KeyError
    if it is in neither run."""
    occurrences: list[tuple[Heatmap, ...]] = []
    reasons = []
    for maps in (a, b):
        try:
            occurrences.append(maps.find(phrase))
        except KeyError as error:
            occurrences.append(())
            reasons.append(error.args[0])
    if len(reasons) == 2:
        raise NotFoundError(f"{phrase!r} is in neither run. A: {reasons[0]} B: {reasons[1]}")
    return [WordDifference(phrase, x, y) for x, y in zip_longest(*occurrences)]
