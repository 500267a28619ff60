"""What was measured of each map, and the figures of many."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdattn import Heatmap, Heatmaps

from ..scene_checker import SIDE
from ..scenes.shapes import Scene
from .images import Sample
from .measures import LEVELS, Floats, interval, lands_on_own, score
from .variants import DEFAULT, PEERS

Key = tuple[str, str, str, str]  # setting, kind of word, variant, measure


class Records:
    """Values of each measure, with the number of the scene that each comes from."""

    def __init__(self) -> None:
        self._values: dict[Key, list[Floats]] = defaultdict(list)
        self._scenes: dict[Key, list[NDArray[np.int64]]] = defaultdict(list)

    def add(self, key: Key, scene: int, values: Floats) -> None:
        """Values ``[n, ...]`` of one image."""
        self._values[key].append(values)
        self._scenes[key].append(np.full(len(values), scene))

    def add_all(self, other: Records) -> None:
        """Those of another process."""
        for key, values in other._values.items():
            self._values[key] += values
            self._scenes[key] += other._scenes[key]

    def figures(self) -> dict[str, Any]:
        """``[setting][kind][variant][measure]`` = [mean, low, high] of 95 %; ``"n"`` maps; the
        ``"level"`` that is best for all of them, of which ``"iou"`` is; and ``"ahead"``: by how
        much the default preset is ahead, map by map, in the same measures."""
        found: dict[str, Any] = {}
        for key in self._values:
            setting, kind, variant, measure = key
            entry = found.setdefault(setting, {}).setdefault(kind, {}).setdefault(variant, {})
            values, scenes = self._of(key)
            if measure == "ious":
                entry["level"], measure = float(LEVELS[_best(self._raw(key))]), "iou"
            entry[measure] = _known(values, scenes)
            entry["n"] = len(values)
            default = (setting, kind, DEFAULT, key[3])
            if variant != DEFAULT and default in self._values:
                ahead = self._of(default)[0] - values
                entry.setdefault("ahead", {})[measure] = _known(ahead, scenes)
        return found

    def _raw(self, key: Key) -> Floats:
        return np.concatenate(self._values[key])

    def _of(self, key: Key) -> tuple[Floats, NDArray[np.int64]]:
        """One value a map; of the IoUs those at the level that is best for all maps."""
        values, scenes = self._raw(key), np.concatenate(self._scenes[key])
        return (values[:, _best(values)] if values.ndim > 1 else values), scenes


def _known(values: Floats, scenes: NDArray[np.int64]) -> tuple[float, float, float]:
    """The interval of those that there are: a flat map has no rank correlation."""
    known = np.isfinite(values)
    return interval(values[known], scenes[known])


def _best(ious: Floats) -> int:
    return int(ious.mean(0).argmax())


def read_image(
    sample: Sample,
    setting: str,
    records: Records,
    both: Collection[str] = tuple(PEERS),
    scored: Callable[[Floats, NDArray[np.bool_]], dict[str, Floats]] = score,
) -> None:
    """Score every variant's maps of the words of the objects; colours in ``both`` only."""
    right = np.array([float(sample.masks is not None)])
    records.add((setting, "image", DEFAULT, "right"), sample.number, right)
    if sample.masks is None:
        return
    for variant, heatmaps in sample.heatmaps.items():
        for kind in ("shape", "colour") if variant in both else ("shape",):
            key, number = (setting, kind, variant), sample.number
            maps = np.stack([_at_side(one) for one in words_of(sample.scene, heatmaps, kind)])
            for measure, values in scored(maps, sample.masks).items():
                records.add((*key, measure), number, values)
            if len(maps) == 2:
                records.add((*key, "own"), number, lands_on_own(maps, sample.masks))


def words_of(scene: Scene, heatmaps: Heatmaps, kind: str) -> list[Heatmap]:
    """The map of each object's word; the second of two objects of one shape has the word's second
    occurrence."""
    names = [getattr(one, kind) for one in scene.objects]
    return [heatmaps.find(name)[names[:i].count(name)] for i, name in enumerate(names)]


def _at_side(one: Heatmap) -> Floats:
    return one.resize((SIDE, SIDE)).numpy().astype(np.float64)
