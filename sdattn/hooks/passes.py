"""`Pass`: one call of a model, as captures and controllers know it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from ..errors import CaptureError as CaptureError
from ..errors import SdattnWarning
from ..models.denoiser_call import Size, Timestep
from ..models.guidance import Branch, Order, branch_rows
from ..models.running_call import RunningCall
from .attended import Rows, row_index
from .schedule import Schedule
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
