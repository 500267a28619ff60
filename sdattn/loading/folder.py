import inspect
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import OptionError, did_you_mean
from ..models.demos import folder_name
from ..models.denoiser import what_it_holds
from ..models.families import family_of, listed
from ..models.family import Family
from ..models.pipeline import Given
from .file_errors import loading_errors
from .index import as_dtype, files_in, home_of, models_in, read_index, without_weights
from .lora import check_takes_lora
from .options import BITS, LoadingOptions
from .weights import PipelineFiles, choose_files

# Parts of a demo, and the folders that hold their weights
LENT = {"demo-video": {part: f"demo/{part}" for part in ("vae", "text_encoder", "unet")}}


@dataclass(frozen=True)
class PipelineFolder:
    """A folder, its ``model_index.json``, the options to load its pipeline, and the files to
    read."""

    path: Path
    index: Given
    options: LoadingOptions
    files: PipelineFiles

    @classmethod
    def judged(
        cls,
        path: Path,
        options: LoadingOptions,
        names: Collection[str] | None = None,
        *,
        settings: bool = False,
    ) -> "PipelineFolder":
        """Read a folder's index and check it first, since diffusers would run code that it names.

        Args:
            names: the folder's files, if they are not fetched yet.
            settings: True if its settings alone are read, and it may have no weights.

        Raises:
            ValueError: see :func:`read_index` and :func:`choose_files`; the pipeline takes no LoRA.
        """
        names = files_in(path) if names is None else names
        index = read_index(path, names)
        parts = models_in(index)
        lent = LENT.get(folder_name(path) or "", {})
        for part in parts:
            is_given = part in lent or (options.gguf is not None and part == denoiser_of(index))
            parts[part] &= not (settings or is_given)
        files = choose_files(names, parts, options.variant, str(path))
        folder = cls(path, index, options, files)
        check_takes_lora(folder.kind, options)
        return folder

    @property
    def kind(self) -> Any:
        import diffusers

        return getattr(diffusers, self.index["_class_name"])

    def parts(self) -> dict[str, Any]:
        """Return the parts to pass to ``from_pretrained``: another scheduler (ValueError if it does
        not fit), and None for parts that the pipeline was saved without (SD 3's T5)."""
        taken = inspect.signature(self.kind).parameters
        parts: dict[str, Any] = {n: None for n in taken if self.index.get(n) == [None, None]}
        if self.options.scheduler is not None:
            kind = fitting_scheduler(self.options.scheduler, self.index["scheduler"][1])
            parts["scheduler"] = kind.from_pretrained(self.path, subfolder="scheduler")
        return parts

    def dtype(self, asked: torch.dtype | None, half: bool) -> torch.dtype:
        """Return the dtype to load: the requested one, else float32, or with ``half`` the family's
        own. Raise TypeError for an unknown denoiser."""
        family = self._family()
        return asked or (getattr(torch, family.half) if half and family else torch.float32)

    def _family(self) -> Family | None:
        """Return the denoiser's family, without its weights, or None if it is not diffusers'."""
        import diffusers

        for name in ("unet", "transformer"):
            match self.index.get(name):
                case ["diffusers", str(kind)] if cls := getattr(diffusers, kind, None):
                    if family := listed(cls):
                        return family
                    # Unknown by name: build it without weights and look at its parts.
                    model = without_weights(cls, self.path / name)
                    asked = f"Asked to capture a {self.index['_class_name']}"
                    return family_of(model, f"{asked}, which {what_it_holds(None, model)}")
        return None


_FLOW = "FlowMatch"  # prefix of all flow-matching schedulers


def fitting_scheduler(name: str, own: str) -> Any:
    """Return the class of that name; raise ValueError if it cannot replace ``own``."""
    import diffusers
    from diffusers.schedulers.scheduling_utils import KarrasDiffusionSchedulers

    # diffusers' exchangeable schedulers, and two for distilled models
    diffusion = [each.name for each in KarrasDiffusionSchedulers]
    diffusion += ["LCMScheduler", "TCDScheduler"]
    kinds = diffusion, tuple(each for each in dir(diffusers) if each.startswith(_FLOW))
    fitting = next((kind for kind in kinds if own in kind), (own,))
    if name not in fitting:
        known = name.endswith("Scheduler") and hasattr(diffusers, name)
        why = f"does not go with this model, whose own is {own}" if known else "is unknown"
        near = did_you_mean(name, fitting)
        text = f"it {why}. Pass one of {', '.join(sorted(fitting))}.{near}"
        raise OptionError("scheduler", name, text)
    return getattr(diffusers, name)


def quantized(folder: PipelineFolder, dtype: torch.dtype) -> dict[str, object]:
    """Return arguments for ``from_pretrained``: a loaded denoiser, or how to load parts; raise
    ValueError for a GGUF file that is broken or of another model."""
    options = folder.options
    index = folder.index
    if options.gguf is not None:
        return _from_gguf(options.gguf, folder, dtype)
    bits = options.quantization
    if bits not in BITS:
        return {}
    from diffusers.quantizers.pipe_quant_config import PipelineQuantizationConfig

    settings: dict[str, object] = {f"load_in_{bits}": True}
    if bits == "4bit":
        settings |= {"bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype}
    mapping = {n: home_of(index[n][0]).BitsAndBytesConfig(**settings) for n in _large(index)}
    return {"quantization_config": PipelineQuantizationConfig(quant_mapping=mapping)}


def denoiser_of(index: Given) -> str:
    """Return the name of the part that predicts the noise, the first of two."""
    return "transformer" if "transformer" in index else "unet"


def _large(index: Given) -> list[str]:
    """Return the denoiser, or both (Wan 2.2), and text encoders that are larger than CLIP."""
    denoisers = "unet", "transformer", "transformer_2"
    large = [name for name in denoisers if index.get(name, [None])[0] is not None]
    for name, entry in index.items():
        match entry:
            case ["transformers", str(kind)] if name.startswith("text_encoder"):
                large += [] if kind.startswith("CLIP") else [name]
    return large


def _from_gguf(file: Path, folder: PipelineFolder, dtype: torch.dtype) -> dict[str, object]:
    import diffusers

    name = denoiser_of(folder.index)
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
