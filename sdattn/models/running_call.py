"""Frames of the interpreter, read for two facts: which pipeline's call is running in this thread,
and with which variables."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from .call_options import is_modular
from .pipeline import Given, Pipeline

_LIBRARIES = ("torch", "sdattn", "accelerate", "contextlib")  # between a model and who called it
_PIPELINES = ("DiffusionPipeline", "ModularPipeline")


@dataclass(frozen=True)
class Caller:
    """Caller of a model, known while the call runs: it holds the variables of the pipeline's call.

    Attributes:
        name: name of the function, for messages.
        pipeline: pipeline whose call is running, the innermost one; None in a user's own loop.
        call: number of that call, see :func:`running_call`.
        variables: its variables; None for another pipeline than the watched one.
        is_decorated: True if torch's decorator runs the watched pipeline's call without gradients,
            as in all pipelines of diffusers.
    """

    name: str
    pipeline: Any = None
    call: int | None = None
    variables: Given | None = None
    is_decorated: bool = False


def running_call(pipeline: Pipeline) -> int | None:
    """Return the number of a pipeline's innermost call in this thread, or None outside a call.

    It stays the same until that call returns. No other call that runs has it, but a later call may.
    """
    frame = _frame(pipeline)
    return None if frame is None else id(frame)


def running_variables(pipeline: Pipeline) -> Given | None:
    """Return the current variables of that call, its arguments among them, or None outside a call.

    The call of a modular pipeline keeps all of them in its state.
    """
    frame = _frame(pipeline)
    return None if frame is None else _variables(pipeline, frame)


def forward_variables(model: object) -> Given | None:
    """Return the variables of a model's forward that runs in this thread, or None."""
    frame = _frame(model, "forward")
    return None if frame is None else frame.f_locals


def caller_of(pipeline: Pipeline) -> Caller:
    """Return the caller of a pipeline's model. Ask in a hook before the model's forward."""
    site: FrameType | None = None
    codes = _codes(pipeline, "__call__")
    for frame in _frames():
        is_call = frame.f_code.co_name == "__call__" or frame.f_code in codes
        if is_call and _first(frame) is pipeline:
            variables = _variables(pipeline, frame)
            outer = None if frame.f_back is None else frame.f_back.f_globals.get("__name__")
            is_decorated = outer == "torch.utils._contextlib"
            return Caller("the pipeline", pipeline, id(frame), variables, is_decorated)
        if is_call and _is_other_pipeline(frame, pipeline):
            other = _first(frame)
            return Caller(f"{type(other).__name__}.__call__", other, id(frame))
        if site is None and _library(frame) not in _LIBRARIES:
            site = frame
    return Caller("code that is not known" if site is None else _place(site))


def _is_other_pipeline(frame: FrameType, pipeline: Pipeline) -> bool:
    """Check whether a frame is the call of another pipeline that is no part of this one."""
    if frame.f_code.co_name != "__call__":
        return False
    owner = _first(frame)
    kinds = {kind.__name__ for kind in type(owner).__mro__}
    is_part = any(one is owner for one in vars(pipeline).values())
    return not is_part and not kinds.isdisjoint(_PIPELINES)


def _place(frame: FrameType) -> str:
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({os.path.basename(code.co_filename)}, line {frame.f_lineno})"


def _library(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _frames() -> Iterator[FrameType]:
    # From the caller's caller on: a frame among its own variables would keep all of them alive.
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _frame(owner: object, method: str = "__call__") -> FrameType | None:
    """Return the frame of the innermost call of an object's method in this thread."""
    if owner is None:
        return None
    codes = _codes(owner, method)
    return next((one for one in _frames() if _is_method(one, owner, codes, method)), None)


def _codes(owner: object, method: str) -> list[CodeType | None]:
    """Return the method's code in each of the owner's classes, a subclass's around its base's."""
    calls = [vars(kind)[method] for kind in type(owner).__mro__ if method in vars(kind)]
    return [getattr(inspect.unwrap(call), "__code__", None) for call in calls]


def _is_method(frame: FrameType, owner: object, codes: list[CodeType | None], method: str) -> bool:
    is_named = frame.f_code in codes or frame.f_code.co_name == method
    return is_named and owner is not None and _first(frame) is owner


def _first(frame: FrameType) -> object:
    """Return the first argument of a function that runs: self, by any name."""
    names = frame.f_code.co_varnames[:1]
    return frame.f_locals.get(names[0]) if names else None


def _variables(pipeline: Pipeline, frame: FrameType) -> Given:
    variables = frame.f_locals
    if not is_modular(pipeline):
        return variables
    return {**variables, **getattr(variables.get("state"), "values", {})}
