"""Facts that the files of a model tell about its call, before anything is loaded. No torch."""

import math
from pathlib import Path
from typing import Any

from ..files.records import read_object
from ..models.pipeline import Options
from ..models.values import check_side, no_videos
from .locating import find_model

_UNET = "UNet2DConditionModel"
_IMAGES = {_UNET, "SD3Transformer2DModel", "FluxTransformer2DModel"}  # make no videos by themselves
_SIZED = {_UNET, "SD3Transformer2DModel"}  # a cell is a latent cell, or a patch of them
_UNIT = 8  # pixels, of every family here


def check_size(model: str, options: Options) -> None:
    """Refuse a width or height that a model on this machine cannot make, if its files tell the unit
    of its sizes. The loaded pipeline checks the rest.

    Raises:
        ValueError: it cannot make that.
    """
    folder, index = _opened(model)
    name, kind = _denoiser(index)
    unit = _size_unit(folder, name) if folder and kind in _SIZED else None
    for side in ("height", "width") if unit else ():
        if unit and options.get(side) is not None:
            check_side(side, options[side], unit)


def check_frames(model: str, options: Options) -> None:
    """Refuse a number of frames for a model on this machine that makes images.

    Raises:
        ValueError: it does.
    """
    _, index = _opened(model)
    is_of_images = _denoiser(index)[1] in _IMAGES and "motion_adapter" not in index
    if is_of_images and options.get("num_frames") is not None:
        raise no_videos(options["num_frames"], str(index["_class_name"]))


def _opened(model: str) -> tuple[Path | None, dict[str, Any]]:
    """Return a model's folder and its index, or None and {} for a single file and a hub id."""
    folder = find_model(model)
    return (
        (folder, read_object(folder / "model_index.json"))
        if folder and folder.is_dir()
        else (None, {})
    )


def _denoiser(index: dict[str, Any]) -> tuple[str, str]:
    """Return the name and the class of a pipeline's denoiser, or two empty texts."""
    for name in ("unet", "transformer"):
        match index.get(name):
            case [_, str(kind)]:
                return name, kind
    return "", ""


def _size_unit(folder: Path, denoiser: str) -> int | None:
    """Return the pixels that sides must be a multiple of, or None if the files do not tell."""
    vae = read_object(folder / "vae" / "config.json")
    blocks = vae.get("block_out_channels")
    patch = read_object(folder / denoiser / "config.json").get("patch_size", 1)
    if vae.get("_class_name") != "AutoencoderKL" or not isinstance(blocks, list):
        return None
    return math.lcm(_UNIT, 2 ** (len(blocks) - 1) * patch) if isinstance(patch, int) else None
