"""What families share in reading prompts: captions, chats, two tokenizers."""

import pytest
import torch
from helpers.reading_pipelines import (
    assert_same_columns,
    made_by,
    make_klein,
    make_pixart,
)
from helpers.tiny_pipelines import make_sdxl_pipeline
from helpers.tiny_tokenizers import tiny_qwen

from sdattn.models.reading import read_prompts


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def test_two_tokenizers_that_disagree_are_refused():
    pipe = make_sdxl_pipeline()
    pipe.tokenizer.add_tokens(["<cat-toy>"])
    with pytest.raises(ValueError, match="words.*'a <cat-toy>'"):
        read_prompts(pipe, "a <cat-toy>")


def test_a_cleaned_caption_is_another_prompt():
    pipe = make_pixart()
    pipe._text_preprocessing = lambda text, clean_caption: ["a cat"]  # as bs4 and ftfy would have
    assert read_prompts(pipe, "A Cat")[0].find("cat") == [(1,)]
    with pytest.raises(ValueError, match="'a cat'.*'a <b>cat</b>'"):
        read_prompts(pipe, "a <b>cat</b>")
    assert len(read_prompts(pipe, "a <b>cat</b>", clean_caption=False)[0].find("b")) == 2


def test_a_template_that_strips_its_prompt():
    tokenizer = tiny_qwen()
    tokenizer.chat_template = tokenizer.chat_template.replace(".content }}", ".content | trim }}")
    pipe = make_klein()
    pipe.tokenizer = tokenizer
    (read,) = read_prompts(pipe, "  a red cat ")
    made = made_by(pipe, "  a red cat ", text_encoder_out_layers=(0, 1))
    assert_same_columns([read], made, tokenizer)
    assert [(word.start, word.end) for word in read.words] == [(2, 3), (4, 7), (8, 11)]
