"""`RunPart`: a part of a run, with one meaning for captures, knockouts, edits and presets."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ..errors import InvalidValueError
from ..models.values import number, whole

Span = float | tuple[float, float]  # 0.8 means (0, 0.8), in parts of the run


@dataclass(frozen=True)
class RunPart:
    """Part of a run, ``0 <= first <= last <= 1``.

    A pass of the model belongs to it if the middle of the pass lies in it, bounds included. So with
    an odd number of passes the middle one belongs to both halves, and a run of a single pass has it
    in either. A part that starts where it ends is empty.
    """

    first: float
    last: float

    @classmethod
    def between(cls, pair: object) -> RunPart | None:
        """Return the part between two points of the run, or None if ``pair`` is no such pair."""
        numbers = [number(item) for item in items_of(pair)]
        if len(numbers) != 2:
            return None
        first, last = numbers
        if first is None or last is None or not 0 <= first <= last <= 1:
            return None
        return cls(first, last)

    @classmethod
    def of(cls, span: object, passes: int | str = "their number") -> RunPart:
        """Read a part as knockouts and edits take it: 0.8 for the first 80 %, or ``(0.2, 0.8)``.

        Raises:
            ValueError: it is no part; the message names the number of ``passes``.
        """
        part = cls.between((0.0, span) if isinstance(span, Real) else span)
        if part is None:
            raise InvalidValueError(
                f"{span!r}: pass a part of the run from 0 to 1, such as 0.8 or (0.2, 0.8). For n "
                f"steps pass n / {passes}."
            )
        return part

    @classmethod
    def read(cls, pair: object) -> RunPart | None:
        """Read a part as captures take it, which also take indices of steps: ``(0.5, 1.0)``.

        Returns:
            None for anything else: two indices, a word, numbers outside [0, 1].

        Raises:
            ValueError: a tuple of the integers 0 and 1, which could be either.
        """
        part = cls.between(pair)
        if part is None or part.first == part.last:
            return None
        if any(whole(item) is None for item in items_of(pair)):
            return part
        if isinstance(pair, tuple):
            raise InvalidValueError(
                f"steps={pair!r} can be read in two ways. Pass [0, 1] for the first two calls of "
                "the model, (0.0, 1.0) for the whole run."
            )
        return None

    def holds(self, position: float | None) -> bool:
        """Check whether a pass with its middle at ``position`` belongs to it; None is an unknown
        position."""
        if position is None or self.first == self.last:
            return False
        return self.first <= position <= self.last

    def passes(self, count: int) -> list[int]:
        """Return the numbers of passes that belong to it, from 0, in a run of ``count`` passes."""
        return [i for i in range(count) if self.holds((i + 0.5) / count)]


def items_of(value: object) -> tuple[Any, ...]:
    """Return the items of a list; empty for a word, a number, or an array that is one number."""
    is_one = isinstance(value, str) or getattr(value, "ndim", None) == 0
    return tuple(value) if isinstance(value, Collection) and not is_one else ()
