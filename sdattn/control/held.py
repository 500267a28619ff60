"""Processors that a model's layers hold, and which of them call a controller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from torch import nn

from ..attention.controlled import ControlledProcessor
from ..models.attention_layer import Kind
from ..models.denoiser_call import innermost


def holds(processor: object, controller: object) -> bool:
    """Check whether a processor has a controller among its attributes, under any name."""
    values = getattr(processor, "__dict__", {}).values()
    return controller is not None and any(one is controller for one in values)


def is_suspended(layers: Iterable[nn.Module], controller: object) -> bool:
    """Check whether the controller's processor is covered by one that will be taken out again."""
    return any(holds(one, controller) for layer in layers for one in _displaced(layer.processor))


def is_taken(layers: Iterable[nn.Module]) -> bool:
    held = (getattr(innermost(layer.processor), "controller", None) for layer in layers)
    return all(controller is not None for controller in held)


def standing(layers: Iterable[nn.Module], controller: object) -> str:
    """Describe the processors that the layers hold now: ``32 x AttnProcessor2_0``."""
    held = Counter(_described(innermost(layer.processor), controller) for layer in layers)
    return ", ".join(f"{number} x {kind}" for kind, number in held.items())


def calls_in_a_pass(processor: object, kind: Kind, controller: object) -> int:
    """Return how often one of our processors calls a controller in a layer of this kind: twice if
    it shows image-to-image attention too; 0 for other code's, which may call or not."""
    if not isinstance(processor, ControlledProcessor) or processor.controller is not controller:
        return 0
    return 2 if kind == "joint" and getattr(processor, "shows_image", False) else 1


def _displaced(processor: object) -> Iterator[object]:
    """Yield the processors under this one, which return when it is taken out."""
    processor = getattr(innermost(processor), "displaced", None)
    while processor is not None:
        yield innermost(processor)
        processor = getattr(innermost(processor), "displaced", None)


def _described(processor: object, controller: object) -> str:
    name = type(processor).__name__
    if holds(processor, controller):
        return f"{name} with this store"
    if not hasattr(processor, "controller"):
        return name
    if processor.controller is None:
        return f"{name} with no controller"
    return f"{name} with another {type(processor.controller).__name__}"
