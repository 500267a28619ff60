"""Runs under diffusers' caches, which leave layers out in some steps, and images in errors."""

import warnings
from dataclasses import replace

import numpy as np
import pytest
import torch
from diffusers import FirstBlockCacheConfig
from helpers.newer import newer
from helpers.refusals import refused_unrun
from helpers.transformer_rows import flux, pixart, qwen_image

from sdattn import CaptureError, CaptureWarning, capture, generate, knockout
from sdattn.maps.presets import PRESETS
from sdattn.models.denoiser import find_denoiser

PROMPT = "a red cat"
LAST_QUARTER = replace(PRESETS["columns"], steps=(0.75, 1.0))
SMALL = {"height": 64, "width": 64}


def taylor(steps):
    return newer("TaylorSeerCacheConfig")(taylor_factors_dtype=torch.float32)


def mag(steps):
    ratios = {"mag_ratios": [1.0] * steps, "threshold": 10.0, "max_skip_steps": 5}
    return newer("MagCacheConfig")(num_inference_steps=steps, **ratios)


def first_block(steps):
    return FirstBlockCacheConfig(threshold=100.0)


def drawn(pipe, **options):
    pipe.set_progress_bar_config(disable=True)
    return pipe(PROMPT, generator=torch.Generator().manual_seed(0), **SMALL, **options).images[0]


def steps_that_ran(pipe, **options):
    """The steps, counted from 0, in which each layer ran, by hooks of our own."""
    calls = []
    ran = {}
    hooks = [pipe.transformer.register_forward_pre_hook(lambda *_: calls.append(len(calls)))]
    for layer in find_denoiser(pipe).layers:
        ran[layer.name] = []
        note = lambda *_, name=layer.name: ran[name].append(calls[-1])  # noqa: E731
        hooks.append(layer.module.to_q.register_forward_pre_hook(note))  # within the cache's hook
    image = drawn(pipe, **options)
    for hook in hooks:
        hook.remove()
    return ran, image


@pytest.mark.parametrize(
    ("make", "cache", "steps"),
    [
        (flux, taylor, 4),
        (flux, taylor, 8),
        (flux, mag, 4),
        (flux, first_block, 4),
        (qwen_image, taylor, 8),
        (qwen_image, mag, 4),
    ],
)
def test_a_short_run_has_maps_of_the_last_steps_that_ran(make, cache, steps):
    pipe = make()
    pipe.transformer.enable_cache(cache(steps))
    options = {"num_inference_steps": steps}
    ran, image = steps_that_ran(pipe, **options)
    early = {}  # of each layer the last step before the preset's
    for name, numbers in ran.items():
        early[name] = max(number for number in numbers if number < 0.75 * steps)
    assert any(numbers[-1] == early[name] for name, numbers in ran.items())  # and none after
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CaptureWarning)  # a cache is enabled, it says
        with capture(pipe, steps="all") as store:
            drawn(pipe, **options)
    said = " and ".join(str(number + 1) for number in sorted({*early.values()}))
    with pytest.warns(CaptureWarning, match=rf"left out .*ran: {said} of {steps}\.") as heard:
        run = generate(pipe, PROMPT, preset=LAST_QUARTER, **SMALL, **options)
    assert len(heard) == 1
    assert np.array_equal(np.asarray(run.image), np.asarray(image))
    assert {*run.store.maps} == {*ran}
    for name, maps in run.store.maps.items():
        place = ran[name].index(early[name])
        torch.testing.assert_close(maps, store.maps[name][:, place], atol=1e-6, rtol=0)
    assert float(run[0].heatmaps["cat"].values.sum()) > 0


def test_a_longer_run_reads_the_steps_that_it_always_read():
    pipe = flux()
    pipe.transformer.enable_cache(mag(8))
    with pytest.warns(CaptureWarning, match="did not run once in each"):
        run = generate(pipe, PROMPT, preset=LAST_QUARTER, num_inference_steps=8, **SMALL)
    assert {numbers for numbers in run.store.seen.values()} == {(7,)}


def test_all_texts_are_of_the_steps_that_ran():
    pipe = flux()
    pipe.transformer.enable_cache(taylor(4))
    options = {"ask": "a dog", "spots": True, "num_inference_steps": 4, **SMALL}
    with pytest.warns(CaptureWarning, match="ran: 3 of 4"):
        run = generate(pipe, PROMPT, **options)
    assert [*run[0].more] == ["asked"] and run[0].details.spots is not None
    assert {numbers for numbers in run.store.seen.values()} == {(2,)}


# -- FasterCache ----------------------------------------------------------------------------------


def faster_cached(skip=2):
    """A pipeline whose model runs on the prompt's row alone in all steps but every ``skip``-th."""
    pipe = pixart()
    config = newer("FasterCacheConfig")(
        spatial_attention_block_skip_range=2,
        spatial_attention_timestep_skip_range=(-1, 1001),
        unconditional_batch_skip_range=skip,
        unconditional_batch_timestep_skip_range=(-1, 1001),
        attention_weight_callback=lambda _: 0.3,
        current_timestep_callback=lambda: 500,
        tensor_format="BCHW",
    )
    newer("apply_faster_cache")(pipe.transformer, config)
    return pipe


def probabilities(pipe, prompts, **options):
    """The prompts' attention in each step and layer, float64, from query and key."""
    found = {}
    hooks = []
    for layer in find_denoiser(pipe).layers:
        if layer.kind == "cross":
            kept = found[layer.name] = []
            hooks += _noting(layer.module, kept)
    pipe(prompts, generator=torch.Generator().manual_seed(0), **SMALL, **options)
    for hook in hooks:
        hook.remove()
    return found


def _noting(attn, kept):
    held = {}

    def query(module, args, output):
        held["q"] = output.double()

    def key(module, args, output):
        heads = [one.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for one in (held["q"], output)]
        scores = heads[0] @ heads[1].double().transpose(-1, -2) * attn.scale
        held["scores"] = scores

    def whole(module, args, kwargs, output):
        mask = kwargs.get("attention_mask")
        scores = held["scores"]
        if mask is not None:
            scores = scores + mask.double().unflatten(0, (-1, 1))
        kept.append(scores.softmax(-1).mean(1))  # [rows, queries, tokens]

    yield attn.to_q.register_forward_hook(query)
    yield attn.to_k.register_forward_hook(key)
    yield attn.register_forward_hook(whole, with_kwargs=True)


GUIDED = {"num_inference_steps": 4, "guidance_scale": 4.0, "use_resolution_binning": False}


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
@pytest.mark.parametrize("prompts", [PROMPT, [PROMPT, "a dog"]])
def test_rows_that_a_cache_runs_alone_are_the_prompts(prompts):
    pipe = faster_cached()
    images = 1 if isinstance(prompts, str) else 2
    expected = probabilities(pipe, prompts, **GUIDED)
    rows = {len(one) for kept in expected.values() for one in kept}
    assert rows == {images, 2 * images}
    pipe = faster_cached()  # the cache of a model that has no reset of its own
    with capture(pipe, steps="all") as store:
        pipe(prompts, generator=torch.Generator().manual_seed(0), **SMALL, **GUIDED)
    for name, maps in store.maps.items():
        assert maps.shape[:2] == (images, 4)
        for number, probs in enumerate(expected[name]):
            wanted = probs[-images:].float()  # the second half, where there are two
            torch.testing.assert_close(maps[:, number].flatten(1, 2), wanted, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:torch.meshgrid")
def test_the_negative_prompt_has_maps_of_the_steps_that_it_ran_in():
    pipe = faster_cached()
    with pytest.warns(CaptureWarning, match="did not run once in each of 4 steps"):
        with capture(pipe, steps="all", branch="unconditional") as store:
            pipe(PROMPT, negative_prompt="a dog", **SMALL, **GUIDED)
    assert {numbers for numbers in store.seen.values()} == {(0, 2)}
    options = {"capture_options": {"branch": "both"}, "negative_prompt": "a dog"}
    with pytest.warns(CaptureWarning, match="did not run once"):
        run = generate(pipe, PROMPT, **options, **SMALL, **GUIDED)
    assert [*run[0].more] == ["negative"]


def test_no_word_is_removed_from_rows_that_are_others_in_some_steps():
    pipe = faster_cached()
    with refused_unrun(pipe, "FasterCache.*disable_cache", TypeError):
        knockout(pipe, PROMPT, "cat", **SMALL)


# -- images in errors -----------------------------------------------------------------------------


def test_layers_that_nothing_explains_leave_the_images(monkeypatch):
    """A cache that nobody knows: blocks that answer what they answered in the first step."""
    monkeypatch.setattr("sdattn.runs.preparing.SMALL", 0)  # or each step would be kept
    pipe = flux()
    layers = find_denoiser(pipe).layers
    for layer in layers:
        _remember(layer.module)
    with pytest.raises(CaptureError, match="none of the 2 watched layers") as raised:
        generate(pipe, PROMPT, num_inference_steps=4, **SMALL)
    [image] = raised.value.images
    assert image.size == (64, 64)


def _remember(module):
    usual = module.forward
    answers = []

    def forward(*args, **kwargs):
        if not answers:
            answers.append(usual(*args, **kwargs))
        return answers[0]

    module.forward = forward
