"""One table for the three followers of a run: a capture, an attached store, a registered one.

Each scenario is compared with the plain run under the same follower: what the follower kept is the
same, with a warning or without, or it is refused. helpers/followers.py checks in each case that
nothing is left behind.
"""

import functools
import warnings
from contextlib import contextmanager, nullcontext

import pytest
import torch
from diffusers import (
    EulerDiscreteScheduler,
    HeunDiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
)
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from helpers.followers import (
    FOLLOWERS,
    attached,
    called_by_hand,
    captured,
    draw,
    followed,
    registered,
    seeded,
    small_pipe,
)
from helpers.transformer_rows import sd3

import sdattn
from sdattn import CaptureWarning
from sdattn.edit import register_attention_control

MID = "mid_block.attentions.0.transformer_blocks.0.attn2"

# -- calls beside the run --------------------------------------------------------------------------


def calls(pipe, _step, _t, tensors):
    called_by_hand(pipe)
    return tensors


def of_a_callback(pipe):
    return lambda: draw(pipe, callback_on_step_end=calls)


def of_another_batch(pipe):
    def callback(pipe, _step, t, tensors):
        called_by_hand(pipe, 3, t)
        return tensors

    return lambda: draw(pipe, callback_on_step_end=callback)


def of_a_guidance_function(pipe):
    """The scheduler's step is wrapped, as classifiers that guide do it."""
    step = pipe.scheduler.step

    def guided(noise, t, latents, **options):
        made = step(noise, t, latents, **options)
        called_by_hand(pipe, 2, t)
        return made

    pipe.scheduler.step = guided
    return lambda: draw(pipe)


def sharing(pipe, own_scheduler=True):
    """Another pipeline with the same models, and its run."""
    other = StableDiffusionImg2ImgPipeline(**pipe.components, requires_safety_checker=False)
    if own_scheduler:
        other.scheduler = EulerDiscreteScheduler.from_config(pipe.scheduler.config)
    image = torch.rand(1, 3, 64, 64, generator=seeded(3))
    return other, lambda: other(
        "a dog", image=image, strength=0.7, num_inference_steps=4, output_type="latent",
        generator=seeded(4),
    )  # fmt: skip


def before_a_hires_fix(pipe, own_scheduler=True):
    _, again = sharing(pipe, own_scheduler)
    return lambda: (draw(pipe), again())[0]


def before_one_that_shares_the_scheduler(pipe):
    return before_a_hires_fix(pipe, own_scheduler=False)


def around_another_pipeline(pipe):
    """ADetailer and the like, called from a callback."""
    _, again = sharing(pipe)

    def callback(_pipe, step, _t, tensors):
        if step == 1:
            again()
        return tensors

    return lambda: draw(pipe, callback_on_step_end=callback)


def after_a_warm_up(pipe):
    return lambda: (called_by_hand(pipe), draw(pipe))[1]


# -- processors that are replaced, runs that are not one, and none at all --------------------------


def with_processors_set_before(pipe):
    def run():
        pipe.unet.set_attn_processor(AttnProcessor2_0())
        return draw(pipe)

    return run


def with_a_processor_set_inside(pipe):
    def callback(_pipe, _step, _t, tensors):
        pipe.unet.get_submodule(MID).set_processor(AttnProcessor())
        return tensors

    return lambda: draw(pipe, callback_on_step_end=callback)


def with_a_layer_that_comes_late(pipe):
    """Its processor is taken out for the first step, and put back."""
    layer = pipe.unet.get_submodule(MID)

    def run():
        ours = layer.processor
        layer.set_processor(AttnProcessor())
        return draw(pipe, callback_on_step_end=lambda *given: (layer.set_processor(ours), {})[1])

    return run


def after_a_run_that_broke_off(pipe):
    def run():
        hook = pipe.unet.up_blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            draw(pipe)
        hook.remove()
        return draw(pipe)

    return run


def after_another_run(pipe):
    return lambda: (draw(pipe, "a dog"), draw(pipe))[1]


def of_another_pipeline(pipe):
    return sharing(pipe)[1]


def of_nothing(pipe):
    return lambda: None


TOLD = r"call\(s\) of the UNet2DConditionModel were not part of this run: from .*"


def warns(said):
    return functools.partial(pytest.warns, CaptureWarning, match=said)


def refuses(said):
    return functools.partial(pytest.raises, RuntimeError, match=said)


def beside(caller):
    return {follower: warns(TOLD + caller) for follower in FOLLOWERS}


@contextmanager
def warns_and_refuses(said):
    with pytest.warns(CaptureWarning, match=said), pytest.raises(RuntimeError, match=said):
        yield


TWICE = "called its .* 2 times in a step, for the same branch"
OR_GRID = f"{TWICE}|the latent was .* at first and"  # a store begins anew with another grid
# A callback's call of the model is a second one of its step.
SECOND_CALL = {
    captured: functools.partial(warns_and_refuses, TWICE),
    attached: refuses(OR_GRID),
    registered: functools.partial(warns_and_refuses, OR_GRID),
}
IMG2IMG = "StableDiffusionImg2ImgPipeline.__call__"
SECOND = "A second run of the pipeline began"
# What each follower says; whoever says nothing keeps the maps of the run without a word.
TABLE = {
    of_a_callback: SECOND_CALL,
    before_a_hires_fix: beside(IMG2IMG),
    around_another_pipeline: beside(IMG2IMG),
    with_processors_set_before: {
        captured: warns("4 attention processors were replaced"),
        attached: refuses("none of the 8 layers.*They hold 8 x AttnProcessor2_0"),
        registered: refuses("was replaced by a AttnProcessor2_0"),
    },
    of_another_batch: {
        **SECOND_CALL,
        registered: functools.partial(pytest.raises, ValueError, match="a batch of 3"),
    },
    of_a_guidance_function: SECOND_CALL,
    before_one_that_shares_the_scheduler: beside(IMG2IMG),
    after_a_warm_up: {
        captured: warns(TOLD + "called_by_hand"),
        registered: refuses("the latent was .16, 16. at first"),  # it sees loops of users' own
    },
    with_a_processor_set_inside: {
        captured: warns("1 attention processors were replaced"),
        attached: refuses("8 calls came in the first pass and 7 in a later one"),
        registered: refuses("was replaced by a AttnProcessor"),
    },
    with_a_layer_that_comes_late: {
        captured: warns("1 attention processors were replaced"),
        attached: refuses("7 calls came in the first pass and 8 in a later one"),
        registered: refuses("was replaced by a AttnProcessor"),
    },
    after_a_run_that_broke_off: {
        captured: refuses(SECOND),
        registered: refuses("is in the middle of a step: 4 layers"),
    },
    after_another_run: {captured: refuses(SECOND), registered: warns("holds several runs")},
    of_another_pipeline: {
        captured: refuses(f"No pass of the .*{IMG2IMG}"),
        attached: refuses(TOLD + IMG2IMG),
        registered: warns(f"AttentionStore saw nothing.*{IMG2IMG}"),
    },
    of_nothing: {
        captured: refuses("never called inside"),
        attached: refuses("No step has finished"),
        registered: warns("AttentionStore saw nothing"),
    },
}
SUMMED = (after_another_run, registered)  # maps of two runs are their mean, as is said


@functools.cache
def plain(follower):
    pipe = small_pipe()
    return followed(follower, pipe, lambda: draw(pipe))


@pytest.mark.parametrize("follower", FOLLOWERS)
@pytest.mark.parametrize("scenario", TABLE)
def test_what_a_follower_keeps_and_says(scenario, follower):
    pipe = small_pipe()
    says = TABLE[scenario].get(follower)
    kept = []
    with says() if says else nullcontext(), warnings.catch_warnings():
        if says is None:
            warnings.simplefilter("error", CaptureWarning)
        kept = followed(follower, pipe, scenario(pipe))
    if len(kept) > 1 and (scenario, follower) != SUMMED:
        torch.testing.assert_close(kept, plain(follower), atol=5e-5, rtol=0)


# -- the same for other models, schedulers and calls -----------------------------------------------


@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_second_order_scheduler_has_all_its_passes(follower):
    pipe = small_pipe()
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        assert followed(follower, pipe, lambda: draw(pipe))[-1] == 5


@torch.no_grad()
@pytest.mark.parametrize("follower", FOLLOWERS)
def test_a_direct_call_of_forward_is_seen(follower):
    unet, every_row = small_pipe().unet, functools.partial(follower, guidance=None)
    given = torch.randn(1, 4, 8, 8, generator=seeded()), 5, torch.randn(1, 77, 32)
    usual = followed(every_row, unet, lambda: unet(*given))
    direct = followed(every_row, unet, lambda: unet.forward(*given))
    both = followed(every_row, unet, lambda: (unet(*given), unet.forward(*given))[1])
    torch.testing.assert_close(both[1:-1], usual[1:-1], atol=1e-6, rtol=0)
    assert both[-1] == 2
    torch.testing.assert_close(direct[1:], usual[1:], atol=0, rtol=0)


@pytest.mark.parametrize("follower", [registered, captured, attached])
def test_calls_beside_a_run_of_joint_attention(follower):
    pipe, given = sd3(), {}
    options = {"guidance_scale": 4.0, "max_sequence_length": 8}
    note = lambda _model, _args, kwargs: given.update(kwargs)  # noqa: E731
    hook = pipe.transformer.register_forward_pre_hook(note, with_kwargs=True)
    draw(pipe, **options)
    hook.remove()

    def callback(pipe, _step, _t, tensors):
        with torch.no_grad():
            other = torch.randn_like(given["hidden_states"])
            pipe.transformer(**{**given, "hidden_states": other[..., :-2]})  # of another grid
        return tensors

    with SECOND_CALL[follower]():
        options["callback_on_step_end"] = callback
        followed(follower, pipe, lambda: draw(pipe, **options))


def test_an_edit_is_in_the_pipelines_own_passes_whatever_a_callback_calls():
    pipe = small_pipe()
    plain = draw(pipe)
    with register_attention_control(pipe, lambda attn, *_: attn * 0):
        expected = draw(pipe)
    with pytest.warns(CaptureWarning, match=TWICE):
        with register_attention_control(pipe, lambda attn, *_: attn * 0):
            edited = draw(pipe, callback_on_step_end=calls)
    torch.testing.assert_close(edited, expected, atol=1e-5, rtol=0)
    assert not torch.allclose(edited, plain, atol=1e-4)


def test_two_captures_of_two_stages_on_one_model():
    pipe = small_pipe()
    other, again = sharing(pipe)
    alone = followed(captured, pipe, lambda: draw(pipe)), followed(captured, other, again)
    with warnings.catch_warnings():
        warnings.simplefilter("error", CaptureWarning)
        with sdattn.capture(pipe) as first, sdattn.capture(other) as second:
            draw(pipe)
            again()
    for store, (_, *maps, _passes), words in zip(
        (first, second), alone, [("a", "red", "cat"), ("a", "dog")], strict=True
    ):
        torch.testing.assert_close([*store.maps.values()], maps, atol=1e-6, rtol=0)
        assert store.heatmaps()[0].words == words
