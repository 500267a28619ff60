"""Maps of where chosen cells of the image looked."""

import torch
from torch import Tensor

from ..errors import InvalidValueError
from ..follow.passes import CaptureError
from ..keep.map_store import CapturedMaps
from .heatmap import Heatmap
from .layermaps import resize_maps


def spots(store: CapturedMaps) -> list[list[Heatmap]]:
    """Return where each chosen cell looked, for each image, see :meth:`sdattn.MapStore.spots`."""
    cells = store.keep.queries.cells
    if cells is None:
        text = "This store has no cells of its own. Capture with queries=[(row, col), ...]."
        raise InvalidValueError(text)
    return [
        [
            Heatmap(str(cell), own, (i,), frames=store.frames)
            for i, (cell, own) in enumerate(zip(cells, image, strict=True))
        ]
        for image in spot_maps(store)
    ]


def spot_maps(store: CapturedMaps) -> Tensor:
    """Return the mean over layers, heads and steps, ``[images, cells, (frames,) rows, cols]``."""
    several = store.keep.steps.each + store.keep.heads.each
    layers = []
    for name in store.maps:
        maps = store.maps[name].detach().float().cpu()
        maps = maps.flatten(1, several).mean(1) if several else maps
        # a share of a coarser grid's cell is spread over several cells of a finer one
        layers.append(maps.movedim(-1, 1) * (maps.shape[-3] * maps.shape[-2]))
    if not layers:
        raise CaptureError("The store holds no maps. Run the pipeline inside the with block.")
    size = max(((m.shape[-2], m.shape[-1]) for m in layers), key=lambda size: size[0] * size[1])
    mean = torch.stack([resize_maps(maps, size) for maps in layers]).mean(0)
    return mean / (size[0] * size[1])
