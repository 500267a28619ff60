"""`Proposal`: what to tell :func:`sdattn.capture` of a model, from its attention calls."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..attention.core import grid_text, level_grids
from ..errors import InvalidValueError, SdattnError
from ..follow.passes import CaptureWarning
from ..models.denoiser_call import Size
from ..models.layers import AttentionLayer, Kind, fits_any
from .arguments import grids_in, has_sides
from .told import LEVELS, Placed, slice_length

Rehearse = Callable[[Mapping[str, Any]], Sequence[Placed | None]]


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
        image: where the image is among the queries, likewise.
        cells: number of the image's queries, in all rows of one image or video.
        corner: for each of the image's queries, whether the image's first corner changes it.
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
    image: slice | None
    cells: int
    corner: tuple[bool, ...] = ()

    @property
    def width(self) -> int:
        """Number of the image's queries in a row."""
        return 0 if self.image is None else self.image.stop - self.image.start


@dataclass(frozen=True)
class Proposal:
    """Options of :func:`sdattn.capture` for one model, which it takes for such a call.

    Attributes:
        text: the name of the argument with the text, if its tokens are all the keys of the layers;
            else the text's slice of the keys; None if no layer's text is known.
        grid: grid of the image's cells; None if none fits.
        layers: patterns of the layers to watch; None if the text and the grid tell them.
        unsure: what is a guess, and what is left out, a line each.
        image: the image's slice of the queries; None if the text and the grid tell it.
        refused: why a capture by these options refuses such a call; "" if it does not.
    """

    text: slice | str | None
    grid: Size | None
    layers: tuple[str, ...] | None
    unsure: tuple[str, ...]
    image: slice | None = None
    refused: str = ""

    @property
    def options(self) -> dict[str, Any]:
        """The keywords for :func:`sdattn.capture`.

        Raises:
            ValueError: the text or the grid is not known, or a capture by them refuses the call.
        """
        if self.refused or self.text is None or self.grid is None:
            raise InvalidValueError("; ".join([*self.unsure, self.refused]).strip("; "))
        return {"text": self.text, "grid": self.grid, **self._more}

    @property
    def _more(self) -> dict[str, Any]:
        image = {} if self.image is None else {"image": self.image}
        return image if self.layers is None else {**image, "layers": list(self.layers)}

    def __str__(self) -> str:
        known = {"text": self.text, "grid": self.grid, **self._more}
        told = ("..." if one is None else repr(one) for one in known.values())
        named = (f"{name}={one}" for name, one in zip(known, told, strict=True))
        line = f"sdattn.capture(model, {', '.join(named)})".replace(", None)", ")")
        if self.refused:
            line = f"# sdattn.capture() refuses such a call: {self.refused}"
        return "\n".join([line, *(f"# not sure: {one}" for one in self.unsure)])


def propose(
    calls: Sequence[InspectedCall],
    arguments: Mapping[str, Any],
    name: str | None,
    was_marked: bool,
    rehearse: Rehearse,
) -> Proposal:
    """Propose what to tell of a model that got these ``arguments``, the text under ``name``;
    ``rehearse`` gives the place of each call by some options."""
    unsure: list[str] = []
    if name is None:
        names = ", ".join(arguments)
        unsure.append(f"no argument has a usual name of a text: pass text= ({names})")
    elif not was_marked:
        unsure.append(f"that {name} holds the text is told by its name alone")
    of_text = _seeing_text(calls, unsure)
    if not of_text:
        unsure.append("no attention call was seen whose keys are the text's")
        return Proposal(None, None, None, tuple(unsure))
    value = arguments.get(name or "")
    text = _text(of_text, value, name, unsure)
    if isinstance(text, slice):
        of_text = [call for call in of_text if _piece(call.text, call.keys) == text]
    of_text = _at_one_place(of_text, unsure)
    grid = _grid(max(of_text, key=lambda call: call.cells), arguments, unsure)
    cells = max(call.cells for call in of_text)
    at_levels = {math.prod(size) for size in level_grids(grid or (1, cells), LEVELS)}
    chosen = [call for call in of_text if call.cells in at_levels]
    if left_out := [call.name for call in of_text if call not in chosen]:
        unsure.append(f"the queries of {', '.join(left_out)} fit no level of the grid")
    proposal = Proposal(text, grid, _patterns(calls, chosen), tuple(unsure))
    if grid and any(_runs_down(call, grid) for call in chosen):
        turned = (*grid[:-2], grid[-1], grid[-2])
        reason = "the image's queries run down its columns. To read maps as (cols, rows), pass "
        return replace(proposal, refused=f"{reason}grid=lambda call: {turned}")
    return _tried(proposal, grid or (1, cells), calls, chosen, rehearse)


def _seeing_text(calls: Sequence[InspectedCall], unsure: list[str]) -> list[InspectedCall]:
    """Return the calls in which the image attends to the text."""
    found = []
    for call in calls:
        if call.kind in ("cross", "joint") and call.cells > 1:
            if call.text and call.image:
                found.append(call)
            else:
                unsure.append(f"{call.name}: its text, or its image, is not in one piece")
    return found


def _tried(
    proposal: Proposal,
    grid: Size,
    calls: Sequence[InspectedCall],
    chosen: Sequence[InspectedCall],
    rehearse: Rehearse,
) -> Proposal:
    """Return a proposal with the fewest options by which a capture shows just the ``chosen`` calls;
    if it does by none, with the reason."""
    images = [_piece(call.image, call.queries) for call in chosen if call.queries > call.width]
    expected = [(call.image, call.text) if call in chosen else None for call in calls]
    refused = []
    for layers, image in product((None, proposal.layers), (None, *images[:1])):
        tried = replace(proposal, layers=layers, image=image)
        said, found = _rehearsed(rehearse, replace(tried, grid=grid))
        if found == expected:
            return replace(tried, unsure=(*tried.unsure, *said))
        refused.append(" ".join(said) if found is None else "it shows other layers or cells")
    return replace(proposal, refused=refused[0])


def _runs_down(call: InspectedCall, grid: Size) -> bool:
    """Check by the queries that the image's first corner changes whether the grid runs down the
    columns, rather than along the rows."""
    rows, cols = grid[-2:]
    if call.cells != math.prod(grid) or not any(call.corner) or all(call.corner):
        return False
    corner = torch.tensor(call.corner).reshape(-1, rows * cols)
    first = torch.zeros(rows, cols, dtype=torch.bool)
    first[: rows // 2, : cols // 2] = True
    along, down = first.flatten(), first.T.flatten()
    missed = [int((corner != one).sum()) for one in (along, down)]
    return missed[1] < missed[0]


def _rehearsed(rehearse: Rehearse, tried: Proposal) -> tuple[list[str], list[Any] | None]:
    """Return what a capture by a proposal says, and the places of image and text in each call; None
    if it refuses them."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CaptureWarning)
        try:
            places = rehearse(tried.options)
        except SdattnError as error:
            return [str(error)], None
    said = [str(one.message) for one in caught]
    return said, [place and (place.image, place.keys) for place in places]


def folded(name: str) -> str:
    """Return the name of a layer as a pattern for all blocks alike.

    >>> folded("transformer_blocks.12:1:cross")
    'transformer_blocks.*:1:cross'
    """
    return re.sub(r"(?<![^.])\d+(?=[.:]|$)", "*", name)


def _patterns(calls: Sequence[InspectedCall], chosen: Sequence[InspectedCall]) -> tuple[str, ...]:
    """Return patterns of the chosen calls' paths that fit no other call."""
    others = [_layer(call.name) for call in calls if call not in chosen]
    found = []
    for call in chosen:
        choices = [("*", part) if part.isdigit() else (part,) for part in call.name.split(".")]
        patterns = sorted(product(*choices), key=lambda one: -one.count("*"))
        for pattern in map(".".join, patterns):
            if not any(fits_any(other, pattern, None) for other in others):
                break
        found.append(pattern)
    return tuple(dict.fromkeys(found))


def _layer(name: str) -> AttentionLayer:
    return AttentionLayer(name, "block", "joint", 0, 0, None)


def _text(
    calls: Sequence[InspectedCall], value: Any, name: str | None, unsure: list[str]
) -> slice | str:
    """Return the text's argument or its slice in most calls."""
    is_cross = all(call.kind == "cross" for call in calls)
    length = None
    if isinstance(value, Tensor):
        length = value.shape[-2] if value.is_floating_point() else value.shape[-1]
    if is_cross and name is not None and all(call.keys == length for call in calls):
        return name
    pieces = [_piece(call.text, call.keys) for call in calls]
    places = {str(one) for one in pieces}
    if len(places) > 1:
        unsure.append(f"the text is at {len(places)} places, and this is the one of most layers")
    text = max(pieces, key=pieces.count)
    found = slice_length(text)
    if length is not None and found != length:
        more = "some may be registers" if found > length else "the others are not shown"
        unsure.append(f"{name} has {length} tokens, and {found} keys change with it: {more}")
    return text


def _piece(piece: slice | None, length: int) -> slice:
    """Return a slice, from the end of so many tokens if it comes last."""
    assert piece is not None
    if piece.stop == length and piece.start > 0:
        return slice(piece.start - piece.stop, None)
    return piece


def _at_one_place(calls: Sequence[InspectedCall], unsure: list[str]) -> list[InspectedCall]:
    """Return the calls that have the image alone as queries, or where most others have it."""
    places = [_piece(call.image, call.queries) for call in calls if call.queries > call.width]
    if not places:
        return list(calls)
    most = max(places, key=places.count)
    kept = []
    for call in calls:
        if call.queries == call.width or _piece(call.image, call.queries) == most:
            kept.append(call)
    if left_out := [call.name for call in calls if call not in kept]:
        unsure.append(f"the image's queries are at another place in {', '.join(left_out)}")
    return kept


def _grid(call: InspectedCall, arguments: Mapping[str, Any], unsure: list[str]) -> Size | None:
    """Return the grid of a call's cells that the arguments give, or else a square."""
    cells = call.cells
    every = Counter(grids_in(arguments, cells, call.keys, call.text))
    by_rows = Counter({grid: count for grid, count in every.items() if grid[0] == call.rows > 1})
    grids = by_rows or every
    if grids:
        grid, _ = grids.most_common(1)[0]
        if len(grids) > 1:
            others = ", ".join(grid_text(other) for other in grids if other != grid)
            unsure.append(f"the grid of {cells} cells may also be {others}")
        return grid
    side = math.isqrt(cells)
    if side * side == cells and not any(map(has_sides, arguments.values())):
        unsure.append(f"no argument tells the grid of {cells} cells; they make a square")
        return side, side
    pairs = [(rows, cells // rows) for rows in range(2, side + 1) if cells % rows == 0]
    choice = ", ".join(grid_text(pair) for pair in pairs[-3:])
    unsure.append(f"no argument tells the grid of {cells} cells{choice and f': {choice}?'}")
    return None
