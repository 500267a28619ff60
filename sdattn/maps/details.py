from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from torch import Tensor

from ..keep.map_store import CapturedMaps
from ..models.layers import TEXT_KINDS
from .captured import over_steps
from .heatmaps import Heatmaps
from .layermaps import LayerMap, LayerMaps


@dataclass(frozen=True, eq=False)
class Details:
    """Maps kept for single steps and heads of one image's run.

    Attributes:
        steps: maps of each layer ``[steps, (frames,) rows, cols, columns]`` (steps in place of
            images), the mean over heads; None if only a mean over steps was kept.
        calls: calls of the model, counted from 0, that the steps are.
        heads: maps of each layer ``[1, heads, (frames,) rows, cols, columns]``, the mean over the
            preset's steps; None if only a mean over heads was kept, or the run's maps have their
            heads.
        spots: where spots of the image looked, float32 ``[spot rows, spot cols, rows, cols]``:
            shares of each spot's attention, see :meth:`sdattn.MapStore.spots`; None if not kept.
    """

    steps: LayerMaps | None = None
    calls: tuple[int, ...] = ()
    heads: LayerMaps | None = None
    head_numbers: Literal["all"] | tuple[int, ...] = "all"
    spots: Tensor | None = None

    def frame(self, number: int) -> Details:
        steps = self.steps and self.steps.frame(number)
        heads = self.heads and self.heads.frame(number)
        return replace(self, steps=steps, heads=heads)


def details_of(store: CapturedMaps, number: int, heatmaps: Heatmaps) -> Details:
    """Return what a store kept for single steps and heads of one of its images; a layer that ran in
    fewer steps than the model is left out of the steps."""
    preset = heatmaps.preset
    held = store.tokens or tuple(range(store.n_keys or 0))
    words = {column for word in heatmaps.prompt.seen for column in word.columns}
    columns = [column for column in held if column in words or preset.needs_all_columns]
    positions = [held.index(column) for column in columns]

    def kept(maps_of: Callable[[str, Tensor], Tensor]) -> LayerMaps:
        found = {}
        for layer in store.layers:
            if layer.kind in TEXT_KINDS and layer.name in store.maps:
                maps = maps_of(layer.name, store.maps[layer.name][number : number + 1].detach())
                maps = maps[..., positions].float().cpu()
                found[layer.name] = LayerMap(
                    layer.place, layer.level, layer.heads, maps=maps, is_video=store.is_video
                )
        return LayerMaps(found, tuple(columns), passes=1)

    steps = heads = None
    calls = tuple(store.kept)
    if store.keep.steps.each:
        steps = kept(lambda _, maps: (maps.mean(2) if store.keep.heads.each else maps)[0])
        whole = {n: layer for n, layer in steps.layers.items() if len(layer.maps) == len(calls)}
        steps = LayerMaps(whole, steps.columns, passes=1) if whole else None
    if store.keep.heads.each and not preset.each_head:
        heads = kept(lambda name, maps: over_steps(store, name, maps, preset))
    return Details(steps, calls if steps else (), heads, store.keep.heads.numbers or "all")
