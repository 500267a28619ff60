"""Inversion on tiny pipelines: against the formulas, and that nothing is left behind."""

import copy
import math

import pytest
import torch
from diffusers import DDIMScheduler, EulerDiscreteScheduler, StableDiffusionImg2ImgPipeline
from PIL import Image
from tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet

import sdattn
from sdattn.inversion.invert import Inversion, invert, psnr

PROMPT = "a red cat"


def picture(size=(128, 128), seed=0):
    """A smooth coloured picture of ``size`` = (width, height)."""
    generator = torch.Generator().manual_seed(seed)
    small = torch.randint(0, 256, (4, 4, 3), generator=generator, dtype=torch.uint8).numpy()
    return Image.fromarray(small).resize(size, Image.Resampling.BICUBIC)


def strong_text(pipe):
    """Make the text count: in a random UNet it hardly does."""
    with torch.no_grad():
        for name, weight in pipe.unet.named_parameters():
            if "attn2.to_v" in name or "attn2.to_out.0.weight" in name:
                weight.mul_(4)
    return pipe


@pytest.fixture(scope="module")
def pipe():
    return strong_text(make_pipeline())


@pytest.fixture(scope="module")
def found(pipe):
    return invert(pipe, picture(), PROMPT, num_inference_steps=4)


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


# -- up: DDIM inversion ---------------------------------------------------------------------------


@torch.no_grad()
def test_plain_inversion_is_the_formula(pipe):
    steps = 5
    inversion = invert(
        pipe, picture(), PROMPT, num_inference_steps=steps, null_text=False, refinements=0
    )
    pixels = pipe.image_processor.preprocess(picture())
    x = pipe.vae.encode(pixels).latent_dist.mean.double() * pipe.vae.config.scaling_factor
    text, _ = pipe.encode_prompt(PROMPT, "cpu", 1, False)
    betas = torch.linspace(1e-4**0.5, 0.02**0.5, 1000, dtype=torch.float64) ** 2
    alphas = (1 - betas).cumprod(0)
    expected, before = [x], torch.tensor(1.0)  # DDIMScheduler's default: alpha is 1 at the picture
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


@pytest.mark.parametrize("spacing", ["leading", "trailing", "linspace"])
@pytest.mark.parametrize("prediction", ["epsilon", "v_prediction"])
def test_refined_inversion_is_undone_by_diffusers_own_steps(prediction, spacing):
    zero_snr = prediction == "v_prediction" and spacing == "trailing"  # alpha is 0 at t = 999
    scheduler = DDIMScheduler(
        beta_schedule="scaled_linear",
        clip_sample=False,
        steps_offset=1,
        prediction_type=prediction,
        timestep_spacing=spacing,
        rescale_betas_zero_snr=zero_snr,
    )
    pipe = make_pipeline(scheduler=scheduler)
    with torch.no_grad():  # a prediction that changes slowly, as a trained one does
        pipe.unet.conv_out.weight.mul_(0.02)
    errors = []
    for refinements in (0, 8):
        inversion = invert(
            pipe,
            picture(),
            PROMPT,
            num_inference_steps=6,
            guidance_scale=1.0,
            null_text=False,
            refinements=refinements,
        )
        down = pipe(PROMPT, output_type="latent", **inversion.options()).images
        errors.append(float((down - inversion.trajectory[0]).abs().max()))
    assert errors[1] < errors[0] / 20


def test_any_scheduler_is_inverted_with_ddim_steps(pipe):
    mine = make_pipeline(scheduler=EulerDiscreteScheduler.from_config(pipe.scheduler.config))
    mine.unet.load_state_dict(pipe.unet.state_dict())
    one, other = (
        invert(p, picture(), PROMPT, num_inference_steps=2, null_text=False) for p in (pipe, mine)
    )
    assert torch.equal(one.trajectory, other.trajectory)


def test_what_the_scheduler_clips_is_inverted_without_clipping(pipe):
    """DDIM's formula has no clipping, which has no inverse."""
    clipping = DDIMScheduler.from_config(pipe.scheduler.config, clip_sample=True)
    clipping.register_to_config(clip_sample_range=1e-3)  # of all that there is
    mine = make_pipeline()
    mine.scheduler = clipping
    mine.unet.load_state_dict(pipe.unet.state_dict())
    one, other = (
        invert(p, picture(), PROMPT, num_inference_steps=2, null_text=False) for p in (pipe, mine)
    )
    assert torch.equal(one.trajectory, other.trajectory)


# -- down: null-text optimisation -----------------------------------------------------------------


def algorithm_1(pipe, inversion, inner_steps, learning_rate):
    """Mokady et al. 2022, algorithm 1, in float64: states, and (tried, their distances) a step."""
    unet = copy.deepcopy(pipe.unet).double().requires_grad_(False)
    text, null = (one.detach().double() for one in pipe.encode_prompt(PROMPT, "cpu", 1, True))
    betas = torch.linspace(1e-4**0.5, 0.02**0.5, 1000, dtype=torch.float64) ** 2
    alphas, n = (1 - betas).cumprod(0), inversion.num_inference_steps
    pivots = inversion.trajectory.double().flip(0)
    x, states, distances = pivots[:1], [], []
    for i in range(n):
        t = 1 + 1000 // n * (n - 1 - i)
        after = alphas[t - 1000 // n] if i < n - 1 else torch.tensor(1.0).double()
        with_text = unet(x, t, text).sample

        def land(state, x=x, t=t, after=after, with_text=with_text):
            eps = unet(x, t, state).sample
            eps = eps + inversion.guidance_scale * (with_text - eps)
            clean = (x - (1 - alphas[t]).sqrt() * eps) / alphas[t].sqrt()
            return after.sqrt() * clean + (1 - after).sqrt() * eps

        state, tried, far = null.clone().requires_grad_(), [], []
        adam = torch.optim.Adam([state], lr=learning_rate * (1 - i / (2 * n)))
        for _ in range(inner_steps + 1):
            loss = (land(state) - pivots[i + 1]).square().mean()
            tried, far = [*tried, state.detach().clone()], [*far, loss.item()]
            adam.zero_grad()
            loss.backward()
            adam.step()
        null = tried[far.index(min(far))]
        x = land(null)
        states.append(null)
        distances.append(far)
    return torch.cat(states), distances


def test_null_text_stays_as_close_to_the_trajectory_as_algorithm_1(pipe, found):
    pivots = found.trajectory.flip(0)[1:]
    with_null, _ = descend(pipe, found)
    plain, _ = descend(pipe, without_null_text(found))
    near = (with_null[1:, 0] - pivots).square().mean((1, 2, 3))
    far = (plain[1:, 0] - pivots).square().mean((1, 2, 3))
    assert (near < far).all()
    assert near[-1] < 0.7 * far[-1]
    _, distances = algorithm_1(pipe, found, inner_steps=10, learning_rate=1e-2)
    assert near.tolist() == pytest.approx([min(one) for one in distances], rel=2e-3)
    assert found.null_states.shape == (4, 77, 32)
    assert found.null_states.dtype == torch.float32


def test_each_step_starts_where_the_last_ended_at_a_lower_rate_and_keeps_its_best(pipe):
    """At a rate so large that Adam goes past the best state of the first step."""
    options = {"inner_steps": 5, "learning_rate": 5e-2}
    inversion = invert(pipe, picture(), PROMPT, num_inference_steps=3, **options)
    states, (first, *_) = algorithm_1(pipe, inversion, **options)
    assert 0 < first.index(min(first)) < 5
    assert min(first) < 0.95 * first[-1]
    # Adam takes a whole step where a gradient is mere rounding: few values here, most in the last.
    apart = (inversion.null_states - states).abs().mean((1, 2))
    assert (apart[:2] < 1e-4).all()


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


def test_the_run_of_the_optimisation_is_the_run_of_the_replay(pipe):
    calls = []

    def see(_unet, args, kwargs):
        calls.append((args[0], kwargs["encoder_hidden_states"]))

    hook = pipe.unet.register_forward_hook(
        lambda unet, args, kwargs, _: see(unet, args, kwargs), with_kwargs=True
    )
    try:
        inversion = invert(pipe, picture(), PROMPT, num_inference_steps=2)
        optimised = [call for call in calls if len(call[0]) == 2]
        calls.clear()
        descend(pipe, inversion)
    finally:
        hook.remove()
    assert len(optimised) == len(calls) == 2
    for (latents, text), (again, text_again) in zip(optimised, calls, strict=True):
        assert torch.equal(latents, again)
        assert torch.equal(text, text_again)


def test_sdxl_with_its_extra_conditions():
    pipe = strong_text(make_sdxl_pipeline())
    inversion = invert(pipe, picture((160, 96)), PROMPT, num_inference_steps=3)
    assert inversion.null_states.shape == (3, 77, 64)
    near, _ = descend(pipe, inversion)
    far, _ = descend(pipe, without_null_text(inversion))
    pivot = inversion.trajectory[0]
    assert (near[-1] - pivot).square().mean() < (far[-1] - pivot).square().mean()


def test_a_run_is_captured_and_edited_like_any_other(pipe, found):
    with found.replay(pipe):
        run = sdattn.generate(pipe, [PROMPT, "a dog"], **found.options(2))
    assert [image.size for image in run.images] == [found.image.size] * 2
    assert len(run.store.passes) == found.num_inference_steps
    assert run.heatmaps[1].words == ("a", "dog")


def test_bfloat16_keeps_float32_states():
    pipe = strong_text(make_pipeline()).to(torch.bfloat16)
    inversion = invert(pipe, picture(), PROMPT, num_inference_steps=2)
    assert inversion.trajectory.dtype == torch.bfloat16
    assert inversion.null_states.dtype == torch.float32
    assert {weight.dtype for weight in pipe.vae.parameters()} == {torch.bfloat16}
    _, texts = descend(pipe, inversion)
    assert torch.equal(texts[:, 0], inversion.null_states.bfloat16())


def test_inference_mode_around_it_does_not_matter(pipe, found):
    with torch.inference_mode():
        inversion = invert(pipe, picture(), PROMPT, num_inference_steps=4)
    assert torch.equal(inversion.null_states, found.null_states)


def test_the_demo_model():
    pipe = sdattn.load_pipeline("demo", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    image = sdattn.generate(pipe, "a red circle", num_inference_steps=4).images[0]
    inversion = invert(
        pipe,
        image,
        "a red circle",
        num_inference_steps=4,
        guidance_scale=3.0,
        inner_steps=5,
        learning_rate=5e-2,
    )
    assert psnr(inversion.image, image) == math.inf
    assert inversion.trajectory.isfinite().all()
    near, _ = descend(pipe, inversion, "a red circle")
    far, _ = descend(pipe, without_null_text(inversion), "a red circle")
    pivot = inversion.trajectory[0]
    assert (near[-1] - pivot).square().mean() < (far[-1] - pivot).square().mean()


# -- nothing is left behind -----------------------------------------------------------------------


def state_of(pipe):
    hooks = [len(module._forward_pre_hooks) for module in pipe.unet.modules()]
    flags = [weight.requires_grad for weight in pipe.unet.parameters()]
    weights = [weight.sum() for weight in pipe.unet.parameters()]
    grads = [weight.grad for weight in pipe.unet.parameters()]
    return id(pipe.scheduler), pipe.config["scheduler"], hooks, flags, weights, grads


@pytest.mark.parametrize("failing_call", [None, 1, 2, 3, 6])
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
        invert(pipe, picture(), PROMPT, **options)
        assert len(calls) == 2 * (1 + 2 + 2)
    else:
        with pytest.raises(BoomError):
            invert(pipe, picture(), PROMPT, **options)
    hook.remove()
    assert state_of(pipe) == before


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


# -- pictures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ((128, 128), (128, 128)),
        ((1000, 500), (184, 88)),
        ((30, 90), (72, 224)),
        ((1, 1), (128, 128)),
    ],
)
def test_pictures_keep_their_proportions(pipe, given, made):
    inversion = invert(pipe, picture(given), PROMPT, num_inference_steps=1, null_text=False)
    assert inversion.image.size == made
    assert inversion.noise.shape == (1, 4, made[1] // 8, made[0] // 8)
    latents, _ = descend(pipe, inversion)
    assert latents.shape == (2, 1, 4, made[1] // 8, made[0] // 8)


def test_pictures_are_made_upright_and_rgb(pipe):
    image = picture((64, 128)).convert("RGBA")
    image.getexif()[0x0112] = 6  # to be turned by 90 degrees
    upright = invert(pipe, image, PROMPT, num_inference_steps=1, null_text=False).image
    assert upright.mode == "RGB"
    assert upright.width > upright.height


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
        ({"image": "cat.png"}, TypeError, "image is a str. Pass a PIL image"),
        ({"image": Image.new("RGB", (0, 4))}, ValueError, r"\(0, 4\) pixels"),
        ({"prompt": "  "}, ValueError, "is empty"),
        ({"num_inference_steps": 0}, ValueError, "num_inference_steps=0: pass 1 to 1000"),
        ({"num_inference_steps": 1001}, ValueError, "num_inference_steps=1001: pass 1 to 1000"),
        ({"guidance_scale": math.nan}, ValueError, "guidance_scale=nan"),
        ({"guidance_scale": math.inf, "null_text": False}, ValueError, "guidance_scale=inf"),
        ({"guidance_scale": 1.0}, ValueError, "guidance_scale=1.0: .* or null_text=False"),
        ({"inner_steps": 0}, ValueError, "inner_steps=0: pass at least 1"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(pipe, changes, error, message):
    def never(*_):
        raise AssertionError("the UNet was called")

    hook = pipe.unet.register_forward_pre_hook(never)
    try:
        with pytest.raises(error, match=message):
            invert(pipe, **{"image": picture(), "prompt": PROMPT, **changes})
    finally:
        hook.remove()


def test_other_pipelines_are_refused():
    pipe = make_pipeline(StableDiffusionImg2ImgPipeline)
    with pytest.raises(TypeError, match="found a StableDiffusionImg2ImgPipeline"):
        invert(pipe, picture(), PROMPT)


def test_a_schedule_that_cannot_be_inverted_is_told(pipe):
    blind = DDIMScheduler(
        clip_sample=False,
        steps_offset=1,
        rescale_betas_zero_snr=True,
        timestep_spacing="trailing",
    )
    mine = make_pipeline(scheduler=blind)
    with pytest.raises(RuntimeError, match="stopped being finite in step 1, at timestep 999"):
        invert(mine, picture(), PROMPT, num_inference_steps=2)


def test_a_replay_that_does_not_fit_is_refused(pipe, found):
    other = make_pipeline(unet=make_unet(cross_attention_dim=32), max_length=20)
    with pytest.raises(ValueError, match=r"states are \[77, 32\] .* text states \[20, 32\]"):
        descend(other, found)
    with pytest.raises(ValueError, match=r"states are \[77, 32\] .* text states \[77, 64\]"):
        descend(make_sdxl_pipeline(), found)
    with pytest.raises(RuntimeError, match="has 4 steps, .* call 1 .* in a run of 3 steps"):
        descend(pipe, found, num_inference_steps=3)
    with pytest.raises(ValueError, match="guidance_scale=1.0: this run has no unconditional rows"):
        descend(pipe, found, guidance_scale=1.0)
    with pytest.raises(RuntimeError, match="has 4 steps, and this is call 5"), found.replay(pipe):
        for _ in range(2):
            pipe(PROMPT, output_type="latent", **found.options())
    with pytest.raises(RuntimeError, match="The UNet was never called"), found.replay(pipe):
        pass
