"""Read the files of one image's run, each checked against ``run.json``."""

import io
import math
from collections.abc import Mapping
from functools import partial
from typing import NoReturn

from PIL import Image
from safetensors.torch import load
from torch import Tensor

from ..errors import InvalidValueError, MissingFileError
from ..files.videos import Video, read_video
from ..files.writing import sha256
from ..maps.details import Details
from ..maps.heatmap import Heatmap
from ..maps.layermaps import LayerMap, LayerMaps
from .drawings import named
from .imagerun import Further, ImageRun
from .info import LayerEntry, RunInfo, missing, read_info
from .packing import AFFINITY, heatmaps_from
from .parts import HEADS, MAPS, NEEDED, READ, SPOTS, STEPS, VIDEOS


def unpack_run(files: Mapping[str, bytes], where: str) -> ImageRun:
    """Return the run that :func:`sdattn.runs.packing.pack_run` packed, from the existing files
    among ``READ``; the heatmaps are made again from the maps.

    Raises:
        FileNotFoundError: a file that the run wrote is missing.
        ValueError: it is no run of sdattn, or a part was changed.
    """
    info = read_info(files, where)
    _check(files, info, where)
    files = {name: data for name, data in files.items() if name in info.files}
    image = open_png(files["image.png"], f"{where}/image.png")
    try:
        layers = _unpack_layers(files[MAPS], info)
        return ImageRun(
            image,
            heatmaps_from(layers, info.read_prompt, info.preset),
            layers,
            info,
            _unpack_details(files, info),
            {name: _unpack_further(files[f"{name}/{MAPS}"], info, name) for name in info.more},
            video=_unpack_video(files, info, where),
        )
    except Exception as error:  # any error from a document that someone else made
        raise InvalidValueError(
            f"{where}: its maps differ from its run.json "
            f"({type(error).__name__}: {error}). Restore the folder or generate the run again."
        ) from error


def open_png(data: bytes, where: str) -> Image.Image:
    """Open a PNG as RGB, and nothing else: other readers of Pillow start programs of their own."""
    try:
        return Image.open(io.BytesIO(data), formats=["PNG"]).convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise InvalidValueError(
            f"{where} is not a readable PNG image: {error}. Restore it or generate the run again."
        ) from error


def _unpack_video(files: Mapping[str, bytes], info: RunInfo, where: str) -> Video | None:
    """Return the video, read when it is first looked at; refuse then if it was not saved."""
    if info.frames is None:
        return None
    rate = info.frame_rate or 1.0
    number = info.frames
    for name in VIDEOS.keys() & files.keys():  # one of them
        read = partial(read_video, files[name], VIDEOS[name], f"{where}/{name}", number, rate)
        return Video(read, rate, number)
    return Video(partial(_refuse_video, where), rate, number)


def _refuse_video(where: str) -> NoReturn:
    raise MissingFileError(
        f"{where} was saved without its video, so it cannot be shown. Its maps are run.heatmaps."
    )


def _check(files: Mapping[str, bytes], info: RunInfo, where: str) -> None:
    for part in NEEDED[1:]:
        if part not in info.files:
            raise MissingFileError(f"{where} was saved without {part}, so it cannot be shown.")
    # A file that run.json names must be there, and be the one that was written.
    for part in READ[1:]:
        if part not in info.files:
            continue
        if part not in files:
            raise missing(where, part)
        if sha256(files[part]) != info.files[part]:
            raise InvalidValueError(
                f"{where}/{part} is not what this run wrote: its checksum differs from run.json. "
                "Restore it or generate the run again."
            )


def _unpack_layers(data: bytes, info: RunInfo) -> LayerMaps:
    tensors = load(data)  # in an order that changes from call to call
    shapes = map_shapes(info)
    for name, shape in shapes.items():
        _check_shape(tensors, name, shape)
    if foreign := tensors.keys() - shapes.keys():
        raise InvalidValueError(f"{min(foreign)} is no layer of the run")
    layers = {
        name: _layer_map(layer, tensors[name].float()[None]) for name, layer in info.layers.items()
    }
    if info.self_attention is None:
        return LayerMaps(layers, info.columns, info.passes)
    affinity = tensors[AFFINITY].float()[None], info.self_attention
    return LayerMaps(layers, info.columns, info.passes, *affinity)


def _layer_map(entry: LayerEntry, maps: Tensor) -> LayerMap:
    return LayerMap(entry.place, entry.level, entry.heads, maps, len(entry.grid) == 3)


def _unpack_details(files: Mapping[str, bytes], info: RunInfo) -> Details:
    kept = info.details

    def layers(name: str) -> LayerMaps | None:
        if name not in files:
            return None
        tensors = load(files[name])
        found = {}
        for layer, entry in info.layers.items():
            if layer in tensors:
                maps = tensors[layer].float()  # [steps or heads, rows, cols, columns]
                _check_shape(tensors, layer, (len(maps), *entry.grid, len(kept.columns)))
                if name == STEPS:
                    _check_shape(tensors, layer, (len(kept.steps or ()), *maps.shape[1:]))
                elif isinstance(kept.heads, tuple):
                    _check_shape(tensors, layer, (len(kept.heads), *maps.shape[1:]))
                maps = maps[None] if name == HEADS else maps
                found[layer] = _layer_map(entry, maps)
        if not found:
            raise InvalidValueError(f"{name} holds no layer of the run")
        return LayerMaps(found, kept.columns, passes=1)

    numbers = kept.heads if isinstance(kept.heads, tuple) else "all"
    spots = None
    if kept.spots is not None:
        held = load(files[SPOTS])
        _check_shape(held, "spots", kept.spots)
        spots = held["spots"].float()
    found = layers(STEPS), kept.steps or (), layers(HEADS), numbers, spots
    return Details(*found)  # type: ignore[arg-type]


def _unpack_further(data: bytes, info: RunInfo, name: str) -> Further:
    further = info.more[name]
    tensors = load(data)
    labels = [label for label, _ in further.maps]
    for key in named(labels):
        _check_shape(tensors, key, (*tensors[key].shape[: 2 if info.frames is None else 3],))
    maps = [
        Heatmap(label, tensors[key].float(), columns)
        for key, (label, columns) in zip(named(labels), further.maps, strict=True)
    ]
    return Further(further.text, maps)


def _check_shape(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    found = tuple(tensors[name].shape) if name in tensors else None
    if found != shape:
        raise InvalidValueError(f"{name} has the shape {found}, where {shape} is expected")


def map_shapes(info: RunInfo) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in ``maps.safetensors`` according to ``run.json``."""
    shapes = {
        name: (*([entry.heads] if info.preset.each_head else []), *entry.grid, len(info.columns))
        for name, entry in info.layers.items()
    }
    if info.self_attention is None:
        return shapes
    cells = math.prod(info.self_attention)
    # if frames attend only to themselves, each has its own
    frames = next(iter(info.layers.values())).grid[:-2] if len(info.self_attention) == 2 else ()
    return {**shapes, AFFINITY: (*frames, cells, cells)}
