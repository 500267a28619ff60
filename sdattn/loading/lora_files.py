"""LoRA files, checked before diffusers and peft read them.

Both use names as patterns and metadata as a configuration, and ignore what is missing.
"""

import json
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from ..errors import InvalidValueError
from ..files.terminal import shown
from .locating import needs_the_hub
from .weight_files import WeightFile, read_weights

_STANDARD = "pytorch_lora_weights.safetensors"
_METADATA = "lora_adapter_metadata"  # diffusers' key for peft's configuration
# The two matrices of a layer: lora_A and lora_B in diffusers and peft, down and up in trainers.
_DOWN = re.compile(r"(?<=[._])(lora_A(?=\.)|down(?=\.weight$))")
_UP = re.compile(r"(?<=[._])(lora_B(?=\.)|up(?=\.weight$))")
_OTHER = {"lora_A": "lora_B", "lora_B": "lora_A", "down": "up", "up": "down"}
_NAME = re.compile(r"[\w.-]{1,400}", re.ASCII)
_LARGE = re.compile(r"\d{5}")  # diffusers loops up to the numbers in names
_QUANTIFIER = re.compile(r"[*+{]|(?<!\()\?")
_MOST_RANK, _MOST_ALPHA = 65_536, 1e6
_TOLD = ["peft_type", "task_type", "revision", "peft_version"]
_TOLD += ["base_model_name_or_path", "auto_mapping"]


def lora_file(path: str) -> Path:
    """Return the file of a LoRA that is a file, a folder, or on the hub; raise ValueError if there
    is none, or several and none has diffusers' name."""
    here = Path(path).expanduser()
    if here.is_file():
        return here
    if here.is_dir():
        return here / _one_of(path, [file.name for file in here.iterdir()])
    from huggingface_hub import hf_hub_download, list_repo_files

    what = f"the LoRA {path!r}, which is not a local file,"
    with needs_the_hub(what):
        names = list_repo_files(path)
    name = _one_of(path, names)
    with needs_the_hub(what):
        return Path(hf_hub_download(path, name))


def read_lora(file: Path) -> list[str]:
    """Return the names of a LoRA's first matrices, one per layer; raise ValueError if the file is
    broken, holds something else, or its matrices, numbers or metadata are not a LoRA's."""
    weights = read_weights(file)
    for name in weights.entries:
        if not _NAME.fullmatch(name) or _LARGE.search(name):
            _refuse(file, f"the name {shown(name)}, and no layer is called so")
    first = list(_pairs(weights))
    if not first and not any(".lokr_" in name for name in weights.entries):
        _refuse(file, f"{weights.told()}, but no pair of LoRA matrices")
    _check_values(weights)
    if text := weights.metadata.get(_METADATA):
        _check_metadata(file, text, len(weights.entries))
    return first


def _one_of(path: str, names: list[str]) -> str:
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if _STANDARD in files:
        return _STANDARD
    if len(files) != 1:
        found = f"several .safetensors files ({', '.join(files[:3])}…)" if files else "none"
        raise InvalidValueError(
            f"The LoRA {path} should be one .safetensors file, and it has {found}. Pass the file."
        )
    return files[0]


def _pairs(weights: WeightFile) -> Iterator[str]:
    """Yield each layer's first matrix; raise ValueError if the second one does not match."""
    for name, entry in weights.entries.items():
        if not name.endswith(".weight") or not (found := _DOWN.search(name) or _UP.search(name)):
            continue
        other = f"{name[: found.start()]}{_OTHER[found[0]]}{name[found.end() :]}"
        if other not in weights.entries:
            _refuse(weights.path, f"{shown(name, 200)} without {_OTHER[found[0]]} next to it")
        if _DOWN.search(name):
            down, up = entry.shape, weights.entries[other].shape
            fits = min(len(down), len(up)) > 1 and down[0] == up[1] and 0 not in (*down, *up)
            if not fits or down[0] > _MOST_RANK:
                both = f"{list(down)} and {list(up)}"
                _refuse(weights.path, f"matrices of {both} as {shown(name, 200)} and its other")
            yield name


def _check_values(weights: WeightFile) -> None:
    import torch
    from safetensors import safe_open

    with safe_open(weights.path, framework="pt") as file:
        for name, entry in weights.entries.items():
            if name.endswith(".alpha") and (math.prod(entry.shape) != 1 or len(entry.shape) > 1):
                _refuse(weights.path, f"{shown(name, 200)} of {list(entry.shape)}, not one number")
            if not (entry.is_float or name.endswith(".alpha")) or 0 in entry.shape:
                continue
            low, high = torch.aminmax(file.get_tensor(name).float())
            if not math.isfinite(low) or not math.isfinite(high):
                _refuse(weights.path, f"numbers that are not finite in {shown(name, 200)}")
            if name.endswith(".alpha") and abs(float(high)) > _MOST_ALPHA:
                _refuse(weights.path, f"{shown(name, 200)} = {float(high):g}")


def _check_metadata(file: Path, text: str, number: int) -> None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"metadata that are not JSON ({type(error).__name__})", error)
    if not isinstance(found, dict):
        _refuse(file, f"metadata that are a {type(found).__name__}, not an object")
    from peft import LoraConfig

    usual, most = LoraConfig().to_dict(), max(number, 100)
    for name, value in found.items():
        field = name.rpartition(".")[2]
        if field in _FIELDS:
            long = isinstance(value, (list, dict)) and len(value) > most
            known = _FIELDS[field](value) and not long
        else:  # only the default: others name modules to import, files to read, layers to repeat
            known = not value or (field in usual and usual[field] == value)
        if not known:
            _refuse(file, f"the metadata {shown(name)}: {shown(value)}, which no LoRA here has")


def _are_names(value: object) -> bool:
    if isinstance(value, list):
        return all(isinstance(name, str) and _NAME.fullmatch(name) for name in value)
    return value is None or _is_pattern(value)


def _are(check: Callable[[Any], bool], value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_pattern(name) and check(number) for name, number in value.items()
    )


def _is_pattern(value: object) -> bool:
    """Check a regular expression that peft would match with each layer's name: it must be quick."""
    if not isinstance(value, str) or len(value) > 1000:
        return False
    try:
        re.compile(value)
    except (re.error, RecursionError, OverflowError):
        return False
    return len(_QUANTIFIER.findall(value)) <= 3 and not re.search(r"\)[*+{]", value)


def _is_number(lowest: float, highest: float, *kinds: type) -> Callable[[Any], bool]:
    return lambda value: type(value) in kinds and lowest <= value <= highest  # NaN is not


def _is_flag(value: object) -> bool:
    return type(value) is bool


_is_rank = _is_number(1, _MOST_RANK, int)
_is_alpha = _is_number(-_MOST_ALPHA, _MOST_ALPHA, int, float)
_FIELDS: dict[str, Callable[[Any], bool]] = {  # fields of peft's LoraConfig that may be set
    "r": _is_rank,
    "lora_alpha": _is_alpha,
    "lora_dropout": lambda value: _is_number(0, 1, int, float)(value) and value < 1,
    "rank_pattern": partial(_are, _is_rank),
    "alpha_pattern": partial(_are, _is_alpha),
    **dict.fromkeys(("target_modules", "exclude_modules"), _are_names),
    **dict.fromkeys(("use_rslora", "use_dora", "lora_bias", "fan_in_fan_out"), _is_flag),
    "inference_mode": _is_flag,
    # other values change the model's own weights
    "init_lora_weights": lambda value: _is_flag(value) or value == "gaussian",
    # informative, not used
    **dict.fromkeys(_TOLD, lambda value: value is None or isinstance(value, (str, dict))),
}


def _refuse(file: Path, found: str, error: Exception | None = None) -> NoReturn:
    raise InvalidValueError(
        f"{file} is not a LoRA that can be loaded: it has {found}. Get the file again, or pass "
        "another one."
    ) from error
