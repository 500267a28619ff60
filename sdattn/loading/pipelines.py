from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidTypeError, SdattnWarning, known_options, warn
from ..models.demos import HOME, folder_name
from ..models.denoiser import find_denoiser
from ..models.pipeline import Pipeline
from .devices import checked_device, checked_dtype, place
from .folder import LENT, PipelineFolder, quantized
from .hub import HubModel, named_on_hub
from .index import as_dtype, check_whole, home_of, models_in, named_errors, without_weights
from .locating import find_model
from .lora import load_loras, read_loras
from .options import LoadingOptions, note_options
from .quiet import no_notices
from .repository import HubName
from .single_files import Header, load_single_file


@known_options(torch_dtype="dtype")
@no_notices()
def load_pipeline(
    model: str | Path = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | str | None = None,
    variant: str | None = None,
    revision: str | None = None,
    lora: str | Path | Sequence[str | Path] | None = None,
    quantization: str | None = None,
    offload: str | None = None,
    scheduler: str | None = None,
    tokenizer: str | Path | None = None,
    config: str | Path | None = None,
) -> Any:
    """Load a pipeline of diffusers.

    Args:
        model: ``"demo"``, ``"demo-mmdit"`` or ``"demo-video"``, the small models in this package
            (Stable Diffusion 1 and 3 and AnimateDiff in miniature); a folder that diffusers saved;
            a single ``.safetensors`` checkpoint, as published for SD 1.x, 2.x and SDXL; or a hub
            id, ``"owner/name"``, of a folder or of one checkpoint,
            ``"owner/name/file.safetensors"``, or the address of its page. How much comes, and how
            fast, is printed on stderr unless the hub's progress bars are switched off.
        device: default: CUDA if there is one, else MPS, else the CPU.
        dtype: ``torch.float16``, or its name, ``"float16"`` or ``"fp16"`` (default: on CUDA, the
            half type that the model's authors use, bfloat16 for FLUX, Qwen-Image and Sana, float16
            for the others; float32 elsewhere).
        variant: variant of the weight files, ``"fp16"`` for ``model.fp16.safetensors``.
        revision: a branch, a tag or a commit of a hub model.
        lora: ``"PATH"`` or ``"PATH:SCALE"``, or several: a ``.safetensors`` file, a folder or a hub
            id each. Needs peft.
        quantization: ``"8bit"`` or ``"4bit"`` (NF4), by bitsandbytes on a GPU: the denoiser, and
            text encoders larger than CLIP. ``"gguf:FILE"``: the denoiser from a GGUF file.
        offload: keep weights in the CPU's memory until they are needed: ``"model"``, whole models;
            ``"sequential"`` (accelerate) or ``"group"`` (diffusers), one layer at a time.
        scheduler: a diffusers scheduler class; it gets the settings of the pipeline's own.
        tokenizer: for a single file, a folder with CLIP's vocabulary (``tokenizer.json``, or
            ``vocab.json`` and ``merges.txt``) instead of the one in ``config``.
        config: for a single file, which contains no settings: the diffusers folder of a model of
            the same family, with or without weights, or a hub id (default: the one that diffusers
            names).

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: this machine has no such device; the folder holds no pipeline, asks for code of
            its own or has only pickles; the file is not a whole checkpoint of the family of
            ``config``; a LoRA is broken or of another model; an option does not fit the model or
            the device.
        OSError: the hub cannot be reached, has no such model or refuses it, and this machine's
            cache does not hold it.
        TypeError: the pipeline's denoiser is unknown.
        ImportError: an option needs a package that is not installed.
    """
    if not isinstance(model, (str, Path)):
        text = f"The model is of type {type(model).__name__}. Pass its name, folder or file."
        raise InvalidTypeError(text)
    options = LoadingOptions(
        variant=variant,
        revision=revision,
        lora=lora,  # type: ignore[arg-type]  # it converts them
        quantization=quantization,
        offload=offload,
        scheduler=scheduler,
        tokenizer=tokenizer,  # type: ignore[arg-type]
        config=config,  # type: ignore[arg-type]
    )
    device = checked_device(device)
    dtype = checked_dtype(dtype)
    options.check(model, device)
    loras = read_loras(options)  # before the model's weights, which take long
    path = find_model(model)
    name = HubName.read(str(model), revision) if path is None else None
    with named_on_hub(name):
        if name is not None:
            path = HubModel.find(name, options).fetch()
        assert path is not None
        pipe = _load(path, name, options, dtype, half=device.type == "cuda")
    pipe.register_to_config(_name_or_path=str(name or path))
    find_denoiser(pipe)
    load_loras(pipe, loras)
    note_options(pipe, options)
    return place(pipe, device, offload)


def _load(
    path: Path,
    name: HubName | None,
    options: LoadingOptions,
    dtype: torch.dtype | None,
    *,
    half: bool,
) -> Pipeline:
    """Return the pipeline of a folder or a checkpoint, on the CPU; ``half`` as in
    PipelineFolder.dtype()."""
    if path.is_file():
        settings = Header.of_file(path).settings_folder(options.config)
        folder = PipelineFolder.judged(settings, options, settings=True)
        with named_errors(folder.path):
            return load_single_file(path, folder, folder.dtype(dtype, half))
    folder = PipelineFolder.judged(path, options)
    if folder.files.chosen:
        text = f"{name or path} has all its weights as {folder.files.variant} alone, which are "
        warn(f"{text}loaded: `variant={folder.files.variant!r}`.", SdattnWarning)
    return _load_folder(folder, dtype, half)


def pipeline_without_weights(folder: PipelineFolder) -> Pipeline:
    """Return the pipeline of a folder whose models are on torch's meta device, of which the
    settings alone are read."""
    import diffusers

    models: dict[str, Any] = {}
    for name, has_weights in models_in(folder.index).items():
        if has_weights:
            library, kind = folder.index[name]
            models[name] = without_weights(getattr(home_of(library), kind), folder.path / name)
    with named_errors(folder.path):
        parts = {**folder.parts(), **models}
        pipe = diffusers.DiffusionPipeline.from_pretrained(folder.path, **parts)
    note_options(pipe, folder.options)
    return pipe


def _load_folder(folder: PipelineFolder, dtype: torch.dtype | None, half: bool) -> Pipeline:
    """Return the pipeline of a folder, on the CPU; ``half`` as in PipelineFolder.dtype()."""
    import diffusers

    with named_errors(folder.path):
        dtype = folder.dtype(dtype, half)
        parts = {**folder.parts(), **lent_parts(folder, dtype), **quantized(folder, dtype)}
        pipe = diffusers.DiffusionPipeline.from_pretrained(
            folder.path,
            use_safetensors=True,
            variant=folder.files.variant,
            **parts,
            **as_dtype(dtype),
        )
    # Weights missing from the files stay without values, on torch's meta device.
    models = {k: v for k, v in pipe.components.items() if isinstance(v, torch.nn.Module)}
    check_whole(folder.path, models)
    for model in models.values():
        model.eval()  # a UNet with AnimateDiff's motion modules starts in training mode
    return pipe


def lent_parts(folder: PipelineFolder, dtype: torch.dtype) -> dict[str, object]:
    """Return the parts of a demo whose weights another demo has, on the CPU; no parts for any
    other folder."""
    from safetensors.torch import load_file

    lent: dict[str, object] = {}
    for part, source in LENT.get(folder_name(folder.path) or "", {}).items():
        library, kind = folder.index[part]
        model: Any = without_weights(getattr(home_of(library), kind), folder.path / part, "cpu")
        [file] = (HOME / source).glob("*.safetensors")
        weights = load_file(file)
        names = {name: name for name in model.state_dict()}
        # the files have a text encoder's prefix; transformers 5 dropped it for some
        names |= {n: f"text_model.{n}" for n in names if f"text_model.{n}" in weights}
        model.load_state_dict({name: weights[saved] for name, saved in names.items()})
        lent[part] = torch.nn.Module.to(model.eval(), dtype)  # diffusers' own method warns
    return lent
