from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..follow.passes import CaptureError
from ..keep.map_store import CapturedMaps
from ..models.denoiser_call import Size
from ..models.layers import TEXT_KINDS, AttentionLayer
from .presets import Preset


@dataclass(frozen=True, eq=False, repr=False)
class LayerMap:
    """The map of one layer.

    Attributes:
        place, level: position in the model, see :class:`sdattn.models.layers.AttentionLayer`.
        maps: float32 ``[images, (heads,) (frames,) rows, cols, tokens]`` on the CPU, probabilities;
            the mean over the kept steps, with its graph if the store has one.
    """

    place: str
    level: int
    heads: int
    maps: Tensor
    is_video: bool = False

    @property
    def size(self) -> tuple[int, int]:
        return self.maps.shape[-3], self.maps.shape[-2]

    @property
    def grid(self) -> tuple[int, ...]:
        """(rows, cols), or (frames, rows, cols) for a video."""
        return tuple(self.maps.shape[-4 if self.is_video else -3 : -1])


@dataclass(frozen=True, eq=False, repr=False)
class LayerMaps:
    """The maps of a run's layers, in the order in which they run.

    Attributes:
        layers: name to :class:`LayerMap`, for all layers that see the text, read or not.
        passes: number of model calls averaged.
        affinity: float32 ``[images, N, N]``, the mean of the self-attention layers that a refining
            preset reads; ``[images, frames, N, N]`` for videos whose frames attend only to
            themselves (AnimateDiff); else None. Row ``i`` is what cell ``i`` attends to; it sums to
            1.
        affinity_grid: (rows, cols) with ``rows * cols = N``; (frames, rows, cols) for videos whose
            cells attend to all frames.
    """

    layers: Mapping[str, LayerMap]
    columns: tuple[int, ...]
    passes: int
    affinity: Tensor | None = None
    affinity_grid: Size | None = None

    def image(self, number: int) -> LayerMaps:
        some = slice(number, number + 1)
        affinity = None if self.affinity is None else self.affinity[some]
        kept = {name: replace(layer, maps=layer.maps[some]) for name, layer in self.layers.items()}
        return replace(self, layers=kept, affinity=affinity)

    def frame(self, number: int) -> LayerMaps:
        """Return the maps of one frame of a video's latent, without an affinity over all frames."""
        kept = {
            name: replace(layer, maps=layer.maps.select(-4, number), is_video=False)
            for name, layer in self.layers.items()
        }
        if self.affinity is None or self.over_frames:
            return replace(self, layers=kept, affinity=None, affinity_grid=None)
        return replace(self, layers=kept, affinity=self.affinity[:, number])

    @property
    def over_frames(self) -> bool:
        """True if the affinity is over all frames of a video."""
        return self.affinity_grid is not None and len(self.affinity_grid) == 3

    def keep(self, columns: Sequence[int]) -> LayerMaps:
        positions = [self.columns.index(column) for column in columns]
        kept = {
            n: replace(layer, maps=layer.maps[..., positions]) for n, layer in self.layers.items()
        }
        return replace(self, layers=kept, columns=tuple(columns))

    def as_saved(self) -> LayerMaps:
        kept = {n: replace(layer, maps=halved(layer.maps)) for n, layer in self.layers.items()}
        affinity = None if self.affinity is None else halved(self.affinity)
        return replace(self, layers=kept, affinity=affinity)


def halved(maps: Tensor) -> Tensor:
    """Return maps as a file holds them: float16, row-major, on the CPU."""
    return maps.to("cpu", torch.float16).contiguous()


def layer_maps(
    store: CapturedMaps, preset: Preset, self_attention: CapturedMaps | None = None
) -> LayerMaps:
    """Return the maps of a store's layers, averaged over heads and steps as the preset says;
    ``self_attention`` is the store for refining, by default the same. Raise CaptureError if it
    holds no layer that sees the text, or only means of what the preset reads one by one."""
    _check_kept(store, preset)
    ran = [layer for layer in store.layers if layer.name in store.maps]
    texts = [layer for layer in ran if layer.kind in TEXT_KINDS]
    found = {layer.name: _of_layer(store, layer, preset) for layer in texts}
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
    # Which steps the preset reads is known only from the passes that ran.
    columns = store.tokens or tuple(range(store.n_keys or 0))
    passes = len(read_steps(store, preset))
    if preset.refine is None or store.keep.refine:
        return LayerMaps(found, columns, passes)
    affinity, grid = _affinity(self_attention or store, preset)
    return LayerMaps(found, columns, passes, affinity=affinity, affinity_grid=grid)


def _check_kept(store: CapturedMaps, preset: Preset) -> None:
    missing = []
    queries = store.keep.queries
    if queries.cells is not None or queries.in_text:
        raise CaptureError(
            "This store's maps have no columns of words: it was captured with queries= of its own. "
            "Read store.spots() for cells, store.maps for the text's attention to itself."
        )
    if preset.each_head and not store.keep.heads.every:
        missing.append('heads="all"')
    if preset.steps == "last" and not (store.keep.steps.last or store.keep.steps.every):
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


def _of_layer(store: CapturedMaps, layer: AttentionLayer, preset: Preset) -> LayerMap:
    maps = over_steps(store, layer.name, store.maps[layer.name], preset)
    heads = store.keep.heads
    if heads.each and not preset.each_head:
        maps = maps.mean(1)
    return LayerMap(
        layer.place,
        layer.level,
        heads=heads.used(layer.heads),
        maps=maps.float().cpu(),
        is_video=store.is_video,
    )


def kept_passes(store: CapturedMaps) -> list[int]:
    """Return the passes of the run, counted from 0, of which maps are kept."""
    return [number for number in range(len(store.passes)) if store.keeps(number)]


def read_steps(store: CapturedMaps, preset: Preset) -> list[int]:
    """Return the positions on the steps axis (or the passes) that a preset reads."""
    kept = kept_passes(store)
    if store.keep.steps.last or preset.steps == "last":
        return [len(kept) - 1]
    part = preset.part
    if part is None or not store.keep.steps.every:  # a list of steps was chosen
        return list(range(len(kept)))
    positions = [store.passes[i].position for i in kept]
    read = [i for i, at in enumerate(positions) if at is None or part.holds(at)]
    return read or list(range(len(kept)))


def read_passes(store: CapturedMaps, preset: Preset) -> list[int]:
    """Return the passes of the run, counted from 0, that the preset reads."""
    kept = kept_passes(store)
    if store.keep.steps.each or store.keep.steps.last:
        return [kept[i] for i in read_steps(store, preset)]
    return kept


def over_steps(store: CapturedMaps, name: str, maps: Tensor, preset: Preset) -> Tensor:
    """Average maps ``[images, steps, ...]`` over steps; raise CaptureError if none ran."""
    if not store.keep.steps.each:
        return maps
    read = read_passes(store, preset)
    # A cache may have skipped the layer in some of them.
    places = [place for place, call in enumerate(store.seen[name]) if call in read]
    if not places:
        raise CaptureError(
            f"The preset {preset.name!r} reads steps in which {name} did not run. Disable the "
            "cache that skipped it, or leave it out (layers=…)."
        )
    return maps[:, places].mean(1)


def _affinity(store: CapturedMaps, preset: Preset) -> tuple[Tensor, Size]:
    """Return the mean of the finest self-attention layers that the store holds, and their grid."""
    held = [layer for layer in store.layers if layer.kind == "self" and layer.name in store.maps]
    if not held:
        raise CaptureError(
            "`refine='self'` spreads the maps along the self-attention, and this store holds none. "
            "Capture a UNet with kinds=('cross', 'self') and the layers of "
            "sdattn.maps.aggregation.refining(pipe), joint attention with refine='self'; "
            "`generate()` does so by itself."
        )
    finest = min(layer.level for layer in held)
    total: Tensor = torch.zeros(())
    grid: Size = ()
    finest_layers = [layer for layer in held if layer.level == finest]
    for layer in finest_layers:
        store.sums[layer.name].check_owners()
        maps = over_steps(store, layer.name, store.maps[layer.name], preset)
        maps = maps.mean(1) if store.keep.heads.each else maps  # [images, (frames,) rows, cols, N]
        grid = tuple(maps.shape[1:-1])
        total = total + maps.float().cpu()
    mean = total / len(finest_layers)
    if mean.shape[-1] == math.prod(grid):
        return mean.flatten(1, -2), grid
    if len(grid) < 3:
        raise CaptureError(
            "`refine='self'` spreads the maps along the self-attention, which has "
            f"{mean.shape[-1]} keys here for {math.prod(grid)} cells: something merges its keys. "
            "Turn that off, or leave it out."
        )
    if mean.shape[-1] != math.prod(grid[-2:]):
        raise CaptureError(
            "`refine='self'` spreads the maps along all frames of a video, and this store holds "
            "some. Capture without `frames`."
        )
    return mean.flatten(2, 3), grid[-2:]  # each frame attends to itself alone


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


def resize_maps(maps: Tensor, size: tuple[int, int], mode: str = "bilinear") -> Tensor:
    """Resize ``[..., rows, cols]`` to ``size`` = (rows, cols), cell centres aligned."""
    batched = maps.reshape(-1, 1, *maps.shape[-2:])
    resized = torch.nn.functional.interpolate(batched, size=size, mode=mode, align_corners=False)
    return resized.reshape(*maps.shape[:-2], *size)


def fits(size: tuple[int, int], grid: tuple[int, ...]) -> bool:
    """Check whether a map of (rows, cols) can belong to an image of (height, width) pixels."""
    height, width = size
    rows, cols = grid
    return abs(rows - cols * height / width) < 1 or abs(cols - rows * width / height) < 1
