"""The laws of capture, on real UNets and pipelines.

The oracle for the maps recomputes each layer's softmax in float64 from the inputs of the layer,
which hooks of its own record.
"""

import copy
import io
import json

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    SlicedAttnProcessor,
)
from helpers.capture_runs import PROMPT, assert_untouched, oracle, record_inputs, run
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline, make_unet

import sdattn.look.attended
from sdattn import CaptureError, CaptureWarning, TorchAttnProcessor, capture, generate
from sdattn.models.denoiser import find_denoiser
from sdattn.models.family import Family

MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


def sample_and_text(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, 4, 16, 24, generator=generator).to(dtype)
    return sample, torch.randn(2, 77, 32, generator=generator).to(dtype)


# -- law 1: looking changes nothing ---------------------------------------------------------------


class OwnProcessor:
    """A processor such as a user may write, with an argument of its own."""

    def __call__(self, attn, hidden_states, *given, strength=1.0, **options):
        return AttnProcessor2_0()(attn, hidden_states, *given, **options) * strength


def ip_adapter(unet):
    processors = {}
    for layer in find_denoiser(unet).layers:
        processor = AttnProcessor2_0()
        if layer.kind == "cross":
            torch.manual_seed(len(processors))
            width = layer.module.to_q.out_features
            processor = IPAdapterAttnProcessor2_0(width, 32, num_tokens=(4,)).eval()
        processors[f"{layer.name}.processor"] = processor
    unet.set_attn_processor(processors)


def fuse(unet):
    for layer in find_denoiser(unet).layers:
        layer.module.fuse_projections()
    unet.set_attn_processor(FusedAttnProcessor2_0())


SETUPS = {
    "AttnProcessor": lambda unet: unet.set_attn_processor(AttnProcessor()),
    "AttnProcessor2_0": lambda unet: unet.set_attn_processor(AttnProcessor2_0()),
    "sliced": lambda unet: unet.set_attn_processor(SlicedAttnProcessor(1)),
    "fused": fuse,
    "IP-Adapter": ip_adapter,
    "own": lambda unet: unet.set_attn_processor(OwnProcessor()),
    "TorchAttnProcessor": lambda unet: unet.set_attn_processor(TorchAttnProcessor()),
}


@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("setup", SETUPS)
@torch.no_grad()
@pytest.mark.slow
def test_looking_changes_nothing(setup, dtype):
    unet = make_unet()
    SETUPS[setup](unet)
    unet.to(dtype)
    sample, text = sample_and_text(dtype)
    if setup == "IP-Adapter":
        text = (text, [text[:, None, :4].flip(-1)])
    options = {"cross_attention_kwargs": {"strength": 0.5}} if setup == "own" else {}
    before = unet(sample, 500, text, **options).sample
    hooks, record = record_inputs(unet)
    with capture(unet, heads="all", kinds=("cross", "self")) as store:
        during = unet(sample, 500, text, **options).sample
    for hook in hooks:
        hook.remove()
    assert torch.equal(before, during)
    assert torch.equal(before, unet(sample, 500, text, **options).sample)

    # law 2, for the same processors: what is shown is what was used
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    for name, [(hidden, states, _)] in record.items():
        expected = oracle(unet.get_submodule(name), hidden, states)
        found = store.maps[name].flatten(2, 3).double()[..., :77]  # image prompts stand behind
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
    # TorchAttnProcessor shows the very probabilities it used, which bfloat16 has rounded
    rounded = setup == "TorchAttnProcessor" and dtype == torch.bfloat16
    for name, found in store.maps.items():
        found = found[..., :77] if name in record else found
        sums, ones = found.sum(-1), torch.ones(found.shape[:-1])
        torch.testing.assert_close(sums, ones, atol=4e-3 if rounded else 1e-5, rtol=0)
    assert len(record) == 16


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
@pytest.mark.slow
def test_looking_changes_no_image(make):
    pipe = make()
    before = run(pipe)
    with capture(pipe):
        during = run(pipe)
    assert (before == during).all()


# -- law 2: what is shown is what was used --------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("branch", ["conditional", "unconditional", "both"])
@pytest.mark.slow
def test_maps_are_the_mean_softmax_of_the_branch(branch, guidance):
    pipe = make_pipeline()
    _, record = record_inputs(pipe.unet)
    options = {"guidance_scale": guidance, "num_images_per_prompt": 2, "negative_prompt": "dog"}
    if guidance == 1.0 and branch != "conditional":
        with pytest.raises(CaptureError, match="unconditional"), capture(pipe, branch=branch):
            run(pipe, **options)
        return
    with capture(pipe, branch=branch) as store:
        run(pipe, **options)
    rows = {"unconditional": [0, 1], "conditional": [2, 3], "both": [0, 1, 2, 3]}[branch]
    rows = [0, 1] if guidance == 1.0 else rows
    assert len(record[MID]) == 2
    for name, calls in record.items():
        layer = pipe.unet.get_submodule(name)
        probs = torch.stack([oracle(layer, hidden, text)[rows] for hidden, text, _ in calls])
        expected = probs.mean((0, 2))  # over calls and heads
        torch.testing.assert_close(
            store.maps[name].flatten(1, 2).double(), expected, atol=1e-5, rtol=0
        )


@torch.no_grad()
def test_masked_text_gets_no_attention(tiny_unet):
    keep = torch.ones(2, 77)
    keep[0, 5:] = 0
    _, record = record_inputs(tiny_unet)
    with capture(tiny_unet, heads="all") as store:
        tiny_unet(torch.randn(2, 4, 16, 16), 1, torch.randn(2, 77, 32), encoder_attention_mask=keep)
    for name, [(hidden, text, mask)] in record.items():
        found = store.maps[name]
        assert found[0, ..., 5:].max() == 0
        expected = oracle(tiny_unet.get_submodule(name), hidden, text, mask)
        torch.testing.assert_close(found.flatten(2, 3).double(), expected, atol=1e-5, rtol=0)


def test_gradients_reach_the_latents(tiny_unet):
    latents = torch.randn(1, 4, 16, 16, requires_grad=True)
    with capture(tiny_unet, grad=True) as store:
        tiny_unet(latents, 1, torch.randn(1, 77, 32))
    store.maps[MID][..., 2].sum().backward()
    assert latents.grad.abs().sum() > 0
    with capture(tiny_unet) as store:
        tiny_unet(latents, 1, torch.randn(1, 77, 32))
    assert not store.maps[MID].requires_grad


# -- law 3: leaving restores ----------------------------------------------------------------------


@pytest.mark.parametrize("setup", ["AttnProcessor2_0", "IP-Adapter"])
@pytest.mark.parametrize("how", ["well", "error", "model error", "nested", "crossed"])
def test_leaving_restores_the_very_objects(setup, how):
    unet = make_unet()
    SETUPS[setup](unet)
    before = unet.attn_processors
    text = torch.randn(1, 77, 32)
    if setup == "IP-Adapter":
        text = (text, [torch.randn(1, 1, 4, 32)])

    def call():
        unet(torch.randn(1, 4, 16, 16), 1, text)

    if how == "well":
        with capture(unet):
            assert unet.attn_processors[f"{MID}.processor"] is not before[f"{MID}.processor"]
            call()
    elif how == "error":
        with pytest.raises(RuntimeError, match="boom"), capture(unet):
            raise RuntimeError("boom")
    elif how == "model error":
        with pytest.raises(RuntimeError), capture(unet):
            unet(torch.randn(1, 3, 16, 16), 1, text)
    elif how == "nested":
        with capture(unet) as outer, capture(unet, layers="mid") as inner:
            call()
        assert torch.equal(outer.maps[MID], inner.maps[MID])
    else:
        first, second = capture(unet), capture(unet)
        first.__enter__()
        second.__enter__()
        call()
        first.__exit__(None, None, None)
        call()  # the second one goes on seeing
        second.__exit__(None, None, None)
    assert_untouched(unet, before)
    call()


def test_nothing_is_installed_when_the_arguments_are_wrong(tiny_unet):
    before = tiny_unet.attn_processors
    wrong_steps = [{"steps": one} for one in ("some", (0.5, 0.5), (0, 1), (0.5, 1.5))]
    wrong_layers = [{"layers": one} for one in ("nowhere", [], (), "")]
    for wrong in ({"tokens": []}, {"branch": "both"}, *wrong_layers, *wrong_steps):
        with pytest.raises(ValueError, match=f"{next(iter(wrong))}|fits"):
            with capture(tiny_unet, **wrong):
                pass
    assert_untouched(tiny_unet, before)


# -- law 4: never silently empty ------------------------------------------------------------------


def test_layers_that_never_ran_are_named(tiny_unet):
    class Skipping(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states

    block = tiny_unet.mid_block.attentions[0].transformer_blocks[0]
    layer, block.attn2 = block.attn2, Skipping()
    layers = find_denoiser(make_unet()).layers
    assert len(layers) == 32
    block.attn2 = layer
    tiny_unet.mid_block.attentions[0].forward = lambda hidden, **_: (hidden,)
    with pytest.warns(CaptureWarning, match=f"1 of 16.*{MID}"):
        with capture(tiny_unet) as store:
            tiny_unet(torch.randn(1, 4, 16, 16), 1, torch.randn(1, 77, 32))
    assert len(store.maps) == 15
    assert f"missing    {MID}" in store.report()
    with pytest.raises(KeyError, match="layer.*'mid_block"):
        store.maps[MID]


def test_a_processor_swapped_inside_is_noticed_and_watched(tiny_unet):
    before = tiny_unet.attn_processors
    inputs = torch.randn(1, 4, 16, 16), 1, torch.randn(1, 77, 32)
    with capture(tiny_unet, steps="all") as store:
        tiny_unet(*inputs)
        tiny_unet.set_attn_processor(AttnProcessor())
        with pytest.warns(CaptureWarning, match=r"16 attention processors were replaced"):
            tiny_unet(*inputs)
    assert_untouched(tiny_unet, before)
    first, second = store.maps[MID].unbind(1)
    torch.testing.assert_close(first, second)


@pytest.mark.slow
def test_integers_of_numpy_are_integers(tiny_pipe):
    """Also where run.json is written, which holds Python's own only."""
    side, one = np.int32(64), np.uint8(1)
    kept = {"steps": [one], "heads": np.array([0, 1]), "tokens": [np.int64(3)]}
    with capture(tiny_pipe, layers=side // 8, **kept) as store:
        run(tiny_pipe, height=64, width=64)
    assert {one.shape for one in store.maps.values()} == {(1, 1, 2, 8, 8, 1)}
    plain = store.steps, store.heads, store.tokens
    assert plain == ([1], [0, 1], (3,))
    assert all(type(number) is int for numbers in plain for number in numbers)
    with capture(tiny_pipe, layers=(side // 8, np.int64(8))) as store:
        run(tiny_pipe, height=64, width=64)
    assert len(store.maps) == 5
    sizes = {"num_inference_steps": 2, "height": 64, "width": 64, "num_images_per_prompt": 2}
    expected = generate(tiny_pipe, PROMPT, **sizes, guidance_scale=3.0)
    sizes = {name: np.int64(size) for name, size in sizes.items()}
    found = generate(tiny_pipe, PROMPT, **sizes, guidance_scale=np.float64(3))
    json.dumps(found.info)
    assert found.info == expected.info
    maps = found.heatmaps[1]
    assert torch.equal(maps[np.int64(3)].values, expected.heatmaps[1][3].values)


def test_steps_that_are_not_reached_are_told(tiny_pipe):
    with pytest.warns(CaptureWarning, match=r"nothing is held of \[7\]"):
        with capture(tiny_pipe, steps=[1, 7]):
            run(tiny_pipe)


@pytest.mark.slow
def test_resolutions_are_told_once_the_size_is_known(tiny_pipe):
    with capture(tiny_pipe, layers=4) as store:
        run(tiny_pipe, width=192)
    assert {tuple(m.shape[1:3]) for m in store.maps.values()} == {(4, 6)}
    assert len(store.maps) == 5
    with pytest.raises(ValueError, match="fits 7"), capture(tiny_pipe, layers=7):
        run(tiny_pipe)


# -- ways of running ------------------------------------------------------------------------------


def test_the_public_store_of_a_bare_unet_has_an_image_a_row(tiny_unet):
    with capture(tiny_unet) as store:
        tiny_unet(torch.randn(3, 4, 16, 16), 1, torch.randn(3, 77, 32))
    assert store.images == 3
    assert isinstance(store, sdattn.MapStore)


def test_the_last_call_alone_keeps_its_graph(tiny_unet):
    latents = [torch.randn(1, 4, 16, 16, requires_grad=True) for _ in range(2)]
    with capture(tiny_unet, steps="last", grad=True) as store:
        for i, one in enumerate(latents):
            tiny_unet(one, 2 - i, torch.randn(1, 77, 32))
    store.maps[MID][..., 2].sum().backward()
    assert latents[0].grad is None
    assert latents[1].grad.abs().sum() > 0


def saved(model):
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


@torch.no_grad()
@pytest.mark.parametrize("twin_of", [copy.deepcopy, saved])
def test_a_watched_model_can_be_copied_and_saved(tiny_unet, twin_of):
    """The copy's layers hold copies of what they held before, and its only hooks are the user's;
    the run goes on."""
    inputs = torch.randn(1, 4, 16, 16), 10, torch.randn(1, 77, 32)
    before = tiny_unet.attn_processors
    tiny_unet.mid_block.register_forward_hook(print_nothing)
    plain = tiny_unet(*inputs).sample
    with capture(tiny_unet) as store:
        tiny_unet(*inputs)
        twin = twin_of(tiny_unet)
        part = twin_of(tiny_unet.mid_block.attentions)
        assert torch.equal(twin(*inputs).sample, plain)
        tiny_unet(*inputs)
    assert len(store.passes) == 2
    assert not any(hooks_of(part)) and list(hooks_of(twin)) == [print_nothing]
    held = twin.attn_processors
    assert {name: type(one) for name, one in held.items()} == {
        name: type(one) for name, one in before.items()
    }
    assert not any(held[name] is before[name] for name in held)
    for model in (tiny_unet, twin):
        assert not any("__reduce_ex__" in vars(module) for module in model.modules())


def print_nothing(*_):
    """A hook of the user's."""


def hooks_of(model):
    for module in model.modules():
        yield from (*module._forward_hooks.values(), *module._forward_pre_hooks.values())


def test_what_is_known_of_the_model_is_looked_up_when_capture_begins(monkeypatch):
    """Not in each pass, nor in each layer."""
    pipe, asked = make_pipeline(), []
    lists = Family.lists
    monkeypatch.setattr(Family, "lists", lambda *given: asked.append(given) or lists(*given))
    with capture(pipe) as store:
        asked.clear()
        run(pipe, num_inference_steps=2)
    assert len(store.passes) == 2 and asked == []


@torch.no_grad()
def passes_of(unet, broken, **options):
    """The store of three calls; those with these numbers end in an error, and are made again."""
    texts = torch.Generator().manual_seed(0)
    given = torch.randn(1, 77, 32, generator=texts)
    with torch.no_grad(), capture(unet, **options) as store:
        for number in range(3):
            sample = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(number))
            if number in broken:
                hook = unet.up_blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    unet(-sample, 900 - number, given)
                hook.remove()
            unet(sample, 900 - number, given)
    return store


@pytest.mark.parametrize("broken", [(0,), (0, 2)], ids=str)
@pytest.mark.parametrize("options", [{}, {"steps": "all"}, {"steps": [1, 2], "heads": "all"}])
def test_a_pass_that_did_not_end_adds_nothing(tiny_unet, broken, options):
    right = passes_of(tiny_unet, (), **options)
    found = passes_of(tiny_unet, broken, **options)
    assert found.timesteps == right.timesteps == [900, 899, 898]
    assert found.seen == right.seen and len(found.maps) == 16
    for name, maps in right.maps.items():
        torch.testing.assert_close(found.maps[name], maps, atol=1e-6, rtol=0)


def test_the_last_map_is_that_of_a_pass_that_ended(tiny_unet):
    """Held in float64, layers do not wait for their pass to end."""
    options = {"steps": "last", "dtype": torch.float64}
    right = passes_of(tiny_unet, (), **options)
    found = passes_of(tiny_unet, (0, 2), **options)
    for name, maps in right.maps.items():
        torch.testing.assert_close(found.maps[name], maps, atol=1e-6, rtol=0)


def test_a_sum_that_has_a_pass_that_did_not_end_says_so_when_it_is_read(tiny_unet):
    """Held in float64, layers do not wait for their pass to end."""
    right = passes_of(tiny_unet, (), dtype=torch.float64)
    store = passes_of(tiny_unet, (2,), dtype=torch.float64)
    for name, maps in right.maps.items():
        if name.startswith("up_blocks"):  # they never ran in it
            assert torch.equal(store.maps[name], maps)
        else:
            with pytest.raises(CaptureError, match=f"error after {name} had run.*steps='all'"):
                store.maps[name]
