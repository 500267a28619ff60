"""Caller of a model: the pipeline call that this thread is in, and the code between them."""

from __future__ import annotations

import functools
import inspect
import opcode
import sys
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, Literal

from .call_options import is_modular
from .pipeline import Given, Pipeline

_MARK = "<call seen by sdattn>"  # among the variables of a frame: no code can have this name
_LIBRARIES = ("torch", "sdattn", "accelerate", "contextlib")  # between a model and who called it
_MOST = 16  # functions in a list of a pipeline's variables; longer lists hold something else
_PIPELINES = ("DiffusionPipeline", "ModularPipeline")
# Instructions that look into a result and keep none of it, before POP_TOP does away with it
_LOOKING = ("CACHE", "EXTENDED_ARG", "LOAD_ATTR", "LOAD_CONST", "LOAD_SMALL_INT", "BINARY_SUBSCR")


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
        discards: True if the caller throws the model's result away.
        call: call of the pipeline that called the model, this one or another, or None.
    """

    kind: Literal["pipeline", "loop", "stray"]
    name: str
    discards: bool = False
    call: RunningCall | None = None


def caller_of(pipeline: Pipeline) -> Caller:
    """Return the caller of a pipeline's model. Ask in a hook before the model's forward."""
    own, site, other = None, None, None
    between: list[FrameType] = []
    codes = _codes(pipeline, "__call__")
    for frame in _frames():
        if _is_method(frame, pipeline, codes, "__call__"):
            own = frame
            break
        if site is None and _library(frame) not in _LIBRARIES:
            site = frame
        other = other or (frame if _is_other_pipeline(frame, pipeline) else None)
        between.append(frame)
    site = site or own
    name = "code that is not known" if site is None else _place(site)
    given = "" if own is None else _callback(pipeline, own, between)
    if other is not None:
        name = f"{type(_first(other)).__name__}.__call__"
        return Caller("stray", given or name, call=_mark(other))
    if given:
        return Caller("stray", given)
    kind: Literal["pipeline", "loop"] = "loop" if own is None else "pipeline"
    call = None if own is None else _mark(own)
    return Caller(kind, name, site is not None and _is_discarded(site), call)


def _callback(pipeline: Pipeline, own: FrameType, between: list[FrameType]) -> str:
    """Return the name under which a pipeline's call was given a function that is running."""
    running = {frame.f_code for frame in between} - set(own.f_code.co_consts)
    held = {name: one for name, one in vars(pipeline).items() if isinstance(one, FunctionType)}
    for name, value in {**held, **_variables(pipeline, own)}.items():
        several = value if isinstance(value, (list, tuple)) and len(value) <= _MOST else (value,)
        if any(_code(name, one, pipeline) in running for one in several):
            return f"`{name}`"
    return ""


def _code(name: str, value: object, pipeline: Pipeline) -> CodeType | None:
    """Return the code of a function that was passed to a pipeline, or None for anything else."""
    while isinstance(value, functools.partial):
        value = value.func
    if isinstance(value, MethodType):
        is_own = value.__self__ is pipeline and "callback" not in name
        value = None if is_own else value.__func__
    elif "callback" in name and not isinstance(value, (FunctionType, type)):
        value = inspect.getattr_static(type(value), "__call__", None)
    return value.__code__ if isinstance(value, FunctionType) else None


def _is_other_pipeline(frame: FrameType, pipeline: Pipeline) -> bool:
    """Check whether a frame is the call of another pipeline that is no part of this one."""
    if frame.f_code.co_name != "__call__":
        return False
    owner = _first(frame)
    kinds = {kind.__name__ for kind in type(owner).__mro__}
    is_part = any(one is owner for one in vars(pipeline).values())
    return not is_part and not kinds.isdisjoint(_PIPELINES)


def _is_discarded(site: FrameType) -> bool:
    """Check whether the calling code discards the result, as ``unet(...)`` or ``_ = unet(...)``."""
    code, at = site.f_code.co_code, site.f_lasti + 2
    while at < len(code) and opcode.opname[code[at]] in _LOOKING:
        at += 2
    name = opcode.opname[code[at]] if at < len(code) else ""
    if name in ("STORE_FAST", "STORE_NAME"):
        names = site.f_code.co_varnames if name == "STORE_FAST" else site.f_code.co_names
        return code[at + 1] < len(names) and names[code[at + 1]] == "_"
    return name == "POP_TOP"


def _place(frame: FrameType) -> str:
    code = frame.f_code
    name = getattr(code, "co_qualname", code.co_name)
    return f"{name} ({Path(code.co_filename).name}, line {frame.f_lineno})"


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
