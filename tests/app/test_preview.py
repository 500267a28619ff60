"""Previews of an image while it is drawn."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers.demo_words import PROMPT
from helpers.transformer_rows import flux
from PIL import Image

from sdattn import generate, load_pipeline
from sdattn.app.preview import preview_hook
from sdattn.models.denoiser import find_denoiser


def previewed(pipe, **options):
    """A run, and the previews of it."""
    shown = []
    hook = preview_hook(pipe, shown.append)
    handle = find_denoiser(pipe).model.register_forward_hook(hook, with_kwargs=True)
    try:
        return generate(pipe, PROMPT, **options), shown
    finally:
        handle.remove()


@pytest.mark.slow
def test_previews_come_near_to_the_image_and_change_nothing():
    pipe = load_pipeline("demo", device="cpu")
    run, shown = previewed(pipe, num_inference_steps=12)
    alone = generate(pipe, PROMPT, num_inference_steps=12)
    assert 3 <= len(shown) <= 6
    image = np.asarray(run.images[0], float)
    assert np.array_equal(image, np.asarray(alone.images[0]))
    assert torch.equal(run.heatmaps[0].maps, alone.heatmaps[0].maps)
    apart = [np.abs(np.asarray(one, float) - image).mean() for one in shown]
    assert isinstance(shown[0], Image.Image) and apart[-1] < apart[0] and apart[-1] < 10


@pytest.mark.parametrize("steps", [1, 3])
def test_a_model_without_previews_draws_as_before(steps):
    _, shown = previewed(flux(), num_inference_steps=steps, width=64, height=64)
    assert shown == []


def test_a_pipeline_whose_autoencoder_has_another_name_draws_as_before():
    pipe = SimpleNamespace(scheduler=SimpleNamespace(timesteps=range(6)))  # as Kandinsky's movq
    unet, shown = torch.nn.Linear(2, 2), []
    unet.register_forward_hook(preview_hook(pipe, shown.append), with_kwargs=True)
    for _ in range(6):
        unet(torch.zeros(1, 2))
    assert shown == []
