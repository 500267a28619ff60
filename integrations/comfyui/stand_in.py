"""`StandIn`: stands in for another node's function to watch it, and is known as that function.

Nodes with kernels of their own look at the attention override that they meet: for a mark, its code
and closure, its class, or whether a set of theirs has it. For one that they do not know they turn
their kernel off, and the image would be another one than without *Watch attention*.
"""

import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

OVERRIDE = "optimized_attention_override"
OWN = ("comfy", "torch")  # packages that ask without turning a kernel off


class StandIn:
    """A callable that answers to every question as the one behind it.

    Args:
        call: what is run.
        behind: the function that it stands in for; None if there is none to be known by.
        asked: told the module that asked and the attribute, if there is none.
    """

    def __init__(
        self,
        call: Callable[..., Any],
        behind: Any,
        asked: Callable[[str, str], None] = lambda *_: None,
    ):
        self._call = call
        self._behind = behind
        self._asked = asked
        if behind is not None:
            functools.update_wrapper(self, behind, updated=())

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and self._behind is None:
            raise AttributeError(name)
        if self._behind is None:
            module = sys._getframe(1).f_globals.get("__name__", "?")
            if module.split(".")[0] not in OWN:
                self._asked(module, name)
        return getattr(self._behind, name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return StandIn if self._behind is None else type(self._behind)

    def __eq__(self, other: object) -> bool:
        return self is other or (self._behind is not None and bool(self._behind == other))

    def __hash__(self) -> int:
        return object.__hash__(self) if self._behind is None else hash(self._behind)

    def __copy__(self) -> "StandIn":
        return self

    def __deepcopy__(self, memo: object) -> "StandIn":
        return self  # a model's options are copied


def selected(patcher: Any) -> Any:
    """Return the override by which ComfyUI's *Model Attention Backend* would choose the attention
    function that is in use; None for versions without that node."""
    choose = getattr(type(patcher), "set_model_optimized_attention", None)
    if choose is None:
        return None
    from comfy.ldm.modules.attention import optimized_attention

    options: dict[str, Any] = {}
    choose(SimpleNamespace(model_options={"transformer_options": options}), optimized_attention)
    return options.get(OVERRIDE)
