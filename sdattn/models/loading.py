"""Load a pipeline, the demo models among them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .demos import lent_parts
from .devices import checked_device
from .families import family_of, registered
from .layers import find_denoiser, what_it_holds
from .locating import download, find_model
from .model_index import (
    absent_parts,
    as_dtype,
    check_whole,
    named_errors,
    read_index,
    without_weights,
)
from .quiet import no_torchvision_notices
from .single_files import load_single_file


@no_torchvision_notices()
def load_pipeline(
    model: str | Path = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load a pipeline of diffusers.

    Args:
        model: ``"demo"`` or ``"demo-mmdit"``, the small models inside this package, Stable
            Diffusion 1 and 3 in miniature; a folder that diffusers saved; a single ``.safetensors``
            checkpoint of SD 1.x, 2.x or SDXL (diffusers fetches its configuration from the hub); or
            a hub id, ``"owner/name"``.
        device: by default CUDA where there is one, else MPS, else the CPU.
        dtype: by default float16 on CUDA, float32 elsewhere.

    Returns:
        The diffusers pipeline, on ``device``.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: this machine has no such device; the folder holds no pipeline, asks for code
            of its own or has pickles only, see :func:`sdattn.models.model_index.read_index`; or
            the file is no checkpoint that is known.
        OSError: the hub cannot be reached or has no such model.
        TypeError: the pipeline's denoiser is none that is known.
    """
    import diffusers

    device = checked_device(device)
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    path = find_model(model)
    if path is not None and path.is_file():
        pipe = load_single_file(path, dtype)
    else:
        folder = path or download(str(model))
        # Judged by its files first: diffusers would run code that they name.
        index = read_index(folder)
        parts = {**absent_parts(index), **lent_parts(folder, index, dtype)}
        with named_errors(folder):
            _check_family(folder, index)
            pipe = diffusers.DiffusionPipeline.from_pretrained(
                folder, use_safetensors=True, **parts, **as_dtype(dtype)
            )
        # Weights that the files lack stay without values, on torch's meta device.
        models = pipe.components.items()
        check_whole(folder, {k: part for k, part in models if isinstance(part, torch.nn.Module)})
        pipe.register_to_config(_name_or_path=path or str(model))
    find_denoiser(pipe)
    return pipe.to(device)


def _check_family(folder: Path, index: Mapping[str, Any]) -> None:
    """Refuse a denoiser of no known family before its weights are read, which takes long."""
    import diffusers

    for name in ("unet", "transformer"):
        match index.get(name):
            case ["diffusers", str(kind)] if cls := getattr(diffusers, kind, None):
                lists = (family.lists(base) for base in cls.__mro__ for family in registered())
                # Not by its name: build it without weights and look at its parts.
                if not any(lists):  # it may be recognised by its parts
                    model = without_weights(cls, folder / name)
                    asked = f"Asked to capture a {index['_class_name']}"
                    family_of(model, f"{asked}, which {what_it_holds(None, model)}")
