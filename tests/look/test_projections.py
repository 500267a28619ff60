"""The hooks by which projections are seen: made once, always the last, gone in the end."""

import copy
from contextlib import nullcontext

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0, FusedAttnProcessor2_0
from helpers.capture_runs import oracle, record_inputs
from helpers.explicit_processors import Returns
from torch import nn

from sdattn import capture
from sdattn.look.projections import by_name
from sdattn.models.denoiser import find_denoiser

MID = "mid_block.attentions.0.transformer_blocks.0.attn2"
TEXT = torch.linspace(-1, 1, 77 * 32).reshape(1, 77, 32)


@torch.no_grad()
def call(unet, timestep=5):
    return unet(torch.ones(1, 4, 16, 24), timestep, TEXT).sample


def hooks(model):
    """Every hook on a module of the model but itself, by the module's name."""
    found = {
        name: [*part._forward_hooks, *part._forward_pre_hooks]
        for name, part in model.named_modules()
        if name
    }
    return {name: held for name, held in found.items() if held}


class Doubled(nn.Module):
    """A projection in another's place, as LoRA puts one."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


@pytest.mark.parametrize("processor", [AttnProcessor2_0, Returns])
@pytest.mark.parametrize("end", ["return", "raise"])
def test_hooks_are_made_once_and_gone_in_the_end(tiny_unet, processor, end):
    tiny_unet.set_attn_processor(processor())
    try:
        with capture(tiny_unet) as store, capture(tiny_unet, steps="all"):
            call(tiny_unet)
            made = hooks(tiny_unet)
            assert len(made[f"{MID}.to_q"]) == 2  # one of each capture
            call(tiny_unet, 3)
            assert hooks(tiny_unet) == made
            if end == "raise":
                raise ArithmeticError
    except ArithmeticError:
        pass
    assert len(store.passes) == 2
    assert not hooks(tiny_unet)


def swapped(layer):
    layer.to_q = Doubled(layer.to_q)


def hooked(layer):
    """By a user, whose hook changes what the layer gets from its projection."""
    layer.to_q.register_forward_hook(lambda _module, _args, output: 2 * output)


def fused(layer):
    layer.fuse_projections()
    layer.set_processor(FusedAttnProcessor2_0())


@pytest.mark.parametrize(("change", "times"), [(swapped, 2), (hooked, 2), (fused, 1)])
@torch.no_grad()
def test_what_is_done_to_projections_inside_is_seen(tiny_unet, change, times):
    """And what was replaced has no hook of ours any more, though it is called."""
    layer, told = tiny_unet.get_submodule(MID), nullcontext()
    base = layer.to_q
    if change is fused:
        told = pytest.warns(match="were replaced inside")
    with told, capture(tiny_unet, steps="all") as store:
        call(tiny_unet)
        change(layer)
        _, record = record_inputs(tiny_unet)
        call(tiny_unet, 3)
        assert change is not swapped or not base._forward_hooks
    assert all(name.endswith("attn2") for name in hooks(tiny_unet) if name != f"{MID}.to_q")
    assert len(layer.to_q._forward_hooks) == (change is hooked)
    layer.to_q = base
    hidden, text, _ = record[MID][0]
    found = store.maps[MID][:, 1].flatten(1, 2).double()
    expected = oracle(layer, times * hidden, text).mean(1)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=0)
    assert times == 1 or (found - oracle(layer, hidden, text).mean(1)).abs().max() > 1e-5


@torch.no_grad()
def test_a_copy_of_a_watched_model_is_not_watched(tiny_unet):
    with capture(tiny_unet, layers="mid") as store:
        plain = call(tiny_unet)
        before = store.maps[MID].clone()
        other = copy.deepcopy(tiny_unet.get_submodule("mid_block"))
        layer = other.attentions[0].transformer_blocks[0].attn2
        layer(torch.randn(1, 4, layer.to_q.in_features), encoder_hidden_states=TEXT)
        assert torch.equal(store.maps[MID], before)
        assert torch.equal(call(tiny_unet), plain)
    assert not hooks(tiny_unet)


@torch.no_grad()
def test_a_call_that_nobody_keeps_is_not_looked_at(tiny_unet):
    with capture(tiny_unet, steps=[1]) as store:
        call(tiny_unet)
        assert not any("to_q" in name for name in hooks(tiny_unet))
        call(tiny_unet, 3)
        assert len([name for name in hooks(tiny_unet) if name.endswith("attn2.to_q")]) == 16
        layer = tiny_unet.get_submodule(MID)
        layer(torch.randn(1, 1, layer.to_q.in_features), encoder_hidden_states=TEXT)  # by itself
    assert store.kept_passes == 1
    assert store.sums[MID].calls == 1
    assert len(find_denoiser(tiny_unet).layers) == 32


def test_arguments_have_the_names_of_the_processor_or_diffusers():
    def known(self, attn, hidden_states, attention_mask=None, encoder_hidden_states=None): ...

    def strange(self, attn, image, text): ...

    def given(call, *args, **kwargs):
        return by_name(type("Processor", (), {"__call__": call})(), args, kwargs)

    mask_second = {"hidden_states": 1, "attention_mask": 2}
    usual = {"hidden_states": 1, "encoder_hidden_states": 2}
    assert given(known, 1, 2) == mask_second
    assert given(strange, 1, 2) == usual
    assert given(strange, 1, encoder_hidden_states=2) == usual
