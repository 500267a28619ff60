"""Facts that the files of a model tell about its call, before anything is loaded. No torch, but to
check unusual options."""

import inspect
import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import SdattnError
from ..files.records import read_object
from ..models.pipeline import Given, Options
from ..models.values import OURS, check_side, no_videos
from .locating import find_model
from .repository import HubName, Repository

# Denoisers that make no videos by themselves
_UNSAID = {"self", "prompt", "kwargs", *OURS}
_IMAGES = {"UNet2DConditionModel", "SD3Transformer2DModel", "FluxTransformer2DModel"}


def check_size(model: str, options: Options) -> None:
    """Refuse (ValueError) a width or height that a model on this machine cannot make, if its files
    tell the unit of its sizes. The loaded pipeline checks the rest."""
    unit = _size_unit(*_opened(model))
    for side in ("height", "width"):
        if unit and options.get(side) is not None:
            check_side(side, options[side], unit)


def check_frames(model: str, options: Options) -> None:
    """Refuse (ValueError) a number of frames for a model on this machine that makes images."""
    _, index = _opened(model)
    kinds = {str(entry[-1]) for entry in index.values() if isinstance(entry, list) and entry}
    is_of_images = kinds & _IMAGES and "motion_adapter" not in index
    if is_of_images and options.get("num_frames") is not None:
        raise no_videos(options["num_frames"], str(index["_class_name"]))


def check_names(
    model: str,
    names: Iterable[str],
    own: Sequence[str] = (),
    *,
    revision: str | None = None,
    config: str | None = None,
) -> None:
    """Refuse (ValueError) options that the pipeline of a model lacks, if its class is one of
    diffusers'. A hub model's class is read from one small file.

    Args:
        own: the caller's own options, which a misspelt name may mean.
        revision, config: see :func:`sdattn.load_pipeline`.
    """
    asked = list(names)
    kind = _index_of(model, revision, config).get("_class_name") if asked else None
    if not isinstance(kind, str):
        return
    import diffusers  # takes seconds, as loading the model does

    from ..models.pipeline_call import unknown_option

    pipeline = getattr(diffusers, kind, None)
    if pipeline is None or issubclass(pipeline, diffusers.ModularPipeline):
        return
    parameters = inspect.signature(pipeline.__call__).parameters
    known = [name for name in parameters if name not in _UNSAID]
    for name in asked:
        if name not in known and name != "num_frames":  # see check_frames()
            raise unknown_option(kind, name, known, own)


def _index_of(model: str, revision: str | None, config: str | None) -> Given:
    """Return the index of a folder, a hub model, or the settings of a single file."""
    path = find_model(model)
    if path is None:
        name = HubName.read(model, revision)
        with suppress(SdattnError):  # which loading the model then tells
            if name is not None and name.file is None:
                folder = Repository.find(name).fetch(["model_index.json"])
                return read_object(folder / "model_index.json")
        return {}
    if path.is_dir():
        return read_object(path / "model_index.json")
    from .single_files import Header

    return _index_of(config or Header.of_file(path).settings_name, None, None)


def _opened(model: str) -> tuple[Path, Given]:
    """Return a model's folder and its index, {} for a single file and a hub id."""
    folder = find_model(model)
    return (folder, read_object(folder / "model_index.json")) if folder else (Path(), {})


def _size_unit(folder: Path, index: Given) -> int | None:
    """Return the pixels that sides must be a multiple of, or None if the files do not tell."""
    match index:  # a cell is a latent cell, or a patch of them
        case {"unet": [_, "UNet2DConditionModel"]}:
            patch: object = 1
        case {"transformer": [_, "SD3Transformer2DModel"]}:
            patch = read_object(folder / "transformer" / "config.json").get("patch_size")
        case _:
            return None
    match read_object(folder / "vae" / "config.json"), patch:
        case {"_class_name": "AutoencoderKL", "block_out_channels": [*blocks]}, int():
            return math.lcm(8, 2 ** (len(blocks) - 1) * patch)
    return None
