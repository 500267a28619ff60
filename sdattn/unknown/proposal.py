"""`Proposal`: what to tell :func:`sdattn.capture` of a model, from its attention calls."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..attention.core import grid_text, level_grids
from ..errors import InvalidValueError
from ..models.denoiser_call import Size
from ..models.layers import Kind
from .told import LEVELS, ToldFamily, told_family

PATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class InspectedCall:
    """One attention call of a model.

    Attributes:
        name: path of the innermost module that ran; ``path:number:kind`` from its second call on.
        made_by: ``"scaled_dot_product_attention"``, ``"multi_head_attention_forward"`` or
            ``"softmax and product"``.
        rows: rows of its batch for one of the model's: the frames of a video, where each is a row.
        heads, queries, keys: its other axes.
        has_mask: whether there was a mask; False if it is not known, for a softmax and a product.
        kind: ``"cross"``, ``"joint"``, ``"self"``, ``"text"`` (text only) or ``"temporal"`` (across
            the frames of a video, if its grid is known); None if unknown.
        text: where the text is among the keys; None if there is none, or if it is not one piece.
        cells: number of queries that are not the text's, in all rows of one image or video.
    """

    name: str
    made_by: str
    rows: int
    heads: int
    queries: int
    keys: int
    has_mask: bool
    kind: Kind | None
    text: slice | None
    cells: int


@dataclass(frozen=True)
class Proposal:
    """Options of :func:`sdattn.capture` for one model.

    Attributes:
        text: the name of the argument with the text, if its tokens are all the keys of the layers;
            else the text's slice of the keys; None if no layer's text is known.
        grid: grid of the image's cells; None if none fits.
        layers: patterns of the layers to watch; None if the text and the grid tell them.
        unsure: what is a guess, and what is left out, a line each.
    """

    text: slice | str | None
    grid: Size | None
    layers: tuple[str, ...] | None
    unsure: tuple[str, ...]

    @property
    def options(self) -> dict[str, Any]:
        """The keywords for :func:`sdattn.capture`.

        Raises:
            ValueError: the text or the grid is not known.
        """
        if self.text is None or self.grid is None:
            raise InvalidValueError("; ".join(self.unsure))
        named = {} if self.layers is None else {"layers": list(self.layers)}
        return {"text": self.text, "grid": self.grid, **named}

    def __str__(self) -> str:
        text = "..." if self.text is None else repr(self.text).replace(", None)", ")")
        grid = "..." if self.grid is None else repr(self.grid)
        layers = "" if self.layers is None else f", layers={list(self.layers)!r}"
        line = f"sdattn.capture(model, text={text}, grid={grid}{layers})"
        return "\n".join([line, *(f"# not sure: {one}" for one in self.unsure)])


def propose(
    calls: Sequence[InspectedCall], arguments: Mapping[str, Any], name: str | None, was_marked: bool
) -> Proposal:
    """Propose what to tell of a model that got these ``arguments``, the text under ``name``."""
    unsure: list[str] = []
    if name is None:
        names = ", ".join(arguments)
        unsure.append(f"no argument has a usual name of a text: pass text= ({names})")
    elif not was_marked:
        unsure.append(f"that {name} holds the text is told by its name alone")
    of_text = [call for call in calls if call.kind in ("cross", "joint") and call.text]
    if not of_text:
        unsure.append("no attention call was seen whose keys are the text's")
        return Proposal(None, None, None, tuple(unsure))
    text = _text(of_text, arguments.get(name or ""), name, unsure)
    if isinstance(text, slice):
        of_text = [call for call in of_text if _relative(call) == text]
    grid = _grid(max(of_text, key=lambda call: call.cells), arguments, unsure)
    if grid is None:
        return Proposal(text, None, None, tuple(unsure))
    at_levels = {math.prod(size) for size in level_grids(grid, LEVELS)}
    chosen = [call for call in of_text if call.cells in at_levels]
    left_out = [call.name for call in of_text if call not in chosen]
    if left_out:
        unsure.append(f"the queries of {', '.join(left_out)} fit no level of the grid")
    family = told_family(None, text if isinstance(text, slice) else arguments[text], grid)
    is_told = all(_is_told(family, call, grid, call in chosen) for call in calls)
    layers = None if is_told else tuple(dict.fromkeys(folded(call.name) for call in chosen))
    return Proposal(text, grid, layers, tuple(unsure))


def folded(name: str) -> str:
    """Return the name of a layer as a pattern for all blocks alike.

    >>> folded("transformer_blocks.12:1:cross")
    'transformer_blocks.*:1:cross'
    """
    return re.sub(r"(?<![^.])\d+(?=[.:]|$)", "*", name)


def _text(
    calls: Sequence[InspectedCall], value: Any, name: str | None, unsure: list[str]
) -> slice | str:
    """Return the text's argument or its slice in most calls."""
    is_cross = all(call.kind == "cross" for call in calls)
    if is_cross and name is not None and isinstance(value, Tensor):
        length = value.shape[-2] if value.is_floating_point() else value.shape[-1]
        if all(call.keys == length for call in calls):
            return name
    slices = [_relative(call) for call in calls]
    places = {str(one) for one in slices}
    if len(places) > 1:
        unsure.append(f"the text is at {len(places)} places, and this is the one of most layers")
    return max(slices, key=slices.count)


def _relative(call: InspectedCall) -> slice:
    """Return the text's slice, from the end of the keys if the text comes last."""
    assert call.text is not None
    if call.text.stop == call.keys and call.text.start > 0:
        return slice(call.text.start - call.text.stop, None)
    return slice(call.text.start, call.text.stop)


def _is_told(family: ToldFamily, call: InspectedCall, grid: Size, is_chosen: bool) -> bool:
    """Check whether the text and the grid alone tell what was seen of a call."""
    length = family.length(family.text)
    frames = grid[0] if len(grid) == 3 and call.rows > 1 else 1
    try:
        place = family.place(call.name, call.queries, call.keys, grid, length, False)
    except InvalidValueError:
        return False
    is_text = place is not None and place.kind in ("cross", "joint")
    return is_text == is_chosen or frames > 1


def _grid(call: InspectedCall, arguments: Mapping[str, Any], unsure: list[str]) -> Size | None:
    """Return the grid of a call's cells that the arguments give, or else a square."""
    cells = call.cells
    every = Counter(_grids_in(call, arguments))
    by_rows = Counter({grid: count for grid, count in every.items() if grid[0] == call.rows > 1})
    grids = by_rows or every
    if grids:
        grid, _ = grids.most_common(1)[0]
        if len(grids) > 1:
            others = ", ".join(grid_text(other) for other in grids if other != grid)
            unsure.append(f"the grid of {cells} cells may also be {others}")
        return grid
    side = math.isqrt(cells)
    if side * side == cells:
        unsure.append(f"no argument tells the grid of {cells} cells; they make a square")
        return side, side
    pairs = [(rows, cells // rows) for rows in range(2, side + 1) if cells % rows == 0]
    choice = ", ".join(grid_text(pair) for pair in pairs[-3:])
    unsure.append(f"no argument tells the grid of {cells} cells{choice and f': {choice}?'}")
    return None


def _grids_in(call: InspectedCall, arguments: Mapping[str, Any]) -> Iterator[Size]:
    """Yield the grids that shapes, ids or sizes among the arguments give for a call's cells."""
    cells = call.cells
    numbers = {}
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            yield from _grids_of_ids(call, value)
            yield from dict.fromkeys(_grids_of_shape(cells, value))
        elif isinstance(value, int) and not isinstance(value, bool):
            numbers[name] = int(value)
    sides = [numbers.get(name) for name in ("num_frames", "height", "width")]
    if all(sides[1:]):
        yield from _patched(cells, [side for side in sides if side])
    lists = [value for value in arguments.values() if isinstance(value, (list, tuple))]
    for sizes in _leaves(lists):
        if math.prod(sizes) == cells:
            yield tuple(sizes[1:] if len(sizes) == 3 and sizes[0] == 1 else sizes)


def _grids_of_ids(call: InspectedCall, ids: Tensor) -> Iterator[Size]:
    """Yield the grid of positions ``[(B,) N, axes]``, of the image alone or of its text too."""
    if ids.is_complex() or ids.ndim not in (2, 3) or ids.shape[-1] not in (2, 3, 4):
        return
    places = ids.reshape(-1, *ids.shape[-2:])[0].float().cpu()
    if len(places) == call.keys and call.text is not None:
        places = torch.cat([places[: call.text.start], places[call.text.stop :]])
    sides = [len(column.unique()) for column in places.unbind(-1)]
    if len(sides) == 4 and sides[-1] == 1:  # FLUX.2's (image, row, col, token of the text)
        sides.pop()
    if len(places) == math.prod(sides) == call.cells:
        yield tuple(side for side in sides[:-2] if side > 1) + tuple(sides[-2:])


def _grids_of_shape(cells: int, value: Tensor) -> Iterator[Size]:
    """Yield the grids that patches make of latents ``[B, C, rows, cols]`` or a video's."""
    if value.ndim == 4:
        yield from _patched(cells, value.shape[-2:])
    elif value.ndim == 5:
        yield from _patched(cells, value.shape[2:])
        yield from _patched(cells, (value.shape[1], *value.shape[3:]))


def _patched(cells: int, sides: Sequence[int]) -> Iterator[Size]:
    """Yield the grids of so many cells that patches make of an image or a video; first those whose
    patches are of one frame."""
    *frames, rows, cols = sides
    spans = (1, 2, 4) if frames else (1,)
    for span, patch in product(spans, PATCHES):
        if rows % patch == cols % patch == 0:
            grid = (*(-(-count // span) for count in frames), rows // patch, cols // patch)
            if math.prod(grid) == cells:
                yield grid


def _leaves(values: Sequence[Any]) -> Iterator[list[int]]:
    """Yield the lists of two or three whole numbers in nested lists."""
    for value in values:
        if isinstance(value, (list, tuple, torch.Size)):
            if len(value) in (2, 3) and all(isinstance(side, int) for side in value):
                yield list(value)
            else:
                yield from _leaves(value)
