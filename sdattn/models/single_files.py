"""Checkpoints of one ``.safetensors`` file, as they were trained: SD 1.x, 2.x and SDXL."""

from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidValueError
from .families.unet import CHECKPOINTS
from .hub import needs_the_hub
from .loading_options import LoadingOptions
from .model_index import as_dtype


def load_single_file(path: Path, dtype: torch.dtype, options: LoadingOptions) -> Any:
    import diffusers
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix != ".safetensors":  # by which diffusers decides how to read it
            raise SafetensorError("its name does not end in .safetensors")
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except SafetensorError as error:
        raise InvalidValueError(
            f"{path} is no .safetensors file ({error}). Pickled checkpoints are not read; convert "
            "them to safetensors first."
        ) from error
    for beginning, pipeline in CHECKPOINTS.items():
        if any(name.startswith(beginning) for name in names):
            with needs_the_hub(f"the configuration of {path}"):
                kind = getattr(diffusers, pipeline)
                return kind.from_single_file(str(path), **as_dtype(dtype))
    raise InvalidValueError(
        f"{path} holds {len(names)} tensors, but not the text encoder of an SD 1.x, 2.x or SDXL "
        "checkpoint. Pass the whole checkpoint, or a diffusers folder."
    )
