"""AttentionStore against the shapes, order and sums that prompt-to-prompt code relies on."""

import copy
import pickle

import pytest
import torch
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline

import sdattn
from sdattn import AttentionStore
from sdattn.edit import register_attention_control
from sdattn.models.denoiser import find_denoiser


def pickled(store):
    return pickle.loads(pickle.dumps(store))


def by_the_definition(unet, calls, conditional):
    """The store of the published algorithm, from recorded inputs, in float64.

    Every layer's softmax(q k^T / sqrt(d)), the rows of the conditional half, heads folded behind
    them, lists by place and kind in the order of execution, the mean over steps.
    """
    layers = {layer.name: layer for layer in find_denoiser(unet).layers}
    sums = {f"{place}_{kind}": {} for kind in ("cross", "self") for place in ("down", "mid", "up")}
    for name, hidden, text in calls:
        module = layers[name].module
        keys = hidden if text is None else text
        q = hidden.double() @ module.to_q.weight.double().T
        k = keys.double() @ module.to_k.weight.double().T
        probs = []
        for row in range(len(hidden))[conditional]:
            for head in range(module.heads):
                d = q.shape[-1] // module.heads
                part = slice(head * d, (head + 1) * d)
                scores = q[row, :, part] @ k[row, :, part].T / d**0.5
                probs.append(scores.softmax(-1))
        probs = torch.stack(probs)
        kept = sums[f"{name.split('_')[0]}_{'self' if text is None else 'cross'}"]
        kept[name] = kept.get(name, 0) + probs
    steps = len(calls) // len(layers)
    return {key: [total / steps for total in kept.values()] for key, kept in sums.items()}


@pytest.mark.parametrize("prompts", [["a cat"], ["a red cat", "a dog, a cat"]])
@pytest.mark.parametrize("scale", tiered([4.0, 1.0]))
@pytest.mark.parametrize("dtype", tiered([torch.float32, torch.bfloat16]))
@pytest.mark.slow
def test_averages_are_those_of_the_published_algorithm(prompts, scale, dtype):
    pipe = make_pipeline().to(dtype)
    calls = []
    for layer in find_denoiser(pipe.unet).layers:

        def record(_module, args, kwargs, name=layer.name):
            text = args[1] if len(args) > 1 else kwargs.get("encoder_hidden_states")
            calls.append((name, args[0], text))

        layer.module.register_forward_pre_hook(record, with_kwargs=True)
    store = AttentionStore(guidance="batch" if scale > 1 else None)
    with register_attention_control(pipe, store):
        pipe(prompts, num_inference_steps=2, guidance_scale=scale, output_type="latent")
    conditional = slice(len(prompts), None) if scale > 1 else slice(None)
    expected = by_the_definition(pipe.unet, calls, conditional)
    found = store.get_average_attention()
    assert store.cur_step == 2
    assert list(found) == list(expected)
    for key, maps in expected.items():
        assert [m.shape for m in found[key]] == [m.shape for m in maps]
        for ours, theirs in zip(found[key], maps, strict=True):
            # in bfloat16 the model's own projections and the maps are rounded to 8 bits
            exact = (
                {"atol": 1e-5, "rtol": 0}
                if dtype == torch.float32
                else {"atol": 2e-4, "rtol": 3e-2}
            )
            torch.testing.assert_close(ours.double(), theirs, **exact)


def test_sums_and_averages_over_steps():
    store = AttentionStore(guidance=None)
    store.num_att_layers = 2
    generator = torch.Generator().manual_seed(0)
    first = [torch.rand(2, 4, 3, generator=generator) for _ in range(3)]
    second = [torch.rand(2, 4, 4, generator=generator) for _ in range(3)]
    for step in range(3):
        store(first[step], True, "down")
        assert (store.cur_step, store.cur_att_layer) == (step, 1)
        assert store.step_store["down_cross"][0] is first[step]
        store(second[step], False, "up")
        assert (store.cur_step, store.cur_att_layer) == (step + 1, 0)
        assert store.step_store == store.get_empty_store()
    average = store.get_average_attention()
    torch.testing.assert_close(average["down_cross"][0], torch.stack(first).mean(0))
    torch.testing.assert_close(average["up_self"][0], torch.stack(second).mean(0))
    torch.testing.assert_close(store.attention_store["up_self"][0], torch.stack(second).sum(0))
    store.reset()
    assert (store.cur_step, store.attention_store) == (0, {})


def test_guided_batches_keep_their_second_half_as_a_view():
    store = AttentionStore()
    store.num_att_layers = 5
    attn = torch.rand(8, 4, 3)
    assert store(attn, True, "mid") is attn
    [kept] = store.step_store["mid_cross"]
    attn[4:] = 7.0  # an edit that comes later is what ends up stored
    assert kept.shape == (4, 4, 3)
    assert kept.eq(7).all()


@pytest.mark.parametrize("guidance", ["batch", "auto"])
@pytest.mark.parametrize("batch", [1, 3])
def test_an_odd_batch_has_no_halves(guidance, batch):
    """Of three rows there is no first half, whatever the number of heads."""
    store = AttentionStore(guidance=guidance)
    store.num_att_layers = 1
    attn = torch.rand(batch * 2, 4, 5)
    store.show(torch.nn.Identity(), batch, attn, True, "mid")
    [kept] = store.attention_store["mid_cross"]
    assert torch.equal(kept, attn)
    assert store.images == batch


def test_what_forward_returns_is_written_into_the_conditional_half():
    class Halve(AttentionStore):
        def forward(self, attn, is_cross, place_in_unet):
            super().forward(attn, is_cross, place_in_unet)
            return attn / 2

    store = Halve()
    store.num_att_layers = 1
    attn = torch.rand(4, 5, 3)
    before = attn.clone()
    assert store(attn, True, "up") is attn
    assert torch.equal(attn, torch.cat([before[:2], before[2:] / 2]))
    assert torch.equal(store.attention_store["up_cross"][0], before[2:] / 2)


def test_maps_over_the_limit_stay_out_of_what_editing_code_sees():
    store = AttentionStore(guidance=None, max_queries=4)
    store.num_att_layers = 3
    for n, is_cross in ((5, True), (4, True), (5, False)):
        store(torch.rand(1, n, 3), is_cross, "up")
    assert [m.shape[1] for m in store.attention_store["up_cross"]] == [4]
    assert [m.shape[1] for m in store.get_average_full_attention()["up_cross"]] == [5, 4]
    assert store.attention_store["up_self"] == []


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickled])
def test_a_copy_counts_and_sums_on_its_own(copied):
    store = AttentionStore(guidance=None)
    store.num_att_layers = 2
    for _ in range(3):
        store(torch.ones(2, 4, 3), True, "down")
    twin = copied(store)
    for _ in range(3):
        store(torch.ones(2, 4, 3), True, "down")
    assert (store.cur_step, store.cur_att_layer) == (3, 0)
    assert (twin.cur_step, twin.cur_att_layer) == (1, 1)
    assert twin.attention_store["down_cross"][0].eq(1).all()
    assert store.attention_store["down_cross"][0].eq(3).all()


def test_the_way_of_attend_and_excite_keeps_the_last_step_alive_and_the_sums_detached():
    store = AttentionStore(save_global_store=True)
    store.num_att_layers = 1
    steps = [torch.rand(2, 4, 3, requires_grad=True) for _ in range(3)]
    for leaf in steps:
        store(leaf * 2, True, "mid")
    [last] = store.get_average_attention()["mid_cross"]
    [grad] = torch.autograd.grad(last.sum(), steps[-1])
    assert grad.eq(2).all()
    [mean] = store.get_average_global_attention()["mid_cross"]
    assert not mean.requires_grad
    torch.testing.assert_close(mean, 2 * torch.stack([leaf.detach() for leaf in steps]).mean(0))
    assert store.curr_step_index == 0
    with pytest.raises(RuntimeError, match="save_global_store=True"):
        unsaved = AttentionStore()
        unsaved.cur_step = 1
        unsaved.get_average_global_attention()


def test_an_average_over_nothing_is_an_error():
    with pytest.raises(RuntimeError, match=r"step.*attach\(pipe\)"):
        AttentionStore().get_average_attention()
    with pytest.raises(ValueError, match="'auto'.*'batch'"):
        AttentionStore(guidance="half")


@pytest.mark.parametrize("kinds", ["cross", ("crosss",), ("cross", "joint"), (), [], 3])
def test_kinds_that_would_keep_nothing_are_refused(kinds):
    with pytest.raises(ValueError, match="kinds=.*'cross'.*'self'"):
        AttentionStore(kinds=kinds)


@pytest.mark.parametrize("kinds", [("cross",), ["self", "cross"], None])
def test_what_is_kept_is_of_the_kinds_that_were_asked_for(kinds):
    store = AttentionStore(guidance=None, kinds=kinds)
    store.num_att_layers = 2
    for is_cross in (True, False):
        store(torch.rand(2, 4, 3), is_cross, "mid")
    held = {key: len(maps) for key, maps in store.attention_store.items() if maps}
    assert held == {f"mid_{kind}": 1 for kind in kinds or ()}
    assert store.cur_step == 1


def test_latents_pass_through_unchanged():
    latents = torch.randn(1, 4, 2, 2)
    assert AttentionStore().step_callback(latents) is latents


def test_the_public_surface():
    assert set(sdattn.__all__) == {
        "AttentionStore", "CaptureError", "CaptureWarning", "Comparison", "Heatmap", "Heatmaps",
        "ImageRun", "Knockout", "MapStore", "NotFiniteError", "PRESETS", "Preset", "Prompt", "Run",
        "SavedRun", "SdattnError", "TorchAttnProcessor", "TorchJointProcessor",
        "TruncationWarning", "Word", "aggregate_attention", "attention", "batch", "capture",
        "diff", "edit", "edit_image", "errors", "explain", "figures", "generate",
        "heatmaps", "inspect_attention", "knockout", "load_pipeline", "load_run", "models",
        "read_pieces", "read_prompt", "read_prompts",
    }  # fmt: skip
    assert all(getattr(sdattn, name) is not None for name in sdattn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sdattn.nothing  # noqa: B018
