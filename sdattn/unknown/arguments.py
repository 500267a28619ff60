"""The image among the arguments of a call: which they are, its batch, and its grid."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from ..models.denoiser_call import Size, arguments
from ..models.pipeline import Given, Model

PATCHES = (1, 2, 4, 8, 16)
_PLACES = re.compile("ids|rotary|rope|freqs|pos|coord")  # of tokens, image's and text's alike


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


def images_in(given: Mapping[str, Any], text: object) -> list[Any]:
    """Return the arguments that may hold the image, other than the text: states of three axes or
    more, and lists with a tensor for each image; without any, ids of two axes or more. Those that
    are named as places of tokens count if there are no others."""
    others = {n: v for n, v in given.items() if v is not text and "mask" not in n}
    for is_kind in (_is_image, _is_image_of_ids):
        found = {name: value for name, value in others.items() if is_kind(value)}
        plain = [value for name, value in found.items() if not _PLACES.search(name)]
        if found:
            return plain or list(found.values())
    return []


def is_states(value: object) -> bool:
    """Check for floats of three axes or more."""
    return isinstance(value, Tensor) and value.ndim > 2 and value.is_floating_point()


def _is_image(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return bool(value) and all(is_states(one) for one in value)
    return is_states(value)


def _is_image_of_ids(value: object) -> bool:
    if not isinstance(value, Tensor) or value.is_floating_point() or value.is_complex():
        return False
    return value.ndim > 1 and value.shape[-1] > 1


def batch_of(given: Mapping[str, Any], text: object) -> int:
    """Return the number of images in a call, 1 if no argument tells it."""
    tensors = [value for value in given.values() if isinstance(value, Tensor) and value.ndim]
    holding = images_in(given, text) or tensors
    return len(holding[0]) if holding else 1


def grids_in(
    given: Mapping[str, Any], cells: int, keys: int = 0, text: slice | None = None
) -> Iterator[Size]:
    """Yield the grids of so many cells that shapes, ids or sizes among the arguments give. Ids may
    be of all ``keys``, among them the ``text``."""
    numbers = {}
    for name, value in given.items():
        if isinstance(value, Tensor):
            yield from _grids_of_ids(value, cells, keys, text)
        elif isinstance(value, int) and not isinstance(value, bool):
            numbers[name] = int(value)
        yield from dict.fromkeys(grids_of_shapes(value, cells))
    sides = [numbers.get(name) for name in ("num_frames", "height", "width")]
    if all(sides[1:]):
        yield from _patched(cells, [side for side in sides if side])
    lists = [value for value in given.values() if isinstance(value, (list, tuple))]
    for sizes in _leaves(lists):
        if math.prod(sizes) == cells:
            yield tuple(sizes[1:] if len(sizes) == 3 and sizes[0] == 1 else sizes)


def _grids_of_ids(ids: Tensor, cells: int, keys: int, text: slice | None) -> Iterator[Size]:
    """Yield the grid of positions ``[(B,) N, axes]``, of the image alone or of its text too."""
    if ids.is_complex() or ids.ndim not in (2, 3) or ids.shape[-1] not in (2, 3, 4):
        return
    places = ids.reshape(-1, *ids.shape[-2:])[0].float().cpu()
    if len(places) == keys and text is not None:
        places = torch.cat([places[: text.start], places[text.stop :]])
    sides = [len(column.unique()) for column in places.unbind(-1)]
    if len(sides) == 4 and sides[-1] == 1:  # FLUX.2's (image, row, col, token of the text)
        sides.pop()
    if len(places) == math.prod(sides) == cells:
        yield tuple(side for side in sides[:-2] if side > 1) + tuple(sides[-2:])


def has_sides(value: object) -> bool:
    """Check for an argument with rows and columns."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        value = value[0][None]
    return isinstance(value, Tensor) and value.ndim in (4, 5)


def grids_of_shapes(value: object, cells: int) -> Iterator[Size]:
    """Yield the grids of so many cells that patches make of an argument: latents ``[B, C, (frames,)
    rows, cols]``, with the channels at another place, or a list of ``[C, (frames,) rows, cols]``;
    ids ``[B, rows, cols]``."""
    if isinstance(value, (list, tuple)) and value and isinstance(value[0], Tensor):
        value = value[0][None]
    if not isinstance(value, Tensor):
        return
    _, *sides = value.shape or (1,)
    if len(sides) == 2 and not value.is_floating_point():
        yield from _patched(cells, sides)
    elif len(sides) in (3, 4):
        channels = (0, 2) if len(sides) == 3 else (0, 1, 3)
        for axis in channels:
            yield from _patched(cells, sides[:axis] + sides[axis + 1 :])


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
