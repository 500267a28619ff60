"""DDIM's steps up, against the formula and diffusers' own steps down."""

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler
from helpers.inversion_runs import PROMPT, strong_pipe  # noqa: F401
from helpers.small_images import new_image
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

from sdattn.inversion.invert import invert


@pytest.mark.slow
@torch.no_grad()
def test_plain_inversion_is_the_formula(pipe):
    steps = 5
    inversion = invert(
        pipe, new_image(), PROMPT, num_inference_steps=steps, null_text=False, refinements=0
    )
    pixels = pipe.image_processor.preprocess(new_image())
    x = pipe.vae.encode(pixels).latent_dist.mean.double() * pipe.vae.config.scaling_factor
    text, _ = pipe.encode_prompt(PROMPT, "cpu", 1, False)
    betas = torch.linspace(1e-4**0.5, 0.02**0.5, 1000, dtype=torch.float64) ** 2
    alphas = (1 - betas).cumprod(0)
    expected, before = [x], torch.tensor(1.0)  # DDIMScheduler's default: alpha is 1 at the image
    for t in range(1, 1001, 1000 // steps):
        eps = pipe.unet(x.float(), t, text).sample.double()
        clean = (x - (1 - before).sqrt() * eps) / before.sqrt()
        before = alphas[t]
        x = before.sqrt() * clean + (1 - before).sqrt() * eps
        expected.append(x)
    assert inversion.null_states is None
    assert inversion.trajectory.shape == (steps + 1, 4, 16, 16)
    torch.testing.assert_close(
        inversion.trajectory.double(), torch.cat(expected), atol=2e-4, rtol=1e-4
    )


@pytest.mark.parametrize("refinements", [0, 1, 3])
def test_each_refinement_is_a_pass_more_of_each_step(refinements):
    pipe, calls = make_pipeline(), []
    pipe.unet.conv_in.register_forward_hook(lambda *_: calls.append(1))
    options = {"num_inference_steps": 2, "null_text": False, "refinements": refinements}
    invert(pipe, new_image((64, 64)), PROMPT, **options)
    assert len(calls) == 2 * (1 + refinements)


@pytest.mark.parametrize(
    ("prediction", "spacing"),
    tiered(
        [
            ("v_prediction", "trailing"),  # with a schedule whose alpha is 0 at t = 999
            ("epsilon", "leading"),
            ("epsilon", "trailing"),
            ("epsilon", "linspace"),
        ],
        quick=0,
    ),
)
def test_refined_inversion_is_undone_by_diffusers_own_steps(prediction, spacing):
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        prediction_type=prediction,
        timestep_spacing=spacing,
        rescale_betas_zero_snr=prediction == "v_prediction",
    )
    pipe = make_pipeline(scheduler=scheduler)
    with torch.no_grad():  # a prediction that changes slowly, as a trained one does
        pipe.unet.conv_out.weight.mul_(0.02)
    errors = []
    for refinements in (0, 8):
        inversion = invert(
            pipe,
            new_image(),
            PROMPT,
            num_inference_steps=6,
            guidance_scale=1.0,
            null_text=False,
            refinements=refinements,
        )
        down = pipe(PROMPT, output_type="latent", **inversion.options()).images
        errors.append(float((down - inversion.trajectory[0]).abs().max()))
    assert errors[1] < errors[0] / 20


@pytest.mark.slow
@pytest.mark.parametrize("kind", [EulerDiscreteScheduler, DDIMScheduler])
def test_any_scheduler_is_inverted_with_ddim_steps_without_clipping(pipe, kind):
    """DDIM's formula has no clipping, which has no inverse."""
    clipping = {"clip_sample": True, "clip_sample_range": 1e-3}  # of all that there is
    changes = clipping if kind is DDIMScheduler else {}
    mine = make_pipeline()
    mine.scheduler = kind.from_config(pipe.scheduler.config, **changes)
    mine.unet.load_state_dict(pipe.unet.state_dict())
    one, other = (
        invert(p, new_image(), PROMPT, num_inference_steps=2, null_text=False) for p in (pipe, mine)
    )
    assert torch.equal(one.trajectory, other.trajectory)
