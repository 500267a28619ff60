"""A model's outline: its pipeline without weights, to check prompts and options against."""

from collections.abc import Mapping
from pathlib import Path

import torch

from ..models.denoiser import find_denoiser
from ..models.pipeline import Given, Pipeline
from .folder import PipelineFolder
from .index import home_of, named_errors, without_weights
from .locating import download, find_model
from .options import LoadingOptions
from .quiet import only_errors

_NO_OPTIONS = LoadingOptions()


def outline(model: str | Path = "demo", options: LoadingOptions = _NO_OPTIONS) -> Pipeline | None:
    """Return a model's pipeline without its weights, which cannot be run.

    It has the pipeline's own class, tokenizers, scheduler and processors; its models are on torch's
    meta device. So everything that needs only classes, configurations and tokens gives the same
    answers. It is None for models without an outline that may still load: a single ``.safetensors``
    file, and a pipeline with several models in one part, such as two ControlNets. All files of a
    hub model are fetched. Errors are :func:`sdattn.load_pipeline`'s, but for missing or broken
    weights.
    """
    path = find_model(model)
    if path is None:
        folder = download(str(model), variant=options.variant, revision=options.revision)
        pipe = _build(folder, str(model), options)
    else:
        pipe = None if path.is_file() else _build(path, path, options)
    if pipe is not None:
        find_denoiser(pipe)
    return pipe


def _build(path: Path, name: str | Path, options: LoadingOptions) -> Pipeline | None:
    import diffusers

    with only_errors(), named_errors(path):
        folder = PipelineFolder.judged(path, options)
        models = _models(path, folder.index)
        if None in models.values():
            return None
        parts = {**models, **folder.parts()}
        pipe = diffusers.DiffusionPipeline.from_pretrained(path, use_safetensors=True, **parts)
        pipe.register_to_config(_name_or_path=name)
    return pipe


def _models(folder: Path, index: Given) -> dict[str, object]:
    """Build the parts of a ``model_index.json`` that have weights, without them."""
    models: dict[str, object] = {}
    for name, entry in index.items():
        match entry:
            case [str(library), str(kind)]:
                cls = getattr(home_of(library), kind, None)  # None: diffusers refuses it itself
                if isinstance(cls, type) and issubclass(cls, torch.nn.Module):
                    models[name] = without_weights(cls, folder / name)
    return {**models, **_with_motion(models)}


def _with_motion(parts: Mapping[str, object]) -> dict[str, object]:
    """Build AnimateDiff's UNet from an image UNet and motion modules, off the CPU."""
    from diffusers import UNet2DConditionModel, UNetMotionModel

    unet = parts.get("unet")
    adapter = parts.get("motion_adapter")
    if adapter is None or not isinstance(unet, UNet2DConditionModel):
        return {}
    with torch.device("meta"):
        return {"unet": UNetMotionModel.from_unet2d(unet, adapter).eval()}
