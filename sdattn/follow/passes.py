"""`Pass`: one call of a model, and its place in the `Schedule` of a run."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..attention.calls import ALL, Rows, row_index
from ..errors import CaptureError as CaptureError
from ..errors import SdattnWarning
from ..models.denoiser_call import Size, Timestep
from ..models.guidance import Branch, Order, branch_rows
from .text_watch import Verdict


class CaptureWarning(SdattnWarning):
    """Capture saw less than it was asked to see, or something changed during it."""


class Stray(NamedTuple):
    """Call of a model outside the watched run: its caller, and another pipeline that made it."""

    who: str
    pipeline: Any = None


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
        again: number of calls that came before in the same step, for the same branch.
        is_direct: True for ``unet.forward(...)``, which runs no hooks of the UNet itself.
        stray: caller of the model, if this pass belongs to no run; else None.
        text_changed: True if the kept rows have other text states than in the previous pass.
        text_by_frame: True if the kept frames of a video have text states of their own.
        prompts_alone: True if layers may run on the prompts' rows alone, see
            :func:`sdattn.models.caches.may_run_prompts_alone`.
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
    prompts_alone: bool = False

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

    def kept_of(self, batch: int) -> Rows | None:
        """Return :attr:`rows` as an index of a layer's ``batch`` rows: empty if the layer ran on
        none of them, None if it is not known which rows the layer ran on."""
        if batch == self.batch:
            return self.kept or ALL
        prompts = self.prompts
        if not self.prompts_alone or prompts is None or prompts.stop - prompts.start != batch:
            return None
        rows = tuple(row - prompts.start for row in self.rows)
        if not rows or rows[0] < 0 or rows[-1] >= batch:
            return ()
        return row_index(rows)

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
