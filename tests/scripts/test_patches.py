"""An autoencoder whose encoder is written down, against components worked out here."""

import numpy as np
import pytest
import torch

from scripts.scenes.emoji import random_scene
from scripts.training.patches import CHANNELS, fit_patches, new_patch_vae

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def drawn():
    rng = np.random.default_rng(5)
    images = np.stack([random_scene(rng).draw() for _ in range(60)])
    return torch.from_numpy(images).permute(0, 3, 1, 2).contiguous()


@pytest.fixture(scope="module")
def patches(drawn):
    return fit_patches(drawn)


@pytest.fixture(scope="module")
def vae(patches):
    torch.manual_seed(0)
    return new_patch_vae(patches, 128).eval()


def cut(images):
    """Patches [n, 192] in [-1, 1], by colour, row and column; float64."""
    pixels = images.numpy().astype(np.float64) / 127.5 - 1
    split = pixels.reshape(len(pixels), 3, 16, 8, 16, 8).transpose(0, 2, 4, 1, 3, 5)
    return split.reshape(-1, 192)


def test_the_encoder_has_the_latents_that_the_components_have(drawn, patches, vae):
    noise = torch.randint(0, 256, (4, 3, 128, 128), generator=torch.Generator().manual_seed(1))
    plain = torch.tensor([0, 255])[:, None, None, None].expand(-1, 3, 128, 128)
    shaken = drawn[:8].roll((3, 5), dims=(2, 3))
    for images in (drawn[:8], shaken, noise.byte(), plain.byte()):
        rows = (cut(images) - patches.mean.double().numpy()) @ patches.weight.double().numpy().T
        wanted = rows.reshape(len(images), 16, 16, CHANNELS).transpose(0, 3, 1, 2)
        assert patches.encode(images).numpy() == pytest.approx(wanted, abs=1e-4)
        with torch.no_grad():
            seen = vae.encode(images.float() / 127.5 - 1).latent_dist
        away = abs(seen.mode().numpy() - wanted)
        assert away.max() < 0.003 * abs(wanted).max()
        assert seen.logvar.numpy() == pytest.approx(-6)
