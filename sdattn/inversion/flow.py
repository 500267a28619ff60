"""Flow matching: noise mixed into latents, Euler's steps down to the image and up.

A model of flow matching predicts the velocity ``eps - x0`` along ``x_sigma = (1 - sigma) x0 +
sigma eps`` (Esser et al. 2024, eq. 13), and its timestep is ``sigma`` in thousandths.
"""

from typing import Any

import torch
from torch import Tensor

from ..models.pipeline import Pipeline


class Flow:
    """Euler's steps for a pipeline whose model was trained by flow matching.

    Args:
        pipe: of diffusers; whatever its scheduler, of that the shift of the schedule is used.
    """

    null_text, refinements = False, 1

    def __init__(self, pipe: Pipeline):
        self.config = pipe.scheduler.config

    def down(self) -> Any:
        """diffusers' own Euler, without noise of its own."""
        from diffusers import FlowMatchEulerDiscreteScheduler

        return FlowMatchEulerDiscreteScheduler.from_config(self.config, stochastic_sampling=False)

    def timesteps(self, at: list[int]) -> Tensor:
        """Timesteps as the model gets them."""
        return torch.tensor(at, dtype=torch.float32)

    def mix(self, latents: Tensor, noise: Tensor, at: int) -> Tensor:
        """``(1 - sigma) x0 + sigma eps`` where the model gets the timestep ``at``, float32. The
        shift of a schedule chooses timesteps, and changes none."""
        sigma = at / self.config.num_train_timesteps
        return (1 - sigma) * latents + sigma * noise

    @staticmethod
    def factors(down: Any, timestep: Tensor) -> tuple[float, Tensor]:
        """a and b of the step from a timestep, see :class:`sdattn.inversion.stand_ins.Upwards`."""
        index = int((down.timesteps - timestep).abs().argmin())
        return 1.0, down.sigmas[index + 1] - down.sigmas[index]
