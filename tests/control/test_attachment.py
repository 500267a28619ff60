"""The tie between a store and the model whose layers call it."""

import pytest
import torch
from helpers.chain_runs import CROSS, chained, make_pipe, run
from helpers.rows import Way
from helpers.tiers import tiered
from helpers.tiny_pipelines import make_pipeline, make_unet, small_pipeline
from helpers.unet_rows import UNETS

import sdattn
from sdattn import AttentionStore, CaptureError, TorchAttnProcessor
from sdattn.models.layers import find_layers


@pytest.mark.slow
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
@pytest.mark.slow
def test_a_store_that_is_not_attached_says_what_to_type_when_it_is_read():
    unet, inputs = make_unet(), (torch.randn(1, 4, 16, 12), 500, torch.randn(1, 7, 32))
    line = r"store\.attach\(pipe\).*unet\.set_attn_processor\(sdattn\.TorchAttnProcessor\(store\)\)"
    alone, elsewhere, by_place = AttentionStore(), AttentionStore(pipeline=make_unet()), None
    by_place = AttentionStore()
    places = {name: name.split("_")[0] for name in unet.attn_processors}
    chosen = {n: TorchAttnProcessor(by_place, place) for n, place in places.items()}
    for store, processors in (
        (alone, TorchAttnProcessor(alone)),
        (elsewhere, TorchAttnProcessor(elsewhere)),
        (by_place, chosen),
    ):
        unet.set_attn_processor(processors)
        unet(*inputs)
        with pytest.raises(RuntimeError, match=line):
            store.get_average_attention()
        with pytest.raises(RuntimeError, match=line):
            store.last_step  # noqa: B018
        with pytest.raises(RuntimeError, match=line):
            sdattn.heatmaps(store, None, {"cat": [2]}, latent_size=(16, 12))
    assert [len(by_place.step_store[key]) for key in CROSS] == [6, 1, 9]


@pytest.mark.parametrize("name", ["InstructPix2Pix", "image to image", "SDXL"])
@pytest.mark.slow
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


@pytest.mark.slow
def test_runs_are_not_mixed():
    pipe = make_pipe()
    store, _ = chained(pipe, ["a cat"])
    run(pipe, ["a dog"])  # it was let go, so the store is not called
    pipe("a dog", height=64, width=64, num_inference_steps=1, output_type="latent")
    assert store.cur_step == 2
    store.attach(pipe)
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


def test_processors_that_are_set_inside_a_run_missed_its_beginning():
    pipe = small_pipeline()
    store = AttentionStore(pipeline=pipe)

    def late(pipe, step, _t, tensors):
        if step == 0:
            pipe.unet.set_attn_processor(TorchAttnProcessor(store))
        return tensors

    options = {"height": 64, "width": 64, "num_inference_steps": 3, "output_type": "latent"}
    pipe("a cat", callback_on_step_end=late, **options)
    assert store.cur_step == 2
    with pytest.raises(CaptureError, match="none of the 8 layers called it in 1 of 3 passes"):
        store.heatmaps()
    pipe("a cat", **options)
    assert store.cur_step == 3 and store.heatmaps()


@torch.no_grad()
def test_a_bare_model_that_changes_its_size_is_told_and_one_that_broke_off_is_not_counted():
    unet = make_unet()
    store = AttentionStore(pipeline=unet)
    unet.set_attn_processor(TorchAttnProcessor(store))
    text = torch.randn(1, 7, 32)
    unet(torch.randn(1, 4, 16, 12), 500, text)
    unet(torch.randn(1, 4, 8, 8), 500, text)
    with pytest.raises(CaptureError, match=r"\(16, 12\).*\(8, 8\).*reset"):
        store.last_step  # noqa: B018
    store.reset()
    hook = unet.up_blocks[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        unet(torch.randn(1, 4, 16, 12), 500, text)
    hook.remove()
    assert (store.cur_step, store.cur_att_layer) == (0, 14)
    unet(torch.randn(1, 4, 16, 12), 500, text)
    assert [len(store.last_step[key]) for key in CROSS] == [6, 1, 9]
    assert (store.cur_step, store.cur_att_layer) == (1, 0)


@torch.no_grad()
@pytest.mark.parametrize("target", ["unet", "pipeline"])
@pytest.mark.parametrize("batch", tiered([2, 4], quick=2))
@pytest.mark.slow
def test_outside_of_a_pipelines_call_half_of_a_batch_is_not_dropped_unasked(target, batch):
    pipe = make_pipe()
    unet = pipe.unet
    inputs = torch.randn(batch, 4, 16, 12), 500, torch.randn(batch, 7, 32)

    def attached(**options):
        store = AttentionStore(pipeline=unet if target == "unet" else pipe, **options)
        unet.set_attn_processor(TorchAttnProcessor(store))
        return store

    with sdattn.capture(unet, heads="all") as maps:
        unet(*inputs)
    store = attached()
    unet(*inputs)
    told = rf"batch of {batch} outside of its pipeline.*guidance=None \(every row is an image\)"
    for read in (lambda: store.last_step, store.get_average_attention, store.heatmaps):
        with pytest.raises(CaptureError, match=told):
            read()
    store.detach()
    for guidance, kept in ((None, batch), ("batch", batch // 2)):
        store = attached(guidance=guidance)
        unet(*inputs)
        store.detach()
        assert store.images == kept
        every = [m for key in CROSS for m in store.last_step[key]]
        for layer, found in zip(maps.layers, every, strict=True):
            expected = maps.maps[layer.name][-kept:].flatten(0, 1).flatten(1, 2)
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_only_models_whose_places_are_known_can_be_attached():
    from helpers.transformer_rows import TRANSFORMERS

    with pytest.raises(TypeError, match="UNet.*Stable Diffusion"):
        AttentionStore(pipeline=TRANSFORMERS[-1].make())
    [video] = [row for row in UNETS if row.name == "AnimateDiff"]
    with pytest.raises(TypeError, match="temporal"):
        AttentionStore().attach(video.make())

    pipe = make_pipeline()
    pipe.__class__ = type("OtherPipeline", (), {"unet": pipe.unet})
    told = r"OtherPipeline lays out guidance.*attach\(pipe\.unet\).*guidance='batch'"
    with pytest.raises(ValueError, match=told):
        AttentionStore(pipeline=pipe)
