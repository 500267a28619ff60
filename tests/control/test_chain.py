"""The chain as people type it: set_attn_processor -> AttentionStore -> heatmaps.

What it gives is held against capture(), which watches the model's own processors, against the
formula of google/prompt-to-prompt's notebooks, and against float64.
"""

import gc
import logging
import weakref

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from helpers.chain_runs import CROSS, DOWN, UP, captured, chained, make_pipe, same_maps
from helpers.tiny_pipelines import make_sd15_unet, make_unet

import sdattn
from sdattn import AttentionStore, CaptureWarning, TorchAttnProcessor
from sdattn.models.denoiser import find_denoiser


@pytest.mark.slow
@torch.no_grad()
def test_one_pass_of_sd15_by_set_attn_processor():
    """Cross-attention only, since the self-attention of all heads is 2 GB: half of the layers
    call, and the step ends with the last of them."""
    unet = make_sd15_unet()
    inputs = torch.randn(1, 4, 64, 64), 500, torch.randn(1, 77, 768)
    plain = unet(*inputs).sample
    with sdattn.capture(unet) as maps, sdattn.capture(unet, steps="all", heads="all") as full:
        assert torch.equal(unet(*inputs).sample, plain)
    assert maps.nbytes == 26_944 * 77 * 4  # cells, columns, float32
    store = AttentionStore()
    store.attach(unet)
    ours, others = TorchAttnProcessor(store), AttnProcessor2_0()
    names = unet.attn_processors
    unet.set_attn_processor({name: ours if "attn2" in name else others for name in names})
    torch.testing.assert_close(unet(*inputs).sample, plain, atol=1e-5, rtol=0)
    shapes = {key: [tuple(m.shape) for m in held] for key, held in store.last_step.items()}
    assert shapes == {
        "down_cross": [(8, n, 77) for n in (4096, 4096, 1024, 1024, 256, 256)],
        "mid_cross": [(8, 64, 77)],
        "up_cross": [(8, n, 77) for n in [256] * 3 + [1024] * 3 + [4096] * 3],
    }
    assert (store.cur_step, store.images, store.latent_size) == (1, 1, (64, 64))
    # what capture() saw is the same, to rounding, and in the same order
    cross = [layer.name for layer in find_denoiser(unet).layers if layer.kind == "cross"]
    assert list(full.maps) == cross
    held = [one for key in shapes for one in store.last_step[key]]
    for seen, theirs in zip(full.maps.values(), held, strict=True):
        ours = seen[0, 0].flatten(1, 2)
        torch.testing.assert_close(ours.double(), theirs.double(), atol=1e-5, rtol=0)
    labels = {"cat": [2], "red dog": [4, 5]}
    for preset in ("default", "p2p", "sum"):
        expected = sdattn.heatmaps(maps, None, labels, preset=preset)
        same_maps(sdattn.heatmaps(store, None, labels, preset=preset), expected)


@pytest.mark.parametrize(
    ("prompts", "scale", "each"),
    [
        (["a red cat"], 4.0, 1),
        (["a red cat"], 1.0, 1),
        (["a red cat", "a dog, a cat"], 4.0, 1),
        (["a red cat", "a dog, a cat"], 1.0, 2),
    ],
)
@pytest.mark.slow
def test_the_chain_agrees_with_capture(prompts, scale, each):
    pipe = make_pipe()
    expected, plain = captured(pipe, prompts, scale, num_images_per_prompt=each)
    store, latents = chained(pipe, prompts, scale, num_images_per_prompt=each)
    # on the way through two steps of guidance; the unet's own output is within 1e-5 above
    torch.testing.assert_close(latents, plain, atol=1e-4, rtol=0)
    images = len(prompts) * each
    assert (store.cur_step, store.images) == (2, images)
    shapes = {key: [tuple(m.shape) for m in held] for key, held in store.last_step.items()}
    assert shapes == {
        "down_cross": [(heads * images, n, 77) for heads, n in DOWN],
        "mid_cross": [(4 * images, 6, 77)],
        "up_cross": [(heads * images, n, 77) for heads, n in UP],
    }
    same_maps(
        sdattn.heatmaps(store, pipe.tokenizer, prompts),
        sdattn.heatmaps(expected, pipe.tokenizer, prompts),
    )


@torch.no_grad()
@pytest.mark.parametrize(("batch", "kept"), [(2, 1), (3, 3)])
@pytest.mark.slow
def test_heads_are_never_halved_for_images(batch, kept):
    """The first half of an even batch is unconditional, for a store that belongs to no model."""
    unet, store = make_unet(), AttentionStore()
    inputs = torch.randn(batch, 4, 16, 12), 500, torch.randn(batch, 7, 32)
    with sdattn.capture(unet, heads="all") as maps:
        unet(*inputs)
    store.num_att_layers = 32
    places = {name: name.split("_")[0] for name in unet.attn_processors}
    unet.set_attn_processor({n: TorchAttnProcessor(store, place) for n, place in places.items()})
    unet(*inputs)
    assert store.images == kept
    if batch % 2 == 0:
        with pytest.warns(CaptureWarning, match="guessed.*guidance='batch'"):
            assert store.last_step
    expected = [one[batch - kept :].flatten(0, 1).flatten(1, 2) for one in maps.maps.values()]
    held = [m for key in CROSS for m in store.last_step[key]]
    torch.testing.assert_close(held, expected, atol=1e-6, rtol=0)


@pytest.mark.slow
def test_each_step_is_kept_on_request(kept_steps):
    _, _, store, maps = kept_steps
    assert len(store.steps) == store.cur_step == 4
    for i, step in enumerate(store.steps):
        found = [m for key in CROSS for m in step[key]]
        for ours, theirs in zip(found, maps.maps.values(), strict=True):
            seen = theirs[:, i].flatten(0, 1).flatten(1, 2)
            torch.testing.assert_close(ours, seen, atol=1e-4, rtol=0)
            assert ours.untyped_storage().nbytes() == ours.nbytes  # no view of a guided batch
    assert AttentionStore().steps == []
    # the sums, cross-attention's once for both stores, and the maps of the last step, float32;
    # self-attention of 384 queries and fewer
    cells = 2 * (sum(heads * n for heads, n in DOWN + UP) + 4 * 6)
    squares = 2 * (sum(heads * n * n for heads, n in DOWN + UP) + 4 * 6 * 6)
    steps = 4 * 4 * cells * 77
    assert sum(m.nbytes for step in store.steps for maps in step.values() for m in maps) == steps
    assert store.nbytes == steps + 4 * (squares + 2 * cells * 77)


def test_much_is_said_after_the_first_step(monkeypatch, caplog):
    pipe = make_pipe()
    monkeypatch.setattr("sdattn.control.steps.MUCH", 1e6)
    with caplog.at_level(logging.WARNING, "sdattn"):
        chained(pipe, ["a cat"], steps=3, store=AttentionStore(pipeline=pipe, keep_steps=True))
    assert [one.getMessage()[:39] for one in caplog.records] == [
        "keep_steps=True will hold 0.0 GB by the"
    ]


@pytest.mark.slow
def test_nothing_is_left_behind():
    pipe = make_pipe()
    store = AttentionStore(pipeline=pipe)
    again = AttentionStore()
    again.attach(pipe)
    again.attach(pipe)
    assert len(pipe.unet._forward_pre_hooks) == 2
    again.detach()
    assert len(pipe.unet._forward_pre_hooks) == 1
    store.latent_size = (3, 4)
    unet = weakref.ref(pipe.unet)
    gone = weakref.ref(store)
    del store
    gc.collect()
    assert gone() is None
    assert not pipe.unet._forward_pre_hooks
    del pipe
    gc.collect()
    assert unet() is None
