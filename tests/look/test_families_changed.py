"""Of further families: what may change their attention, and what refuses to."""

import numpy as np
import pytest
import torch
from helpers.joint_rows import (
    auraflow,
    bria,
    chroma,
    cogview3,
    ernie,
    hidream,
    hunyuan_image,
    longcat,
    ovis,
)
from helpers.joint_video_rows import mochi
from helpers.matrix_oracle import processors
from helpers.padded_rows import cogview4, hunyuan_dit, krea2, lumina2, z_image

import sdattn
from sdattn import AttentionStore, TorchJointProcessor
from sdattn.models.denoiser import find_denoiser

SIZE = {"height": 64, "width": 96, "num_inference_steps": 1}
LONGCAT = {"enable_prompt_rewrite": False}
KNOWN = {chroma: {}, bria: {}, longcat: LONGCAT, ovis: {}}
UNLIKE_ROWS = "text differently in each row"
OTHER_PLACES = "in places that"
UNKNOWN_LAYER = "TorchJointProcessor computes"
REFUSED = {  # knockouts, and stores: but ERNIE's layers may be watched by one
    auraflow: ("extra tokens", "extra tokens"),
    hidream: ("extra tokens", "extra tokens"),
    ernie: (f"{UNKNOWN_LAYER}.*no projections", None),
    hunyuan_image: (f"{UNKNOWN_LAYER}.*rotary", OTHER_PLACES),
    z_image: (UNLIKE_ROWS, OTHER_PLACES),
    lumina2: (UNLIKE_ROWS, OTHER_PLACES),
    cogview3: (f"{UNKNOWN_LAYER}.*two streams", f"{UNKNOWN_LAYER}.*two streams"),
    cogview4: (f"{UNKNOWN_LAYER}.*two streams", f"{UNKNOWN_LAYER}.*two streams"),
    krea2: ("no heads with projections", OTHER_PLACES),
    hunyuan_dit: ("does more than a plain attention", OTHER_PLACES),
    mochi: ("makes videos", "makes videos"),
}


@pytest.mark.parametrize("make", KNOWN)
def test_an_open_processor_makes_the_same_image(make):
    pipe = make()
    options = {**SIZE, **KNOWN[make], "output_type": "np", "prompt": "a red cat"}
    images = []
    for is_open in (False, True):
        for layer in find_denoiser(pipe.transformer).layers if is_open else ():
            layer.module.set_processor(TorchJointProcessor())
        generator = torch.Generator().manual_seed(0)
        images.append(pipe(**options, generator=generator).images)
    assert np.abs(images[0] - images[1]).max() < 1e-4 < images[0].std()


@pytest.mark.parametrize("make", KNOWN)
def test_a_word_can_be_knocked_out(make):
    found = sdattn.knockout(make(), "a red cat", "cat", seed=1, **SIZE, **KNOWN[make])
    assert np.asarray(found.image).shape == (64, 96, 3)
    assert np.any(np.asarray(found.image) != np.asarray(found.without))


@pytest.mark.parametrize("make", REFUSED)
def test_what_would_change_the_attention_is_refused_by_name(make):
    pipe, (knockout, store) = make(), REFUSED[make]
    pipe.transformer.register_forward_pre_hook(lambda *_: ran.append(1))
    ran, before, attributes = [], processors(pipe.transformer), set(vars(pipe.transformer))
    with pytest.raises(TypeError, match=knockout) as refused:
        sdattn.knockout(pipe, "a red cat", "cat", **SIZE)
    assert not ran or UNKNOWN_LAYER in str(refused.value)
    if store is not None:
        with pytest.raises(TypeError, match=store):
            AttentionStore(pipeline=pipe)
    with pytest.raises(TypeError, match="Asked about another text"):
        sdattn.generate(pipe, "a red cat", ask="dog", **SIZE)
    with pytest.raises(TypeError, match="This needs a .*found a"):
        sdattn.edit.edit(pipe, "a red cat", "a red dog", height=64, width=64)
    assert processors(pipe.transformer) == before
    assert set(vars(pipe.transformer)) - attributes <= {"_diffusers_hook"}  # a guider's
