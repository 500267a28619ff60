"""Images of one's own, made what a pipeline can take."""

import numpy as np
import pytest
import torch
from helpers.inversion_runs import PROMPT, descend, strong_pipe  # noqa: F401
from helpers.small_images import new_image
from helpers.tiny_pipelines import make_pipeline
from PIL import Image

from sdattn.inversion.images import at_own_size, encode, fit
from sdattn.inversion.invert import invert


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ((128, 128), (128, 128)),
        ((1000, 500), (184, 88)),
        ((30, 90), (72, 224)),
        ((1, 1), (128, 128)),
    ],
)
def test_images_keep_their_proportions(pipe, given, made):
    inversion = invert(pipe, new_image(given), PROMPT, num_inference_steps=1, null_text=False)
    assert inversion.image.size == made
    assert inversion.noise.shape == (1, 4, made[1] // 8, made[0] // 8)
    latents, _ = descend(pipe, inversion)
    assert latents.shape == (2, 1, 4, made[1] // 8, made[0] // 8)


@pytest.mark.parametrize("mode", ["RGBA", "L", "LA", "P", "1", "CMYK"])
def test_images_are_made_upright_and_rgb(pipe, mode):
    image = new_image((64, 128)).convert(mode)
    image.getexif()[0x0112] = 6  # to be turned by 90 degrees
    upright = fit(pipe, image)
    assert upright.mode == "RGB"
    assert upright.width > upright.height


def test_grey_of_16_bits_is_the_grey_of_8(pipe):
    grey = new_image().convert("L")
    image = Image.fromarray(np.asarray(grey).astype(np.uint16) * 257)
    assert image.mode == "I;16"
    assert fit(pipe, image).tobytes() == fit(pipe, grey).tobytes()


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ((40, 30), (144, 112)),  # never smaller than the pipeline saw it
        ((600, 450), (579, 450)),
        ((6000, 4500), (1536, 1195)),
    ],
)
def test_what_is_shown_is_the_fitted_part_at_its_own_resolution(pipe, given, shown):
    image = new_image(given)
    fitted = fit(pipe, image)
    assert fitted.size == (144, 112)
    assert at_own_size(image, fitted).size == shown


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_vae_in_a_half_type_encodes_in_float32(dtype):
    pipe = make_pipeline()
    pipe.vae.to(dtype)
    found = encode(pipe, [new_image((64, 64))])
    assert {weight.dtype for weight in pipe.vae.parameters()} == {dtype}
    pipe.vae.to(torch.float32)  # of the rounded weights
    expected = encode(pipe, [new_image((64, 64))])
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
