"""`max_bytes` of a run: the maps of each of its captures, before the first step."""

import pytest
from helpers.small_images import new_image
from helpers.tiny_pipelines import make_pipeline
from helpers.transformer_rows import flux

from sdattn import explain, generate
from sdattn.errors import size_text
from sdattn.maps.capture import MapStore

PROMPT = "a red cat"
QUICK = {"num_inference_steps": 2}
ALL = {
    "capture_options": {"steps": "all", "heads": "all", "branch": "both"},
    "negative_prompt": "a blue dog",
    "ask": "dog",
    "refine": "self",
}


@pytest.fixture
def stores(monkeypatch):
    """The stores that captures fill, in order."""
    found, begin = [], MapStore.__init__
    monkeypatch.setattr(MapStore, "__init__", lambda s, *a: (found.append(s), begin(s, *a))[1])
    return found


def most_held(stores):
    return max(store.nbytes for store in stores)


def steps_of(pipe, monkeypatch):
    found, step = [], type(pipe.scheduler).step
    monkeypatch.setattr(
        type(pipe.scheduler), "step", lambda *a, **k: (found.append(1), step(*a, **k))[1]
    )
    return found


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"refine": "self"}, ALL, {**ALL, "preset": "daam"}])
def test_the_maps_of_each_text_count(options, stores, monkeypatch):
    pipe = make_pipeline()
    half = {"steps": (0.5, 1.0)}  # a small run keeps each step, if there is room
    options = {**options, "capture_options": half}
    if "preset" in options:
        options |= {"refine": None, "capture_options": {**half, "branch": "both"}}
    generate(pipe, PROMPT, **options, **QUICK)
    most = most_held(stores)
    del stores[:]
    generate(pipe, PROMPT, max_bytes=most, **options, **QUICK)
    assert most_held(stores) == most
    steps = steps_of(pipe, monkeypatch)
    with pytest.raises(ValueError, match="max_bytes") as error:
        generate(pipe, PROMPT, max_bytes=most - 1, **options, **QUICK)
    assert f"hold up to {size_text(most)}" in str(error.value)
    assert not steps


def test_each_branch_counts_where_they_run_in_turn(stores, monkeypatch):
    monkeypatch.setattr("sdattn.runs.preparing.SMALL", 0)  # or each step would be kept, if it fits
    pipe = flux()
    options = {"capture_options": {"branch": "both"}, "negative_prompt": "a dog", **QUICK}
    options |= {"true_cfg_scale": 2.0, "height": 128, "width": 128, "max_sequence_length": 16}
    generate(pipe, PROMPT, **options)
    most, steps = most_held(stores), steps_of(pipe, monkeypatch)
    with pytest.raises(ValueError, match="max_bytes") as error:
        generate(pipe, PROMPT, max_bytes=most - 1, **options)
    assert f"hold up to {size_text(most)}" in str(error.value)
    assert not steps
    generate(pipe, PROMPT, max_bytes=most, **options)


@pytest.mark.slow
def test_a_run_that_a_callback_may_stop_counts_its_early_steps(stores):
    pipe = make_pipeline()
    options = {"callback_on_step_end": lambda *a: a[-1], **QUICK}
    generate(pipe, PROMPT, **options)
    with pytest.raises(ValueError, match="max_bytes"):
        generate(pipe, PROMPT, max_bytes=most_held(stores) - 1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("invert", [False, True])
def test_an_image_is_explained_within_it_or_not_at_all(invert, stores, monkeypatch):
    pipe, image = make_pipeline(), new_image((128, 128))
    how = {"invert": True, **QUICK} if invert else {"timesteps": [100, 300]}
    how |= {"refine": "self", "ask": "dog"}
    explain(pipe, image, PROMPT, **how)
    most = most_held(stores[-3:])
    explain(pipe, image, PROMPT, max_bytes=most, **how)
    calls = []
    pipe.unet.conv_in.register_forward_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="max_bytes") as error:
        explain(pipe, image, PROMPT, max_bytes=most - 1, **how)
    assert f"hold up to {size_text(most)}" in str(error.value)
    assert not calls
