"""A model of no known family, of which the user tells two facts: where the text stands among the
keys of its attention, and the grid of its image."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..attention.core import level_grids
from ..errors import InvalidValueError, OptionError, refuse
from ..models.denoiser_call import DenoiserCall, Size, Timestep, arguments
from ..models.family import Family
from ..models.layers import AttentionLayer, Kind
from ..models.pipeline import Given, Model
from ..models.values import whole

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
    """

    text: Text

    def find_layers(self, model: Model) -> list[AttentionLayer]:
        """Return none: they are known once the model ran."""
        return []

    def read_call(self, model: Model, args: tuple[object, ...], kwargs: Given) -> DenoiserCall:
        given = arguments_by_name(model, args, kwargs)
        tensors = [value for value in given.values() if isinstance(value, Tensor) and value.ndim]
        text: Any = given.get(self.text) if isinstance(self.text, str) else self.text
        states = [one for one in tensors if one.ndim > 2 and one is not text]
        batch = len((states or tensors)[0]) if tensors else 1
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
        self, name: str, queries: int, keys: int, size: Size, length: int, is_named: bool
    ) -> Placed | None:
        """Return what an attention call between so many queries and keys is, in a pass with a grid
        of ``size`` and ``length`` tokens of text; None for one without image or text. In a layer
        that ``is_named``, further keys may stand beside text and image.

        Raises:
            ValueError: it could be several things, or the place of the text is not told.
        """
        grids = list(enumerate(level_grids(size, LEVELS)))
        levels = {math.prod(grid): level for level, grid in reversed(grids)}
        levels.pop(1, None)  # a single query that pools the text
        cells = math.prod(size)
        every = slice(0, queries)
        if queries == keys == length and queries in levels and not is_named:
            raise InvalidValueError(
                f"{name} has {keys} queries and keys, as many as the text has tokens and the image "
                "cells, so whether it is self- or cross-attention is not known. Call the model "
                "with a text or an image of another size, or name the layers that see the text "
                "(layers=…)."
            )
        if queries in levels and keys == length:
            return Placed("cross", levels[queries], every, slice(0, keys))
        if queries == keys and queries in levels:
            return Placed("self", levels[queries], every, slice(0, keys))
        if queries == keys and (keys == length + cells or (is_named and keys > length + cells)):
            return self._joint(name, keys, cells)
        beside = keys - length
        if queries in levels and (beside == queries or (is_named and beside > 0)):
            kind: Kind = "joint" if beside >= queries else "cross"
            return Placed(kind, levels[queries], every, self._text_among(name, keys))
        return None

    def _joint(self, name: str, keys: int, cells: int) -> Placed:
        """Return the place of joint attention, in which the image follows the text or comes before
        it."""
        text = self._text_among(name, keys)
        start = text.stop if text.start < cells else 0
        if start + cells > keys:
            raise InvalidValueError(
                f"{name} has {keys} keys. With the text at {self.text} there is no room for the "
                f"{cells} cells of the image before or behind it."
            )
        return Placed("joint", 0, slice(start, start + cells), text)

    def _text_among(self, name: str, keys: int) -> slice:
        if not isinstance(self.text, slice):
            raise InvalidValueError(
                f"{name} has {keys} keys, of text and image together, and text= does not say which "
                "of them are the text. Pass a slice of the keys, text=slice(0, 77); "
                "sdattn.inspect_attention(model, ...) finds it."
            )
        first, last, _ = self.text.indices(keys)
        return slice(first, last)


def told_family(model: Any, text: Any, grid: Any) -> ToldFamily:
    """Return the family of a model of which two facts are told; raise TypeError or ValueError if
    they are none."""
    if not isinstance(text, (slice, Tensor, str)):
        raise refuse("text", text, "a slice of the keys, a tensor, or the name of an argument")
    if isinstance(text, slice):
        slice_length(text)
    if not callable(grid):
        checked_grid(grid)
    return ToldFamily(
        name=type(model).__name__,
        grid=lambda _model, given: checked_grid(grid(given) if callable(grid) else grid),
        video=True,
        text=text,
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


def arguments_by_name(model: Model, args: tuple[object, ...], kwargs: Given) -> dict[str, Any]:
    """Return a call's arguments by name, also each of ``*args`` and ``**kwargs``."""
    named: dict[str, Any] = {}
    for name, value in arguments(model, args, kwargs).items():
        if isinstance(value, dict):
            named.update(value)
        elif isinstance(value, tuple) and all(isinstance(one, Tensor) for one in value):
            named.update((f"{name}[{number}]", one) for number, one in enumerate(value))
        else:
            named[name] = value
    return {**named, **{name: value for name, value in kwargs.items() if name not in named}}
