"""What leaves for pandas and xarray: libraries that nothing else here needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import MissingPackageError

if TYPE_CHECKING:
    import xarray as xr


def library(name: str) -> Any:
    """A library that a user has or has not.

    Raises:
        ImportError: it is not installed; the message says how to.
    """
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        raise MissingPackageError(
            f"This makes an object of {name}, and {error.name} is not installed. "
            "Install it: pip install 'sdattn[tables]'"
        ) from error


def labelled(
    values: np.ndarray, axes: Mapping[str, Sequence[Any] | None], **attrs: str
) -> xr.DataArray:
    """An array with names on its axes.

    Args:
        values: of any shape; not copied.
        axes: the name of each axis and its coordinates, None for none; ``"row"`` and ``"col"``
            have the centres of the cells, as parts of the image, from the top and the left, with
            (start, stop) for a part of it in the place of coordinates.
        attrs: what else is known of it.

    Raises:
        ImportError: xarray is not installed.
    """
    coords: dict[str, Any] = {dim: list(held) for dim, held in axes.items() if held is not None}
    for dim, size in zip(axes, values.shape, strict=True):
        if dim in ("row", "col"):
            start, stop = axes[dim] or (0, 1)
            centres = start + (stop - start) * ((np.arange(size) + 0.5) / size)
            coords[dim] = dim, centres, {"units": "parts of the image"}
    return library("xarray").DataArray(values, coords, [*axes], "attention", attrs)


def along(arrays: Iterable[xr.DataArray], dim: str, labels: Sequence[Any]) -> xr.DataArray:
    """Arrays of the same axes behind each other along a new last one. Where an axis has other
    coordinates in some of them, it has all of them, with NaN for what is not there."""
    held = list(arrays)
    options = {"coords": "minimal", "compat": "override", "join": "outer"}
    found = library("xarray").concat(held, dim, combine_attrs="override", **options)
    return found.assign_coords({dim: list(labels)}).transpose(*held[0].dims, dim)
