"""How further families of pictures read their prompts, against their own encode_prompt."""

import inspect

import pytest
import torch
from diffusers import AuraFlowPipeline, ChromaImg2ImgPipeline, ChromaPipeline
from helpers.reading_pipelines import assert_same_columns, made_by, tells_ids
from helpers.tiny_encoders import tiny_t5_encoder
from helpers.tiny_tokenizers import tiny_t5

from sdattn.models.reading import read_prompts

PROMPTS = [
    "a red cat on the sofa",
    "A turquoise Cat, a dog (on a  cat's SOFA)!",
    "  un café 😀 cat\n",
    "一只 cat 红色",
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def bare(kind, **parts):
    """A pipeline of which only the parts are there that read a prompt."""
    names = set(inspect.signature(kind.__init__).parameters) - {"self", *parts}
    needed = {
        name
        for name in names
        if inspect.signature(kind.__init__).parameters[name].default is inspect.Parameter.empty
    }
    return kind(**dict.fromkeys(needed), **parts)


def numbers(read, *, masked=False):
    """The token numbers of each column; with ``masked`` the pipeline zeroes its padding."""
    return [
        [-1 if masked and token.special == "<pad>" else token.id for token in one.tokens]
        for one in read
    ]


@pytest.mark.parametrize("kind", [ChromaPipeline, ChromaImg2ImgPipeline])
def test_chroma_reads_t5(kind):
    pipe = bare(kind, text_encoder=tells_ids(tiny_t5_encoder()), tokenizer=tiny_t5())
    read = read_prompts(pipe, PROMPTS, max_sequence_length=60)
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 60}
    assert_same_columns(read, made_by(pipe, PROMPTS, **options), pipe.tokenizer)
    assert read_prompts(pipe, PROMPTS, columns=60) == read
    pipe.tokenizer.add_tokens(["<cat-toy>", "<cat-toy>_1"])
    assert read_prompts(pipe, "a <cat-toy>, red")[0].find("<cat-toy>") == [(1, 2)]


def test_auraflow_has_its_registers_before_t5():
    pipe = bare(AuraFlowPipeline, text_encoder=tells_ids(tiny_t5_encoder()), tokenizer=tiny_t5())
    read = read_prompts(pipe, PROMPTS, max_sequence_length=60)
    options = {"do_classifier_free_guidance": False, "max_sequence_length": 60}
    made = made_by(pipe, PROMPTS, **options)
    assert numbers(read, masked=True) == [[-1] * 8 + ids for ids in made]
    assert read[0].find("red cat") == [(8 + 1, 8 + 2)]
    assert read_prompts(pipe, PROMPTS, columns=8 + 60) == read
    with pytest.raises(ValueError, match="have 8 token columns.*max_sequence_length=256 makes 264"):
        read_prompts(pipe, PROMPTS, columns=8)
