"""How a model is loaded, apart from its name, its device and its dtype.

options = LoadingOptions(lora="style.safetensors:0.8", scheduler="EulerDiscreteScheduler")
options.check("owner/name", device)       # before any weights are read
options_of(pipe)                          # the options that a pipeline was loaded with
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import MissingPackageError, OptionError, refuse
from ..files.records import Record
from ..models.pipeline import Pipeline
from .locating import find_model
from .repository import HubName

if TYPE_CHECKING:
    import torch

OFFLOADS = ("model", "sequential", "group")
BITS = ("8bit", "4bit")
GGUF = "gguf:"
_LORA_PACKAGE = "peft", "lora"
_PACKAGES = {"8bit": "bitsandbytes", "4bit": "bitsandbytes", GGUF: "gguf"}


@dataclass(frozen=True, kw_only=True)
class LoadingOptions(Record):
    """How a model is loaded, see :func:`sdattn.load_pipeline`; None means the default. Raise
    ValueError for an invalid value."""

    variant: str | None = None
    revision: str | None = None
    lora: tuple[str, ...] | None = None
    quantization: str | None = None
    offload: str | None = None
    scheduler: str | None = None
    tokenizer: str | None = None
    config: str | None = None

    def __post_init__(self) -> None:
        lora = self.lora or ()
        loras = [lora] if isinstance(lora, (str, Path)) else lora
        object.__setattr__(self, "lora", tuple(map(str, loras)) or None)
        for name in {"tokenizer", "config"} & self.arguments().keys():
            object.__setattr__(self, name, str(getattr(self, name)))
        list(self.adapters())  # or refuse
        if self.offload not in (None, *OFFLOADS):
            raise refuse("offload", self.offload, OFFLOADS)
        asked = self.quantization
        if asked not in (None, *BITS) and not (asked and asked.partition(GGUF)[2]):
            raise refuse("quantization", asked, "'8bit', '4bit' or 'gguf:FILE'")

    def __bool__(self) -> bool:
        return bool(self.arguments())

    def __str__(self) -> str:
        """Return ``offload model, lora style.safetensors:0.8``."""
        parts = []
        for name, value in self.arguments().items():
            parts += [f"{name} {text}" for text in ([value] if isinstance(value, str) else value)]
        return ", ".join(parts)

    def arguments(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if value is not None}

    @property
    def gguf(self) -> Path | None:
        """File of the denoiser's quantized weights."""
        asked = self.quantization or ""
        return Path(asked.removeprefix(GGUF)).expanduser() if asked.startswith(GGUF) else None

    def adapters(self) -> Iterator[tuple[str, float]]:
        """Yield the path or hub id and the scale of each LoRA."""
        for text in self.lora or ():
            path, _, number = text.rpartition(":")
            try:
                scale = float(number)
            except ValueError:  # a colon in the path, or no colon
                path = text
                scale = 1.0
            if not path or not math.isfinite(scale):
                raise refuse("lora", text, "PATH, or PATH:SCALE with a finite number")
            yield path, scale

    def check_files(self, model: str | Path) -> None:
        """Refuse missing files and options that do not fit this kind of model, as far as its name
        tells it; no torch."""
        path = find_model(model)
        if self.revision is not None and path is not None:
            text = f"only models of the hub have revisions, and {model} is on this machine."
            raise OptionError("revision", self.revision, text)
        named = None if path else HubName.read(str(model))
        if path is not None:
            self.check_fit(model, is_file=path.is_file())
        elif named is not None and named.file:
            self.check_fit(model, is_file=True)
        self._check_files()

    def check_fit(self, model: str | Path, *, is_file: bool) -> None:
        """Refuse options for a folder if the model is a single file, and the reverse."""
        if is_file:
            foreign = ("variant", "quantization")
            text = f"{model} is a single file. Pass a diffusers folder, or a hub id."
        else:
            foreign = ("tokenizer", "config")
            text = f"only a single .safetensors file needs one; {model} has its own."
        for name, value in self.arguments().items():
            if name in foreign:
                raise OptionError(name, value, text)

    def _check_files(self) -> None:
        for path, _ in self.adapters():
            here = Path(path).expanduser()
            text = ""
            if here.is_file() and here.suffix != ".safetensors":
                text = "only .safetensors files are read, since others can run code."
            elif not here.exists() and HubName.read(path) is None:
                text = "there is no such file or folder, and it is not a hub id such as owner/name."
            if text:
                raise OptionError("lora", path, text)
        if self.config is not None:
            here = Path(self.config).expanduser()
            if here.exists() and not (here / "model_index.json").is_file():
                text = "there is no model_index.json in it. Pass a folder that diffusers saved."
                raise OptionError("config", self.config, text)
            if not here.exists() and HubName.read(self.config) is None:
                text = "there is no such folder, and it is not a hub id such as owner/name."
                raise OptionError("config", self.config, text)
        if self.gguf is not None and not self.gguf.is_file():
            raise OptionError("quantization", self.quantization, "there is no such file.")

    def check(self, model: str | Path, device: torch.device) -> None:
        """Refuse options that this model, this device or this installation cannot support:
        FileNotFoundError for a missing file or model, ValueError for options that do not fit,
        ImportError for a package."""
        self.check_files(model)
        kind = self.quantization
        if kind in BITS and device.type == "cpu":
            text = "bitsandbytes, which diffusers quantizes with, needs a GPU; this is the CPU."
            raise OptionError("quantization", kind, text)
        if self.offload in ("model", "sequential") and device.type == "cpu":
            text = "weights wait on the CPU until a GPU needs them; this run is on the CPU itself."
            raise OptionError("offload", self.offload, text)
        needs = [("lora", value, *_LORA_PACKAGE) for value in self.lora or ()]
        if kind is not None:
            package = _PACKAGES[GGUF if self.gguf else kind]
            needs.append(("quantization", kind, package, "quantization"))
        for option, value, package, extra in needs:
            if find_spec(package) is None:
                text = f"`{option}={value!r}` needs {package}: pip install 'sdattn[{extra}]'"
                raise MissingPackageError(text)


def options_of(pipe: Pipeline) -> LoadingOptions | None:
    """Return the options that :func:`sdattn.load_pipeline` loaded a pipeline with, or None."""
    return getattr(pipe, "sdattn_loading", None)


def note_options(pipe: Pipeline, options: LoadingOptions) -> None:
    """Record a pipeline's options for :func:`options_of`."""
    if options:
        pipe.sdattn_loading = options
