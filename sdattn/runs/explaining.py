"""Heatmaps for an existing image.

A diffusion model that removes noise from an image looks for the words in it, whoever made the
image. So the image's latent is noised to a few timesteps, and the model looks at each of them once
(as Tang et al. 2023, "Emergent Correspondence from Image Diffusion", do for its features). With
UNets, DDIM inversion can find the noise that leads to the image instead, and the model is watched
all the way back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from PIL import Image

from ..errors import InvalidValueError, OptionError, option_names, refuse
from ..files.images import AnyImage, as_image
from ..inversion import invert as inversion
from ..inversion.images import at_own_size, encode, fit
from ..inversion.schedules import check_scheduler, schedule_of
from ..inversion.stand_ins import Noised, noised
from ..maps.presets import Preset, preset_for
from ..models.denoiser import find_denoiser
from ..models.families import image_latents_of, unguided_options
from ..models.pipeline import Options, Pipeline
from ..models.pipeline_call import checked_options, named_bar, one_at_a_time
from ..models.threads import few_threads
from ..models.values import checked_prompts, whole
from .info import Explained
from .preparing import Order, check_images, loaded_facts, prepare
from .run import Run
from .sampling import sample

# Of the training schedule: where the model looks by default. With flow matching none points better
# than these either, see demos/evaluation/evaluate_explained.py.
TIMESTEPS = (0.05, 0.15, 0.25)

# What is free in a run that draws: here the image decides, or nothing is drawn at all.
_DECIDED = {"callback_on_step_end", "denoising_end", "eta", "generator", "guidance_rescale"}
_DECIDED |= {"guidance_scale", "height", "latents", "num_images_per_prompt", "num_inference_steps"}
_DECIDED |= {"mu", "sigmas", "true_cfg_scale", "width"}


@one_at_a_time
def explain(
    pipe: Pipeline | str | Path,
    image: AnyImage | Sequence[AnyImage],
    prompt: str | Sequence[str],
    *,
    seed: int | Sequence[int] | None = 0,
    timesteps: Sequence[int] | None = None,
    invert: bool = False,
    words: Sequence[str] | None = None,
    preset: str | Preset = "default",
    refine: Literal["self"] | None = None,
    ask: str | None = None,
    capture_options: Options | None = None,
    max_bytes: int | None = None,
    **options: Any,
) -> Run:
    """Show where each word of a prompt goes in an existing image.

    By default the image's latent ``x0`` is noised, ``sqrt(abar_t) x0 + sqrt(1 - abar_t) eps`` (Ho
    et al. 2020, eq. 4) or, for flow matching, ``(1 - t/T) x0 + (t/T) eps`` (Esser et al. 2024, eq.
    13), and the model runs once, without guidance, at each of a few timesteps. The maps are the
    mean over these timesteps, as they are the mean over the steps of a run that draws.

    Args:
        pipe: text-to-image pipeline: SD 1.x, 2.x, SDXL, SD3, FLUX.1, FLUX.2 or Qwen-Image. Its
            noise schedule is used, whatever the steps of its scheduler. The guidance that FLUX
            takes as an input keeps the pipeline's default. Or a model to load, ``"demo"``.
        image: an image of any size and mode, see :func:`sdattn.inversion.images.fit`, its array or
            its file; or a list of several that are fitted to one size, which run in one batch.
        prompt: a description of the image; one per image.
        seed: seed of the first image's noise, as for :func:`sdattn.generate`. The noise at timestep
            ``t`` is drawn on the CPU with the seed ``seed * T + t``, where ``T`` is the number of
            training timesteps, so it depends on no other image or timestep.
        timesteps: timesteps to look at, between 0 (no noise) and ``T`` (default:
            :data:`TIMESTEPS`). With flow matching they are the model's own, whatever the shift of
            its schedule.
        invert: find the noise that leads to the image by DDIM inversion, and watch the run back to
            it; UNets only. The seed does not matter then. It takes five model calls per step.
        words: keep the maps of these words and phrases only.
        preset, refine, ask: see :func:`sdattn.generate`. A preset that reads a part of the steps
            reads all timesteps here, since they were chosen; with ``invert``, that part of the run.
        capture_options: options for :func:`sdattn.capture`, e.g. ``{"layers": ("mid", "up")}``.
        max_bytes: bytes that the maps may take, see :func:`sdattn.generate`.
        options: options for the pipeline: ``clip_skip``, SDXL's ``original_size`` and so on; with
            ``invert`` only ``num_inference_steps``.

    Returns:
        Run: ``images`` are the parts of the given images that the pipeline saw, at their own
        resolution (see :func:`sdattn.inversion.images.at_own_size`). ``info["explained"]`` has the
        method, the timesteps, the file's name and ``"reconstruction_psnr"``: how close the pipeline
        came back to the image, in decibels, through its autoencoder alone or with ``invert`` the
        whole way. A low value means that the maps describe something else than the image.

    Raises:
        TypeError: another kind of pipeline, a scheduler that shows the model other timesteps or
            noise (EDM's), or ``image`` is no PIL image.
        ValueError: an empty image or prompt, numbers or sizes that do not match, an impossible
            timestep or option; maps beyond ``max_bytes``.
        KeyError: a word is in none of the prompts.
    """
    of_call: dict[str, Any] = {"seed": seed, "max_bytes": max_bytes}
    facts = loaded_facts(
        pipe, prompt, options, image=image, preset=preset, refine=refine, **of_call
    )
    pipe = facts.pipe
    image_latents_of(pipe)
    chosen_timesteps = _checked_timesteps(pipe, timesteps, invert)
    prompts = checked_prompts(prompt)
    several: Sequence[Any] = image if isinstance(image, (list, tuple)) else [image]
    originals = [as_image(one) for one in several]
    images = _fitted(pipe, originals, prompts)
    options = _with_fixed(pipe, options, chosen_timesteps, images[0].size)
    chosen = preset_for(facts.denoiser, preset, refine)
    if chosen.part is not None and not invert:
        chosen = replace(chosen, steps="mean")
    order = prepare(
        facts,
        prompts,
        options,
        words=words,
        preset=chosen,
        ask=ask,
        capture_options=capture_options,
        branches=("conditional",),
        **of_call,
    )
    if invert and max_bytes is not None:  # before the inversion, which takes longer than the run
        check_images(order, order.options.get("num_inference_steps", inversion.STEPS))
    way = (
        _replayed(order, images) if invert else _noised(pipe, images, order.seeds, chosen_timesteps)
    )
    phase = "drawing" if invert else "looking"
    # Either way is an ordinary run of the pipeline, from other latents and under another scheduler.
    with few_threads(pipe), way as start, named_bar(pipe, phase):
        run = sample(replace(order, options={**order.options, **start}))
    return _told(run, pipe, originals, images, invert)


def check_explained(
    pipe: Pipeline, size: tuple[int, int], timesteps: Sequence[int] | None = None, **options: Any
) -> None:
    """Raise as :func:`explain` does for these options and an image fitted to (width, height)."""
    image_latents_of(pipe)
    chosen = _checked_timesteps(pipe, timesteps, False)
    checked_options(pipe, _with_fixed(pipe, options, chosen, size))


def is_decided(name: str) -> bool:
    """Check whether a pipeline's option is decided by the image and the timesteps."""
    return name in _DECIDED or name.startswith("negative_")


@contextmanager
def _noised(
    pipe: Pipeline, images: Sequence[Image.Image], seeds: Sequence[int], timesteps: Sequence[int]
) -> Iterator[Options]:
    """Make a run of the pipeline, with the yielded options, one call at each timestep."""
    schedule = schedule_of(pipe)
    shown = Noised(schedule.config, schedule.mix, schedule.timesteps(list(timesteps)), seeds)
    latents = encode(pipe, images).to(find_denoiser(pipe).model.dtype)
    with noised(pipe, shown):
        yield {"latents": latents}


@contextmanager
def _replayed(order: Order, images: Sequence[Image.Image]) -> Iterator[Options]:
    """Make a run of the pipeline, with the yielded options, the way back to all images."""
    pipe = order.facts.pipe
    steps = order.options.get("num_inference_steps", inversion.STEPS)
    inversions = []
    for image, prompt in zip(images, order.prompts, strict=True):
        way_back = inversion.invert(
            pipe, image, prompt.text, num_inference_steps=steps, guidance_scale=1.0, null_text=False
        )
        inversions.append(way_back)
    with inversions[0].replay(pipe):
        yield {**inversions[0].options(), "latents": torch.cat([one.noise for one in inversions])}


def _told(
    run: Run,
    pipe: Pipeline,
    originals: Sequence[Image.Image],
    images: Sequence[Image.Image],
    inverted: bool,
) -> Run:
    """Return the run with the original images in place of the reconstructed ones, and with how it
    was made; ``images`` are the originals as the pipeline saw them."""
    timesteps = [round(t) for t in run.store.timesteps]
    image_runs = []
    for image_run, original, image in zip(run, originals, images, strict=True):
        settings = image_run.settings
        near = None
        # How near the pipeline came to the image says how far its maps are of that.
        if not settings.blanked:  # by a safety checker, which saw what came back
            near = min(inversion.psnr(image, image_run.image), 99.0)  # JSON knows no infinity
        shown = at_own_size(original, image)
        settings = replace(
            settings,
            size=shown.size,
            scheduler=type(pipe.scheduler).__name__,  # whose noise schedule it was
            blanked=None,
            seed=None if inverted else settings.seed,  # the noise is the image's own
            explained=Explained(
                way="inversion" if inverted else "noise",
                timesteps=timesteps,
                reconstruction_psnr=near,
                file=Path(getattr(original, "filename", "")).name or None,
            ),
        )
        image_runs.append(replace(image_run, image=shown, settings=settings))
    return replace(run, image_runs=image_runs)


def _fitted(
    pipe: Pipeline, images: Sequence[Image.Image], prompts: Sequence[str]
) -> list[Image.Image]:
    """Return the images as the pipeline sees them, all of one size, one for each prompt."""
    if len(images) != len(prompts) or not images:
        raise InvalidValueError(
            f"{len(images)} image(s) and {len(prompts)} prompt(s) were passed. Pass one for each."
        )
    images = [fit(pipe, image) for image in images]
    if len({image.size for image in images}) > 1:
        sizes = ", ".join(f"{image.width}x{image.height}" for image in images)
        raise InvalidValueError(
            f"The images come to {sizes} pixels. Call explain() once for each size, or crop them."
        )
    return images


def _checked_timesteps(pipe: Pipeline, timesteps: Any, invert: bool) -> list[int]:
    """Return the timesteps, noisiest first; empty for an inversion, which has its own."""
    check_scheduler(pipe)
    most = pipe.scheduler.config.num_train_timesteps
    if invert and image_latents_of(pipe).noise == "flow":
        text = (
            f"a {type(pipe).__name__} follows a flow, on which maps of the way back point no "
            "better than those of the noised image, for 20 times the passes. Leave it out."
        )
        raise OptionError("invert", invert, text)
    if invert and timesteps is not None:
        text = (
            "an inversion goes through its own. Pass `num_inference_steps` for their number, or "
            "leave `invert` out."
        )
        raise OptionError("timesteps", timesteps, text)
    if invert:
        return []
    if timesteps is None:
        return sorted({round(part * most) for part in TIMESTEPS}, reverse=True)
    numbers = [whole(t) for t in timesteps] if hasattr(timesteps, "__iter__") else []
    valid = [number for number in numbers if number is not None and 0 < number < most]
    if not numbers or len(valid) < len(numbers):
        raise refuse("timesteps", timesteps, f"a list of whole numbers, 1 to {most - 1}")
    if len(set(valid)) < len(valid):
        raise refuse("timesteps", timesteps, "each once")
    return sorted(valid, reverse=True)


def _with_fixed(
    pipe: Pipeline, options: Options, timesteps: Sequence[int], size: tuple[int, int]
) -> dict[str, Any]:
    """Return the pipeline's options with those that are fixed here; ``size`` is (width, height)."""
    if timesteps:
        why = "The image and the timesteps decide on"
        taken = set(filter(is_decided, options))
    else:
        why = "With `invert=True` only `num_inference_steps` can be chosen, not"
        taken = set(options) - {"num_inference_steps"}
    if taken:
        names = option_names(sorted(taken))
        advice = "Leave it out; to draw with it, use `generate()`."
        raise InvalidValueError(f"{why} {names}. {advice}")
    fixed = {**unguided_options(pipe), "width": size[0], "height": size[1]}
    if timesteps:
        fixed["num_inference_steps"] = len(timesteps)
    return {**options, **fixed}
