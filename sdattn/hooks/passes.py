"""The calls of a denoiser as a capture sees them: which is a pass, which rows of it are kept."""

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ..attention.joint_processor import Spans
from ..errors import CaptureError as CaptureError
from ..errors import InvalidValueError, OptionError, SdattnWarning
from ..models.denoiser_call import DenoiserCall, Size, Timestep
from ..models.guidance import Branch, GuidanceWatch, Order, branch_rows
from ..models.layers import Denoiser, is_own, joint_spans, unwrapped
from .attended import Rows, row_index
from .latent_sizes import LatentSizes, ReadSpans
from .run_watch import RepeatedCalls, RunWatch
from .schedule import Schedule

BRANCHES: dict[str, tuple[Branch, ...]] = {
    "conditional": ("conditional",),
    "unconditional": ("unconditional",),
    "both": ("unconditional", "conditional"),
}


class CaptureWarning(SdattnWarning):
    """Capture saw less than it was asked to see, or something changed under it."""


@dataclass
class Pass:
    """One call of the denoiser.

    Attributes:
        given: the timestep as the model was called with it.
        latent_size: (rows, cols) of the latent, (frames, rows, cols) of a film; None where queries
            are a mere sequence.
        batch: rows in the batch.
        layout: the chunks that guidance makes of the batch, in order.
        rows: the rows that are kept, one an image; of a film whose frames are rows all of these.
        branches: the guidance branch of each image.
        n_text: token columns of the text; 0 where only the layers will say.
        frame_rows: how many rows each image has, see :class:`DenoiserCall`.
        schedule: of the run; None where none is known.
        index: which of its entries the pass is of; None where the timestep has to say.
    """

    given: float | Timestep
    latent_size: Size | None
    batch: int
    layout: tuple[Branch | None, ...]
    rows: tuple[int, ...]
    branches: tuple[Branch, ...]
    n_text: int
    frame_rows: int = 1
    schedule: Schedule | None = None
    index: int | None = None

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


def _needs_size(denoiser: Denoiser) -> bool:
    """Whether nobody but the caller can know the grid of a model's queries."""
    model = unwrapped(denoiser.model)
    if denoiser.family.grid_argument is not None:  # in values, which the meta device has none of
        return any(part.is_meta for part in model.parameters())
    return is_own(model)


class Passes:
    """The passes of one run.

    Args:
        denoiser: the model, and its pipeline if there is one.
        branch: ``"conditional"``, ``"unconditional"`` or ``"both"``.
        latent_size: (rows, cols) of the queries of a model of one's own, or of one on the meta
            device that has them in the values of ids; None where the model says it or nobody does.

    Attributes:
        call: the call that runs now; None if it is not kept.
        begun: whether there was a call before, kept or not.

    Raises:
        ValueError: a branch that such a pipeline does not have; a size that the model has itself;
            how the pipeline lays out guidance is not known; the model is one of several processes'
            that share a picture.
    """

    def __init__(self, denoiser: Denoiser, branch: str, latent_size: tuple[int, int] | None):
        if latent_size is not None and not _needs_size(denoiser):
            kind, text = type(denoiser.model).__name__, "a {0} knows its own. Leave it out."
            raise OptionError("latent_size", latent_size, text, kind)
        if branch not in BRANCHES or (branch != "conditional" and denoiser.pipeline is None):
            text = (
                "pass one of {0}; on a model without its pipeline only 'conditional', which keeps "
                "every row."
            )
            raise OptionError("branch", branch, text, ", ".join(BRANCHES))
        _refuse_shards(denoiser.model)
        self.denoiser, self.branch, self.latent_size = denoiser, branch, latent_size
        self.guidance = None if denoiser.pipeline is None else GuidanceWatch(denoiser.pipeline)
        if self.guidance is not None and self.guidance.in_turn and branch == "both":
            text = (
                "a {0} runs the prompt and the negative prompt in turn. Nest two captures, one "
                "with branch='unconditional'."
            )
            kind = type(denoiser.pipeline).__name__
            raise OptionError("branch", branch, text, kind)
        if self.guidance is not None:
            self.guidance.listen()
        self.call: DenoiserCall | None = None
        self.begun = False
        self._runs = RunWatch()
        self._schedule: Schedule | None = None
        self._sizes = LatentSizes()
        self._size: Size | None = None  # of the pass that runs now
        self._spans: Sequence[Spans] | None = None  # of that pass, for all rows or for each
        self._read_spans = ReadSpans()
        self._repeats = RepeatedCalls()
        self._has_kept = False
        self._of_one_branch = 0  # calls without guidance, where both branches were asked for

    @property
    def scheduled(self) -> int:
        """How many passes the schedule has; 1 where there is none."""
        return 1 if self._schedule is None else len(self._schedule)

    def read(
        self,
        model: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        text_states: torch.Tensor | None,
    ) -> Pass | None:
        """What is kept of a call that begins now; None where nothing is.

        Raises:
            CaptureError: it begins a second run.
        """
        # What was called, whether it is a run of its own, and which rows are of the branch.
        call = self.denoiser.family.read_call(model, args, kwargs)
        self._refuse_second_run()
        if self.guidance is None:
            self._repeats.note(call)
        order: Order = ("conditional",) if self.guidance is None else self.guidance.order(model)
        kept = None if call.skips_layers else self._kept(call, order)
        self.begun, self.call = True, None if kept is None else call
        if kept is None:
            return None
        schedule, self._size = self._schedule, self._size_of(call)
        rows = tuple(row for row, _ in kept)
        self._spans = self._read_spans.of(call, self._size, rows)
        scheduler = getattr(self.denoiser.pipeline, "scheduler", None)
        return Pass(
            given=call.timestep,
            latent_size=self._size,
            batch=call.batch,
            layout=order,
            rows=rows,
            branches=tuple(name for _, name in kept[:: call.frame_rows]),
            n_text=self._n_text(call) if text_states is None else text_states.shape[1],
            frame_rows=call.frame_rows,
            schedule=schedule,
            index=None if schedule is None else schedule.index(call.timestep, scheduler),
        )

    def frame_rows(self) -> int:
        """Of the pass that runs now, see :class:`DenoiserCall`; 1 if it is not kept."""
        return 1 if self.call is None else self.call.frame_rows

    def frames(self) -> int:
        """Frames of the grid of the pass that runs now; 1 of a picture."""
        return 1 if self._size is None or len(self._size) < 3 else self._size[0]

    def spans(self) -> Sequence[Spans] | None:
        """Of the pass that runs now: the picture's queries and the text's keys in joint attention,
        a pair for all rows of the batch or for each; None if it is not kept."""
        if self.call is None or self._size is None:
            return None
        if self._spans is None:
            cells, n_text = math.prod(self._size), self.call.n_text
            self._spans = (joint_spans(self.denoiser, cells, n_text),)
        return self._spans

    def _n_text(self, call: DenoiserCall) -> int:
        """Columns of the text; of rows that differ those of the longest that is kept."""
        if self._spans is None:
            return call.n_text
        return max(text.stop - text.start for _, text in self._spans)

    def warn_of_branches(self) -> None:
        """Warn where guidance was off in a part of the run and both branches were asked for; on a
        model without its pipeline, where it seems to have run two branches in turn. Asked at the
        end, since timesteps are read for it."""
        if self._has_kept and self._of_one_branch:
            warnings.warn(
                f"Guidance was off in {self._of_one_branch} call(s) of the model, which have no "
                "negative prompt: branch='both' kept the others alone. Nest two captures, one with "
                "branch='unconditional', to keep every call of the prompt.",
                CaptureWarning,
                stacklevel=5,
            )
        if (timestep := self._repeats.found()) is not None:
            warnings.warn(
                f"The model ran twice at timestep {timestep:g} with other text states, of the "
                "negative prompt perhaps. Both count as steps of the same images. Capture the "
                "pipeline to tell them apart, or steps='all' and choose.",
                CaptureWarning,
                stacklevel=5,
            )

    def close(self) -> None:
        """Stop listening to the pipeline."""
        if self.guidance is not None:
            self.guidance.close()

    def _kept(self, call: DenoiserCall, order: Order) -> list[tuple[int, Branch]] | None:
        """The rows of the batch that are kept, and of which branch; None where it is of another
        branch only."""
        rows = branch_rows(order, call.batch)
        if not set(BRANCHES[self.branch]) <= set(rows):
            self._of_one_branch += self.branch == "both" and "conditional" in rows
            return None
        every, self._has_kept = range(call.batch), True
        return [(row, name) for name in BRANCHES[self.branch] for row in every[rows[name]]]

    def _size_of(self, call: DenoiserCall) -> Size | None:
        in_run = self._schedule is not None
        return self.latent_size or self._sizes.of(call, in_run)

    def _refuse_second_run(self) -> None:
        pipeline = self.denoiser.pipeline
        is_new = self._runs.begins(pipeline)
        again = self.begun and is_new
        if again and getattr(pipeline, "free_init_enabled", False):
            raise CaptureError(
                "FreeInit runs the whole schedule several times, which would mix the maps of all. "
                "Call pipe.disable_free_init(), or capture(pipe.unet)."
            )
        if again:
            raise CaptureError(
                "A second run of the pipeline began inside one capture(), which would mix the maps "
                "of two pictures. Enter capture() once for each run."
            )
        if is_new and self._runs.schedule is not None:
            self._schedule = Schedule(self._runs.schedule)


def _refuse_shards(model: Any) -> None:
    """Refuse a model that sees a part of the sequence, or of the heads, alone."""
    config = getattr(unwrapped(model), "_parallel_config", None)
    for name in ("context", "tensor"):
        if getattr(config, f"{name}_parallel_config", None) is not None:
            raise InvalidValueError(
                f"The {type(unwrapped(model)).__name__} runs under {name} parallelism "
                "(enable_parallelism), where each process sees a part of the attention. Capture a "
                "model that is loaded without it."
            )
