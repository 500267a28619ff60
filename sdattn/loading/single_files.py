"""Checkpoints of one ``.safetensors`` file, read by diffusers' ``from_single_file``.

The file has the weights. The settings of its models, and its tokenizers, come from a diffusers
folder: the one that is passed, else the one that diffusers names for such a file on the hub.
"""

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import AccessError, InvalidValueError, OptionError
from ..models.pipeline import Pipeline
from .file_errors import loading_errors
from .folder import PipelineFolder
from .index import as_dtype, check_whole
from .repository import HubName, Repository, asking

_SETTINGS = (".json", ".txt", ".model")  # of a folder on the hub, without its weights
_VOCABULARIES = ("tokenizer.json", "vocab.json")  # either will do
_WHAT = "a checkpoint"
_ANEW = "Get it again, or pass a diffusers folder."
_ADVICE = (
    "Pass a whole checkpoint of the family that these settings are for, or the diffusers folder of "
    "the model."
)


@dataclass(frozen=True)
class Header:
    """The first bytes of a checkpoint: its tensors without their values, on torch's meta
    device, and the names that trainers write beside them.

    Attributes:
        where: the file's path, or its name on the hub.
    """

    where: str
    tensors: Mapping[str, torch.Tensor]
    told: Mapping[str, str]

    @classmethod
    def of_file(cls, file: Path) -> "Header":
        """Read a file's header; raise ValueError if it is not safetensors."""
        from safetensors import safe_open

        if file.suffix != ".safetensors":  # diffusers decides by it how to read the file
            raise InvalidValueError(
                f"{file} does not end in .safetensors. Pickled checkpoints are not read, since "
                "they can run code; convert them to safetensors first."
            )
        tensors = {}
        with loading_errors(file, _WHAT, _ANEW), safe_open(file, framework="pt") as opened:
            told = opened.metadata() or {}
            for name in opened.keys():  # noqa: SIM118
                tensors[name] = torch.empty(opened.get_slice(name).get_shape(), device="meta")
        return cls(str(file), tensors, told)

    @classmethod
    def on_hub(cls, repository: Repository, file: str) -> "Header":
        """Ask the hub for a file's header, which is a few hundred kB of it; raise OSError if it
        cannot be had, ValueError if the file is not safetensors."""
        from huggingface_hub import HfApi

        name = repository.name
        where = f"{name.repo}/{file}"
        with asking(name), loading_errors(where, _WHAT, _ANEW):
            found = HfApi().parse_safetensors_file_metadata(name.repo, file, revision=name.revision)
        tensors = {}
        for key, tensor in found.tensors.items():
            tensors[key] = torch.empty(tensor.shape, device="meta")
        return cls(where, tensors, found.metadata)

    def check(self) -> None:
        """Raise ValueError for a LoRA, and for a file without a text encoder, which diffusers would
        take from the settings' folder."""
        from diffusers.loaders.single_file_utils import is_clip_model_in_single_file
        from transformers import CLIPTextModel

        if any(".lora_" in name for name in self.tensors):
            base = self.told.get("ss_sd_model_name") or self.told.get("ss_base_model_version")
            raise InvalidValueError(
                f"{self.where} is a LoRA{f', made for {base}' if base else ''}. Pass the model "
                f"that it is for, and `lora={self.where!r}`."
            )
        if not is_clip_model_in_single_file(CLIPTextModel, self.tensors):
            raise InvalidValueError(
                f"{self.where} has no text encoder that diffusers reads. Pass the whole "
                "checkpoint, or a diffusers folder; a LoRA is passed as `lora`, with its model."
            )

    @property
    def settings_name(self) -> str:
        """The hub id that diffusers names for such a file; ValueError if it knows none."""
        from diffusers.loaders.single_file_utils import fetch_diffusers_config

        with loading_errors(self.where, _WHAT, _ANEW):
            return str(fetch_diffusers_config(self.tensors)["pretrained_model_name_or_path"])

    def settings_folder(self, config: str | None) -> Path:
        """Return the folder with the settings for the checkpoint: ``config``, or the one that
        diffusers names, fetched. Raise ValueError if it is not a checkpoint or there are no
        settings, OSError if ``config`` cannot be fetched."""
        self.check()
        if config is not None:
            here = Path(config).expanduser()
            return here if here.is_dir() else _fetched(config)
        try:
            return _fetched(self.settings_name)
        except AccessError as error:
            raise InvalidValueError(
                f"{self.where} holds no settings for its models, and the ones that diffusers names "
                f"for it cannot be fetched. {error} Pass `config`: the folder of a model of the "
                "same family that diffusers saved (its weights are not needed), or its hub id."
            ) from error


def load_single_file(file: Path, folder: PipelineFolder, dtype: torch.dtype) -> Pipeline:
    """Return the pipeline of a checkpoint, on the CPU; raise ValueError if diffusers cannot read
    it, a weight is missing or not finite, or the tokenizer has another vocabulary."""
    kind = folder.kind
    if not hasattr(kind, "from_single_file"):
        text = (
            f"diffusers reads no single file as a {kind.__name__}. Pass the diffusers folder of "
            "the model."
        )
        raise OptionError("config", str(folder.path), text)
    parts = folder.parts()
    if "requires_safety_checker" in inspect.signature(kind).parameters:
        parts["requires_safety_checker"] = False  # the file has none
    what = f"a {kind.__name__} with the settings of {folder.path}"
    with loading_errors(file, what, _ADVICE):
        try:
            pipe = kind.from_single_file(
                str(file),
                config=str(folder.path),
                local_files_only=True,
                **parts,
                **as_dtype(dtype),
            )
        except NotImplementedError as error:  # weights that stay on torch's meta device
            raise InvalidValueError(
                f"The file {file} lacks some of its weights. Get it again."
            ) from error
        models = {k: part for k, part in pipe.components.items() if isinstance(part, nn.Module)}
        check_whole(file, models)
        _check_finite(file, models, dtype)
        if folder.options.tokenizer is not None:
            _exchange_tokenizers(pipe, folder.options.tokenizer)
    return pipe


def _fetched(text: str) -> Path:
    """Return a folder of the hub without its weights, from this machine's cache if it is there."""
    name = HubName.read(text)
    if name is None:
        raise OptionError("config", text, "there is no such folder.")
    repository = Repository.find(name)
    repository.check("model_index.json")
    return repository.fetch(file for file in repository.files if file.endswith(_SETTINGS))


def _check_finite(path: Path, models: Mapping[str, nn.Module], dtype: torch.dtype) -> None:
    for part, model in models.items():
        for name, weight in model.named_parameters():
            low, high = torch.aminmax(weight.detach()) if weight.numel() else (weight, weight)
            if not bool((high - low).isfinite().all()):
                half = dtype == torch.float16
                advice = "load it in bfloat16 or float32, which may help, or " if half else ""
                raise InvalidValueError(
                    f"{path} has weights that are not finite in {dtype} ({part}: {name}), so "
                    f"it cannot draw. Try another file; {advice}get it again."
                )


def _exchange_tokenizers(pipe: Pipeline, folder: str) -> None:
    """Give CLIP's text encoders a folder's vocabulary, with their own padding and length; raise
    ValueError if it is missing or of another size."""
    path = Path(folder).expanduser()
    path = path / "tokenizer" if (path / "tokenizer").is_dir() else path
    if not any((path / name).is_file() for name in _VOCABULARIES):
        raise OptionError("tokenizer", folder, f"there is no {' or '.join(_VOCABULARIES)} in it.")
    for name, tokenizer in pipe.components.items():
        if not type(tokenizer).__name__.startswith("CLIPTokenizer"):
            continue
        encoder = name.replace("tokenizer", "text_encoder")
        options = {"model_max_length": tokenizer.model_max_length, "pad_token": tokenizer.pad_token}
        replacement = type(tokenizer).from_pretrained(path, **options)
        tokens = getattr(pipe, encoder).get_input_embeddings().num_embeddings
        if len(replacement) != tokens:
            text = (
                f"its vocabulary has {len(replacement)} tokens, and the checkpoint's {encoder} was "
                f"trained with {tokens}."
            )
            raise OptionError("tokenizer", str(path), text)
        pipe.register_modules(**{name: replacement})
