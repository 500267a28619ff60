"""Of further families of images: what may change their attention, and what refuses to."""

import numpy as np
import pytest
import torch
from helpers.joint_rows import auraflow, bria, chroma, ernie, hidream, hunyuan_image, longcat, ovis

import sdattn
from sdattn import AttentionStore, TorchJointProcessor
from sdattn.models.layers import find_layers

SIZE = {"height": 64, "width": 96, "num_inference_steps": 1}
LONGCAT = {"enable_prompt_rewrite": False}
KNOWN = {chroma: {}, bria: {}, longcat: LONGCAT, ovis: {}}
REFUSED = {
    auraflow: "extra tokens",
    hidream: "extra tokens",
    ernie: "TorchJointProcessor computes",
    hunyuan_image: "TorchJointProcessor computes",
}


@pytest.mark.parametrize("make", KNOWN)
def test_an_open_processor_makes_the_same_image(make):
    pipe = make()
    options = {**SIZE, **KNOWN[make], "output_type": "np", "prompt": "a red cat"}
    images = []
    for is_open in (False, True):
        for layer in find_layers(pipe.transformer) if is_open else ():
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
    pipe = make()
    processors = [one.processor for one in pipe.transformer.modules() if hasattr(one, "processor")]
    with pytest.raises(TypeError, match=REFUSED[make]):
        sdattn.knockout(pipe, "a red cat", "cat", **SIZE)
    after = [one.processor for one in pipe.transformer.modules() if hasattr(one, "processor")]
    assert all(one is other for one, other in zip(processors, after, strict=True))
    with pytest.raises(TypeError, match="Asked about another text"):
        sdattn.generate(pipe, "a red cat", ask="dog", **SIZE)
    with pytest.raises(TypeError, match="This needs a .*found a"):
        sdattn.edit.edit(pipe, "a red cat", "a red dog", height=64, width=64)


def test_controllers_know_no_registers():
    with pytest.raises(TypeError, match="extra tokens"):
        AttentionStore(pipeline=auraflow())
