"""Maps of layers -> one map a token: the formula that a preset is an entry of.

Cells that attend to each other belong together, so a sharper map gives each cell the mean, over the
cells it attends to, of a word's map. A UNet's maps are spread so here, along the mean of its
self-attention; those of joint attention while the model runs, see :mod:`sdattn.hooks.refined`.

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

from ..errors import InvalidTypeError
from ..hooks.passes import CaptureError
from ..models.layers import TEXT_KINDS, AttentionLayer, find_denoiser
from ..prompts.tokenizing import EOS, SOS
from ..prompts.tokens import Prompt
from .layermaps import LayerMap, LayerMaps, resize_maps
from .presets import Preset, nothing_read

MOST_CELLS = 32 * 32  # of the self-attention that maps are spread along: 4.2 MB a layer in float32
PLACE = "up"


def aggregate(maps: LayerMaps, preset: Preset) -> Tensor:
    """Bring the layers that a preset reads to the finest grid among them and add them up:
    ``sum_l w_l R(A_l) / W`` with resizing ``R`` and the weights of :func:`_weights`.

    Returns:
        float32 ``[images, (frames,) rows, cols, tokens]``, >= 0. In the default preset
        probabilities; where a preset sums over heads, layers or steps, their sums.

    Raises:
        CaptureError: none of the layers is one that the preset reads.
    """
    # Layers of one resolution are added up before they are resized, so that there are as many
    # resizes as resolutions. DAAM resizes each head: bicubic with a cut at 0 is not linear.
    layers = list(read_by(maps, preset).values())
    finest = max((layer.size for layer in layers), key=lambda size: size[0] * size[1])
    weights, divisor = _weights(layers, preset)
    by_size: dict[tuple[int, int], Tensor] = {}
    for layer, weight in zip(layers, weights, strict=True):
        own = layer.maps.float()  # one layer at a time, where they are as a file holds them
        if preset.each_head:
            part = _resized(own, finest, preset.resize).mean(1) * weight
        else:  # one resize a resolution: bilinear is linear
            part = own * weight
        size = finest if preset.each_head else layer.size
        by_size[size] = by_size[size] + part if size in by_size else part
    total = sum(_resized(part, finest, preset.resize) for part in by_size.values())
    values = torch.as_tensor(total) / divisor
    if maps.affinity is not None and preset.refine:  # those of joint attention are spread already
        values = spread(values, maps)
    return values * maps.passes if preset.steps == "sum" else values


def read_by(maps: LayerMaps, preset: Preset) -> dict[str, LayerMap]:
    """The layers that a preset reads, by name, in the order in which they run.

    Raises:
        CaptureError: there are none.
    """
    every = maps.layers
    chosen = {
        name: layer for name, layer in every.items() if preset.reads(layer.place, layer.level)
    }
    if preset.or_all:
        chosen = chosen or dict(every)
    if preset.depth is not None and chosen:  # blocks in the order in which they run
        names = [*chosen]
        chosen = {name: chosen[name] for name in [names[int(preset.depth * len(names))]]}
    if not chosen:
        raise CaptureError(
            nothing_read(preset, [(layer.place, layer.level) for layer in every.values()])
        )
    # Of these places, the grids that are near enough to a size, or fine enough.
    sides = {min(layer.size) for layer in chosen.values()}
    if preset.cells is not None:
        cells = preset.cells
        nearest = min(sides, key=lambda side: (max(side / cells, cells / side), -side))
        return {name: layer for name, layer in chosen.items() if min(layer.size) == nearest}
    least = min(preset.least_cells, max(sides))
    return {name: layer for name, layer in chosen.items() if min(layer.size) >= least}


def _weights(layers: Sequence[LayerMap], preset: Preset) -> tuple[list[int], int]:
    """Of each layer, whose maps are means over its heads, and what their sum is divided by."""
    heads = [1 if preset.heads == "mean" else layer.heads for layer in layers]
    if preset.heads == "pool":
        return heads, sum(heads)
    return heads, len(layers) if preset.layers == "mean" else 1


def _resized(maps: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    """``[..., rows, cols, tokens]`` at another size; bicubic overshoots, so it is cut off at 0."""
    resized = resize_maps(maps.movedim(-1, -3), size, mode).movedim(-3, -1)
    return resized.clamp(min=0) if mode == "bicubic" else resized


def contrast(maps: Tensor, columns: Sequence[int], factor: float) -> Tensor:
    """The softmax over some columns of ``factor`` times the maps.

    Args:
        maps: ``[rows, cols, tokens]``.
        columns: those of the words.

    Returns:
        ``[rows, cols, len(columns)]``; a cell's sum is 1.
    """
    return (factor * maps[..., list(columns)]).softmax(-1)


def rescaled(maps: Tensor, prompt: Prompt) -> Tensor:
    """Maps of all columns ``[(frames,) rows, cols, T]`` divided, cell by cell, by that of the start
    token, or of the end token where there is no start.

    Raises:
        CaptureError: the text has neither.
    """
    for kind in (SOS, EOS):
        for column, token in enumerate(prompt.tokens):
            if token.special == kind:
                return maps / maps[..., [column]].clamp(min=torch.finfo(maps.dtype).tiny)
    raise CaptureError(
        f"A map is to be divided by that of the start or end token, and the prompt {prompt.text!r} "
        "was read without either. Choose another preset."
    )


def sharpened(maps: Tensor, power: float) -> Tensor:
    """Each map ``[(frames,) rows, cols, T]``, from its lowest value ``a`` to its highest ``b``, of
    all frames, as ``b ((m - a) / (b - a))^power``: in [0, b], and 0 where it is flat."""
    cells = maps.flatten(0, -2)
    low, high = cells.amin(0), cells.amax(0)
    apart = (high - low).clamp(min=torch.finfo(maps.dtype).tiny)
    return high * ((maps - low) / apart) ** power


def refines_itself(target: Any) -> bool:
    """Whether a model's maps are spread along the image's self-attention while it runs, as those
    of joint attention are: ``capture(refine="self")``."""
    return find_denoiser(target).family.joined is not None


def refining(target: Any) -> Callable[[AttentionLayer, tuple[int, int] | None], bool]:
    """The layers that refined maps are made of: all that see the text, and the self-attention of
    the way up on the finest grid of at most ``MOST_CELLS`` cells (or the coarsest, if all have
    more), 12.6 MB an image (or frame) for SD 1.x at 512x512.

    Args:
        target: a pipeline with a UNet, or the UNet.

    Returns:
        For ``capture(pipe, kinds=("cross", "self"), layers=...)``.

    Raises:
        TypeError: the model has no self-attention on its way up.
    """
    denoiser = find_denoiser(target)
    found = [la for la in denoiser.layers if la.kind == "self" and la.place == PLACE]
    if not found:
        raise InvalidTypeError(
            "`refine='self'` spreads the maps along the self-attention of a UNet's way up or of "
            f"joint attention, and a {type(denoiser.model).__name__} has neither."
        )

    def is_read(layer: AttentionLayer, latent_size: tuple[int, int] | None) -> bool:
        if layer.kind in TEXT_KINDS or latent_size is None:
            return layer.kind in TEXT_KINDS or layer in found
        # The finest grid that is small enough; where all are too large, the coarsest.
        few = [la.level for la in found if math.prod(la.grid(latent_size)[-2:]) <= MOST_CELLS]
        level = min(few) if few else max(la.level for la in found)
        return layer in found and layer.level == level

    return is_read


def spread(maps: Tensor, layers: LayerMaps) -> Tensor:
    """``affinity @ maps``, on the affinity's grid and back.

    Args:
        maps: ``[images, (frames,) rows, cols, tokens]``.
        layers: with the affinity of the same images.

    Returns:
        The same shape. A row of the affinity sums to 1, so sums over tokens stay what they are.
    """
    assert layers.affinity is not None and layers.affinity_grid is not None
    affinity, grid = layers.affinity.float(), layers.affinity_grid
    if affinity.ndim == 4:  # each frame along its own
        singly = replace(layers, affinity=affinity.flatten(0, 1))
        return spread(maps.flatten(0, 1), singly).unflatten(0, maps.shape[:2])
    size = maps.shape[-3], maps.shape[-2]
    values = maps.movedim(-1, 1).flatten(1, -3)  # [images, tokens*frames, rows, cols]
    # each cell counts, also where the grid is much coarser
    coarse = adaptive_avg_pool2d(values, (grid[-2], grid[-1]))
    # [images, tokens, N]
    refined = coarse.reshape(len(maps), maps.shape[-1], -1) @ affinity.mT
    back = resize_maps(refined.unflatten(2, grid), size)
    return back.movedim(1, -1)
