"""Export to pandas and xarray, which nothing else here needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import optional

if TYPE_CHECKING:
    import xarray as xr


def library(name: str) -> Any:
    return optional(name, "An object of it", "sdattn[tables]")


def labelled(
    values: np.ndarray, axes: Mapping[str, Sequence[Any] | None], **attrs: str
) -> xr.DataArray:
    """Return an xarray of values, not copied, with coordinates by axis; ``"row"`` and ``"col"`` get
    the centres of cells as fractions of the image, from top and left, or of (start, stop)."""
    coords: dict[str, Any] = {dim: list(held) for dim, held in axes.items() if held is not None}
    for dim, size in zip(axes, values.shape, strict=True):
        if dim in ("row", "col"):
            start, stop = axes[dim] or (0, 1)
            centres = start + (stop - start) * ((np.arange(size) + 0.5) / size)
            coords[dim] = dim, centres, {"units": "parts of the image"}
    return library("xarray").DataArray(values, coords, [*axes], "attention", attrs)


def along(arrays: Iterable[xr.DataArray], dim: str, labels: Sequence[Any]) -> xr.DataArray:
    """Concatenate arrays along a new last axis, on all coordinates, with NaN if missing."""
    held = list(arrays)
    options = {"coords": "minimal", "compat": "override", "join": "outer"}
    found = library("xarray").concat(held, dim, combine_attrs="override", **options)
    return found.assign_coords({dim: list(labels)}).transpose(*held[0].dims, dim)
