"""Where a run of a pipeline begins, `RunWatch`, and each pass of its model, `PassHooks`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..models.denoiser_call import DenoiserCall, Timestep
from ..models.running_call import forward_variables
from ..models.running_call import running_call as running_call
from ..models.running_call import running_variables as running_variables
from .installer import Installation


class RunWatch:
    """Tells the first pass of a run of a pipeline from the others.

    Each call of the pipeline is a run, and each schedule is one: FreeInit goes through several in
    one call, and a loop of a user's own has schedules and no call. A model without its pipeline
    has no runs.

    Attributes:
        schedule: the timesteps of the run, as its scheduler holds them; None where none are known.
    """

    def __init__(self) -> None:
        self.schedule: Any = None
        self._call: object | None = None

    def begins(self, pipeline: Any) -> bool:
        """Whether the pass that begins now is the first of a run. To be asked once a pass."""
        schedule = getattr(getattr(pipeline, "scheduler", None), "timesteps", None)
        call = running_call(pipeline)
        is_new = schedule is not self.schedule or (call is not None and call is not self._call)
        self.schedule, self._call = schedule, call or self._call
        return is_new


def in_backward() -> bool:
    """Check whether a backward pass is calling this; it runs checkpointed layers a second time."""
    # torch.utils.checkpoint and torch.utils.module_tracker ask so; there is no public name for it
    return torch._C._current_graph_task_id() != -1


class PassHooks:
    """Hooks before and after each pass of a model, and of ``unet.forward(...)`` too, which called
    directly runs no hooks but those of the UNet's parts.

    Args:
        installed: takes the hooks out again.
        model: held weakly.
        before: called with (model, args, kwargs).
        after: called when the pass has ended.
        direct: called in place of ``before`` for ``unet.forward(...)``.
    """

    def __init__(
        self,
        installed: Installation,
        model: Any,
        before: Callable[..., None],
        after: Callable[[], None] = lambda: None,
        direct: Callable[..., None] | None = None,
    ):
        self._before, self._after, self._direct = before, after, direct or before
        self._model = weakref.ref(model)
        self._is_hooked = self._is_direct = False
        installed.watch(model, self._begin, self._end)
        if hasattr(model, "conv_in") and hasattr(model, "conv_out"):
            installed.watch(model.conv_in, self._begin_part)
            installed.follow(model.conv_out, self._end_part)

    def _begin(self, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._is_hooked, self._is_direct = True, False
        self._before(model, args, kwargs)

    def _end(self, *_: Any) -> None:
        self._after()

    def _begin_part(self, *_: Any) -> None:
        was_hooked, self._is_hooked = self._is_hooked, False  # one that broke off may have left it
        is_known = was_hooked or in_backward()
        given = None if is_known else forward_variables(self._model())
        if given is not None:
            names = ("sample", "timestep", "encoder_hidden_states")
            self._is_direct = True
            self._direct(self._model(), (), {name: given[name] for name in names})

    def _end_part(self, *_: Any) -> None:
        if self._is_direct:
            self._is_direct = False
            self._after()


class RepeatedCalls:
    """Calls of a model in a row that may be of two prompts, which count as steps of one.

    Without a pipeline nobody says which branch of the guidance a call is of; two calls at one
    timestep with other text states are likely to be both branches.
    """

    def __init__(self) -> None:
        self._last: tuple[float | Timestep, Tensor | None] | None = None
        self._doubtful: list[tuple[float | Timestep, float | Timestep]] = []

    def note(self, call: DenoiserCall) -> None:
        """Take note of a call that begins now."""
        before, self._last = self._last, (call.timestep, call.text)
        # Compared at the end: to read a timestep now would be to wait for the device.
        if before is not None and before[1] is not call.text:
            self._doubtful.append((before[0], call.timestep))

    def found(self) -> float | None:
        """Return the first timestep at which the model ran twice, once; None if there is none."""
        doubtful, self._doubtful = self._doubtful, []
        same = (float(one) for before, one in doubtful if float(before) == float(one))
        return next(same, None)
