"""What a run kept of steps and heads, against the store that it is of."""

import pytest
import torch
from helpers.tiny_pipelines import make_pipeline

from sdattn import capture
from sdattn.maps.details import details_of
from sdattn.maps.from_stores import heatmaps

PROMPT = "a red cat"


@pytest.mark.slow
def test_details_are_of_the_words_in_the_layers_that_see_the_text():
    pipe = make_pipeline()
    with capture(pipe, steps="all", heads="all", kinds=("cross", "self")) as store:
        pipe(PROMPT, num_inference_steps=2, height=64, width=64, output_type="latent")
    (found,) = heatmaps(store, pipe, PROMPT)
    details = details_of(store, 0, found)
    cross = [layer.name for layer in store.layers if layer.kind == "cross"]
    words = [column for word in found.held for column in word.columns]
    for held in (details.steps, details.heads):
        assert [*held.layers] == cross and sorted(held.columns) == sorted(words)
    assert details.calls == (0, 1) and details.head_numbers == "all"
    name = cross[0]
    own = store.maps[name][0].float()  # [steps, heads, rows, cols, tokens]
    columns = list(details.steps.columns)
    torch.testing.assert_close(details.steps.layers[name].maps, own.mean(1)[..., columns])
    second = own[1][..., columns]  # the half of the run that the default preset reads
    torch.testing.assert_close(details.heads.layers[name].maps[0], second)
