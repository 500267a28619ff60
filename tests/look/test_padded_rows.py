"""Pipelines that fill up each text in a way of their own: rows of unlike lengths, guidance that
ends early, and what is refused."""

import math

import pytest
import torch
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    FlowMatchLCMScheduler,
    ZImageImg2ImgPipeline,
    ZImageInpaintPipeline,
    ZImagePipeline,
)
from helpers.padded_rows import LONG, lumina2, z_image
from helpers.tiers import tiered

import sdattn
from sdattn import CaptureError, CaptureWarning, capture

SIZE = {"height": 64, "width": 80, "num_inference_steps": 2, "output_type": "latent"}
UNGUIDED = {lumina2: {"guidance_scale": 1.0, "system_prompt": "Paint"}, z_image: {}}
UNGUIDED[z_image] = {"guidance_scale": 0.0}
TWO = ["a red cat", LONG]


@pytest.mark.parametrize("make", [z_image, lumina2])
@pytest.mark.parametrize(
    "options", [{}, {"refine": "self"}, {"space": "output"}, {"queries": "text"}], ids=str
)
def test_prompts_of_unlike_lengths_have_the_maps_that_each_has_alone(make, options):
    pipe = make()
    given = {**SIZE, **UNGUIDED[make]}
    latents = torch.randn(2, 4, 8, 10, generator=torch.Generator().manual_seed(3))
    with capture(pipe, **options) as both:
        pipe(list(TWO), latents=latents, **given)
    lengths = []
    for i, prompt in enumerate(TWO):
        with capture(pipe, **options) as alone:
            pipe(prompt, latents=latents[i : i + 1], **given)
        lengths.append(alone.n_text)
        for name, maps in alone.maps.items():
            found = both.maps[name][i, ..., : alone.n_text]
            torch.testing.assert_close(found, maps[0], atol=2e-5, rtol=1e-3)
            assert not both.maps[name][i, ..., alone.n_text :].any()
    assert lengths[0] < lengths[1] == both.n_text


def test_heatmaps_know_the_prompts_that_z_image_wrote_over():
    pipe, prompts = z_image(), list(TWO)
    with capture(pipe) as store:
        pipe(prompts, **SIZE, guidance_scale=0.0)
    assert prompts != TWO  # the pipeline's doing
    assert [one.prompt.text for one in store.heatmaps(preset="default")] == TWO


IMG2IMG = ZImageImg2ImgPipeline, {"image": torch.rand(2, 3, 64, 80), "strength": 0.5}
INPAINT = ZImageInpaintPipeline, {**IMG2IMG[1], "mask_image": torch.ones(2, 1, 64, 80)}


def rows_by_step(pipe, branch, **options):
    """Rows of each call of the model, what a capture kept of each call that it kept, and its
    store."""
    rows = []
    hook = pipe.transformer.register_forward_pre_hook(
        lambda _model, args: rows.append(len(args[0]))
    )
    given = {"negative_prompt": "dog", "num_images_per_prompt": 2, "guidance_scale": 4.0}
    try:
        with capture(pipe, branch=branch, steps="all") as store:
            pipe("a red cat", **{**SIZE, "num_inference_steps": 6, **given, **options})
    finally:
        hook.remove()
    return rows, [one.rows for one in store.passes], store


@pytest.mark.parametrize("kind", [(ZImagePipeline, {}), IMG2IMG, INPAINT], ids=lambda kind: kind[0])
@pytest.mark.parametrize("truncation", tiered([0.6, None, 0.25, 1, 0, 0.3, 0.95, 2], quick=2))
def test_guidance_of_z_image_may_never_begin(kind, truncation):
    """Against the rows of each call: two images are four rows with guidance, and two without."""
    pipe, options = z_image(kind[0]), {**kind[1], "cfg_truncation": truncation}
    for _ in range(2):  # the second run begins with guidance again
        rows, kept, store = rows_by_step(pipe, "conditional", **options)
        assert kept == [(0, 1)] * len(rows) and set(rows) <= {2, 4}
        assert store.n_text == 32
    if 4 in rows:
        for negative, n_text in (("dog", 32), (f"{LONG} {LONG}", 64)):
            options["negative_prompt"] = negative
            rows, kept, store = rows_by_step(pipe, "unconditional", **options)
            assert kept == [(2, 3)] * rows.count(4)
            assert (store.skipped, store.n_text) == (rows.count(2), n_text)
        return
    assert truncation is not None and truncation < 1
    with pytest.warns(CaptureWarning, match="never for the unconditional branch"):
        assert rows_by_step(pipe, "unconditional", **options)[:2] == (rows, [])
    with pytest.warns(CaptureWarning), capture(pipe, branch="unconditional") as store:
        given = {**SIZE, "num_inference_steps": 6, "num_images_per_prompt": 2, **options}
        pipe("a red cat", negative_prompt="dog", guidance_scale=4.0, **given)
    assert (store.images, sdattn.heatmaps(store, pipe)) == (0, [])
    with pytest.raises(CaptureError, match="never for the unconditional branch"):
        with capture(pipe, branch="unconditional"):
            pipe("a red cat", guidance_scale=0.0, **given)


@pytest.mark.parametrize(
    "scheduler",
    tiered([FlowMatchEulerDiscreteScheduler, FlowMatchLCMScheduler], quick=0),
)
@pytest.mark.parametrize("kind", [(ZImagePipeline, {}), IMG2IMG], ids=lambda kind: kind[0])
def test_guidance_ends_in_the_very_step_in_which_the_pipeline_ends_it(kind, scheduler):
    """At the progress of each step, where it still acts, and just below it, where it does not."""
    pipe = z_image(kind[0])
    pipe.scheduler = scheduler()
    rows_by_step(pipe, "conditional", **kind[1])
    progress = ((1000 - pipe.scheduler.timesteps.float()) / 1000).tolist()
    seen = set()
    for at in progress:
        for truncation in (at, math.nextafter(at, -1)):
            rows, kept, _ = rows_by_step(pipe, "conditional", **kind[1], cfg_truncation=truncation)
            assert kept == [(0, 1)] * len(rows)
            seen.add(rows.count(4))
    assert len(seen) == len(rows) + 1


@pytest.mark.parametrize("kind", [(ZImagePipeline, {}), IMG2IMG], ids=lambda kind: kind[0])
@pytest.mark.parametrize("changed", [{"_guidance_scale": 0.0}, {"_cfg_truncation": 0.0}], ids=str)
def test_guidance_that_a_callback_switches_off_and_on(kind, changed):
    pipe = z_image(kind[0])

    def switch(pipe, step, _timestep, _given):
        before = {"_guidance_scale": 4.0, "_cfg_truncation": 1.0}
        vars(pipe).update(changed if step == 0 else before)
        return {}

    for branch, expected in (("conditional", (0, 1)), ("unconditional", (2, 3))):
        rows, kept, _ = rows_by_step(pipe, branch, **kind[1], callback_on_step_end=switch)
        guided = [count for count in rows if count == 4 or branch == "conditional"]
        assert rows[:3] == [4, 2, 4] and kept == [expected] * len(guided)


def test_a_hand_written_processor_that_multiplies_itself_takes_rows_of_one_length():
    pipe = lumina2()
    for layer in pipe.transformer.layers:
        layer.attn.set_processor(Multiplies())
    given = {**SIZE, **UNGUIDED[lumina2]}
    with capture(pipe) as store:
        pipe(TWO[0], **given)
    row = next(iter(store.maps.values())).sum(-1)
    assert ((row > 0) & (row < 1)).all()
    with pytest.raises(RuntimeError, match="texts of their own lengths.*Multiplies"), capture(pipe):
        pipe(TWO, **given)


class Multiplies:
    """Attention of one head's keys for all, written out."""

    def __call__(self, attn, hidden_states, encoder_hidden_states, attention_mask=None, **_):
        query, key, value = (
            part(hidden_states).unflatten(-1, (-1, 16)).transpose(1, 2)
            for part in (attn.to_q, attn.to_k, attn.to_v)
        )
        key, value = (part.expand_as(query) for part in (key, value))
        probs = torch.softmax(query @ key.mT / 4, dim=-1)
        return attn.to_out[0](torch.matmul(probs, value).transpose(1, 2).flatten(2))


def test_z_image_omni_is_refused_by_name():
    pipe = z_image()
    image, caption = torch.zeros(4, 1, 4, 4), torch.zeros(3, 16)
    with pytest.raises(TypeError, match="Omni puts captions"), capture(pipe.transformer):
        pipe.transformer([[image]], torch.zeros(1), [[caption]], image_noise_mask=[[1]])
