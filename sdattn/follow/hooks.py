"""Forward hooks that copies and pickles of a module leave out."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any, SupportsIndex

from torch import nn

_REDUCE = "__reduce_ex__"  # copy and pickle ask the object for it, not its class


def hook_before(module: nn.Module, hook: Callable[..., Any], **options: Any) -> Callable[[], None]:
    """Register a forward pre-hook, and return what removes it; options are torch's."""
    return _kept_out(module, module.register_forward_pre_hook(hook, **options))


def hook_after(module: nn.Module, hook: Callable[..., Any], **options: Any) -> Callable[[], None]:
    """Register a forward hook, and return what removes it; options are torch's."""
    return _kept_out(module, module.register_forward_hook(hook, **options))


def is_hooked(model: nn.Module) -> bool:
    """Check whether a module of a model has such a hook."""
    return any(isinstance(vars(one).get(_REDUCE), _WithoutHooks) for one in model.modules())


def has_other_hooks(module: nn.Module) -> bool:
    """Check whether a module has forward hooks that are not such."""
    held = vars(module).get(_REDUCE)
    ours = held.ids if isinstance(held, _WithoutHooks) else set[int]()
    return not ours.issuperset((*module._forward_pre_hooks, *module._forward_hooks))


def _kept_out(module: nn.Module, handle: Any) -> Callable[[], None]:
    if hasattr(type(module), "__deepcopy__"):  # torch.fx's and scripted modules copy in their way
        return partial(handle.remove)
    held = vars(module).get(_REDUCE)
    without_hooks = held if isinstance(held, _WithoutHooks) else _WithoutHooks(module)
    without_hooks.ids.add(handle.id)
    vars(module)[_REDUCE] = without_hooks

    def remove() -> None:
        handle.remove()
        without_hooks.ids.discard(handle.id)
        if not without_hooks.ids and vars(module).get(_REDUCE) is without_hooks:
            del vars(module)[_REDUCE]

    return remove


class _WithoutHooks:
    """A module's ``__reduce_ex__`` without the hooks of some ``ids``. The module is held weakly."""

    def __init__(self, module: nn.Module):
        self.ids: set[int] = set()
        self._module = weakref.ref(module)

    def __call__(self, protocol: SupportsIndex) -> str | tuple[Any, ...]:
        module: Any = self._module()
        reduce: Any = type(module).__reduce_ex__
        reduced: str | tuple[Any, ...] = reduce(module, protocol)
        if isinstance(reduced, str) or len(reduced) < 3 or not isinstance(reduced[2], dict):
            return reduced
        state = {name: value for name, value in reduced[2].items() if value is not self}
        for name, hooks in state.items():
            if name.startswith(("_forward_hooks", "_forward_pre_hooks")):
                state[name] = OrderedDict(one for one in hooks.items() if one[0] not in self.ids)
        return (*reduced[:2], state, *reduced[3:])
