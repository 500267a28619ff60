"""Everything that is put into a model comes out again, in whichever order its users leave."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_small_unet

from sdattn import AttentionStore, CaptureError, CaptureWarning, capture
from sdattn.edit import register_attention_control
from sdattn.follow.installer import Installation, PassHooks
from sdattn.models.denoiser import find_denoiser

INPUTS = torch.ones(1, 4, 16, 16), 5, torch.linspace(-1, 1, 77 * 32).reshape(1, 77, 32)
MID = "mid_block.attentions.0.transformer_blocks.0.attn2"
COMPILED = {
    "torch.compile": lambda unet: torch.compile(unet, backend="aot_eager"),
    "model.compile()": lambda unet: unet.compile(backend="aot_eager"),
    "blocks": lambda unet: unet.mid_block.compile(backend="aot_eager"),
}


def make_unet():
    return make_pipeline().unet


def assert_as_before(unet, before):
    after = unet.attn_processors
    assert all(after[name] is before[name] for name in before)
    assert not unet._forward_pre_hooks and not unet._forward_hooks


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("how", tiered(COMPILED, quick=0))
def test_a_controller_sees_every_step_of_a_compiled_model(how):
    unet = make_small_unet()
    plain, store = AttentionStore(guidance=None), AttentionStore(guidance=None)
    with register_attention_control(unet, plain):
        expected = [unet(*INPUTS).sample for _ in range(3)]
    made = COMPILED[how](unet)
    compiled = unet if made is None else made
    before = compiled(*INPUTS).sample
    torch._dynamo.utils.counters.clear()
    with pytest.warns(CaptureWarning, match="compiled"):
        handle = register_attention_control(compiled, store)
    found = [compiled(*INPUTS).sample for _ in range(3)]
    handle.remove()
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert store.cur_step == 3
    for key, maps in plain.attention_store.items():
        assert len(maps) == len(store.attention_store[key])
        assert all(map(torch.equal, store.attention_store[key], maps))
    assert torch.equal(compiled(*INPUTS).sample, before)
    assert not torch._dynamo.utils.counters["frames"]  # nothing had to be compiled anew


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_model_that_is_compiled_under_a_controller_is_refused():
    unet, store = make_unet(), AttentionStore(guidance=None)
    with register_attention_control(unet, store):
        unet.compile(backend="eager")
        with pytest.raises(CaptureError, match="compiled.*AttentionStore"):
            unet(*INPUTS)
    assert store.cur_att_layer == 0


@pytest.mark.parametrize("part", ["", "conv_in", "mid_block"])
def test_no_hook_is_put_inside_of_what_is_compiled(part):
    """A hook would break the graph; where another part is compiled, both are hooked."""
    unet = make_unet()
    unet.get_submodule(part).compile(backend="eager")
    with Installation() as installed:
        PassHooks(installed, unet, print, print)
        assert unet._forward_hooks
        hooked = [bool(one._forward_pre_hooks or one._forward_hooks) for one in unet.children()]
        assert any(hooked) == (part == "mid_block")
    assert not unet._forward_hooks


@torch.no_grad()
@pytest.mark.parametrize("first", ["controller", "capture"])
def test_a_controller_and_a_capture_may_end_in_either_order(first):
    unet, store = make_unet(), AttentionStore(guidance=None)
    before = unet.attn_processors
    plain = unet(*INPUTS).sample
    handle, watch = register_attention_control(unet, store), capture(unet)
    maps = watch.__enter__()
    unet(*INPUTS)
    if first == "capture":
        watch.__exit__(None, None, None)
        assert unet.attn_processors[f"{MID}.processor"] is not before[f"{MID}.processor"]
        handle.remove()
    else:
        handle.remove()
        assert torch.equal(unet(*INPUTS).sample, plain)
        watch.__exit__(None, None, None)
        assert len(maps.passes) == 2
    assert_as_before(unet, before)
    assert store.cur_step == 1


@torch.no_grad()
@pytest.mark.slow
def test_an_observer_that_a_user_sets_again_counts_once():
    """As pipelines do that change processors for a while and put back what they found."""
    unet = make_unet()
    before = unet.attn_processors
    with capture(unet) as store, capture(unet, steps="all") as each:
        unet(*INPUTS)
        kept = unet.attn_processors
        unet.set_attn_processor(AttnProcessor())
        with pytest.warns(CaptureWarning, match="were replaced inside"):
            unet(*INPUTS)
        unet.set_attn_processor(dict(kept))
        with pytest.warns(CaptureWarning, match="were replaced inside"):
            unet(*INPUTS)
    assert_as_before(unet, before)
    assert each.maps[MID].shape[1] == 3
    torch.testing.assert_close(store.maps[MID], each.maps[MID].mean(1))


def test_an_installation_ends_whatever_went_wrong():
    unet = make_unet()
    layers, before = find_denoiser(unet).layers, unet.attn_processors
    with pytest.raises(RuntimeError, match="boom"), Installation(layers[:3]) as installed:
        layers[0].module.set_processor(AttnProcessor())  # by a user
        installed.put(layers[1], AttnProcessor())
        installed.put(layers[5], AttnProcessor())
        installed.watch(unet, print, print)
        assert installed.replaced() == []
        raise RuntimeError("boom")
    assert_as_before(unet, before)
    installed.remove()
    assert_as_before(unet, before)


def test_a_layer_that_is_left_keeps_what_it_holds():
    unet = make_unet()
    layer, mine = find_denoiser(unet).layers[0], AttnProcessor()
    installed = Installation()
    installed.put(layer, AttnProcessor())
    layer.module.set_processor(mine)
    assert installed.replaced() == [(layer, mine)]
    installed.leave(layer)
    installed.remove()
    assert layer.module.processor is mine
