"""How images become latents: undone by the pipelines' own decoding, and by the formulas."""

from copy import deepcopy

import pytest
import torch
from diffusers import FluxImg2ImgPipeline, StableDiffusion3Img2ImgPipeline
from helpers.flow_pipelines import FLOWS, flow_pipeline
from helpers.small_images import new_image
from helpers.transformer_rows import flux, sd3

from sdattn.inversion.images import encode
from sdattn.models.families import image_latents_of, unguided_options
from sdattn.runs.explaining import explain


@torch.no_grad()
@pytest.mark.parametrize("name", FLOWS)
def test_the_pipeline_decodes_what_its_vae_made_of_the_image(name):
    pipe, options = flow_pipeline(name)
    decoded = []
    decode = pipe.vae.decode

    def noting(latents, **given):
        decoded.append(latents)
        return decode(latents, **given)

    pipe.vae.decode = noting
    image = new_image((160, 96))  # not square, so that rows and columns are told apart
    explain(pipe, image, "a red cat", timesteps=[100], **options)
    pixels = pipe.image_processor.preprocess(image)
    pixels = pixels[:, :, None] if name == "Qwen-Image" else pixels
    [found] = decoded
    expected = pipe.vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.slow
def test_latents_are_those_of_the_formulas():
    image = new_image((160, 96))
    shapes = {"SD3": (4, 12, 20), "FLUX.1": (60, 16), "FLUX.2": (16, 6, 10)}
    for name, shape in shapes.items():
        pipe, _ = flow_pipeline(name)
        pixels = pipe.image_processor.preprocess(image)
        z = pipe.vae.encode(pixels).latent_dist.mode()
        found = encode(pipe, [image, image])
        assert found.shape == (2, *shape)
        assert found.dtype == torch.float32
        assert torch.equal(found[0], found[1])
        if name == "FLUX.2":
            expected = pipe._encode_vae_image(pixels, None)  # diffusers' own, without chance
        else:
            expected = (z - 0.1) * pipe.vae.config.scaling_factor
        if name == "FLUX.1":  # patch by patch: channel, row, column
            cells = expected[0].unfold(1, 2, 2).unfold(2, 2, 2)  # [C, rows, cols, 2, 2]
            expected = cells.permute(1, 2, 0, 3, 4).reshape(1, 60, 16)
        torch.testing.assert_close(found[:1], expected)


@torch.no_grad()
def test_a_vae_of_half_precision_encodes_in_float32_and_is_left_as_it_was():
    pipe, _ = flow_pipeline("SD3")
    pipe.to(torch.bfloat16)
    vae, pixels = deepcopy(pipe.vae).float(), pipe.image_processor.preprocess(new_image())
    expected = (vae.encode(pixels).latent_dist.mode() - 0.1) * vae.config.scaling_factor
    found = encode(pipe, [new_image()])
    assert found.dtype == torch.float32
    assert {weight.dtype for weight in pipe.vae.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(found, expected)


def test_without_guidance():
    assert unguided_options(flux()) == {"true_cfg_scale": 1.0}
    assert unguided_options(sd3()) == {"guidance_scale": 1.0}


@pytest.mark.parametrize(
    "make", [lambda: flux(FluxImg2ImgPipeline), lambda: sd3(StableDiffusion3Img2ImgPipeline)]
)
def test_pipelines_that_start_from_an_image_are_refused_by_name(make):
    with pytest.raises(TypeError, match=r"StableDiffusionXLPipeline.*; found a \w+Img2ImgPipeline"):
        image_latents_of(make())


def test_only_some_are_inverted():
    assert image_latents_of(sd3(), invertible=True).noise == "flow"
    with pytest.raises(TypeError, match=r"StableDiffusion3Pipeline.*; found a FluxPipeline"):
        image_latents_of(flux(), invertible=True)
