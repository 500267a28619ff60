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
from .parts import HEADS, MAPS, READ, SPOTS, STEPS, VIDEOS


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
            image=image,
            heatmaps=heatmaps_from(layers, info.read_prompt, info.preset),
            layers=layers,
            settings=info,
            details=_unpack_details(files, info),
            more={n: _unpack_further(files[f"{n}/{MAPS}"], info, n) for n in info.more},
            video=_unpack_video(files, info, where),
        )
    except Exception as error:  # any error from a document that someone else made
        raise InvalidValueError(
            f"{where}: its maps and its run.json do not go together "
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
    name = next((name for name in VIDEOS if name in files), None)
    if name is None:
        return Video(partial(_refuse_video, where), rate, info.frames)
    file = f"{where}/{name}"
    read = partial(read_video, files[name], VIDEOS[name], file, info.frames, rate)
    return Video(read, rate, info.frames)


def _refuse_video(where: str) -> NoReturn:
    raise MissingFileError(
        f"{where} was saved without its video, so it cannot be shown. Its maps are run.heatmaps."
    )


def _check(files: Mapping[str, bytes], info: RunInfo, where: str) -> None:
    for name in ("image.png", MAPS):
        if name not in info.files:
            raise MissingFileError(f"{where} was saved without {name}, so it cannot be shown.")
    # A file that run.json names must be there, and be the one that was written.
    for name in [name for name in READ if name in info.files]:
        if name not in files:
            raise missing(where, name)
        if sha256(files[name]) != info.files[name]:
            raise InvalidValueError(
                f"{where}/{name} is not what this run wrote: its checksum differs from run.json. "
                "Restore it or generate the run again."
            )


def _load(data: bytes) -> dict[str, Tensor]:
    """Return the tensors of a file of maps; raise ValueError if one holds what no run writes."""
    tensors = load(data)
    for name, values in tensors.items():
        if not values.isfinite().all():
            raise InvalidValueError(f"the maps of {name} hold values that are not finite")
    return tensors


def _unpack_layers(data: bytes, info: RunInfo) -> LayerMaps:
    tensors = _load(data)  # in an order that changes from call to call
    shapes = map_shapes(info)
    for name, shape in shapes.items():
        _check_shape(tensors, name, shape)
    foreign = tensors.keys() - shapes.keys()
    if foreign:
        raise InvalidValueError(f"{min(foreign)} is no layer of the run")
    layers = {}
    for name, layer in info.layers.items():
        layers[name] = _layer_map(layer, tensors[name].float()[None])
    affinity = tensors[AFFINITY].float()[None] if AFFINITY in tensors else None
    return LayerMaps(layers, info.columns, info.passes, affinity, info.self_attention)


def _layer_map(entry: LayerEntry, maps: Tensor) -> LayerMap:
    return LayerMap(entry.place, entry.level, entry.heads, maps, len(entry.grid) == 3)


def _unpack_details(files: Mapping[str, bytes], info: RunInfo) -> Details:
    entry = info.details
    head_numbers = entry.heads if isinstance(entry.heads, tuple) else None
    spots = None
    if entry.spots is not None:
        tensors = _load(files[SPOTS])
        _check_shape(tensors, "spots", entry.spots)
        spots = tensors["spots"].float()
    return Details(
        steps=_unpack_each(files, info, STEPS, len(entry.steps or ())),
        calls=entry.steps or (),
        heads=_unpack_each(files, info, HEADS, None if head_numbers is None else len(head_numbers)),
        head_numbers=head_numbers or "all",
        spots=spots,
    )


def _unpack_each(
    files: Mapping[str, bytes], info: RunInfo, name: str, number: int | None
) -> LayerMaps | None:
    """Return the maps of single steps or heads, ``number`` of them if it is known, in a file; None
    if there is no such file."""
    if name not in files:
        return None
    columns = info.details.columns
    tensors = _load(files[name])
    layers = {}
    for layer, entry in info.layers.items():
        if layer in tensors:
            maps = tensors[layer].float()  # [steps or heads, (frames,) rows, cols, columns]
            count = len(maps) if number is None else number
            _check_shape(tensors, layer, (count, *entry.grid, len(columns)))
            layers[layer] = _layer_map(entry, maps[None] if name == HEADS else maps)
    if not layers:
        raise InvalidValueError(f"{name} holds no layer of the run")
    return LayerMaps(layers, columns, passes=1)


def _unpack_further(data: bytes, info: RunInfo, name: str) -> Further:
    further = info.more[name]
    tensors = _load(data)
    labels = [label for label, _ in further.maps]
    for key in named(labels):
        _check_shape(tensors, key, (*tensors[key].shape[: 2 if info.frames is None else 3],))
    maps = []
    for key, (label, columns) in zip(named(labels), further.maps, strict=True):
        maps.append(Heatmap(label, tensors[key].float(), columns))
    return Further(further.text, maps)


def _check_shape(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> None:
    actual = tuple(tensors[name].shape) if name in tensors else None
    if actual != shape:
        raise InvalidValueError(f"{name} has the shape {actual}, where {shape} is expected")


def map_shapes(info: RunInfo) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in ``maps.safetensors`` according to ``run.json``."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, entry in info.layers.items():
        heads = [entry.heads] if info.preset.each_head else []
        shapes[name] = (*heads, *entry.grid, len(info.columns))
    if info.self_attention is None:
        return shapes
    cells = math.prod(info.self_attention)
    # if frames attend only to themselves, each has its own
    frames = next(iter(info.layers.values())).grid[:-2] if len(info.self_attention) == 2 else ()
    return {**shapes, AFFINITY: (*frames, cells, cells)}
