"""`Strays`: calls of a model that are no passes of the run that is watched."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..errors import warn
from ..models.layers import unwrapped
from .passes import CaptureWarning, Stray


class Strays:
    """How often who called a model beside its run; told once, when the run is over."""

    def __init__(self, model: Any):
        self._kind = type(unwrapped(model)).__name__
        self._calls: Counter[Stray] = Counter()

    def note(self, stray: Stray) -> None:
        self._calls[stray] += 1

    def forget(self) -> None:
        self._calls.clear()

    def __str__(self) -> str:
        """Return what to say of them; nothing of calls that another capture watches."""
        told = [
            (one, n) for one, n in self._calls.items() if not (one.call and one.call.is_watched)
        ]
        if not told:
            return ""
        callers = ", ".join(dict.fromkeys(one.who for one, _ in told))
        return (
            f"{sum(n for _, n in told)} call(s) of the {self._kind} were not part of this run: "
            f"from {callers}. They ran untouched and were not counted."
        )

    def tell(self) -> None:
        """Warn of them, once."""
        if text := str(self):
            warn(text, CaptureWarning)
        self.forget()
