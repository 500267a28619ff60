"""A plain layer's facts are looked at once a pass. What changes in a later pass, or in the middle
of one, is seen all the same; maps are compared with the softmax written out in float64."""

import pytest
import torch
from helpers.capture_runs import oracle, record_inputs
from torch import nn
from torch.nn import functional

from sdattn import CaptureError, capture
from sdattn.look.sources import handed_over, see

TIMES = 900, 700, 500, 100
PASSES = pytest.mark.parametrize("number", [1, 2, 3], ids=["second", "third", "last"])
MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


def call(unet, timestep):
    generator = torch.Generator().manual_seed(timestep)
    sample = torch.randn(2, 4, 16, 24, generator=generator)
    return unet(sample, timestep, torch.randn(2, 77, 32, generator=generator)).sample


def nothing(layer): ...


def masked(layer):
    """By whoever calls the layer."""
    mask = torch.zeros(2, 1, 77).index_fill(2, torch.arange(0, 77, 3), -1e4)
    add = lambda _, args, kwargs: (args, {**kwargs, "attention_mask": mask})  # noqa: E731
    layer.register_forward_pre_hook(add, with_kwargs=True)


def normed(layer):
    layer.norm_q = nn.LayerNorm(layer.inner_dim // layer.heads, elementwise_affine=False)


def of_normed(layer, hidden, text):
    def by_head(states, projection):
        made = states.double() @ projection.weight.double().T
        return made.unflatten(-1, (layer.heads, -1)).transpose(1, 2)

    query = by_head(hidden, layer.to_q)
    query = (query - query.mean(-1, keepdim=True)) / query.var(-1, keepdim=True, correction=0).add(
        1e-5
    ).sqrt()
    scores = query @ by_head(text, layer.to_k).mT / query.shape[-1] ** 0.5
    return scores.softmax(-1)


@pytest.mark.pairs
@PASSES
@pytest.mark.parametrize("change", [nothing, masked, normed])
@torch.no_grad()
def test_what_changes_in_a_later_pass_is_in_the_map(tiny_unet, change, number):
    layer = tiny_unet.get_submodule(MID)
    _, before = record_inputs(tiny_unet)
    with capture(tiny_unet) as store:
        call(tiny_unet, TIMES[0])
        assert layer.processor.see is see  # the first pass knows nothing yet
        for time in TIMES[1:number]:
            call(tiny_unet, time)
        change(layer)
        _, after = record_inputs(tiny_unet)
        for time in TIMES[number:]:
            call(tiny_unet, time)
        assert layer.processor.see is (see if change is normed else handed_over)
    of_layer = of_normed if change is normed else oracle
    right = [oracle(layer, *given) for given in before[MID][:number]]
    for hidden, text, mask in after[MID]:
        assert (mask is not None) == (change is masked)
        right.append(of_layer(layer, hidden, text, *([mask] if change is masked else [])))
    assert len(right) == len(TIMES)
    found = store.maps[MID].flatten(1, 2).double()
    torch.testing.assert_close(found, torch.stack(right).mean((0, 2)), atol=1e-6, rtol=0)
    if change is not nothing:
        unchanged = torch.stack([oracle(layer, *given) for given in before[MID]])
        assert (found - unchanged.mean((0, 2))).abs().max() > 1e-5


@PASSES
@torch.no_grad()
def test_a_kernel_that_is_replaced_in_the_middle_of_a_pass_is_refused(
    tiny_unet, monkeypatch, number
):
    def forgets(query, key, value, attn_mask=None, **_):
        probs = (query @ key.mT * query.shape[-1] ** -0.5).softmax(-1).clone()
        probs[..., 2:4] = 0
        return probs @ value

    def put(*_):
        monkeypatch.setattr(functional, "scaled_dot_product_attention", forgets)

    with pytest.raises(CaptureError, match=r"forgets, whose"), capture(tiny_unet):
        for time in TIMES[:number]:
            call(tiny_unet, time)
        tiny_unet.mid_block.register_forward_pre_hook(put)
        for time in TIMES[number:]:
            call(tiny_unet, time)


@PASSES
@torch.no_grad()
def test_a_projection_that_is_replaced_in_the_middle_of_a_pass_is_refused(tiny_unet, number):
    layer = tiny_unet.get_submodule(MID)
    with pytest.raises(RuntimeError, match="did not call the layer's own to_q and to_k"):
        with capture(tiny_unet):
            for time in TIMES[:number]:
                call(tiny_unet, time)
            tiny_unet.mid_block.register_forward_pre_hook(
                lambda *_: setattr(layer, "to_k", nn.Linear(32, layer.inner_dim))
            )
            for time in TIMES[number:]:
                call(tiny_unet, time)


def test_a_call_with_a_graph_is_computed_at_once(tiny_unet):
    with capture(tiny_unet, steps="last") as store:
        with torch.no_grad():
            call(tiny_unet, 900)
            call(tiny_unet, 500)
        _, record = record_inputs(tiny_unet)
        call(tiny_unet, 100)
    hidden, text, _ = record[MID][0]
    right = oracle(tiny_unet.get_submodule(MID), hidden, text).mean(1).detach()
    found = store.maps[MID].flatten(1, 2).double()
    torch.testing.assert_close(found, right, atol=1e-6, rtol=0)
    assert not found.requires_grad
