"""`generate()`: run a pipeline with capture; `Run`: what came out, ready to be saved."""

from __future__ import annotations

import difflib
import inspect
import math
import platform
import warnings
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from . import __version__
from .capture import capture
from .files import check_target, save_run
from .heatmaps import Heatmaps, cross_maps, heatmaps_of
from .layers import TEXT_KINDS
from .maps import MapStore
from .pipelines import DEMO_SETTINGS, default_size, is_demo, size_unit
from .prompts import read_prompts
from .tokens import Prompt

if TYPE_CHECKING:
    from PIL import Image


@dataclass
class Run:
    """What :func:`generate` made.

    Attributes:
        images: PIL, one or more a prompt.
        heatmaps: those of each image.
        negative_heatmaps: those of each image's negative prompt, where both branches were asked
            for; else empty.
        store: the captured maps.
        info: the settings of each image's run, as ``run.json`` holds them.
    """

    images: list[Image.Image]
    heatmaps: list[Heatmaps]
    store: MapStore
    info: list[dict[str, Any]]
    negative_heatmaps: list[Heatmaps] = field(default_factory=list, kw_only=True)

    def save(self, folder: str | Path, *, force: bool = False) -> list[Path]:
        """Write a run's folder, see :func:`sdattn.files.save_run`; with several images one each,
        ``folder-0``, ``folder-1`` and so on. Returns the folders."""
        folders = run_folders(folder, len(self.images))
        for path in folders:  # before any is written
            check_target(path, force=force)
        maps = cross_maps(self.store)
        for i, path in enumerate(folders):
            layers = {name: one[i] for name, one in maps.items()}
            negative = self.negative_heatmaps[i] if self.negative_heatmaps else None
            save_run(
                path,
                self.images[i],
                self.heatmaps[i],
                layers,
                self.info[i],
                negative=negative,
                force=force,
            )
        return folders


def run_folders(folder: str | Path, number: int) -> list[Path]:
    """The folders of a run's images: ``folder``, or ``folder-0``, ``folder-1`` and so on."""
    return [Path(folder)] if number == 1 else [Path(f"{folder}-{i}") for i in range(number)]


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
        pipe: a pipeline that :func:`sdattn.capture` and :func:`sdattn.read_prompts` know. The
            frames of a video are images.
        prompt: one prompt or several.
        seed: of the first image; the next image has the next seed. Noise is drawn on the CPU, so
            that it does not depend on the device.
        words: keep the maps of these words and phrases only.
        capture_options: handed to :func:`sdattn.capture`, ``{"layers": ("mid", "up")}`` say. With
            ``{"branch": "both"}`` the negative prompt gets heatmaps too.
        options: handed to the pipeline: ``num_inference_steps``, ``guidance_scale``,
            ``negative_prompt``, ``height``, ``width``, ``num_images_per_prompt`` and so on.

    Returns:
        Run: images and heatmaps, ``num_images_per_prompt`` for each prompt, in order.

    Raises:
        ValueError: an empty prompt, a size or a number of steps that cannot be.
        KeyError: a word that is in none of the prompts.
    """
    options = checked_options(pipe, options)
    read = read_prompts(pipe, prompt, **options)
    settings = _checked_capture(capture_options or {}, options)
    if isinstance(words, str) or (words is not None and not words):
        raise ValueError(f"words={words!r}: pass a list of words and phrases, or None for all.")
    if words is not None:
        settings["tokens"] = columns_of(words, read)
    seeds = [seed + i for i in range(len(read) * options.get("num_images_per_prompt", 1))]
    return sample(pipe, read, seeds, options, settings)


def sample(
    pipe: Any,
    prompts: Sequence[Prompt],
    seeds: Sequence[int],
    options: Mapping[str, Any],
    capture_options: Mapping[str, Any] | None = None,
) -> Run:
    """:func:`generate` for prompts that have been read and options that have been checked.

    ``seeds`` has one for each image, in the order of the pipeline.
    """
    settings = dict(capture_options or {})
    both = settings.pop("branch", "conditional") == "both"
    with ExitStack() as captures:
        store = captures.enter_context(capture(pipe, **settings))
        if both:  # a capture of its own, since some pipelines run the two in turn
            settings |= {"branch": "unconditional", "tokens": None}
            of_negative = captures.enter_context(capture(pipe, **settings))
        result = call_pipeline(pipe, [one.text for one in prompts], seeds, options)
    blanked = _blanked(result)
    maps = heatmaps_of(store, prompts)
    negative: list[Heatmaps] = []
    if both:
        texts = _one_each(options["negative_prompt"], len(prompts))
        read = read_prompts(pipe, texts, of_negative.n_text, negative=True, **options)
        negative = heatmaps_of(of_negative, read)
    images = pictures_of(result)
    common = _describe(pipe, store, options)
    each = len(images) // len(seeds)  # the frames of a video share their seed
    info = [
        {"prompt": maps[i].prompt.text, "seed": seeds[i // each], **common, "size": [*image.size]}
        for i, image in enumerate(images)
    ]
    negatives = options.get("negative_prompt")
    if negatives is not None:
        a_prompt = len(images) // len(prompts)
        for i, one in enumerate(info):
            text = _one_each(negatives, len(prompts))[i // a_prompt]
            one["options"] = {**one["options"], "negative_prompt": text}
    for i in blanked:
        info[i]["blanked"] = True
    return Run(images, maps, store, info, negative_heatmaps=negative)


def call_pipeline(
    pipe: Any, prompts: list[str], seeds: Sequence[int], options: Mapping[str, Any]
) -> Any:
    """Run a pipeline on prompts, the noise of each image drawn on the CPU from its seed."""
    options = dict(options)
    if options.get("negative_prompt") is not None:  # diffusers wants a list beside a list
        options["negative_prompt"] = _one_each(options["negative_prompt"], len(prompts))
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    return pipe(prompt=prompts, generator=generators, **options)


def _one_each(negative: str | Sequence[str], prompts: int) -> list[str]:
    return [negative] * prompts if isinstance(negative, str) else list(negative)


def pictures_of(result: Any) -> list[Any]:
    """The PIL images of what a pipeline returned, the frames of a video in order."""
    if hasattr(result, "images"):
        return list(result.images)
    return [frame for video in result.frames for frame in video]


def _checked_capture(settings: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, Any]:
    """Refuse what would leave the run without heatmaps, before it runs."""
    branch, kinds = settings.get("branch", "conditional"), settings.get("kinds", TEXT_KINDS)
    if branch not in ("conditional", "both") or not set(kinds).intersection(TEXT_KINDS):
        raise ValueError(
            f"capture_options={dict(settings)}: generate() shows where the words of the prompt "
            "went. For anything else use capture() around the pipeline."
        )
    if branch == "both" and not options.get("negative_prompt"):
        raise ValueError("branch='both' shows the words of a negative prompt. Pass one.")
    return dict(settings)


def checked_options(pipe: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """A pipeline's options, refused where they cannot be, filled in where that needs knowledge.

    Raises:
        ValueError: an option that is not free here, a size or a number of steps that cannot be.
    """
    if is_demo(pipe):
        options = {**DEMO_SETTINGS, **options}
    if taken := sorted({"generator", "output_type", "prompt_embeds", "return_dict"} & set(options)):
        raise ValueError(
            f"{', '.join(taken)} cannot be chosen here. Use capture() around the pipeline."
        )
    _check_names(pipe, options)
    for name, value in options.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{name}={value}: pass a finite number.")
    _check_guidance(pipe, options)
    options = {**options, **_checked_size(pipe, options)}
    steps = options.get("num_inference_steps", 1)
    most = pipe.scheduler.config.num_train_timesteps
    if not isinstance(steps, int) or not 1 <= steps <= most:
        raise ValueError(f"num_inference_steps={steps}: pass 1 to {most}, the scheduler's most.")
    return options


def _check_names(pipe: Any, options: Mapping[str, Any]) -> None:
    """Refuse what the pipeline does not know: some of diffusers' take anything and heed nothing."""
    known = [
        name
        for name, one in inspect.signature(pipe.__call__).parameters.items()
        if one.kind is not one.VAR_KEYWORD and name != "prompt"
    ]
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known) or known
            raise ValueError(
                f"A {type(pipe).__name__} has no option {name!r}. It has: {', '.join(near)}."
            )


def _check_guidance(pipe: Any, options: Mapping[str, Any]) -> None:
    """Refuse a negative prompt that the pipeline would drop in silence."""
    known = inspect.signature(pipe.__call__).parameters
    name = next((one for one in ("true_cfg_scale", "guidance_scale") if one in known), None)
    if not options.get("negative_prompt") or name is None:
        return
    scale = options.get(name, known[name].default)
    if isinstance(scale, (int, float)) and scale <= 1:
        raise ValueError(
            f"A {type(pipe).__name__} heeds a negative prompt only with {name} above 1; found "
            f"{scale}. Pass {name}=4, say, or no negative prompt."
        )


def _checked_size(pipe: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Both sides of the size, or none (of a lone side diffusers would take no notice), and a
    picture that is as the model made it."""
    found: dict[str, Any] = {}
    if "use_resolution_binning" in inspect.signature(pipe.__call__).parameters:
        if options.get("use_resolution_binning"):
            raise ValueError(
                "use_resolution_binning=True has the model make another size and cuts the picture "
                "out of it, so that the heatmaps would not fit. Pass a size it was trained on, or "
                "use capture() around the pipeline."
            )
        found["use_resolution_binning"] = False
    given = {side: options[side] for side in ("height", "width") if options.get(side) is not None}
    unit = size_unit(pipe)
    for side, value in given.items():
        if not isinstance(value, int):
            raise ValueError(f"{side}={value!r}: pass a whole number of pixels.")
        if value < unit or value % unit:
            lower = max(unit, value // unit * unit)
            raise ValueError(
                f"{side}={value}: this model makes sizes that are a multiple of {unit} pixels. "
                f"The nearest are {lower} and {lower + unit}."
            )
    if given:
        height, width = default_size(pipe)
        found |= {"height": height, "width": width, **given}
    return found


def columns_of(words: Sequence[str], prompts: Sequence[Prompt]) -> list[int]:
    """The token columns of words and phrases in any of the prompts, in order.

    Raises:
        KeyError: one that is in none of them.
    """
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


def _blanked(result: Any) -> list[int]:
    """The images that the pipeline's safety checker blanked, with a warning."""
    flags = getattr(result, "nsfw_content_detected", None) or []
    blanked = [i for i, flag in enumerate(flags) if flag]
    if blanked:
        warnings.warn(
            f"The pipeline's safety checker blanked image(s) {blanked}; their heatmaps are of what "
            "was generated before that.",
            stacklevel=4,
        )
    return blanked


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
