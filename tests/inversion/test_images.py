"""Images of one's own, made what a pipeline can take."""

import pytest
from helpers.inversion_runs import descend, strong_text
from helpers.small_images import new_image
from helpers.tiny_pipelines import make_pipeline

from sdattn.inversion.invert import invert

PROMPT = "a red cat"


@pytest.fixture(scope="module")
def pipe():
    return strong_text(make_pipeline())


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


def test_images_are_made_upright_and_rgb(pipe):
    image = new_image((64, 128)).convert("RGBA")
    image.getexif()[0x0112] = 6  # to be turned by 90 degrees
    upright = invert(pipe, image, PROMPT, num_inference_steps=1, null_text=False).image
    assert upright.mode == "RGB"
    assert upright.width > upright.height
