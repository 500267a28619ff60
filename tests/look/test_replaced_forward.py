"""Layers whose forward or call other code replaced: what that used is shown, or it is named."""

import copy
import inspect
from types import MethodType

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from diffusers.models.attention import BasicTransformerBlock
from diffusers.models.attention_processor import Attention
from helpers.capture_runs import PROMPT, run
from helpers.explicit_processors import sharpened
from helpers.joint_models import inputs
from helpers.tiny_pipelines import make_small_unet, small_pipeline
from helpers.transformer_rows import flux, sd3
from torch.nn.functional import scaled_dot_product_attention as sdpa

import sdattn
from sdattn.edit import EmptyControl, register_attention_control
from sdattn.models.denoiser import find_denoiser

SAMPLE = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(0))
TEXT = torch.randn(2, 77, 32, generator=torch.Generator().manual_seed(1))
BOTH = ("cross", "self")


def probabilities(layer, x, context):
    q = layer.head_to_batch_dim(layer.to_q(x))
    k = layer.head_to_batch_dim(layer.to_k(x if context is None else context))
    return (torch.einsum("b i d, b j d -> b i j", q, k) * layer.scale).softmax(dim=-1)


def by_einsum(layer, used, x, context, edit=lambda probs: probs):
    """google's prompt-to-prompt, MasaCtrl, FreeCustom."""
    probs = edit(probabilities(layer, x, context))
    used.append(probs.detach().unflatten(0, (-1, layer.heads)).mean(1))
    v = layer.head_to_batch_dim(layer.to_v(x if context is None else context))
    out = torch.einsum("b i j, b j d -> b i d", probs, v)
    return layer.to_out[0](layer.batch_to_head_dim(out))


def by_a_sharper_one(layer, used, x, context):
    return by_einsum(layer, used, x, context, edit=sharpened)


def by_torchs_attention(layer, used, x, context):
    used.append(probabilities(layer, x, context).detach().unflatten(0, (-1, layer.heads)).mean(1))
    context = x if context is None else context
    q, k, v = (
        part.unflatten(-1, (layer.heads, -1)).transpose(1, 2)
        for part in (layer.to_q(x), layer.to_k(context), layer.to_v(context))
    )
    return layer.to_out[0](sdpa(q, k, v).transpose(1, 2).flatten(2))


def as_a_function(layer, attend, _):
    def forward(x, encoder_hidden_states=None, attention_mask=None, **_):
        return attend(layer, x, encoder_hidden_states)

    layer.forward = forward


def as_a_method(layer, attend, _):
    def forward(self, hidden_states, encoder_hidden_states=None, **_):
        return attend(self, hidden_states, encoder_hidden_states)

    layer.forward = MethodType(forward, layer)


def in_the_class(layer, attend, monkeypatch):
    def forward(self, hidden_states, encoder_hidden_states=None, **_):
        return attend(self, hidden_states, encoder_hidden_states)

    monkeypatch.setattr(type(layer), "forward", forward)


def under_a_hook(layer, attend, monkeypatch):
    """accelerate's offloading puts a hook around whatever the forward is."""
    as_a_function(layer, attend, monkeypatch)
    add_hook_to_module(layer, ModelHook())


def replaced(unet, way, attend, monkeypatch):
    """Replace the forward of each layer; return what each used, a list of ``[B, N, T]`` by name."""
    layers = find_denoiser(unet).layers
    used = {layer.name: [] for layer in layers}
    names = {layer.module: layer.name for layer in layers}

    def attend_and_note(layer, x, context):
        return attend(layer, used[names[layer]], x, context)

    for layer in layers:
        way(layer.module, attend_and_note, monkeypatch)
    return used


WAYS = [as_a_function, as_a_method, in_the_class, under_a_hook]
MANNERS = [by_einsum, by_a_sharper_one, by_torchs_attention]


def assert_shown(store, used):
    for name, maps in store.maps.items():
        expected = torch.stack(used[name]).double().mean(0)
        torch.testing.assert_close(maps.flatten(1, 2).double(), expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("attend", MANNERS)
@pytest.mark.parametrize("way", WAYS)
def test_what_a_replaced_forward_used_is_shown(way, attend, monkeypatch):
    unet = make_small_unet()
    used = replaced(unet, way, attend, monkeypatch)
    plain = [unet(SAMPLE * scale, 5, TEXT).sample for scale in (1, 2)]
    before = {name: vars(part).get("forward") for name, part in unet.named_modules()}
    for calls in used.values():
        calls.clear()
    with sdattn.capture(unet, kinds=BOTH) as store:
        found = [unet(SAMPLE * scale, 5, TEXT).sample for scale in (1, 2)]
    assert all(map(torch.equal, found, plain))
    assert len(store.maps) == 8
    assert_shown(store, used)
    after = {name: vars(part).get("forward") for name, part in unet.named_modules()}
    assert all(after[name] is own for name, own in before.items())


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_captures_nest_and_end_in_any_order(way, monkeypatch):
    unet = make_small_unet()
    used = replaced(unet, way, by_einsum, monkeypatch)
    before = [vars(layer.module).get("forward") for layer in find_denoiser(unet).layers]
    one, other = sdattn.capture(unet, kinds=BOTH), sdattn.capture(unet, steps="last")
    outer, inner = one.__enter__(), other.__enter__()
    unet(SAMPLE, 5, TEXT)
    first = {name: list(calls) for name, calls in used.items()}
    one.__exit__(None, None, None)
    unet(SAMPLE * 2, 5, TEXT)
    other.__exit__(None, None, None)
    assert_shown(outer, first)
    assert_shown(inner, {name: calls[1:] for name, calls in used.items()})
    after = [vars(layer.module).get("forward") for layer in find_denoiser(unet).layers]
    assert all(own is now for own, now in zip(before, after, strict=True))


def timed(layer):
    """A wrapper, which calls what it is put around."""
    own = layer.forward

    def forward(*args, **kwargs):
        return own(*args, **kwargs)

    layer.forward = forward


@torch.no_grad()
@pytest.mark.parametrize("kinds", [("cross",), BOTH])
def test_a_forward_that_calls_the_processor_is_counted_once(kinds):
    unet = make_small_unet()
    with sdattn.capture(unet, kinds=kinds) as expected:
        plain = [unet(SAMPLE * scale, 5, TEXT).sample for scale in (1, 2)]
    for layer in find_denoiser(unet).layers:
        timed(layer.module)
    with sdattn.capture(unet, kinds=kinds) as store:
        found = [unet(SAMPLE * scale, 5, TEXT).sample for scale in (1, 2)]
    assert all(map(torch.equal, found, plain))
    for name, maps in expected.maps.items():
        torch.testing.assert_close(store.maps[name], maps, atol=1e-6, rtol=0)
    assert all(held.calls == 2 for held in store.sums.values())


@torch.no_grad()
def test_a_forward_may_be_replaced_inside_the_block_and_again(monkeypatch):
    unet = make_small_unet()
    with sdattn.capture(unet, steps="all") as store:
        unet(SAMPLE, 5, TEXT)
        used = replaced(unet, as_a_function, by_a_sharper_one, monkeypatch)
        unet(SAMPLE, 5, TEXT)
        again = replaced(unet, as_a_function, by_einsum, monkeypatch)
        unet(SAMPLE, 5, TEXT)
        for layer in find_denoiser(unet).layers:
            timed(layer.module)
        unet(SAMPLE, 5, TEXT)
    held = {layer.module.forward.__qualname__ for layer in find_denoiser(unet).layers}
    assert held == {"timed.<locals>.forward"}
    for name, maps in store.maps.items():
        _, *late = maps.flatten(2, 3).unbind(1)
        for found, expected in zip(late, [*used[name], *again[name]], strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(("kind", "make"), [("SD3", sd3), ("FLUX.1", flux)])
def test_joint_attention(kind, make):
    """The replaced forward runs diffusers' processor, but not the one that the layer holds."""
    model = make().transformer
    given = inputs(kind, model)
    with sdattn.capture(model) as expected:
        plain = model(**given).sample
    for layer in find_denoiser(model).layers:
        own = type(layer.module.processor)()
        known = inspect.signature(own.__call__).parameters

        def forward(*args, own=own, known=known, module=layer.module, **kwargs):
            return own(module, *args, **{name: kwargs[name] for name in kwargs if name in known})

        layer.module.forward = forward
    with sdattn.capture(model) as store:
        assert torch.equal(model(**given).sample, plain)
    assert list(store.maps) == list(expected.maps)
    for name, maps in expected.maps.items():
        torch.testing.assert_close(store.maps[name], maps, atol=1e-6, rtol=0)


def test_a_loss_reaches_the_latents(monkeypatch):
    unet = make_small_unet()
    gradients = []
    for replace in (False, True):
        if replace:
            replaced(unet, as_a_function, by_einsum, monkeypatch)
        latents = SAMPLE.clone().requires_grad_()
        with sdattn.capture(unet, grad=True) as store:
            unet(latents, 5, TEXT)
        sum(maps[..., 3].square().sum() for maps in store.maps.values()).backward()
        gradients.append(latents.grad)
    plain, found = gradients
    torch.testing.assert_close(found, plain, atol=1e-5 * float(plain.abs().max()), rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("way", [as_a_function, in_the_class])
def test_a_copy_of_a_watched_model_is_not_watched(way, monkeypatch):
    unet = make_small_unet()
    replaced(unet, way, by_einsum, monkeypatch)
    layers = find_denoiser(unet).layers
    before = [layer.module.forward for layer in layers]
    with sdattn.capture(unet) as store:
        unet(SAMPLE, 5, TEXT)
        copied = copy.deepcopy(unet)
    for layer, own in zip(layers, before, strict=True):
        module = copied.get_submodule(layer.name)
        assert getattr(module.forward, "__func__", own) is getattr(own, "__func__", own)
        assert getattr(module.forward, "__self__", module) is module
    assert len(store.passes) == 1


@torch.no_grad()
def test_a_forward_that_answers_from_a_cache_is_left_out(monkeypatch):
    """As a cache does from the second step on; the layer has no attention then."""
    unet = make_small_unet()
    used = replaced(unet, as_a_function, by_einsum, monkeypatch)
    layers = find_denoiser(unet).layers
    with pytest.warns(sdattn.CaptureWarning, match="is a cache enabled"):
        with sdattn.capture(unet, kinds=BOTH) as store:
            unet(SAMPLE, 5, TEXT)
            for layer in layers:
                layer.module.forward = lambda hidden_states, *_, **__: hidden_states
            unet(SAMPLE, 5, TEXT)
    assert_shown(store, used)
    monkeypatch.undo()
    for layer in layers:
        layer.module.forward = lambda hidden_states, *_, **__: hidden_states
    said = refused(unet, lambda: unet(SAMPLE, 5, TEXT))
    assert "none of the 4 watched layers ran" in said
    assert "The `forward` of down_blocks.0.attentions.0.transformer_blocks.0.attn2 was" in said


# -- what cannot be seen is named ------------------------------------------------------------------


def refused(target, call, error=sdattn.CaptureError, **options):
    with pytest.raises(error) as caught, sdattn.capture(target, **options):
        call()
    return str(caught.value)


@torch.no_grad()
def test_a_forward_that_adds_something_is_named(monkeypatch):
    def by_adding(layer, used, x, context):
        v = layer.to_v(x if context is None else context)
        return layer.to_out[0](layer.to_q(x) + v.mean(1, keepdim=True))

    unet = make_small_unet()
    replaced(unet, as_a_function, by_adding, monkeypatch)
    said = refused(unet, lambda: unet(SAMPLE, 5, TEXT), RuntimeError)
    assert "the forward as_a_function.<locals>.forward (" in said.lower()
    assert "to_k" in said


def calling(attend):
    def mod_forward(self, hidden_states, encoder_hidden_states=None, **_):
        return attend(self, [], hidden_states, encoder_hidden_states)

    return mod_forward


@torch.no_grad()
def test_another_call_of_the_class_is_named(monkeypatch):
    """DenseDiffusion's."""
    unet = make_small_unet()
    monkeypatch.setattr(Attention, "__call__", calling(by_einsum), raising=False)
    said = refused(unet, lambda: unet(SAMPLE, 5, TEXT))
    assert "The `__call__` of down_blocks.0.attentions.0.transformer_blocks.0.attn2 was" in said
    assert "calling.<locals>.mod_forward (" in said
    assert "register_attention_control(pipe, controller)" in said
    assert "set_processor()" in said


@torch.no_grad()
def test_another_forward_of_a_block_is_named():
    unet = make_small_unet()
    for part in unet.modules():
        if isinstance(part, BasicTransformerBlock):
            part.forward = lambda hidden_states, *_, **__: hidden_states
    said = refused(unet, lambda: unet(SAMPLE, 5, TEXT))
    assert "The `forward` of down_blocks.0.attentions.0.transformer_blocks.0 was replaced" in said
    assert "<lambda> (" in said


@torch.no_grad()
def test_some_layers_without_a_processor_are_warned_of(monkeypatch):
    unet = make_small_unet()
    unet.mid_block.forward = lambda hidden_states, *_, **__: hidden_states
    with pytest.warns(sdattn.CaptureWarning, match=r"`forward` of mid_block was.*<lambda>"):
        with sdattn.capture(unet):
            unet(SAMPLE, 5, TEXT)


def watched_run(follower):
    """A run whose layers hold a controller's processors, which never run."""
    pipe = small_pipeline()
    for layer in find_denoiser(pipe).layers:
        as_a_function(layer.module, lambda *given: calling(by_einsum)(*given), None)
    return follower(pipe)


def with_store(pipe):
    store = sdattn.AttentionStore()
    with register_attention_control(pipe, store):
        run(pipe)
    store.get_average_attention()


def with_attached_store(pipe):
    store = sdattn.AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(sdattn.TorchAttnProcessor(store))
    run(pipe)
    store.get_average_attention()


def with_controller(pipe):
    with register_attention_control(pipe, EmptyControl()):
        run(pipe)


FAST = {"num_inference_steps": 2, "height": 64, "width": 64}
CONTROLLED = {
    "store": with_store,
    "attached store": with_attached_store,
    "controller": with_controller,
    "knockout": lambda pipe: sdattn.knockout(pipe, PROMPT, "cat", **FAST),
    "edit": lambda pipe: sdattn.edit.edit(pipe, PROMPT, "a red dog", **FAST),
}


@pytest.mark.parametrize("entry", CONTROLLED)
def test_a_controller_that_no_layer_calls_is_told_why(entry):
    with pytest.raises(RuntimeError, match=r"`forward`.* was replaced.*as_a_function.*processor"):
        watched_run(CONTROLLED[entry])


def test_a_store_that_no_layer_calls_lets_the_run_end():
    pipe = small_pipeline()
    for layer in find_denoiser(pipe).layers:
        as_a_function(layer.module, lambda *given: calling(by_einsum)(*given), None)
    plain = run(pipe)
    store = sdattn.AttentionStore()
    with register_attention_control(pipe, store):
        assert (run(pipe) == plain).all()
    with pytest.raises(sdattn.CaptureError, match="none of 8 layers called it.*was replaced"):
        store.get_average_attention()


def test_what_only_watches_draws_the_same_image():
    """generate() and the store that such code calls itself go on as before."""
    pipe = small_pipeline()
    for layer in find_denoiser(pipe).layers:
        as_a_function(layer.module, lambda *given: calling(by_einsum)(*given), None)
    plain = run(pipe)
    with sdattn.capture(pipe) as store:
        assert (run(pipe) == plain).all()
    assert len(store.heatmaps()[0]["cat"].values) > 0
