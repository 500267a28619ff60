"""Load a pipeline, the demo models among them, and what is known of it: sizes, numbers, limits."""

import inspect
import math
import re
from collections import Counter
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from ..errors import InvalidValueError, MissingFileError
from .demos import DEMOS, lent_parts
from .devices import checked_device
from .encoders import option_of
from .families import edits_of, family_of, guidance_of, registered
from .families.unet import CHECKPOINTS
from .guidance import guided_order
from .hub import needs_the_hub
from .layers import find_denoiser, what_it_holds
from .model_index import absent_parts, check_whole, named_errors, read_index, without_weights
from .quiet import no_torchvision_notices
from .reading import read_prompts

UNSEEN = {
    "linear": "they have no softmax",
    "temporal": "they look at frames, not at the text",
    "text": "they are of the text alone",
}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@no_torchvision_notices()
def load_pipeline(
    model: str | Path = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load a pipeline of diffusers.

    Args:
        model: ``"demo"`` or ``"demo-mmdit"``, the small models inside this package, Stable
            Diffusion 1 and 3 in miniature; a folder that diffusers saved; a single ``.safetensors``
            checkpoint of SD 1.x, 2.x or SDXL (diffusers fetches its configuration from the hub); or
            a hub id, ``"owner/name"``.
        device: by default CUDA where there is one, else MPS, else the CPU.
        dtype: by default float16 on CUDA, float32 elsewhere.

    Returns:
        The diffusers pipeline, on ``device``.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: this machine has no such device; the folder holds no pipeline, asks for code
            of its own or has pickles only, see :func:`sdattn.models.model_index.read_index`; or
            the file is no checkpoint that is known.
        OSError: the hub cannot be reached or has no such model.
        TypeError: the pipeline's denoiser is none that is known.
    """
    import diffusers

    device = checked_device(device)
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    path = find_model(model)
    if path is not None and path.is_file():
        pipe = _load_single_file(path, dtype)
    else:
        folder = path or download(str(model))
        # Judged by its files first: diffusers would run code that they name.
        index = read_index(folder)
        parts = {**absent_parts(index), **lent_parts(folder, index, dtype)}
        with named_errors(folder):
            _check_family(folder, index)
            pipe = diffusers.DiffusionPipeline.from_pretrained(
                folder, use_safetensors=True, **parts, **_as_dtype(dtype)
            )
        # Weights that the files lack stay without values, on torch's meta device.
        models = pipe.components.items()
        check_whole(folder, {k: part for k, part in models if isinstance(part, torch.nn.Module)})
        pipe.register_to_config(_name_or_path=path or str(model))
    find_denoiser(pipe)
    return pipe.to(device)


def _check_family(folder: Path, index: Mapping[str, Any]) -> None:
    """Refuse a denoiser of no known family before its weights are read, which takes long."""
    import diffusers

    for name in ("unet", "transformer"):
        match index.get(name):
            case ["diffusers", str(kind)] if cls := getattr(diffusers, kind, None):
                lists = (family.lists(base) for base in cls.__mro__ for family in registered())
                # Not by its name: build it without weights and look at its parts.
                if not any(lists):  # it may be recognised by its parts
                    model = without_weights(cls, folder / name)
                    asked = f"Asked to capture a {index['_class_name']}"
                    family_of(model, f"{asked}, which {what_it_holds(None, model)}")


def find_model(model: str | Path) -> Path | None:
    """The folder or file of what :func:`load_pipeline` takes; None for a hub id.

    Raises:
        FileNotFoundError: there is neither, and it is no hub id.
        ValueError: the folder holds no pipeline.
    """
    path = DEMOS.get(str(model)) or Path(model).expanduser()
    if path.is_dir() and not (path / "model_index.json").is_file():
        raise InvalidValueError(
            f"{path} is a folder without model_index.json, so it holds no pipeline. Pass a "
            "folder made by save_pretrained."
        )
    if path.is_file() or path.is_dir():
        return path
    if _HUB_ID.fullmatch(str(model)):
        return None
    raise MissingFileError(
        f"There is no model at {model}. Pass {' or '.join(map(repr, DEMOS))}, a diffusers folder, "
        "a .safetensors file, or a hub id such as owner/name."
    )


def download(name: str) -> Path:
    """The folder of a model of the hub, fetched where it is not there yet, without its pickles.

    Raises:
        OSError: it cannot be had, or has Python of its own to run.
    """
    from diffusers import DiffusionPipeline

    with needs_the_hub(f"{name!r}, which is no folder here,"):
        return Path(DiffusionPipeline.download(name, use_safetensors=True, trust_remote_code=False))


def _load_single_file(path: Path, dtype: torch.dtype) -> Any:
    import diffusers
    from safetensors import SafetensorError, safe_open

    try:
        if path.suffix != ".safetensors":  # by which diffusers decides how to read it
            raise SafetensorError("its name does not end in .safetensors")
        with safe_open(path, framework="pt") as file:
            names = list(file.keys())
    except SafetensorError as error:
        raise InvalidValueError(
            f"{path} is no .safetensors file ({error}). Pickled checkpoints are not read; convert "
            "them to safetensors first."
        ) from error
    for beginning, pipeline in CHECKPOINTS.items():
        if any(name.startswith(beginning) for name in names):
            with needs_the_hub(f"the configuration of {path}"):
                kind = getattr(diffusers, pipeline)
                return kind.from_single_file(str(path), **_as_dtype(dtype))
    raise InvalidValueError(
        f"{path} holds {len(names)} tensors, but not the text encoder of an SD 1.x, 2.x or SDXL "
        "checkpoint. Pass the whole checkpoint, or a diffusers folder."
    )


def _as_dtype(dtype: torch.dtype) -> dict[str, torch.dtype]:
    """The option of ``from_pretrained``; diffusers before 0.40 ignores ``dtype``."""
    release = tuple(map(int, version("diffusers").split(".")[:2]))
    return {"dtype" if release >= (0, 40) else "torch_dtype": dtype}


def cell_size(pipe: Any) -> int:
    """Pixels a side of the finest cell of the maps: one of the latent, or a transformer's patch."""
    denoiser = find_denoiser(pipe)
    return int(_vae_scale(pipe) * denoiser.family.cell(denoiser.model))


def _vae_scale(pipe: Any) -> int:
    """Pixels a side of a cell of the latents; Kandinsky 5 names it as pipelines of videos do."""
    name = "vae_scale_factor"
    return int(getattr(pipe, name if hasattr(pipe, name) else f"{name}_spatial"))


def size_unit(pipe: Any) -> int:
    """Sizes must be a multiple of this many pixels, and of those that diffusers asks for."""
    return math.lcm(find_denoiser(pipe).family.size_unit, cell_size(pipe))


def default_size(pipe: Any) -> tuple[int, int]:
    """(height, width) in pixels of the pictures that a pipeline makes by default."""
    denoiser = find_denoiser(pipe)
    size = getattr(pipe, "default_sample_size", None)
    size = size or getattr(denoiser.model.config, "sample_size", None)
    if size is None:
        side = denoiser.family.default_size
        return side, side
    rows, cols = (size, size) if isinstance(size, int) else size
    return rows * _vae_scale(pipe), cols * _vae_scale(pipe)


def latent_size(pipe: Any, options: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """(rows, cols) of the finest cells that a pipeline makes with these options, or by default."""
    height, width = default_size(pipe)
    if options and "height" in options:
        height, width = options["height"], options["width"]
    cell = cell_size(pipe)
    return height // cell, width // cell


def images_a_prompt(pipe: Any, options: Mapping[str, Any]) -> int:
    """How many pictures a run makes of one prompt; the frames of a video are pictures."""
    known = inspect.signature(pipe.__call__).parameters
    counts = ("num_images_per_prompt", "num_frames")
    return math.prod(option_of(pipe, options, name) or 1 for name in counts if name in known)


def shortcomings(pipe: Any) -> list[str]:
    """What of sdattn does not apply to a pipeline, a line each."""
    kinds = Counter[str](layer.kind for layer in find_denoiser(pipe).layers)
    found = [
        f"{kinds[kind]} {kind} attention layers cannot be captured: {why}."
        for kind, why in UNSEEN.items()
        if kinds[kind]
    ]
    if kinds["joint"]:
        found.append("joint attention: the text's columns are captured, not the picture's own.")
    for check in (guided_order, lambda pipe: read_prompts(pipe, "a")):
        try:
            check(pipe)
        except (TypeError, ValueError) as error:
            found.append(str(error))
    try:
        edits_of(pipe)
    except TypeError as error:
        found.append(f"sdattn edit: {error}")
    return found


def model_passes(pipe: Any, options: Mapping[str, Any]) -> int:
    """How often a run will call the model; second-order schedulers do so twice a step."""
    # A scheduler of its own, since set_timesteps would change that of the pipeline.
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    # A shift that depends on the picture's size moves timesteps and leaves their number.
    shift = {"mu": 1.0} if scheduler.config.get("use_dynamic_shifting") else {}
    scheduler.set_timesteps(option_of(pipe, options, "num_inference_steps"), **shift)
    return len(scheduler.timesteps)


def is_guided(pipe: Any, options: Mapping[str, Any]) -> bool:
    """Whether a run will have unconditional rows in its batch."""
    if guidance_of(pipe).known_by == "calls":  # in a batch of their own (FLUX)
        return False
    # A model that takes the guidance scale as an input (LCM) runs none.
    distilled = getattr(find_denoiser(pipe).model.config, "time_cond_proj_dim", None) is not None
    return bool(option_of(pipe, options, "guidance_scale") > 1 and not distilled)
