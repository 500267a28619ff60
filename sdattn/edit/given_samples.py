"""Steps in which a scheduler goes on from the sample that it is given: who changes latents between
two steps asks for them before the run.

Some keep a sample of their own and go on from that: the corrector of UniPC and SASolver from the
last step's; second-order schedulers, singlestep DPM-Solver and PNDM's Runge-Kutta calls from the
first of the calls that make one step. What was moved since is seen by the model, and then lost.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidTypeError
from ..models.facts import PipelineFacts, scheduler_of_run
from ..models.pipeline import Options

_APART = 1e-3  # of the distance between samples; rounding stays far below
_SHAPE = (1, 1, 2, 2)


OTHERS = (
    "Set pipe.scheduler to one that goes on from what it is given, such as "
    "DPMSolverMultistepScheduler or EulerDiscreteScheduler; for a flow, "
    "FlowMatchEulerDiscreteScheduler."
)


def asked_scheduler(facts: PipelineFacts, options: Options) -> tuple[int, frozenset[int]]:
    """Return the number of a run's passes, and those in which the scheduler goes on from the
    latents that it is given; refuse a scheduler that cannot be asked."""
    try:
        scheduler = scheduler_of_run(facts, options)
        return len(scheduler.timesteps), passes_from_given(scheduler)
    except Exception as error:  # any error: its methods take other arguments, or other samples
        raise InvalidTypeError(
            f"Whether a {type(facts.pipe.scheduler).__name__} goes on from latents that were moved "
            f"cannot be asked ({error}). {OTHERS}"
        ) from error


def passes_from_given(scheduler: Any) -> frozenset[int]:
    """Return the passes of a run, counted from 0, whose steps go on from the given samples.

    Two copies go through the schedule with samples that are apart. At each step the second one is
    asked about the sample and output that the first one gets: unless both give the same answer,
    it remembers samples. What multistep methods remember of the model must not tell the copies
    apart, and is its output, or the image or noise that follow from it. So the way is gone once
    with the same outputs for both copies, then with the same image, and the same noise.

    Args:
        scheduler: scheduler with the timesteps of a run, before its first step. It is only copied.

    Raises:
        Exception: anything that its ``step()`` raises, which takes other arguments perhaps.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will warn of the same
        found = _alike(scheduler, "output")
        for same in ("image", "noise"):
            if hasattr(scheduler, "add_noise") and len(found) < len(scheduler.timesteps):
                found |= _alike(scheduler, same)
    return found


def _alike(scheduler: Any, same: str) -> frozenset[int]:
    """Return the passes in which both copies give the same answer."""
    one = copy.deepcopy(scheduler)
    if hasattr(one, "set_begin_index"):  # else it looks for timesteps, of which some stand twice
        one.set_begin_index(0)
    other = copy.deepcopy(one)
    drawn = torch.Generator().manual_seed(0)
    image, noise = torch.randn(2, *_SHAPE, generator=drawn)
    found = set()
    for number, timestep in enumerate(scheduler.timesteps):
        apart = torch.randn(_SHAPE, generator=drawn)  # another distance each time: none cancels
        if same == "output":
            sample, output = image + noise, noise
            sample_apart, output_apart = sample + apart, noise
        else:
            moved = (image, noise + apart) if same == "image" else (image + apart, noise)
            sample, output = _mixed(one, timestep, image, noise)
            sample_apart, output_apart = _mixed(one, timestep, *moved)
        asked = _step(copy.deepcopy(other), timestep, output, sample)
        answer = _step(one, timestep, output, sample)
        far = float((sample_apart - sample).abs().max())
        if torch.allclose(asked, answer, rtol=0, atol=_APART * far, equal_nan=True):
            found.add(number)
        _step(other, timestep, output_apart, sample_apart)
    return frozenset(found)


def _mixed(scheduler: Any, timestep: Tensor, image: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sample that an image and noise make at a timestep, and the output of a model that
    tells them apart."""
    times = timestep[None]
    sample = scheduler.add_noise(image, noise, times)
    alpha = scheduler.add_noise(torch.ones(_SHAPE), torch.zeros(_SHAPE), times)
    sigma = scheduler.add_noise(torch.zeros(_SHAPE), torch.ones(_SHAPE), times)
    if hasattr(scheduler, "precondition_outputs"):  # EDM's, linear in the output
        of_sample = scheduler.precondition_outputs(sample, 0 * sample, sigma)
        of_output = scheduler.precondition_outputs(0 * sample, torch.ones(_SHAPE), sigma)
        return sample, (image - of_sample) / of_output
    outputs = {
        "sample": image,
        "v_prediction": (alpha * noise - sigma * image) / (alpha**2 + sigma**2).sqrt(),
        "flow_prediction": noise - image,
    }
    return sample, outputs.get(scheduler.config.get("prediction_type"), noise)


def _step(scheduler: Any, timestep: Tensor, output: Tensor, sample: Tensor) -> Tensor:
    """Return the next sample; noise of a stochastic step is the same each time."""
    scheduler.scale_model_input(sample, timestep) if hasattr(scheduler, "scale_model_input") else 0
    options: dict[str, Any] = {"return_dict": False}
    if "generator" in inspect.signature(scheduler.step).parameters:
        options["generator"] = torch.Generator().manual_seed(0)
    found: Tensor = scheduler.step(output, timestep, sample, **options)[0]
    return found
