"""Noise schedules of a pipeline: noise mixed into latents, steps down to the image and up."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidTypeError
from ..models.families import image_latents_of
from ..models.pipeline import Pipeline

_STEPS = 12  # of a run that shows what a scheduler does


class DDIM:
    """DDIM steps for a model that removes noise; only the betas of the scheduler are used."""

    null_text = True
    refinements = 3

    def __init__(self, pipe: Pipeline):
        self.config = pipe.scheduler.config
        self.betas = self.down()  # add_noise needs no steps

    def down(self) -> Any:
        """Return a DDIM scheduler, without clipping, which has no inverse."""
        from diffusers import DDIMScheduler

        return DDIMScheduler.from_config(self.config, clip_sample=False, thresholding=False)

    def timesteps(self, at: list[int]) -> Tensor:
        return torch.tensor(at)

    def mix(self, latents: Tensor, noise: Tensor, at: int) -> Tensor:
        """Return ``sqrt(abar_t) x0 + sqrt(1 - abar_t) eps`` (Ho et al. 2020, eq. 4), float32."""
        times = torch.tensor([at], device=latents.device)
        mixed: Tensor = self.betas.add_noise(latents, noise, times)
        return mixed

    def shares(self, at: float) -> tuple[float, float]:
        """Return what :meth:`mix` takes of the latents and of the noise, also between timesteps."""
        # zero at the last timestep of a schedule that ends in noise alone (zero terminal SNR)
        abar = self.betas.alphas_cumprod.double().numpy().clip(1e-12)
        sigma = float(np.interp(at, np.arange(len(abar)), np.sqrt(1 / abar - 1)))
        return 1 / (1 + sigma**2) ** 0.5, sigma / (1 + sigma**2) ** 0.5

    @staticmethod
    def factors(down: Any, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and b of the step from a timestep, see
        :class:`sdattn.inversion.stand_ins.Upwards`."""
        # The step is linear, so two steps of numbers show both.
        unit = torch.ones(())
        zero = torch.zeros(())
        a = down.step(zero, timestep, unit).prev_sample
        return a, down.step(unit, timestep, zero).prev_sample


class Flow:
    """Euler steps for a model trained by flow matching; only its scheduler's shift is used.

    Such a model predicts the velocity ``eps - x0`` along ``x_sigma = (1 - sigma) x0 + sigma eps``
    (Esser et al. 2024, eq. 13), and its timestep is ``sigma`` in thousandths.
    """

    null_text = False
    refinements = 1

    def __init__(self, pipe: Pipeline):
        self.config = pipe.scheduler.config

    def down(self) -> Any:
        """Return diffusers' Euler scheduler, without stochastic noise."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler.from_config(self.config, stochastic_sampling=False)

    def timesteps(self, at: list[int]) -> Tensor:
        return torch.tensor(at, dtype=torch.float32)

    def mix(self, latents: Tensor, noise: Tensor, at: int) -> Tensor:
        """Return ``(1 - sigma) x0 + sigma eps`` for the model's timestep ``at``, float32."""
        sigma = at / self.config.num_train_timesteps
        return (1 - sigma) * latents + sigma * noise

    def shares(self, at: float) -> tuple[float, float]:
        """Return what :meth:`mix` takes of the latents and of the noise."""
        sigma = at / self.config.num_train_timesteps
        return 1 - sigma, sigma

    @staticmethod
    def factors(down: Any, timestep: Tensor) -> tuple[float, Tensor]:
        index = int((down.timesteps - timestep).abs().argmin())
        return 1.0, down.sigmas[index + 1] - down.sigmas[index]


def schedule_of(pipe: Pipeline) -> DDIM | Flow:
    """Return the noise schedule, DDIM's or a flow's, that the family's models were trained on;
    raise TypeError if it is unknown, or a pipeline needs more than noise and prompts."""
    return Flow(pipe) if image_latents_of(pipe).noise == "flow" else DDIM(pipe)


def check_scheduler(pipe: Pipeline) -> None:
    """Raise TypeError unless the pipeline's scheduler shows its model the same timesteps, noise and
    scale as :func:`schedule_of`: EDM's do not, whose timesteps are log(sigma) / 4."""
    scheduler = pipe.scheduler
    flow = image_latents_of(pipe).noise == "flow"
    try:
        schedule = schedule_of(pipe)
        timesteps = _in_steps(scheduler, shifted=flow).timesteps
        is_same = True
        # Even places: between two steps of its own, KDPM2 shows the noise of another timestep.
        for number in range(2, len(timesteps) - 2, 4):
            own = _own_shares(scheduler, number, shifted=flow)
            is_same &= np.allclose(own, schedule.shares(float(timesteps[number])), atol=1e-2)
    except Exception:  # any error: it lacks a method, or takes other arguments
        is_same = False
    if not is_same:
        raise InvalidTypeError(
            f"A {type(scheduler).__name__} shows its model other timesteps or noise than "
            f"{'flow matching' if flow else 'the noise schedule of its betas'}, so what it would "
            "see of an image is not known. Set the scheduler that the model was trained with, if "
            "it is another; `generate()` and `capture()` work with any."
        )


def _in_steps(scheduler: Any, shifted: bool) -> Any:
    fresh = type(scheduler).from_config(scheduler.config)
    is_dynamic = shifted and fresh.config.get("use_dynamic_shifting")
    fresh.set_timesteps(_STEPS, **({"mu": 1.0} if is_dynamic else {}))
    return fresh


def _own_shares(scheduler: Any, number: int, shifted: bool) -> tuple[float, float]:
    """Return what the model is shown of latents and of noise at a place of a run."""
    shares = []
    one = torch.ones(1, 1, 1, 1)
    for latents, noise in ((one, 0 * one), (0 * one, one)):
        fresh = _in_steps(scheduler, shifted)
        at = fresh.timesteps[number : number + 1]
        if hasattr(fresh, "scale_noise"):
            shown = fresh.scale_noise(latents, at, noise)
        else:
            shown = fresh.scale_model_input(fresh.add_noise(latents, noise, at), at[0])
        shares.append(float(shown))
    return shares[0], shares[1]
