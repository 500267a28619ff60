"""Schedulers that replace a pipeline's own for one run, see :func:`in_place`."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from ..models.denoiser import find_denoiser
from ..models.pipeline import Given, Model, Pipeline

Kwargs = dict[str, Any]


@contextmanager
def in_place(
    pipe: Pipeline, scheduler: Any, before_pass: Callable[..., object] | None = None
) -> Iterator[None]:
    """Set a scheduler and optionally a pre-hook of the denoiser, and take both out again."""
    with ExitStack() as undo:
        undo.callback(setattr, pipe, "scheduler", pipe.scheduler)
        pipe.scheduler = scheduler
        if before_pass is not None:
            before_pass = torch.compiler.disable(before_pass)
            hook = find_denoiser(pipe).model.register_forward_pre_hook(
                before_pass, with_kwargs=True
            )
            undo.callback(hook.remove)
        yield


class StandIn:
    """A scheduler that any pipeline can call, configured as the one that it replaces."""

    order = 1
    init_noise_sigma = 1.0
    timesteps: Tensor

    def __init__(self, config: Any):
        self.config = config

    def set_begin_index(self, begin_index: int = 0) -> None:
        """Ignore it: every run begins with the first step."""

    def scale_model_input(self, sample: Tensor, timestep: object) -> Tensor:
        return sample


class Noised(StandIn):
    """A scheduler that keeps the latents unchanged and shows them to the model with noise.

    Args:
        config: configuration of the scheduler that it replaces.
        mix: mixes latents and noise at a timestep, as :meth:`sdattn.inversion.schedules.Flow.mix`.
        timesteps: timesteps to show, whatever number of steps is asked for.
        seeds: one for each image of the batch.
    """

    def __init__(
        self,
        config: Any,
        mix: Callable[[Tensor, Tensor, int], Tensor],
        timesteps: Tensor,
        seeds: Sequence[int],
    ):
        super().__init__(config)
        self.timesteps = timesteps
        self.seeds = seeds
        self.mix = mix
        self.shown = [int(t) for t in timesteps]
        self.step_index = 0  # captures tell steps apart by it

    def set_timesteps(
        self,
        num_inference_steps: object = None,
        device: torch.device | str | None = None,
        sigmas: object = None,
        mu: object = None,
    ) -> None:
        """Ignore the arguments (FLUX passes ``sigmas`` and ``mu``) except the device."""
        self.timesteps = self.timesteps.to(device)

    def noised(self, latents: Tensor) -> Tensor:
        """Return the latents ``[B, ...]``, one row per seed, with the noise of this step."""
        at = self.shown[self.step_index]
        most = self.config.num_train_timesteps
        draws = []
        for seed in self.seeds:
            generator = torch.Generator("cpu").manual_seed((seed * most + at) % 2**63)
            draws.append(torch.randn(latents.shape[1:], generator=generator))
        mixed = self.mix(latents.float(), torch.stack(draws).to(latents.device), at)
        return mixed.to(latents.dtype)

    def step(
        self, output: Tensor, timestep: object, sample: Tensor, return_dict: object = None
    ) -> tuple[Tensor]:
        self.step_index += 1
        return (sample,)


@contextmanager
def noised(pipe: Pipeline, scheduler: Noised) -> Iterator[None]:
    """Make a run of the pipeline show its latents to the model with noise."""
    family = find_denoiser(pipe).family

    def before_pass(model: Model, args: tuple[object, ...], kwargs: Given) -> object:
        latents = scheduler.noised(family.latents(model, args, kwargs))
        return family.with_latents(args, kwargs, latents)

    with in_place(pipe, scheduler, before_pass):
        yield


class Upwards(StandIn):
    """A scheduler that takes another's steps backwards, from the image to the noise.

    A step down is ``x_prev = a x + b f(x)``, linear in the model's output ``f``, so ``x`` is
    ``(x_prev - b f(x)) / a``. Using ``f(x_prev)`` for ``f(x)`` is plain inversion (DDIM: Song et
    al. 2020, eq. 12); iterated, it is exact (Pan et al. 2023, "Effective Real Image Editing with
    Accelerated Iterative Diffusion Inversion"). ``factors`` gives a and b of ``down``'s step at a
    timestep.
    """

    def __init__(self, down: Any, factors: Callable[[Any, Tensor], tuple[Tensor | float, Tensor]]):
        super().__init__(down.config)
        self.down = down
        self.factors = factors

    def set_timesteps(
        self, num_inference_steps: object, device: object = None, **shift: object
    ) -> None:
        self.down.set_timesteps(num_inference_steps, device, **shift)
        self.timesteps = self.down.timesteps.flip(0)

    def step(
        self, output: Tensor, timestep: Tensor, sample: Tensor, return_dict: object = None
    ) -> tuple[Tensor]:
        a, b = self.factors(self.down, timestep)
        return (((sample.float() - b * output.float()) / a).to(sample.dtype),)
