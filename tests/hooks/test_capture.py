"""The laws of capture, on real UNets and pipelines.

The oracle for the maps recomputes each layer's softmax in float64 from the inputs of the layer,
which hooks of its own record.
"""

import copy
import gc
import json
import math
import re
import sys
import weakref

import numpy as np
import pytest
import torch
from diffusers import (
    HeunDiscreteScheduler,
    StableDiffusionImg2ImgPipeline,
    StableDiffusionInstructPix2PixPipeline,
    StableDiffusionPAGPipeline,
)
from diffusers.models.attention_processor import (
    AttnProcessor,
    AttnProcessor2_0,
    FusedAttnProcessor2_0,
    IPAdapterAttnProcessor2_0,
    SlicedAttnProcessor,
)
from tiny_pipelines import make_pipeline, make_scheduler, make_sdxl_pipeline, make_unet

import sdattn.hooks.attended
from sdattn import CaptureError, CaptureWarning, TorchAttnProcessor, capture, generate
from sdattn.hooks.keep import Keep
from sdattn.hooks.observers import LARGE
from sdattn.models.layers import find_layers

PROMPT = "a red cat"
MID = "mid_block.attentions.0.transformer_blocks.0.attn2"


def run(pipe, prompt=PROMPT, **options):
    settings = {"num_inference_steps": 2, "output_type": "np", "height": 128, "width": 128}
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, **{**settings, **options}).images


def sample_and_text(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    sample = torch.randn(2, 4, 16, 24, generator=generator).to(dtype)
    return sample, torch.randn(2, 77, 32, generator=generator).to(dtype)


def record_inputs(unet):
    """(hooks, record): what each cross-attention layer was called with, pass by pass."""
    record = {layer.name: [] for layer in find_layers(unet) if layer.kind == "cross"}

    def keep(name):
        def hook(_module, args, kwargs):
            text = kwargs.get("encoder_hidden_states", args[1] if len(args) > 1 else None)
            record[name].append((args[0].detach(), text, kwargs.get("attention_mask")))

        return hook

    hooks = [
        unet.get_submodule(name).register_forward_pre_hook(keep(name), with_kwargs=True)
        for name in record
    ]
    return hooks, record


def oracle(layer, hidden, text, mask=None):
    """softmax(q k^T / sqrt(d)) in float64, ``[batch, heads, N, T]``."""
    text = text[0] if isinstance(text, tuple) else text
    q = hidden.double() @ layer.to_q.weight.double().T
    k = text.double() @ layer.to_k.weight.double().T
    d = q.shape[-1] // layer.heads
    scores = torch.stack(
        [
            q[..., h * d : (h + 1) * d] @ k[..., h * d : (h + 1) * d].mT / math.sqrt(d)
            for h in range(layer.heads)
        ],
        dim=1,
    )
    return (scores if mask is None else scores + mask.double()[:, None]).softmax(-1)


# -- law 1: looking changes nothing ---------------------------------------------------------------


class OwnProcessor:
    """A processor such as a user may write, with an argument of its own."""

    def __call__(self, attn, hidden_states, encoder_hidden_states=None, attention_mask=None,
                 temb=None, strength=1.0):  # fmt: skip
        out = AttnProcessor2_0()(attn, hidden_states, encoder_hidden_states, attention_mask, temb)
        return out * strength


def ip_adapter(unet):
    processors = {}
    for layer in find_layers(unet):
        processor = AttnProcessor2_0()
        if layer.kind == "cross":
            torch.manual_seed(len(processors))
            width = layer.module.to_q.out_features
            processor = IPAdapterAttnProcessor2_0(width, 32, num_tokens=(4,)).eval()
        processors[f"{layer.name}.processor"] = processor
    unet.set_attn_processor(processors)


def fuse(unet):
    for layer in find_layers(unet):
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


@pytest.mark.parametrize("large", [0, LARGE], ids=["kernel's logsumexp", "softmax"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("setup", SETUPS)
@torch.no_grad()
def test_looking_changes_nothing(setup, dtype, large, monkeypatch):
    monkeypatch.setattr("sdattn.hooks.observers.LARGE", large)
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


@torch.no_grad()
def test_the_kernels_logsumexp_takes_the_place_of_a_softmax(monkeypatch):
    """Also in nested captures, of which the outer one does not see the kernel itself."""
    monkeypatch.setattr("sdattn.hooks.observers.LARGE", 0)
    monkeypatch.setattr("sdattn.hooks.attended.QueryKey.probs", None)  # the softmax
    unet = make_unet()
    sample, text = sample_and_text()
    hooks, record = record_inputs(unet)
    with capture(unet, heads="all") as outer, capture(unet, heads="all", tokens=[5, 2]) as inner:
        unet(sample, 500, text)
    for hook in hooks:
        hook.remove()
    for name, [(hidden, states, _)] in record.items():
        expected = oracle(unet.get_submodule(name), hidden, states)
        for store, columns in ((outer, slice(None)), (inner, [5, 2])):
            found = store.maps[name].flatten(2, 3).double()
            torch.testing.assert_close(found, expected[..., columns], atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [make_pipeline, make_sdxl_pipeline])
def test_looking_changes_no_picture(make):
    pipe = make()
    before = run(pipe)
    with capture(pipe):
        during = run(pipe)
    assert (before == during).all()


def test_pag_pictures_do_not_change_and_its_perturbed_rows_are_left_out():
    pipe = make_pipeline(StableDiffusionPAGPipeline, pag_applied_layers=["mid"])
    before = run(pipe, pag_scale=3.0)
    hooks, record = record_inputs(pipe.unet)
    with capture(pipe, branch="both") as store:
        during = run(pipe, pag_scale=3.0)
    for hook in hooks:
        hook.remove()
    assert (before == during).all()
    for name, calls in record.items():
        layer = pipe.unet.get_submodule(name)
        probs = torch.stack([oracle(layer, hidden, text) for hidden, text, _ in calls]).mean((0, 2))
        behind = not name.startswith("down_blocks")  # there the perturbed row is another
        assert ((probs[1] - probs[2]).abs().max() > 2e-5) == behind
        found = store.maps[name].flatten(1, 2).double()
        torch.testing.assert_close(found, probs[:2], atol=1e-5, rtol=0)
    assert store.passes[0].batch == 3
    assert store.passes[0].branches == ("unconditional", "conditional")


# -- law 2: what is shown is what was used --------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 5.0])
@pytest.mark.parametrize("branch", ["conditional", "unconditional", "both"])
def test_maps_are_the_mean_softmax_of_the_branch(branch, guidance):
    pipe = make_pipeline()
    _, record = record_inputs(pipe.unet)
    options = {"guidance_scale": guidance, "num_images_per_prompt": 2, "negative_prompt": "dog"}
    if guidance == 1.0 and branch != "conditional":
        with (
            pytest.raises(CaptureError, match="no unconditional rows"),
            capture(pipe, branch=branch),
        ):
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


@pytest.mark.parametrize(("branch", "rows"), [("conditional", [0]), ("unconditional", [2])])
def test_instruct_pix2pix_has_its_prompt_in_the_first_of_three_chunks(branch, rows):
    unet = make_unet(in_channels=8)
    pipe = make_pipeline(StableDiffusionInstructPix2PixPipeline, unet=unet)
    _, record = record_inputs(unet)
    image = torch.rand(1, 3, 128, 128)
    with capture(pipe, branch=branch) as store:
        pipe(PROMPT, image=image, num_inference_steps=1, output_type="np", negative_prompt="dog")
    hidden, text, _ = record[MID][0]
    assert store.passes[0].batch == 3
    every = oracle(unet.get_submodule(MID), hidden, text).mean(1)
    assert all((every[rows] - every[i]).abs().max() > 1e-5 for i in {0, 1, 2} - set(rows))
    expected = every[rows]
    found = store.maps[MID].flatten(1, 2).double()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


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


def test_steps_heads_and_tokens_are_slices_of_everything():
    pipe = make_pipeline()
    options = {"num_inference_steps": 3}
    with capture(pipe, steps="all", heads="all") as everything:
        run(pipe, **options)
    with capture(pipe, steps=[0, 2], heads=[1], tokens=[2, 3, 0], dtype=torch.float64) as some:
        run(pipe, **options)
    with capture(pipe) as mean:
        run(pipe, **options)
    for name, full in everything.maps.items():
        assert full.shape[:2] == (1, 3)
        picked = full[:, [0, 2]][:, :, [1]][..., [2, 3, 0]]
        assert torch.equal(some.maps[name], picked.double())
        torch.testing.assert_close(mean.maps[name], full.mean((1, 2)))
    assert everything.timesteps == [667, 334, 1]
    assert len(everything.maps) == 16


@pytest.mark.parametrize("size", [(128, 128), (64, 192), (72, 136)])
def test_sizes_need_not_be_square(size):
    pipe = make_pipeline()
    height, width = size
    with capture(pipe) as store:
        run(pipe, height=height, width=width)
    rows, cols = height // 8, width // 8
    assert store.latent_size == (rows, cols)
    assert store.maps[MID].shape == (1, math.ceil(rows / 8), math.ceil(cols / 8), 77)


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


def assert_untouched(unet, before):
    after = unet.attn_processors
    assert all(after[name] is before[name] for name in before)
    assert not unet._forward_pre_hooks
    for layer in find_layers(unet):
        assert not layer.module.to_q._forward_hooks
        assert not layer.module.to_k._forward_hooks


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
    for wrong in ({"layers": "nowhere"}, {"steps": "some"}, {"tokens": []}, {"branch": "both"}):
        with pytest.raises(ValueError, match="pass|fits"), capture(tiny_unet, **wrong):
            pass
    assert_untouched(tiny_unet, before)


# -- law 4: never silently empty ------------------------------------------------------------------


def test_a_model_that_never_ran_is_an_error(tiny_pipe):
    with pytest.raises(CaptureError, match="16 layers were watched, but the model was never"):
        with capture(tiny_pipe):
            pass


def test_an_error_inside_is_not_hidden_by_the_empty_store(tiny_pipe):
    with pytest.raises(ZeroDivisionError), capture(tiny_pipe):
        1 / 0  # noqa: B018


def test_layers_that_never_ran_are_named(tiny_unet):
    class Skipping(torch.nn.Module):
        def forward(self, hidden_states, **_):
            return hidden_states

    block = tiny_unet.mid_block.attentions[0].transformer_blocks[0]
    layer, block.attn2 = block.attn2, Skipping()
    layers = find_layers(make_unet())
    assert len(layers) == 32
    block.attn2 = layer
    tiny_unet.mid_block.attentions[0].forward = lambda hidden, **_: (hidden,)
    with pytest.warns(CaptureWarning, match=f"1 of 16 watched layers never ran.*{MID}"):
        with capture(tiny_unet) as store:
            tiny_unet(torch.randn(1, 4, 16, 16), 1, torch.randn(1, 77, 32))
    assert len(store.maps) == 15
    assert f"missing    {MID}" in store.report()
    with pytest.raises(KeyError, match="No map of a layer 'mid_block"):
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


def test_a_processor_that_hides_its_attention_is_named(tiny_unet):
    class Hiding:
        def __call__(self, attn, hidden_states, **_):
            return hidden_states

    tiny_unet.set_attn_processor(Hiding())
    with pytest.raises(RuntimeError, match="processor Hiding did not call"), capture(tiny_unet):
        tiny_unet(torch.randn(1, 4, 16, 16), 1, torch.randn(1, 77, 32))


def test_two_runs_are_not_mixed(tiny_pipe):
    with pytest.raises(CaptureError, match="A second run of the pipeline"), capture(tiny_pipe):
        run(tiny_pipe)
        run(tiny_pipe)


def test_another_size_is_not_mixed_in(tiny_unet):
    with pytest.raises(CaptureError, match="now called for 2 image"), capture(tiny_unet):
        for batch in (1, 2):
            tiny_unet(torch.randn(batch, 4, 16, 16), 3 - batch, torch.randn(batch, 77, 32))


def test_a_pipeline_of_unknown_layout_is_named(tiny_pipe):
    class Odd(type(tiny_pipe).__mro__[1]):
        unet = tiny_pipe.unet

    with pytest.raises(ValueError, match="lays out guidance in its batch is not known"):
        with capture(Odd()):
            pass


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": [9]}, "head 9 of .* which has 2"),
        ({"tokens": [77]}, r"token column 77 .*\(0 to 76\)"),
    ],
)
def test_columns_and_heads_that_are_not_there(tiny_pipe, options, message):
    with pytest.raises(CaptureError, match=message), capture(tiny_pipe, **options):
        run(tiny_pipe)


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.bool, torch.complex64], ids=str)
def test_maps_of_a_dtype_that_holds_no_shares_are_refused(tiny_unet, dtype):
    with pytest.raises(ValueError, match=f"dtype={dtype}: .* floating"):
        with capture(tiny_unet, dtype=dtype):
            pass


@pytest.mark.parametrize("none", [[], (), ""])
def test_no_layers_are_not_all_layers(tiny_unet, none):
    with pytest.raises(ValueError, match="names no layer. Pass None|No attention layer fits ''"):
        with capture(tiny_unet, layers=none):
            pass


def test_integers_of_numpy_are_integers(tiny_pipe):
    """Also where run.json is written, which holds Python's own only."""
    two, side, one = np.int64(2), np.int32(64), np.uint8(1)
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
    found = generate(
        tiny_pipe, PROMPT, num_inference_steps=two, height=side, width=side,
        num_images_per_prompt=two, guidance_scale=np.float64(3),
    )  # fmt: skip
    expected = generate(
        tiny_pipe, PROMPT, num_inference_steps=2, height=64, width=64, num_images_per_prompt=2,
        guidance_scale=3.0,
    )  # fmt: skip
    json.dumps(found.info)
    assert found.info == expected.info
    maps = found.heatmaps[1]
    assert torch.equal(maps[np.int64(3)].values, expected.heatmaps[1][3].values)


@pytest.mark.parametrize("steps", [2.0, np.float64(2), "2"])
def test_steps_that_are_no_integer_are_refused_as_they_were_passed(tiny_pipe, steps):
    with pytest.raises(ValueError, match=rf"num_inference_steps={re.escape(repr(steps))}"):
        generate(tiny_pipe, PROMPT, num_inference_steps=steps)


def test_steps_that_are_not_reached_are_told(tiny_pipe):
    with pytest.warns(CaptureWarning, match=r"nothing is held of \[7\]"):
        with capture(tiny_pipe, steps=[1, 7]):
            run(tiny_pipe)


def test_resolutions_are_told_once_the_size_is_known(tiny_pipe):
    with capture(tiny_pipe, layers=4) as store:
        run(tiny_pipe, width=192)
    assert {tuple(m.shape[1:3]) for m in store.maps.values()} == {(4, 6)}
    assert len(store.maps) == 5
    with pytest.raises(ValueError, match="fits 7"), capture(tiny_pipe, layers=7):
        run(tiny_pipe)


def test_the_report_tells_what_was_seen(tiny_pipe):
    with capture(tiny_pipe) as store:
        run(tiny_pipe, num_images_per_prompt=3)
    text = store.report()
    for part in (
        "16 of 16 seen",
        "16x16, 8x8, 4x4, 2x2",
        "2, timesteps 501, 1",
        "unconditional | conditional in a batch of 6",
        "3, conditional",
    ):
        assert part in text


# -- law 5: memory is bounded ---------------------------------------------------------------------


@pytest.mark.parametrize("steps", ["mean", "all", [0, 3]])
@pytest.mark.parametrize("heads", ["mean", "all", [0]])
def test_memory_is_what_was_said_beforehand(steps, heads):
    pipe = make_pipeline()
    options = {"steps": steps, "heads": heads}
    with capture(pipe, **options) as store:
        run(pipe, num_inference_steps=4, num_images_per_prompt=2)
    layers = [layer for layer in find_layers(pipe.unet) if layer.kind == "cross"]
    said = Keep.of(**options).nbytes(layers, (16, 16), 77, images=2, passes=4)
    assert store.nbytes == store.expected_nbytes == said
    assert sum(m.numel() * m.element_size() for m in store.maps.values()) == said


def test_much_memory_is_said_before_it_is_held(monkeypatch, caplog):
    monkeypatch.setattr(sys.modules["sdattn.hooks.capture"], "MUCH", 1e6)
    pipe = make_pipeline()
    with capture(pipe) as store:
        run(pipe)
    assert not caplog.records
    pipe.unet.register_forward_hook(lambda *_: caplog.records.append(store.nbytes))
    with capture(pipe, steps="all", heads="all") as store:
        run(pipe)
    said, *held = caplog.records
    assert "will hold up to 0.0 GB by the end of this run of 2 model calls" in said.getMessage()
    assert held[1] == store.expected_nbytes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_running_sums_are_float32_whatever_the_maps_are(dtype):
    found = []
    for kept in (torch.float32, dtype):
        pipe = make_pipeline()
        with capture(pipe, dtype=kept) as store:
            run(pipe, num_inference_steps=30)
        found.append(store.maps[MID])
    assert found[1].dtype == dtype
    assert torch.equal(found[0].to(dtype), found[1])


def test_self_attention_beside_chosen_tokens_keeps_every_cell():
    pipe = make_pipeline()
    with capture(pipe, kinds=("cross", "self"), layers="mid", tokens=[1, 2]) as store:
        run(pipe)
    shapes = {name[-5:]: tuple(one.shape) for name, one in store.maps.items()}
    assert shapes == {"attn1": (1, 2, 2, 4), "attn2": (1, 2, 2, 2)}
    assert store.n_keys == 77


def test_the_default_does_not_grow_with_steps():
    held = []
    for steps in (1, 5):
        pipe = make_pipeline()
        with capture(pipe) as store:
            run(pipe, num_inference_steps=steps)
        held.append(store.nbytes)
    assert held[0] == held[1]


# -- ways of running ------------------------------------------------------------------------------


def test_guidance_that_stops_early():
    pipe = make_pipeline()

    def stop(pipeline, step, _timestep, tensors):
        if step == 0:
            pipeline._guidance_scale = 0.0
            tensors["prompt_embeds"] = tensors["prompt_embeds"].chunk(2)[1]
        return tensors

    _, record = record_inputs(pipe.unet)
    with capture(pipe, steps="all") as store:
        run(pipe, callback_on_step_end=stop, callback_on_step_end_tensor_inputs=["prompt_embeds"])
    assert [one.batch for one in store.passes] == [2, 1]
    layer = pipe.unet.get_submodule(MID)
    for step, (hidden, text, _) in enumerate(record[MID]):
        expected = oracle(layer, hidden, text)[-1:].mean(1)
        found = store.maps[MID][:, step].flatten(1, 2).double()
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_image_to_image():
    pipe = make_pipeline(StableDiffusionImg2ImgPipeline)
    image = torch.rand(1, 3, 128, 128)
    with capture(pipe) as store:
        pipe(PROMPT, image=image, strength=0.5, num_inference_steps=4, output_type="np")
    assert len(store.passes) == 2
    assert store.images == 1


def test_the_public_store_of_a_bare_unet_has_an_image_a_row(tiny_unet):
    with capture(tiny_unet) as store:
        tiny_unet(torch.randn(3, 4, 16, 16), 1, torch.randn(3, 77, 32))
    assert store.images == 3
    assert isinstance(store, sdattn.MapStore)


# -- parts of the schedule ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("steps", "passes"),
    [
        ((0.5, 1.0), [3, 4, 5]),
        ((0.0, 0.5), [0, 1, 2]),
        ((0.25, 0.75), [1, 2, 3, 4]),  # a pass stands in the middle of its part: 3/12 is in
        ((0.0, 1.0), [0, 1, 2, 3, 4, 5]),
        ((0.9, 1.0), [5]),
        ("last", [5]),
    ],
)
@pytest.mark.parametrize("heads", ["mean", "all"])
def test_a_part_of_the_schedule_is_the_mean_of_its_passes(steps, passes, heads):
    pipe = make_pipeline()
    options = {"num_inference_steps": 6, "guidance_scale": 5.0, "num_images_per_prompt": 2}
    with (
        capture(pipe, steps="all", heads=heads, kinds=("cross", "self")) as every,
        capture(pipe, steps=steps, heads=heads, kinds=("cross", "self")) as some,
    ):
        run(pipe, height=64, width=96, **options)
    assert [one.position for one in some.passes] == [(i + 0.5) / 6 for i in range(6)]
    assert list(some.maps) == list(every.maps)
    assert len(some.maps) == 32
    for name, full in every.maps.items():
        torch.testing.assert_close(some.maps[name], full[:, passes].mean(1), atol=1e-7, rtol=1e-5)
    assert (every.maps[MID][:, passes[0]] - every.maps[MID][:, 0]).abs().max() > 1e-5 or 0 in passes


@pytest.mark.parametrize("steps", [(0.5, 1.0), (0.0, 0.5), "last"])
@pytest.mark.parametrize("number", [1, 2, 5])
def test_a_part_of_the_schedule_holds_no_more_than_the_mean(steps, number):
    pipe = make_pipeline()
    with capture(pipe) as mean, capture(pipe, steps=steps) as some:
        run(pipe, num_inference_steps=number)
    layers = [layer for layer in find_layers(pipe.unet) if layer.kind == "cross"]
    said = Keep.of(steps).nbytes(layers, (16, 16), 77, passes=number)
    assert some.nbytes == some.expected_nbytes == mean.nbytes == mean.expected_nbytes == said


def test_a_run_of_one_step_keeps_it_in_either_half():
    pipe = make_pipeline()
    with (
        capture(pipe) as mean,
        capture(pipe, steps=(0.5, 1.0)) as second,
        capture(pipe, steps=(0.0, 0.5)) as first,
    ):
        run(pipe, num_inference_steps=1)
    for name, maps in mean.maps.items():
        assert torch.equal(maps, second.maps[name])
        assert torch.equal(maps, first.maps[name])
    assert second.kept_passes == 1


def test_image_to_image_begins_in_the_middle_of_the_schedule():
    pipe = make_pipeline(StableDiffusionImg2ImgPipeline)
    options = {"image": torch.rand(1, 3, 128, 128), "strength": 0.5, "num_inference_steps": 4}
    with capture(pipe) as mean, capture(pipe, steps=(0.5, 1.0)) as second:
        pipe(PROMPT, output_type="np", **options)
    assert [one.position for one in second.passes] == [5 / 8, 7 / 8]
    for name, maps in mean.maps.items():
        assert torch.equal(maps, second.maps[name])
    with pytest.raises(CaptureError, match=r"none of the 16 watched layers ran in steps \(0.0, 0."):
        with capture(pipe, steps=(0.0, 0.5)):
            pipe(PROMPT, output_type="np", **options)


def test_a_second_order_scheduler_has_two_calls_at_a_place_of_the_schedule():
    """Heun looks ahead to the next timestep, which counts as that step's own."""
    pipe = make_pipeline(scheduler=HeunDiscreteScheduler.from_config(make_scheduler().config))
    with capture(pipe, steps="all") as every, capture(pipe, steps=(0.5, 1.0)) as second:
        run(pipe, num_inference_steps=4)
    assert len(every.passes) == 7
    times = every.timesteps
    assert times == sorted(times, reverse=True)
    assert (times[1], times[3], times[5]) == (times[2], times[4], times[6])
    kept = [i for i in range(7) if second.keeps(i)]
    assert kept == [3, 4, 5, 6]  # whole pairs
    for name, full in every.maps.items():
        torch.testing.assert_close(second.maps[name], full[:, kept].mean(1), atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize(
    "steps", [(0.5, 0.5), (0.7, 0.2), (-0.1, 1.0), (0.5, 1.5), "first", (1, 1)]
)
def test_parts_that_cannot_be_are_refused(tiny_pipe, steps):
    before = tiny_pipe.unet.attn_processors
    with pytest.raises(ValueError, match=r'"last", a part of the run such as \(0.5, 1.0\)'):
        with capture(tiny_pipe, steps=steps):
            pass
    assert_untouched(tiny_pipe.unet, before)


@pytest.mark.parametrize("pair", [[0, 1], (1, 0), np.array([0, 1])], ids=str)
def test_a_pair_of_whole_numbers_is_a_pair_of_steps(tiny_pipe, pair):
    with capture(tiny_pipe, steps=pair) as store:
        run(tiny_pipe)
    assert store.maps[MID].shape[:2] == (1, 2)


@pytest.mark.parametrize("pair", [(0, 1), (np.int64(0), np.int64(1))], ids=str)
def test_what_could_be_two_calls_or_the_whole_run_is_refused(tiny_pipe, pair):
    before = tiny_pipe.unet.attn_processors
    with pytest.raises(ValueError, match=r"two ways\. Pass \[0, 1\] for .*, \(0.0, 1.0\) for the"):
        with capture(tiny_pipe, steps=pair):
            pass
    assert_untouched(tiny_pipe.unet, before)


def test_a_bare_model_has_no_schedule_to_take_a_part_of(tiny_unet):
    before = tiny_unet.attn_processors
    with pytest.raises(ValueError, match="not known of a model without its pipeline"):
        with capture(tiny_unet, steps=(0.5, 1.0)):
            pass
    assert_untouched(tiny_unet, before)
    with capture(tiny_unet, steps="last") as store:
        for timestep in (500, 3):
            tiny_unet(torch.randn(1, 4, 16, 16), timestep, torch.randn(1, 77, 32))
    assert [one.position for one in store.passes] == [None, None]


def test_the_last_call_alone_keeps_its_graph(tiny_unet):
    latents = [torch.randn(1, 4, 16, 16, requires_grad=True) for _ in range(2)]
    with capture(tiny_unet, steps="last", grad=True) as store:
        for i, one in enumerate(latents):
            tiny_unet(one, 2 - i, torch.randn(1, 77, 32))
    store.maps[MID][..., 2].sum().backward()
    assert latents[0].grad is None
    assert latents[1].grad.abs().sum() > 0


# -- the softmax over some of the keys ------------------------------------------------------------


@pytest.mark.parametrize("lists", [[[0, 1, 4]], [[0, 1, 4], [2, 76]]], ids=str)
@pytest.mark.parametrize("tokens", [None, [4, 1, 2]])
def test_the_softmax_over_some_keys_is_what_is_left_over_its_sum(lists, tokens):
    pipe = make_pipeline()
    options = {"num_images_per_prompt": 2, "guidance_scale": 5.0}
    full = {"steps": "all", "heads": "all", "kinds": ("cross", "self")}
    with (
        capture(pipe, **full) as every,
        capture(pipe, **full, among=lists, tokens=tokens) as some,
        capture(pipe, among=lists, tokens=tokens) as mean,
    ):
        run(pipe, **options)
    for name, maps in every.maps.items():
        if name.endswith("attn1"):
            assert torch.equal(some.maps[name], maps)
            continue
        expected = torch.zeros_like(maps, dtype=torch.float64)
        for image in range(2):
            columns = lists[image % len(lists)]
            kept = maps[image, ..., columns].double()
            expected[image, ..., columns] = kept / kept.sum(-1, keepdim=True)
        expected = expected[..., tokens or slice(None)]
        torch.testing.assert_close(some.maps[name].double(), expected, atol=1e-6, rtol=0)
        averaged = expected.mean((1, 2))  # of the softmaxes, not the softmax of an average
        torch.testing.assert_close(mean.maps[name].double(), averaged, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("among", "message"),
    [
        ([[0], [1], [2]], r"among has 3 list\(s\) of columns up to 2; .* has 2 image\(s\)"),
        ([[0, 77]], r"columns up to 77; .* 77 columns of text. Pass one list, or one for each"),
    ],
)
def test_keys_of_other_images_or_beyond_the_text_are_refused(tiny_pipe, among, message):
    before = tiny_pipe.unet.attn_processors
    with pytest.raises(CaptureError, match=message), capture(tiny_pipe, among=among):
        run(tiny_pipe, num_images_per_prompt=2)
    assert_untouched(tiny_pipe.unet, before)


def test_maps_are_freed_with_their_store(tiny_pipe):
    """Not some time later: a long batch would hold the maps of many."""
    gc.collect()
    gc.disable()
    try:
        with capture(tiny_pipe) as store, capture(tiny_pipe, steps="all") as other:
            run(tiny_pipe)
        gone = [weakref.ref(one) for one in (store, other)]
        del store, other
        assert [one() for one in gone] == [None, None]
    finally:
        gc.enable()


@pytest.mark.parametrize("among", [[], [[]], [[0], []], "words"])
def test_the_softmax_over_nothing_is_refused(tiny_pipe, among):
    with pytest.raises(ValueError, match="pass a list of columns, not empty, for each image"):
        with capture(tiny_pipe, among=among):
            pass


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tokens": [3, 1]},
        {"heads": "all"},
        {"heads": [1]},
        {"steps": "last"},
        {"steps": "all", "among": [[0, 2, 3]], "tokens": [2]},
        {"kinds": ("self",), "layers": ("mid",)},
    ],
)
def test_a_head_at_a_time_is_all_of_them(options, monkeypatch):
    pipe, found = make_pipeline(), []
    for most in (1, 2**40):
        monkeypatch.setattr("sdattn.hooks.attended.PART", most)
        with capture(pipe, **options) as store:
            run(pipe)
        found.append(store.maps)
    for name in found[0]:
        torch.testing.assert_close(found[0][name], found[1][name], atol=1e-6, rtol=0)


def test_a_watched_model_can_be_copied(tiny_unet):
    """The copy's layers hold copies of what they held before; the run goes on."""
    inputs = torch.randn(1, 4, 16, 16), 10, torch.randn(1, 77, 32)
    before = tiny_unet.attn_processors
    with torch.no_grad(), capture(tiny_unet) as store:
        held = copy.deepcopy(tiny_unet).attn_processors
        tiny_unet(*inputs)
    assert len(store.passes) == 1
    assert {name: type(one) for name, one in held.items()} == {
        name: type(one) for name, one in before.items()
    }
    assert not any(held[name] is before[name] for name in held)
