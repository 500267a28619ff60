"""Calls of a denoiser as passes: which are kept, and of which rows."""

import pytest
import torch
from diffusers import (
    HeunDiscreteScheduler,
    LTXConditionPipeline,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionPanoramaPipeline,
)
from helpers.capture_runs import PROMPT, assert_untouched, oracle, record_inputs, run
from helpers.from_video_rows import with_condition
from helpers.further_rows import FURTHER, diffedit, small
from helpers.rows import Way, new_images
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_scheduler, small_pipeline
from helpers.video_rows import ltx

from sdattn import AttentionStore, CaptureError, capture
from sdattn.follow.passes import Pass
from sdattn.keep.keep import Keep
from sdattn.models.denoiser import find_denoiser

MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


def test_another_size_is_not_mixed_in(tiny_unet):
    with pytest.raises(CaptureError, match="now called for 2 image"), capture(tiny_unet):
        for batch in (1, 2):
            tiny_unet(torch.randn(batch, 4, 16, 16), 3 - batch, torch.randn(batch, 77, 32))


def test_a_pipeline_of_unknown_layout_is_named(tiny_pipe):
    class Odd(type(tiny_pipe).__mro__[1]):
        unet = tiny_pipe.unet

    with pytest.raises(ValueError, match="lays out guidance in its batch is not known"):
        with capture(Odd()):
            pass


def test_guidance_that_stops_early():
    pipe = small_pipeline()

    def stop(pipeline, step, _timestep, tensors):
        if step == 0:
            pipeline._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[1]
        return tensors

    _, record = record_inputs(pipe.unet)
    with capture(pipe, steps="all") as store:
        run(pipe, callback_on_step_end=stop, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    assert [one.batch for one in store.passes] == [2, 1]
    layer = pipe.unet.get_submodule(MID)
    for step, (hidden, text, _) in enumerate(record[MID]):
        expected = oracle(layer, hidden, text)[-1:].mean(1)
        found = store.maps[MID][:, step].flatten(1, 2).double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("steps", "passes"),
    [
        ((0.5, 1.0), [3, 4, 5]),
        ((0.0, 0.5), [0, 1, 2]),
        ((0.25, 0.75), [1, 2, 3, 4]),  # a pass stands in the middle of its part: 3/12 is in
        ((0.0, 1.0), [0, 1, 2, 3, 4, 5]),
        ((0.9, 1.0), [5]),
        ("last", [5]),
    ],
)
@pytest.mark.parametrize("heads", tiered(["mean", "all"]))
def test_a_part_of_the_schedule_is_the_mean_of_its_passes(steps, passes, heads):
    pipe = small_pipeline()
    options = {"num_inference_steps": 6, "guidance_scale": 5.0, "num_images_per_prompt": 2}
    with (
        capture(pipe, steps="all", heads=heads, kinds=("cross", "self")) as every,
        capture(pipe, steps=steps, heads=heads, kinds=("cross", "self")) as some,
    ):
        run(pipe, height=64, width=96, **options)
    assert [one.position for one in some.passes] == [(i + 0.5) / 6 for i in range(6)]
    assert list(some.maps) == list(every.maps)
    assert len(some.maps) == 8
    for name, full in every.maps.items():
        torch.testing.assert_close(some.maps[name], full[:, passes].mean(1), atol=1e-6, rtol=1e-5)
    assert (every.maps[MID][:, passes[0]] - every.maps[MID][:, 0]).abs().max() > 1e-5 or 0 in passes


@pytest.mark.parametrize("steps", [(0.5, 1.0), (0.0, 0.5), "last"])
@pytest.mark.parametrize("number", tiered([5, 2, 1]))
def test_a_part_of_the_schedule_holds_no_more_than_the_mean(steps, number):
    pipe = small_pipeline()
    with capture(pipe) as mean, capture(pipe, steps=steps) as some:
        run(pipe, num_inference_steps=number)
    layers = [layer for layer in find_denoiser(pipe.unet).layers if layer.kind == "cross"]
    said = Keep.of(steps=steps).nbytes(layers, (16, 16), 77, passes=number)
    assert some.nbytes == some.expected_nbytes == mean.nbytes == mean.expected_nbytes == said


def test_image_to_image_begins_in_the_middle_of_the_schedule():
    pipe = small_pipeline(StableDiffusionImg2ImgPipeline)
    options = {"image": torch.rand(1, 3, 128, 128), "strength": 0.5, "num_inference_steps": 4}
    with capture(pipe) as mean, capture(pipe, steps=(0.5, 1.0)) as second:
        pipe(PROMPT, output_type="np", **options)
    assert [one.position for one in second.passes] == [5 / 8, 7 / 8]
    for name, maps in mean.maps.items():
        assert torch.equal(maps, second.maps[name])
    with pytest.raises(CaptureError, match=r"none of the 4 watched layers ran in steps \(0.0, 0."):
        with capture(pipe, steps=(0.0, 0.5)):
            pipe(PROMPT, output_type="np", **options)


@pytest.mark.slow
def test_a_second_order_scheduler_has_two_calls_at_a_place_of_the_schedule():
    """Heun looks ahead to the next timestep, which counts as that step's own."""
    pipe = small_pipeline(scheduler=HeunDiscreteScheduler.from_config(make_scheduler().config))
    with (
        capture(pipe, steps="all") as every,
        capture(pipe, steps=(0.0, 0.5)) as first,
        capture(pipe, steps=(0.5, 1.0)) as second,
    ):
        run(pipe, num_inference_steps=4)
    assert len(every.passes) == 7
    assert [one.position for one in second.passes] == [i / 14 for i in (1, 3, 3, 7, 7, 11, 11)]
    assert [i for i in range(7) if first.keeps(i)] == [0, 1, 2, 3, 4]
    times = every.timesteps
    assert times == sorted(times, reverse=True)
    assert (times[1], times[3], times[5]) == (times[2], times[4], times[6])
    kept = [i for i in range(7) if second.keeps(i)]
    assert kept == [3, 4, 5, 6]  # whole pairs
    for name, full in every.maps.items():
        torch.testing.assert_close(second.maps[name], full[:, kept].mean(1), atol=1e-6, rtol=1e-5)


def test_a_bare_model_has_no_schedule_to_take_a_part_of(tiny_unet):
    before = tiny_unet.attn_processors
    with pytest.raises(ValueError, match="not known of a model without its pipeline"):
        with capture(tiny_unet, steps=(0.5, 1.0)):
            pass
    assert_untouched(tiny_unet, before)
    with capture(tiny_unet, steps="last") as store:
        for timestep in (500, 3):
            tiny_unet(torch.randn(1, 4, 16, 16), timestep, torch.randn(1, 77, 32))
    assert [one.position for one in store.passes] == [None, None]


# -- pipelines whose loop has more than one kind of call, or whose guidance only their call knows --


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.slow
def test_the_degraded_pass_of_self_attention_guidance_is_of_no_prompt(guided):
    [row] = [row for row in FURTHER if row.name == "SAG"]
    way = Way(guided=guided)
    pipe = row.make()
    with capture(pipe) as both:
        row.run(pipe, way)
    with capture(pipe) as once:
        row.run(pipe, way, sag_scale=0.0)
    assert (len(both.timesteps), both.skipped) == (2, 2)
    assert (len(once.timesteps), once.skipped) == (2, 0)
    # a run of a single step follows another one
    for _ in range(2):
        with capture(pipe) as single:
            row.run(pipe, way, num_inference_steps=1)
        assert (len(single.timesteps), single.skipped) == (1, 1)


@pytest.mark.parametrize("method", ["generate_mask", "invert"])
def test_the_other_methods_of_diffedit_are_refused(method):
    pipe = diffedit()
    image = new_images(Way(), 1)
    texts = {"prompt": "a cat"} if method == "invert" else {}
    texts |= {"source_prompt": "a cat", "target_prompt": "a dog"} if not texts else {}
    with pytest.raises(CaptureError, match=rf"No pass of the.*DiffEditPipeline.{method} "):
        with capture(pipe):
            getattr(pipe, method)(image=image, num_inference_steps=2, **texts)


def test_windows_of_a_panorama_are_refused_with_the_reason():
    pipe = small(StableDiffusionPanoramaPipeline, image_encoder=None)
    with pytest.raises(ValueError, match="windows of the image"), capture(pipe):
        pass
    with pytest.raises(ValueError, match="StableDiffusionPanoramaPipeline"):
        AttentionStore(pipeline=pipe)


def test_a_video_that_continues_given_frames_is_refused():
    pipe, way = ltx(LTXConditionPipeline), Way()
    options = {**with_condition(pipe, way), "num_frames": 17, "frame_index": 8}
    with pytest.raises(ValueError, match="do not form a grid of"), capture(pipe):
        pipe(prompt="a red cat", num_inference_steps=2, output_type="latent", **options)


@pytest.mark.parametrize(
    ("rows", "alone", "expected"),
    [
        ((2, 3), True, slice(0, 2)),
        ((3,), True, slice(1, 2)),
        ((0, 1), True, ()),  # the negative prompt's, which did not run
        ((0, 1, 2, 3), True, ()),
        ((2, 3), False, None),  # nothing says whose the rows are
    ],
)
def test_rows_of_a_layer_that_ran_on_half_of_the_batch(rows, alone, expected):
    order = ("unconditional", "conditional")
    begun = Pass(1.0, (2, 2), 4, order, rows=rows, prompts_alone=alone)
    assert begun.kept_of(2) == expected
    assert begun.kept_of(3) is None
    whole = slice(None) if len(rows) == 4 else slice(rows[0], rows[-1] + 1)
    assert begun.kept_of(4) == whole
