"""register_attention_control: any controller of the contract, and nothing left behind."""

import gc
import warnings
import weakref
from contextlib import nullcontext

import pytest
import torch
from helpers.tiny_pipelines import make_pipeline, make_unet

import sdattn
from sdattn import (
    AttentionStore,
    CaptureError,
    CaptureWarning,
    TorchAttnProcessor,
    capture,
    read_prompts,
)
from sdattn.edit import AttentionReplace, EmptyControl, LocalBlend, register_attention_control

NOISE = torch.Generator().manual_seed(5)
INPUTS = (
    torch.randn(2, 4, 16, 12, generator=NOISE),
    500,
    3 * torch.randn(2, 7, 32, generator=NOISE),
)


@pytest.mark.slow
def test_everything_is_put_back_even_when_the_run_fails():
    unet = make_unet()
    before = dict(unet.attn_processors)
    handle = register_attention_control(unet, None)
    assert all(isinstance(one, TorchAttnProcessor) for one in unet.attn_processors.values())
    unet(*INPUTS)
    handle.remove()
    with pytest.raises(RuntimeError, match="boom"):
        with register_attention_control(unet, None):
            raise RuntimeError("boom")
    assert all(unet.attn_processors[name] is before[name] for name in before)
    assert not unet._forward_pre_hooks
    gone = weakref.ref(handle)
    del handle
    gc.collect()
    assert gone() is None


@torch.no_grad()
def test_registering_before_every_run_as_the_notebooks_do():
    unet = make_unet()
    before = dict(unet.attn_processors)
    stores = [AttentionStore(), AttentionStore()]
    handles = []
    for store in stores:
        handles.append(register_attention_control(unet, store))
        unet(*INPUTS)
    assert [store.cur_step for store in stores] == [1, 1]
    assert len(unet._forward_pre_hooks) == 1
    handles[0].remove()  # superseded: of no effect
    assert unet.mid_block.attentions[0].transformer_blocks[0].attn2.processor is not None
    handles[1].remove()
    handles[1].remove()
    assert all(unet.attn_processors[name] is before[name] for name in before)
    assert not unet._forward_pre_hooks


def test_a_with_block_is_not_superseded():
    unet = make_unet()
    before = dict(unet.attn_processors)
    with register_attention_control(unet, None):
        unet(*INPUTS)
        with pytest.raises(RuntimeError, match="block"):
            register_attention_control(unet, AttentionStore())
    assert all(unet.attn_processors[name] is before[name] for name in before)


@torch.no_grad()
def test_processors_set_meanwhile_are_noticed():
    unet = make_unet()
    layer = unet.mid_block.attentions[0].transformer_blocks[0].attn2
    handle = register_attention_control(unet, AttentionStore())
    unet(*INPUTS)
    mine = TorchAttnProcessor()
    layer.set_processor(mine)
    with pytest.raises(CaptureError, match="was replaced by a TorchAttnProcessor"):
        unet(*INPUTS)  # the controller would lose count
    with pytest.raises(RuntimeError, match="1 processors were set since"):
        handle.remove()
    assert layer.processor is mine
    assert not unet._forward_pre_hooks
    others = [one for one in unet.attn_processors.values() if one is not mine]
    assert not any(isinstance(one, TorchAttnProcessor) for one in others)


def test_a_run_that_was_broken_off_is_not_joined_to_the_next():
    unet, store = make_unet(), AttentionStore()
    block = unet.up_blocks[1]
    with register_attention_control(unet, store):

        def stop(*_):
            raise KeyboardInterrupt

        hook = block.register_forward_pre_hook(stop)
        with pytest.raises(KeyboardInterrupt):
            unet(*INPUTS)
        hook.remove()
        with pytest.raises(RuntimeError, match="14.*layers"):
            unet(*INPUTS)
        store.reset()
        unet(*INPUTS)
    assert store.cur_step == 1


def test_a_controllers_dtype_is_brought_back():
    unet = make_unet().to(torch.bfloat16)
    inputs = INPUTS[0].bfloat16(), INPUTS[1], INPUTS[2].bfloat16()
    with register_attention_control(unet, lambda attn, *_: attn.float()):
        assert unet(*inputs).sample.dtype == torch.bfloat16


def test_gradients_flow_from_a_foreign_store_to_the_latents():
    """Attend-and-Excite's loop: a live graph, from what is stored back to the latents."""
    unet = make_unet()
    store = AttentionStore(save_global_store=False)
    latents = INPUTS[0].clone().requires_grad_()
    with register_attention_control(unet, store), torch.enable_grad():
        unet(latents, *INPUTS[1:])
        loss = sum(m[..., 2].sum() for m in store.get_average_attention()["up_cross"])
    [grad] = torch.autograd.grad(loss, latents)

    def value(x):
        with register_attention_control(unet, again := AttentionStore(save_global_store=False)):
            with torch.no_grad():
                unet(x, *INPUTS[1:])
        return sum(m[..., 2].sum(dtype=torch.float64) for m in again.attention_store["up_cross"])

    step = 1e-1 * grad / grad.norm()
    slope = (value(latents.detach() + step) - value(latents.detach() - step)) / 2e-1
    torch.testing.assert_close(slope, grad.norm().double(), rtol=0.05, atol=0)


@pytest.mark.parametrize("prompts", [["a cat"], ["a cat", "a dog"]])
def test_a_batch_without_guidance_is_refused_before_any_layer(prompts):
    pipe = make_pipeline()
    store = AttentionStore()
    with register_attention_control(pipe, store):
        with pytest.raises(ValueError, match="guidance.*guidance=None"):
            pipe(prompts, guidance_scale=1.0, num_inference_steps=1)
    assert store.cur_att_layer == 0


@pytest.mark.parametrize(
    ("options", "run", "message"),
    [
        ({}, {"guidance_scale": 1.0}, "has no guidance"),
        ({"guidance": None}, {"guidance_scale": 4.0}, "guidance=None.*run"),
        ({}, {"prompt": ["a cat"] * 3}, "2 prompts.*batch.*3"),
        ({"blend": True}, {"num_images_per_prompt": 2}, "num_images_per_prompt=1"),
    ],
)
def test_an_edit_and_its_run_must_agree(options, run, message):
    pipe = make_pipeline()
    prompts = read_prompts(pipe, ["a cat", "a dog"])
    if options.pop("blend", None):
        options["local_blend"] = LocalBlend(prompts, ["cat", "dog"], 1)
    control = AttentionReplace(prompts, 1, **options)
    with register_attention_control(pipe, control):
        with pytest.raises(ValueError, match=message):
            pipe(**{"prompt": ["a cat", "a dog"], "num_inference_steps": 1, **run})
        assert control.cur_att_layer == 0


@pytest.mark.slow
def test_a_controller_that_saw_nothing_is_a_warning():
    pipe, other = make_pipeline(), make_pipeline()
    with pytest.warns(CaptureWarning, match="AttentionStore saw nothing"):
        with register_attention_control(pipe, AttentionStore()):
            other("a cat", num_inference_steps=1, output_type="latent")


def test_blending_that_never_began_is_a_warning():
    pipe = make_pipeline()
    prompts = read_prompts(pipe, ["a cat", "a dog"])
    control = AttentionReplace(prompts, 1, local_blend=LocalBlend(prompts, ["cat", "dog"], 1))
    with pytest.warns(CaptureWarning, match=r"step_end\(controller\)"):
        with register_attention_control(pipe, control):
            pipe(["a cat", "a dog"], num_inference_steps=1, output_type="latent")


def test_processors_with_weights_of_their_own_are_refused():
    from diffusers.models.attention_processor import IPAdapterAttnProcessor2_0

    unet = make_unet()
    name = "mid_block.attentions.0.transformer_blocks.0.attn2"
    layer = unet.get_submodule(name)
    layer.set_processor(IPAdapterAttnProcessor2_0(16, cross_attention_dim=32))
    with pytest.raises(ValueError, match=r"IPAdapterAttnProcessor2_0, whose weights.*unload"):
        register_attention_control(unet, None)
    with pytest.raises(TypeError, match="Linear.*family"):
        register_attention_control(torch.nn.Linear(1, 1), None)


@torch.no_grad()
@pytest.mark.parametrize("watched", ["bare", "attached", "captured"])
@pytest.mark.slow
def test_layers_of_a_resolution_are_those_that_call(watched):
    unet, held, text = make_unet(), {}, torch.randn(1, 7, 32)
    before = dict(unet.attn_processors)
    unet.register_forward_hook(lambda *_: held.update(unet.attn_processors))
    target = unet if watched == "attached" else None
    store = AttentionStore(pipeline=target, guidance=None)
    with register_attention_control(unet, store, layers=(8, 6)):
        with capture(unet) if watched == "captured" else nullcontext():
            for rows in (16, 16, 32)[: 2 if watched == "captured" else 3]:  # a capture is of one
                store.reset()
                unet(torch.randn(1, 4, rows, rows * 3 // 4), 500, text)
                sizes = [len(one[0]) for maps in store.last_step.values() for one in maps]
                assert sizes == [8 * 6] * 5 and store.num_att_layers == 10  # and self-attention
                own = sum(isinstance(one, TorchAttnProcessor) for one in held.values())
                assert watched == "captured" or own == 10 < len(held)
    assert all(unet.attn_processors[name] is before[name] for name in before)


@torch.no_grad()
def test_a_resolution_that_no_layer_has_is_refused_in_the_first_pass():
    unet = make_unet()
    with register_attention_control(unet, EmptyControl(), layers=5):
        with pytest.raises(ValueError, match="5"):
            unet(torch.randn(1, 4, 16, 12), 500, torch.randn(1, 7, 32))


RUN = {"num_inference_steps": 2, "output_type": "latent"}


@pytest.mark.parametrize("together", [True, False])
@pytest.mark.slow
def test_a_store_of_two_runs_says_so_when_it_is_read(together):
    """Nothing fails while the model runs; the mean of two images is told."""
    pipe, store = make_pipeline(), AttentionStore()
    with register_attention_control(pipe, store):
        pipe("a cat", **RUN)
        if together:
            pipe("a dog", **RUN)
    if not together:
        with register_attention_control(pipe, store):
            pipe("a dog", **RUN)
    with pytest.warns(CaptureWarning, match=r"several runs.*reset\(\)"):
        store.get_average_attention()
    store.reset()
    with register_attention_control(pipe, store), warnings.catch_warnings():
        warnings.simplefilter("error")
        pipe("a dog", **RUN)
        store.get_average_attention()


@pytest.mark.parametrize(("made", "is_told"), [(50, True), (2, False)])
@pytest.mark.slow
def test_a_controller_for_a_longer_run_is_told(made, is_told):
    pipe, texts = make_pipeline(), ["a cat", "a dog"]
    prompts = [read_prompts(pipe, text)[0] for text in texts]
    replace = AttentionReplace(prompts, made, cross_replace_steps=0.8, self_replace_steps=0.4)
    with register_attention_control(pipe, replace), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        pipe(texts, guidance_scale=5.0, **RUN)
    found = [str(one.message) for one in told if "made for 50 passes" in str(one.message)]
    assert bool(found) == is_told and all("has 2" in text for text in found)


def test_texts_in_place_of_read_prompts_are_named():
    with pytest.raises(TypeError, match="read_prompts"):
        AttentionReplace(["a cat", "a dog"], 2, cross_replace_steps=0.8, self_replace_steps=0.4)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ((8, ["up_cross"], True, 0), "places are .*without a kind. Did you mean 'up'"),
        ((8, ["up"], True, 3), "select=3.*0 to 0.*1 image"),
    ],
)
@pytest.mark.slow
def test_what_a_store_has_not_is_refused_by_name(asked, message):
    pipe, store = make_pipeline(), AttentionStore()
    with register_attention_control(pipe, store):
        pipe("a cat", **RUN)
    with pytest.raises(ValueError, match=message):
        sdattn.aggregate_attention(store, *asked)
