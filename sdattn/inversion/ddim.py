"""DDIM in a pipeline's place: its steps down from noise to picture, and the same steps up."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor


def ddim(pipe: Any) -> Any:
    """DDIM on the pipeline's noise schedule; without clipping, which has no inverse."""
    from diffusers import DDIMScheduler

    return DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=False, thresholding=False)


class Upwards:
    """A scheduler that takes the steps of DDIM backwards, from the picture to the noise.

    A step (Song et al. 2020, eq. 12) is ``x_prev = a x + b f(x)``, linear in the prediction ``f``
    of whatever kind. So ``x = (x_prev - b f(x)) / a``. With ``f(x_prev)`` for ``f(x)`` that is DDIM
    inversion; iterated, it is exact (Pan et al. 2023, "Effective Real Image Editing with
    Accelerated Iterative Diffusion Inversion").
    """

    order, init_noise_sigma = 1, 1.0

    def __init__(self, down: Any):
        self.down, self.config = down, down.config

    def set_timesteps(self, num_inference_steps: int, device: Any = None) -> None:
        self.down.set_timesteps(num_inference_steps, device)
        self.timesteps = self.down.timesteps.flip(0)

    def scale_model_input(self, sample: Tensor, _: Any) -> Tensor:
        return sample

    def step(self, output: Tensor, timestep: Any, sample: Tensor, return_dict: Any = None) -> Any:
        # The step is linear, so two steps of numbers show both of its factors.
        unit, zero = torch.ones(()), torch.zeros(())
        a = self.down.step(zero, timestep, unit).prev_sample
        b = self.down.step(unit, timestep, zero).prev_sample
        return (((sample.float() - b * output.float()) / a).to(sample.dtype),)


@contextmanager
def in_place(pipe: Any, scheduler: Any, before_pass: Any = None) -> Iterator[None]:
    """Put a scheduler and perhaps a pre-hook of the UNet in place, and take both out again."""
    with ExitStack() as undo:
        undo.callback(setattr, pipe, "scheduler", pipe.scheduler)
        pipe.scheduler = scheduler
        if before_pass is not None:
            hook = pipe.unet.register_forward_pre_hook(before_pass, with_kwargs=True)
            undo.callback(hook.remove)
        yield
