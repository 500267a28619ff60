"""Maps of a text's layers from its sums: means, a step or a head alone, and the self-attention."""

import torch
from torch import Tensor

from sdattn.errors import CaptureError, InvalidValueError
from sdattn.maps.layermaps import LayerMap, LayerMaps, resize_maps

from .layouts import Grid
from .runs import Conditioning, Key, Sums


def sums_of(text: Conditioning, step: int | None) -> Sums:
    """Return the sums of a step that was kept alone, or of all steps for None."""
    if step is None:
        return sum(text.by_step.values(), start=text.sums)
    if step not in text.by_step:
        kept = sorted(text.by_step) or "none: choose 'every step' in Watch attention"
        raise CaptureError(f"The maps of step {step} were not kept alone. Kept: {kept}.")
    return text.by_step[step]


def by_head(sums: Sums) -> dict[Key, Tensor]:
    """Return the means of each head, ``[images, heads, cells, keys]``; raise CaptureError if none
    were kept."""
    kept = sums.by_head()
    if not kept:
        raise CaptureError(
            "The maps of single heads were not kept. Choose 'every head' in Watch attention, with "
            "enough megabytes, and sample again. Where some steps did not fit, ask for a step that "
            "was kept."
        )
    return kept


def _of_head(sums: Sums, head: int) -> dict[Key, Tensor]:
    """Return one head's maps, of the layers that have so many."""
    kept = by_head(sums)
    most = max(maps.shape[1] for maps in kept.values())
    if head >= most:
        raise InvalidValueError(
            f"Head {head} was asked for; the layers have {most} heads, counted from 0."
        )
    return {key: maps[:, head] for key, maps in kept.items() if head < maps.shape[1]}


def layer_maps(sums: Sums, head: int | None, affinity: Sums | None) -> LayerMaps:
    """Return the maps of one head, or of the mean over heads for None, with the self-attention to
    spread them along."""
    layers = {}
    means = sums.means() if head is None else _of_head(sums, head)
    for (place, grid), maps in means.items():
        # one for all layers of a place and grid, with their number as its weight
        name = f"{place} {grid[0]}x{grid[1]}"
        calls = sums.calls[place, grid]
        layers[name] = LayerMap(place, 0, calls, maps.unflatten(1, grid))
    columns = tuple(range(next(iter(layers.values())).maps.shape[-1]))
    if affinity is None:
        return LayerMaps(layers, columns, 1)
    return LayerMaps(layers, columns, 1, *self_attention(affinity))


def self_attention(affinity: Sums) -> tuple[Tensor, Grid]:
    """Return what the cells of the finest grid kept attend to among themselves, ``[images, N, N]``
    with rows that sum to 1, and the grid; raise CaptureError if none was kept."""
    if not affinity.totals:
        raise CaptureError(
            "The image's self-attention was not kept. Turn 'spread' on in Watch attention and "
            "sample again; grids of more than 1024 cells have none."
        )
    means = affinity.means()
    _, finest = max(means, key=lambda key: key[1][0] * key[1][1])
    mean = torch.stack([maps for (_, grid), maps in means.items() if grid == finest]).mean(0)
    # of the attention to the image alone, in joint attention
    return mean / mean.sum(-1, keepdim=True), finest


def area_of(text: Conditioning) -> tuple[int, ...]:
    """Return the part of the latent that is drawn from a text, (rows, cols, top, left)."""
    if text.area is None:
        return *text.latent, 0, 0
    half = len(text.area) // 2  # of a video's latent, whose frames come first
    rows, cols = text.area[half - 2 : half]
    top, left = text.area[-2:]
    return min(rows, text.latent[0] - top), min(cols, text.latent[1] - left), top, left


def in_latent(maps: Tensor, text: Conditioning) -> Tensor:
    """Return maps ``[rows, cols, T]`` of a part of the latent as maps of all of it, 0 outside."""
    if text.area is None:
        return maps
    rows, cols, top, left = area_of(text)
    whole = maps.new_zeros(*text.latent, maps.shape[-1])
    resized = resize_maps(maps.movedim(-1, 0), (rows, cols)).movedim(0, -1)
    whole[top : top + rows, left : left + cols] = resized
    return whole
