"""What can be compared: a run in a folder or in memory, and whether two of them fit together."""

from __future__ import annotations

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from ..maps.heatmaps import Heatmaps
from ..maps.presets import Preset
from .folder import SavedRun, load_run
from .packing import to_json
from .run import Run

RunLike = str | Path | SavedRun | Run | tuple[Run, int]

_NO_SETTINGS = {"format", "words", "truncated", "tokens", "columns", "layers", "files", "checksum"}
_NO_SETTINGS |= {"preset", "passes", "self_attention"}  # they must be the same, or follow
_NO_SETTINGS |= {"id", "line", "fingerprint"}  # of an item of a batch
_NO_SETTINGS |= {"details", "more"}  # what there is beside


@dataclass(frozen=True)
class Side:
    """One of the two runs that are compared.

    Attributes:
        image, heatmaps: its picture and the maps of its words.
        info: its settings, as ``run.json`` holds them.
        layers: the names of the layers that the maps come from.
        passes: how many calls of the model they come from.
        folder: where it was read from, if it was.
    """

    image: Image.Image
    heatmaps: Heatmaps
    info: Mapping[str, Any]
    layers: list[str]
    passes: int
    folder: Path | None = None


def read_side(run: RunLike) -> Side:
    """A run's folder, a saved run, a ``Run`` of one image, or a ``Run`` and an image's number.

    Raises:
        TypeError: none of these.
        ValueError: a ``Run`` of several images without a number, or one that it has not.
        FileNotFoundError: as by :func:`sdattn.load_run`.
    """
    if isinstance(run, (str, Path)):
        run = load_run(run)
    if isinstance(run, SavedRun):
        layers = list(run.info["layers"])
        return Side(run.image, run.heatmaps, run.info, layers, run.info["passes"], run.folder)
    run, number = run if isinstance(run, tuple) else (run, None)
    if not isinstance(run, Run):
        raise TypeError(
            f"Asked to compare a {type(run).__name__}. Pass a run's folder, or what load_run() or "
            "generate() returned."
        )
    last = len(run) - 1
    number = 0 if number is None and last == 0 else number
    if number is None or not 0 <= number <= last:
        asked = "none was chosen" if number is None else f"asked for {number}"
        raise ValueError(
            f"The run has {last + 1} image(s), and {asked}. Pass one of (run, 0) to (run, {last})."
        )
    image_run = run[number]
    info = json.loads(to_json(image_run.info))  # tuples are lists, as in a folder
    layers, passes = list(image_run.layers.layers), image_run.layers.passes
    return Side(image_run.image, image_run.heatmaps, info, layers, passes)


def check_sides(a: Side, b: Side) -> None:
    """Refuse what cannot be compared.

    Raises:
        ValueError: maps of different presets, pictures of different proportions, maps that are
            not finite.

    Warns:
        UserWarning: the maps come from different layers.
    """
    presets = [_in_unit(one.heatmaps.preset).to_json() for one in (a, b)]
    if differ := [name for name in presets[0] if presets[0][name] != presets[1][name]]:
        told = (", ".join(f"{name}={one[name]!r}" for name in differ) for one in presets)
        raise ValueError(
            "The maps were made by different presets: A with {}, B with {}. Their values cannot be "
            "compared; make both runs with one preset.".format(*told)
        )
    if a.heatmaps.preset.steps == "sum" and a.passes != b.passes:
        raise ValueError(
            f"The maps are sums over {a.passes} and {b.passes} steps, so their values cannot be "
            "compared. Make both runs with one number of steps, or with another preset."
        )
    ratios = [one.image.width / one.image.height for one in (a, b)]
    if max(ratios) > 1.01 * min(ratios):
        sizes = [f"{one.image.width}x{one.image.height}" for one in (a, b)]
        raise ValueError(
            f"The picture of A has {sizes[0]} pixels and that of B {sizes[1]} (width x height), "
            "which are other proportions. Make both runs with one width and height."
        )
    for name, one in (("A", a), ("B", b)):
        if not torch.isfinite(one.heatmaps.maps).all():
            raise ValueError(
                f"The maps of {name} hold values that are not finite. If the model runs in "
                "float16, try bfloat16 or float32."
            )
    _compare_layers(a.layers, b.layers)


def _in_unit(preset: Preset) -> Preset:
    """The preset as far as values are compared by it: a mean over other steps is one too, as of a
    run that was drawn and of a picture that was explained."""
    return preset if preset.part is None else replace(preset, steps="mean")


def _compare_layers(a: Sequence[str], b: Sequence[str]) -> None:
    of_a, of_b = (sorted({*x}.difference(y)) for x, y in ((a, b), (b, a)))
    if of_a or of_b:
        warnings.warn(
            f"The maps come from different layers: {len(of_a)} that only A has, {len(of_b)} that "
            f"only B has, {(of_a or of_b)[0]} for one. Compare their values with care, or make "
            "both runs with the same layers.",
            stacklevel=4,
        )


def names_of(a: Side, b: Side) -> tuple[str, str]:
    """The folders' names, with as many of those above as tell them apart; A and B without."""
    if a.folder is None or b.folder is None:
        return _name(a.folder, "A"), _name(b.folder, "B")
    parts = a.folder.resolve().parts, b.folder.resolve().parts
    for number in range(1, max(map(len, parts))):
        name_a, name_b = ("/".join(one[-number:]) for one in parts)
        if name_a != name_b:
            return name_a, name_b
    return parts[0][-1], parts[1][-1]


def _name(folder: Path | None, otherwise: str) -> str:
    return folder.resolve().name if folder else otherwise


def differing_settings(a: Side, b: Side) -> dict[str, tuple[Any, Any]]:
    """What the two runs were asked for and is not the same, name to (A's, B's)."""
    of_a, of_b = _settings(a.info), _settings(b.info)
    names = [name for name in {**of_a, **of_b} if of_a.get(name) != of_b.get(name)]
    return {name: (of_a.get(name), of_b.get(name)) for name in names}


def _settings(info: Mapping[str, Any]) -> dict[str, Any]:
    """Flat: ``guidance_scale``, ``version of torch``."""
    flat: dict[str, Any] = {}
    for name, value in info.items():
        if name == "options":
            flat |= value
        elif name == "versions":
            flat |= {f"version of {package}": one for package, one in value.items()}
        elif name not in _NO_SETTINGS:
            flat[name] = value
    return flat
