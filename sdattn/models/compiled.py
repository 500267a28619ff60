"""Models that torch.compile has been at: find them, and run them eagerly for a while."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def unwrapped(model: Any) -> Any:
    """The module behind ``torch.compile(model)``, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Any) -> bool:
    """Whether ``torch.compile(model)``, ``model.compile()`` or the same on a part was called."""
    return any(_compiled_parts(model))


@contextmanager
def running_eagerly(model: Any) -> Iterator[None]:
    """Leave what was compiled aside; it is as it was, with all its graphs, at the end."""
    undo: list[tuple[Any, str, Any, Any]] = []
    for module, name in list(_compiled_parts(model)):
        eager = module._orig_mod.__call__ if name == "forward" else None
        undo.append((module, name, vars(module)[name], eager))
        object.__setattr__(module, name, eager)
    try:
        yield
    finally:
        for module, name, before, eager in undo:
            if vars(module)[name] == eager:  # else it was compiled anew inside
                object.__setattr__(module, name, before)


def _compiled_parts(model: Any) -> Iterator[tuple[Any, str]]:
    """(module, the attribute that holds what was compiled)"""
    for module in model.modules():
        held = vars(module)
        if hasattr(module, "_orig_mod") and held.get("forward") != module._orig_mod.__call__:
            yield module, "forward"  # torch.compile(module)
        if held.get("_compiled_call_impl") is not None:
            yield module, "_compiled_call_impl"  # module.compile()
