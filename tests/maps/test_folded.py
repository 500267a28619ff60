"""Maps as prompt-to-prompt code holds them, read as heatmaps."""

import numpy as np
import pytest
import torch
from helpers.chain_runs import CROSS, captured, make_pipe, same_maps
from helpers.tiers import tiered

import sdattn
from sdattn import AttentionStore, CaptureError, TorchAttnProcessor, aggregate_attention
from sdattn.maps.aggregation import refining
from sdattn.maps.presets import PRESETS


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [
        ("mean", [0, 1, 2, 3]),
        ("last", [3]),
        (np.int64(1), [1]),
        (torch.tensor(1), [1]),
        (np.array(-2), [2]),
        (-1, [3]),
        ((0.5, 1.0), [2, 3]),  # the middles of four steps are 1/8, 3/8, 5/8 and 7/8 of the run
        ((0.3, 0.7), [1, 2]),
    ],
)
def test_heatmaps_of_some_steps(kept_steps, steps, numbers):
    pipe, prompts, store, maps = kept_steps
    found = sdattn.heatmaps(store, pipe.tokenizer, prompts, preset="sum", steps=steps)
    every = [one.double()[:, numbers].mean(1).sum(1) for one in maps.maps.values()]
    for i, one in enumerate(found):
        total = 0
        for layer in every:  # [images, rows, cols, T], brought to 16x24 cells
            columns = layer[i].movedim(-1, 0)[None]
            fine = torch.nn.functional.interpolate(columns, size=(16, 24), mode="bilinear")
            total = total + fine[0].movedim(0, -1)
        expected = (total / len(every)).float()
        torch.testing.assert_close(one.maps, expected, atol=2e-4, rtol=0)


def test_heatmaps_of_what_people_hold(kept_steps):
    pipe, prompts, store, _ = kept_steps
    size = {"latent_size": (16, 24)}
    average = store.get_average_full_attention()
    expected = sdattn.heatmaps(store, pipe.tokenizer, prompts, preset="sum")
    same_maps(sdattn.heatmaps(average, pipe.tokenizer, prompts, preset="sum", **size), expected)
    every = [m for key in CROSS for m in average[key]]
    same_maps(sdattn.heatmaps(every, pipe.tokenizer, prompts, preset="sum", **size), expected)
    # one map is its own mean over heads
    one = average["up_cross"][-1]
    for i, found in enumerate(sdattn.heatmaps(one, pipe.tokenizer, prompts, **size)):
        by_hand = one.double().reshape(2, 2, 16, 24, 77)[i].mean(0)
        torch.testing.assert_close(found.maps.double(), by_hand, atol=1e-6, rtol=0)
    assert found["cat"].values.shape == (16, 24)


@pytest.mark.parametrize(
    "preset", tiered(["default", "daam", "attend-and-excite", PRESETS["sum"]], quick=2)
)
def test_both_stores_give_the_maps_of_their_layers(kept_steps, preset):
    pipe, prompts, store, _ = kept_steps
    last = preset == "attend-and-excite"
    asked = {"heads": "all", "steps": "last"} if last else {"heads": "all"}
    maps, _ = captured(pipe, prompts, steps=4, capture=asked)
    ours, theirs = store.layer_maps(preset), maps.layer_maps(preset)
    held = store.last_step if last else store.get_average_full_attention()
    expected = [one.unflatten(0, (2, -1)) for key in CROSS for one in held[key]]
    assert ours.columns == theirs.columns and ours.passes == theirs.passes == (1 if last else 4)
    found = [*ours.layers.values()], [*theirs.layers.values()]
    for one, other, by_image in zip(*found, expected, strict=True):
        assert (one.place, one.level, one.heads) == (other.place, other.level, other.heads)
        torch.testing.assert_close(one.maps, other.maps, atol=1e-5, rtol=0)
        if preset != "daam":
            by_image = by_image.double().mean(1)
        by_hand = by_image.double().unflatten(-2, one.size)
        torch.testing.assert_close(one.maps.double(), by_hand, atol=1e-6, rtol=0)


def test_layers_of_some_steps_and_of_a_store_that_is_attached_to_nothing(kept_steps):
    _, _, store, _ = kept_steps
    last = [m for key in CROSS for m in store.last_step[key]]
    chosen = store.layer_maps(steps=3).layers.values()
    for one, by_image in zip(chosen, last, strict=True):
        by_hand = by_image.unflatten(0, (2, -1)).mean(1).flatten()
        torch.testing.assert_close(one.maps.flatten(), by_hand, atol=1e-6, rtol=0)
    alone = AttentionStore(guidance=None)
    alone.num_att_layers = 1
    rows = torch.rand(4, 6, 5).softmax(-1)
    alone(rows, is_cross=True, place_in_unet="up")
    alone.images = None
    with pytest.raises(ValueError, match="images=.*attach"):
        alone.layer_maps(latent_size=(2, 3))
    [one] = alone.layer_maps(latent_size=(2, 3), images=2).layers.values()
    by_hand = alone.last_step["up_cross"][0].reshape(2, -1, 2, 3, 5).mean(1)
    torch.testing.assert_close(one.maps, by_hand)
    with pytest.raises(ValueError, match="preset='x'"):
        alone.layer_maps("x")


def test_refining_reads_the_stores_self_attention(kept_steps):
    pipe, prompts, store, _ = kept_steps
    options = {"kinds": ("cross", "self"), "layers": refining(pipe)}
    maps, _ = captured(pipe, prompts, steps=4, capture=options)
    found = sdattn.heatmaps(store, pipe.tokenizer, prompts, refine="self")
    same_maps(found, sdattn.heatmaps(maps, pipe.tokenizer, prompts, refine="self"), atol=1e-4)
    plain = sdattn.heatmaps(store, pipe.tokenizer, prompts)
    assert (found[0].maps - plain[0].maps).abs().max() > 1e-2


def test_what_maps_do_not_tell_is_refused(kept_steps):
    pipe, prompts, store, maps = kept_steps
    average, size = store.get_average_full_attention(), {"latent_size": (16, 24)}

    def refused(error, message, x, **options):
        with pytest.raises(error, match=message):
            sdattn.heatmaps(x, pipe.tokenizer, prompts, **options)

    refused(ValueError, r"384 queries.*latent_size=\(rows, cols\).*store\.attach", average)
    refused(ValueError, "add up to 4, so these are sums", store.full_attention_store, **size)
    two = {key: [2 * one for one in kept] for key, kept in average.items()}
    refused(ValueError, "add up to 2, so these are sums", two, **size)
    refused(ValueError, "no maps of cross-attention", AttentionStore.get_empty_store(), **size)
    refused(ValueError, "no steps to choose from", average, steps="last", **size)
    for steps in (4, True, torch.tensor(True), torch.tensor([1]), 0.5, [0, 1], (False, 0.5)):
        refused(ValueError, "0 to 3", store, steps=steps)
    refused(ValueError, "384 queries fit no level of a 20x20", average, latent_size=(20, 20))
    refused(ValueError, r"shape \[3, 384, 77\] is not", torch.full((3, 384, 77), 1 / 77), **size)
    refused(TypeError, "a int", 3)
    refused(
        ValueError, "latent_size and steps: maps from capture", maps, latent_size=(1, 1), steps=1
    )
    refused(CaptureError, "softmax over the words alone", store, preset="ovam")
    refused(CaptureError, "the number of steps", average, preset="daam", **size)
    refused(CaptureError, "the last step", store, preset="attend-and-excite", steps="mean")
    refused(CaptureError, "self-attention of the way up", average, refine="self", **size)
    refused(CaptureError, "only: block", average["up_cross"][-1], preset="p2p", **size)
    with pytest.raises(ValueError, match="3 prompt.*2 image"):
        sdattn.heatmaps(store, pipe.tokenizer, ["a cat"] * 3)


def by_the_notebook(maps, res, from_where, is_cross, select, prompts):
    """aggregate_attention of google/prompt-to-prompt's notebooks, from its description: of the maps
    of res x res queries, the mean over all layers and heads."""
    chosen = []
    for place in from_where:
        for one in maps[f"{place}_{'cross' if is_cross else 'self'}"]:
            if one.shape[1] == res**2:
                chosen += [one.reshape(prompts, -1, res, res, one.shape[-1])[select]]
    return torch.cat(chosen, 0).sum(0) / sum(map(len, chosen))


@pytest.mark.parametrize("prompts", [1, 2])
def test_aggregate_attention_is_that_of_the_notebooks(prompts):
    pipe = make_pipe()
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    pipe(["a cat"] * prompts, num_inference_steps=2, output_type="latent", height=128, width=128)
    average = store.get_average_attention()
    for args in ((8, ["up", "down"], True), (4, ["up"], False), (2, ["mid"], True)):
        for select in range(prompts):
            found = aggregate_attention(store, *args, select)
            assert torch.equal(found, by_the_notebook(average, *args, select, prompts))

    class Theirs:  # a store that knows of no number of images
        def get_average_attention(self):
            return average

    assert torch.equal(aggregate_attention(Theirs(), *args, select, prompts=prompts), found)
    with pytest.raises(ValueError, match="prompts="):
        aggregate_attention(Theirs(), *args, select)
    with pytest.raises(ValueError, match=r"9x9=81.*\[16, 64"):
        aggregate_attention(store, np.int64(9), ["up", "down"], True, 0)


def test_layers_have_the_levels_of_their_grids():
    """At 64x96 cells daam leaves out an eighth of the side, as it does of a capture."""
    generator = torch.Generator().manual_seed(0)

    def random(n):
        return torch.rand(2, n, 77, generator=generator).mul(9).softmax(-1)

    maps = {"down_cross": [random(96 * 64), random(48 * 32)], "up_cross": [random(12 * 8)]}
    store = AttentionStore(guidance=None)
    store.num_att_layers = 3
    for place in ("down", "up"):
        for layer in maps[f"{place}_cross"]:
            store(layer, True, place)
    store.latent_size, store.images = (64, 96), 1
    [found] = sdattn.heatmaps(store, None, {"cat": [2]}, preset="daam")
    fine = maps["down_cross"][0].reshape(2, 64, 96, 77)[..., 2]
    coarse = maps["down_cross"][1].reshape(1, 2, 32, 48, 77)[..., 2]
    coarse = torch.nn.functional.interpolate(coarse, size=(64, 96), mode="bicubic")
    every = torch.cat([fine, coarse[0].clamp(min=0)])  # without the 8x12 of the way up
    torch.testing.assert_close(found["cat"].values, every.mean(0), atol=1e-6, rtol=0)


def test_aggregate_attention_where_the_image_is_not_square(kept_steps):
    _, _, store, maps = kept_steps
    found = aggregate_attention(store, (8, 12), ["down", "up"], True, np.int64(1))
    level = [la.name for la in maps.layers if la.place != "mid" and la.level == 1]
    expected = torch.stack([maps.maps[name][1].double().mean((0, 1)) for name in level]).mean(0)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)
