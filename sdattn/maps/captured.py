"""Maps that presets read of a capture's store, averaged over passes, and where spots looked."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import CaptureError
from ..keep.map_store import CapturedMaps
from ..models.layers import TEXT_KINDS
from .layermaps import LayerMap, resize_maps
from .presets import Preset


def text_maps(store: CapturedMaps, preset: Preset) -> tuple[dict[str, LayerMap], int]:
    """See :meth:`sdattn.maps.layermaps.Source.text_maps`."""
    _check_kept(store, preset)
    heads = store.keep.heads
    found = {}
    for layer in store.layers:
        if layer.kind in TEXT_KINDS and layer.name in store.maps:
            maps = over_steps(store, layer.name, store.maps[layer.name], preset)
            if heads.each and not preset.each_head:
                maps = maps.mean(1)
            found[layer.name] = LayerMap(
                layer.place,
                layer.level,
                heads=heads.used(layer.heads),
                maps=maps.float().cpu(),
                is_video=store.is_video,
            )
    if not found and store.stopped is not None:
        raise CaptureError(
            f"The run was stopped {store.stopped}, before the steps {store.steps} that were to be "
            'kept. Capture all of them, steps="mean" or "all".'
        )
    if not found:
        raise CaptureError(
            "There are no maps of cross- or joint attention, and only those have token columns. "
            'Capture with kinds=("cross", "joint") and run the pipeline inside the with block.'
        )
    return found, len(read_passes(store, preset))


def self_maps(store: CapturedMaps, preset: Preset) -> list[Tensor]:
    """See :meth:`sdattn.maps.layermaps.Source.self_maps`."""
    held = [layer for layer in store.layers if layer.kind == "self" and layer.name in store.maps]
    if not held:
        raise CaptureError(
            "`refine='self'` spreads the maps along the self-attention, and this store holds none. "
            "Capture a UNet with kinds=('cross', 'self') and the layers of "
            "sdattn.maps.aggregation.refining(pipe), joint attention with refine='self'; "
            "`generate()` does so by itself."
        )
    finest = min(layer.level for layer in held)
    found = []
    for layer in held:
        if layer.level == finest:
            store.sums[layer.name].check_owners()
            maps = over_steps(store, layer.name, store.maps[layer.name], preset)
            found.append(maps.mean(1) if store.keep.heads.each else maps)
    return found


def read_passes(store: CapturedMaps, preset: Preset) -> list[int]:
    """See :meth:`sdattn.maps.layermaps.Source.read_passes`."""
    kept = store.kept
    steps = store.keep.steps
    if steps.last:  # of each layer, which a cache may have left out since
        held = set[int]()
        for calls in store.seen.values():
            held.update(calls)
        return sorted(held)
    if steps.each and preset.steps == "last":
        return kept[-1:]
    part = preset.part
    if part is None or not steps.is_all:  # a mean, or a list of steps was chosen
        return kept
    read = []
    for number in kept:
        position = store.passes[number].position
        if position is None or part.holds(position):
            read.append(number)
    return read or kept


def over_steps(store: CapturedMaps, name: str, maps: Tensor, preset: Preset) -> Tensor:
    """Average maps ``[images, steps, ...]`` over steps; raise CaptureError if none ran."""
    if not store.keep.steps.each:
        return maps
    read = {id(store.passes[number]) for number in read_passes(store, preset)}
    # A cache may have skipped the layer in some of them.
    places = [place for place, one in enumerate(store.sums[name].held) if id(one) in read]
    if not places:
        raise CaptureError(
            f"The preset {preset.name!r} reads steps in which {name} did not run. Disable the "
            "cache that skipped it, or leave it out (layers=…)."
        )
    return maps[:, places].mean(1)


def _check_kept(store: CapturedMaps, preset: Preset) -> None:
    missing = []
    queries = store.keep.queries
    if queries.cells is not None or queries.in_text:
        raise CaptureError(
            "This store's maps have no columns of words: it was captured with queries= of its own. "
            "Read store.spots() for cells, store.maps for the text's attention to itself."
        )
    if preset.each_head and not store.keep.heads.is_all:
        missing.append('heads="all"')
    if preset.steps == "last" and not (store.keep.steps.last or store.keep.steps.is_all):
        missing.append('steps="last"')
    if preset.among_words and store.keep.among is None:
        missing.append("among=[...], the columns of each image's words, <sos> and <eos>")
    if preset.needs_all_columns and store.tokens is not None:
        missing.append("tokens=None")
    if preset.space != store.keep.space:
        missing.append(f"space={preset.space!r}")
    uneven = store.uneven() if preset.steps == "sum" else []
    if uneven:
        raise CaptureError(
            f"The preset {preset.name!r} adds up steps, but {len(uneven)} layers did not "
            f"run in all of them, for example {uneven[0]}. Disable the cache that skips it."
        )
    if missing:
        raise CaptureError(
            f"The preset {preset.name!r} reads what this store has not kept. Capture with "
            f"{', '.join(missing)}; `generate()` with `preset={preset.name!r}` does so by itself."
        )


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
