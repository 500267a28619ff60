"""One image's run as files in memory, path to bytes, for a folder or a shard; `parts` has their
table. ``run.json`` has every file's checksum, and its own."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import NamedTuple

from safetensors.torch import save
from torch import Tensor

from ..errors import InvalidValueError
from ..files.records import sealed
from ..files.writing import sha256
from ..maps.aggregation import aggregate, finish
from ..maps.glow import Scale
from ..maps.heatmaps import Heatmaps
from ..maps.layermaps import LayerMaps, halved
from ..maps.masks import MaskSettings
from ..maps.presets import Preset
from ..prompts.tokens import Prompt
from .drawings import EVERY_MASK, drawings, image_files, named
from .imagerun import Further, ImageRun
from .info import FORMAT, DetailsEntry, FurtherEntry, LayerEntry, RunInfo
from .parts import FURTHER, HEADS, MAPS, SPOTS, STEPS, USUAL

AFFINITY = "self-attention"  # the name among the maps of what refined them


class Packed(NamedTuple):
    """A run's files by their paths in its folder, ``run.json`` last, the contents of that, and the
    heatmaps that a reader makes of the files."""

    info: RunInfo
    files: dict[str, bytes]
    heatmaps: Heatmaps


def pack_run(
    run: ImageRun,
    parts: Collection[str] = USUAL,
    beside: Mapping[str, bytes] | None = None,
    masks: MaskSettings = EVERY_MASK,
) -> Packed:
    """Return the files of one image's run, with its maps as float16; the same run gives the same
    bytes. Raise ValueError if a map holds values that are not finite.

    ``parts`` are names in :data:`sdattn.runs.parts.PARTS`. Single steps and heads, and further
    maps, each in a folder of their own, go with ``maps``; a report comes in ``beside``, with other
    files of the folder. ``masks`` says which masks there are, if ``parts`` has them.
    """
    # As a reader will get them: float16, so that statistics and drawings are those of the file.
    run = replace(run, layers=run.layers.as_saved())
    tensors = _tensors(run)  # checked before any byte is made
    files = image_files(run, parts)
    if "maps" in parts:
        files |= {name: pack_maps(maps) for name, maps in tensors.items()}
    heatmaps = run.heatmaps
    files |= drawings(run, heatmaps.occurrences(), heatmaps.prompt.text, parts, masks=masks)
    for folder, further in run.more.items():
        drawn = _pack_further(run, folder, further, parts, masks)
        files |= {f"{folder}/{name}": data for name, data in drawn.items()}
    files |= beside or {}
    # Last what names and seals all of them.
    saved = heatmaps_from(run.layers, heatmaps.prompt, heatmaps.preset)
    info = _info(replace(run, heatmaps=saved), files)
    return Packed(info, {**files, "run.json": sealed(info.to_json())}, saved)


def _tensors(run: ImageRun) -> dict[str, dict[str, Tensor]]:
    """Return the tensors of each file of the prompt's maps, by layer; raise ValueError if one holds
    values that are not finite."""
    layers = run.layers
    details = run.details
    tensors = {MAPS: {name: layer.maps[0] for name, layer in layers.layers.items()}}
    if layers.affinity is not None:
        tensors[MAPS][AFFINITY] = layers.affinity[0]
    if details.steps is not None:  # steps stand in the place of images
        tensors[STEPS] = {name: layer.maps for name, layer in details.steps.layers.items()}
    if details.heads is not None:
        tensors[HEADS] = {name: layer.maps[0] for name, layer in details.heads.layers.items()}
    if details.spots is not None:
        tensors[SPOTS] = {"spots": details.spots}
    for maps in tensors.values():
        _check_finite(maps)
    return tensors


def _pack_further(
    run: ImageRun, kind: str, further: Further, parts: Collection[str], masks: MaskSettings
) -> dict[str, bytes]:
    """Return the files of a further text's maps, for a folder of its own."""
    text, maps = further
    # a knockout that changed nothing is not to glow
    scale: Scale = (0.0, max(heatmap.peak for heatmap in maps)) if FURTHER[kind].changes else "own"
    files = drawings(run, maps, text, parts, scale, masks)
    if "maps" in parts:
        names = named(heatmap.label for heatmap in maps)
        files[MAPS] = pack_maps({n: m.values for n, m in zip(names, maps, strict=True)})
    return files


def _info(run: ImageRun, files: Mapping[str, bytes]) -> RunInfo:
    """Return ``run.json`` for a run with these files and the heatmaps of its saved maps."""
    saved = run.heatmaps
    layers = run.layers
    details = run.details
    prompt = saved.prompt
    each = details.steps or details.heads
    entries = {}
    for name, layer in layers.layers.items():
        entries[name] = LayerEntry(layer.place, layer.level, layer.heads, layer.grid)
    more = {}
    for name, (text, maps) in run.more.items():
        labels = [(heatmap.label, heatmap.columns) for heatmap in maps]
        more[name] = FurtherEntry(text, tuple(labels))
    return RunInfo(
        **vars(run.settings.alone()),
        words=prompt.words,
        truncated=[word.text for word in prompt.truncated],
        tokens=prompt.tokens,
        encoders=prompt.encoders or None,
        columns=layers.columns,
        preset=saved.preset,
        statistics=tuple(word.rounded() for word in saved.statistics()),
        score=float(f"{saved.score():.6g}") if saved.judged() else None,
        missing=tuple(run.missing()) if saved.judged() else (),
        passes=layers.passes,
        layers=entries,
        self_attention=layers.affinity_grid,
        details=DetailsEntry(
            None if details.steps is None else details.calls,
            None if details.heads is None else details.head_numbers,
            each.columns if each else (),
            None if details.spots is None else tuple(details.spots.shape),
        ),
        more=more,
        files={name: sha256(data) for name, data in files.items()},
    )


def heatmaps_from(layers: LayerMaps, prompt: Prompt, preset: Preset) -> Heatmaps:
    """Return the heatmaps made of one image's layer maps."""
    maps = aggregate(layers, preset)[0]
    return finish(maps, prompt, preset, layers.columns)


def _check_finite(maps: Mapping[str, Tensor]) -> None:
    for name, values in maps.items():
        if not values.isfinite().all():
            raise InvalidValueError(
                f"The maps of {name} hold values that are not finite. If the model runs in "
                "float16, try bfloat16 or float32."
            )


def pack_maps(maps: Mapping[str, Tensor]) -> bytes:
    """Return maps as the bytes of a safetensors file in float16; the order of the maps does not
    matter."""
    halves = {name: halved(values) for name, values in maps.items()}
    _check_finite(halves)  # also of those that float16 cannot hold
    # One key only: safetensors writes several in an order that changes from run to run.
    return save(halves, metadata={"format": FORMAT})
