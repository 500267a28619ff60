"""AttentionStore in transformers of joint attention, against capture() of the same run."""

import math

import pytest
import torch
from diffusers import FluxTransformer2DModel
from helpers.chain_runs import same_maps
from helpers.joint_parity import sharp_inputs, sharp_model
from helpers.reads import reads_by_call
from helpers.rows import Way
from helpers.transformer_rows import TRANSFORMERS, flux, klein, own_norms, sd3
from PIL import Image

import sdattn
from sdattn import AttentionStore, CaptureError, TorchAttnProcessor, TorchJointProcessor
from sdattn.models.denoiser import find_denoiser

NAMED = {row.name: row for row in TRANSFORMERS if row.joint}
WAYS = (Way(size=(64, 96)), Way(prompts=2, images=2, size=(64, 96)), Way(guided=False))


def sharp(row):
    pipe = row.make()
    own_norms(pipe.transformer)
    for layer in find_denoiser(pipe.transformer).layers:
        # Uneven, but not so much that rounding grows with every layer.
        for name in ("norm_q", "norm_added_q"):
            norm = getattr(layer.module, name, None)
            if norm is not None:
                norm.weight.data /= 4
        if getattr(layer.module, "norm_q", None) is None:
            layer.module.to_q.weight.data *= 4
    return pipe


def stored(pipe, **options):
    store = AttentionStore(pipeline=pipe, **options)
    pipe.transformer.set_attn_processor(TorchJointProcessor(store))
    return store


@pytest.mark.parametrize(
    ("name", "way"),
    [
        pytest.param(
            name,
            way,
            id=f"{name}-{way}",
            marks=[pytest.mark.slow] * (way != WAYS[0] and name not in ("FLUX.1", "Qwen-Image")),
        )
        for name in NAMED
        for way in WAYS
    ],
)
def test_the_stores_maps_are_those_of_a_capture(name, way):
    row = NAMED[name]
    way = row.fitted(way)
    pipe = sharp(row)
    with sdattn.capture(pipe, heads="all", steps="all") as captured:
        plain = row.run(pipe, way)
    store = stored(pipe, keep_steps=True)
    with sdattn.capture(pipe, heads="all", steps="all") as same_run:
        found = row.run(pipe, way)
    # two kernels' rounding, which sharp attention and a guided run multiply
    assert abs(plain - found).max() < 3e-4
    steps = len(captured.timesteps)
    assert store.cur_step == len(store.steps) == steps
    assert store.images == captured.images == way.total
    assert store.latent_size == captured.latent_size

    joint = captured.layers
    places = dict.fromkeys(layer.place for layer in joint)
    assert list(store.last_step) == [f"{place}_cross" for place in places]
    cells = math.prod(captured.latent_size)
    for step, kept in enumerate(store.steps):
        flat = [one for place in places for one in kept[f"{place}_cross"]]
        assert len(flat) == len(joint)
        assert min(one.std() for one in flat) > 1e-3  # a fault would be far above rounding
        for layer, ours in zip(joint, flat, strict=True):
            theirs = captured.maps[layer.name][:, step].flatten(0, 1).flatten(1, 2)
            assert ours.shape[1] == cells
            # Two runs: what the kernels round differently grows from layer to layer and step.
            torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=0)
            theirs = same_run.maps[layer.name][:, step].flatten(0, 1).flatten(1, 2)
            assert torch.equal(ours, theirs)
    # and what the image pays to itself; SD3.5 has layers that do nothing else
    own = store.get_average_attention()
    selfs = [layer for layer in find_denoiser(pipe.transformer).layers if layer.kind == "self"]
    assert sum(len(own[f"{place}_self"]) for place in places) == len(joint) + len(selfs)
    for place in places:
        pairs = zip(own[f"{place}_self"], own[f"{place}_cross"], strict=True)
        for to_image, to_text in [] if selfs else pairs:
            assert to_image.shape[1:] == (cells, cells)
            if "Kontext" not in name:  # the rest goes to the reference image
                total = to_image.sum(-1) + to_text.sum(-1)
                torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["Stable Diffusion 3", "Qwen-Image"])
def test_heatmaps_are_those_of_a_capture(name):
    row, pipe = NAMED[name], sharp(NAMED[name])
    with sdattn.capture(pipe) as captured:
        row.run(pipe, WAYS[0])
    store = stored(pipe)
    row.run(pipe, WAYS[0])
    same_maps(store.heatmaps(), captured.heatmaps(), atol=2e-5)


def test_only_what_is_asked_for_is_shown_and_kept():
    row = NAMED["FLUX.1"]
    pipe = sharp(row)
    store = stored(pipe, kinds=("cross",))
    row.run(pipe, Way(size=(64, 96)))
    assert store.num_att_layers == 4
    assert store.attention_store["double_self"] == []
    both = stored(pipe, max_queries=10)
    row.run(pipe, Way(size=(64, 96)))
    assert both.num_att_layers == 8
    assert both.attention_store["double_cross"] == both.attention_store["double_self"] == []
    assert len(both.last_step["double_cross"]) == len(both.last_step["single_cross"]) == 2


def test_another_run_and_another_size_begin_anew():
    row = NAMED["FLUX.1"]
    pipe = sharp(row)
    store = stored(pipe)
    row.run(pipe, Way(size=(64, 96)))
    first = store.last_step["double_cross"][0]
    row.run(pipe, Way(size=(96, 96)))
    assert store.cur_step == 2
    assert store.latent_size == (6, 6)
    assert first.shape[1] != store.last_step["double_cross"][0].shape[1]


@torch.no_grad()
@pytest.mark.parametrize("kind", ["SD3", "SD3.5", "FLUX.1", "FLUX.2", "Qwen-Image"])
def test_a_bare_transformer(kind):
    model = sharp_model(kind)
    given = sharp_inputs(kind, model)
    with sdattn.capture(model, heads="all") as captured:
        model(**given)
    store = AttentionStore(pipeline=model)
    model.set_attn_processor(TorchJointProcessor(store))
    model(**given)
    found = [one for key, maps in store.last_step.items() if "cross" in key for one in maps]
    for ours, theirs in zip(found, captured.maps.values(), strict=True):
        torch.testing.assert_close(ours, theirs[0].flatten(1, 2), atol=2e-5, rtol=0)
    store.reset()
    model(**sharp_inputs(kind, model, batch=2))
    with pytest.raises(CaptureError, match="half is unconditional"):
        store.last_step  # noqa: B018


@torch.no_grad()
def test_a_pass_with_skipped_layers_is_of_no_prompt():
    """SD3.5's skip-layer guidance."""
    model = sharp_model("SD3")
    given = sharp_inputs("SD3", model)
    store = AttentionStore(pipeline=model)
    model.set_attn_processor(TorchJointProcessor(store))
    model(**given)
    model(**given, skip_layers=[1])
    model(**given)
    assert store.cur_step == 2


@torch.no_grad()
def test_a_joint_layer_that_a_pass_skips_is_two_calls_less():
    model = sharp_model("FLUX.1")
    store = AttentionStore(pipeline=model)
    model.set_attn_processor(TorchJointProcessor(store))
    block = model.transformer_blocks[1]
    block.forward = lambda hidden_states, encoder_hidden_states, **_: (
        encoder_hidden_states,
        hidden_states,
    )
    model(**sharp_inputs("FLUX.1", model))
    with pytest.raises(CaptureError, match="should have 8 calls, but 6 came"):
        store.last_step  # noqa: B018


def test_layers_that_lose_the_processor_are_named():
    row = NAMED["FLUX.1"]
    pipe = sharp(row)
    store = AttentionStore(pipeline=pipe)
    row.run(pipe, Way(size=(64, 96)))
    told = r"none of the 4.*4 x FluxAttnProcessor.*transformer\.set_attn_processor.*Joint"
    with pytest.raises(CaptureError, match=told):
        store.heatmaps()


def test_passes_whose_order_the_pipeline_says_are_not_said_otherwise():
    with pytest.raises(ValueError, match="FluxPipeline.*prompt"):
        AttentionStore(pipeline=flux(), guidance="passes")


def test_a_subclass_with_a_forward_of_its_own_is_refused_by_name():
    class Mine(FluxTransformer2DModel):
        def forward(self, *args, **kwargs):
            return super().forward(*args, **kwargs)

    small = {"num_layers": 1, "num_single_layers": 0, "attention_head_dim": 16}
    small |= {"num_attention_heads": 1, "joint_attention_dim": 8, "pooled_projection_dim": 8}
    with pytest.raises(TypeError, match="Mine.*forward"):
        AttentionStore(pipeline=Mine(**small, axes_dims_rope=(4, 4, 8)))


def test_a_unets_processor_in_a_joint_layer_is_refused():
    pipe = flux()
    pipe.transformer.set_attn_processor(TorchAttnProcessor(AttentionStore(pipeline=pipe)))
    with pytest.raises(TypeError, match="joint"):
        NAMED["FLUX.1"].run(pipe, Way(size=(64, 96)))


@pytest.mark.slow
@pytest.mark.parametrize("make", [sd3, flux, klein])
def test_nothing_is_read_after_the_first_pass(make):
    pipe = make()
    options = {"num_inference_steps": 4, "height": 64, "width": 96, "output_type": "latent"}
    options |= {"max_sequence_length": 24, "prompt": "a red cat"}
    if make is klein:  # its reference images join the ids anew in every step
        options["image"] = Image.new("RGB", (64, 64), "red")
    pipe.transformer.set_attn_processor(TorchJointProcessor())
    with reads_by_call(pipe.transformer) as plain:
        pipe(**options)
    stored(pipe)
    with reads_by_call(pipe.transformer) as watched:
        pipe(**options)
    assert watched[1:] == plain[1:]
