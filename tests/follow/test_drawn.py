"""Stores of a pipeline know the prompts that it drew, and refuse heatmaps of other ones.

That of each pipeline of the support matrix is seen in test_matrix.py.
"""

import copy
import gc
import pickle
import threading

import pytest
import torch
from diffusers import StableDiffusionPipeline
from helpers.capture_runs import PROMPT, run
from helpers.joint_rows import guided, hunyuan_image
from helpers.rows import NEGATIVE, PROMPTS, Way
from helpers.tiny_pipelines import make_sdxl_pipeline, small_pipeline
from helpers.transformer_rows import flux, sd3

from sdattn import AttentionStore, Prompt, TorchAttnProcessor, capture, heatmaps
from sdattn.follow.drawn import DrawnPrompts


def equal(found, expected):
    return len(found) == len(expected) and all(
        torch.equal(one.maps, other.maps) and one.prompt == other.prompt
        for one, other in zip(found, expected, strict=True)
    )


def attached(pipe, **options):
    store = AttentionStore(pipeline=pipe, **options)
    pipe.unet.set_attn_processor(TorchAttnProcessor(store))
    return store


@pytest.mark.parametrize("make", [small_pipeline, make_sdxl_pipeline, sd3])
def test_negative_prompts_are_known_too(make):
    pipe = make()
    with capture(pipe, branch="both") as store:
        run(pipe, list(PROMPTS), negative_prompt=[NEGATIVE] * 2, num_images_per_prompt=2)
    given = [NEGATIVE, NEGATIVE, *PROMPTS]
    assert equal(store.heatmaps(), heatmaps(store, pipe, given))
    with pytest.raises(ValueError, match="prompt.*'red dog'"):
        heatmaps(store, pipe, [NEGATIVE, "a bird", *PROMPTS])


def test_a_negative_prompt_that_was_left_out_is_empty():
    pipe = small_pipeline()
    with capture(pipe, branch="unconditional") as store:
        run(pipe)
    assert store.drawn.texts == {"conditional": (PROMPT,), "unconditional": ("",)}
    with pytest.raises(ValueError, match="prompt.*''"):
        heatmaps(store, pipe, PROMPT)


@pytest.mark.parametrize("read", [(5, 6, 7), (5, 6, 7, 0), (5, 6, 7, 0, 0)])
def test_tokens_may_be_read_without_the_padding_at_their_end(read):
    texts, got = ("a red cat",), torch.tensor([[5, 6, 7, 0, 0]])
    drawn = DrawnPrompts(
        {"conditional": texts}, {"conditional": {"encoder": got}}, {}, lambda: None
    )
    drawn.check(("conditional",), [Prompt(texts[0], (), (), encoded=(read,))])
    for shorter in ((5, 6), (5,)):  # of an encoder whose texts have no end token
        with pytest.raises(ValueError, match="'a red', but the prompt of this run was 'a red cat'"):
            drawn.check(("conditional",), [Prompt("a red", (), (), encoded=(shorter,))])


@pytest.mark.parametrize("quoted", [(), ("prompt",), ("negative",), ("prompt", "negative")])
def test_an_encoder_of_some_texts_alone_may_be_of_either(quoted):
    """HunyuanImage has ByT5 read quoted text, and calls it for nothing else."""
    pipe = hunyuan_image()
    texts = [
        text if name in quoted else text.replace('"', "")
        for name, text in (("prompt", 'a "red" cat'), ("negative", 'a "blue" dog'))
    ]
    options = {**guided(pipe, Way(size=(64, 64))), "negative_prompt": texts[1]}
    with capture(pipe) as store, capture(pipe, branch="unconditional") as negative:
        pipe(texts[0], num_inference_steps=1, output_type="latent", **options)
    for one, text in zip((store, negative), texts, strict=True):
        assert one.heatmaps()[0].prompt.text == text
        with pytest.raises(ValueError, match="prompt"):
            heatmaps(one, pipe, 'a "green" cow')


def test_heatmaps_of_several_images_are_told_of_them():
    """HunyuanImage mixes up columns of several images of each prompt, where one quotes text."""
    pipe, prompts = hunyuan_image(), ['a "red" cat', "a dog"]
    options = {**guided(pipe, Way(size=(64, 64))), "num_inference_steps": 1}
    with capture(pipe) as store:
        pipe(prompts, num_images_per_prompt=2, output_type="latent", **options)
    with pytest.raises(ValueError, match="num_images_per_prompt=2.*HunyuanImagePipeline"):
        heatmaps(store, pipe, prompts)


def test_the_text_is_as_it_was_typed():
    """CLIP's tokens have neither case nor these spaces."""
    pipe = small_pipeline()
    with capture(pipe) as store:
        run(pipe, typed := "A  RED\ncat, a Dog")
    assert store.heatmaps()[0].prompt.text == typed
    heatmaps(store, pipe, "a red cat, a dog")  # the same tokens: no refusal
    heatmaps(store, pipe.tokenizer, typed)
    with pytest.raises(ValueError, match=r"was 'A  RED\\ncat, a Dog'"):
        heatmaps(store, pipe.tokenizer, "a red cat, a cow")


def test_an_attached_store_knows_each_run():
    pipe = small_pipeline()
    store = attached(pipe)
    assert store.drawn is None
    run(pipe, ["a red cat", "a dog"], negative_prompt=["no", "nothing"])
    assert equal(store.heatmaps(), heatmaps(store, pipe, ["a red cat", "a dog"]))
    run(pipe, "two cows")
    assert [maps.prompt.text for maps in store.heatmaps()] == ["two cows"]
    with pytest.raises(ValueError, match="'a red cat'.*'two"):
        heatmaps(store, pipe, "a red cat")
    states = pipe.encode_prompt(PROMPT, "cpu", 1, True)
    run(pipe, None, prompt_embeds=states[0], negative_prompt_embeds=states[1])
    assert store.drawn is None  # not the text of the run before
    store.detach()
    assert not any(part._forward_pre_hooks for part in (pipe.text_encoder, pipe.unet))


def test_a_store_of_every_row_does_not_guess():
    """Of both branches' rows the prompts' are not known to come first or last."""
    pipe = small_pipeline()
    store = attached(pipe, guidance=None)
    run(pipe)
    assert store.images == 2 and store.drawn is None
    run(pipe, guidance_scale=1.0)
    assert store.drawn.texts["conditional"] == (PROMPT,)


def test_an_encoder_that_is_called_by_hand_says_nothing():
    pipe = small_pipeline()
    with capture(pipe) as store:
        pipe.encode_prompt("a green bird", "cpu", 1, True)
        run(pipe)
    assert store.drawn.texts["conditional"] == (PROMPT,)


def test_another_prompt_in_a_prompt_2_is_no_prompt_of_the_maps():
    """FLUX.1's columns are T5's, which reads prompt_2."""
    pipe = flux()
    with capture(pipe) as store:
        run(pipe, "a dog", prompt_2="a red cat", max_sequence_length=16)
    assert [maps.prompt.text for maps in store.heatmaps()] == ["a red cat"]
    with pytest.raises(ValueError, match="'a dog'.*'a red cat'"):
        heatmaps(store, pipe, "a dog")


def test_two_texts_in_one_column_are_refused():
    pipe = make_sdxl_pipeline()
    with capture(pipe) as store:
        run(pipe, "a dog", prompt_2="a red cat")
    for prompt in (None, "a dog", "a red cat"):
        with pytest.raises(ValueError, match="heatmaps of|becomes other tokens than text_encoder"):
            heatmaps(store, pipe, prompt)
    assert store.heatmaps(pipe, {"dog": [2]})[0]["dog"].values.max() > 0


@pytest.mark.slow
def test_a_store_that_travels_keeps_the_prompt_and_leaves_the_pipeline():
    pipe = small_pipeline()
    with capture(pipe) as store:
        run(pipe)
    expected = store.heatmaps()
    for twin in (pickle.loads(pickle.dumps(store)), copy.deepcopy(store)):
        assert equal(twin.heatmaps(pipe), expected)
        with pytest.raises(ValueError, match="alive"):
            twin.heatmaps()
        with pytest.raises(ValueError, match="prompt.*'a red cat'"):
            heatmaps(twin, pipe, "a cow")
    tokenizer = pipe.tokenizer
    del pipe
    gc.collect()
    assert equal(store.heatmaps(tokenizer), expected)
    with pytest.raises(ValueError, match="'a red cat'"):
        store.heatmaps()


def test_the_second_argument_is_no_prompt():
    pipe = small_pipeline()
    with capture(pipe) as store:
        run(pipe)
    with pytest.raises(TypeError, match="argument.*pipeline"):
        store.heatmaps("a red cat")
    assert equal(store.heatmaps(prompt="a red cat"), store.heatmaps())


def test_runs_of_other_threads_are_not_taken_for_this_one():
    pipe, other = small_pipeline(), small_pipeline()
    store = attached(pipe)
    run(pipe, "a cow")
    thread = threading.Thread(target=run, args=(other, "a dog"))
    thread.start()
    thread.join()
    assert store.drawn.texts["conditional"] == ("a cow",)
    with capture(pipe) as captured:
        thread = threading.Thread(target=pipe.encode_prompt, args=("a dog", "cpu", 1, True))
        thread.start()
        thread.join()
        run(pipe)
    assert captured.drawn.texts["conditional"] == (PROMPT,)


class InPieces(StableDiffusionPipeline):
    """Encodes a prompt word by word, as pipelines for weighted prompts do in their own ways."""

    def __call__(self, prompt, **options):
        for piece in prompt.split():
            self.text_encoder(self.tokenizer(piece, return_tensors="pt").input_ids)
        states, negative = self.encode_prompt("a cow", "cpu", 1, True, "")
        return super().__call__(prompt_embeds=states, negative_prompt_embeds=negative, **options)


class Chunks(StableDiffusionPipeline):
    """Calls its encoder for the end of a long prompt too: which call had which text is unknown."""

    def encode_prompt(self, prompt, *args, **options):
        states = super().encode_prompt(prompt, *args, **options)
        self.text_encoder(self.tokenizer("a tail", return_tensors="pt").input_ids)
        return states


def by_states(pipe):
    """A run of text states in place of text."""
    states = pipe.encode_prompt(
        PROMPT, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=True
    )
    names = ("prompt_embeds", "negative_prompt_embeds")
    names += ("pooled_prompt_embeds", "negative_pooled_prompt_embeds")
    run(pipe, None, **dict(zip(names, states, strict=False)))


UNKNOWN = {
    "text states": (small_pipeline, by_states),
    "text states of SDXL": (make_sdxl_pipeline, by_states),
    "an encoding of its own": (lambda: small_pipeline(InPieces), run),
    "chunks": (lambda: small_pipeline(Chunks), lambda pipe: run(pipe, guidance_scale=5.0)),
    "no pipeline": (small_pipeline, run),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_where_the_prompt_is_not_known_it_is_asked_for_and_any_is_read(name):
    make, draw = UNKNOWN[name]
    pipe = make()
    with capture(pipe.unet if name == "no pipeline" else pipe) as store:
        draw(pipe)
    assert store.drawn is None
    with pytest.raises(ValueError, match="prompt of these maps is not known"):
        store.heatmaps()
    heatmaps(store, pipe, "any other text")
    assert store.heatmaps(prompt={"cat": [3]})[0]["cat"].values.ndim == 2
