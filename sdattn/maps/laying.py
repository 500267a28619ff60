"""Placing maps of a crop in the whole image: bilinear between cells, 0 outside the crop's box."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import grid_sample

from ..models.crops import Crop

_MOST = 2048  # cells of the longer side of a whole image


def cut(maps: Tensor, crop: Crop | None) -> Tensor:
    """Keep the part of maps ``[..., rows, cols]`` that the crop's box shows: usually all."""
    if crop is None or crop.kept == (1.0, 1.0):
        return maps
    along = []
    for many, part in zip(maps.shape[-2:], crop.kept, strict=True):
        cells = math.ceil(many * part - 1e-6)
        along.append((torch.arange(cells) + 0.5) / cells * part + (1 - part) / 2)
    return _sampled(maps, along[0], along[1], "bilinear")


def grid_of(shape: tuple[int, int], crop: Crop) -> tuple[int, int]:
    """Return (rows, cols) of a whole image in cells no larger than its crop's."""
    left, top, right, bottom = crop.parts
    rows, cols = math.ceil(shape[0] / (bottom - top)), math.ceil(shape[1] / (right - left))
    scale = min(1.0, _MOST / max(rows, cols))
    return max(1, round(rows * scale)), max(1, round(cols * scale))


def inside(
    values: Tensor,
    crop: Crop,
    size: tuple[int, int],
    mode: Literal["bilinear", "nearest"] = "bilinear",
) -> Tensor:
    """Sample a crop's maps ``[..., rows, cols]`` at the pixels in the box of an image of ``size`` =
    (height, width): ``[..., pixels down, pixels across]``, at least one either way."""
    down, across = _pixels(crop, size)
    return _sampled(values, down[1], across[1], mode)


def laid(part: Tensor, crop: Crop, size: tuple[int, int]) -> Tensor:
    """Place :func:`inside`, or its mask, in the image: ``[..., height, width]``, 0 outside."""
    (down, _), (across, _) = _pixels(crop, size)
    whole = part.new_zeros(*part.shape[:-2], *size)
    whole[..., down, across] = part
    return whole


def fits(size: tuple[int, int], grid: tuple[int, ...], crop: Crop | None) -> bool:
    """Check whether a map of (rows, cols) can belong to an image of (height, width) pixels."""
    height, width = size
    if crop is not None:  # of an image that may have been reduced since, rounded
        whole_width, whole_height = crop.image
        return abs(width * whole_height - height * whole_width) <= max(crop.image)
    rows, cols = grid
    return abs(rows - cols * height / width) < 1 or abs(cols - rows * width / height) < 1


def _pixels(crop: Crop, size: tuple[int, int]) -> list[tuple[slice, Tensor]]:
    """Return, for rows and columns, the pixels in the box and their places as shares of a side."""
    left, top, right, bottom = crop.parts
    found = []
    for many, start, stop in ((size[0], top, bottom), (size[1], left, right)):
        first, last = math.ceil(start * many - 0.5), math.ceil(stop * many - 0.5)
        if last <= first:  # a box between the middles of two pixels
            first = min(many - 1, int((start + stop) / 2 * many))
            last = first + 1
        middles = (torch.arange(first, last, dtype=torch.float64) + 0.5) / many
        found.append((slice(first, last), (middles - start) / (stop - start)))
    return found


def _sampled(values: Tensor, rows: Tensor, cols: Tensor, mode: str) -> Tensor:
    """Sample maps ``[..., R, C]`` at places given as shares of their sides."""
    down, across = torch.meshgrid(rows, cols, indexing="ij")
    grid = (2 * torch.stack([across, down], -1) - 1)[None].to(values)
    batched = values.reshape(1, -1, *values.shape[-2:])
    found = grid_sample(batched, grid, mode, padding_mode="border", align_corners=False)
    return found.reshape(*values.shape[:-2], *found.shape[-2:])
