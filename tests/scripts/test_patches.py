"""An autoencoder whose encoder is written down, against components worked out here."""

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL

from scripts.scenes.emoji import random_scene
from scripts.training.patches import BLOCKS, CHANNELS, fit_patches, new_patch_vae

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


def test_components_are_those_of_a_singular_value_decomposition(drawn, patches):
    flat = cut(drawn)
    mean = flat.mean(0)
    _, sizes, rows = np.linalg.svd(flat - mean, full_matrices=False)
    assert patches.mean.numpy() == pytest.approx(mean, abs=1e-5)
    weight = patches.weight.double().numpy()
    lengths = np.linalg.norm(weight, axis=1)
    along = abs((weight / lengths[:, None] * rows[:CHANNELS]).sum(1))
    assert along[:4] == pytest.approx(1, abs=1e-3)  # later ones are nearly alike in size
    latents = (flat - mean) @ weight.T
    deviations = sizes[:CHANNELS] / len(flat) ** 0.5
    wanted = deviations**0.5 / np.sqrt(deviations.mean())
    assert latents.std(0) == pytest.approx(wanted, rel=2e-2)
    assert (latents**2).mean() == pytest.approx(1, rel=1e-3)
    assert np.corrcoef(latents.T) == pytest.approx(np.eye(CHANNELS), abs=1e-3)


@pytest.mark.weekly
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


def test_other_sizes_of_images_and_weights_in_float16_make_the_same_latents(
    drawn, patches, vae, tmp_path
):
    wide = torch.cat([drawn[:2], drawn[2:4]], dim=3)
    vae.half().save_pretrained(tmp_path)
    vae.float()
    again = AutoencoderKL.from_pretrained(tmp_path, torch_dtype=torch.float32)
    with torch.no_grad():
        latents = again.encode(wide.float() / 127.5 - 1).latent_dist.mode()
    wanted = patches.encode(wide)
    assert latents.shape == (2, CHANNELS, 16, 32)
    assert (latents - wanted).abs().max() < 0.01 * wanted.abs().max()


def test_only_the_decoder_learns_and_its_blocks_begin_by_adding_nothing(vae):
    learns = {name.split(".")[0] for name, one in vae.named_parameters() if one.requires_grad}
    assert learns == {"decoder", "post_quant_conv"}
    block = vae.decoder.mid_block.resnets[0]
    hidden = torch.randn(1, BLOCKS[-1], 4, 4)
    with torch.no_grad():
        assert torch.equal(block(hidden, None), hidden)
