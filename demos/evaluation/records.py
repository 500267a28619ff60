"""What was measured of each map, and the figures of many."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sdattn import Heatmaps

from ..scene_checker import SIDE
from ..scenes.shapes import Word
from .images import Sample
from .measures import LEVELS, Floats, interval, lands_on_own, score
from .seeing import maps_of
from .variants import DEFAULT

Key = tuple[str, str, str, str]  # setting, kind of word, variant, measure
KINDS = ("noun", "colour", "ground")
SPLITS = {"for choosing": 0, "reported": 1}


class Records:
    """Values of each measure, with the number of the scene that each comes from."""

    def __init__(self) -> None:
        self._values: dict[Key, list[Floats]] = defaultdict(list)
        self._scenes: dict[Key, list[NDArray[np.int64]]] = defaultdict(list)

    def add(self, key: Key, scene: int, values: Floats) -> None:
        """Add values ``[n, ...]`` of one image."""
        self._values[key].append(values)
        self._scenes[key].append(np.full(len(values), scene))

    def add_all(self, other: Records) -> None:
        """Add those of another part."""
        for key, values in other._values.items():
            self._values[key] += values
            self._scenes[key] += other._scenes[key]

    def values(self, key: Key) -> Floats:
        """Return what was added, ``[n, ...]``."""
        return np.concatenate(self._values[key])

    def scenes(self, key: Key) -> NDArray[np.int64]:
        """Return the number of the scene of each value."""
        return np.concatenate(self._scenes[key])

    def write(self, path: Path) -> None:
        """Write them as JSON, all or nothing."""
        rows = [
            [*key, self.values(key).round(5).tolist(), self.scenes(key).tolist()]
            for key in self._values
        ]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".new").write_text(json.dumps(rows))
        os.replace(path.with_suffix(".new"), path)

    @classmethod
    def read(cls, path: Path) -> Records:
        """Return what :meth:`write` wrote."""
        records = cls()
        for *key, values, scenes in json.loads(path.read_text()):
            setting, kind, variant, measure = key
            records._values[setting, kind, variant, measure] = [np.array(values, np.float64)]
            records._scenes[setting, kind, variant, measure] = [np.array(scenes, np.int64)]
        return records

    def figures(self) -> dict[str, Any]:
        """Return ``[setting][kind][variant][measure]`` = [mean, low, high] of 95 %; ``"n"`` maps;
        the ``"level"`` that is best for all of them, of which ``"iou"`` is; and ``"ahead"``: by how
        much the default preset is ahead, map by map, in the same measures."""
        found: dict[str, Any] = {}
        for key in self._values:
            setting, kind, variant, measure = key
            entry = found.setdefault(setting, {}).setdefault(kind, {}).setdefault(variant, {})
            values, scenes = self._of(key)
            if measure == "ious":
                entry["level"], measure = float(LEVELS[_best(self.values(key))]), "iou"
            entry[measure] = _known(values, scenes)
            entry.setdefault("n", len(values))
            default = (setting, kind, DEFAULT, key[3])
            if variant != DEFAULT and default in self._values:
                ahead = self._of(default)[0] - values
                entry.setdefault("ahead", {})[measure] = _known(ahead, scenes)
        return found

    def _of(self, key: Key) -> tuple[Floats, NDArray[np.int64]]:
        """One value a map; of the IoUs those at the level that is best for all maps."""
        values, scenes = self.values(key), self.scenes(key)
        return (values[:, _best(values)] if values.ndim > 1 else values), scenes


def _known(values: Floats, scenes: NDArray[np.int64]) -> tuple[float, float, float]:
    """The interval of those that there are: a flat map has no rank correlation."""
    known = np.isfinite(values)
    return interval(values[known], scenes[known])


def rounded(figures: Any) -> Any:
    """Return figures as they are written: dicts and lists of them, numbers to four places."""
    if isinstance(figures, dict):
        return {name: rounded(one) for name, one in figures.items()}
    if isinstance(figures, list | tuple):
        return [rounded(one) for one in figures]
    return round(figures, 4) if isinstance(figures, float) else figures


def _best(ious: Floats) -> int:
    return int(ious.mean(0).argmax())


def claim(work: Path, told: Mapping[str, Any]) -> None:
    """Make a folder for parts; exit if it has parts that were made with other options."""
    said, record = {name: str(value) for name, value in told.items()}, work / "options.json"
    if record.exists() and json.loads(record.read_text()) != said:
        raise SystemExit(f"{work} has parts of other options, see {record}: pass another --work.")
    work.mkdir(parents=True, exist_ok=True)
    record.write_text(json.dumps(said) + "\n")


def kept(path: Path, make: Callable[[], Records]) -> Records:
    """Return the records in a file; make them, and write the file, if there is none."""
    if not path.exists():
        make().write(path)
    return Records.read(path)


def split_of(number: int) -> str:
    """Return the half that a scene is in: even numbers are to choose by, odd ones to report."""
    return [*SPLITS][number % 2]


def read_image(
    sample: Sample,
    setting: str,
    records: Records,
    scored: Callable[[Floats, NDArray[np.bool_]], dict[str, Floats]] = score,
) -> None:
    """Score every variant's maps of the words that are about a part of the image."""
    number, masks = sample.number, sample.masks
    records.add((setting, "image", DEFAULT, "right"), number, np.array([float(masks is not None)]))
    if masks is None:
        return
    truth = np.concatenate([masks, ~masks.any(0, keepdims=True)])  # the background's is at -1
    for variant, heatmaps in sample.heatmaps.items():
        words = sample.scene.words(heatmaps.prompt.text)  # which is not always what was drawn
        maps = at_side(words, heatmaps)
        for kind in KINDS:
            chosen = [i for i, word in enumerate(words) if word.kind == kind]
            if not chosen:
                continue
            some, owners = maps[chosen], [words[i].owner for i in chosen]
            key = (setting, kind, variant)
            for measure, values in scored(some, truth[owners]).items():
                records.add((*key, measure), number, values)
            if kind != "ground" and len(masks) > 1:
                others = np.stack([np.delete(masks, owner, axis=0).any(0) for owner in owners])
                own = lands_on_own(some, truth[owners], others)
                records.add((*key, "own"), number, own)


def at_side(words: list[Word], heatmaps: Heatmaps) -> Floats:
    """Return the words' maps in the size of the checkers' masks, float64 ``[words, 64, 64]``."""
    resized = [one.resize((SIDE, SIDE)).numpy() for one in maps_of(words, heatmaps)]
    return np.stack(resized).astype(np.float64)
