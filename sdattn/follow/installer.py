"""Temporary changes to a model, to watch or edit its attention, and their removal."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..models.denoiser_call import compiled_parts, innermost
from ..models.layers import AttentionLayer
from ..models.pipeline import Given
from ..models.running_call import forward_variables
from .hooks import hook_after, hook_before

Hook = Callable[..., None]


@dataclass
class _Place:
    """Layer with its previous processor, and the processors put there, in order."""

    layer: AttentionLayer
    before: Any
    ours: list[Any] = field(default_factory=list)

    def put_back(self) -> None:
        """Give the layer its previous processor back, even if another installation wrapped ours."""
        ours = self.ours[-1] if self.ours else None
        before = self.before
        while hasattr(before, "stands_for"):  # from an installation that has ended
            before = before.stands_for
        # Whoever still holds one of ours as its `before` is sent on to what was there before
        # that.
        for processor in self.ours:
            object.__setattr__(processor, "stands_for", before)
        for outer in _wrapped(self.layer.module.processor):
            if outer is ours or not getattr(outer, "is_observer", False):
                break
            if ours is None:
                return  # another installation's, which puts it back
            if outer.inner is ours:
                _put_under(outer, before)
                return
        if self.layer.module.processor is not before:
            set_processor(self.layer.module, before)


class Installation:
    """Processors in some layers, and hooks on the model; :meth:`remove` takes them out.

    Each of the ``layers`` then holds the very object that it held before, whatever was set in the
    meantime, and in whichever order installations end. The model is not held.
    """

    def __init__(self, layers: Sequence[AttentionLayer] = ()):
        self._undo = ExitStack()
        self._places: dict[Any, _Place] = {}  # by the layer's module: two models have like names
        for layer in layers:
            self._note(layer)

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def put(self, layer: AttentionLayer, processor: Any) -> None:
        """Set a processor; it may wrap the current one."""
        if not getattr(processor, "is_observer", False):
            processor.displaced = layer.module.processor  # a store may wait in it, see Callers
        self._note(layer).ours.append(processor)
        set_processor(layer.module, processor)

    def watch(
        self,
        model: nn.Module,
        before: Hook,
        after: Hook | None = None,
    ) -> None:
        """Call ``before(model, args, kwargs)`` and ``after(model, args, output)`` around each call
        of a model. A compiled model leaves its graph for them."""
        self._undo.callback(hook_before(model, torch.compiler.disable(before), with_kwargs=True))
        if after is not None:
            self._undo.callback(hook_after(model, torch.compiler.disable(after)))

    def follow(self, module: nn.Module, after: Hook) -> None:
        """Call ``after(module, args, kwargs, output)`` after each call of a module."""
        self._undo.callback(hook_after(module, torch.compiler.disable(after), with_kwargs=True))

    def around(self, module: nn.Module, before: Hook, after: Hook) -> None:
        """Call ``before(module, args, kwargs)`` and ``after(module, args, kwargs, output)`` around
        each call of a module, after one that raised an error too."""
        self._undo.callback(hook_before(module, before, with_kwargs=True))
        self._undo.callback(hook_after(module, after, with_kwargs=True, always_call=True))

    def around_from_outside(
        self,
        modules: Mapping[nn.Module, Any],
        before: Hook,
        after: Hook,
    ) -> None:
        """Call ``before(modules[module], module)`` and ``after(module, args, kwargs, output)``
        around each call of some modules, as :meth:`around` does, by hooks of torch's that are on no
        module."""

        def begin(module: nn.Module, _args: object) -> None:
            if module in modules:
                before(modules[module], module)

        def end(module: nn.Module, args: Any, *given: Any) -> None:
            if module in modules:
                *kwargs, output = given  # torch leaves out kwargs after an error
                after(module, args, *(kwargs or [{}]), output)

        self._undo.callback(register_module_forward_pre_hook(begin).remove)
        hook = register_module_forward_hook(end, with_kwargs=True, always_call=True)
        self._undo.callback(hook.remove)
        # torch 2.13 leaves this behind, and then believes in hooks that are gone
        with_kwargs = getattr(torch_module, "_global_forward_hooks_with_kwargs", {})
        self._undo.callback(with_kwargs.pop, hook.id, None)

    def undo(self, callback: Callable[[], object]) -> None:
        """Call ``callback`` too when everything is undone."""
        self._undo.callback(callback)

    def run_eagerly(self, parts: Iterable[tuple[Any, str]]) -> None:
        """Bypass the compiled parts of a model, see :func:`.denoiser_call.compiled_parts`;
        :meth:`remove` restores them with their graphs, unless they were compiled again."""
        # The compiled code is in attributes; without them the module's own forward runs.
        for module, name in parts:
            eager = module._orig_mod.__call__ if name == "forward" else None
            self._undo.callback(_put_attribute, module, name, eager, vars(module)[name])
            object.__setattr__(module, name, eager)

    def replaced(self) -> list[tuple[AttentionLayer, Any]]:
        """Return the layers whose last installed processor is out of use, with the one in use."""
        found = []
        for place in self._places.values():
            if not place.ours:
                continue
            ours = place.ours[-1]
            held = place.layer.module.processor
            # Asked in every pass; nobody else's observer lies outside as a rule.
            if held is not ours and all(part is not ours for part in _wrapped(held)):
                found.append((place.layer, innermost(held)))
        return found

    def take_out(self, layer: AttentionLayer) -> None:
        """Restore what a layer held before."""
        self._put_back(layer.module)

    def leave(self, layer: AttentionLayer) -> None:
        """Leave a layer as it is now."""
        del self._places[layer.module]

    def remove(self) -> None:
        """Undo everything. A second call has no effect."""
        self._undo.close()

    def _note(self, layer: AttentionLayer) -> _Place:
        module = layer.module
        if module not in self._places:
            held = layer.module.processor
            getattr(held, "__dict__", {}).pop("stands_for", None)  # it is at work now
            self._places[module] = _Place(layer, held)
            self._undo.callback(self._put_back, module)
        return self._places[module]

    def _put_back(self, module: Any) -> None:
        if place := self._places.pop(module, None):
            place.put_back()


class PassHooks:
    """Hooks before and after each pass of a model, held weakly: ``before(model, args, kwargs,
    is_direct)`` and ``after()``. Direct is ``unet.forward(...)``, which runs only the hooks of the
    UNet's parts."""

    def __init__(
        self,
        installed: Installation,
        model: nn.Module,
        before: Hook,
        after: Callable[[], None],
    ):
        self._before = before
        self._after = after
        self._model = weakref.ref(model)
        self._is_hooked = False
        self._is_direct = False
        installed.watch(model, self._begin, self._end)
        first = getattr(model, "conv_in", None)
        last = getattr(model, "conv_out", None)
        if first is not None and last is not None and not compiled_parts((model, first, last)):
            installed.watch(first, self._begin_part)
            installed.follow(last, self._end_part)

    def _begin(self, model: nn.Module, args: tuple[object, ...], kwargs: Given) -> None:
        self._is_hooked = True
        self._is_direct = False
        self._before(model, args, kwargs)

    def _end(self, *_: object) -> None:
        self._after()

    def _begin_part(self, *_: object) -> None:
        was_hooked = self._is_hooked
        self._is_hooked = False  # a call that broke off may have left it
        if was_hooked or in_backward():
            return
        given = forward_variables(self._model())
        if given is not None:
            names = ("sample", "timestep", "encoder_hidden_states")
            self._is_direct = True
            self._before(self._model(), (), {name: given[name] for name in names}, is_direct=True)

    def _end_part(self, *_: object) -> None:
        if self._is_direct:
            self._is_direct = False
            self._after()


def in_backward() -> bool:
    """Check whether a backward pass is running, which runs checkpointed layers a second time."""
    # torch.utils.checkpoint and torch.utils.module_tracker ask so; there is no public name for it
    return torch._C._current_graph_task_id() != -1


def set_processor(module: Any, processor: Any) -> None:
    """Set a layer's processor, by the layer's own method if it has one."""
    if hasattr(module, "set_processor"):
        module.set_processor(processor)
        return
    if "processor" in module._modules and not isinstance(processor, nn.Module):
        del module.processor  # a module may not be overwritten by a plain object
    module.processor = processor


def put_innermost(module: Any, processor: Any) -> None:
    """Set a layer's processor under any that only observe."""
    *outer, held = _wrapped(module.processor)
    if outer and held is not processor:
        _put_under(outer[-1], processor)
    elif held is not processor:
        set_processor(module, processor)


def _put_under(observer: Any, processor: Any) -> None:
    del observer.inner  # a module may not be overwritten by a plain object
    observer.inner = processor


def _wrapped(processor: Any) -> Iterator[Any]:
    yield processor
    while getattr(processor, "is_observer", False):
        processor = processor.inner
        yield processor


def _put_attribute(module: Any, name: str, ours: Any, before: Any) -> None:
    if vars(module)[name] == ours:  # else it was compiled anew in the meantime
        object.__setattr__(module, name, before)
