"""LoRAs (Hu et al. 2021) loaded into a pipeline, by diffusers and peft."""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from ..errors import OptionError, SdattnError, is_out_of_memory
from ..models.pipeline import Pipeline
from .lora_files import lora_file, read_lora
from .options import LoadingOptions
from .weight_files import said_by


@dataclass(frozen=True)
class Lora:
    """A checked LoRA: path as written, scale, file, and the name of each layer's first matrix."""

    path: str
    scale: float
    file: Path
    layers: Sequence[str]


def check_takes_lora(kind: type, options: LoadingOptions) -> None:
    """Raise ValueError for LoRAs if diffusers cannot load any into this class of pipelines."""
    if options.lora and not hasattr(kind, "load_lora_weights"):
        text = f"diffusers loads no LoRA into a {kind.__name__}. Leave it out."
        raise OptionError("lora", options.lora[0], text)


def read_loras(options: LoadingOptions) -> list[Lora]:
    files = [(path, scale, lora_file(path)) for path, scale in options.adapters()]
    return [Lora(path, scale, file, read_lora(file)) for path, scale, file in files]


def load_loras(pipe: Pipeline, loras: Sequence[Lora]) -> None:
    """Load each LoRA as an adapter, and activate them together, each with its scale; raise
    ValueError if something in one of them has no place in this pipeline."""
    for number, lora in enumerate(loras):
        name = f"lora_{number}"
        warned = _load(pipe, lora, name)
        held = [part for _, part in _adapted(pipe, name)]
        if not held:
            text = (
                f"nothing in it belongs to a {type(pipe).__name__}. It is the LoRA of another "
                "model."
            )
            raise OptionError("lora", lora.path, text)
        if lost := max(0, len(lora.layers) - len(held)):
            text = (
                f"{lost} of its {len(lora.layers)} layers have no place in a "
                f"{type(pipe).__name__}. Pass a LoRA of this model."
            )
            raise OptionError("lora", lora.path, text)
        for one in warned:  # with a refusal they would only be noise
            warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if loras:
        names = [f"lora_{number}" for number in range(len(loras))]
        pipe.set_adapters(names, [lora.scale for lora in loras])
        for model in dict(_adapted(pipe, *names)):
            model.eval()  # peft's layers start in training mode, with their dropout


def _load(pipe: Pipeline, lora: Lora, name: str) -> list[warnings.WarningMessage]:
    """Load a LoRA, and return the warnings raised meanwhile."""
    folder, given = str(lora.file.parent), {"weight_name": lora.file.name, "adapter_name": name}
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            # peft warns of a second adapter
            warnings.filterwarnings("ignore", "Already found a `peft_config`", UserWarning)
            pipe.load_lora_weights(folder, use_safetensors=True, **given)
        return warned
    except (SdattnError, ImportError, MemoryError):
        raise
    except Exception as error:  # any error: another model's sizes, or unknown names
        if is_out_of_memory(error):
            raise
        found = f"it does not fit a {type(pipe).__name__}: {said_by(error)}."
        raise OptionError("lora", lora.path, f"{found} Pass a LoRA of this model.") from error


def _adapted(pipe: Pipeline, *names: str) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Yield each layer that has one of these adapters, after the model that it is part of."""
    for model in pipe.components.values():
        for part in model.modules() if isinstance(model, nn.Module) else ():
            kinds = (getattr(part, kind, ()) for kind in getattr(part, "adapter_layer_names", ()))
            if any(name in kind for kind in kinds for name in names):
                yield model, part
