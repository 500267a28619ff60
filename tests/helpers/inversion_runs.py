"""Inversions on a tiny pipeline, and their way back down.

from helpers.inversion_runs import inverted_image, strong_pipe  # noqa: F401  (the fixtures)
"""

import pytest
import torch

from helpers.small_images import new_image
from helpers.tiny_pipelines import make_pipeline
from sdattn.inversion.invert import Inversion, invert

PROMPT = "a red cat"


@pytest.fixture(name="pipe", scope="module")
def strong_pipe():
    return strong_text(make_pipeline())


@pytest.fixture(name="found", scope="module")
def inverted_image(pipe):
    return invert(pipe, new_image(), PROMPT, num_inference_steps=4)


def strong_text(pipe):
    """Make the text count: in a random UNet it hardly does."""
    with torch.no_grad():
        for name, weight in pipe.unet.named_parameters():
            if "attn2.to_v" in name or "attn2.to_out.0.weight" in name:
                weight.mul_(4)
    return pipe


def descend(pipe, inversion, prompts=PROMPT, images=1, **changes):
    """(latents of each step, text states of each call of the UNet) of a replay."""
    latents, texts = [inversion.noise.repeat(images, 1, 1, 1)], []

    def keep(_pipe, _step, _timestep, tensors):
        latents.append(tensors["latents"])
        return {}

    def see(_unet, _args, kwargs):
        texts.append(kwargs["encoder_hidden_states"])

    with inversion.replay(pipe):
        hook = pipe.unet.register_forward_pre_hook(see, with_kwargs=True)
        try:
            options = {**inversion.options(images), "output_type": "latent", **changes}
            pipe(prompts, callback_on_step_end=keep, **options)
        finally:
            hook.remove()
    return torch.stack(latents), torch.stack(texts)


def without_null_text(inversion, guidance=None):
    return Inversion(
        inversion.prompt,
        inversion.image,
        inversion.trajectory,
        None,
        guidance or inversion.guidance_scale,
        inversion.num_inference_steps,
    )
