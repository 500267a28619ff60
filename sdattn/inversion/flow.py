"""Flow matching: noise mixed into latents, Euler steps down to the image and up.

A flow-matching model predicts the velocity ``eps - x0`` along ``x_sigma = (1 - sigma) x0 +
sigma eps`` (Esser et al. 2024, eq. 13), and its timestep is ``sigma`` in thousandths.
"""

from typing import Any

import torch
from torch import Tensor

from ..models.pipeline import Pipeline


class Flow:
    """Euler steps for a model trained by flow matching; only its scheduler's shift is used."""

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
