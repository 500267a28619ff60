"""Joint attention observed in a processor that shows what it used, as a controller left it."""

from dataclasses import replace

import pytest
import torch
from helpers.joint_models import MODELS, first_map
from helpers.joint_parity import NAMES, controlled, sharp_inputs, sharp_model, shown, spans_of

from sdattn import TorchJointProcessor, capture
from sdattn.models import register, unregister
from sdattn.models.denoiser import find_denoiser
from sdattn.models.families import registered


@pytest.mark.parametrize("kind", NAMES)
@torch.no_grad()
def test_what_a_controller_edited_is_what_is_shown(kind):
    def without_third(probs, is_cross, _place):
        if is_cross:
            probs[..., 2] = 0

    model, given = controlled(kind, without_third, batch=1)
    used = shown(model)
    before, processors = model(**given).sample, dict(model.attn_processors)
    with capture(model, heads="all", kinds=("joint",)) as store, capture(model) as outer:
        after = model(**given).sample
    assert torch.equal(before, after)
    assert all(model.attn_processors[name] is one for name, one in processors.items())
    image, text = spans_of(kind)
    assert store.maps
    for name, maps in store.maps.items():
        expected = used[name][:, :, image, text]
        assert torch.equal(maps.flatten(-3, -2)[0], expected[0])
        assert not maps[..., 2].any()
        torch.testing.assert_close(outer.maps[name], maps.mean(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("kind", "options"),
    # refined, SD3.5's norms of this test leave the image less than float32 can hold
    [(kind, {"refine": "self"}) for kind in MODELS]
    + [(kind, options) for kind in NAMES for options in ({}, {"space": "output"})],
    ids=str,
)
@torch.no_grad()
def test_without_a_controller_it_shows_what_others_do(kind, options):
    model = sharp_model(kind)
    given = sharp_inputs(kind, model, batch=2)
    with capture(model, **options) as theirs:
        model(**given)
    model.set_attn_processor(TorchJointProcessor())
    with capture(model, **options) as ours:
        model(**given)
    assert ours.maps.keys() == theirs.maps.keys()
    for name, maps in theirs.maps.items():
        torch.testing.assert_close(ours.maps[name], maps, atol=1e-5, rtol=0)


@pytest.mark.parametrize("kind", ["SD3", "SD3.5", "FLUX.1", "FLUX.2"])
@torch.no_grad()
def test_another_text_is_asked_about_without_the_controller(kind):
    """Its columns are not the prompt's, and the controller counts the layers of the model."""
    calls = []
    model, given = controlled(kind, lambda *call: calls.append(call), batch=1)
    other = torch.randn(given["encoder_hidden_states"].shape, generator=torch.manual_seed(3))
    with capture(plain_model := sharp_model(kind), text_states=other) as plain:
        plain_model(**given)
    with capture(model, text_states=other) as store:
        model(**given)
    assert len(calls) == len(find_denoiser(model).layers)
    for name, theirs in plain.maps.items():
        torch.testing.assert_close(store.maps[name], theirs, atol=1e-5, rtol=0)


@torch.no_grad()
def test_an_order_that_is_not_the_familys_is_refused():
    """Without rotary embeddings the processor joins the image first, whatever a family says."""
    model = sharp_model("SD3")
    model.set_attn_processor(TorchJointProcessor())
    [family] = [one for one in registered() if one.name == "Stable Diffusion 3"]
    unregister(family)
    other = replace(family, joined="text first")
    register(other)
    try:
        with pytest.raises(RuntimeError, match="TorchJointProcessor does not join"):
            first_map(model, sharp_inputs("SD3", model))
    finally:
        unregister(other)
        register(family)
