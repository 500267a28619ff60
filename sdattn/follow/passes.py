"""`Pass`: one call of a model; its place in the `Schedule` of a run; `Strays` of no run, and
`StepCalls` of steps that had one already."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.calls import Rows, row_index
from ..errors import CaptureError as CaptureError
from ..errors import SdattnWarning, warn
from ..models.denoiser_call import Size, Timestep, unwrapped
from ..models.guidance import Branch, Order, branch_rows
from ..models.running_call import RunningCall
from .text_watch import Verdict


class CaptureWarning(SdattnWarning):
    """Capture saw less than it was asked to see, or something changed during it."""


class Stray(NamedTuple):
    """Call of a model outside the watched run: its caller, and another pipeline's call."""

    who: str
    call: RunningCall | None = None


_is_own: ContextVar[bool] = ContextVar("_is_own", default=False)


@contextmanager
def own_calls() -> Iterator[None]:
    """Mark calls of models in the block as sdattn's own, for a gradient: captures around it leave
    them alone, as any stray, without a warning."""
    before = _is_own.set(True)
    try:
        yield
    finally:
        _is_own.reset(before)


class Strays:
    """Number of calls of a model outside its run, by caller; reported once, at the end."""

    def __init__(self, model: object):
        self._kind = type(unwrapped(model)).__name__
        self._calls: Counter[Stray] = Counter()

    def note(self, stray: Stray) -> None:
        if not _is_own.get():
            self._calls[stray] += 1

    def forget(self) -> None:
        self._calls.clear()

    def __str__(self) -> str:
        """Return the warning about them; empty for calls that another capture watches."""
        unwatched = {
            stray: number
            for stray, number in self._calls.items()
            if not (stray.call and stray.call.is_watched)
        }
        if not unwatched:
            return ""
        callers = ", ".join(dict.fromkeys(stray.who for stray in unwatched))
        return (
            f"{sum(unwatched.values())} call(s) of the {self._kind} were not part of this run: "
            f"from {callers}. They ran untouched and were not counted."
        )

    def tell(self) -> None:
        if text := str(self):
            warn(text, CaptureWarning)
        self.forget()


class StepCalls:
    """Calls that a pipeline made itself at a step that had one already for the same branch. The
    program does not show which of them makes the image."""

    def __init__(self, pipeline: object, model: object):
        self._names = type(pipeline).__name__, type(unwrapped(model)).__name__
        self._most = 1  # calls in one step

    def note(self, again: Pass) -> None:
        self._most = max(self._most, again.again + 1)

    def __str__(self) -> str:
        """Return what is doubtful; empty if no step had two calls."""
        if self._most == 1:
            return ""
        pipeline, model = self._names
        return (
            f"The {pipeline} called its {model} {self._most} times in a step, for the same branch, "
            "and which of these calls makes the image is not known."
        )


class Schedule:
    """Timesteps of one run, as the scheduler holds them, and a pass's place among them."""

    def __init__(self, timesteps: Any):
        self.timesteps = timesteps
        self._kept = timesteps.clone() if isinstance(timesteps, Tensor) else timesteps

    def __len__(self) -> int:
        return len(self.timesteps)

    @cached_property
    def _values(self) -> list[float]:
        values: list[float] = torch.as_tensor(self._kept).float().tolist()
        return values

    def index(self, timestep: float | Timestep, scheduler: object) -> int | None:
        """Return the index of a pass's entry, or None if the host does not know it.

        If the pipeline computed with the entry (FLUX, Sana), it is the scheduler's current one,
        which moves on between steps only.
        """
        index = timestep.index_in(self.timesteps) if isinstance(timestep, Timestep) else None
        step = getattr(scheduler, "step_index", None)
        if index is None and isinstance(step, int) and 0 <= step < len(self):
            return step
        return index

    def position(self, index: int | None, timestep: float | Timestep) -> float:
        """Return the middle of a pass's part of the run: for entry ``index``, or the entry nearest
        to its timestep. Equal entries (second order) count as the first of them."""
        values = self._values
        if index is None:
            at = float(timestep)
            index = min(range(len(values)), key=lambda i: abs(values[i] - at))
        return (values.index(values[index]) + 0.5) / len(values)


@dataclass
class Pass:
    """One call of the denoiser.

    Attributes:
        given: timestep as the model was called with it.
        latent_size: (rows, cols) of the latent, (frames, rows, cols) for a video; None if queries
            are a mere sequence.
        batch: rows in the batch.
        order: chunks that guidance makes of the batch, in order; None if unknown.
        rows: rows kept, one per image; all rows of a video whose frames are rows.
        branches: guidance branch of each image.
        n_text: token columns of the text; 0 if only the layers will tell.
        frame_rows: rows per image, see :class:`DenoiserCall`.
        begins_run: True for the first pass of a run.
        schedule: schedule of the run, or None if unknown.
        index: the pass's entry in the schedule; None if it must be found by the timestep.
        skips_layers: True for the extra pass of skip-layer guidance.
        again: number of calls that the pipeline itself made before at this entry of the schedule,
            for the same branch.
        is_direct: True for ``unet.forward(...)``, which runs no hooks of the UNet itself.
        stray: caller of the model, if this pass belongs to no run; else None.
        text_changed: True if the kept rows have other text states than in the previous pass.
        text_by_frame: True if the kept frames of a video have text states of their own.
    """

    given: float | Timestep
    latent_size: Size | None
    batch: int
    order: Order | None
    rows: tuple[int, ...] = ()
    branches: tuple[Branch, ...] = ()
    n_text: int = 0
    frame_rows: int = 1
    begins_run: bool = False
    schedule: Schedule | None = None
    index: int | None = None
    skips_layers: bool = False
    again: int = 0
    is_direct: bool = False
    stray: Stray | None = None
    text_changed: Verdict = False
    text_by_frame: Verdict = False

    @cached_property
    def timestep(self) -> float:
        """Timestep in the scheduler's unit (the batch's first); reading it waits for its device."""
        return float(self.given)

    @cached_property
    def position(self) -> float | None:
        """Position in the run, in [0, 1]: the middle of its part of the schedule; None if unknown.
        The first reading in a run may wait for the device."""
        return None if self.schedule is None else self.schedule.position(self.index, self.given)

    @cached_property
    def kept(self) -> Rows | None:
        """:attr:`rows` as an index of the batch, or None if they are all of it."""
        index = row_index(self.rows)
        return None if index == slice(0, self.batch) else index

    @property
    def of_no_prompt(self) -> bool:
        """True if it holds only the negative prompt, or neither branch."""
        return self.skips_layers or (self.order is not None and "conditional" not in self.order)

    @property
    def prompts(self) -> slice | None:
        """Rows of the prompts, or None if unknown or if there are none."""
        if self.order is None or self.of_no_prompt:
            return None
        return branch_rows(self.order, self.batch)["conditional"]
