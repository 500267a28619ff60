"""Inversion: find the noise of a real image, so that it can be edited like a generated one.

    inversion = invert(pipe, image, "a cat")
    with inversion.replay(pipe):
        image, edit = pipe([inversion.prompt, "a dog"], **inversion.options(2)).images

DDIM run upwards finds noise that leads back to the image without guidance (Song et al. 2020), Euler
steps do so for Stable Diffusion 3; see :mod:`sdattn.inversion.nulltext` for guidance.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from ..errors import (
    InvalidTypeError,
    InvalidValueError,
    OptionError,
    RunError,
    option_names,
    refuse,
)
from ..files.images import AnyImage
from ..models.denoiser import find_denoiser
from ..models.denoiser_call import arguments
from ..models.families import image_latents_of, unguided_options
from ..models.pipeline import Model, Pipeline
from ..models.pipeline_call import checked_options, named_bar, one_at_a_time
from ..models.reading import read_prompts
from ..models.values import checked_truth, checked_whole, number, whole
from .images import encode, fit
from .nulltext import guided_rows, optimise, replaced_rows
from .schedules import schedule_of
from .stand_ins import Kwargs, Upwards, in_place

STEPS = 50  # by default


@dataclass(eq=False)
class Inversion:
    """The path from an image to its noise, and the settings to come back.

    Attributes:
        prompt: the description of the image.
        image: the image as the pipeline saw it: RGB, at a size that the pipeline can make.
        trajectory: ``[steps + 1, C, rows, cols]``, dtype and device as in the pipeline. Index 0 is
            the image's latent, the last one its noise.
        null_states: float32 ``[steps, T, width]``, the unconditional text states in the order of
            sampling (the noisiest step first); None without null-text optimisation.
        guidance_scale, num_inference_steps: settings of the replay.
        call: further arguments of the pipeline's call.
    """

    prompt: str
    image: Image.Image
    trajectory: Tensor = field(repr=False)
    null_states: Tensor | None = field(repr=False)
    guidance_scale: float
    num_inference_steps: int
    call: Kwargs = field(default_factory=dict)

    @property
    def noise(self) -> Tensor:
        """Latents to start from, ``[1, C, rows, cols]``."""
        return self.trajectory[-1:]

    def options(self, images: int = 1) -> Kwargs:
        """Return the arguments for the pipeline's call in :meth:`replay`, for ``images`` images."""
        width, height = self.image.size
        steps = self.num_inference_steps
        sizes = {"latents": self.noise.repeat(images, 1, 1, 1), "height": height, "width": width}
        scale = {"num_inference_steps": steps, "guidance_scale": self.guidance_scale}
        return {**self.call, **sizes, **scale}

    @contextmanager
    def replay(self, pipe: Pipeline) -> Iterator[None]:
        """Make one run of the pipeline with :meth:`options` go back down the trajectory.

        Inside the block the pipeline has the scheduler whose steps were inverted. With null-text
        optimisation the unconditional rows of each UNet call hold the null-text state of that step,
        so a negative prompt has no effect. On exit the pipeline gets its scheduler back.

        Raises:
            ValueError: before the first step: no guidance, or text states of another shape than in
                the pipeline that was inverted.
            RuntimeError: another number of steps, or a second run; on leaving, no run at all.
        """
        calls = 0

        def before_pass(_: object, args: object, kwargs: Kwargs) -> object:
            nonlocal calls
            text = kwargs["encoder_hidden_states"]
            steps = len(pipe.scheduler.timesteps)
            self._check_call(calls, steps, text)
            if self.null_states is not None:
                rows = guided_rows(pipe, len(text))["unconditional"]
                text = replaced_rows(text, rows, self.null_states[calls])
            calls += 1
            return args, {**kwargs, "encoder_hidden_states": text}

        with in_place(pipe, schedule_of(pipe).down(), before_pass):
            yield
        if not calls:
            raise RunError("The model was never called. Call the pipeline inside replay().")

    def _check_call(self, calls: int, steps: int, text: Tensor) -> None:
        if steps != self.num_inference_steps or calls == steps:
            raise RunError(
                f"The inversion has {self.num_inference_steps} steps, and this is call {calls + 1} "
                f"of the model, in a run of {steps} steps. Call the pipeline once inside each "
                "replay(), with **inversion.options()."
            )
        if self.null_states is not None and text.shape[1:] != self.null_states.shape[1:]:
            raise InvalidValueError(
                f"The null-text states are {list(self.null_states.shape[1:])} ([tokens, width]) "
                f"and this pipeline's text states {list(text.shape[1:])}. Replay with the pipeline "
                "that the image was inverted with."
            )


@one_at_a_time
@torch.inference_mode(False)
def invert(
    pipe: Pipeline,
    image: AnyImage,
    prompt: str,
    *,
    num_inference_steps: int = STEPS,
    guidance_scale: float | None = None,
    null_text: bool | None = None,
    inner_steps: int = 10,
    learning_rate: float = 1e-2,
    refinements: int | None = None,
    **options: Any,
) -> Inversion:
    """Find the noise of an image and, with ``null_text``, the states that lead back to it.

    To see what the words attend to, capture the replay, not the inversion.

    Args:
        pipe: a text-to-image pipeline of SD 1.x, 2.x, SDXL or SD3. With any scheduler, inversion
            takes DDIM steps (Euler steps for SD3) on its noise schedule.
        image: any size and mode, or its array or file; see :func:`sdattn.inversion.images.fit`.
        prompt: description of the image, with the words to be edited.
        num_inference_steps, guidance_scale: settings of the replay; there is no guidance on the way
            up. The default scale is 7.5, or 1 (no guidance) without null-text states (SD3).
        null_text: whether to optimise null-text states (default: yes for UNets; joint attention has
            none).
        inner_steps: maximum optimiser steps per step; each costs a pass with gradients.
        learning_rate: Adam's in the first step, falling to half. The default is the paper's, for 50
            steps; fewer steps need more: 5e-2 for the demo model's 20.
        refinements: further passes in each step up, which make it the exact inverse of the step
            down. 0 is plain DDIM inversion, whose noise is less accurate with fewer steps. Default:
            3, or 1 for SD3, where more drift apart in the noisiest steps.
        options: arguments for the pipeline on the way up and in the replay, for example
            ``max_sequence_length``; a demo model has its own defaults.

    Raises:
        TypeError: another kind of pipeline, or ``image`` is no image.
        ValueError: an empty image or prompt, or a setting out of range.
        RuntimeError: the latents stopped being finite.
    """
    schedule = schedule_of(pipe)
    null_text = schedule.null_text if null_text is None else checked_truth("null_text", null_text)
    if guidance_scale is None:
        guidance_scale = 7.5 if schedule.null_text else 1.0
    _check(pipe, guidance_scale, null_text, inner_steps)
    if not 0 < (number(learning_rate) or 0) < math.inf:
        raise refuse("learning_rate", learning_rate, "a number above 0")
    if refinements is None:
        refinements = schedule.refinements
    refinements = checked_whole("refinements", refinements, 0)
    if not isinstance(prompt, str):
        raise refuse("prompt", prompt, "a description of the image, one text")
    call = _checked_call(pipe, {**options, "num_inference_steps": num_inference_steps})
    seen = fit(pipe, image)
    read_prompts(pipe, prompt, **call)
    start = encode(pipe, [seen]).to(find_denoiser(pipe).model.dtype)
    inversion = Inversion(
        prompt=prompt,
        image=seen,
        trajectory=start,
        null_states=None,
        guidance_scale=float(guidance_scale),
        num_inference_steps=num_inference_steps,
        call=call,
    )
    inversion.trajectory = _climb(pipe, inversion, refinements)
    if null_text:
        inversion.null_states = optimise(
            pipe,
            inversion.prompt,
            inversion.trajectory,
            inversion.options(),
            inner_steps,
            learning_rate,
        )
    return inversion


def psnr(image: Image.Image, other: Image.Image) -> float:
    """Return the peak signal-to-noise ratio in decibels over uint8 RGB; infinite for equal images.

    Raises:
        ValueError: the images differ in size.
        TypeError: no PIL images.
    """
    for one in (image, other):
        if not isinstance(one, Image.Image):
            raise InvalidTypeError(f"A {type(one).__name__} is no PIL image. Pass two of them.")
    if image.size != other.size:
        raise InvalidValueError(
            f"The images are {image.size} and {other.size} pixels. Resize one of them."
        )
    first, second = (np.asarray(im.convert("RGB"), dtype=np.float64) for im in (image, other))
    error = float(((first - second) ** 2).mean())
    return 10 * math.log10(255**2 / error) if error else math.inf


def _check(pipe: Pipeline, guidance: float, null_text: bool, inner: int) -> None:
    image_latents_of(pipe, invertible=True)
    if null_text and not schedule_of(pipe).null_text:
        text = (
            f"a {type(pipe).__name__} has no null-text optimisation: it was made for the "
            "cross-attention of UNets. Leave it out."
        )
        raise OptionError("null_text", null_text, text)
    scale = number(guidance)
    if scale is None or not (1 if null_text else -math.inf) < scale < math.inf:
        raise refuse("guidance_scale", guidance, "a number above 1, or `null_text=False`")
    if (whole(inner) or 0) < 1:
        raise refuse("inner_steps", inner, "at least 1, or `null_text=False`")


def _checked_call(pipe: Pipeline, options: Kwargs) -> Kwargs:
    """Return the checked arguments of the pipeline's call, with a demo model's own."""
    decided = {"latents", "height", "width", "sigmas", "num_images_per_prompt"}
    taken = sorted(name for name in options if name in decided or name.startswith("negative_"))
    if taken:
        raise InvalidValueError(f"The inversion sets {option_names(taken)} itself. Leave it out.")
    # A demo model's own options are among these, also those that the inversion was asked for.
    own = ("num_inference_steps", "guidance_scale")
    return {name: one for name, one in checked_options(pipe, options).items() if name not in own}


def _climb(pipe: Pipeline, found: Inversion, refinements: int) -> Tensor:
    """Run the pipeline from latent to noise; return ``[steps + 1, C, rows, cols]``."""
    schedule = schedule_of(pipe)
    family = find_denoiser(pipe).family
    trajectory = [found.noise]
    scheduler = Upwards(schedule.down(), schedule.factors)

    def before_pass(model: Model, args: tuple[object, ...], kwargs: Kwargs) -> object:
        # A step up takes the model's output at its own end, which is not known yet: guess it, step,
        # and take where that leads as the next guess.
        given = arguments(model, args, kwargs)
        latents = guess = given[family.names.latents]
        for _ in range(refinements):
            args, kwargs = family.with_latents(args, kwargs, guess)
            output = model.forward(*args, **kwargs)[0]
            (guess,) = scheduler.step(output, given["timestep"].flatten()[0], latents)
        return family.with_latents(args, kwargs, guess)

    def keep(
        _: object, step: int, timestep: Tensor, tensors: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        if not tensors["latents"].isfinite().all():
            other = "" if found.noise.dtype == torch.float32 else "float32, or "
            raise RunError(
                f"The latents stopped being finite in step {step}, at timestep {int(timestep)}. "
                f"Use {other}a noise schedule and prediction type whose steps can be inverted."
            )
        trajectory.append(tensors["latents"])
        return tensors

    options = {**found.options(), **unguided_options(pipe), "output_type": "latent"}
    with named_bar(pipe, "inverting"), in_place(pipe, scheduler, before_pass):
        pipe.__call__(found.prompt, callback_on_step_end=keep, **options)
    return torch.cat(trajectory)
