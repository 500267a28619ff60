"""`Stopped`: a run that was told to stop before its last step, ``pipe._interrupt = True``.

The pipelines of diffusers then leave out the steps that are left and decode what they have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..errors import warn
from ..files.records import Record
from .passes import CaptureWarning


@dataclass(frozen=True)
class Stopped(Record):
    """Where a run was stopped.

    Attributes:
        after: steps that ran, calls of the model.
        steps: that the run would have had.
        kept: those that the maps are of, counted from 0.
    """

    after: int
    steps: int
    kept: tuple[int, ...]

    def __str__(self) -> str:
        return f"after {self.after} of {self.steps} steps; {self._maps()}"

    def _maps(self) -> str:
        if not self.kept:
            return "there are no maps"
        first, last = self.kept[0] + 1, self.kept[-1] + 1
        if len(self.kept) == 1:
            return f"the maps are of step {first}"
        if len(self.kept) == last - first + 1:
            return f"the maps are of steps {first} to {last}"
        return f"the maps are of steps {', '.join(str(step + 1) for step in self.kept)}"

    def tell(self) -> None:
        """Warn of it, once a run."""
        text = f"The run was stopped {self}."
        if not self.kept:
            text += " It ended before the steps that were to be kept; keep all of them."
        warn(text, CaptureWarning)


def may_stop(pipeline: Any) -> bool:
    """Check, in a pass of a model, that its pipeline can be stopped and has not been before: a
    call of it begins with the sign taken back, so one that is there belongs to another call."""
    return getattr(pipeline, "_interrupt", None) is False


def stopped_of(pipeline: Any, store: Any) -> Stopped | None:
    """Return where the run that a store captured was stopped; None if it went to its end.

    Args:
        pipeline: after the run, in whose first pass :func:`may_stop` held.
        store: the :class:`sdattn.MapStore` of it.
    """
    if getattr(pipeline, "_interrupt", None) is not True:
        return None
    timesteps = getattr(getattr(pipeline, "scheduler", None), "timesteps", ())
    steps = getattr(pipeline, "num_timesteps", None) or len(timesteps)  # fewer from an image
    passes = len(store.passes)
    kept = tuple(number for number in range(passes) if store.keeps(number))
    if store.keep.steps.last:
        kept = kept[-1:]
    return Stopped(passes, steps, kept) if 0 < passes < steps else None
