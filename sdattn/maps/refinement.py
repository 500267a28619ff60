"""Sharper maps: a word's map spread along the picture's own self-attention.

    refining(pipe)                the layers to capture for it: a predicate for capture(layers=...)
    spread(maps, layers)          [images, rows, cols, tokens], refined

Cells that attend to each other belong together, so a cell takes the mean of what the cells it
attends to say of a word. Sources: Wang et al. 2023, "Diffusion Model is Secretly a Training-free
Open Vocabulary Semantic Segmenter" (DiffSegmenter), equation 5; RishiDarkDevil/daam-i2i.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn.functional import adaptive_avg_pool2d

from ..models.layers import TEXT_KINDS, AttentionLayer, find_denoiser, find_layers
from .layermaps import LayerMaps, resize_maps

MOST_CELLS = 32 * 32  # of the self-attention: 4.2 MB a layer in float32
PLACE = "up"


def refining(target: Any) -> Callable[[AttentionLayer, tuple[int, int] | None], bool]:
    """The layers that refined maps are made of: all that see the text, and the self-attention of
    the way up on the finest grid of at most ``MOST_CELLS`` cells (or the coarsest, if all have
    more), 12.6 MB an image for SD 1.x at 512x512.

    Args:
        target: a pipeline with a UNet, or the UNet.

    Returns:
        For ``capture(pipe, kinds=("cross", "self"), layers=...)``.

    Raises:
        TypeError: the model has no self-attention on its way up.
    """
    model = find_denoiser(target).model
    found = [la for la in find_layers(model) if la.kind == "self" and la.place == PLACE]
    if not found:
        raise TypeError(
            f"refine='self' spreads the maps along the self-attention of a UNet's way up, and a "
            f"{type(model).__name__} has none."
        )

    def wanted(layer: AttentionLayer, latent_size: tuple[int, int] | None) -> bool:
        if layer.kind in TEXT_KINDS or latent_size is None:
            return layer.kind in TEXT_KINDS or layer in found
        few = [one.level for one in found if math.prod(one.grid(latent_size)) <= MOST_CELLS]
        level = min(few) if few else max(one.level for one in found)
        return layer in found and layer.level == level

    return wanted


def spread(maps: Tensor, layers: LayerMaps) -> Tensor:
    """``affinity @ maps``, on the affinity's grid and back.

    Args:
        maps: ``[images, rows, cols, tokens]``.
        layers: with the affinity of the same images.

    Returns:
        The same shape. A row of the affinity sums to 1, so sums over tokens stay what they are.
    """
    assert layers.affinity is not None and layers.affinity_grid is not None
    size = maps.shape[1], maps.shape[2]
    # [images, tokens, rows, cols]; each cell counts, also where the grid is much coarser
    coarse = adaptive_avg_pool2d(maps.movedim(-1, 1), layers.affinity_grid)
    refined = coarse.flatten(2) @ layers.affinity.mT  # [images, tokens, N]
    back = resize_maps(refined.unflatten(2, layers.affinity_grid), size)
    return back.movedim(1, -1)
