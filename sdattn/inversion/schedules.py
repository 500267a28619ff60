"""Noise schedules of a pipeline: noise mixed into latents, steps down to the image and up."""

from typing import Any

import torch
from torch import Tensor

from ..models.families import image_latents_of
from ..models.pipeline import Pipeline


class DDIM:
    """DDIM steps for a model that removes noise; only the betas of the scheduler are used."""

    null_text, refinements = True, 3

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

    @staticmethod
    def factors(down: Any, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return a and b of the step from a timestep, see
        :class:`sdattn.inversion.stand_ins.Upwards`."""
        # The step is linear, so two steps of numbers show both.
        unit, zero = torch.ones(()), torch.zeros(())
        a = down.step(zero, timestep, unit).prev_sample
        return a, down.step(unit, timestep, zero).prev_sample


class Flow:
    """Euler steps for a model trained by flow matching; only its scheduler's shift is used.

    Such a model predicts the velocity ``eps - x0`` along ``x_sigma = (1 - sigma) x0 + sigma eps``
    (Esser et al. 2024, eq. 13), and its timestep is ``sigma`` in thousandths.
    """

    null_text, refinements = False, 1

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

    @staticmethod
    def factors(down: Any, timestep: Tensor) -> tuple[float, Tensor]:
        index = int((down.timesteps - timestep).abs().argmin())
        return 1.0, down.sigmas[index + 1] - down.sigmas[index]


def schedule_of(pipe: Pipeline) -> DDIM | Flow:
    """Return the noise schedule, DDIM's or a flow's, that the family's models were trained on;
    raise TypeError if it is unknown, or a pipeline needs more than noise and prompts."""
    return Flow(pipe) if image_latents_of(pipe).noise == "flow" else DDIM(pipe)
