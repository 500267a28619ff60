"""Checksums of what determines a run's files: a model's weights, an item's fields."""

import hashlib
import json
from collections.abc import Mapping

import torch

from ..files.writing import sha256
from ..models.pipeline import Pipeline

_BLOCK = 2**22  # numbers added up at a time


def digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=list)
    return sha256(text.encode())[:16]


def digest_model(pipe: Pipeline) -> str:
    """Return a checksum of a loaded pipeline: its parts' configurations and every weight.

    Bit patterns of weights are summed along rows and columns: the same on every device.
    """
    parts: dict[str, list[object]] = {"": [type(pipe).__name__, _config(pipe)]}
    for name, part in pipe.components.items():
        parts[name] = [type(part).__name__, _config(part)]
        if hasattr(part, "get_vocab"):  # which tokens a text becomes
            parts[name].append([part.get_vocab(), part.model_max_length])
        if isinstance(part, torch.nn.Module):
            parts[name].append({key: _sum(weight) for key, weight in _weights(part).items()})
            # A LoRA's scale is not one of its weights.
            scales = []
            for path, module in part.named_modules():
                scaling = getattr(module, "scaling", None)
                if hasattr(module, "base_layer") and isinstance(scaling, dict):
                    scales.append([path, scaling])
            if scales:
                parts[name].append(scales)
    return digest(parts)


def _weights(model: torch.nn.Module) -> Mapping[str, torch.Tensor]:
    """Return a model's weights, even if they are elsewhere, with hooks of accelerate."""
    weights = model.state_dict()
    if any(weight.is_meta for weight in weights.values()):
        from accelerate.utils.modeling import get_state_dict_offloaded_model

        weights = get_state_dict_offloaded_model(model)
    return weights


def _config(part: object) -> dict[str, object]:
    held_config = getattr(part, "config", {})
    config = (
        held_config.to_diff_dict() if hasattr(held_config, "to_diff_dict") else dict(held_config)
    )
    apart = ("transformers_version", "dtype", "torch_dtype")
    settings = {k: value for k, value in config.items() if not k.startswith("_") and k not in apart}
    return json.loads(json.dumps(settings, default=str))


def _sum(tensor: torch.Tensor) -> list[object]:
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    # As a matrix of bit patterns: two exchanged weights change a sum of a row or of a column.
    rows = len(tensor) if tensor.ndim and tensor.numel() else 1
    bits = tensor.detach().contiguous().view(whole).reshape(rows, -1)
    by_column = torch.zeros(bits.shape[1], dtype=torch.int64, device=bits.device)
    by_row = []
    # In blocks: torch copies the summands to int64.
    for block in bits.split(max(1, _BLOCK // max(1, bits.shape[1]))):
        by_column += block.sum(0, dtype=torch.int64)
        by_row.append(block.sum(1, dtype=torch.int64))
    sums = hashlib.sha256()
    for part in (by_column, torch.cat(by_row)):
        sums.update(part.cpu().numpy().tobytes())
    return [str(tensor.dtype), list(tensor.shape), sums.hexdigest()]
