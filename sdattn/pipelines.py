"""Load a pipeline, run it with capture, keep the result.

load_pipeline("demo")             the model in this package, a folder, a file, or a hub id
generate(pipe, prompt, seed=0)    -> Run: images, heatmaps, maps
"""

from __future__ import annotations

import math
import platform
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import __version__
from .capture import capture
from .files import save_run
from .heatmaps import Heatmaps, heatmaps_of
from .layers import find_denoiser
from .maps import MapStore
from .tokens import Prompt, read_prompt

if TYPE_CHECKING:
    from PIL import Image

DEMO = Path(__file__).parent / "demo"
DEMO_SETTINGS = {"num_inference_steps": 20, "guidance_scale": 2.0}
_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


@dataclass
class Run:
    """What :func:`generate` made.

    Attributes:
        images: PIL, one or more a prompt.
        heatmaps: those of each image.
        store: the captured maps.
        info: the settings of each image's run, as ``run.json`` holds them.
    """

    images: list[Image.Image]
    heatmaps: list[Heatmaps]
    store: MapStore
    info: list[dict[str, Any]]

    def save(self, folder: str | Path, *, force: bool = False) -> list[Path]:
        """Write a run's folder, see :func:`sdattn.files.save_run`; with several images one each,
        ``folder-0``, ``folder-1`` and so on. Returns the folders."""
        single = len(self.images) == 1
        folders = [
            Path(folder) if single else Path(f"{folder}-{i}") for i in range(len(self.images))
        ]
        for i, path in enumerate(folders):
            layers = {}
            for name, one in self.store.maps.items():
                one = one[i].detach().float()
                layers[name] = one.flatten(0, -4).mean(0) if one.ndim > 3 else one
            save_run(path, self.images[i], self.heatmaps[i], layers, self.info[i], force=force)
        return folders


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
    return pipe.to(device=device, dtype=dtype)


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


def generate(
    pipe: Any,
    prompt: str | Sequence[str],
    *,
    seed: int = 0,
    words: Sequence[str] | None = None,
    capture_options: Mapping[str, Any] | None = None,
    **options: Any,
) -> Run:
    """Run a pipeline and see where each word of the prompt went.

    Args:
        pipe: a text-to-image Stable Diffusion pipeline with a UNet.
        prompt: one prompt or several.
        seed: of the first image; the next image has the next seed. Noise is drawn on the CPU, so
            that it does not depend on the device.
        words: keep the maps of these words and phrases only.
        capture_options: handed to :func:`sdattn.capture`, ``{"layers": ("mid", "up")}`` say.
        options: handed to the pipeline: ``num_inference_steps``, ``guidance_scale``,
            ``negative_prompt``, ``height``, ``width``, ``num_images_per_prompt`` and so on.

    Returns:
        Run: images and heatmaps, ``num_images_per_prompt`` for each prompt, in order.

    Raises:
        ValueError: an empty prompt, a size or a number of steps that cannot be.
        KeyError: a word that is in none of the prompts.
    """
    if is_demo(pipe):
        options = {**DEMO_SETTINGS, **options}
    prompts = [prompt] if isinstance(prompt, str) else list(prompt)
    tokenizer = find_tokenizer(pipe)
    read = [read_prompt(tokenizer, text) for text in prompts]
    options = _checked_options(pipe, options)
    settings = dict(capture_options or {})
    if words is not None:
        settings["tokens"] = _columns_of(words, read)
    images_each = options.get("num_images_per_prompt", 1)
    seeds = [seed + i for i in range(len(prompts) * images_each)]
    generators = [torch.Generator("cpu").manual_seed(one) for one in seeds]
    with capture(pipe, **settings) as store:
        result = pipe(prompts, generator=generators, **options)
    _warn_of_blanked(result)
    maps = heatmaps_of(store, read)
    common = _describe(pipe, store, options)
    info = [
        {"prompt": maps[i].prompt.text, "seed": seeds[i], **common, "size": list(image.size)}
        for i, image in enumerate(result.images)
    ]
    return Run(list(result.images), maps, store, info)


def is_demo(pipe: Any) -> bool:
    """Whether ``pipe`` is the model inside this package."""
    return Path(str(getattr(pipe, "name_or_path", ""))) == DEMO


def find_tokenizer(pipe: Any) -> Any:
    """The tokenizer whose columns the cross-attention has (SDXL's two have the same columns)."""
    for name in ("tokenizer", "tokenizer_2"):
        if getattr(pipe, name, None) is not None:
            return getattr(pipe, name)
    raise TypeError(f"A {type(pipe).__name__} without a tokenizer: its words cannot be told.")


def _checked_options(pipe: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with both sides of the size or none, since diffusers drops a lone one."""
    steps = options.get("num_inference_steps", 1)
    most = pipe.scheduler.config.num_train_timesteps
    if not 1 <= steps <= most:
        raise ValueError(f"num_inference_steps={steps}: pass 1 to {most}, the scheduler's most.")
    given = {side: options[side] for side in ("height", "width") if options.get(side) is not None}
    unit = math.lcm(8, pipe.vae_scale_factor)  # diffusers asks for 8 whatever the VAE
    for side, value in given.items():
        if value < unit or value % unit:
            lower = max(unit, value // unit * unit)
            raise ValueError(
                f"{side}={value}: this model makes sizes that are a multiple of {unit} pixels. "
                f"The nearest are {lower} and {lower + unit}."
            )
    cells = latent_size(pipe)
    default = {
        "height": cells[0] * pipe.vae_scale_factor,
        "width": cells[1] * pipe.vae_scale_factor,
    }
    return {**options, **(default if given else {}), **given}


def latent_size(pipe: Any) -> tuple[int, int]:
    """(rows, cols) of the latent that a pipeline makes by default."""
    size = pipe.unet.config.sample_size
    return (size, size) if isinstance(size, int) else (size[0], size[1])


def _columns_of(words: Sequence[str], prompts: Sequence[Prompt]) -> list[int]:
    columns: set[int] = set()
    for word in words:
        errors = []
        for one in prompts:
            try:
                columns.update(*one.find(word))
            except KeyError as error:
                errors.append(error)
        if len(errors) == len(prompts):
            raise errors[0]
    return sorted(columns)


def _warn_of_blanked(result: Any) -> None:
    flags = getattr(result, "nsfw_content_detected", None) or []
    if any(flags):
        blanked = [i for i, flag in enumerate(flags) if flag]
        warnings.warn(
            f"The pipeline's safety checker blanked image(s) {blanked}; their heatmaps are of what "
            "was generated before that.",
            stacklevel=3,
        )


def _describe(pipe: Any, store: MapStore, options: Mapping[str, Any]) -> dict[str, Any]:
    plain = (str, int, float, bool, type(None))
    return {
        "model": "demo" if is_demo(pipe) else str(getattr(pipe, "name_or_path", "")),
        "pipeline": type(pipe).__name__,
        "scheduler": type(pipe.scheduler).__name__,
        "options": {key: value for key, value in options.items() if isinstance(value, plain)},
        "device": pipe.device.type,
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "timesteps": store.timesteps,
        "versions": {
            "python": platform.python_version(),
            "sdattn": __version__,
            **{name: version(name) for name in ("torch", "diffusers", "transformers")},
        },
    }
