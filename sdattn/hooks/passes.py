"""`Pass`: one call of a model, as captures and controllers know it; its place in the `Schedule` of
a run; and `Strays`, the calls that are no passes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.calls import Rows, row_index
from ..errors import CaptureError as CaptureError
from ..errors import SdattnWarning, warn
from ..models.denoiser_call import Size, Timestep
from ..models.guidance import Branch, Order, branch_rows
from ..models.layers import unwrapped
from ..models.running_call import RunningCall
from .text_watch import Verdict


class CaptureWarning(SdattnWarning):
    """Capture saw less than it was asked to see, or something changed under it."""


class Stray(NamedTuple):
    """A call of a model that is no pass of the run which is watched.

    Attributes:
        who: called it, for messages.
        call: of another pipeline, if that called it.
    """

    who: str
    call: RunningCall | None = None


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


class Schedule:
    """The timesteps of one run, and where in them a pass is.

    Args:
        timesteps: as the scheduler holds them.
    """

    def __init__(self, timesteps: Any):
        self.timesteps = timesteps
        self._kept = timesteps.clone() if isinstance(timesteps, Tensor) else timesteps

    def __len__(self) -> int:
        return len(self.timesteps)

    @cached_property
    def _values(self) -> list[float]:
        values: list[float] = torch.as_tensor(self._kept).float().tolist()
        return values

    def index(self, timestep: float | Timestep, scheduler: Any) -> int | None:
        """Return the entry that a pass is of, as far as the host knows: the one that the model got
        a view of or, where the pipeline computed with it (FLUX, Sana), the one that the scheduler
        has come to. It moves on between steps only, however often the model is called in one."""
        found = timestep.index_in(self.timesteps) if isinstance(timestep, Timestep) else None
        if found is None:
            step = getattr(scheduler, "step_index", None)
            found = step if isinstance(step, int) and 0 <= step < len(self) else None
        return found

    def position(self, index: int | None, timestep: float | Timestep) -> float:
        """Return the middle of the part of the run that a pass is: of the entry ``index``, or of
        the one nearest to its timestep; of the first among entries that are alike."""
        values = self._values
        if index is None:
            at = float(timestep)
            index = min(range(len(values)), key=lambda i: abs(values[i] - at))
        return (values.index(values[index]) + 0.5) / len(values)


@dataclass
class Pass:
    """One call of the denoiser.

    Attributes:
        given: the timestep as the model was called with it.
        latent_size: (rows, cols) of the latent, (frames, rows, cols) of a video; None where queries
            are a mere sequence.
        batch: rows in the batch.
        order: the chunks that guidance makes of the batch, in order; None where nobody knows them.
        rows: the rows that are kept, one an image; of a video whose frames are rows all of these.
        branches: the guidance branch of each image.
        n_text: token columns of the text; 0 where only the layers will say.
        frame_rows: how many rows each image has, see :class:`DenoiserCall`.
        begins_run: True of the first pass of a run.
        schedule: of the run; None where none is known.
        index: which of its entries the pass is of; None where the timestep has to say.
        skips_layers: True of the extra pass of skip-layer guidance.
        stray: who called the model, if this is no pass of the run; else None.
        text_changed: True if the kept rows have other text states than in the pass before.
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
    stray: Stray | None = None
    text_changed: Verdict = False
    text_by_frame: Verdict = False

    @cached_property
    def timestep(self) -> float:
        """The timestep in the scheduler's unit (the batch's first, if rows differ). To read it is
        to wait for the device that it is on."""
        return float(self.given)

    @cached_property
    def position(self) -> float | None:
        """Where in the run it is, in [0, 1]: the middle of its part of the schedule; None where no
        schedule is known. To read it may be to wait for the device, the first time in a run."""
        return None if self.schedule is None else self.schedule.position(self.index, self.given)

    @cached_property
    def kept(self) -> Rows | None:
        """:attr:`rows` as an index of the batch; None where they are all of it."""
        index = row_index(self.rows)
        return None if index == slice(0, self.batch) else index

    @property
    def of_no_prompt(self) -> bool:
        """True if it is of the negative prompt alone, or of neither branch."""
        return self.skips_layers or (self.order is not None and "conditional" not in self.order)

    @property
    def prompts(self) -> slice | None:
        """Rows that are the prompts'; None where nobody knows them, and where there are none.

        Raises:
            ValueError: the batch does not divide into the chunks of its guidance.
        """
        if self.order is None or self.of_no_prompt:
            return None
        return branch_rows(self.order, self.batch)["conditional"]
