"""Prompts and labels to columns, of any pipeline."""

import pytest
from diffusers import FluxPriorReduxPipeline, ShapEPipeline, StableDiffusionPipeline
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline
from helpers.transformer_rows import flux, klein, qwen_image, sd3

from sdattn.models.reading import read_prompts
from sdattn.prompts.tokens import TruncationWarning, read_prompt


def test_a_pipeline_of_ones_own_reads_as_its_base():
    class Mine(StableDiffusionPipeline):
        pass

    pipe = make_pipeline(Mine)
    assert read_prompts(pipe, "a cat") == [read_prompt(pipe.tokenizer, "a cat")]


def test_prompts_of_several_kinds_keep_their_order():
    pipe = make_pipeline()
    known = read_prompt(pipe.tokenizer, "a dog")
    read = read_prompts(pipe, ["a cat", known, {"sofa": [1]}, "red"], columns=77)
    assert [one.text for one in read] == ["a cat", "a dog", "sofa", "red"]
    assert read[1] is known
    with pytest.raises(ValueError, match="154.*columns.*'a dog'"):
        read_prompts(pipe, [known], columns=154)
    with pytest.raises(ValueError, match="Asked to read 3"):
        read_prompts(pipe, [3])


def test_long_prompts_have_more_columns():
    pipe = make_sdxl_pipeline()
    prompt = "cat " * 80 + "dog"
    (chunks,) = read_prompts(pipe, prompt, columns=154)
    assert chunks.find("dog") == [(77 + 1 + 5,)]
    (row,) = read_prompts(pipe, prompt, columns=152)
    assert row.find("dog") == [(81,)]
    with pytest.warns(TruncationWarning, match="reads 77 tokens"):
        read_prompts(pipe, prompt, columns=77)
    with pytest.raises(ValueError, match="100 token columns"):
        read_prompts(pipe, prompt, columns=100)


def test_other_texts_for_other_encoders_are_refused():
    pipe = make_sdxl_pipeline()
    assert read_prompts(pipe, "a cat", prompt_2="a cat") == read_prompts(pipe, "a cat")
    assert read_prompts(pipe, ["a", "b"], prompt_2=["a", "b"]) == read_prompts(pipe, ["a", "b"])
    with pytest.raises(ValueError, match="prompt_2='a dog'.*text"):
        read_prompts(pipe, "a cat", prompt_2="a dog")
    with pytest.raises(ValueError, match="prompt_3='a dog'.*text"):
        read_prompts(sd3(), "a cat", prompt_3="a dog")


@pytest.mark.parametrize("make", [make_pipeline, flux, qwen_image, klein])
def test_an_empty_prompt_is_refused_everywhere(make):
    with pytest.raises(ValueError, match="is empty"):
        read_prompts(make(), " ")


def test_an_option_that_contradicts_the_columns_is_refused():
    with pytest.raises(ValueError, match="300.*columns.*max_sequence_length=256"):
        read_prompts(flux(), "a cat", columns=300, max_sequence_length=256)
    with pytest.raises(ValueError, match="1241 token columns.*512"):
        read_prompts(flux(), "a cat", columns=1241)  # with an image's tokens behind (Redux)


def test_pipelines_whose_words_cannot_be_told_take_labels():
    pipe = FluxPriorReduxPipeline.__new__(FluxPriorReduxPipeline)  # FLUX.1's name, of no prompt
    with pytest.raises(TypeError, match="FluxPriorReduxPipeline.*prompts"):
        read_prompts(pipe, "a cat")
    shap_e = ShapEPipeline.__new__(ShapEPipeline)  # of no family
    with pytest.raises(TypeError, match="ShapEPipeline.*prompts"):
        read_prompts(shap_e, "a cat")
    for one in (pipe, shap_e):
        (read,) = read_prompts(one, {"cat": [2], "red dog": [4, 5]}, columns=300)
        assert read.find("red dog") == [(4, 5)]
        assert len(read.tokens) == 300
    with pytest.raises(ValueError, match="columns="):
        read_prompts(pipe, {"cat": [2]})
