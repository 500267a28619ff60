"""The chain as people type it: set_attn_processor -> AttentionStore -> heatmaps.

What it gives is held against capture(), which watches the model's own processors, against the
formula of google/prompt-to-prompt's notebooks, and against float64.
"""

import gc
import logging
import weakref

import numpy as np
import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0
from rows import Way
from tiny_pipelines import make_pipeline, make_sd15_unet, make_unet
from unet_rows import UNETS

import sdattn
from sdattn import AttentionStore, CaptureError, TorchAttnProcessor, aggregate_attention
from sdattn.edit import register_attention_control
from sdattn.maps.aggregation import refining
from sdattn.models.layers import find_layers

CROSS = ("down_cross", "mid_cross", "up_cross")
# 6 + 1 + 9 layers; heads and queries of make_unet() at 128x192 pixels, 16x24 cells
DOWN = [(2, 384), (2, 384), (4, 96), (4, 96), (4, 24), (4, 24)]
UP = [(4, 24)] * 3 + [(4, 96)] * 3 + [(2, 384)] * 3


def make_pipe():
    """Sharper attention than at random, so that maps which are mixed up differ."""
    pipe = make_pipeline()
    for layer in find_layers(pipe.unet):
        layer.module.to_q.weight.data *= 4
    return pipe


def run(pipe, prompts, scale=4.0, steps=2, **options):
    images = len(prompts) * options.get("num_images_per_prompt", 1)
    return pipe(
        prompts,
        height=128,
        width=192,
        num_inference_steps=steps,
        guidance_scale=scale,
        generator=[torch.Generator().manual_seed(i) for i in range(images)],
        output_type="latent",
        **options,
    ).images


def chained(pipe, *args, store=None, **options):
    store = store or AttentionStore(pipeline=pipe)
    before = pipe.unet.attn_processors
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    latents = run(pipe, *args, **options)
    pipe.unet.set_attn_processor(before)
    return store, latents


def captured(pipe, *args, capture=None, **options):
    with sdattn.capture(pipe, **(capture or {})) as store:
        latents = run(pipe, *args, **options)
    return store, latents


def same_maps(ours, theirs, atol=1e-6):
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert one.words == other.words
        torch.testing.assert_close(one.maps, other.maps, atol=atol, rtol=0)


@torch.no_grad()
def test_one_pass_of_sd15_by_set_attn_processor():
    """Cross-attention only, since the self-attention of all heads is 2 GB: half of the layers
    call, and the step ends with the last of them."""
    unet = make_sd15_unet()
    inputs = torch.randn(1, 4, 64, 64), 500, torch.randn(1, 77, 768)
    plain = unet(*inputs).sample
    with sdattn.capture(unet) as maps:
        unet(*inputs)
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
def test_the_chain_agrees_with_capture(prompts, scale, each):
    pipe = make_pipe()
    expected, plain = captured(pipe, prompts, scale, num_images_per_prompt=each)
    store, latents = chained(pipe, prompts, scale, num_images_per_prompt=each)
    # on the way through two steps of guidance; the unet's own output is within 1e-5 above
    torch.testing.assert_close(latents, plain, atol=1e-4, rtol=0)
    images = len(prompts) * each
    assert (store.cur_step, store.images, store.num_att_layers) == (2, images, 32)
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


def test_the_store_may_be_attached_after_the_processor_is_set():
    pipe = make_pipe()
    first, _ = chained(pipe, ["a cat"])
    store = AttentionStore()
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    store.attach(pipe)
    run(pipe, ["a cat"])
    for key in CROSS:
        assert all(map(torch.equal, store.last_step[key], first.last_step[key]))


@torch.no_grad()
def test_a_store_that_is_not_attached_says_what_to_type():
    unet, inputs = make_unet(), (torch.randn(1, 4, 16, 12), 500, torch.randn(1, 7, 32))
    line = r"store\.attach\(pipe\).*unet\.set_attn_processor\(sdattn\.TorchAttnProcessor\(store\)\)"
    unet.set_attn_processor(TorchAttnProcessor(AttentionStore()))
    with pytest.raises(RuntimeError, match=rf"not told which layers call it.*{line}"):
        unet(*inputs)
    elsewhere = AttentionStore(pipeline=make_unet())
    unet.set_attn_processor(TorchAttnProcessor(elsewhere))
    with pytest.raises(RuntimeError, match="not told which layers"):
        unet(*inputs)
    # places by hand, but no count of layers: the sums would never close
    store = AttentionStore()
    places = {name: name.split("_")[0] for name in unet.attn_processors}
    unet.set_attn_processor({n: TorchAttnProcessor(store, place) for n, place in places.items()})
    with pytest.raises(RuntimeError, match=rf"num_att_layers is -1.*{line}"):
        unet(*inputs)
    with pytest.raises(RuntimeError, match=rf"No step has finished.*{line}"):
        sdattn.heatmaps(store, None, {"cat": [2]}, latent_size=(16, 12))


@torch.no_grad()
@pytest.mark.parametrize(("batch", "kept"), [(1, 1), (2, 1), (3, 3), (4, 2)])
def test_heads_are_never_halved_for_images(batch, kept):
    """Without a pipeline the first half of an even batch is unconditional, and that of no other."""
    unet = make_unet()
    inputs = torch.randn(batch, 4, 16, 12), 500, torch.randn(batch, 7, 32)
    attached, by_hand = AttentionStore(pipeline=unet), AttentionStore()
    unet.set_attn_processor(TorchAttnProcessor(attached))
    unet(*inputs)
    by_hand.num_att_layers = 32
    places = {name: name.split("_")[0] for name in unet.attn_processors}
    unet.set_attn_processor({n: TorchAttnProcessor(by_hand, place) for n, place in places.items()})
    unet(*inputs)
    unet.set_attn_processor(AttnProcessor2_0())
    with sdattn.capture(unet, heads="all") as maps:
        unet(*inputs)
    expected = [one[batch - kept :].flatten(0, 1).flatten(1, 2) for one in maps.maps.values()]
    for store in (attached, by_hand):
        assert store.images == kept
        for ours, theirs in zip(
            [m for key in CROSS for m in store.last_step[key]], expected, strict=True
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["InstructPix2Pix", "image to image", "SDXL"])
def test_the_prompts_rows_are_those_of_the_pipelines_layout(name):
    """InstructPix2Pix has the prompt first of three; the second half would be something else."""
    [row] = [one for one in UNETS if one.name == name]
    pipe, way = row.make(), Way(prompts=2)
    for layer in find_layers(pipe.unet):
        layer.module.to_q.weight.data *= 4
    with sdattn.capture(pipe, heads="all") as maps:
        row.run(pipe, way)
    store = AttentionStore(pipeline=pipe)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    row.run(pipe, way)
    assert store.images == 2
    found = [m for key in CROSS for m in store.get_average_full_attention()[key]]
    for layer, ours in zip(maps.layers, found, strict=True):
        theirs = maps.maps[layer.name].flatten(0, 1).flatten(1, 2)
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)


@pytest.fixture(scope="module")
def kept():
    """A pipeline, a store that kept four steps of two images, and what capture() saw of each."""
    pipe, prompts = make_pipe(), ["a red cat", "a dog, a cat"]
    store = AttentionStore(pipeline=pipe, keep_steps=True)
    chained(pipe, prompts, steps=4, store=store)
    options = {"steps": "all", "heads": "all"}
    maps, _ = captured(pipe, prompts, steps=4, capture=options)
    return pipe, prompts, store, maps


def test_each_step_is_kept_on_request(kept):
    _, _, store, maps = kept
    assert len(store.steps) == store.cur_step == 4
    for i, step in enumerate(store.steps):
        found = [m for key in CROSS for m in step[key]]
        for ours, theirs in zip(found, maps.maps.values(), strict=True):
            seen = theirs[:, i].flatten(0, 1).flatten(1, 2)
            torch.testing.assert_close(ours, seen, atol=1e-4, rtol=0)
            assert ours.untyped_storage().nbytes() == ours.nbytes  # no view of a guided batch
    assert AttentionStore().steps == []
    # the sums and the maps of the last step, float32; self-attention of 384 queries and fewer
    cells = 2 * (sum(heads * n for heads, n in DOWN + UP) + 4 * 6)
    squares = 2 * (sum(heads * n * n for heads, n in DOWN + UP) + 4 * 6 * 6)
    steps = 4 * 4 * cells * 77
    assert sum(m.nbytes for step in store.steps for maps in step.values() for m in maps) == steps
    assert store.nbytes == steps + 4 * (squares + 3 * cells * 77)


def test_much_is_said_after_the_first_step(monkeypatch, caplog):
    pipe = make_pipe()
    monkeypatch.setattr("sdattn.hooks.attention_store.MUCH", 1e6)
    with caplog.at_level(logging.WARNING, "sdattn"):
        chained(pipe, ["a cat"], steps=3, store=AttentionStore(pipeline=pipe, keep_steps=True))
    assert [one.getMessage()[:39] for one in caplog.records] == [
        "keep_steps=True will hold 0.0 GB by the"
    ]


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [("mean", [0, 1, 2, 3]), ("last", [3]), (np.int64(1), [1]), (-1, [3]), ((0.5, 1.0), [2, 3])],
)
def test_heatmaps_of_some_steps(kept, steps, numbers):
    pipe, prompts, store, maps = kept
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


def test_heatmaps_of_what_people_hold(kept):
    pipe, prompts, store, _ = kept
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


@pytest.mark.parametrize("preset", ["default", "daam", "p2p", "attend-and-excite", "sum"])
def test_presets_read_a_store_as_they_read_a_capture(kept, preset):
    pipe, prompts, store, _ = kept
    asked = {"daam": {"heads": "all"}, "attend-and-excite": {"steps": "last"}}.get(preset, {})
    maps, _ = captured(pipe, prompts, steps=4, capture=asked)
    found = sdattn.heatmaps(store, pipe.tokenizer, prompts, preset=preset)
    expected = sdattn.heatmaps(maps, pipe.tokenizer, prompts, preset=preset)
    for one, other in zip(found, expected, strict=True):
        scale = float(other.maps.max())
        torch.testing.assert_close(one.maps, other.maps, atol=1e-4 * scale, rtol=0)


def test_refining_reads_the_stores_self_attention(kept):
    pipe, prompts, store, _ = kept
    options = {"kinds": ("cross", "self"), "layers": refining(pipe)}
    maps, _ = captured(pipe, prompts, steps=4, capture=options)
    found = sdattn.heatmaps(store, pipe.tokenizer, prompts, refine="self")
    same_maps(found, sdattn.heatmaps(maps, pipe.tokenizer, prompts, refine="self"), atol=1e-4)
    plain = sdattn.heatmaps(store, pipe.tokenizer, prompts)
    assert (found[0].maps - plain[0].maps).abs().max() > 1e-2


def test_what_maps_do_not_tell_is_refused(kept):
    pipe, prompts, store, maps = kept
    average, size = store.get_average_full_attention(), {"latent_size": (16, 24)}

    def refused(error, message, x, **options):
        with pytest.raises(error, match=message):
            sdattn.heatmaps(x, pipe.tokenizer, prompts, **options)

    refused(ValueError, r"384 queries.*latent_size=\(rows, cols\).*store\.attach", average)
    refused(ValueError, "add up to 4, so these are sums", store.full_attention_store, **size)
    refused(ValueError, "no maps of cross-attention", AttentionStore.get_empty_store(), **size)
    refused(ValueError, "no steps to choose from", average, steps="last", **size)
    refused(ValueError, "keeps 4 steps one by one, 0 to 3", store, steps=4)
    refused(ValueError, "384 queries fit no level of a 20x20", average, latent_size=(20, 20))
    refused(ValueError, r"shape \[3, 384, 77\] is not", torch.full((3, 384, 77), 1 / 77), **size)
    refused(TypeError, "not of a int", 3)
    refused(ValueError, "latent_size and steps: what capture", maps, latent_size=(1, 1), steps=1)
    refused(CaptureError, "softmax over the words alone", store, preset="ovam")
    refused(CaptureError, "the number of steps", average, preset="daam", **size)
    refused(CaptureError, "the last step", store, preset="attend-and-excite", steps="mean")
    refused(CaptureError, "self-attention of the way up", average, refine="self", **size)
    refused(CaptureError, "only: block at level 0", average["up_cross"][-1], preset="p2p", **size)
    with pytest.raises(ValueError, match=r"3 prompt\(s\) do not fit 2 image"):
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
    with pytest.raises(ValueError, match=r"an unknown number of image.*pass prompts="):
        aggregate_attention(Theirs(), *args, select)
    with pytest.raises(ValueError, match=r"Asked for cross-attention of 9x9=81 queries.*\[16, 64"):
        aggregate_attention(store, np.int64(9), ["up", "down"], True, 0)


def test_layers_have_the_levels_of_their_grids():
    """At 64x96 cells daam leaves out an eighth of the side, as it does of a capture."""
    generator = torch.Generator().manual_seed(0)

    def random(n):
        return torch.rand(2, n, 77, generator=generator).mul(9).softmax(-1)

    maps = {"down_cross": [random(96 * 64), random(48 * 32)], "up_cross": [random(12 * 8)]}
    store = AttentionStore()
    store.last_step = store.full_attention_store = maps
    store.cur_step, store.latent_size, store.images = 1, (64, 96), 1
    [found] = sdattn.heatmaps(store, None, {"cat": [2]}, preset="daam")
    fine = maps["down_cross"][0].reshape(2, 64, 96, 77)[..., 2]
    coarse = maps["down_cross"][1].reshape(1, 2, 32, 48, 77)[..., 2]
    coarse = torch.nn.functional.interpolate(coarse, size=(64, 96), mode="bicubic")
    every = torch.cat([fine, coarse[0].clamp(min=0)])  # without the 8x12 of the way up
    torch.testing.assert_close(found["cat"].values, every.mean(0), atol=1e-6, rtol=0)


def test_a_part_of_a_run_is_by_the_middles_of_its_steps(kept):
    """Of four steps the middles are 1/8, 3/8, 5/8 and 7/8 of the run."""
    pipe, prompts, store, _ = kept
    half, both = ((0.3, 0.7), [1, 2])
    found = sdattn.heatmaps(store, pipe.tokenizer, prompts, steps=half)
    each = [sdattn.heatmaps(store, pipe.tokenizer, prompts, steps=i) for i in both]
    for i, one in enumerate(found):
        mean = (each[0][i].maps + each[1][i].maps) / 2
        torch.testing.assert_close(one.maps, mean, atol=1e-6, rtol=0)


def test_aggregate_attention_where_the_picture_is_not_square(kept):
    _, _, store, maps = kept
    found = aggregate_attention(store, (8, 12), ["down", "up"], True, np.int64(1))
    level = [la.name for la in maps.layers if la.place != "mid" and la.level == 1]
    expected = torch.stack([maps.maps[name][1].double().mean((0, 1)) for name in level]).mean(0)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


def test_runs_are_not_mixed():
    pipe = make_pipe()
    store, _ = chained(pipe, ["a cat"])
    run(pipe, ["a dog"])  # its processors are gone, so the store is not called
    pipe("a dog", height=64, width=64, num_inference_steps=1, output_type="latent")
    assert store.cur_step == 2
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    run(pipe, ["a dog"], steps=3)
    fresh, _ = chained(pipe, ["a dog"], steps=3)
    assert store.cur_step == 3
    for key, maps in store.attention_store.items():
        assert all(map(torch.equal, maps, fresh.attention_store[key]))

    block = pipe.unet.up_blocks[1]
    hook = block.register_forward_pre_hook(lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    with pytest.raises(KeyboardInterrupt):
        run(pipe, ["a dog"])
    assert store.cur_att_layer == 14
    hook.remove()
    run(pipe, ["a dog"])
    assert store.cur_step == 2


@torch.no_grad()
def test_a_bare_model_that_breaks_off_or_changes_its_size_is_noticed():
    unet = make_unet()
    store = AttentionStore(pipeline=unet)
    unet.set_attn_processor(TorchAttnProcessor(store))
    text = torch.randn(1, 7, 32)
    unet(torch.randn(1, 4, 16, 12), 500, text)
    with pytest.raises(CaptureError, match=r"latent of \(16, 12\).*called with \(8, 8\)"):
        unet(torch.randn(1, 4, 8, 8), 500, text)
    store.cur_att_layer = 5
    with pytest.raises(RuntimeError, match="middle of a step: 5 layers"):
        unet(torch.randn(1, 4, 16, 12), 500, text)


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


def test_only_models_whose_places_are_known_can_be_attached():
    from transformer_rows import TRANSFORMERS

    with pytest.raises(TypeError, match="no UNet of Stable Diffusion"):
        AttentionStore(pipeline=TRANSFORMERS[0].make())
    [video] = [row for row in UNETS if row.name == "AnimateDiff"]
    with pytest.raises(TypeError, match="temporal"):
        AttentionStore().attach(video.make())

    pipe = make_pipeline()
    pipe.__class__ = type("OtherPipeline", (), {"unet": pipe.unet})
    with pytest.raises(ValueError, match=r"OtherPipeline lays out guidance.*attach\(pipe\.unet\)"):
        AttentionStore(pipeline=pipe)


def test_heatmaps_of_a_registered_store():
    """register_attention_control() tells its store the latent's size too."""
    pipe = make_pipe()
    maps, _ = captured(pipe, ["a red cat"])
    store = AttentionStore()
    with register_attention_control(pipe, store):
        run(pipe, ["a red cat"])
    assert (store.latent_size, store.levels, store.images) == ((16, 24), 4, 1)
    same_maps(
        sdattn.heatmaps(store, pipe.tokenizer, "a red cat"),
        sdattn.heatmaps(maps, pipe.tokenizer, "a red cat"),
    )
    attached = AttentionStore(pipeline=pipe)
    with register_attention_control(pipe, attached):
        run(pipe, ["a red cat"], scale=1.0)  # an attached store reads that there is no guidance
    assert attached.images == 1
