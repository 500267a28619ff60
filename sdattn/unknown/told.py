"""A model of no known family, of which the user tells two facts: where the text stands among the
keys of its attention, and the grid of its image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from ..attention.core import level_grids
from ..errors import InvalidValueError, OptionError, refuse
from ..models.denoiser_call import DenoiserCall, Size, Timestep
from ..models.family import Family
from ..models.layers import AttentionLayer, Kind
from ..models.pipeline import Given, Model
from ..models.values import whole
from .arguments import arguments_by_name, batch_of, grids_of_shapes

Text = slice | Tensor | str
Grid = Sequence[int] | Callable[[Mapping[str, Any]], Sequence[int]]
LEVELS = 6  # of a model that halves its grid


@dataclass(frozen=True)
class Placed:
    """One attention call: its kind, the level of its grid, and where image and text stand.

    Attributes:
        image: the image's queries.
        keys: the keys that are shown: the text's, or in self-attention all.
    """

    kind: Kind
    level: int
    image: slice
    keys: slice


@dataclass(frozen=True, kw_only=True)
class ToldFamily(Family):
    """Family of one model, made of what its user tells.

    Attributes:
        text: where the text is among the keys: a slice of a known length, ``slice(0, 77)`` or
            ``slice(-77, None)``; the tensor of its states, or the name of the argument with them,
            whose tokens are all the keys of a layer.
        image: where the image is among the queries of a layer that has others too; None if text
            and grid tell it.
    """

    text: Text
    image: slice | None = None

    def find_layers(self, model: Model, modules: Mapping[str, nn.Module]) -> list[AttentionLayer]:
        """Return none: they are known once the model ran."""
        return []

    def read_call(self, model: Model, args: tuple[object, ...], kwargs: Given) -> DenoiserCall:
        given = arguments_by_name(model, args, kwargs)
        text: Any = given.get(self.text) if isinstance(self.text, str) else self.text
        batch = batch_of(given, text)
        if isinstance(self.text, str) and not isinstance(text, Tensor):
            found = f" but a {type(text).__name__}" if self.text in given else ""
            raise InvalidValueError(
                f"text={self.text!r}: the call of the {type(model).__name__} has no tensor of this "
                f"name{found}. Its arguments: {', '.join(given)}. A slice of the keys does "
                "without, text=slice(0, 77)."
            )
        is_by_row = isinstance(text, Tensor) and text.ndim > 1 and len(text) == batch
        return DenoiserCall(
            timestep=self.timestep(model, given),
            size=self.size(model, given),
            batch=batch,
            text=text if is_by_row else None,
            n_told=self.length(text),
        )

    def timestep(self, _model: Model, given: Given) -> Timestep:
        names = ("timestep", "timesteps", "t", "sigma")
        return Timestep(next((given[name] for name in names if name in given), 0.0))

    def length(self, text: Any) -> int:
        """Return the number of text tokens: of states ``[(B,) T, width]``, of ids ``[B, T]``."""
        if isinstance(text, slice):
            return slice_length(text)
        return int(text.shape[-2] if text.is_floating_point() else text.shape[-1])

    def place(
        self,
        name: str,
        queries: int,
        keys: int,
        size: Size,
        length: int,
        is_named: bool,
        frames: int = 1,
    ) -> Placed | None:
        """Return what an attention call between so many queries and keys is, in a pass with a grid
        of ``size``, of which each row has one of ``frames``, and ``length`` tokens of text; None
        for one without image or text. In a layer that ``is_named``, further keys may stand beside
        text and image.

        Raises:
            ValueError: it could be several things, or the place of text or image is not told.
        """
        grids = list(enumerate(level_grids(size, LEVELS)))
        levels = {math.prod(grid): level for level, grid in reversed(grids)}
        levels.pop(1, None)  # a single query that pools the text
        image, is_text_among = slice(0, queries), False
        if frames * queries not in levels:  # other queries stand beside the image's
            is_text_among = queries == keys
            found = self._image_among(name, queries, keys, size, length, is_named)
            if found is None:
                return None
            image = found
        cells = image.stop - image.start
        if frames * cells not in levels:
            return None
        level = levels[frames * cells]
        if is_text_among and keys - cells < length:
            return Placed("self", level, image, image)  # of the image and what stands beside it
        if queries == keys == length and not is_named:
            raise InvalidValueError(
                f"{name} has {keys} queries and keys, as many as the text has tokens and the image "
                "cells, so whether it is self- or cross-attention is not known. Call the model "
                "with a text or an image of another size, or name the layers that see the text "
                "(layers=…)."
            )
        if keys == length:
            return Placed("cross", level, image, slice(0, keys))
        if queries == keys and not is_text_among:
            return Placed("self", level, image, slice(0, keys))
        beside = keys - length
        if is_text_among or beside == queries or (is_named and beside > 0):
            kind: Kind = "joint" if beside >= cells else "cross"
            return Placed(kind, level, image, self._text_among(name, keys))
        return None

    def _image_among(
        self, name: str, queries: int, keys: int, size: Size, length: int, is_named: bool
    ) -> slice | None:
        """Return the image's queries among others, as told, or else the only place where they have
        room beside the text; None if they are not there."""
        if self.image is not None:
            first, last, _ = self.image.indices(queries)
            return slice(first, last)
        cells = math.prod(size)
        beside = queries - length - cells
        if queries != keys or beside < 0 or (beside and not is_named):
            return None
        text = self._text_among(name, keys)
        starts = [*range(text.start - cells + 1), *range(text.stop, keys - cells + 1)]
        if len(starts) == 1:
            return slice(starts[0], starts[0] + cells)
        found = "no room" if not starts else f"room at {len(starts)} places"
        raise InvalidValueError(
            f"{name} has {keys} keys. With the text at {self.text} there is {found} for the "
            f"{cells} cells of the image before or after it. Tell its queries too, "
            f"image=slice({text.stop + beside}, {text.stop + beside + cells}) for example; "
            "sdattn.inspect_attention(model, ...) finds them."
        )

    def _text_among(self, name: str, keys: int) -> slice:
        if not isinstance(self.text, slice):
            raise InvalidValueError(
                f"{name} has {keys} keys, of text and image together, and text= does not say which "
                "of them are the text. Pass a slice of the keys, text=slice(0, 77); "
                "sdattn.inspect_attention(model, ...) finds it."
            )
        first, last, _ = self.text.indices(keys)
        return slice(first, last)


def told_family(model: Any, text: Any, grid: Any, image: Any = None) -> ToldFamily:
    """Return the family of a model of which two facts are told, or three; raise TypeError or
    ValueError if they are none."""
    if not isinstance(text, (slice, Tensor, str)):
        raise refuse("text", text, "a slice of the keys, a tensor, or the name of an argument")
    if isinstance(text, slice):
        slice_length(text)
    if image is not None and (not isinstance(image, slice) or image.step not in (None, 1)):
        raise refuse("image", image, "a slice of the queries, slice(8, None)")
    if not callable(grid):
        checked_grid(grid)

    def of_call(_model: Model, given: Mapping[str, Any]) -> Size:
        if callable(grid):
            return checked_grid(grid(given))
        size = checked_grid(grid)
        _refuse_turned(size, given)
        return size

    return ToldFamily(
        name=type(model).__name__,
        grid=of_call,
        video=True,
        text=text,
        image=image,
    )


def _refuse_turned(size: Size, given: Mapping[str, Any]) -> None:
    """Raise ValueError for a grid whose rows are an argument's columns."""
    *frames, rows, cols = size
    turned = (*frames, cols, rows)
    for name, value in given.items():
        grids = set(grids_of_shapes(value, math.prod(size)))
        if turned in grids and size not in grids:
            shape = list((value if isinstance(value, Tensor) else value[0]).shape)
            raise OptionError(
                "grid",
                size,
                f"{name} {shape} makes {turned}: rows come first. If the model's queries run down "
                f"the columns, pass grid=lambda call: {size} and read the maps as (cols, rows).",
            )


def checked_grid(grid: Any) -> Size:
    """Return a grid that was told, or that a function of a call returned; raise TypeError or
    ValueError for anything else."""
    given = grid.tolist() if isinstance(grid, Tensor) else grid
    sides = [whole(side) for side in given] if isinstance(given, (tuple, list)) else []
    if len(sides) not in (2, 3) or not all(side and side > 0 for side in sides):
        raise refuse("grid", grid, "(rows, cols), (frames, rows, cols) or a function of a call")
    return tuple(side for side in sides if side)


def slice_length(text: slice) -> int:
    """Return the number of keys in a slice; raise ValueError if it is not the same for any number
    of keys."""
    start = text.start or 0
    stop = text.stop
    if text.step in (None, 1):
        if start < 0 and stop is None:
            return -start
        if isinstance(stop, int) and stop > start and (start < 0) == (stop < 0):
            return stop - start
    raise OptionError(
        "text", text, "a slice of keys has a length of its own: slice(0, 77), slice(-77, None)."
    )
