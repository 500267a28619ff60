"""Steps along a flow, against the formulas in float64 and diffusers' own steps down."""

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from helpers.flow_pipelines import flow_pipeline
from helpers.refusals import refused_unrun
from helpers.small_images import new_image
from PIL import Image

import sdattn
from demos.scenes.shapes import random_scene
from sdattn.inversion.images import encode
from sdattn.inversion.invert import invert, psnr
from sdattn.inversion.schedules import Flow

PROMPT = "a red cat"


@pytest.fixture
def pipe():
    return flow_pipeline("SD3", shift=3.0)[0]


def smooth(pipe):
    """A velocity that changes slowly, as a trained one does."""
    with torch.no_grad():
        pipe.transformer.proj_out.weight.mul_(0.1)
    return pipe


def inverted(pipe, **options):
    given = {"num_inference_steps": 4, "max_sequence_length": 24, **options}
    return invert(pipe, new_image((160, 96)), PROMPT, **given)


@pytest.mark.parametrize("timestep", [1, 250, 999])
def test_noise_is_mixed_in_as_diffusers_does(pipe, timestep):
    latents, noise = torch.randn(2, 3, 4, 5, 6, generator=torch.Generator().manual_seed(0))
    own = FlowMatchEulerDiscreteScheduler()
    expected = own.scale_noise(latents, torch.tensor([float(timestep)]), noise)
    torch.testing.assert_close(Flow(pipe).mix(latents, noise, timestep), expected)


@torch.no_grad()
@pytest.mark.parametrize("refinements", [0, 2])
def test_the_way_up_is_the_formula(pipe, refinements):
    found = inverted(smooth(pipe), refinements=refinements)
    # the schedule of four steps, shifted (Esser et al. 2024, section 5.3.2)
    parts = np.linspace(1000, 1000 * 3 / (1 + 2 / 1000) / 1000, 4) / 1000
    sigmas = [*(3 * parts / (1 + 2 * parts)), 0.0]
    text, _, pooled, _ = pipe.encode_prompt(
        PROMPT, PROMPT, PROMPT, do_classifier_free_guidance=False, max_sequence_length=24
    )
    x = encode(pipe, [new_image((160, 96))]).double()
    expected = [x]
    for i in (3, 2, 1, 0):
        guess = x
        for _ in range(refinements + 1):
            time = torch.tensor([1000 * sigmas[i]]).float()
            velocity = pipe.transformer(guess.float(), text, pooled, time).sample.double()
            guess = x + (sigmas[i] - sigmas[i + 1]) * velocity
        x = guess
        expected.append(x)
    assert found.trajectory.shape == (5, 4, 12, 20)
    torch.testing.assert_close(found.trajectory.double(), torch.cat(expected), atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_refined_it_is_undone_by_the_pipelines_own_steps(pipe):
    smooth(pipe)
    errors = []
    for refinements in (0, 8):
        found = inverted(pipe, refinements=refinements)
        # without replay(): the pipeline's own scheduler takes these very steps
        down = pipe(PROMPT, output_type="latent", **found.options()).images
        errors.append(float((down - found.trajectory[0]).abs().max()))
    assert errors[1] < errors[0] / 20
    assert errors[1] < 1e-4


def test_what_differs_from_unets_by_default(pipe):
    found = inverted(pipe)
    assert found.guidance_scale == 1.0
    assert found.null_states is None
    assert found.call == {"max_sequence_length": 24}
    assert torch.equal(found.trajectory, inverted(pipe, refinements=1).trajectory)


def test_a_replay_is_captured_like_any_run_and_restores(pipe):
    scheduler, found = pipe.scheduler, inverted(pipe)
    assert pipe.scheduler is scheduler
    with found.replay(pipe):
        assert pipe.scheduler is not scheduler
        run = sdattn.generate(pipe, [PROMPT, "a dog"], **found.options(2))
    assert pipe.scheduler is scheduler
    assert [image.size for image in run.images] == [(160, 96)] * 2
    assert len(run.store.passes) == 4
    with pytest.raises(RuntimeError, match="4 steps.*3 steps"), found.replay(pipe):
        pipe(PROMPT, **{**found.options(), "num_inference_steps": 3})
    with pytest.raises(RuntimeError, match="never called"), found.replay(pipe):
        pass
    hooks = [len(m._forward_pre_hooks) + len(m._forward_hooks) for m in pipe.transformer.modules()]
    assert sum(hooks) == 0


def test_under_guidance_the_way_up_has_none(pipe):
    plain, guided = inverted(pipe), inverted(pipe, guidance_scale=4.0)
    assert torch.equal(plain.trajectory, guided.trajectory)
    assert guided.options()["guidance_scale"] == 4.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"null_text": True}, "null_text=True.*StableDiffusion3Pipeline"),
        ({"negative_prompt": "dog"}, "negative_prompt"),
        ({"height": 64}, "height"),
        ({"max_length": 8}, "'max_length'.*max_sequence_length"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(pipe, changes, message):
    with refused_unrun(pipe, message):
        invert(pipe, new_image(), PROMPT, **changes)


def test_packed_latents_are_refused():
    with pytest.raises(TypeError, match=r"StableDiffusion3Pipeline.*; found a FluxPipeline"):
        invert(flow_pipeline("FLUX.1")[0], new_image(), PROMPT)


@pytest.mark.slow
def test_the_demo_comes_back_to_its_image(mmdit):
    rng = np.random.default_rng(0)
    scene = random_scene(rng, n_objects=1)
    image = Image.fromarray(scene.draw(128))
    found = invert(mmdit, image, scene.caption(rng), num_inference_steps=20)
    with found.replay(mmdit):
        back = mmdit(found.prompt, **found.options()).images[0]
    assert psnr(image, back) > 28
