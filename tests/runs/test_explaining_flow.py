"""Maps of given images under flow matching: what models are shown, and what is left behind."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FlowMatchHeunDiscreteScheduler
from helpers.flow_pipelines import FLOWS, Seen, flow_pipeline
from helpers.refusals import refused_unrun
from helpers.small_images import new_image
from helpers.tiers import tiered
from PIL import Image

from demos.scenes.shapes import random_scene
from sdattn.inversion.images import encode
from sdattn.runs.explaining import explain

PROMPT = "a red cat"


def expected_latents(pipe, image, seed, timestep):
    """By diffusers' own scale_noise, of the latents in the layout that the transformer gets."""
    latents = encode(pipe, [image])
    if type(pipe).__name__.startswith("Flux2"):
        latents = pipe._pack_latents(latents)
    generator = torch.Generator().manual_seed(seed * 1000 + timestep)
    noise = torch.randn(latents.shape[1:], generator=generator)[None]
    unshifted = FlowMatchEulerDiscreteScheduler()  # sigma is timestep / 1000
    return unshifted.scale_noise(latents, torch.tensor([float(timestep)]), noise)


# -- what the model is shown ----------------------------------------------------------------------


@pytest.mark.parametrize("name", tiered(FLOWS, quick=2))
def test_the_model_is_shown_the_noised_latents(name):
    pipe, options = flow_pipeline(name)
    image, asked = new_image((160, 96)), [40, 700, 300]
    with Seen(pipe) as seen:
        run = explain(pipe, image, PROMPT, seed=3, timesteps=asked, **options)
    assert len(seen) == 3  # one pass each: no guidance
    unit = 1 if name == "SD3" else 1000
    for given, timestep in zip(seen, sorted(asked, reverse=True), strict=True):
        assert float(given["timestep"][0]) * unit == pytest.approx(timestep, rel=1e-6)
        expected = expected_latents(pipe, image, 3, timestep)
        torch.testing.assert_close(given["hidden_states"], expected, atol=1e-6, rtol=1e-6)
    assert run.info[0]["explained"]["timesteps"] == [700, 300, 40]
    assert run.heatmaps[0]["cat"].values.shape == (6, 10)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["SD3", "FLUX.1"])
def test_neither_scheduler_nor_shift_matter(name):
    plain, options = flow_pipeline(name)
    first = explain(plain, new_image(), PROMPT, **options)
    shifted, _ = flow_pipeline(name, use_dynamic_shifting=True, shift=3.0)
    heun, _ = flow_pipeline(name)
    heun.scheduler = FlowMatchHeunDiscreteScheduler()
    for other in (shifted, heun):
        again = explain(other, new_image(), PROMPT, **options)
        for layer, maps in first.store.maps.items():
            assert torch.equal(maps, again.store.maps[layer])


def test_the_guidance_that_a_model_takes_as_an_input_keeps_its_default():
    pipe, options = flow_pipeline("FLUX.1")
    with Seen(pipe) as seen:
        explain(pipe, new_image(), PROMPT, timesteps=[200], **options)
    assert seen[0]["guidance"].tolist() == [3.5]


@pytest.mark.slow
def test_bfloat16():
    pipe, options = flow_pipeline("SD3")
    exact = explain(pipe, new_image(), PROMPT, **options)
    pipe.to(torch.bfloat16)
    run = explain(pipe, new_image(), PROMPT, **options)
    # of maps near 1/101 each; 8 bits of mantissa in queries and keys
    for layer, maps in exact.store.maps.items():
        torch.testing.assert_close(run.store.maps[layer], maps, atol=2e-3, rtol=0)


# -- what the maps are good for -------------------------------------------------------------------


@pytest.mark.slow
def test_words_point_at_their_own_objects_in_drawn_images(mmdit):
    rng = np.random.default_rng(3)
    scenes = [random_scene(rng, held_out=True, n_objects=2) for _ in range(10)]
    images = [Image.fromarray(scene.draw(128)) for scene in scenes]
    run = explain(mmdit, images, [scene.caption(rng) for scene in scenes])
    right = []
    for scene, heatmaps in zip(scenes, run.heatmaps, strict=True):
        masks = torch.from_numpy(scene.masks())
        for thing, own, other in zip(scene.objects, masks, masks.flip(0), strict=True):
            if thing.colour != scene.objects[0].colour or thing is scene.objects[0]:
                values = heatmaps.find(thing.colour)[0].resize((64, 64))
                right.append(bool(values[own].mean() > values[other].mean()))
    assert len(right) >= 16
    assert np.mean(right) > 0.9
    assert all(one["explained"]["reconstruction_psnr"] > 25 for one in run.info)


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("FLUX.1", {"true_cfg_scale": 4.0}, "true_cfg_scale"),
        ("FLUX.1", {"guidance_scale": 4.0}, "guidance_scale"),
        ("SD3", {"mu": 1.0}, "`mu`"),
        ("SD3", {"invert": True}, "invert=True"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(name, changes, message):
    pipe, options = flow_pipeline(name)
    with refused_unrun(pipe, message):
        explain(pipe, new_image(), PROMPT, **options, **changes)
