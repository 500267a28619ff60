"""Where spots of an image looked: kept by a run, saved, read back and handed to its page."""

import numpy as np
import pytest
import torch
from helpers.page_data import data_of, maps_of
from helpers.refusals import refused_unrun
from helpers.tiny_pipelines import small_pipeline
from helpers.transformer_rows import sd3

from sdattn import capture, generate, load_run
from sdattn.models.denoiser import find_denoiser
from sdattn.runs.report import report

PROMPT = "a red cat left of a dog"
SIZE = {"height": 64, "width": 128, "num_inference_steps": 2}  # a latent of 8x16


@pytest.mark.parametrize("make", [small_pipeline, sd3])
@pytest.mark.slow
def test_an_even_grid_of_spots_is_kept_and_changes_nothing(make):
    pipe = make()
    plain, run = generate(pipe, PROMPT, **SIZE), generate(pipe, PROMPT, spots=True, **SIZE)
    assert np.array_equal(np.array(plain[0].image), np.array(run[0].image))
    assert torch.equal(plain[0].heatmaps.maps, run[0].heatmaps.maps)
    spots = run[0].details.spots
    rows, cols = spots.shape[:2]
    assert cols == 2 * rows and plain[0].details.spots is None
    # the same, one spot at a time, of all layers of the way up or of joint attention
    up = [
        layer.name
        for layer in find_denoiser(pipe).layers
        if layer.kind == "self" and layer.place == "up"
    ]
    row, col = rows - 2, 3
    cell = (row + 0.5) / rows, (col + 0.5) / cols
    steps = run.store.keep.steps.part
    part = "mean" if steps is None else (steps.first, steps.last)  # a small run keeps each step
    with capture(pipe, queries=[cell], steps=part, layers=up or None) as store:
        generate(pipe, PROMPT, **SIZE)
    [[alone]] = store.spots()
    assert torch.allclose(spots[row, col], alone.values, atol=1e-6)
    whole = 1 if up else 0.9  # the rest goes to the text
    assert whole - 0.9 < float(spots.sum((2, 3)).min()) and float(spots.sum((2, 3)).max()) < 1.001


@pytest.mark.slow
def test_the_page_has_them_last():
    run = generate(small_pipeline(), PROMPT, spots=True, ask="hat", **SIZE)[0]
    data, spots = data_of(report(run)), run.details.spots
    assert data["spots"] == [*spots.shape[:2]]
    held = np.stack(maps_of(data)[-spots[..., 0, 0].numel() :])
    expected = spots.flatten(0, 1).numpy()
    scale = np.ptp(expected, axis=(1, 2)).max()
    assert np.abs(held - expected).max() < scale / 255
    assert data_of(report(generate(small_pipeline(), PROMPT, **SIZE)[0]))["spots"] is None


@pytest.mark.slow
def test_each_text_encoder_is_told_apart(tmp_path):
    run = generate(sd3(), PROMPT, **SIZE)
    heatmaps = run[0].heatmaps
    clip, t5 = heatmaps.encoders.values()
    assert [*heatmaps.encoders] == ["CLIP", "T5"] and clip.words == t5.words == heatmaps.words
    first = run[0].heatmaps.prompt.encoders[0][1]
    assert max(clip["cat"].columns) < first <= min(t5["cat"].columns)
    whole = heatmaps["cat"].values
    assert torch.allclose(clip["cat"].values + t5["cat"].values, whole, atol=1e-6)
    again = load_run(*run.save(tmp_path / "run"))
    assert again.heatmaps.prompt == heatmaps.prompt
    page = report(again).decode()
    assert "Through CLIP" in page and "Through T5" in page and "text encoder</th>" in page
    assert generate(small_pipeline(), PROMPT, **SIZE)[0].heatmaps.encoders == {}


@pytest.mark.parametrize("asked", [{"queries": "text"}, {"queries": [(1, 2)]}, {"keys": "text"}])
def test_a_run_shows_the_prompts_words_and_no_other_queries(asked):
    """Refused before anything is drawn: run.json would call such maps those of words."""
    pipe = sd3()
    with refused_unrun(pipe, "capture_options"):
        generate(pipe, PROMPT, capture_options=asked, **SIZE)
