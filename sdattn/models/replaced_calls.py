"""Calls of modules that other code replaced: by another ``forward``, or another ``__call__``.

Editing code that is older than processors does so, and code after its manner (prompt-to-prompt's
``register_attention_control``, MasaCtrl, FreeCustom, DenseDiffusion). What it puts in the place of
an attention layer's call computes the attention itself, and the layer's processor never runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from torch import nn

_LIBRARIES = ("accelerate", "diffusers", "peft", "sdattn", "torch")  # call what they replace


def replaced_call(module: nn.Module) -> tuple[str, Callable[..., Any]] | None:
    """Return the method of a module that other code replaced, ``"forward"`` or ``"__call__"``, with
    the function in its place, in the module or in its class; None if neither was."""
    for name in ("__call__", "forward"):
        own = vars(module).get(name) if name == "forward" else None  # Python asks the class alone
        if own is None:
            owner = next(kind for kind in type(module).__mro__ if name in vars(kind))
            method = vars(owner)[name]
            own = None if getattr(method, "__module__", None) == owner.__module__ else method
        function = None if own is None else _foreign(own)
        if function is not None:
            return name, function
    return None


def _foreign(function: Any) -> Callable[..., Any] | None:
    """Return the function of other code that this one is or wraps; None for one of a library."""
    while function is not None:
        bare = function.func if isinstance(function, partial) else function
        module = getattr(bare, "__module__", None) or ""
        if module.partition(".")[0] not in _LIBRARIES:
            found: Callable[..., Any] = bare
            return found
        function = getattr(function, "__wrapped__", None)
    return None


def function_name(function: Any) -> str:
    """Return a function's name with its module, ``make.<locals>.forward (ptp_utils)``."""
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__qualname__} ({function.__module__})"


def bypass(model: nn.Module, layers: Iterable[str]) -> str:
    """Return who replaced the call of these layers or of a module around them, and what to do;
    empty if nobody did."""
    around = dict[str, None]()
    for layer in layers:
        parts = layer.split(".")
        around |= dict.fromkeys(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    found = {}
    for path in around:
        replaced = replaced_call(model.get_submodule(path))
        if replaced is not None:
            found[path] = replaced
    if not found:
        return ""
    path, (method, function) = next(iter(found.items()))
    more = f", as in {len(found) - 1} more modules" if len(found) > 1 else ""
    return (
        f"The `{method}` of {path} was replaced{more}, by {function_name(function)}, and what "
        "stands there calls no processor. Undo that, and either edit by a controller, "
        "sdattn.edit.register_attention_control(pipe, controller), or write it as a processor, "
        "set by the layer's set_processor(); both are watched."
    )
