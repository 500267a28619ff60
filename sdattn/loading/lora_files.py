"""LoRA files, found and checked before diffusers and peft read them."""

import json
import re
from pathlib import Path
from typing import NoReturn

from ..errors import InvalidValueError
from ..files.terminal import shown
from .locating import needs_the_hub
from .weight_files import read_weights

_STANDARD = "pytorch_lora_weights.safetensors"
_METADATA = "lora_adapter_metadata"  # diffusers' key for peft's configuration
_NAME = re.compile(r"[\w.-]{1,400}", re.ASCII)
_LARGE = re.compile(r"\d{5}")  # diffusers loops up to the numbers in names
_OTHER_KINDS = {".lokr_": "LoKr", ".hada_": "LoHa"}
_LARGEST = 65_536
_QUANTIFIER = re.compile(r"[*+{]|(?<!\()\?")
_HARMLESS = {  # fields of peft's LoraConfig that may be set
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "target_modules", "exclude_modules"),
    *("lora_dropout", "peft_type", "task_type", "revision", "peft_version", "auto_mapping"),
    "base_model_name_or_path",
}


def checked_file(path: str) -> Path:
    """Return the file of a LoRA, given as a file, a folder or a hub id.

    Raises:
        ValueError: there is no file, or several without diffusers' name; the file is broken, or
            must not reach diffusers and peft, which use names as patterns and in loops, and
            metadata as a configuration that can import modules and change the model's own weights.
    """
    file = _file(path)
    weights = read_weights(file)
    for name in weights.entries:
        if not _NAME.fullmatch(name) or _LARGE.search(name):
            _refuse(file, f"the name {shown(name)}, and no layer is called so")
        for mark, kind in _OTHER_KINDS.items():
            if mark in name:
                _refuse(file, f"the {kind} tensor {shown(name, 200)}")
    text = weights.metadata.get(_METADATA)
    if text:
        _check_metadata(file, text, len(weights.entries))
    return file


def _file(path: str) -> Path:
    here = Path(path).expanduser()
    if here.is_file():
        return here
    import huggingface_hub

    what = f"the LoRA {path!r}, which is not a local file,"
    if here.is_dir():
        names = [file.name for file in here.iterdir()]
    else:
        with needs_the_hub(what):
            names = huggingface_hub.list_repo_files(path)
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if _STANDARD not in files and len(files) != 1:
        content = f"several .safetensors files ({', '.join(files[:3])}…)" if files else "none"
        raise InvalidValueError(
            f"The LoRA {path} should be one .safetensors file, and it has {content}. Pass the file."
        )
    name = _STANDARD if _STANDARD in files else files[0]
    if here.is_dir():
        return here / name
    with needs_the_hub(what):
        return Path(huggingface_hub.hf_hub_download(path, name))


def _check_metadata(file: Path, text: str, n_tensors: int) -> None:
    from peft import LoraConfig

    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        _refuse(file, f"metadata that are not JSON ({type(error).__name__})", error)
    if not isinstance(metadata, dict):
        _refuse(file, f"metadata that are a {type(metadata).__name__}, not an object")
    usual = {**LoraConfig().to_dict(), "init_lora_weights": "gaussian"}
    for name, value in metadata.items():
        field = name.rpartition(".")[2]
        is_harmless = field in _HARMLESS or isinstance(value, bool) or not value
        many = [*value, *value.values()] if isinstance(value, dict) else value
        values = many if isinstance(many, list) else [value]
        is_small = len(values) <= max(2 * n_tensors, 100) and all(map(_is_small, values))
        if not (is_harmless or value == usual.get(field)) or not is_small:
            _refuse(file, f"the metadata {shown(name)}: {shown(value)}, which no LoRA here has")


def _is_small(value: object) -> bool:
    """Check a number, or a pattern that peft would match with each layer's name, for its cost."""
    if isinstance(value, str):
        return len(_QUANTIFIER.findall(value)) <= 3 and not re.search(r"\)[*+{]", value)
    return not isinstance(value, (int, float)) or abs(value) <= _LARGEST  # NaN is not


def _refuse(file: Path, content: str, error: Exception | None = None) -> NoReturn:
    raise InvalidValueError(
        f"{file} is not a LoRA that can be loaded: it has {content}. Get the file again, or pass "
        "another one."
    ) from error
