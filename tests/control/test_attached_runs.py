"""An attached store sees every pass whole, or says why not when it is read."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from helpers.chain_runs import CROSS, make_pipe, run
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_unet
from helpers.unet_rows import UNETS, ip_adapter_weights

from sdattn import AttentionStore, CaptureError, TorchAttnProcessor
from sdattn.edit import EmptyControl, register_attention_control

MID = "mid_block.attentions.0.transformer_blocks.0"


def attached(pipe, **options):
    store = AttentionStore(pipeline=pipe, **options)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    return store


def with_ip_adapter(pipe):
    weights = [ip_adapter_weights(pipe.unet)]
    pipe.load_ip_adapter(weights, subfolder=[""], weight_name=[""], image_encoder_folder=None)


REPLACING = {
    "slicing": (lambda pipe: pipe.enable_attention_slicing(), "32 x SlicedAttnProcessor"),
    "fused": (lambda pipe: pipe.fuse_qkv_projections(), "32 x FusedAttnProcessor2_0"),
    "image prompts": (
        with_ip_adapter,
        "16 x TorchAttnProcessor with no controller, 16 x IPAdapterAttnProcessor2_0",
    ),
    "by hand": (
        lambda pipe: pipe.unet.set_attn_processor(AttnProcessor2_0()),
        "32 x AttnProcessor2_0",
    ),
    "no controller": (
        lambda pipe: pipe.unet.set_attn_processor(TorchAttnProcessor()),
        "32 x TorchAttnProcessor with no controller",
    ),
    "another store": (
        lambda pipe: pipe.unet.set_attn_processor(
            TorchAttnProcessor(AttentionStore(pipeline=pipe))
        ),
        "32 x TorchAttnProcessor with another AttentionStore",
    ),
}


def told(store, match):
    """The run went on; what the store did not see of it is told by whatever reads it."""
    reads = (lambda: store.last_step, lambda: store.steps, store.get_average_attention)
    for read in (*reads, store.get_average_full_attention, store.heatmaps):
        with pytest.raises(CaptureError, match=match):
            read()


@pytest.mark.parametrize("way", tiered(REPLACING, quick=2))
def test_replaced_processors_are_named_when_the_store_is_read(way):
    pipe, options = make_pipe(), {}
    store = attached(pipe)
    replace, standing = REPLACING[way]
    replace(pipe)
    if way == "image prompts":
        options = {"ip_adapter_image_embeds": [torch.randn(2, 2, 16)]}
    run(pipe, ["a cat"], **options)
    told(store, f"none of the 32 layers called it.*They hold {standing}\\..*set_attn_processor")
    store.detach()
    assert store.last_step == {}


def test_the_first_error_is_the_one_that_is_raised():
    pipe = make_pipe()
    attached(pipe)
    pipe.unet.set_attn_processor(AttnProcessor2_0())
    hook = pipe.unet.mid_block.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(pipe, ["a cat"])
    hook.remove()
    store = attached(pipe)
    pipe.unet.mid_block.register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(pipe, ["a cat"])
    assert store.cur_step == 0


def changing(unet, names, processor, at=0):
    """A callback that sets a processor in some layers behind a step."""

    def callback(_pipe, step, _timestep, tensors):
        if step == at:
            for name in names:
                unet.get_submodule(name).set_processor(processor)
        return tensors

    return callback


@pytest.mark.slow
def test_layers_that_are_lost_during_a_run_are_named():
    pipe = make_pipe()
    store = attached(pipe)
    names = [f"{MID}.attn1", f"{MID}.attn2"]
    run(pipe, ["a cat"], callback_on_step_end=changing(pipe.unet, names, AttnProcessor()))
    told(
        store, r"32 calls came in the first pass and 30 in a later.*hold 30 x .*2 x AttnProcessor\."
    )
    run(pipe, ["a cat"])  # a run without them from its first step on is as it was found
    assert (store.cur_step, store.num_att_layers) == (2, 30)


def test_layers_that_come_during_a_run_are_named():
    pipe = make_pipe()
    store = attached(pipe)
    ours = TorchAttnProcessor(store)
    pipe.unet.mid_block.attentions[0].transformer_blocks[0].attn2.set_processor(AttnProcessor())
    late = changing(pipe.unet, [f"{MID}.attn2"], ours)
    run(pipe, ["a cat"], callback_on_step_end=late)
    told(store, "31 calls came in the first pass and 32 in a later one")


@torch.no_grad()
def test_layers_that_a_pass_skips_or_repeats_are_named():
    """As a cache does that hands on what a block made in the step before."""
    unet = make_unet()
    store = AttentionStore(pipeline=unet)
    unet.set_attn_processor(TorchAttnProcessor(store))
    inputs = torch.randn(1, 4, 16, 12), 500, torch.randn(1, 7, 32)
    block = unet.up_blocks[1].attentions[0]
    forward = block.forward
    block.forward = lambda hidden_states, *_, **__: (hidden_states,)
    unet(*inputs)
    told(store, "should have 32 calls, but 30 came.*cache")
    store.reset()

    def twice(*args, **kwargs):
        forward(*args, **kwargs)
        return forward(*args, **kwargs)

    block.forward = twice
    unet(*inputs)
    told(store, "34 calls came in one pass of 32 layers: some ran twice")
    store.reset()
    block.forward = forward
    unet(*inputs)
    assert [len(store.last_step[key]) for key in CROSS] == [6, 1, 9]
    store.reset()
    others, name = AttnProcessor2_0(), "up_blocks.1.attentions.0.transformer_blocks.0.attn2"
    unet.set_attn_processor(others)
    unet.get_submodule(name).set_processor(TorchAttnProcessor(store))
    block.forward = lambda hidden_states, *_, **__: (hidden_states,)
    unet(*inputs)
    told(store, "none of the 32.*31 x AttnProcessor2_0, 1 x TorchAttnProcessor with this store")


@pytest.mark.slow
def test_a_controller_that_is_registered_takes_nothing_from_a_store_that_has_no_processor():
    pipe = make_pipe()
    AttentionStore(pipeline=pipe)
    store = AttentionStore(pipeline=pipe)
    with register_attention_control(pipe, EmptyControl()):
        run(pipe, ["a cat"])
        told(store, "none of the 32.*32 x TorchAttnProcessor with another EmptyControl")
    with register_attention_control(pipe, store):
        run(pipe, ["a cat"])
    assert store.cur_step == 2


@pytest.mark.parametrize("name", ["ControlNet", "PAG", "LCM"])
def test_pipelines_that_do_more_in_a_step(name):
    [row] = [row for row in UNETS if row.name == name]
    pipe, way = row.make(), Way(prompts=2)
    store = attached(pipe)
    row.run(pipe, way)
    assert (store.cur_step, store.images) == (2, 2)
    assert [len(store.last_step[key]) for key in CROSS] == [1, 1, 2]


def gradients(unet, store):
    """Of a loss on the maps, with respect to the latent and to the text."""
    generator = torch.Generator().manual_seed(0)
    latent = torch.randn(2, 4, 16, 12, generator=generator, requires_grad=True)
    text = torch.randn(2, 7, 32, generator=generator, requires_grad=True)
    for _ in range(2):
        out = unet(latent, 500, text).sample
        maps = [m for key in CROSS for m in store.last_step[key]]
        loss = sum((m[..., 2] ** 2).sum() for m in maps) + out.square().mean()
        found = torch.autograd.grad(loss, [latent, text])
    return found, [m.detach() for m in maps]


@pytest.mark.slow
@pytest.mark.parametrize("registered", [False, True])
def test_layers_that_run_again_for_a_gradient_count_once(registered):
    expected = None
    for checkpointing in (False, True):
        unet = make_unet()
        store = AttentionStore(save_global_store=False)
        if checkpointing:
            unet.enable_gradient_checkpointing()
        if registered:
            with register_attention_control(unet, store):
                found = gradients(unet, store)
        else:
            store.attach(unet)
            unet.set_attn_processor(TorchAttnProcessor(store))
            found = gradients(unet, store)
        assert (store.cur_step, store.cur_att_layer) == (2, 0)
        expected = expected or found
        for ours, theirs in zip(found, expected, strict=True):
            for one, other in zip(ours, theirs, strict=True):
                torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-4)


def test_a_store_that_may_edit_is_refused_where_layers_run_again():
    class Halving(AttentionStore):
        def forward(self, attn, is_cross, place_in_unet):
            return attn * 0.5

    unet = make_unet()
    unet.enable_gradient_checkpointing()
    store = Halving(pipeline=unet, guidance=None)
    unet.set_attn_processor(TorchAttnProcessor(store))
    latent = torch.randn(1, 4, 16, 12, requires_grad=True)
    out = unet(latent, 500, torch.randn(1, 7, 32)).sample
    with pytest.raises(RuntimeError, match="gradient.*disable_grad"):
        out.sum().backward()
