"""How the motion modules of the video demo are trained: what they begin as, what they learn from,
what is written."""

import pytest
import torch

from demos.training.motion import (
    assemble,
    new_adapter,
    video_loss,
)
from sdattn.models import demos

pytestmark = pytest.mark.slow
CHANNELS, TOKENS, WIDTH = 16, 77, 128  # of the demo's latents and texts


@pytest.fixture
def pipe():
    torch.manual_seed(0)
    return assemble(demos.DEMO, new_adapter())


def test_it_learns_the_velocity_of_every_frame(pipe):
    """Against the formula written out: x_t = sqrt(a) x + sqrt(1 - a) e, v = sqrt(a) e -
    sqrt(1 - a) x, a video each its own time."""
    latents, noise = torch.randn(2, 2, CHANNELS, 3, 16, 16)
    t, states = torch.tensor([10, 900]), torch.randn(2, TOKENS, WIDTH)
    seen = []
    hook = pipe.unet.register_forward_pre_hook(lambda _, args: seen.append(args))
    loss = video_loss(pipe, latents, noise, t, states)
    hook.remove()
    [(noisy, times, frames)] = seen
    share = pipe.scheduler.alphas_cumprod[t].double()[:, None, None, None, None]
    image, chance = share.sqrt(), (1 - share).sqrt()
    torch.testing.assert_close(noisy.double(), image * latents + chance * noise)
    assert torch.equal(times, t)
    assert torch.equal(frames, states[[0, 0, 0, 1, 1, 1]])
    velocity = image * noise - chance * latents
    with torch.no_grad():
        found = pipe.unet(noisy, times, frames).sample.double()
    torch.testing.assert_close(loss.double(), (found - velocity).square().mean())
