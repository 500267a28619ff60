"""Which parts of a model torch.compile has been at."""

from collections.abc import Iterator
from typing import Any


def unwrapped(model: Any) -> Any:
    """The module behind ``torch.compile(model)``, or the model itself."""
    return getattr(model, "_orig_mod", model)


def is_compiled(model: Any) -> bool:
    """Whether ``torch.compile(model)``, ``model.compile()`` or the same on a part was called."""
    return any(compiled_parts(model))


def compiled_parts(model: Any) -> Iterator[tuple[Any, str]]:
    """(module, the attribute that holds what was compiled)"""
    for module in model.modules():
        held = vars(module)
        if hasattr(module, "_orig_mod") and held.get("forward") != module._orig_mod.__call__:
            yield module, "forward"  # torch.compile(module)
        if held.get("_compiled_call_impl") is not None:
            yield module, "_compiled_call_impl"  # module.compile()
