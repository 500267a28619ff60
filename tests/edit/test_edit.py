"""edit(): bit for bit where nothing is edited, and as asked where something is."""

import importlib
import json
from contextlib import nullcontext
from types import ModuleType

import numpy as np
import pytest
import torch
from diffusers import DDIMScheduler, HeunDiscreteScheduler, UniPCMultistepScheduler
from helpers.edit_rows import JOINT, OFF, SOURCE, TARGET, UNETS, drawn, made, opened, same
from helpers.refusals import refused_unrun
from helpers.tiers import tiered
from helpers.tiny_pipelines import (
    make_pipeline,
    make_sdxl_pipeline,
    small_pipeline,
)
from helpers.tiny_tokenizers import tiny_tokenizer
from PIL import Image

import sdattn
from sdattn.edit import (
    AttentionReplace,
    EditRun,
    LocalBlend,
    edit,
    register_attention_control,
    step_end,
)
from sdattn.edit.editing import EditOptions, plan_edit
from sdattn.errors import SdattnWarning
from sdattn.models.denoiser import find_denoiser
from sdattn.runs.folder import load_run

FAST = {"num_inference_steps": 3, "guidance_scale": 4.0}


def test_the_function_at_the_top_is_that_of_the_module():
    assert sdattn.edit_image is sdattn.edit.edit is edit
    assert importlib.import_module("sdattn.edit") is sdattn.edit
    assert isinstance(sdattn.edit, ModuleType)
    with pytest.raises(TypeError, match="target"):
        sdattn.edit_image(small_pipeline(), SOURCE)


def test_a_misspelt_option_of_its_own_is_told_with_the_right_name():
    pipe = small_pipeline()
    for wrong, right in (
        ("corss_replace_steps", "cross_replace_steps"),
        ("blendd", "blend"),
        ("guidence_scale", "guidance_scale"),
    ):
        with pytest.raises(ValueError, match=f"{wrong}.*Did you mean '{right}'"):
            sdattn.edit_image(pipe, SOURCE, "a red dog", **{wrong: 0.4})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", [*UNETS, *JOINT])
@pytest.mark.slow
def test_an_edit_of_nothing_is_bit_for_bit_the_batch_without_a_controller(name, dtype):
    pipe, options = made(name)
    pipe.to(dtype)
    off = edit(pipe, SOURCE, TARGET, **OFF, **options)
    assert same(off.images, opened(pipe, [SOURCE, TARGET], options)) == [True, True]
    twice = opened(pipe, [SOURCE, SOURCE], options)
    replaced = edit(pipe, SOURCE, SOURCE, mode="replace", **options)
    assert same(replaced.images, twice) == [True, True]
    weighted = edit(pipe, SOURCE, SOURCE, weights={"cat": 1.0, "red": 1.0}, **options)
    assert same(weighted.images, twice) == [True, True]
    assert (off.mode, replaced.mode, weighted.mode) == ("replace", "replace", "reweight")
    if dtype == torch.float32:
        exact = {**options, "output_type": "np"}
        apart = opened(pipe, [SOURCE, TARGET], exact) - drawn(pipe, [SOURCE, TARGET], exact)
        assert abs(apart).max() < 1e-4


@pytest.mark.parametrize("name", tiered([*UNETS, *JOINT], quick=5))
def test_the_source_is_left_alone_and_the_targets_are_not(name):
    pipe, options = made(name)
    before = dict(find_denoiser(pipe).model.attn_processors)
    targets = [TARGET, "a cat cat", "o red cat"]
    run = edit(pipe, SOURCE, targets, cross_replace_steps=1.0, **options)
    plain = opened(pipe, [SOURCE, *targets], options)
    assert same(run.images, plain) == [True, False, False, False]
    assert run.mode == "replace"
    assert run.words == [["a", "red", "cat"], ["dog"], ["cat"], ["o"]]
    assert len(run.heatmaps) == 4 and run.heatmaps[1].prompt.text == TARGET
    after = find_denoiser(pipe).model.attn_processors
    assert all(after[key] is before[key] for key in before)
    assert not find_denoiser(pipe).model._forward_pre_hooks


def test_words_to_blend_may_come_as_a_run_records_them():
    pipe = small_pipeline()
    once = edit(pipe, SOURCE, TARGET, blend="cat", **FAST)
    again = edit(pipe, SOURCE, TARGET, blend=once.edited.blend, **FAST)
    assert again.edited.blend == once.edited.blend == [["cat"], ["dog"]]
    assert same(again.images, once.images) == [True, True]
    other = edit(pipe, SOURCE, TARGET, blend=[["red"], ["dog"]], **FAST)
    assert other.edited.blend == [["red"], ["dog"]]


@pytest.mark.parametrize("name", ["SD", "SD3", "FLUX, distilled"])
@pytest.mark.slow
def test_blending_keeps_the_source_outside_of_the_mask(name):
    """A threshold of 1 is passed nowhere, one of 0 everywhere; also of packed latents."""
    pipe, options = made(name)
    some = {"SD": 0.95, "SD3": 0.97, "FLUX, distilled": 0.6}[name]  # which some cells pass
    length = {} if name == "SD" else {"max_sequence_length": 24}
    prompts = sdattn.read_prompts(pipe, [SOURCE, TARGET], **length)
    images = {}
    for threshold in (None, 0.0, some, 1.0):
        blend = None
        if threshold is not None:
            words = ["cat", "dog"]
            blend = LocalBlend(prompts, words, 3, start=0.0, threshold=threshold)
        control = AttentionReplace(prompts, 3, local_blend=blend, max_self_queries=24)
        ends = {"callback_on_step_end": step_end(control), "output_type": "latent"}
        with register_attention_control(pipe, control):
            images[threshold] = drawn(pipe, [SOURCE, TARGET], {**options, **ends})
    assert torch.equal(images[1.0][1], images[1.0][0])
    assert torch.equal(images[0.0], images[None])
    assert not torch.equal(images[None][1], images[None][0])
    source, target = images[some]
    kept = (source == target).all(-1 if source.ndim == 2 else 0)
    assert kept.any() and not kept.all()
    run = edit(pipe, SOURCE, TARGET, blend="cat", weights={"dog": 2.0}, **options)
    assert run.settings["blend"] == [["cat"], ["dog"]]
    assert run.settings["weights"] == {"dog": 2.0}


@pytest.mark.parametrize("kind", [UniPCMultistepScheduler, DDIMScheduler])
def test_a_scheduler_that_loses_blended_latents_is_told(kind):
    pipe = small_pipeline()
    pipe.scheduler = kind.from_config(pipe.scheduler.config)
    told = pytest.warns(SdattnWarning, match="UniPC.* in 2 of the 3 steps after a blend.*is lost")
    with told if kind is UniPCMultistepScheduler else nullcontext():
        edit(pipe, SOURCE, TARGET, blend="cat", num_inference_steps=5)
    edit(pipe, SOURCE, TARGET, num_inference_steps=5)  # blends nothing, says nothing


@pytest.mark.parametrize("name", ["SD", "FLUX, true CFG"])
def test_everything_is_put_back_when_the_run_fails(name):
    pipe, options = made(name)
    model = find_denoiser(pipe).model
    before = dict(model.attn_processors)
    calls = []

    def boom(*_):
        calls.append(1)
        if len(calls) == 3:
            raise KeyError("boom")

    hook = model.register_forward_hook(boom)
    with pytest.raises(KeyError, match="boom"):
        edit(pipe, SOURCE, TARGET, **options)
    hook.remove()
    assert all(model.attn_processors[key] is before[key] for key in before)
    assert not model._forward_pre_hooks
    first, again = (edit(pipe, SOURCE, TARGET, **options) for _ in range(2))
    assert same(first.images, again.images) == [True, True]


@pytest.mark.slow
def test_the_heatmaps_are_of_the_edited_attention():
    """With every step replaced, a target's word holds the very map of the source's."""
    run = edit(small_pipeline(), SOURCE, TARGET, cross_replace_steps=1.0, **FAST)
    source, target = run.heatmaps
    torch.testing.assert_close(target["dog"].values, source["cat"].values, atol=1e-6, rtol=1e-4)
    free = edit(small_pipeline(), SOURCE, TARGET, **OFF, **FAST)
    assert not torch.allclose(
        free.heatmaps[1]["dog"].values, free.heatmaps[0]["cat"].values, rtol=1e-3
    )


def test_weights_scale_what_is_shown():
    run = edit(
        small_pipeline(), SOURCE, SOURCE, weights={"cat": 3.0}, cross_replace_steps=1.0, **FAST
    )
    before, after = run.heatmaps
    torch.testing.assert_close(after["cat"].values, 3 * before["cat"].values, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(after["red"].values, before["red"].values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("make", "most"), [(make_pipeline, 4 * 6), (small_pipeline, 8 * 12)])
def test_self_attention_is_edited_up_to_a_quarter_of_the_latents_sides(make, most):
    """Or on the coarsest grid of a UNet with fewer levels."""
    plan = plan_edit(make(), SOURCE, TARGET, EditOptions(), {"height": 128, "width": 192})
    assert plan.control.max_self_queries == most
    options = EditOptions(max_self_queries=7)
    plan = plan_edit(make(), SOURCE, TARGET, options, {"height": 128, "width": 192})
    assert plan.control.max_self_queries == 7


@pytest.mark.slow
def test_auto_chooses_by_alignment():
    pipe = small_pipeline()
    modes = {
        TARGET: "replace",
        "a big red cat": "refine",
        "red cat a": "refine",  # shifted: word by word would pair the wrong ones
    }
    for target, mode in modes.items():
        assert edit(pipe, SOURCE, target, **FAST).mode == mode
    both = edit(pipe, SOURCE, TARGET, weights={"dog": 2.0}, **FAST)
    assert both.mode == "replace"
    mixed = edit(pipe, SOURCE, ["a red dog", "a cat"], **FAST)
    assert mixed.mode == "refine"  # since one of them has words of its own number
    assert not same(both.images, edit(pipe, SOURCE, TARGET, **FAST).images)[1]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of diffusers
def test_a_second_order_scheduler_is_counted_in_passes():
    pipe = small_pipeline()
    pipe.scheduler = HeunDiscreteScheduler.from_config(pipe.scheduler.config)
    calls = []
    pipe.unet.register_forward_pre_hook(lambda *_: calls.append(1))
    run = edit(pipe, SOURCE, TARGET, **FAST)
    assert len(calls) == 5  # 2 * 3 - 1
    assert len(run.store.timesteps) == 5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        (
            {"target": "a cat", "mode": "replace"},
            ValueError,
            "3 words, 'a cat' has 2. `mode='refine'`",
        ),
        ({"target": SOURCE}, ValueError, "nothing to edit"),
        ({"target": []}, ValueError, "at least one target"),
        ({"target": " "}, ValueError, "is empty"),
        ({"mode": "swap"}, ValueError, "reweight"),
        ({"mode": "reweight"}, ValueError, "needs a factor for a word"),
        ({"mode": "reweight", "weights": {"dog": 2.0}}, ValueError, "alone changes no words"),
        ({"weights": {"dog": float("nan")}}, ValueError, "weight of 'dog' is nan"),
        ({"weights": {"bird": 2.0}}, KeyError, "'bird'.*prompt"),
        ({"blend": ["bird"]}, KeyError, "'bird'.*prompts"),
        ({"blend": ["cat"], "num_images_per_prompt": 2}, ValueError, "num_images_per_prompt=2"),
        ({"cross_replace_steps": {"bird": 0.5}}, KeyError, "'bird'.*prompt"),
        ({"cross_replace_steps": 40}, ValueError, "part of the run"),
        ({"num_inference_steps": 1001}, ValueError, "pass 1 to 1000"),
        ({"timesteps": [1, 0]}, ValueError, "edit.*timesteps"),
        ({"self_replace_steps": (1, 2, 3)}, ValueError, "part of the run"),
        ({"self_replace_steps": "0.5"}, ValueError, "part of the run"),
        ({"latents": 0}, ValueError, "edit.*latents"),
    ],
)
def test_bad_input_is_refused_before_any_step(changes, error, message):
    pipe = small_pipeline()
    with refused_unrun(pipe, message, error):
        edit(pipe, SOURCE, **{"target": TARGET, **FAST, **changes})


@pytest.mark.slow
def test_sizes_beyond_the_stores_filter():
    """Every map has more than 32x32 queries; blending has its own, and nothing else is held."""
    pipe = make_sdxl_pipeline()
    run = edit(pipe, SOURCE, TARGET, blend="cat", height=544, width=544, num_inference_steps=2)
    assert len(run.images) == 2


@pytest.mark.slow
def test_what_is_saved(tmp_path):
    run = edit(
        small_pipeline(),
        SOURCE,
        [TARGET, "a red big cat"],
        mode="refine",
        cross_replace_steps=np.float32(0.5),
        **FAST,
    )
    assert isinstance(run, EditRun)
    [folder] = run.save(tmp_path / "edit")
    assert sorted(path.name for path in folder.iterdir()) == [
        "edit.html", "edit.png", "run.json", "source", "target-1", "target-2",
    ]  # fmt: skip
    info = json.loads((folder / "run.json").read_text())
    assert info["prompt"] == SOURCE
    assert info["targets"] == [TARGET, "a red big cat"]
    assert info["mode"] == "refine"
    assert info["seed"] == 0
    assert info["options"]["num_inference_steps"] == 3
    saved = load_run(folder / "target-1")
    assert saved.image.tobytes() == run.images[1].tobytes()
    assert saved.heatmaps.words == ("a", "red", "dog")
    with Image.open(folder / "edit.png") as sheet:
        assert sheet.width > 3 * 256
    with pytest.raises(FileExistsError):
        run.save(tmp_path / "edit")
    run.save(tmp_path / "edit", force=True)


def test_two_tokenizers_must_put_words_into_the_same_columns():
    pipe = make_sdxl_pipeline()
    words = [word.columns for word in sdattn.read_prompts(pipe, TARGET)[0].words]
    assert words == [(1,), (2,), (3,)]
    pipe.tokenizer_2 = tiny_tokenizer(merges=())
    with pytest.raises(ValueError, match=r"'a red cat'.*'red'.*\(2,\)"):
        edit(pipe, SOURCE, TARGET, **FAST)


@pytest.mark.slow
def test_a_real_image_is_the_source_of_its_edit():
    """The first row is the inversion's replay alone; a target that is the source comes back too.
    Every row begins at the noise that the inversion found."""
    pipe, begun = small_pipeline(), []
    image = Image.radial_gradient("L").resize((144, 112)).convert("RGB")
    inversion = sdattn.edit.invert(
        pipe, image, SOURCE, num_inference_steps=3, guidance_scale=2.0, inner_steps=2
    )
    hook = pipe.unet.register_forward_pre_hook(lambda _, args: begun.append(args[0].clone()))
    run = edit(pipe, SOURCE, [TARGET, SOURCE], mode="replace", inversion=inversion)
    hook.remove()
    first = pipe.scheduler.scale_model_input(inversion.noise, pipe.scheduler.timesteps[0])
    assert len(begun[0]) == 6 and all(torch.equal(row, first[0]) for row in begun[0])
    assert [made.size for made in run.images] == [(144, 112)] * 3
    with inversion.replay(pipe), register_attention_control(pipe, None):
        alone = pipe(SOURCE, output_type="pt", **inversion.options()).images[0]
    first = torch.tensor(list(run.images[0].tobytes())).view(112, 144, 3) / 255
    torch.testing.assert_close(first, alone.permute(1, 2, 0), atol=2.5 / 255, rtol=0)
    assert run.settings["reconstruction_psnr"] == sdattn.edit.psnr(inversion.image, run.images[0])
    assert same(run.images, [run.images[0]] * 3)[1] is False
    difference = sdattn.edit.psnr(run.images[0], run.images[2])
    assert difference > 40  # to the rounding of a batch
    with pytest.raises(ValueError, match="inverted.*'a red cat'.*'a dog'"):
        edit(pipe, "a dog", TARGET, inversion=inversion)
    with pytest.raises(ValueError, match="guidance_scale.*negative_prompt"):
        options = {"guidance_scale": 3.0, "negative_prompt": "dog"}
        edit(pipe, SOURCE, TARGET, inversion=inversion, **options)
