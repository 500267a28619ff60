"""How the small MM-DiT is trained: what it learns from, and what a checkpoint is."""

from functools import partial

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler

from demos.training.mmdit import (
    flow_loss,
    new_transformer,
)

pytestmark = pytest.mark.slow
SMALL = partial(new_transformer, blocks=2, heads=2, head_width=16)


def test_it_learns_the_way_that_the_scheduler_walks():
    """What it sees is what the scheduler makes of an image at that time, and from there one step
    along what it learns leads back to the image."""
    torch.manual_seed(1)
    transformer = SMALL()
    latents, noise = torch.randn(2, 3, 4, 16, 16)
    states = torch.randn(3, 9, 256)
    scheduler = FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(4)
    part, seen = scheduler.sigmas[:3].clone(), []
    hook = transformer.register_forward_pre_hook(lambda _, args: seen.append(args))
    answer = torch.tensor([0.5, -1.0, 2.0, 0.25])  # a channel each, whatever it sees
    transformer.proj_out.bias.data.copy_(answer)
    found = flow_loss(transformer, latents, noise, part, states)
    hook.remove()
    mixed, _, pooled, times = seen[0]
    torch.testing.assert_close(times, scheduler.timesteps[:3])
    torch.testing.assert_close(mixed, scheduler.scale_noise(latents, times, noise))
    assert not pooled.any()
    way = noise - latents
    torch.testing.assert_close(found, (answer[:, None, None] - way).square().mean())
    for row in range(3):
        scheduler.set_timesteps(sigmas=[float(part[row])])
        [time] = scheduler.timesteps
        back = scheduler.step(way[row], time, mixed[row]).prev_sample
        torch.testing.assert_close(back, latents[row], atol=1e-5, rtol=1e-5)
