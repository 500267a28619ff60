"""Weights in few bits: bitsandbytes (Dettmers et al. 2022, 2023) and GGUF files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError
from .folder import PipelineFolder
from .index import as_dtype, home_of
from .options import BITS
from .weight_files import loading_errors


def quantized(folder: PipelineFolder, dtype: torch.dtype) -> dict[str, object]:
    """Return arguments for ``from_pretrained``: a loaded denoiser, or how to load parts; raise
    ValueError for a GGUF file that is broken or of another model."""
    options, index = folder.options, folder.index
    if options.gguf is not None:
        return _from_gguf(options.gguf, folder, dtype)
    if options.quantization not in BITS:
        return {}
    from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig

    bits = options.quantization
    given: dict[str, object] = {f"load_in_{bits}": True}
    if bits == "4bit":
        given |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    mapping = {name: home_of(index[name][0]).BitsAndBytesConfig(**given) for name in _large(index)}
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}


def _large(index: Mapping[str, Any]) -> list[str]:
    """Return the denoiser, and text encoders that are larger than CLIP."""
    found = [name for name in ("unet", "transformer") if name in index]
    for name, entry in index.items():
        match entry:
            case ["transformers", str(kind)] if name.startswith("text_encoder"):
                found += [] if kind.startswith("CLIP") else [name]
    return found


def _from_gguf(file: Path, folder: PipelineFolder, dtype: torch.dtype) -> dict[str, object]:
    import diffusers

    name = next(name for name in ("transformer", "unet") if name in folder.index)
    kind = getattr(diffusers, folder.index[name][1])
    if not hasattr(kind, "from_single_file"):
        text = f"diffusers reads no single files of a {kind.__name__}."
        raise OptionError("quantization", f"gguf:{file}", text)
    config = diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    where = {"config": str(folder.path), "subfolder": name, "local_files_only": True}
    with loading_errors(file, f"the weights of a {kind.__name__}", "Pass a file of this model."):
        model = kind.from_single_file(
            str(file), quantization_config=config, **where, **as_dtype(dtype)
        )
    return {name: model}
