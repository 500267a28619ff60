"""Caller of a model: the pipeline call that this thread is in, and the code between them."""

from __future__ import annotations

import functools
import inspect
import os
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from types import CellType, CodeType, FrameType, FunctionType, MethodType
from typing import Any, Literal

from .call_options import is_modular
from .pipeline import Given, Pipeline

_MARK = "<call seen by sdattn>"  # among the variables of a frame: no code can have this name
_LIBRARIES = ("torch", "sdattn", "accelerate", "contextlib")  # between a model and who called it
_MOST = 16  # functions in a list of a pipeline's variables; longer lists hold something else
_PIPELINES = ("DiffusionPipeline", "ModularPipeline")


class RunningCall:
    """Marker for one running call of a pipeline.

    Attributes:
        is_watched: True once a capture has seen a pass of this call.
    """

    __slots__ = ("__weakref__", "is_watched")

    def __init__(self) -> None:
        self.is_watched = False


def running_call(pipeline: Pipeline) -> RunningCall | None:
    """Return the marker of a pipeline's innermost call in this thread.

    It is the same object until that call returns, and no later call has it. Return None outside a
    call, or if the call cannot be seen (a decorator hides its name).
    """
    frame = _frame(pipeline)
    return None if frame is None else _mark(frame)


def _mark(frame: FrameType) -> RunningCall:
    # The next call may have its frame at the same address, so an address proves nothing.
    # What is stored among a frame's variables is freed with them.
    found: RunningCall = frame.f_locals.setdefault(_MARK, RunningCall())
    return found


def running_variables(pipeline: Pipeline) -> Given | None:
    """Return the current variables of that call, its arguments among them, or None likewise.

    The call of a modular pipeline keeps all of them in its state.
    """
    frame = _frame(pipeline)
    return None if frame is None else _variables(pipeline, frame)


def forward_variables(model: object) -> Given | None:
    """Return the variables of a model's forward that runs in this thread, or None."""
    frame = _frame(model, "forward")
    return None if frame is None else frame.f_locals


@dataclass(frozen=True)
class Caller:
    """Caller of a model.

    Attributes:
        kind: ``"pipeline"`` if the pipeline's own call did, itself or through its methods and
            libraries; ``"loop"`` if no pipeline is running; ``"stray"`` if a callback or another
            pipeline did.
        name: name of the function, for messages.
        call: call of the pipeline that called the model, this one or another, or None.
        is_decorated: True if torch's decorator runs the pipeline's call without gradients, as in
            all pipelines of diffusers.
    """

    kind: Literal["pipeline", "loop", "stray"]
    name: str
    call: RunningCall | None = None
    is_decorated: bool = False


def caller_of(pipeline: Pipeline) -> Caller:
    """Return the caller of a pipeline's model. Ask in a hook before the model's forward."""
    own: FrameType | None = None
    site: FrameType | None = None
    other: FrameType | None = None
    between: list[FrameType] = []
    codes = _codes(pipeline, "__call__")
    for frame in _frames():
        if _is_method(frame, pipeline, codes, "__call__"):
            own = frame
            break
        if site is None and _library(frame) not in _LIBRARIES:
            site = frame
        if other is None and _is_other_pipeline(frame, pipeline):
            other = frame
        between.append(frame)
    site = site or own
    name = "code that is not known" if site is None else _place(site)
    callback = "" if own is None else _callback(pipeline, own, between)
    if other is not None:
        name = f"{type(_first(other)).__name__}.__call__"
        return Caller("stray", callback or name, _mark(other))
    if callback:
        return Caller("stray", callback)
    if own is None:
        return Caller("loop", name)
    outer = None if own.f_back is None else own.f_back.f_globals.get("__name__")
    return Caller("pipeline", name, _mark(own), outer == "torch.utils._contextlib")


def _callback(pipeline: Pipeline, own: FrameType, between: list[FrameType]) -> str:
    """Return the name of a running callback that the pipeline's call was given, or of a function
    that was put in place of its scheduler's ``step``; empty if neither runs."""
    by_code: dict[CodeType, list[FrameType]] = {}
    for frame in between:
        by_code.setdefault(frame.f_code, []).append(frame)
    for name, value in _callbacks(pipeline, own):
        for function, owner in _functions(value):
            frames = by_code.get(function.__code__, ())
            if any(_runs(frame, function, owner) for frame in frames):
                return f"`{name}`"
    return ""


def _callbacks(pipeline: Pipeline, own: FrameType) -> Iterator[tuple[str, object]]:
    """Yield the callbacks of a pipeline's call, with their names. A function under another name
    may be the one that calls the model for the image."""
    for name, value in {**vars(pipeline), **_variables(pipeline, own)}.items():
        if "callback" in name:
            several = isinstance(value, (list, tuple)) and len(value) <= _MOST
            for one in value if several else (value,):
                yield name, one
    scheduler = getattr(pipeline, "scheduler", None)
    yield "scheduler.step", getattr(scheduler, "__dict__", {}).get("step")


def _functions(callback: object) -> Iterator[tuple[FunctionType, object]]:
    """Yield the function that runs when a callback is called, and those that its decorators wrap,
    each with the object whose method it is, or None."""
    while isinstance(callback, functools.partial):
        callback = callback.func
    owner: object = None
    function: object = callback
    if not isinstance(callback, (FunctionType, MethodType, type)):
        owner = callback
        function = inspect.getattr_static(type(callback), "__call__", None)
        if not isinstance(function, FunctionType):  # of C, such as functools.cache
            owner = None
            function = getattr(callback, "__wrapped__", None)
    while function is not None:
        if isinstance(function, MethodType):
            owner = function.__self__
            function = function.__func__
        if isinstance(function, FunctionType):
            yield function, owner
        function = getattr(function, "__wrapped__", None)


def _runs(frame: FrameType, function: FunctionType, owner: object) -> bool:
    """Check whether a frame of a function's code is this very function's, of this owner. All
    functions that one decorator makes share their code: they differ in what they enclose."""
    if owner is not None:
        first = _first(frame)
        if first is not owner and not (isinstance(first, tuple) and first[:1] == (owner,)):
            return False
    enclosed = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return all(frame.f_locals.get(name) is _contents(cell) for name, cell in enclosed)


def _contents(cell: CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


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


def _variables(pipeline: Pipeline, frame: FrameType) -> MutableMapping[str, Any]:
    variables = frame.f_locals
    if not is_modular(pipeline):
        return variables
    return {**variables, **getattr(variables.get("state"), "values", {})}
