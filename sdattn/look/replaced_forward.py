"""A layer's ``forward`` that other code replaced, watched as a processor is.

It calls the layer's projections and multiplies the values by its probabilities, as an unknown
processor does, so what it used is seen in the same way. If it calls the processor after all (a
timer), that is seen there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import nn

from ..models.denoiser_call import innermost
from ..models.layers import AttentionLayer
from ..models.replaced_calls import function_name, replaced_call
from .layer import IsOpen, Output, Processor
from .observers import Calls, Observe, ObservingProcessor
from .projections import Seen
from .sources import see


class ReplacedForward:
    """A layer's forward, called as processors are: with the layer before what it was given.

    Attributes:
        forward: the module's own attribute; None if it has none, and its class's forward counts.
        title: name of the function, for messages.
    """

    def __init__(self, module: nn.Module):
        self.forward: Callable[..., Any] | None = vars(module).get("forward")
        _, function = replaced_call(module) or ("", type(module).forward)
        self.title = f"the forward {function_name(function)}"

    def __call__(self, attn: Any, *args: Any, **kwargs: Any) -> Output:
        forward = type(attn).forward.__get__(attn) if self.forward is None else self.forward
        output: Output = forward(*args, **kwargs)
        return output


def own_forward(module: nn.Module) -> Any:
    """Return what a module has for its forward, below what watches it; None for its class's."""
    held = vars(module).get("forward")
    return innermost(held.observer).forward if isinstance(held, _Watched) else held


class ForwardSlot:
    """A layer's forward in the place of its processor, for an :class:`.installer.Installation`."""

    def __init__(self, module: nn.Module):
        self.module = module

    @property
    def processor(self) -> Processor:
        held = vars(self.module).get("forward")
        return held.observer if isinstance(held, _Watched) else ReplacedForward(self.module)

    def set_processor(self, processor: Any) -> None:
        if getattr(processor, "is_observer", False):
            vars(self.module)["forward"] = _Watched(processor, self.module)
        elif processor.forward is None:
            vars(self.module).pop("forward", None)
        else:
            vars(self.module)["forward"] = processor.forward


def observing_forward(
    layer: AttentionLayer,
    observe: Observe,
    is_open: IsOpen,
    is_needed: Callable[[], bool],
    processor: ObservingProcessor,
) -> tuple[AttentionLayer, ObservingForward]:
    """Return the layer with its forward in the place of its processor, and an observer of that,
    until ``processor``, the processor's own, sees a call."""
    slot = replace(layer, module=ForwardSlot(layer.module))
    before = processor.n_seen

    def is_seen() -> bool:
        return processor.n_seen > before

    inner = slot.module.processor
    return slot, ObservingForward(inner, observe, is_open, is_needed, is_seen)


class ObservingForward(ObservingProcessor):
    """An observer of a replaced forward, until the layer's own processor is seen to run.

    Args:
        inner: the forward, or another capture's observer of it.
        observe, is_open, is_needed: see :class:`ObservingProcessor`.
        is_seen: function that tells whether the processor ran.
    """

    def __init__(
        self,
        inner: Processor,
        observe: Observe,
        is_open: IsOpen,
        is_needed: Callable[[], bool],
        is_seen: Callable[[], bool],
    ):
        super().__init__(inner, observe, see, is_open, is_needed)
        self.is_seen = is_seen

    def looks(self) -> bool:
        return not self.is_seen() and super().looks()

    def has_nothing_in(self, seen: Seen, calls: Calls) -> bool:
        """Check whether the processor was seen, or nothing was called at all (a cache's)."""
        return self.is_seen() or not (seen or calls)

    def end(self) -> None:
        super().end()
        self.is_seen = _always


def _always() -> bool:
    return True


class _Watched:
    """A stand-in for a module's forward while that is watched."""

    def __init__(self, observer: ObservingForward, module: Any):
        self.observer = observer
        self.module = module

    @property
    def __wrapped__(self) -> Any:
        return innermost(self.observer).forward or type(self.module).forward

    def __call__(self, *args: Any, **kwargs: Any) -> Output:
        return self.observer(self.module, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return the forward itself: the copy of a model is not watched."""
        own = self.__wrapped__
        copied = memo.get(id(self.module))
        is_of_class = own is type(self.module).forward
        return own.__get__(copied) if is_of_class else copy.deepcopy(own, memo)
