"""Pipelines that fill up each text in a way of their own: rows of unlike lengths, guidance that
ends early, what the device is read for, and what is refused."""

import pytest
import torch
from helpers.padded_rows import LONG, cogview4, hunyuan_dit, krea2, lumina2, z_image
from helpers.reads import reads_by_call

import sdattn
from sdattn import AttentionStore, capture

SIZE = {"height": 64, "width": 80, "num_inference_steps": 2, "output_type": "latent"}
UNGUIDED = {lumina2: {"guidance_scale": 1.0, "system_prompt": "Paint"}, z_image: {}}
UNGUIDED[z_image] = {"guidance_scale": 0.0}
TWO = ["a red cat", LONG]


@pytest.mark.parametrize("make", [z_image, lumina2])
@pytest.mark.parametrize("options", [{}, {"refine": "self"}, {"space": "output"}], ids=str)
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


@pytest.mark.parametrize("negative", ["dog", f"{LONG} {LONG}"], ids=["short", "long"])
def test_guidance_of_z_image_may_end_in_the_middle(negative):
    """Against the number of captions that the model got: the prompt's first."""
    pipe, captions = z_image(), []
    pipe.transformer.register_forward_pre_hook(lambda _model, args: captions.append(len(args[2])))
    options = {**SIZE, "num_inference_steps": 4, "guidance_scale": 4.0, "cfg_truncation": 0.6}
    for _ in range(2):  # the second run begins with guidance again
        with (
            capture(pipe, steps="all") as store,
            capture(pipe, branch="unconditional", steps="all") as other,
        ):
            pipe("a red cat", negative_prompt=negative, **options)
        guided = captions.count(2)
        assert captions == [2] * guided + [1] * (4 - guided)
        assert 0 < guided < 4
        captions.clear()
        assert [one.rows for one in store.passes] == [(0,)] * 4
        assert store.n_text == 32
        assert [one.rows for one in other.passes] == [(1,)] * guided
        assert other.skipped == 4 - guided
        assert other.n_text == (32 if negative == "dog" else 64)


@pytest.mark.parametrize("make", [z_image, lumina2])
def test_rows_of_unlike_lengths_are_read_in_the_first_pass_only(make, monkeypatch):
    # the kernel of the CPU hands out its logsumexp, which is then looked at
    monkeypatch.setattr("sdattn.hooks.sdpa.backend_with_logsumexp", lambda _call: 0)
    pipe = make()
    options = {**SIZE, "num_inference_steps": 3, "guidance_scale": 4.0}
    with reads_by_call(pipe.transformer) as plain:
        pipe(list(TWO), **options)
    with reads_by_call(pipe.transformer) as watched, capture(pipe):
        pipe(list(TWO), **options)
    assert len(plain) == len(watched)
    assert watched[1:] == plain[1:]


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


REFUSED = {
    z_image: "text elsewhere in each row",
    lumina2: "text elsewhere in each row",
    cogview4: "two streams and no projections for the text",
    krea2: "no heads with projections",
    hunyuan_dit: "does more than a plain attention",
}


@pytest.mark.parametrize("make", REFUSED)
def test_what_would_change_the_attention_is_refused_by_name(make):
    pipe = make()
    before = set(vars(pipe.transformer))
    with pytest.raises(TypeError, match=REFUSED[make]):
        sdattn.knockout(pipe, "a red cat", "cat", height=64, width=64, num_inference_steps=1)
    with pytest.raises(TypeError, match="no UNet of Stable Diffusion|no projections for the text"):
        AttentionStore(pipeline=pipe)
    with pytest.raises(TypeError, match="Asked about another text"):
        sdattn.generate(pipe, "a red cat", ask="dog", height=64, width=64, num_inference_steps=1)
    with pytest.raises(TypeError, match="This needs a .*found a"):
        sdattn.edit.edit(pipe, "a red cat", "a red dog", height=64, width=64)
    assert set(vars(pipe.transformer)) == before


def test_z_image_omni_is_refused_by_name():
    pipe = z_image()
    picture, caption = torch.zeros(4, 1, 4, 4), torch.zeros(3, 16)
    with pytest.raises(TypeError, match="Omni puts captions"), capture(pipe.transformer):
        pipe.transformer([[picture]], torch.zeros(1), [[caption]], image_noise_mask=[[1]])
