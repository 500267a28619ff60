"""AttentionStore against the shapes, order and sums that prompt-to-prompt code relies on."""

import pytest
import torch
from conftest import make_unet

import sdattn
from sdattn import AttentionStore, capture, torch_attn_processors
from sdattn.layers import find_layers


def make_sd15_unet():
    """SD 1.5's own configuration, which is diffusers' default, with random weights."""
    return make_unet(
        sample_size=64,
        block_out_channels=(320, 640, 1280, 1280),
        attention_head_dim=8,
        cross_attention_dim=768,
        norm_num_groups=32,
    )


@torch.no_grad()
def test_one_pass_of_sd15_gives_its_16_maps_in_order():
    unet = make_sd15_unet()
    inputs = torch.randn(1, 4, 64, 64), 500, torch.randn(1, 77, 768)
    before = unet(*inputs).sample
    with capture(unet, steps="all", heads="all") as maps:
        during = unet(*inputs).sample
    assert torch.equal(before, during)

    class CrossOnly(AttentionStore):  # the self-attention maps of one pass are 2 GB
        def forward(self, attn, is_cross, place_in_unet):
            return super().forward(attn, is_cross, place_in_unet) if is_cross else attn

    store = CrossOnly(guidance=False)
    unet.set_attn_processor(torch_attn_processors(unet, store))
    unet(*inputs)
    kept = {key: [tuple(m.shape) for m in sums] for key, sums in store.attention_store.items()}
    down = [4096, 4096, 1024, 1024, 256, 256]
    up = [256] * 3 + [1024] * 3 + [4096] * 3
    assert kept["down_cross"] == [(8, n, 77) for n in down]
    assert kept["mid_cross"] == [(8, 64, 77)]
    assert kept["up_cross"] == [(8, n, 77) for n in up]
    assert store.num_att_layers == 32
    assert store.cur_step == 1

    # what capture saw is the same, to rounding, and in the same order
    cross = [layer for layer in find_layers(unet) if layer.kind == "cross"]
    assert list(maps.maps) == [layer.name for layer in cross]
    flat = [
        m for key in ("down_cross", "mid_cross", "up_cross") for m in store.attention_store[key]
    ]
    for layer, theirs in zip(cross, flat, strict=True):
        ours = maps.maps[layer.name]
        assert ours.shape[:3] == (1, 1, 8)
        torch.testing.assert_close(
            ours[0, 0].flatten(1, 2).double(), theirs.double(), atol=1e-5, rtol=0
        )

    # the default holds 26,944 cells x 77 columns of float32
    with capture(unet) as mean:
        unet(*inputs)
        unet(*inputs)
    assert mean.nbytes == 26_944 * 77 * 4


def test_sums_and_averages_over_steps():
    store = AttentionStore(guidance=False)
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


def test_maps_over_the_limit_are_left_out():
    store = AttentionStore(guidance=False, max_queries=4)
    store.num_att_layers = 2
    store(torch.rand(1, 5, 3), True, "up")
    store(torch.rand(1, 4, 3), True, "up")
    assert [m.shape[1] for m in store.attention_store["up_cross"]] == [4]


def test_latents_pass_through_unchanged():
    latents = torch.randn(1, 4, 2, 2)
    assert AttentionStore().step_callback(latents) is latents


def test_the_public_surface():
    assert set(sdattn.__all__) == {
        "AttentionStore", "CaptureError", "CaptureWarning", "Heatmap", "Heatmaps", "MapStore",
        "Run", "TorchAttnProcessor", "TruncationWarning", "attention", "capture", "generate",
        "heatmaps", "load_pipeline", "load_run", "read_prompt", "torch_attn_processors",
    }  # fmt: skip
    assert all(getattr(sdattn, name) is not None for name in sdattn.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        sdattn.nothing  # noqa: B018
