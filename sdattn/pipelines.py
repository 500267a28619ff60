"""Load a pipeline, the demo model among them, and tell what a pipeline is.

load_pipeline("demo")    the model in this package, a folder, a file, or a hub id
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .layers import find_denoiser

DEMO = Path(__file__).parent / "demo"
DEMO_SETTINGS = {"num_inference_steps": 20, "guidance_scale": 1.5}
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
    for name in ("tokenizer", "tokenizer_2"):
        if getattr(pipe, name, None) is not None:
            return getattr(pipe, name)
    raise TypeError(f"A {type(pipe).__name__} without a tokenizer: its words cannot be told.")


def latent_size(pipe: Any) -> tuple[int, int]:
    """(rows, cols) of the latent that a pipeline makes by default."""
    size = pipe.unet.config.sample_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])
