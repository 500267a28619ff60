"""Maps of layers -> one map per token: the formula whose settings a preset holds.

Refining: cells that attend to each other belong together, so each cell gets the mean of a word's
map over the cells it attends to. UNet maps are spread here, along the mean self-attention; maps of
joint attention are spread while the model runs, see :mod:`sdattn.look.refined`.

Sources: Wang et al. 2023, "Diffusion Model is Secretly a Training-free Open Vocabulary Semantic
Segmenter" (DiffSegmenter), equation 5; RishiDarkDevil/daam-i2i.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ..attention.modes import no_autocast
from ..errors import InvalidTypeError
from ..follow.passes import CaptureError
from ..models.denoiser import find_denoiser
from ..models.denoiser_call import Size
from ..models.layers import TEXT_KINDS, AttentionLayer
from ..prompts.tokenizing import EOS, SOS
from ..prompts.tokens import Prompt
from .heatmaps import Heatmaps
from .layermaps import LayerMap, LayerMaps, resize_maps
from .masks import smooth
from .presets import Preset, nothing_read

MOST_CELLS = 32 * 32  # largest self-attention used for refining: 4.2 MB per layer in float32
PLACE = "up"


def aggregate(maps: LayerMaps, preset: Preset) -> Tensor:
    """Resize the layers that a preset reads to the finest grid among them and add them up: ``sum_l
    w_l R(A_l) / W``, with resizing ``R`` and the weights of :func:`_weights`. Return float32
    ``[images, (frames,) rows, cols, tokens]``: probabilities, or sums of them."""
    # Layers of one resolution are added up before resizing, so there is one resize per
    # resolution. DAAM resizes each head: bicubic with a cut at 0 is not linear.
    layers = list(read_by(maps, preset).values())
    finest = max((layer.size for layer in layers), key=lambda size: size[0] * size[1])
    weights, divisor = _weights(layers, preset)
    by_size: dict[tuple[int, int], Tensor] = {}
    for layer, weight in zip(layers, weights, strict=True):
        own = layer.maps.float()  # one layer at a time: a file holds them in float16
        if preset.each_head:
            part = _resized(own, finest, preset.resize).mean(1) * weight
        else:  # one resize per resolution: bilinear is linear
            part = own * weight
        size = finest if preset.each_head else layer.size
        by_size[size] = by_size[size] + part if size in by_size else part
    total = sum(_resized(part, finest, preset.resize) for part in by_size.values())
    values = torch.as_tensor(total) / divisor
    if maps.affinity is not None and preset.refine:  # maps of joint attention are spread already
        values = spread(values, maps)
    return values * maps.passes if preset.steps == "sum" else values


def read_by(maps: LayerMaps, preset: Preset) -> dict[str, LayerMap]:
    """Return the layers that a preset reads, in running order; raise CaptureError if there are
    none."""
    every = maps.layers
    chosen = {}
    for name, layer in every.items():
        if preset.reads(layer.place, layer.level):
            chosen[name] = layer
    if preset.or_all:
        chosen = chosen or dict(every)
    # Of a part of the depth these are the blocks: no other was spread along.
    if preset.depth is not None and not isinstance(preset.depth, tuple) and chosen:
        names = [*chosen]  # blocks in the order in which they run
        chosen = {name: chosen[name] for name in [names[int(preset.depth * len(names))]]}
    if not chosen:
        raise CaptureError(
            nothing_read(preset, [(layer.place, layer.level) for layer in every.values()])
        )
    # Among these places, the grids nearest to a size, or fine enough.
    sides = {min(layer.size) for layer in chosen.values()}
    if preset.cells is not None:
        cells = preset.cells
        nearest = min(sides, key=lambda side: (max(side / cells, cells / side), -side))
        return {name: layer for name, layer in chosen.items() if min(layer.size) == nearest}
    least = min(preset.least_cells, max(sides))
    return {name: layer for name, layer in chosen.items() if min(layer.size) >= least}


def _weights(layers: Sequence[LayerMap], preset: Preset) -> tuple[list[int], int]:
    """Return the weight of each layer (its maps are means over its heads), and the divisor."""
    heads = [1 if preset.heads == "mean" else layer.heads for layer in layers]
    if preset.heads == "pool":
        return heads, sum(heads)
    return heads, len(layers) if preset.layers == "mean" else 1


def _resized(maps: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    resized = resize_maps(maps.movedim(-1, -3), size, mode).movedim(-3, -1)
    return resized.clamp(min=0) if mode == "bicubic" else resized


def contrast(maps: Tensor, columns: Sequence[int], factor: float) -> Tensor:
    """Return the softmax of ``factor`` times maps ``[rows, cols, tokens]`` over some columns."""
    return (factor * maps[..., list(columns)]).softmax(-1)


def rescaled(maps: Tensor, prompt: Prompt) -> Tensor:
    """Divide maps ``[(frames,) rows, cols, T]``, cell by cell, by the start token's map, or the end
    token's if the text has no start; raise CaptureError if it has neither."""
    for kind in (SOS, EOS):
        for column, token in enumerate(prompt.tokens):
            if token.special == kind:
                return maps / maps[..., [column]].clamp(min=torch.finfo(maps.dtype).tiny)
    raise CaptureError(
        "The preset divides maps by the map of the start or end token, and the prompt "
        f"{prompt.text!r} was read without either. Choose another preset."
    )


def sharpened(maps: Tensor, power: float) -> Tensor:
    """Return each map ``[(frames,) rows, cols, T]`` as ``b ((m - a) / (b - a))^power``, with its
    lowest value ``a`` and highest ``b`` over all frames; 0 for a flat map."""
    cells = maps.flatten(0, -2)
    low = cells.amin(0)
    high = cells.amax(0)
    apart = (high - low).clamp(min=torch.finfo(maps.dtype).tiny)
    return high * ((maps - low) / apart) ** power


def refines_itself(target: Any) -> bool:
    """Check whether ``capture(refine="self")`` can spread the model's maps, as with joint
    attention."""
    return find_denoiser(target).family.joined is not None


def refining(target: Any) -> Callable[[AttentionLayer, Size | None], bool]:
    """Return the layers for refined maps: all that see the text, and the self-attention of the way
    up on the finest grid of at most ``MOST_CELLS`` cells (or the coarsest, if all have more), 12.6
    MB per image (or frame) for SD 1.x at 512x512. Raise TypeError if the model has none."""
    denoiser = find_denoiser(target)
    found = [la for la in denoiser.layers if la.kind == "self" and la.place == PLACE]
    if not found:
        raise InvalidTypeError(
            "`refine='self'` spreads the maps along the self-attention of a UNet's way up or of "
            f"joint attention, and a {type(denoiser.model).__name__} has neither."
        )

    def is_read(layer: AttentionLayer, latent_size: Size | None) -> bool:
        if layer.kind in TEXT_KINDS or latent_size is None:
            return layer.kind in TEXT_KINDS or layer in found
        # The finest grid that is small enough; if all are too large, the coarsest.
        few = [la.level for la in found if math.prod(la.grid(latent_size)[-2:]) <= MOST_CELLS]
        level = min(few) if few else max(la.level for la in found)
        return layer in found and layer.level == level

    return is_read


def spread(maps: Tensor, layers: LayerMaps) -> Tensor:
    """Return ``affinity @ maps``, computed on the affinity's grid and resized back to the shape
    ``[images, (frames,) rows, cols, tokens]``; sums over tokens are unchanged."""
    assert layers.affinity is not None and layers.affinity_grid is not None
    affinity = layers.affinity.float()
    grid = layers.affinity_grid
    if affinity.ndim == 4:  # each frame along its own
        singly = replace(layers, affinity=affinity.flatten(0, 1))
        return spread(maps.flatten(0, 1), singly).unflatten(0, maps.shape[:2])
    size = maps.shape[-3], maps.shape[-2]
    values = maps.movedim(-1, 1).flatten(1, -3)  # [images, tokens*frames, rows, cols]
    # pooling counts every cell, even if the grid is much coarser
    coarse = adaptive_avg_pool2d(values, (grid[-2], grid[-1]))
    # [images, tokens, N]
    with no_autocast():
        refined = coarse.reshape(len(maps), maps.shape[-1], -1) @ affinity.mT
    back = resize_maps(refined.unflatten(2, grid), size)
    return back.movedim(1, -1)


def finish(
    maps: Tensor,
    prompt: Prompt,
    preset: Preset,
    columns: Sequence[int] | None = None,
    frames: Sequence[int] | None = None,
) -> Heatmaps:
    """Return the heatmaps of one image from its aggregated maps ``[(frames,) rows, cols,
    columns]``; ``columns`` and ``frames`` are the ones that there are, None for all."""
    if preset.contrast:
        columns = [i for i, token in enumerate(prompt.tokens) if not token.special]
        maps = contrast(maps, columns, preset.contrast)
    if preset.rescale:
        maps = rescaled(maps, prompt)
    if preset.sharpen != 1:
        maps = sharpened(maps, preset.sharpen)
    if preset.sigma:
        maps = smooth(maps.movedim(-1, 0), preset.sigma, radius=1).movedim(0, -1)
    return Heatmaps(prompt, maps, columns, preset=preset, frames=frames)
