"""`RunWatch`: where one run of a pipeline ends and the next one begins."""

import inspect
import sys
from collections.abc import Mapping, MutableMapping
from types import FrameType
from typing import Any

from ..models.call_options import is_modular

_MARK = "<call seen by sdattn>"  # among the variables of a frame: no code can have this name


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


def running_call(pipeline: Any) -> object | None:
    """An object that stands for the call of a pipeline which this thread is in, the innermost one.

    It is the same one until that call returns, and no later call has it. None outside of a call,
    and where the call cannot be seen (a decorator without ``functools.wraps``).
    """
    variables = _frame_variables(pipeline)
    # The next call may have its frame at the same address, so an address proves nothing.
    # What lies among a frame's variables goes with them.
    return None if variables is None else variables.setdefault(_MARK, object())


def running_variables(pipeline: Any) -> Mapping[str, Any] | None:
    """The variables of that call as they are now, its arguments among them; None likewise.

    The call of a modular pipeline keeps all of them in its state.
    """
    variables = _frame_variables(pipeline)
    if variables is None or not is_modular(pipeline):
        return variables
    return {**variables, **getattr(variables.get("state"), "values", {})}


def _frame_variables(pipeline: Any) -> MutableMapping[str, Any] | None:
    if pipeline is None:
        return None
    # Any __call__ of the pipeline's classes, a subclass's around its base's too.
    calls = [vars(kind)["__call__"] for kind in type(pipeline).__mro__ if "__call__" in vars(kind)]
    codes = [getattr(inspect.unwrap(call), "__code__", None) for call in calls]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            variables, own = frame.f_locals, frame.f_code.co_varnames[:1]  # self, by any name
            if any(variables.get(name) is pipeline for name in own):
                return variables
        frame = frame.f_back
    return None
