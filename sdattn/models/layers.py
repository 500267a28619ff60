"""A pipeline's denoiser, its attention layers and its calls, through its family.

A UNet has self-attention ``attn1`` and cross-attention ``attn2`` in its down, mid and up blocks. A
transformer has blocks of one resolution, whose attention is either of these two kinds or joint: one
softmax over the tokens of text and image together (Esser et al. 2024, section 4).
"""

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from numbers import Integral
from typing import Any

from torch.nn import Module

from ..attention.core import grid_text
from ..errors import InvalidTypeError, InvalidValueError, refuse
from .attention_layer import KINDS
from .attention_layer import PLACES as PLACES
from .attention_layer import TEXT_KINDS as TEXT_KINDS
from .attention_layer import AttentionLayer as AttentionLayer
from .attention_layer import Place as Place
from .denoiser_call import Size
from .denoiser_call import unwrapped as unwrapped
from .families import claimed, family_of, registered
from .families.own import is_own as is_own
from .families.unet import is_unet as is_unet
from .family import Family
from .family import Joined as Joined
from .pipeline import Pipeline

LayerChoice = str | int | tuple[int, int]
LayerPredicate = Callable[[AttentionLayer], bool] | Callable[[AttentionLayer, Size | None], bool]
LayerSelection = LayerChoice | Sequence[LayerChoice] | LayerPredicate | None


@dataclass(frozen=True)
class Denoiser:
    """Model that is called once a step, with its pipeline (None for a bare model) and its
    family."""

    model: Any
    pipeline: Any
    family: Family

    @cached_property
    def layers(self) -> list[AttentionLayer]:
        """Every attention layer in running order: in a UNet down, mid, up, with ``attn1`` before
        ``attn2`` in a block; in a transformer double-stream blocks before single-stream ones; in a
        custom model the order in which it was built. Raise TypeError for an unknown layer."""
        return self.family.find_layers(unwrapped(self.model))

    @property
    def stands_in(self) -> Any | None:
        """Model with the same layers that replaces the first in steps of little noise (Wan 2.2's
        ``transformer_2``), or None."""
        other = getattr(self.pipeline, "transformer_2", None)
        return None if other is self.model else other

    @property
    def levels(self) -> int:
        """Number of resolutions in a UNet; 1 for a transformer."""
        return self.family.levels(self.model)


def find_denoiser(target: Pipeline | Module | Denoiser) -> Denoiser:
    """Return a pipeline's UNet or transformer, or the one that ``target`` is; raise TypeError for
    one of no known family."""
    if isinstance(target, Denoiser):
        return target
    model = held_model(target)
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
    TypeError for another class of the same name, or a subclass with its own ``forward``."""
    model = unwrapped(denoiser.model)
    joined = denoiser.family.order_of(model)
    if joined is None:
        kind = type(model)
        raise InvalidTypeError(
            f"A {kind.__name__} ({kind.__module__}) has a forward that is not its family's own, so "
            "whether its joint attention has the text or the image first is not known. Supported "
            "are these families, and subclasses that leave forward to them: "
            + ", ".join(family.title for family in registered() if family.joined)
            + "."
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


def select_layers(
    found: Sequence[AttentionLayer],
    layers: LayerSelection = None,
    kinds: Sequence[str] = TEXT_KINDS,
    latent_size: Size | None = None,
) -> list[AttentionLayer]:
    """Return the layers in ``found`` that are of one of ``kinds`` and fit one of ``layers``.

    Args:
        found: :attr:`Denoiser.layers`.
        layers: None for all; a predicate of an ``AttentionLayer``, or of the layer and
            ``latent_size``; or one or more of: a layer's name, a part of it that starts and ends at
            a dot (``"down_blocks.0"``), a pattern (``"*.attn2"``), a place (``"down"``), a
            resolution as ``(rows, cols)``, or as an integer for the grid's shorter side.
        kinds: one or more of ``"cross"``, ``"joint"``, ``"self"``; default: both kinds that see
            text.
        latent_size: (rows, cols) of the latent, (frames, rows, cols) for a video. While it is None,
            every layer fits any resolution.

    Raises:
        ValueError: a kind or a choice that fits no layer; the message lists the layers there are.
    """
    kinds = checked_kinds(kinds)
    candidates = [layer for layer in found if layer.kind in kinds]
    if callable(layers):
        chosen = [layer for layer in candidates if fits_any(layer, layers, latent_size)]
        if not chosen:
            raise InvalidValueError(_nothing_fits("the predicate", candidates, latent_size))
        return chosen
    # Each choice must fit some layer, so that a misspelt one is noticed.
    choices = _as_choices(layers)
    if layers is None:
        chosen = candidates
    elif not choices:
        raise InvalidValueError(f"layers={layers!r} names no layer. Pass None for all of them.")
    for choice in choices:
        if not any(_fits(layer, choice, latent_size) for layer in candidates):
            raise InvalidValueError(_nothing_fits(repr(choice), candidates, latent_size))
    if choices:
        chosen = [layer for layer in candidates if fits_any(layer, layers, latent_size)]
    if not chosen:
        raise InvalidValueError(_nothing_fits(f"kinds={kinds}", found, latent_size))
    return chosen


def fits_any(layer: AttentionLayer, layers: LayerSelection, latent_size: Size | None) -> bool:
    """Check whether a layer is among those that ``layers`` chooses, see :func:`select_layers`."""
    if callable(layers):
        given = (latent_size,) if needs_size(layers) else ()
        return bool(layers(layer, *given))
    return layers is None or any(_fits(layer, one, latent_size) for one in _as_choices(layers))


def checked_kinds(kinds: object, known: Sequence[str] = KINDS) -> tuple[str, ...]:
    """Return kinds of attention as a tuple; raise ValueError for one that is not ``known``, for
    none, or for a single name."""
    found = tuple(kinds) if isinstance(kinds, Iterable) and not isinstance(kinds, str) else ()
    if not found or any(kind not in known for kind in found):
        raise refuse("kinds", kinds, f"a tuple of {' and/or '.join(map(repr, known))}")
    return found


def needs_size(layers: LayerSelection) -> bool:
    """Check whether a choice of layers depends on the resolution of the run."""
    if not callable(layers):
        return any(not isinstance(choice, str) for choice in _as_choices(layers))
    given = inspect.signature(layers).parameters.values()
    needed = [p for p in given if p.default is p.empty and p.kind is not p.VAR_KEYWORD]
    return len(needed) > 1


def _as_choices(layers: Any) -> list[LayerChoice]:
    if layers is None:
        return []
    # A pair of integers is one grid, (16, 24), and no two resolutions.
    is_grid = (
        isinstance(layers, tuple)
        and len(layers) == 2
        and all(isinstance(side, Integral) for side in layers)
    )
    if isinstance(layers, (str, Integral)) or is_grid:
        return [layers]
    return list(layers)


def _fits(layer: AttentionLayer, choice: LayerChoice, latent_size: Size | None) -> bool:
    if isinstance(choice, str):
        is_part = f".{choice}." in f".{layer.name}."
        return choice == layer.place or is_part or fnmatchcase(layer.name, choice)
    if latent_size is None:
        return True
    grid = layer.grid(latent_size)[-2:]
    return min(grid) == choice if isinstance(choice, (int, Integral)) else grid == tuple(choice)


def _nothing_fits(asked: str, found: Sequence[AttentionLayer], latent_size: Size | None) -> str:
    lines = []
    for layer in found:
        grid = "" if latent_size is None else f" {grid_text(layer.grid(latent_size))}"
        lines.append(f"  {layer.name} ({layer.place}, {layer.kind}{grid})")
    return f"No attention layer fits {asked}. The model has:\n" + "\n".join(lines or ["  none"])
