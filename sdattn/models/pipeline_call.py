"""Call of a pipeline: check its options, seed each image, return its images."""

import functools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, ParamSpec, TypeVar

import torch

from ..errors import InvalidValueError, OptionError, did_you_mean, refuse
from .call_options import is_modular
from .denoiser import held_model
from .facts import (
    PipelineFacts,
    check_frames,
    check_guidance,
    check_makes_images,
    default_frames,
    default_size,
    frame_rate,
    images_a_prompt,
    size_unit,
)
from .finite import watch_finite
from .guidance import guider_of
from .pipeline import Options, Pipeline
from .threads import few_threads, warn_of_slow_steps
from .values import EACH, OURS, check_side, check_values, no_videos, whole

# What other programs and the command line call options of the pipelines
MEANT = {
    **dict.fromkeys(("step", "steps", "num_steps", "sampling_steps"), "num_inference_steps"),
    **dict.fromkeys(("cfg", "cfg_scale", "guidance", "scale"), "guidance_scale"),
    **dict.fromkeys(("batch_size", "n", "num_images", "num_samples"), "num_images_per_prompt"),
    **dict.fromkeys(("negative", "neg", "neg_prompt"), "negative_prompt"),
    **{"frames": "num_frames", "w": "width", "h": "height", "noise_seed": "seed"},
    **{"positive": "prompt", "sampler": "scheduler", "sampler_name": "scheduler"},
}
# Options of generate() and others, which a misspelt name may mean
_CALLERS = (
    *("seed", "words", "preset", "refine", "ask", "causal", "spots", "capture_options"),
    *("max_bytes", "candidates", "decide_at", "at_once"),
)
_BYTES_A_PIXEL = 3 * 4  # of the image that the autoencoder makes, RGB in float32

Given = ParamSpec("Given")
Made = TypeVar("Made")
_turns: weakref.WeakKeyDictionary[object, AbstractContextManager[bool]] = (
    weakref.WeakKeyDictionary()
)  # model -> its lock
_turns_lock = threading.Lock()
_drawn: ContextVar[list[Any] | None] = ContextVar("_drawn", default=None)


def one_at_a_time(function: Callable[Given, Made]) -> Callable[Given, Made]:
    """Make calls with the same pipeline, the first argument, wait for each other, run small models
    in few threads, see :mod:`sdattn.models.threads`, and put images that were drawn into errors,
    see :func:`images_in_errors`.

    A pipeline keeps the state of its run in itself and in its scheduler, so two threads that run it
    at the same time would mix them up. Pipelines that share their model take turns as well.
    """

    @functools.wraps(function)
    def waiting(*args: Given.args, **kwargs: Given.kwargs) -> Made:
        pipe = args[0] if args else kwargs.get("pipe")
        pipe = pipe.pipe if isinstance(pipe, PipelineFacts) else pipe
        with turn(pipe), few_threads(pipe), images_in_errors():
            return function(*args, **kwargs)

    return waiting


def turn(pipe: object) -> AbstractContextManager[bool]:
    """Return the lock that a thread holds while it runs a pipeline, for ``with`` blocks, also
    nested."""
    with _turns_lock:
        try:
            return _turns.setdefault(held_model(pipe) or pipe, threading.RLock())
        except (TypeError, RuntimeError):  # no object that could be a pipeline
            return threading.RLock()


@contextmanager
def images_in_errors() -> Iterator[None]:
    """Let each error of the block have, as its ``images``, what :func:`call_pipeline` drew in it:
    PIL images, for videos lists of frames. In a block of this kind nothing is added."""
    if _drawn.get() is not None:
        yield
        return
    images: list[Any] = []
    outside = _drawn.set(images)
    try:
        yield
    except BaseException as error:  # also where the user loses patience with the maps
        if images:
            vars(error)["images"] = images
        raise
    finally:
        _drawn.reset(outside)


def checked_options(
    pipe: Pipeline | PipelineFacts,
    options: Options,
    *,
    prompts: int = 1,
    videos: bool = False,
    own: Sequence[str] = (),
) -> dict[str, Any]:
    """Return the options of a call with ``prompts`` prompts, checked and completed.

    Args:
        videos: True if the caller can use videos.
        own: the caller's own options, which a misspelt name may mean (default: generate()'s).

    Raises:
        ValueError: an option that cannot be set here; an impossible size, number of steps or number
            of images; images that exceed this machine's memory; a text that is too long.
        TypeError: the pipeline makes videos, and the caller cannot use them.
    """
    facts = PipelineFacts.of(pipe)
    if not videos:
        check_makes_images(facts)
    given = {**(facts.demo.settings if facts.demo else {}), **options}
    options = {name: _plain(value) for name, value in given.items()}
    check_values(options)
    _check_names(facts, options, own)
    check_guidance(facts, options)
    _check_clip_skip(facts, options)
    # Sizes and counts last: they are filled in from what the pipeline does by default.
    options = {**options, **_checked_size(facts, options)}
    _check_counts(facts, options)
    _check_memory(facts, options, prompts)
    return options


def _plain(value: object) -> object:
    """Return another library's integer (numpy's) as Python's own."""
    number = whole(value)
    return value if number is None else number


def _check_counts(facts: PipelineFacts, options: Options) -> None:
    """Refuse a number of steps or frames that the pipeline cannot run."""
    most = facts.pipe.scheduler.config.get("num_train_timesteps", 1000)  # MiniMax-H3's has none
    steps = options.get("num_inference_steps", 1)
    if not 1 <= (whole(steps) or 0) <= most:
        raise refuse("num_inference_steps", steps, f"1 to {most}, the scheduler's most")
    if options.get("num_frames") is not None:
        check_frames(facts, options["num_frames"])
    if facts.makes_videos:
        frame_rate(facts, options)


def _check_clip_skip(facts: PipelineFacts, options: Options) -> None:
    """Refuse layers to skip where diffusers cannot: with one text encoder it uses a part of it that
    transformers 5 moved, and would fail in the middle of the run."""
    encoder = getattr(facts.pipe, "text_encoder", None)
    has_several = hasattr(facts.pipe, "text_encoder_2")
    if options.get("clip_skip") is None or has_several or hasattr(encoder, "text_model"):
        return
    import transformers

    text = (
        f"diffusers cannot skip layers of a {type(encoder).__name__} of transformers "
        f"{transformers.__version__}, which has no text_model. Leave it out, or install "
        "transformers below 5."
    )
    raise OptionError("clip_skip", options["clip_skip"], text)


def _check_memory(facts: PipelineFacts, options: Options, prompts: int) -> None:
    """Refuse images that exceed this machine's memory even without the model."""
    import psutil

    pipe = facts.pipe
    height, width = default_size(facts)
    height = options.get("height") or height
    width = options.get("width") or width
    what = "image(s)"
    images = prompts * images_a_prompt(facts, options)
    if facts.makes_videos:
        what = "frame(s)"
        images *= options.get("num_frames") or default_frames(facts)
    # all images, and of one the autoencoder's last block: its input and its output
    vae = getattr(pipe, "vae", None)
    values = 0
    if facts.device.type == "cpu" and not getattr(vae, "use_tiling", False):
        values = 2 * next(iter(getattr(getattr(vae, "config", None), "block_out_channels", ())), 0)
    needed = height * width * (images * _BYTES_A_PIXEL + values * pipe.dtype.itemsize)
    memory = psutil.virtual_memory().total
    if needed > memory:
        raise InvalidValueError(
            f"{images:,} {what} of {width}x{height} pixels need {needed / 1e9:,.0f} GB while they "
            f"are decoded, and this machine has {memory / 1e9:,.0f} GB. Make fewer at a time, or "
            "smaller ones."
        )


def _check_names(facts: PipelineFacts, options: Options, own: Sequence[str]) -> None:
    """Refuse options that the pipeline does not know; some of diffusers' silently take any
    option."""
    known = [name for name in facts.options if name not in {"prompt", *OURS}]
    guider = guider_of(facts.pipe)
    for name in options:
        if name not in known and hasattr(guider, name):
            raise InvalidValueError(
                f"A {facts.name} leaves {name} to its guider, a {type(guider).__name__}. "
                f"Set pipe.guider.{name} = {options[name]!r} before the call."
            )
        if name == "num_frames" and name not in known:
            raise no_videos(options[name], facts.name)
        if name not in known:
            raise unknown_option(facts.name, name, known, own)


def unknown_option(
    kind: str, name: str, known: Sequence[str], own: Sequence[str] = ()
) -> InvalidValueError:
    """Return the error for an option that a class of pipelines lacks, with the nearest of those
    that it, or the caller, has."""
    meant = MEANT.get(name)
    near = did_you_mean(name, (*known, *(own or _CALLERS))) or f" It has: {', '.join(known)}."
    near = f" Did you mean `{meant}`?" if meant in known else near
    return InvalidValueError(f"A {kind} has no option {name!r}.{near}")


def _checked_size(facts: PipelineFacts, options: Options) -> dict[str, Any]:
    """Return both sides of the size, or neither (diffusers ignores a lone side), and turn off the
    cropping that would change the model's image."""
    found: dict[str, object] = {}
    if "use_resolution_binning" in facts.options:
        if options.get("use_resolution_binning"):
            raise InvalidValueError(
                "`use_resolution_binning=True` makes an image of another size and crops it, so the "
                "heatmaps would not fit. Pass a size that the model was trained on, or use "
                "`capture()` around the pipeline."
            )
        found["use_resolution_binning"] = False
    given = {side: options[side] for side in ("height", "width") if options.get(side) is not None}
    unit = size_unit(facts)
    for side, value in given.items():
        check_side(side, value, unit)
    if given:
        height, width = default_size(facts)
        found |= {"height": height, "width": width, **given}
    return found


def call_pipeline(
    pipe: Pipeline | PipelineFacts, prompts: list[str], seeds: Sequence[int], options: Options
) -> Any:
    """Run a pipeline on prompts; each image's noise is drawn on the CPU from its seed, see
    :func:`sdattn.models.values.seeds_of`. Raise NotFiniteError for an image that holds NaN or
    infinity. Later errors have the images, see :func:`images_in_errors`."""
    facts = PipelineFacts.of(pipe)
    options = dict(options)
    if options.get("negative_prompt") is not None:  # diffusers needs a list beside a list
        options["negative_prompt"] = _alone(one_each(options["negative_prompt"], len(prompts)))
    if facts.makes_videos:  # some give arrays otherwise
        options["output_type"] = "pil"
    generators = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    with (
        named_bar(facts.pipe, "drawing"),
        watch_finite(facts.pipe, options),
        warn_of_slow_steps(facts.pipe),
    ):
        result = facts.pipe.__call__(prompt=_alone(prompts), generator=generators, **options)
        drawn = _drawn.get()
        if drawn is not None and options.get("output_type") != "latent":
            drawn += images_of(result)
        return result


def _alone(texts: list[str]) -> list[str] | str:
    """Return a lone text by itself: some pipelines take no list."""
    return texts[0] if len(texts) == 1 else texts


@contextmanager
def named_bar(pipe: Pipeline, phase: str) -> Iterator[None]:
    """Name the pipeline's progress bar after its task inside the block, unless it has a name."""
    if is_modular(pipe):  # each of its blocks has a bar of its own
        yield
        return
    before = getattr(pipe, "_progress_bar_config", {})
    show = getattr(pipe, "set_progress_bar_config", lambda **_: None)
    show(**{"desc": phase, **before})
    try:
        yield
    finally:
        show(**before)


def phase_of(pipe: Pipeline) -> str:
    """Return what a pipeline is doing, see :func:`named_bar`: "drawing", "without words"."""
    return str(getattr(pipe, "_progress_bar_config", {}).get("desc") or "drawing")


def is_of_images(name: str) -> bool:
    """Check whether an option may have its own value for each image."""
    return "image" in name or "prompt" in name or name == "latents"


def options_of_image(options: Options, number: int, *, images: int, prompts: int) -> dict[str, Any]:
    """Return the options that draw one image of a run on its own; images are in the pipeline's
    order."""
    found = {name: value for name, value in options.items() if name not in EACH}
    for name, value in found.items():
        if is_of_images(name) and isinstance(value, (list, tuple)) and len(value) == prompts:
            found[name] = value[number // (images // prompts)]
        # Latents have one row per image; other lists have one entry per prompt.
        elif name == "latents" and len(value) == images:
            found[name] = value[number : number + 1]
    return found


def one_each(negative: str | Sequence[str], prompts: int) -> list[str]:
    """Return a list with one negative prompt per prompt."""
    return [negative] * prompts if isinstance(negative, str) else list(negative)


def images_of(result: Any) -> list[Any]:
    """Return a pipeline's results: PIL images, or for each video a list of its frames."""
    # The state of a modular pipeline's call has its inputs too, and None for what it lacks.
    # Kandinsky 5 has images by the last name.
    names = ("images", "frames", "videos", "image")
    held = ((name, getattr(result, name, None)) for name in names)
    name, made = next((name, made) for name, made in held if made is not None)
    return [list(one) for one in made] if name in ("frames", "videos") else list(made)
