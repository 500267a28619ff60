"""Pipelines whose loop has more than one kind of call, or whose guidance only their call knows."""

import pytest
import torch
from diffusers import LTXConditionPipeline, StableDiffusionPanoramaPipeline
from helpers.from_video_rows import with_condition
from helpers.further_rows import FURTHER, diffedit, small
from helpers.rows import Way, new_images
from helpers.video_rows import ltx

import sdattn
from sdattn import AttentionStore, CaptureError

ROWS = {row.name: row for row in FURTHER}


@pytest.mark.parametrize("guided", [True, False])
@pytest.mark.slow
def test_the_degraded_pass_of_self_attention_guidance_is_of_no_prompt(guided):
    row, way = ROWS["SAG"], Way(guided=guided)
    pipe = row.make()
    with sdattn.capture(pipe) as both:
        row.run(pipe, way)
    with sdattn.capture(pipe) as once:
        row.run(pipe, way, sag_scale=0.0)
    assert (len(both.timesteps), both.skipped) == (2, 2)
    assert (len(once.timesteps), once.skipped) == (2, 0)
    # the first step begins alike, and the second pass of it must leave no trace
    with sdattn.capture(pipe, steps=[0]) as first, sdattn.capture(pipe, steps=[0]) as again:
        row.run(pipe, way)
    for name, maps in first.maps.items():
        torch.testing.assert_close(again.maps[name], maps, atol=0, rtol=0)
    # a run of a single step follows another one
    for _ in range(2):
        with sdattn.capture(pipe) as single:
            row.run(pipe, way, num_inference_steps=1)
        assert (len(single.timesteps), single.skipped) == (1, 1)


@pytest.mark.parametrize("method", ["generate_mask", "invert"])
def test_the_other_methods_of_diffedit_are_refused(method):
    pipe = diffedit()
    image = new_images(Way(), 1)
    texts = {"prompt": "a cat"} if method == "invert" else {}
    texts |= {"source_prompt": "a cat", "target_prompt": "a dog"} if not texts else {}
    with pytest.raises(CaptureError, match=rf"No pass of the.*DiffEditPipeline.{method} "):
        with sdattn.capture(pipe):
            getattr(pipe, method)(image=image, num_inference_steps=2, **texts)


def test_windows_of_a_panorama_are_refused_with_the_reason():
    pipe = small(StableDiffusionPanoramaPipeline, image_encoder=None)
    with pytest.raises(ValueError, match="windows of the image"), sdattn.capture(pipe):
        pass
    with pytest.raises(ValueError, match="StableDiffusionPanoramaPipeline"):
        AttentionStore(pipeline=pipe)


def test_a_video_that_continues_given_frames_is_refused():
    pipe, way = ltx(LTXConditionPipeline), Way()
    options = {**with_condition(pipe, way), "num_frames": 17, "frame_index": 8}
    with pytest.raises(ValueError, match="do not form a grid of"), sdattn.capture(pipe):
        pipe(prompt="a red cat", num_inference_steps=2, output_type="latent", **options)
