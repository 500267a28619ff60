"""Whose words: text states that change inside a run, or from frame to frame, are no prompt's."""

import numpy as np
import pytest
import torch
from helpers.chain_runs import make_pipe
from helpers.tiers import tiered
from helpers.tiny_pipelines import small_pipeline
from helpers.unet_rows import animatediff

import sdattn
from sdattn import AttentionStore, CaptureError, TorchAttnProcessor
from sdattn.edit import register_attention_control
from sdattn.prompts.weights import refuse_weights

P, Q = "a red cat", "a dog and a tree"
SMALL = {"height": 64, "width": 64, "num_inference_steps": 4, "output_type": "latent"}


def both(pipe, prompt):
    positive, negative = pipe.encode_prompt(prompt, "cpu", 1, True, negative_prompt="")
    return torch.cat([negative, positive])


def draw(pipe, swap=None, prompt=P, **options):
    """A run whose text states a callback sets after its first step."""

    def callback(_pipe, step, _t, tensors):
        return swap(step, tensors) if swap else tensors

    names = ["latents", "prompt_embeds"]
    given = {"callback_on_step_end": callback, "callback_on_step_end_tensor_inputs": names}
    generator = torch.Generator().manual_seed(0)
    return pipe(prompt, generator=generator, **{**SMALL, **given, **options}).images


def swapped(pipe, at=0):
    """Another prompt from one step on."""
    states = both(pipe, Q)
    return lambda step, tensors: {**tensors, **({"prompt_embeds": states} if step == at else {})}


def written(pipe):
    """The same tensor, written to in place."""
    states = both(pipe, Q)

    def swap(step, tensors):
        if not step:
            tensors["prompt_embeds"].copy_(states)
        return tensors

    return swap


def noisy(_pipe):
    """Annealed text states (CADS), new in each step."""
    return lambda _step, tensors: {**tensors, "prompt_embeds": tensors["prompt_embeds"] + 0.1}


def shorter(pipe):
    return lambda step, tensors: {**tensors, "prompt_embeds": tensors["prompt_embeds"][:, :60]}


@pytest.mark.parametrize(
    ("change", "when"),
    [
        (lambda pipe: swapped(pipe, at=2), "before step 3, counted from 0"),
        (noisy, "before steps 1, 2, 3, counted from 0"),
        (written, "before step 1, counted from 0"),
    ],
)
def test_maps_of_several_texts_have_the_words_of_none(change, when):
    pipe = small_pipeline()
    store = AttentionStore(pipeline=pipe, keep_steps=True)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    with sdattn.capture(pipe) as maps, sdattn.capture(pipe, steps="last") as last:
        draw(pipe, change(pipe))
    for held in (maps, store):
        for prompt in (None, P, Q):
            with pytest.raises(ValueError, match=f"text states changed inside the run, {when}"):
                held.heatmaps(prompt=prompt)
        assert held.heatmaps(prompt={"cat": [3]})[0]["cat"].values.max() > 0
    for read in (last.heatmaps, lambda: store.heatmaps(steps="last")):
        with pytest.raises(ValueError, match=f"prompt.*was swapped inside the run, {when}.*Pass"):
            read()
    assert last.heatmaps(prompt=Q)[0].words[1] == "dog"
    assert store.heatmaps(prompt=Q, steps="last")[0].words[1] == "dog"


def test_a_text_of_another_length_is_refused():
    pipe = make_pipe()
    with pytest.raises(CaptureError, match="77 token columns at first and has 60"):
        with sdattn.capture(pipe):
            draw(pipe, shorter(pipe))


@pytest.mark.slow
@pytest.mark.parametrize("change", [swapped, written])
def test_a_part_of_one_text_is_read_with_its_own_prompt(change):
    """Compared with a run of that part's text alone, from the latents where it begins."""
    pipe = make_pipe()
    with sdattn.capture(pipe, steps="all") as whole:
        draw(pipe, change(pipe))
    with sdattn.capture(pipe, steps=(0.5, 1.0)) as store:
        draw(pipe, change(pipe))
    with pytest.raises(ValueError, match="was swapped inside the run, before step 1, counted"):
        store.heatmaps()
    found = store.heatmaps(prompt=Q)[0]
    assert found.words == ("a", "dog", "and", "a", "tree")
    expected = torch.stack([maps[:, 2:].mean(1) for maps in whole.maps.values()][-3:])
    held = torch.stack(list(store.maps.values())[-3:])
    torch.testing.assert_close(held, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("guidance", ["ends", "stays"])
def test_guidance_that_ends_and_states_that_are_made_anew_are_no_other_text(guidance):
    pipe = make_pipe()

    def swap(step, tensors):
        states = tensors["prompt_embeds"].clone()
        if guidance == "ends" and step == 1:
            pipe._guidance_scale = 1.0
            states = states.chunk(2)[1]
        return {**tensors, "prompt_embeds": states}

    with sdattn.capture(pipe) as store:
        draw(pipe, swap)
    assert store.heatmaps()[0].words == ("a", "red", "cat")


@pytest.mark.slow
def test_an_attached_store_knows_the_text_of_each_step():
    pipe = make_pipe()
    store = AttentionStore(pipeline=pipe, keep_steps=True)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    draw(pipe, swapped(pipe))
    for first in (0, np.int64(0), -4):
        assert store.heatmaps(steps=first)[0].words == ("a", "red", "cat")
    for last in (3, np.int64(3), -1):
        with pytest.raises(ValueError, match="swapped inside the run, before step 1"):
            store.heatmaps(steps=last)
    draw(pipe)
    assert store.heatmaps()[0].words == ("a", "red", "cat")


def test_a_registered_store_knows_of_several_texts_too():
    pipe, store = small_pipeline(), AttentionStore(guidance="batch")
    with register_attention_control(pipe, store):
        draw(pipe, swapped(pipe))
    with pytest.raises(ValueError, match="text states changed inside the run, before step 1"):
        store.heatmaps(pipe, P)
    store.reset()
    with register_attention_control(pipe, store):
        draw(pipe)
    assert store.heatmaps(pipe, P)[0].words == ("a", "red", "cat")


@pytest.mark.slow
def test_generate_refuses_a_run_whose_text_changed():
    pipe = make_pipe()
    options = {name: value for name, value in SMALL.items() if name != "output_type"}

    def callback(pipe, step, _t, tensors):
        return swapped(pipe)(step, tensors)

    options |= {"callback_on_step_end_tensor_inputs": ["latents", "prompt_embeds"]}
    with pytest.raises(ValueError, match="text states changed"):
        sdattn.generate(pipe, P, callback_on_step_end=callback, **options)


@pytest.mark.slow
def test_frames_with_texts_of_their_own():
    def run(**options):
        pipe = animatediff()
        pipe.enable_free_noise(context_length=2, context_stride=1)
        with sdattn.capture(pipe, **options) as store:
            pipe(
                {0: "a red cat", 3: "dog, dog and cat"},
                num_frames=4, height=128, width=128, num_inference_steps=2, guidance_scale=4.0,
            )  # fmt: skip
        return pipe, store

    pipe, store = run()
    with pytest.raises(ValueError, match=r"frames of this video.*texts of their own"):
        sdattn.heatmaps(store, pipe, "a red cat", preset="sum")
    pipe, store = run(frames=[0])
    found = sdattn.heatmaps(store, pipe, "a red cat", preset="sum")[0]
    assert found.words == ("a", "red", "cat")


@pytest.mark.parametrize(
    "text",
    tiered(
        [
            "a (blue square)1.4 here", "((circle)) left", '("a cat", "a dog").blend(0.5, 0.5)',
            "[cat:dog:0.5]", "a red circle++ left of a square", "a red circle+, left",
            "circle-- and square", "a (blue square)++", "(circle:1.3) left",
        ], quick=3),
)  # fmt: skip
def test_weights_in_a_text_that_no_encoder_was_heard_to_read(text):
    with pytest.raises(ValueError, match=r"weight.*labels"):
        refuse_weights(text)
    pipe = make_pipe()
    positive, negative = pipe.encode_prompt(P, "cpu", 1, True, negative_prompt="")
    with sdattn.capture(pipe) as store:
        pipe(prompt_embeds=positive, negative_prompt_embeds=negative, **SMALL)
    with pytest.raises(ValueError, match="weight"):
        sdattn.heatmaps(store, pipe, text)


@pytest.mark.parametrize(
    "text",
    ["a cat (red) on a sofa", "a half-open door", "wi-fi, 4+4 cats", "at 5:30 [night]", "a + b"],
)
def test_other_signs_are_words(text):
    refuse_weights(text)


def test_a_typed_prompt_with_weights_is_what_was_drawn():
    pipe = make_pipe()
    with sdattn.capture(pipe) as store:
        draw(pipe, prompt="a red cat++")
    assert "cat" in store.heatmaps()[0].prompt.text
