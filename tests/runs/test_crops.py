"""Inpainting "only masked" (padding_mask_crop) draws a crop, whose maps are not of the image: it is
refused before the first step, and by an attached store when it is read."""

import numpy as np
import pytest
from diffusers import StableDiffusionInpaintPipeline
from helpers.capture_runs import assert_untouched
from helpers.tiny_pipelines import make_pipeline, make_small_unet
from PIL import Image

from sdattn import AttentionStore, CaptureError, TorchAttnProcessor, capture, generate

PROMPT, SIZE = "a red cat", (320, 256)


@pytest.fixture(scope="module")
def pipe():
    return make_pipeline(StableDiffusionInpaintPipeline, unet=make_small_unet())


MASK = Image.new("L", SIZE)
MASK.paste(255, (200, 150, 240, 190))
CROPPED = {"image": Image.new("RGB", SIZE), "mask_image": MASK, "num_inference_steps": 2}
CROPPED |= {"height": 64, "width": 96, "padding_mask_crop": 8, "strength": 1.0}


@pytest.fixture
def calls(pipe):
    found = []
    hook = pipe.unet.conv_in.register_forward_hook(lambda *_: found.append(1))
    yield found
    hook.remove()


def test_a_run_and_a_capture_are_refused_before_the_first_step(pipe, calls):
    before = pipe.unet.attn_processors
    with pytest.raises(ValueError, match="`padding_mask_crop=8`: only a crop of the image"):
        generate(pipe, PROMPT, **CROPPED)
    with pytest.raises(ValueError, match="`padding_mask_crop=8`"), capture(pipe):
        pipe(PROMPT, **CROPPED)
    assert not calls
    assert_untouched(pipe.unet, before)


def test_an_attached_store_says_so_when_it_is_read(pipe, calls):
    plain = np.asarray(pipe(PROMPT, **CROPPED).images[0])
    assert plain.shape[:2] == SIZE[::-1]
    before = pipe.unet.attn_processors
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    try:
        pipe(PROMPT, **CROPPED)
        assert len(calls) == 4
        with pytest.raises(CaptureError, match="`padding_mask_crop=8`"):
            store.heatmaps()
        pipe(PROMPT, **{**CROPPED, "padding_mask_crop": None})
        assert store.heatmaps()[0]["cat"].map.shape == (8, 12)
    finally:
        store.detach()
        pipe.unet.set_attn_processor(before)
