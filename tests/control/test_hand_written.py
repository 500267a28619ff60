"""Registered attention is the formula that editing repositories write by hand.

``helpers.hand_written.FORMS`` has each one's. Over a whole run of sharp weights rounding grows by
orders of magnitude, so formulas are compared layer by layer in float64, each on the same input.
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


def test_the_page_names_each():
    assert [name for name in FORMS if name not in SECTION] == []


@torch.no_grad()
@pytest.mark.parametrize("name", tiered(FORMS, quick=1))
def test_each_layer_is_the_same_in_float64_whatever_its_weights(name):
    """With a softmax that is nearly one-hot, where over a run rounding grows by 1e5 and more."""
    inputs = []
    unet = make_pipe().unet.to(torch.float64)
    for layer, _ in layers(unet):
        layer.to_q.weight.data *= 16

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
