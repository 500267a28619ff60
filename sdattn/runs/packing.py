"""One image's run as files in memory, name to bytes: what a folder or a shard holds of it.

image.png  heatmaps/NN-word.png  grid.png  masks/NN-word.png  report.html  maps.safetensors
steps.safetensors  heads.safetensors        where kept, of the words' columns
run.json           the settings, every file's checksum, and one of its own
negative/  asked/  causal/     where asked for, each with heatmaps/NN-word.png, grid.png and
                               maps.safetensors, [rows, cols] by word
"""

from __future__ import annotations

import io
import re
import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save
from torch import Tensor

from ..files.writing import sha256
from ..maps import render
from ..maps.heatmap import Heatmap
from ..maps.layermaps import LayerMaps
from .imagerun import ImageRun
from .info import (
    FORMAT,
    FURTHER,
    HEADS,
    MAPS,
    STEPS,
    DetailsEntry,
    FurtherEntry,
    LayerEntry,
    RunInfo,
)
from .report import report

PARTS = ("image", "overlays", "grid", "maps", "masks", "report")
USUAL = ("image", "overlays", "grid", "maps", "report")
# A file that a run's folder can have, by its path in it
RUN_FILE = re.compile(
    r"image\.png|report\.html|(maps|steps|heads)\.safetensors|run\.json"
    rf"|(({'|'.join(FURTHER)})/)?(grid\.png|maps\.safetensors|(heatmaps|masks)/[^/]+\.png)"
)
AFFINITY = "self-attention"  # the name among the maps of what refined them
# Drawings: about the bytes of zlib's quickest level in three quarters of its time
_QUICK = {"compress_level": 1, "compress_type": zlib.Z_RLE}


class Packed(NamedTuple):
    """A run's files by their paths in its folder, ``run.json`` last, and what that says."""

    info: RunInfo
    files: dict[str, bytes]


def pack_run(run: ImageRun, parts: Collection[str] = USUAL) -> Packed:
    """The files of one image's run; the same run gives the same bytes.

    Args:
        run: its maps are kept as float16.
        parts: which of ``PARTS``; ``run.json`` is always there. What was kept of single steps and
            heads, and further maps, each drawn into a folder of their own, go with ``maps``.

    Raises:
        ValueError: a map holds values that are not finite.
    """
    tensors = {MAPS: _tensors(run.layers)}
    for name, one in ((STEPS, run.details.steps), (HEADS, run.details.heads)):
        if one is not None:
            tensors[name] = {layer: _unbatched(held.maps) for layer, held in one.layers.items()}
    _check_finite(tensors)
    files: dict[str, bytes] = {}
    if "image" in parts:
        files["image.png"] = _png(run.image)
    if "maps" in parts:
        files |= {name: pack_maps(held) for name, held in tensors.items()}
    heatmaps = run.heatmaps
    files |= drawings(run.image, heatmaps.occurrences(), heatmaps.prompt.text, parts)
    for folder, (text, maps) in run.more.items():
        # a knockout that changed nothing is not to glow
        scale = (0.0, max(one.range[1] for one in maps)) if folder == "causal" else None
        drawn = drawings(run.image, maps, text, parts, scale)
        if "maps" in parts:
            names = named(one.label for one in maps)
            drawn[MAPS] = pack_maps({n: m.values for n, m in zip(names, maps, strict=True)})
        files |= {f"{folder}/{name}": data for name, data in drawn.items()}
    if "report" in parts:
        files["report.html"] = report(run)
    info = _info(run, files)
    return Packed(info, {**files, "run.json": info.sealed()})


def _info(run: ImageRun, files: Mapping[str, bytes]) -> RunInfo:
    """``run.json`` of a run with these files."""
    layers, details, prompt = run.layers, run.details, run.heatmaps.prompt
    kept = details.steps or details.heads
    return RunInfo(
        **vars(run.settings.alone()),
        words=prompt.words,
        truncated=[word.text for word in prompt.truncated],
        tokens=prompt.tokens,
        columns=layers.columns,
        preset=run.heatmaps.preset,
        passes=layers.passes,
        layers={
            name: LayerEntry(layer.place, layer.level, layer.heads, layer.grid)
            for name, layer in layers.layers.items()
        },
        self_attention=layers.affinity_grid,
        details=DetailsEntry(
            None if details.steps is None else details.calls,
            None if details.heads is None else details.head_numbers,
            kept.columns if kept else (),
        ),
        more={
            name: FurtherEntry(text, tuple((one.label, one.columns) for one in maps))
            for name, (text, maps) in run.more.items()
        },
        files={name: sha256(data) for name, data in files.items()},
    )


def _check_finite(tensors: Mapping[str, Mapping[str, Tensor]]) -> None:
    for held in tensors.values():
        if broken := [name for name, one in held.items() if not one.isfinite().all()]:
            raise ValueError(
                f"The maps of {broken[0]} hold values that are not finite. If the model runs in "
                "float16, try bfloat16 or float32."
            )


def _unbatched(maps: Tensor) -> Tensor:
    """``[heads, ...]`` of ``[1, heads, ...]``; steps, ``[steps, ...]``, as they are."""
    return maps[0] if maps.dim() == 5 else maps


def _tensors(layers: LayerMaps) -> dict[str, Tensor]:
    """Of one image: ``[(heads,) rows, cols, tokens]`` of each layer, ``[N, N]`` of what refines."""
    found = {name: one.maps[0] for name, one in layers.layers.items()}
    return found if layers.affinity is None else {**found, AFFINITY: layers.affinity[0]}


def pack_maps(maps: Mapping[str, Tensor]) -> bytes:
    """Maps as the bytes of a safetensors file in float16, the same for the same maps in any
    order."""
    halves = {name: one.to("cpu", torch.float16).contiguous() for name, one in maps.items()}
    # One key only: safetensors writes several in an order that changes from run to run.
    return save(halves, metadata={"format": FORMAT})


def drawings(
    image: Image.Image,
    maps: Sequence[Heatmap],
    title: str,
    parts: Collection[str] = USUAL,
    scale: tuple[float, float] | None = None,
) -> dict[str, bytes]:
    """``heatmaps/NN-word.png`` for each map, ``grid.png``, and ``masks/NN-word.png`` (255 where a
    map lies in the upper half of its range), as asked. ``scale`` is that of all maps; by default
    each has its own range."""
    files: dict[str, bytes] = {}
    names = [f"{name}.png" for name in named(one.label for one in maps)]
    wanted = {"overlays", "grid"}.intersection(parts)
    tiles = [one.overlay(image, scale=scale) for one in maps] if wanted else []
    if "overlays" in parts:
        files |= {
            f"heatmaps/{n}": _png(tile, **_QUICK) for n, tile in zip(names, tiles, strict=True)
        }
    if "grid" in parts:
        files["grid.png"] = _png(render.grid(image, tiles, title), **_QUICK)
    if "masks" in parts:
        files |= {f"masks/{n}": _mask(one, image) for n, one in zip(names, maps, strict=True)}
    return files


def named(labels: Iterable[str]) -> list[str]:
    """Names of files for maps: number and word."""
    return [f"{n:02d}-{file_name(label)}" for n, label in enumerate(labels, start=1)]


def _mask(one: Heatmap, image: Image.Image) -> bytes:
    mask = one.mask((image.height, image.width)).numpy()
    return _png(Image.fromarray(mask.astype(np.uint8) * 255), **_QUICK)


def file_name(word: str) -> str:
    """A word as part of a file name: letters, digits and ``-``, 1 to 40 characters."""
    safe = "".join(char if char.isalnum() else "-" for char in word)
    return "-".join(part for part in safe.split("-") if part)[:40].strip("-") or "sign"


def _png(image: Image.Image, **packing: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", **packing)
    return buffer.getvalue()
