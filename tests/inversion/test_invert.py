"""Inversion on tiny pipelines: against the formulas, and that nothing is left behind."""

import math

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionImg2ImgPipeline
from helpers.inversion_runs import (  # noqa: F401
    PROMPT,
    descend,
    inverted_image,
    strong_pipe,
    strong_text,
    without_null_text,
)
from helpers.refusals import refused_unrun
from helpers.small_images import new_image
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet
from PIL import Image

from sdattn.inversion.invert import invert, psnr

# -- down: null-text optimisation -----------------------------------------------------------------


@pytest.mark.slow
def test_replay_uses_the_states_and_leaves_the_prompts_alone(pipe, found):
    prompts = [PROMPT, "a dog"]
    _, plain = descend(pipe, without_null_text(found), prompts, images=2)
    _, texts = descend(pipe, found, prompts, images=2, negative_prompt=["cat", "cat"])
    assert texts.shape == (4, 4, 77, 32)
    assert torch.equal(texts[:, 2:], plain[:, 2:])
    for row in (0, 1):
        assert torch.equal(texts[:, row], found.null_states)
    assert not torch.equal(texts[0, 0], plain[0, 0])
    assert not torch.equal(texts[0, 0], texts[-1, 0])


@pytest.mark.slow
def test_the_run_of_the_optimisation_is_the_run_of_the_replay(pipe):
    calls = []

    def see(_unet, args, kwargs):
        calls.append((args[0], kwargs["encoder_hidden_states"]))

    hook = pipe.unet.register_forward_hook(
        lambda unet, args, kwargs, _: see(unet, args, kwargs), with_kwargs=True
    )
    try:
        inversion = invert(pipe, new_image(), PROMPT, num_inference_steps=2)
        optimised = [call for call in calls if len(call[0]) == 2]
        calls.clear()
        descend(pipe, inversion)
    finally:
        hook.remove()
    assert len(optimised) == len(calls) == 2
    for (latents, text), (again, text_again) in zip(optimised, calls, strict=True):
        assert torch.equal(latents, again)
        assert torch.equal(text, text_again)


@pytest.mark.slow
def test_sdxl_with_its_extra_conditions():
    pipe = strong_text(make_sdxl_pipeline())
    inversion = invert(pipe, new_image((160, 96)), PROMPT, num_inference_steps=3)
    assert inversion.null_states.shape == (3, 77, 64)
    near, _ = descend(pipe, inversion)
    far, _ = descend(pipe, without_null_text(inversion))
    pivot = inversion.trajectory[0]
    assert (near[-1] - pivot).square().mean() < (far[-1] - pivot).square().mean()


@pytest.mark.slow
def test_bfloat16_keeps_float32_states():
    pipe = strong_text(make_pipeline()).to(torch.bfloat16)
    inversion = invert(pipe, new_image(), PROMPT, num_inference_steps=2)
    assert inversion.trajectory.dtype == torch.bfloat16
    assert inversion.null_states.dtype == torch.float32
    assert {weight.dtype for weight in pipe.vae.parameters()} == {torch.bfloat16}
    _, texts = descend(pipe, inversion)
    assert torch.equal(texts[:, 0], inversion.null_states.bfloat16())


@pytest.mark.slow
def test_inference_mode_around_it_does_not_matter(pipe, found):
    with torch.inference_mode():
        inversion = invert(pipe, new_image(), PROMPT, num_inference_steps=4)
    assert torch.equal(inversion.null_states, found.null_states)


# -- nothing is left behind -----------------------------------------------------------------------


def state_of(pipe):
    hooks = [len(module._forward_pre_hooks) for module in pipe.unet.modules()]
    flags = [weight.requires_grad for weight in pipe.unet.parameters()]
    weights = [weight.sum() for weight in pipe.unet.parameters()]
    grads = [weight.grad for weight in pipe.unet.parameters()]
    return id(pipe.scheduler), pipe.config["scheduler"], hooks, flags, weights, grads


@pytest.mark.parametrize("failing_call", tiered([None, 1, 2, 3, 6], quick=2))
@pytest.mark.slow
def test_inverting_restores_the_pipeline(failing_call):
    pipe = make_pipeline(scheduler=EulerDiscreteScheduler(steps_offset=1))
    next(pipe.unet.parameters()).requires_grad_(False)
    before, calls = state_of(pipe), []

    class BoomError(RuntimeError):
        pass

    def count(*_):
        calls.append(None)
        if len(calls) == failing_call:
            raise BoomError

    # conv_in sees every pass, those within the optimisation too: 1 up, 3 a step down
    hook = pipe.unet.conv_in.register_forward_hook(count)
    options = {"num_inference_steps": 2, "inner_steps": 1, "refinements": 0}
    if failing_call is None:
        invert(pipe, new_image(), PROMPT, **options)
        assert len(calls) == 2 * (1 + 2 + 2)
    else:
        with pytest.raises(BoomError):
            invert(pipe, new_image(), PROMPT, **options)
    hook.remove()
    assert state_of(pipe) == before


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True])
def test_replay_restores_the_pipeline(pipe, found, fails):
    before = state_of(pipe)
    if fails:
        with pytest.raises(ZeroDivisionError), found.replay(pipe):
            assert isinstance(pipe.scheduler, DDIMScheduler)
            1 / 0  # noqa: B018
    else:
        descend(pipe, found)
    assert state_of(pipe) == before


# -- images -------------------------------------------------------------------------------------


def test_psnr():
    black, grey = Image.new("RGB", (4, 4)), Image.new("L", (4, 4), 51)
    assert psnr(black, black) == math.inf
    assert psnr(black, grey) == pytest.approx(20 * math.log10(5))
    with pytest.raises(ValueError, match=r"\(4, 4\) and \(4, 5\)"):
        psnr(black, Image.new("RGB", (4, 5)))


# -- errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"image": "cat.png"}, FileNotFoundError, "cat.png"),
        ({"image": 3}, TypeError, "int.*PIL"),
        ({"image": Image.new("RGB", (0, 4))}, ValueError, r"\(0, 4\) pixels"),
        ({"prompt": "  "}, ValueError, "is empty"),
        ({"num_inference_steps": 0}, ValueError, "num_inference_steps=0.*1"),
        ({"num_inference_steps": 1001}, ValueError, "num_inference_steps=1001.*1"),
        ({"guidance_scale": math.nan}, ValueError, "guidance_scale=nan"),
        ({"guidance_scale": math.inf, "null_text": False}, ValueError, "guidance_scale=inf"),
        ({"guidance_scale": 1.0}, ValueError, "guidance_scale=1.0.*null_text=False"),
        ({"inner_steps": 0}, ValueError, "inner_steps=0.*1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(pipe, changes, error, message):
    with refused_unrun(pipe, message, error):
        invert(pipe, **{"image": new_image(), "prompt": PROMPT, **changes})


def test_other_pipelines_are_refused():
    pipe = make_pipeline(StableDiffusionImg2ImgPipeline)
    with pytest.raises(TypeError, match="found a StableDiffusionImg2ImgPipeline"):
        invert(pipe, new_image(), PROMPT)


@pytest.mark.slow
def test_a_schedule_that_cannot_be_inverted_is_told(pipe):
    blind = DDIMScheduler(
        clip_sample=False,
        steps_offset=1,
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )
    mine = make_pipeline(scheduler=blind)
    with pytest.raises(RuntimeError, match="finite.*step 1.*timestep 999"):
        invert(mine, new_image(), PROMPT, num_inference_steps=2)


@pytest.mark.slow
def test_a_replay_that_does_not_fit_is_refused(pipe, found):
    other = make_pipeline(unet=make_unet(cross_attention_dim=32), max_length=20)
    with pytest.raises(ValueError, match=r"states are \[77, 32\] .* text states \[20, 32\]"):
        descend(other, found)
    with pytest.raises(ValueError, match=r"states are \[77, 32\] .* text states \[77, 64\]"):
        descend(make_sdxl_pipeline(), found)
    with pytest.raises(RuntimeError, match="4 steps.*call 1.*3 steps"):
        descend(pipe, found, num_inference_steps=3)
    with pytest.raises(ValueError, match="guidance_scale=1.0.*unconditional"):
        descend(pipe, found, guidance_scale=1.0)
    with pytest.raises(RuntimeError, match="4 steps.*call 5"), found.replay(pipe):
        for _ in range(2):
            pipe(PROMPT, output_type="latent", **found.options())
    with pytest.raises(RuntimeError, match="never called"), found.replay(pipe):
        pass
