"""Processors of a user's own in joint attention: what they used is shown, or they are refused."""

import pytest
import torch
from helpers.joint_models import inputs
from helpers.transformer_rows import sd3
from torch.nn.functional import scaled_dot_product_attention

from sdattn import CaptureError, capture


class Joint:
    """SD3's attention as editing code writes it; ``how`` makes the output of q, k and v."""

    def __init__(self, how):
        self.how = how

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, *_, **__):
        def heads(x):
            return x.unflatten(2, (attn.heads, -1)).transpose(1, 2)

        cells, text = hidden_states.shape[1], encoder_hidden_states
        q = torch.cat([heads(attn.to_q(hidden_states)), heads(attn.add_q_proj(text))], 2)
        k = torch.cat([heads(attn.to_k(hidden_states)), heads(attn.add_k_proj(text))], 2)
        v = torch.cat([heads(attn.to_v(hidden_states)), heads(attn.add_v_proj(text))], 2)
        out = self.how(q, k, v).transpose(1, 2).flatten(2)
        words = out[:, cells:]
        words = words if attn.context_pre_only else attn.to_add_out(words)
        return attn.to_out[0](out[:, :cells]), words


def probs_of(q, k):
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)


def by_hand(q, k, v):
    return probs_of(q, k) @ v


def edited(q, k, v):
    probs = probs_of(q, k)
    probs[..., -1] = 0.0  # the last word
    return probs @ v


def folded(q, k, v):
    made = torch.bmm(probs_of(q, k).flatten(0, 1), v.flatten(0, 1))
    return made.unflatten(0, q.shape[:2])


def by_kernel(q, k, v):
    return scaled_dot_product_attention(q, k, v)


def louder(q, k, v):
    return scaled_dot_product_attention(q, k, torch.cat([v[:, :, :-1], 2 * v[:, :, -1:]], 2))


def maps_of(model, given, **options):
    with capture(model, **options) as store:
        output = model(**given).sample
    return output, torch.stack([maps[0] for maps in store.maps.values()])


@pytest.mark.parametrize("options", [{}, {"refine": "self"}, {"space": "output"}], ids=str)
@pytest.mark.parametrize("how", [by_hand, folded, by_kernel])
@torch.no_grad()
def test_what_it_used_is_what_diffusers_own_would(how, options):
    model = sd3().transformer
    given = inputs("SD3", model)
    _, wanted = maps_of(model, given, **options)
    model.set_attn_processor(Joint(how))
    plain = model(**given).sample
    output, found = maps_of(model, given, **options)
    assert torch.equal(output, plain)
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_an_edit_is_shown_as_it_was_used():
    model = sd3().transformer
    given = inputs("SD3", model)
    model.set_attn_processor(Joint(edited))
    _, found = maps_of(model, given)
    assert bool((found[..., -1] == 0).all()) and bool((found[..., 0] > 0).all())


@torch.no_grad()
def test_values_may_be_other_than_the_layers_own():
    model = sd3().transformer
    given = inputs("SD3", model)
    _, wanted = maps_of(model, given, layers=["transformer_blocks.0.attn"])
    model.set_attn_processor(Joint(louder))
    _, found = maps_of(model, given, layers=["transformer_blocks.0.attn"])
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)


def doubled(q, k, v):
    return 2 * scaled_dot_product_attention(q, k, v)


def unseen(q, k, v):
    scores = (q[..., :, None, :] * k[..., None, :, :]).sum(-1) * q.shape[-1] ** -0.5
    return (scores.softmax(-1)[..., None] * v[..., None, :, :]).sum(-2)


@pytest.mark.parametrize("how", [doubled, unseen])
@torch.no_grad()
def test_what_made_no_output_is_refused(how):
    model = sd3().transformer
    model.set_attn_processor(Joint(how))
    with pytest.raises(RuntimeError, match="any attention"):
        maps_of(model, inputs("SD3", model))


@torch.no_grad()
def test_an_output_that_is_changed_later_in_the_run_is_refused_at_its_end():
    model, calls = sd3().transformer, []

    def late(q, k, v):
        calls.append(1)
        made = scaled_dot_product_attention(q, k, v)
        return made.flip(2) if len(calls) > 4 else made

    model.set_attn_processor(Joint(late))
    given = inputs("SD3", model)
    with pytest.raises(CaptureError, match="any attention"), capture(model):
        for time in (0.5, 0.4, 0.3):
            model(**{**given, "timestep": torch.tensor([time])})
