"""The calls of a denoiser as a capture sees them: which is a pass, which rows of it are kept."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..models.denoiser_call import Call
from ..models.guidance import Branch, GuidanceWatch, Order, branch_rows
from ..models.layers import Denoiser, is_own, joint_spans, read_call, unwrapped

BRANCHES: dict[str, tuple[Branch, ...]] = {
    "conditional": ("conditional",),
    "unconditional": ("unconditional",),
    "both": ("unconditional", "conditional"),
}


class CaptureError(RuntimeError):
    """Capture could not see what it was asked to see."""


class CaptureWarning(UserWarning):
    """Capture saw less than it was asked to see, or something changed under it."""


@dataclass
class Pass:
    """One call of the denoiser.

    Attributes:
        timestep: the timestep the model was called with (its first, if rows differ).
        latent_size: (rows, cols) of the latent; None where queries are a mere sequence.
        batch: rows in the batch.
        layout: the chunks that guidance makes of the batch, in order.
        rows: the rows that are kept, one an image.
        branches: the guidance branch of each of them.
        n_text: token columns of the text; 0 where only the layers will say.
        position: where in the run it is, in [0, 1]: the middle of its part of the schedule; None
            where no schedule is known.
    """

    timestep: float
    latent_size: tuple[int, int] | None
    batch: int
    layout: tuple[Branch | None, ...]
    rows: Tensor
    branches: tuple[Branch, ...]
    n_text: int
    position: float | None = None


class Passes:
    """The passes of one run.

    Args:
        denoiser: the model, and its pipeline if there is one.
        branch: ``"conditional"``, ``"unconditional"`` or ``"both"``.
        latent_size: (rows, cols) of the queries of a model of one's own, None where the model says
            it or nobody does.

    Attributes:
        call: the call that runs now; None if it is not kept.
        begun: whether there was a call before, kept or not.

    Raises:
        ValueError: a branch that such a pipeline does not have; a size that the model has itself;
            how the pipeline lays out guidance is not known.
    """

    def __init__(self, denoiser: Denoiser, branch: str, latent_size: tuple[int, int] | None):
        if latent_size is not None and not is_own(unwrapped(denoiser.model)):
            raise ValueError(
                f"latent_size={latent_size}: a {type(denoiser.model).__name__} tells its own. "
                "Leave it out."
            )
        if branch not in BRANCHES or (branch != "conditional" and denoiser.pipeline is None):
            raise ValueError(
                f"branch={branch!r}: pass one of {', '.join(BRANCHES)}; on a model without its "
                "pipeline only 'conditional', which keeps every row."
            )
        self.denoiser, self.branch, self.latent_size = denoiser, branch, latent_size
        self.guidance = None if denoiser.pipeline is None else GuidanceWatch(denoiser.pipeline)
        if self.guidance is not None and self.guidance.in_turn and branch == "both":
            raise ValueError(
                f"branch='both': a {type(denoiser.pipeline).__name__} runs the prompt and the "
                "negative prompt in turn. Nest two captures, one with branch='unconditional'."
            )
        self.call: Call | None = None
        self.begun = False
        self._schedule: Any = None
        self._last: Call | None = None
        self._warned = False

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
            CaptureError: it begins a second run, or the run has no such branch.
        """
        call = read_call(model, args, kwargs)
        if self.latent_size is not None:
            call = replace(call, latent_size=self.latent_size)
        self._refuse_second_run()
        self._notice_branches(call)
        order: Order = ("conditional",) if self.guidance is None else self.guidance.order()
        kept = None if call.skips_layers else self._kept(call, order)
        self.begun, self.call = True, None if kept is None else call
        if kept is None:
            return None
        return Pass(
            timestep=call.timestep,
            latent_size=call.latent_size,
            batch=call.batch,
            layout=order,
            rows=torch.tensor([row for row, _ in kept]),
            branches=tuple(name for _, name in kept),
            n_text=call.n_text if text_states is None else text_states.shape[1],
            position=self._position(call.timestep),
        )

    def spans(self) -> tuple[slice, slice] | None:
        """Of the pass that runs now: the picture's queries and the text's keys in joint attention;
        None if it is not kept."""
        call = self.call
        if call is None or call.latent_size is None:
            return None
        return joint_spans(self.denoiser.model, math.prod(call.latent_size), call.n_text)

    def close(self) -> None:
        """Stop listening to the pipeline."""
        if self.guidance is not None:
            self.guidance.close()

    def _kept(self, call: Call, order: Order) -> list[tuple[int, Branch]] | None:
        """The rows of the batch that are kept, and of which branch; None where it is of another
        branch only."""
        rows = branch_rows(order, call.batch)
        if missing := [name for name in BRANCHES[self.branch] if name not in rows]:
            if self.guidance is not None and self.guidance.in_turn:
                return None
            raise CaptureError(
                f"Asked for branch={self.branch!r}, but this run has no {missing[0]} rows: it runs "
                "without guidance. Set guidance_scale above 1."
            )
        every = range(call.batch)
        return [(row, name) for name in BRANCHES[self.branch] for row in every[rows[name]]]

    def _position(self, timestep: float) -> float | None:
        """Where in the schedule a timestep is. Image to image begins in the middle of one."""
        if self._schedule is None:
            return None
        distances = (torch.as_tensor(self._schedule).float() - timestep).abs()
        return (int(distances.argmin()) + 0.5) / len(distances)

    def _refuse_second_run(self) -> None:
        pipeline = self.denoiser.pipeline
        schedule = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        again = self.begun and schedule is not self._schedule
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
        self._schedule = schedule

    def _notice_branches(self, call: Call) -> None:
        """On a model without its pipeline: warn where it seems to run two branches in turn."""
        before, self._last = self._last, call
        if self.guidance is not None or before is None or self._warned:
            return
        if before.timestep == call.timestep and before.text is not call.text:
            self._warned = True
            warnings.warn(
                f"The model ran twice at timestep {call.timestep:g} with other text states, of the "
                "negative prompt perhaps. Both count as steps of the same images. Capture the "
                "pipeline to tell them apart, or steps='all' and choose.",
                CaptureWarning,
                stacklevel=2,
            )
