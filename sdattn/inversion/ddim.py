"""DDIM on a pipeline's noise schedule: noise mixed into latents, steps down and up."""

from typing import Any

import torch
from torch import Tensor

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
