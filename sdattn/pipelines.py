"""Load a pipeline, the demo model among them, and tell what a pipeline is.

load_pipeline("demo")    the model in this package, a folder, a file, or a hub id
"""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .layers import find_denoiser
from .tokens import Prompt, TruncationWarning, read_prompt

DEMO = Path(__file__).parent / "demo"
DEMO_SETTINGS = {"num_inference_steps": 20, "guidance_scale": 2.0}
DEMO_INVERSION = {"learning_rate": 5e-2}  # 1e-2 is for 50 steps
TEXT_TO_IMAGE = {"StableDiffusionPipeline", "StableDiffusionXLPipeline"}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def load_pipeline(
    model: str | Path = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Any:
    """Load a Stable Diffusion pipeline.

    Args:
        model: ``"demo"``, the small model inside this package; a folder that diffusers saved; a
            single ``.safetensors`` checkpoint of SD 1.x, 2.x or SDXL (diffusers fetches its
            configuration from the hub); or a hub id, ``"owner/name"``.
        device: by default CUDA where there is one, else MPS, else the CPU.
        dtype: by default float16 on CUDA, float32 elsewhere.

    Returns:
        The diffusers pipeline, on ``device``.

    Raises:
        FileNotFoundError: no such folder or file.
        ValueError: the folder holds no pipeline, or the file is no checkpoint that is known.
        OSError: the hub cannot be reached or has no such model.
        TypeError: the pipeline has no UNet.
    """
    from diffusers import DiffusionPipeline

    device = torch.device(device or best_device())
    dtype = dtype or (torch.float16 if device.type == "cuda" else torch.float32)
    path = DEMO if model == "demo" else Path(model).expanduser()
    if path.is_file():
        pipe = _load_single_file(path, dtype)
    elif path.is_dir():
        if not (path / "model_index.json").is_file():
            raise ValueError(
                f"{path} is a folder without model_index.json, so it holds no pipeline. Pass a "
                "folder made by save_pretrained."
            )
        pipe = DiffusionPipeline.from_pretrained(path, dtype=dtype)
    elif _HUB_ID.fullmatch(str(model)):
        with _needs_the_hub(f"{model!r} (there is no folder of that name)"):
            pipe = DiffusionPipeline.from_pretrained(str(model), dtype=dtype, use_safetensors=True)
    else:
        raise FileNotFoundError(
            f"There is no model at {model}. Pass 'demo', a diffusers folder, a .safetensors file, "
            "or a hub id such as owner/name."
        )
    find_denoiser(pipe)
    return pipe.to(device)


def best_device() -> str:
    """``"cuda"``, ``"mps"`` or ``"cpu"``, the first that this machine has."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def _load_single_file(path: Path, dtype: torch.dtype) -> Any:
    from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
    except SafetensorError as error:
        raise ValueError(
            f"{path} is no .safetensors file ({error}). Pickled checkpoints are not read; convert "
            "them to safetensors first."
        ) from error
    kind: Any = None
    if any(name.startswith("conditioner.embedders.") for name in names):
        kind = StableDiffusionXLPipeline
    elif any(name.startswith("cond_stage_model.") for name in names):
        kind = StableDiffusionPipeline
    if kind is not None:
        with _needs_the_hub(f"the configuration of {path}"):
            return kind.from_single_file(str(path), dtype=dtype)
    raise ValueError(
        f"{path} holds {len(names)} tensors, but not the text encoder of an SD 1.x, 2.x or SDXL "
        "checkpoint. Pass the whole checkpoint, or a diffusers folder."
    )


@contextmanager
def _needs_the_hub(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # httpx, hub and OS errors alike: all mean that it cannot be had
        reason = " ".join(str(error).split())[:300]
        raise OSError(f"Could not load {what} from the hub: {reason}") from error


def is_demo(pipe: Any) -> bool:
    """Whether ``pipe`` is the model inside this package."""
    return Path(str(getattr(pipe, "name_or_path", ""))) == DEMO


def find_tokenizer(pipe: Any) -> Any:
    """The tokenizer whose columns the cross-attention has (SDXL's two have the same columns)."""
    return _tokenizers(pipe)[0]


def read_prompts(pipe: Any, prompts: str | Sequence[str]) -> list[Prompt]:
    """Prompts as the pipeline's text encoder sees them, see :func:`sdattn.read_prompt`.

    Raises:
        ValueError: a prompt without a word; or the pipeline's tokenizers (SDXL has two) put a word
            into different columns, which it would share with another word.
    """
    first, *others = _tokenizers(pipe)
    texts = [prompts] if isinstance(prompts, str) else list(prompts)
    read = [read_prompt(first, text) for text in texts]
    for other in others:
        for one in read:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", TruncationWarning)  # the first one has warned
                again = read_prompt(other, one.text)
            for word, twin in zip(one.words, again.words, strict=True):
                if word.columns != twin.columns:
                    raise ValueError(
                        f"The pipeline's tokenizers disagree on {one.text!r}: {word.text!r} is at "
                        f"columns {word.columns} for one and {twin.columns} for the other. Use "
                        "tokenizers that split words alike."
                    )
    return read


def _tokenizers(pipe: Any) -> list[Any]:
    found = [getattr(pipe, name, None) for name in ("tokenizer", "tokenizer_2")]
    found = [one for one in found if one is not None]
    if not found:
        raise TypeError(f"A {type(pipe).__name__} without a tokenizer: its words cannot be told.")
    return found


def latent_size(pipe: Any, options: Mapping[str, Any] | None = None) -> tuple[int, int]:
    """(rows, cols) of the latent that a pipeline makes with these options, or by default."""
    if options and "height" in options:
        height, width = options["height"], options["width"]
        return height // pipe.vae_scale_factor, width // pipe.vae_scale_factor
    size = pipe.unet.config.sample_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def check_text_to_image(pipe: Any) -> None:
    """Refuse a pipeline that makes its picture of more than noise and prompts.

    Raises:
        TypeError: it is no ``StableDiffusionPipeline`` or ``StableDiffusionXLPipeline``.
    """
    if not TEXT_TO_IMAGE & {cls.__name__ for cls in type(pipe).__mro__}:
        known = " or ".join(sorted(TEXT_TO_IMAGE))
        raise TypeError(f"Asked to edit with a {type(pipe).__name__}. Pass a {known}.")


def model_passes(pipe: Any, options: Mapping[str, Any]) -> int:
    """How often a run will call the model; second-order schedulers do so twice a step."""
    scheduler = type(pipe.scheduler).from_config(pipe.scheduler.config)
    scheduler.set_timesteps(_option(pipe, options, "num_inference_steps"))
    return len(scheduler.timesteps)


def is_guided(pipe: Any, options: Mapping[str, Any]) -> bool:
    """Whether a run will have unconditional rows in its batch."""
    # A model that takes the guidance scale as an input (LCM) runs none.
    distilled = pipe.unet.config.time_cond_proj_dim is not None
    return bool(_option(pipe, options, "guidance_scale") > 1 and not distilled)


def _option(pipe: Any, options: Mapping[str, Any], name: str) -> Any:
    """An option's value, the pipeline's own default where it was not given."""
    return options.get(name, inspect.signature(pipe.__call__).parameters[name].default)
