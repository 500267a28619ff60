"""The call of a pipeline that this thread is in: an object for it, and its variables."""

import inspect
import sys
from collections.abc import Mapping, MutableMapping
from types import FrameType
from typing import Any

from .call_options import is_modular

_MARK = "<call seen by sdattn>"  # among the variables of a frame: no code can have this name


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


def forward_variables(model: Any) -> Mapping[str, Any] | None:
    """Return the variables of a model's forward that runs in this thread; None if none does."""
    return _frame_variables(model, "forward")


def _frame_variables(owner: Any, method: str = "__call__") -> MutableMapping[str, Any] | None:
    if owner is None:
        return None
    # The method of any of the owner's classes, a subclass's around its base's too.
    calls = [vars(kind)[method] for kind in type(owner).__mro__ if method in vars(kind)]
    codes = [getattr(inspect.unwrap(call), "__code__", None) for call in calls]
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code in codes:
            variables, own = frame.f_locals, frame.f_code.co_varnames[:1]  # self, by any name
            if any(variables.get(name) is owner for name in own):
                return variables
        frame = frame.f_back
    return None
