"""Registered attention is the formula that editing repositories write by hand.

``helpers.hand_written.FORMS`` has each one's. Over a whole run of sharp weights rounding grows by
orders of magnitude, so formulas are compared in float64: over a run, and layer by layer, each on
the same input.
"""

import pytest
import torch
from helpers.bridges import SECTION
from helpers.chain_runs import make_pipe
from helpers.hand_written import FORMS, layers
from helpers.tiers import tiered

from sdattn.edit import register_attention_control

EDITED = 3  # the column whose attention is doubled


class Doubling:
    """A controller that edits cross-attention in place, keeps what it left, and returns it."""

    def __init__(self):
        self.shown = []

    def __call__(self, attn, is_cross, place_in_unet):
        if is_cross:
            attn[..., EDITED] *= 2
        self.shown.append((place_in_unet, is_cross, attn.detach().clone()))
        return attn


def pipeline(dtype, sharpness=1):
    pipe = make_pipe()
    for layer, _ in layers(pipe.unet):
        layer.to_q.weight.data *= sharpness
    pipe.unet.to(dtype)
    pipe.text_encoder.to(dtype)
    return pipe


@torch.no_grad()
def drawn(dtype, by_hand=None):
    """Latents of a guided run of two prompts, and what the controller left; by the repository's own
    registration, or by ours."""
    pipe, control = pipeline(dtype), Doubling()
    noise = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    given = {"latents": noise.to(dtype), "num_inference_steps": 3, "guidance_scale": 4.0}
    if by_hand is not None:
        by_hand(pipe.unet, control)
        return pipe(["a cat", "a red dog"], output_type="latent", **given).images, control.shown
    with register_attention_control(pipe, control):
        return pipe(["a cat", "a red dog"], output_type="latent", **given).images, control.shown


def apart(one, other):
    return float((one.double() - other.double()).abs().max())


@pytest.fixture(scope="module")
def registered():
    return {dtype: drawn(dtype) for dtype in (torch.float64, torch.float32)}


def test_the_page_names_each():
    assert [name for name in FORMS if name not in SECTION] == []


@pytest.mark.parametrize("name", tiered(FORMS, quick=0))
def test_a_run_is_the_same_in_float64_and_as_near_to_it_in_float32(name, registered):
    exact, shown = drawn(torch.float64, FORMS[name])
    found, ours = registered[torch.float64]
    assert apart(found, exact) < 1e-12
    assert [one[:2] for one in ours] == [one[:2] for one in shown]
    assert len(shown) == 3 * 32
    assert max(apart(a[2], b[2]) for a, b in zip(ours, shown, strict=True)) < 1e-12
    single, _ = drawn(torch.float32, FORMS[name])
    rounded = registered[torch.float32][0]
    assert apart(single, rounded) < 1e-4
    # what one misses of float64, by rounding, the other may miss too
    assert apart(rounded, exact) < max(2 * apart(single, exact), 1e-4)


@torch.no_grad()
@pytest.mark.parametrize("name", tiered(FORMS, quick=1))
def test_each_layer_is_the_same_in_float64_whatever_its_weights(name):
    """With a softmax that is nearly one-hot, where over a run rounding grows by 1e5 and more."""
    inputs = []
    pipe = pipeline(torch.float64, sharpness=16)
    unet = pipe.unet
    for layer, _ in layers(unet):

        def record(layer, args, kwargs):
            inputs.append((layer, args, kwargs))

        layer.register_forward_pre_hook(record, with_kwargs=True)
    generator = torch.Generator().manual_seed(1)
    latents = torch.randn(2, 4, 16, 16, generator=generator, dtype=torch.float64)
    text = 3 * torch.randn(2, 77, 32, generator=generator, dtype=torch.float64)
    unet(latents, 500, text)
    given, theirs, ours = list(inputs), Doubling(), Doubling()
    before = dict(unet.attn_processors)
    with register_attention_control(unet, ours):
        registered = [layer(*args, **kwargs) for layer, args, kwargs in given]
    assert all(unet.attn_processors[name] is one for name, one in before.items())
    FORMS[name](unet, theirs)
    outputs = [layer(*args, **kwargs) for layer, args, kwargs in given]
    assert len(outputs) == 32
    peaks = [float(probs.max()) for _, is_cross, probs in theirs.shown if not is_cross]
    assert max(peaks) > 0.99
    for one, other in zip(registered, outputs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-12, rtol=1e-12)
    for one, other in zip(ours.shown, theirs.shown, strict=True):
        assert one[:2] == other[:2]
        torch.testing.assert_close(one[2], other[2], atol=1e-12, rtol=1e-12)
