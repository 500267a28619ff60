"""`Queries`: who attends in the maps of a capture, and to what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from operator import lt
from typing import Any, Literal

from ..attention.core import grid_text
from ..errors import OptionError, refuse
from ..follow.run_part import items_of
from ..models.denoiser_call import Size
from ..models.layers import TEXT_KINDS, AttentionLayer
from ..models.values import whole

Side = Literal["image", "text"]
# (row, col) of the latent, (frame, row, col) for a video; below 1, fractions of the image's sides
Cells = tuple[tuple[int | float, ...], ...]


@dataclass(frozen=True)
class Queries:
    """Queries and keys of a capture.

    Attributes:
        side, keys: who attends, and to what.
        cells: the image's queries that are kept, which attend to the image; None for all.
    """

    side: Side = "image"
    keys: Side = "text"
    cells: Cells | None = None

    @classmethod
    def of(cls, queries: Any, keys: Any) -> Queries:
        """Read the options of :func:`sdattn.capture`; raise ValueError for invalid ones."""
        if keys not in (None, "image", "text"):
            raise refuse("keys", keys, ("image", "text"))
        if isinstance(queries, str) and queries == "text":
            return cls("text", keys or "image")
        if not isinstance(queries, str):
            return cls("image", "image", _cells(queries, keys))
        if queries != "image":
            raise refuse("queries", queries, ("image", "text"))
        if keys == "image":
            text = "a map for every cell would be too much. Choose cells, queries=[(row, col)]."
            raise OptionError("keys", keys, text)
        return IMAGE_TO_TEXT

    @property
    def usual(self) -> bool:
        """True for the image's attention to the text, and a UNet's self-attention as it is."""
        return self == IMAGE_TO_TEXT

    @property
    def turned(self) -> bool:
        """True if the maps show the keys, with a column for each query."""
        return self.keys == "image"

    @property
    def in_text(self) -> bool:
        """True for the text's attention to itself, ``[T, T]``, which has no place in the image."""
        return self.side == self.keys == "text"

    @property
    def kinds(self) -> tuple[str, ...]:
        """Kinds of attention that have such queries and keys."""
        if self.side == "text":
            return ("joint",)
        return TEXT_KINDS if self.cells is None else ("self", "joint")

    def check(self, **options: object) -> None:
        """Refuse options of the image's attention to the text; a value that counts is true."""
        clash = [name for name, value in options.items() if value]
        if clash and not self.usual:
            text = f"`{clash[0]}` changes the image's attention to the text. Leave one of them out."
            raise OptionError("queries", self.side if self.cells is None else [*self.cells], text)

    def numbers(
        self, layer: AttentionLayer, size: Size | None, frame_rows: int
    ) -> Sequence[int] | None:
        """Return the queries of a layer's call, None for all: the cells that hold the latent's.

        If each frame of a video attends only to itself, in ``frame_rows`` rows, they are the same
        in every frame.
        """
        if self.cells is None:
            return None
        size = size[1:] if size is not None and frame_rows > 1 else size
        numbers = []
        for cell in self.cells:
            if size is None or len(cell) != len(size) or not all(map(lt, cell, size)):
                there = "unknown: pass `latent_size`" if size is None else grid_text(size)
                text = f"{cell} is no cell, from 0, of the latent. Its size is {there}."
                raise OptionError("queries", [*self.cells], text)
            number = 0
            for at, most, here in zip(cell, size, layer.grid(size), strict=True):
                # the cell that holds this place, or the middle of the latent's cell
                is_part = isinstance(at, float)
                own = int(at * here) if is_part else int((2 * at + 1) * here) // (2 * most)
                number = number * here + own
            numbers.append(number)
        return numbers


IMAGE_TO_TEXT = Queries()


def _cells(given: Any, keys: Side | None) -> Cells:
    numbers = [tuple(map(_plain, items_of(cell))) for cell in items_of(given)]
    for cell in numbers:
        if any(isinstance(at, float) and at >= 1 for at in cell):
            text = (
                "a float is a fraction of the image's side, below 1. Pass cells as whole numbers."
            )
            raise OptionError("queries", given, text)
    is_read = {*map(len, numbers)} in ({2}, {3})
    cells = []
    for cell in numbers:
        places = [place for at in cell if (place := _place(at)) is not None]
        is_read = is_read and len(places) == len(cell)
        cells.append(tuple(places))
    if not is_read or len({*cells}) < len(cells):
        known = '"image", "text", or a list of different cells, [(row, col)], numbered from 0 in '
        known += "the latent, or fractions of the image's sides below 1"
        raise refuse("queries", given, known)
    if keys == "text":
        text = "to the text every cell's attention is kept by default. Leave out queries and keys."
        raise OptionError("keys", keys, text)
    return tuple(cells)


def _plain(at: Any) -> Any:
    """Return a number of numpy or torch as Python's own."""
    return at.item() if getattr(at, "ndim", None) == 0 else at


def _place(at: Any) -> int | float | None:
    """Return a whole number from 0, or a fraction below 1; None for anything else."""
    if isinstance(at, float):
        return at if 0 <= at < 1 else None
    number = whole(at)
    return number if number is not None and number >= 0 else None
