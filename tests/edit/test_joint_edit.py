"""edit() of models with joint attention: tiny ones of each family, and the demo's MM-DiT."""

import numpy as np
import pytest
import torch
from diffusers import (
    FlowMatchHeunDiscreteScheduler,
    FluxImg2ImgPipeline,
    PixArtSigmaPipeline,
    StableDiffusionImg2ImgPipeline,
)
from helpers.edit_rows import IN_TURN, JOINT, SOURCE, TARGET, drawn, layers_of, made, same
from helpers.refusals import refused_unrun
from helpers.tiers import tiered
from helpers.tiny_pipelines import small_pipeline
from helpers.transformer_rows import flux, pixart
from PIL import Image

import sdattn
from sdattn import TorchJointProcessor
from sdattn.control.registration import register_attention_control
from sdattn.edit import edit
from sdattn.models import Edits
from sdattn.models.denoiser import find_denoiser
from sdattn.models.denoiser_call import innermost
from sdattn.models.facts import is_guided, model_passes
from sdattn.models.families import edits_of
from sdattn.models.layers import AttentionLayer
from sdattn.runs.folder import load_run

WHOLE = {"cross_replace_steps": 1.0, "self_replace_steps": 1.0}


@pytest.mark.parametrize("name", ["SD3", "FLUX, true CFG"])
@pytest.mark.slow
def test_a_capture_around_an_edit_leaves_its_bits(name):
    pipe, options = made(name)
    before = dict(pipe.transformer.attn_processors)
    alone = edit(pipe, SOURCE, TARGET, **options)
    with sdattn.capture(pipe) as store, pytest.warns(UserWarning, match="replaced inside capture"):
        watched = edit(pipe, SOURCE, TARGET, **options)
    assert same(watched.images, alone.images) == [True, True]
    assert len(store.maps) == len(find_denoiser(pipe.transformer).layers)
    after = pipe.transformer.attn_processors
    assert all(after[key] is before[key] for key in before)


@pytest.mark.parametrize("name", tiered(JOINT, quick=2))
def test_layers_of_the_familys_depth_take_the_sources_attention_and_no_others(name):
    """The image's rows of both prompts, in each call but a layer's first."""
    pipe, options = made(name)
    named, seen = layers_of(pipe), {}

    def watch(name):
        def look(module, args, kwargs, output):
            processor = innermost(module.processor)  # below a capture's observer
            if isinstance(processor, TorchJointProcessor) and not processor.watchers:
                processor.watchers.append(seen.setdefault(name, []).append)

        return look

    hooks = [
        layer.module.register_forward_hook(watch(layer.name), with_kwargs=True)
        for layer in find_denoiser(pipe.transformer).layers
    ]
    edit(pipe, SOURCE, TARGET, **WHOLE, **options)
    for hook in hooks:
        hook.remove()
    assert set(seen) == set(named)
    for calls in seen.values():
        # with guidance in turn every second pass is of the negative prompt, and is not edited
        step = 2 if name in IN_TURN else 1
        assert len(calls) == 3 * step - 1
        for call in calls[step - 1 :: step]:
            source, target = call.probs[-2], call.probs[-1]
            rows = slice(0, 24) if "SD3" in name else slice(-24, None)
            torch.testing.assert_close(target[:, rows], source[:, rows], atol=1e-5, rtol=0)


def test_a_shift_that_depends_on_the_size_and_second_order_steps_are_counted():
    pipe, options = made("FLUX, distilled", use_dynamic_shifting=True)
    assert model_passes(pipe, options) == 3
    assert not is_guided(pipe, options)
    edit(pipe, SOURCE, TARGET, **options)
    pipe, options = made("SD3")
    pipe.scheduler = FlowMatchHeunDiscreteScheduler()
    assert model_passes(pipe, options) == 5  # 2 * 3 - 1
    assert is_guided(pipe, options)
    edit(pipe, SOURCE, TARGET, **options)


@pytest.mark.parametrize(
    "make",
    [
        lambda: flux(FluxImg2ImgPipeline),
        lambda: pixart(PixArtSigmaPipeline),
        lambda: small_pipeline(StableDiffusionImg2ImgPipeline),
    ],
)
def test_pipelines_without_a_record_are_refused_by_name(make):
    pipe = make()
    message = f"needs a .*StableDiffusion3Pipeline.*; found a {type(pipe).__name__}"
    with refused_unrun(pipe, message, TypeError):
        edit(pipe, SOURCE, TARGET)


@pytest.mark.slow
def test_an_image_inverted_by_the_flow_is_the_source_of_its_edit():
    pipe, _ = made("SD3 without guidance")
    image = Image.radial_gradient("L").resize((96, 64)).convert("RGB")
    inversion = sdattn.edit.invert(
        pipe, image, SOURCE, num_inference_steps=3, max_sequence_length=24
    )
    run = edit(pipe, SOURCE, TARGET, inversion=inversion)
    with inversion.replay(pipe), register_attention_control(pipe, None, layers=layers_of(pipe)):
        alone = pipe(SOURCE, **inversion.options()).images[0]
    assert run.settings["reconstruction_psnr"] == sdattn.edit.psnr(inversion.image, run.images[0])
    # the batch rounds otherwise: at most one level of 255
    difference = np.subtract(np.asarray(run.images[0], int), np.asarray(alone, int))
    assert abs(difference).max() <= 1
    assert not same(run.images, [run.images[0]] * 2)[1]
    with pytest.raises(TypeError, match="found a FluxPipeline"):
        sdattn.edit.invert(flux(), image, SOURCE)


def test_layers_that_call_a_controller_can_be_chosen():
    pipe, options = made("SD3")
    everything = find_denoiser(pipe.transformer).layers
    calls = []

    def control(attn, is_cross, place):
        calls.append(is_cross)

    before = [layer.module.processor for layer in everything]
    with register_attention_control(pipe, control, layers=everything[1].name):
        kept = [la.module.processor is one for la, one in zip(everything, before, strict=True)]
        assert kept == [True, False, True]
        drawn(pipe, [SOURCE], options)
    assert calls == [False, True] * 3
    handle = register_attention_control(pipe, control, layers=everything[1].name)
    with register_attention_control(pipe, control, layers=everything[0].name):
        assert everything[1].module.processor is before[1]  # the one before made room
        drawn(pipe, [SOURCE], options)
    handle.remove()
    with pytest.raises(ValueError, match="layer.*'nothing'"):
        register_attention_control(pipe, control, layers="nothing")


@pytest.mark.slow
def test_the_demo_changes_what_is_named_and_keeps_the_other(tmp_path):
    pipe = sdattn.load_pipeline("demo-mmdit", device="cpu")
    pipe.set_progress_bar_config(disable=True)
    source, target = "a red circle left of a blue square", "a red circle left of a blue star"
    run = edit(pipe, source, target, seed=1)
    from demos.scene_checker import find_objects

    found = [{(one.colour, one.shape) for one in find_objects(image)} for image in run.images]
    assert found[0] == {("red", "circle"), ("blue", "square")}
    assert found[1] == {("red", "circle"), ("blue", "star")}
    [folder] = run.save(tmp_path / "edit")
    assert (folder / "edit.html").stat().st_size > 10_000
    saved = load_run(folder / "target")
    assert saved.image.tobytes() == run.images[1].tobytes()
    assert saved.info["options"]["max_sequence_length"] == 8
    assert saved.info["edited"]["cross_replace_steps"] == edits_of(pipe).cross


@pytest.mark.parametrize(
    ("depth", "number", "expected"),
    [
        ((0.5, 1.0), 6, [3, 4, 5]),
        ((0.0, 0.5), 6, [0, 1, 2]),
        ((0.5, 1.0), 3, [1, 2]),  # the middle of the one in the very middle lies in both halves
        ((0.2, 0.8), 5, [1, 2, 3]),
        ((0.0, 1.0), 4, [0, 1, 2, 3]),
    ],
)
def test_the_layers_of_a_part_of_the_depth(depth, number, expected):
    layers = [AttentionLayer(str(i), "double", "joint", 0, 2, None) for i in range(number)]
    assert Edits(pipelines=(), depth=depth).layers(layers) == [str(i) for i in expected]
