"""Sizes that are far from the one that a model was trained at."""

import pytest
from helpers.flow_pipelines import flow_pipeline
from helpers.tiny_pipelines import small_pipeline

import sdattn
from sdattn.models.facts import PipelineFacts, size_doubt

# (height, width) asked of a model whose config says 16 cells of 8 pixels, 128x128, and what is told
SIZES = {
    (128, 128): "",
    (256, 256): "",
    (64, 64): "",
    (64, 256): "",
    (264, 128): "over twice",
    (128, 264): "over twice",
    (1024, 1024): "over twice",
    (56, 128): "under half of",
    (128, 56): "under half of",
    (1024, 32): "over twice",
}


@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_size_far_from_the_models_own_is_told_with_it(size):
    facts = PipelineFacts.of(small_pipeline())
    height, width = size
    told = size_doubt(facts, {"height": height, "width": width})
    assert bool(told) == bool(SIZES[size])
    if told:
        assert SIZES[size] in told and "trained at 128x128 pixels" in told
        assert f"{width}x{height}" in told


def test_nothing_is_told_of_a_size_that_nobody_asked_for_or_that_no_config_has():
    facts = PipelineFacts.of(small_pipeline())
    assert size_doubt(facts, {}) == ""
    facts.pipe.unet.register_to_config(sample_size=(16, 32))  # rows, cols
    assert size_doubt(facts, {"height": 128, "width": 512}) == ""
    assert "trained at 256x128 pixels" in size_doubt(facts, {"height": 512, "width": 512})
    facts.pipe.unet.register_to_config(sample_size=None)
    assert size_doubt(facts, {"height": 1024, "width": 1024}) == ""
    flux, _ = flow_pipeline("FLUX.1")
    assert size_doubt(PipelineFacts.of(flux), {"height": 4096, "width": 4096}) == ""


def test_generate_and_edit_warn_of_it_once():
    pipe = small_pipeline()
    size = {"height": 32, "width": 32, "num_inference_steps": 1}
    for draw in (
        lambda: sdattn.generate(pipe, ["a cat", "a dog"], **size),
        lambda: sdattn.generate(pipe, "a red cat", causal=True, words=["cat"], **size),
        lambda: sdattn.edit_image(pipe, "a red cat", "a red dog", **size),
    ):
        with pytest.warns(sdattn.errors.SdattnWarning, match="128x128") as told:
            draw()
        assert len(told) == 1
