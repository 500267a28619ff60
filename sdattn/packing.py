"""One image's run as files in memory, name to bytes: what a folder or a shard holds of it.

image.png  heatmaps/NN-word.png  grid.png  masks/NN-word.png  maps.safetensors
run.json           the settings, and every file's checksum
negative/  asked/  causal/     where asked for, each with heatmaps/NN-word.png, grid.png and
                               maps.safetensors, [rows, cols] by word
"""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load, save
from torch import Tensor

from . import render
from .aggregation import aggregate
from .heatmap import Heatmap
from .heatmaps import Heatmaps, finish
from .layermaps import LayerMap, LayerMaps
from .presets import Preset
from .tokens import Prompt, Token, Word

FORMAT = "sdattn-run-3"
PARTS = ("image", "overlays", "grid", "maps", "masks")
USUAL = ("image", "overlays", "grid", "maps")
MAPS = "maps.safetensors"
AFFINITY = "self-attention"  # the name among the maps of what refined them
NEEDED = ("run.json", "image.png", MAPS)  # by unpack_run()
_QUICK = 1  # zlib's level for drawings: a quarter more bytes than at 6 in a quarter of the time


def pack_run(
    image: Image.Image,
    heatmaps: Heatmaps,
    layers: LayerMaps,
    info: Mapping[str, Any],
    *,
    parts: Collection[str] = USUAL,
    more: Mapping[str, tuple[str, Sequence[Heatmap]]] | None = None,
) -> dict[str, bytes]:
    """The files of one image's run; the same run gives the same bytes.

    Args:
        image: the picture.
        heatmaps: its heatmaps.
        layers: of this one image; kept as float16.
        info: settings of the run, anything JSON can hold.
        parts: which of ``PARTS``; ``run.json`` is always there.
        more: further maps of the same picture, drawn into a folder of their own each, with the
            text that they are of: ``"negative"``, ``"asked"``, ``"causal"``.

    Returns:
        Path in the run's folder to bytes, ``run.json`` last.

    Raises:
        ValueError: a map holds values that are not finite.
    """
    tensors = _tensors(layers)
    if broken := [name for name, one in tensors.items() if not one.isfinite().all()]:
        raise ValueError(
            f"The maps of {broken[0]} hold values that are not finite. If the model runs in "
            "float16, try bfloat16 or float32."
        )
    files: dict[str, bytes] = {}
    if "image" in parts:
        files["image.png"] = _png(image)
    if "maps" in parts:
        halves = {name: one.to("cpu", torch.float16).contiguous() for name, one in tensors.items()}
        files[MAPS] = pack_maps(halves)
    files |= drawings(image, heatmaps.occurrences(), heatmaps.prompt.text, parts)
    for folder, (text, maps) in (more or {}).items():
        # a knockout that changed nothing is not to glow
        scale = (0.0, max(one.range[1] for one in maps)) if folder == "causal" else None
        drawn = drawings(image, maps, text, parts, scale)
        if "maps" in parts:
            drawn[MAPS] = pack_maps({n: one.values.half() for n, one in _named(maps).items()})
        files |= {f"{folder}/{name}": data for name, data in drawn.items()}
    document = {
        "format": FORMAT,
        **info,
        "words": [asdict(word) for word in heatmaps.prompt.words],
        "truncated": [word.text for word in heatmaps.prompt.truncated],
        "tokens": [asdict(token) for token in heatmaps.prompt.tokens],
        "columns": layers.columns,
        "preset": heatmaps.preset.to_json(),
        "passes": layers.passes,
        "layers": {
            name: {"place": one.place, "level": one.level, "heads": one.heads, "grid": one.grid}
            for name, one in layers.layers.items()
        },
        "self_attention": layers.affinity_grid,
        "files": {name: sha256(data) for name, data in files.items()},
    }
    files["run.json"] = to_json(document)
    return files


def _tensors(layers: LayerMaps) -> dict[str, Tensor]:
    """Of one image: ``[(heads,) rows, cols, tokens]`` of each layer, ``[N, N]`` of what refines."""
    found = {name: one.maps[0] for name, one in layers.layers.items()}
    return found if layers.affinity is None else {**found, AFFINITY: layers.affinity[0]}


def map_shapes(info: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in ``maps.safetensors``, as ``run.json`` tells them."""
    each_head = Preset.from_json(info["preset"]).each_head
    shapes = {
        name: (*([one["heads"]] if each_head else []), *one["grid"], len(info["columns"]))
        for name, one in info["layers"].items()
    }
    if info["self_attention"] is None:
        return shapes
    rows, cols = info["self_attention"]
    return {**shapes, AFFINITY: (rows * cols, rows * cols)}


def pack_maps(layers: Mapping[str, Tensor]) -> bytes:
    """The bytes of ``maps.safetensors``, the same for the same layers in any order."""
    # One key only: safetensors writes several in an order that changes from run to run.
    return save(dict(layers), metadata={"format": FORMAT})


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
    names = [f"{name}.png" for name in _named(maps)]
    wanted = {"overlays", "grid"}.intersection(parts)
    tiles = [one.overlay(image, scale=scale) for one in maps] if wanted else []
    if "overlays" in parts:
        files |= {f"heatmaps/{n}": _png(tile, _QUICK) for n, tile in zip(names, tiles, strict=True)}
    if "grid" in parts:
        files["grid.png"] = _png(render.grid(image, tiles, title), _QUICK)
    if "masks" in parts:
        files |= {f"masks/{n}": _mask(one, image) for n, one in zip(names, maps, strict=True)}
    return files


def _named(maps: Sequence[Heatmap]) -> dict[str, Heatmap]:
    """By number and word, as files are called."""
    return {f"{n:02d}-{file_name(one.label)}": one for n, one in enumerate(maps, start=1)}


def _mask(one: Heatmap, image: Image.Image) -> bytes:
    mask = one.mask((image.height, image.width)).numpy()
    return _png(Image.fromarray(mask.astype(np.uint8) * 255), _QUICK)


def unpack_run(
    files: Mapping[str, bytes], where: str
) -> tuple[Image.Image, Heatmaps, dict[str, Any]]:
    """What :func:`pack_run` packed: the picture, heatmaps made anew from the maps, the settings.

    Raises:
        FileNotFoundError: ``run.json``, ``image.png`` or ``maps.safetensors`` is missing.
        ValueError: it is no run of sdattn, or a part is not what the run wrote.
    """
    info = read_info(files, where)
    for part in NEEDED[1:]:
        if part not in info["files"]:
            raise FileNotFoundError(f"{where} was saved without {part}, so it cannot be shown.")
        if part not in files:
            raise missing(where, part)
        if sha256(files[part]) != info["files"][part]:
            raise ValueError(
                f"{where}/{part} is not what this run wrote: its checksum differs from run.json. "
                "Restore it or generate the run again."
            )
    prompt = Prompt(
        info["prompt"],
        tuple(Word(**{**word, "columns": tuple(word["columns"])}) for word in info["words"]),
        tuple(Token(**token) for token in info["tokens"]),
    )
    preset, layers = Preset.from_json(info["preset"]), _unpack_maps(files[MAPS], info)
    image = Image.open(io.BytesIO(files["image.png"])).convert("RGB")
    return image, finish(aggregate(layers, preset)[0], prompt, preset, info["columns"]), info


def _unpack_maps(data: bytes, info: Mapping[str, Any]) -> LayerMaps:
    tensors = load(data)  # in an order that changes from call to call
    layers = {
        name: LayerMap(one["place"], one["level"], one["heads"], tensors[name].float()[None])
        for name, one in info["layers"].items()
    }
    columns, passes = tuple(info["columns"]), info["passes"]
    if info["self_attention"] is None:
        return LayerMaps(layers, columns, passes)
    rows, cols = info["self_attention"]
    return LayerMaps(layers, columns, passes, tensors[AFFINITY].float()[None], (rows, cols))


def read_info(files: Mapping[str, bytes], where: str) -> dict[str, Any]:
    """``run.json``, checked; raises as :func:`unpack_run` does."""
    if "run.json" not in files:
        raise missing(where, "run.json")
    try:
        info = json.loads(files["run.json"].decode())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{where}/run.json is corrupt: {error}.") from error
    if not isinstance(info, dict) or info.get("format") != FORMAT:
        found = info.get("format") if isinstance(info, dict) else type(info).__name__
        raise ValueError(
            f"{where}/run.json is not of this version's format {FORMAT!r}; found {found!r}."
        )
    if not isinstance(info.get("files"), dict):
        raise ValueError(f"{where}/run.json is corrupt: it names no files.")
    return info


def missing(where: str, part: str) -> FileNotFoundError:
    return FileNotFoundError(
        f"{where} has no {part}, so it is no run's folder. Runs are made by `sdattn generate`."
    )


def file_name(word: str) -> str:
    """A word as part of a file name: letters, digits and ``-``, 1 to 40 characters."""
    safe = "".join(char if char.isalnum() else "-" for char in word)
    return "-".join(part for part in safe.split("-") if part)[:40].strip("-") or "sign"


def to_json(document: Any) -> bytes:
    """JSON for people to read too, with a newline at the end.

    Raises:
        ValueError: a number in it is not finite.
    """
    return (json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n").encode()


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _png(image: Image.Image, level: int = 6) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=level)
    return buffer.getvalue()
