"""A pipeline's denoiser and its attention layers, through its family.

A UNet has self-attention ``attn1`` and cross-attention ``attn2`` in its down, mid and up blocks. A
transformer has blocks of one resolution, whose attention is either of these two kinds or joint: one
softmax over the tokens of text and image together (Esser et al. 2024, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch.nn import Module

from ..errors import InvalidTypeError
from .denoiser_call import called, compiled_parts, unwrapped
from .families import TWO_FACTS, claimed, family_of, listed, registered
from .family import Family, Joined
from .layers import AttentionLayer
from .pipeline import Pipeline


@dataclass(frozen=True)
class Denoiser:
    """Model that is called once a step (see :func:`.denoiser_call.called`), with its pipeline (None
    for a bare model) and its family."""

    model: Any
    pipeline: Any
    family: Family

    @cached_property
    def modules(self) -> dict[str, Module]:
        """Every module inside all wrappings of the model, by path. A run walks through its model
        here alone: make another denoiser once modules were replaced."""
        return dict(unwrapped(self.model).named_modules())

    @property
    def compiled_parts(self) -> list[tuple[Any, str]]:
        """Modules that are compiled now, see :func:`.denoiser_call.compiled_parts`."""
        is_wrapped = self.model is not unwrapped(self.model)
        return compiled_parts(self.model.modules() if is_wrapped else self.modules.values())

    @cached_property
    def layers(self) -> list[AttentionLayer]:
        """Every attention layer in running order: in a UNet down, mid, up, with ``attn1`` before
        ``attn2`` in a block; in a transformer double-stream blocks before single-stream ones; in a
        custom model the order in which it was built. Raise TypeError for an unknown layer."""
        return self.family.find_layers(unwrapped(self.model), self.modules)

    @cached_property
    def stands_in(self) -> Denoiser | None:
        """Denoiser with the same layers that replaces the first in steps of little noise (Wan 2.2's
        ``transformer_2``), or None."""
        other = called(getattr(self.pipeline, "transformer_2", None))
        return None if other in (None, self.model) else replace(self, model=other)

    @property
    def levels(self) -> int:
        """Number of resolutions in a UNet; 1 for a transformer."""
        return self.family.levels(unwrapped(self.model))


def find_denoiser(target: Pipeline | Module | Denoiser) -> Denoiser:
    """Return a pipeline's UNet or transformer, or the one that ``target`` is; raise TypeError for
    one of no known family."""
    if isinstance(target, Denoiser):
        return target
    target = called(target)
    model = called(held_model(target))
    # A custom model may have parts named unet or transformer.
    asked = type(unwrapped(target)).__name__
    is_none = not isinstance(target, Module) and not hasattr(target, "components")
    if model is None and is_none and claimed(target) is None:
        raise InvalidTypeError(
            f"Asked to capture a {asked}. Pass a pipeline first, as sdattn.load_pipeline('demo') "
            "returns it, or its model."
        )
    why = f"Asked to capture a {asked}, which {what_it_holds(target, model)}"
    if model is None or (isinstance(target, Module) and claimed(target)):
        return Denoiser(target, None, family_of(target, why))
    return Denoiser(model, target, family_of(model, why).within(target))


def what_it_holds(target: object, model: object) -> str:
    """Describe a target without a family for a message, with the classes that could have been
    meant."""
    if model is not None:
        return f"holds a {type(model).__name__}, of no family that is known"
    if isinstance(target, Module):
        for name, part in target.named_modules():
            if listed(type(part)) is not None:
                return (
                    f"is of no family that is known, but its part `{name}` is: pass that "
                    f"{type(part).__name__}"
                )
        return "is of no family that is known"
    parts = getattr(target, "components", {}).values()
    models = [type(part).__name__ for part in parts if isinstance(part, Module)]
    only = f", only: {', '.join(models)}" if models else ""
    return f"holds no denoiser (a unet or a transformer){only}"


def held_model(target: object) -> Any | None:
    """Return the denoiser of a pipeline, or None if it has none."""
    held = (getattr(target, name, None) for name in ("unet", "transformer", "transformer_2"))
    return next((part for part in held if part is not None), None)


def joint_order(denoiser: Denoiser) -> Joined:
    """Return the order in which a transformer's joint attention joins text and image; raise
    TypeError for a subclass with its own ``forward``."""
    model = unwrapped(denoiser.model)
    joined = denoiser.family.order_of(model)
    if joined is None:
        kind = type(model)
        raise InvalidTypeError(
            f"A {kind.__name__} ({kind.__module__}) has a forward that is not its family's own, so "
            "whether its joint attention has the text or the image first is not known. The model "
            f"itself {TWO_FACTS}Supported are these families, and subclasses that leave forward to "
            f"them: {', '.join(family.title for family in registered() if family.joined)}."
        )
    return joined


def ordered_spans(joined: Joined, cells: int, n_text: int) -> tuple[slice, slice]:
    """Return the places of the image's ``cells`` and the text's ``n_text`` tokens in joint
    attention of that order. Reference images follow the generated one, and are in neither."""
    if joined == "text first":
        return slice(n_text, n_text + cells), slice(0, n_text)
    return slice(0, cells), slice(cells, cells + n_text)


def joint_spans(denoiser: Denoiser, cells: int, n_text: int) -> tuple[slice, slice]:
    """Return :func:`ordered_spans` for this model's order, see :func:`joint_order`."""
    return ordered_spans(joint_order(denoiser), cells, n_text)
