"""Checkpoints of one ``.safetensors`` file, as they were trained: SD 1.x, 2.x and SDXL.

Nothing is fetched for them: their configurations follow from the tensors, see
:mod:`sdattn.models.single_file_configs`. Only the tokenizer is not in such a file.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from ..errors import InvalidValueError, Message, OptionError
from .loading_options import LoadingOptions
from .model_index import as_dtype, check_whole
from .quiet import no_cast_notices
from .schedulers import fitting_scheduler
from .single_file_configs import SingleFile, TextEncoder, single_file_of

_FILES = ("tokenizer.json", "vocab.json")  # either will do
# All of these encoders have the vocabulary of CLIP. Where the hub's cache may have it, with
# the folder in that repository:
_VOCABULARIES = {
    "openai/clip-vit-large-patch14": "",
    "stable-diffusion-v1-5/stable-diffusion-v1-5": "tokenizer",
    "stabilityai/stable-diffusion-2-1": "tokenizer",
    "stabilityai/stable-diffusion-xl-base-1.0": "tokenizer",
}


def load_single_file(path: Path, dtype: torch.dtype, options: LoadingOptions) -> Any:
    """The pipeline of a checkpoint, on the CPU.

    Args:
        path: of the file.
        dtype: of the weights.
        options: ``tokenizer`` is a folder with CLIP's vocabulary (``tokenizer.json``, or
            ``vocab.json`` and ``merges.txt``), or one of diffusers that has it in ``tokenizer/``;
            by default it is looked for in the hub's cache. Also the scheduler.

    Raises:
        ValueError: the file is no checkpoint of SD 1.x, 2.x or SDXL, or not whole; the tokenizer is
            not there or has another vocabulary; the scheduler does not go with it.
    """
    import diffusers
    import transformers

    found = _described(path)
    tokenizers = {
        encoder.name.replace("text_encoder", "tokenizer"): _tokenizer(encoder, options.tokenizer)
        for encoder in found.text_encoders
    }
    own, settings = found.scheduler
    scheduler = fitting_scheduler(options.scheduler or own, own).from_config(
        getattr(diffusers, own)(**settings).config
    )
    kind = getattr(diffusers, found.pipeline)
    with TemporaryDirectory() as folder, no_cast_notices():
        _write_configs(Path(folder), found)
        try:
            pipe = kind.from_single_file(
                str(path),
                config=folder,
                local_files_only=True,
                scheduler=scheduler,
                **tokenizers,
                **as_dtype(dtype),
            )
        except NotImplementedError as error:  # weights that stay on torch's meta device
            raise InvalidValueError(
                f"The file {path} lacks some of its weights. Get it again."
            ) from error
    models = (torch.nn.Module, transformers.PreTrainedModel)
    check_whole(path, {k: part for k, part in pipe.components.items() if isinstance(part, models)})
    return pipe


def _described(path: Path) -> SingleFile:
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix != ".safetensors":  # by which diffusers decides how to read it
            raise SafetensorError("its name does not end in .safetensors")
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            step = int(file.get_tensor("global_step")) if "global_step" in shapes else None
    except SafetensorError as error:
        raise InvalidValueError(
            f"{path} is no .safetensors file ({error}). Pickled checkpoints are not read; convert "
            "them to safetensors first."
        ) from error
    if not any(name.startswith(("cond_stage_model.", "conditioner.embedders.")) for name in names):
        raise InvalidValueError(
            f"{path} holds {len(names)} tensors, but not the text encoder of an SD 1.x, 2.x or "
            "SDXL checkpoint. Pass the whole checkpoint, or a diffusers folder."
        )
    try:
        return single_file_of(shapes, step)
    except InvalidValueError as error:
        raise InvalidValueError(
            f"{path} cannot be loaded: {error}. Pass another checkpoint, or a diffusers folder."
        ) from None


def _tokenizer(encoder: TextEncoder, folder: str | None) -> Any:
    from transformers import CLIPTokenizer

    path = _cached() if folder is None else Path(folder).expanduser()
    path = path / "tokenizer" if (path / "tokenizer").is_dir() else path
    if not any((path / name).is_file() for name in _FILES):
        text = "there is no {0} in it."
        raise OptionError("tokenizer", folder, text, " or ".join(_FILES))
    length, pad = encoder.config["max_position_embeddings"], encoder.pad_token
    found = CLIPTokenizer.from_pretrained(path, model_max_length=length, pad_token=pad)
    if len(found) != encoder.config["vocab_size"]:
        text = "its vocabulary has {0} tokens, and the checkpoint's {1} was trained with {2}."
        sizes = len(found), encoder.name, encoder.config["vocab_size"]
        raise OptionError("tokenizer", str(path), text, *sizes)
    return found


def _cached() -> Path:
    """The folder of a tokenizer in the hub's cache."""
    from huggingface_hub import constants, try_to_load_from_cache

    for name, folder in _VOCABULARIES.items():
        for file in _FILES:
            place = f"{folder}/{file}" if folder else file
            found = try_to_load_from_cache(name, place, cache_dir=constants.HF_HUB_CACHE)
            if isinstance(found, str):
                return Path(found).parent
    raise InvalidValueError(
        Message(
            "A single file has no tokenizer in it, and the hub's cache does not hold CLIP's. Pass "
            "{tokenizer}: the folder tokenizer/ of any Stable Diffusion that diffusers saved. Or "
            "fetch it once: hf download openai/clip-vit-large-patch14 vocab.json merges.txt "
            "tokenizer.json tokenizer_config.json special_tokens_map.json"
        )
    )


def _write_configs(folder: Path, found: SingleFile) -> None:
    """A folder as diffusers saves it, without weights."""
    index: dict[str, Any] = {
        "_class_name": found.pipeline,
        "unet": ["diffusers", "UNet2DConditionModel"],
        "vae": ["diffusers", "AutoencoderKL"],
        "scheduler": ["diffusers", found.scheduler[0]],
        **found.options,
    }
    configs = {"unet": found.unet, "vae": found.vae}
    for encoder in found.text_encoders:
        index[encoder.name] = ["transformers", encoder.kind]
        index[encoder.name.replace("text_encoder", "tokenizer")] = ["transformers", "CLIPTokenizer"]
        configs[encoder.name] = encoder.config
    if found.pipeline.startswith("StableDiffusionXLImg2Img"):  # the refiner has one encoder
        index |= {"text_encoder": [None, None], "tokenizer": [None, None]}
    for name, config in configs.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "model_index.json").write_text(json.dumps(index), encoding="utf-8")
