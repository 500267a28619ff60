"""`AttentionLayer`: one layer of a denoiser, its place and what it attends to; `select_layers`."""

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from numbers import Integral
from typing import Any, Literal

from ..attention import level_grids
from ..attention.core import grid_text
from ..errors import InvalidValueError, refuse
from .denoiser_call import Size
from .values import whole

Place = Literal["down", "mid", "up", "double", "single", "block"]
Kind = Literal[
    "cross", "joint", "self", "text", "temporal", "linear", "audio", "grounded", "control"
]
PLACES: tuple[Place, ...] = ("down", "mid", "up")  # of a UNet
KINDS: tuple[Kind, ...] = ("cross", "joint", "self")  # kinds that can be captured
TEXT_KINDS: tuple[Kind, ...] = ("cross", "joint")  # kinds with a column per text token
# Places of the layers in FLUX and its descendants: two-stream blocks, then one-stream ones.
DOUBLE_THEN_SINGLE: Mapping[str, tuple[Place, Kind]] = {
    "transformer_blocks.*.attn": ("double", "joint"),
    "single_transformer_blocks.*.attn": ("single", "joint"),
}
# Blocks in which the image attends to itself, then to the text
SELF_THEN_CROSS: Mapping[str, tuple[Place, Kind]] = {
    "transformer_blocks.*.attn1": ("block", "self"),
    "transformer_blocks.*.attn2": ("block", "cross"),
}


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer of a denoiser.

    Attributes:
        name: module path, ``down_blocks.0.attentions.0.transformer_blocks.0.attn2``.
        place: ``"down"``, ``"mid"`` or ``"up"`` in a UNet; ``"double"`` or ``"single"`` stream in a
            transformer with joint attention, ``"block"`` in any other.
        kind: ``"cross"`` (keys from the text), ``"joint"`` (keys from text and image) or ``"self"``
            (keys from the image). Listed, but never captured: ``"text"`` (text only),
            ``"temporal"`` (across the frames of a video), ``"linear"`` (no softmax), ``"audio"``
            (to or from a video's sound), ``"grounded"`` (image and objects of GLIGEN's boxes
            together) and ``"control"`` (a control network inside the model, or reference images
            alone).
        level: 0 at the full latent resolution, 1 at half of it, and so on.
        heads: number of attention heads.
        module: diffusers' attention module, which holds the processor; None in a store once its
            block has ended.
    """

    name: str
    place: Place
    kind: Kind
    level: int
    heads: int
    module: Any

    def grid(self, latent_size: Size) -> Size:
        """Return (rows, cols) of this layer's queries for a latent of (rows, cols) cells. A leading
        number of frames stays as it is."""
        return level_grids(latent_size, self.level + 1)[-1]


LayerChoice = str | int | tuple[int, int]
LayerPredicate = Callable[[AttentionLayer], bool] | Callable[[AttentionLayer, Size | None], bool]
LayerSelection = LayerChoice | Sequence[LayerChoice] | LayerPredicate | None


def select_layers(
    found: Sequence[AttentionLayer],
    layers: LayerSelection = None,
    kinds: Sequence[str] = TEXT_KINDS,
    latent_size: Size | None = None,
) -> list[AttentionLayer]:
    """Return the layers in ``found`` that are of one of ``kinds`` and fit one of ``layers``.

    Args:
        found: attention layers, as ``find_denoiser(model).layers`` lists them.
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
    is_list = isinstance(layers, Collection) and not isinstance(layers, (str, bytes, Mapping))
    choices = list(layers) if is_list and not is_grid else [layers]
    for choice in choices:
        sides = list(choice) if isinstance(choice, (tuple, list)) else [choice] * 2
        is_size = len(sides) == 2 and all((whole(side) or 0) > 0 for side in sides)
        if not isinstance(choice, str) and not is_size:
            raise refuse("layers", layers, "names, places or grids of layers, such as 'up' or 16")
    return choices


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
