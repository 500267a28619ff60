"""What users get of `capture()`: a store that makes heatmaps itself."""

import pytest
import torch
from helpers.tiny_pipelines import make_pipeline

import sdattn
from sdattn.keep.map_store import CapturedMaps

SMALL = {"num_inference_steps": 2, "height": 64, "width": 64}


@pytest.mark.slow
def test_a_store_hands_prompt_and_options_on_to_heatmaps():
    pipe = make_pipeline()
    with sdattn.capture(pipe, heads="all") as store:
        pipe("a red cat", **SMALL)
    assert type(store) is sdattn.MapStore and isinstance(store, CapturedMaps)
    assert store.heatmaps()[0].words == ("a", "red", "cat")
    (named,) = store.heatmaps(pipe, {"dog": [2]}, preset="daam")
    (expected,) = sdattn.heatmaps(store, pipe, {"dog": [2]}, preset="daam")
    assert named.words == ("dog",)
    assert torch.equal(named["dog"].map, expected["dog"].map)
    with pytest.raises(ValueError, match="a blue dog"):  # another prompt than was drawn
        store.heatmaps(pipe, "a blue dog")
