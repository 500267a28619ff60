"""LoRAs (Hu et al. 2021) loaded into a pipeline by diffusers and peft, and checked afterwards.

diffusers drops, or leaves empty, what it does not know in a file. So each tensor is followed
through diffusers' conversion, and must be found in a layer.
"""

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from ..errors import InvalidValueError, OptionError
from ..files.terminal import shorter
from ..models.pipeline import Pipeline
from .file_errors import loading_errors
from .options import LoadingOptions
from .repository import LORA, HubName, Repository, some_of


@dataclass(frozen=True)
class Lora:
    """A LoRA: path as written, scale and file."""

    path: str
    scale: float
    file: Path


def check_takes_lora(kind: type, options: LoadingOptions) -> None:
    """Raise ValueError for LoRAs if diffusers cannot load any into this class of pipelines."""
    if options.lora and not hasattr(kind, "load_lora_weights"):
        text = f"diffusers loads no LoRA into a {kind.__name__}. Leave it out."
        raise OptionError("lora", options.lora[0], text)


def read_loras(options: LoadingOptions) -> list[Lora]:
    """Return the LoRAs of the options, fetched if necessary; raise ValueError if there is no file,
    or several without diffusers' name, OSError if the hub cannot be reached."""
    return [Lora(path, scale, _file(path)) for path, scale in options.adapters()]


def _file(path: str) -> Path:
    here = Path(path).expanduser()
    if here.is_file():
        return here
    if here.is_dir():
        return here / _lora_among([file.name for file in here.iterdir()], path)
    name = HubName.read(path)
    if name is None:
        raise OptionError("lora", path, "there is no such file or folder.")
    repository = Repository.find(name)
    file = name.file or _lora_among(repository.files, path)
    there = repository.fetch([file])
    repository.warn_if_not_asked()
    return there / file


def _lora_among(names: Iterable[str], path: str) -> str:
    files = sorted(name for name in names if name.endswith(".safetensors"))
    if LORA in files:
        return LORA
    if len(files) != 1:
        content = f"several .safetensors files, {some_of(files)}" if files else "none"
        raise InvalidValueError(
            f"The LoRA {path} should be one .safetensors file, and it has {content}. Pass the file."
        )
    return files[0]


def load_loras(pipe: Pipeline, loras: Sequence[Lora]) -> None:
    """Load each LoRA as an adapter, and activate them together, each with its scale; raise
    ValueError if something in one of them did not reach a layer of this pipeline."""
    names = [f"lora_{number}" for number in range(len(loras))]
    for lora, name in zip(loras, names, strict=True):
        warned = _load(pipe, lora, name)
        _check_reached(pipe, lora, name)
        for warning in warned:  # with a refusal they would only be noise
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if loras:
        pipe.set_adapters(names, [lora.scale for lora in loras])
        for model in pipe.components.values():
            if hasattr(model, "peft_config"):
                model.eval()  # peft's layers start in training mode, with their dropout


def _load(pipe: Pipeline, lora: Lora, name: str) -> list[warnings.WarningMessage]:
    """Load a LoRA, and return the warnings raised meanwhile."""
    folder = str(lora.file.parent)
    options = {"weight_name": lora.file.name, "adapter_name": name}
    what = f"the LoRA of a {type(pipe).__name__}"
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        # peft warns of a second adapter
        warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
        with loading_errors(lora.path, what, "Pass a LoRA of this model."):
            pipe.load_lora_weights(folder, use_safetensors=True, **options)
    return warned


def _check_reached(pipe: Pipeline, lora: Lora, name: str) -> None:
    """Raise ValueError, with the keys, unless each tensor of the file is in a layer as it is, with
    its alpha, and each layer of the adapter has values."""
    held = _held(pipe, name)
    tensors = _Tracked.read(lora.file)
    used = set[str]()
    wrong = set[str]()
    for key, value in _converted(pipe, tensors).items():
        if key not in held or not _starts_with(held.pop(key), value.as_subclass(torch.Tensor)):
            continue
        used |= value.sources
        layer, is_first, _ = key.partition(".lora_A")
        for source in value.sources if is_first else ():
            alpha = f"{source.partition('.lora_')[0]}.alpha"
            if alpha in tensors:
                # a converter that applied alpha to the matrix leaves a scale of 1
                is_scaled = not torch.equal(value, tensors[source])
                expected = len(value) if is_scaled else float(tensors[alpha])
                is_right = abs(float(held[f"{layer}.alpha"]) - expected) <= 1e-3 * abs(expected)
                (used if is_right else wrong).add(alpha)
    lost = [key for key in tensors if key not in used - wrong]
    # diffusers drops the differences of Wan's norms, which are zeros in most files
    lost = [key for key in lost if ".diff" not in key or tensors[key].any()]
    lost = lost or [key for key, value in held.items() if value.is_meta]
    if not tensors:
        raise OptionError("lora", lora.path, "it holds no tensor. Pass a LoRA of this model.")
    if lost:
        text = (
            f"{len(lost)} of its {len(tensors)} tensors are missing, not finite, or without a "
            f"place in a {type(pipe).__name__}: {shorter(', '.join(lost), 800)}. Pass a LoRA of "
            "this model."
        )
        raise OptionError("lora", lora.path, text)


def _plain(key: str) -> str:
    """Return a key without a name that files have, and CLIP before transformers 5."""
    return key.replace(".text_model.", ".")


def _starts_with(held: torch.Tensor, value: torch.Tensor) -> bool:
    """Check that a layer has this finite value; diffusers widens a layer for another LoRA with
    zeros."""
    if held.is_meta:
        return False
    start = held[tuple(map(slice, value.shape))]
    return torch.equal(start, value.to(start)) and bool(start.isfinite().all())


class _Tracked(torch.Tensor):
    """A tensor with its sources, the keys of a file's tensors that it was made from."""

    sources: frozenset[str]

    @classmethod
    def read(cls, file: Path) -> dict[str, "_Tracked"]:
        from safetensors.torch import load_file

        tensors = {key: value.as_subclass(cls) for key, value in load_file(file).items()}
        for key, value in tensors.items():
            value.sources = frozenset([key])
        return tensors

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = [value for value in tree_leaves((args, kwargs)) if isinstance(value, cls)]
        made = super().__torch_function__(func, types, args, kwargs)
        for value in tree_leaves(made):
            if isinstance(value, cls):
                value.sources = frozenset[str]().union(*(each.sources for each in inputs))
        return made


def _converted(pipe: Pipeline, tensors: Mapping[str, _Tracked]) -> dict[str, _Tracked]:
    """Return a file's tensors by the names that they have in the pipeline."""
    from diffusers.loaders.lora_pipeline import StableDiffusionXLLoraLoaderMixin
    from diffusers.utils import state_dict_utils

    is_xl = isinstance(pipe, StableDiffusionXLLoraLoaderMixin)
    options = {"unet_config": pipe.unet.config} if is_xl else {}
    copies = {key: value.clone() for key, value in tensors.items()}  # some change them in place
    converted_state = pipe.lora_state_dict(copies, **options)
    state = converted_state[0] if isinstance(converted_state, tuple) else converted_state
    converted: dict[str, _Tracked] = {}
    for part in {key.partition(".")[0] for key in state}:
        values = {key[len(part) + 1 :]: state[key] for key in state if key.startswith(f"{part}.")}
        if part.startswith("text_encoder"):
            values = state_dict_utils.convert_state_dict_to_diffusers(values)
            values = state_dict_utils.convert_state_dict_to_peft(values)
        elif "lora_A" not in next(iter(values)):
            values = state_dict_utils.convert_unet_state_dict_to_peft(values)
        converted |= {_plain(f"{part}.{name}"): value for name, value in values.items()}
    return converted


def _held(pipe: Pipeline, adapter: str) -> dict[str, torch.Tensor]:
    """Return the values of the models with adapters, without the name of this one, and the alphas
    behind its scales."""
    held = {}
    its_name = re.compile(rf"\.{adapter}(?=\.|$)|(?<=lora_magnitude_vector\.{adapter})\.weight")
    for part, model in pipe.components.items():
        if not hasattr(model, "peft_config"):
            continue
        for key, value in model.state_dict().items():
            held[_plain(its_name.sub("", f"{part}.{key}"))] = value
        for key, layer in model.named_modules():
            if adapter in getattr(layer, "scaling", ()):
                alpha = layer.scaling[adapter] * layer.r[adapter]
                held[_plain(f"{part}.{key}.alpha")] = torch.as_tensor(float(alpha))
    return held
