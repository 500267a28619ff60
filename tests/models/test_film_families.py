"""How families of films read their prompts, against their own encode_prompt."""

import pytest
import torch
from helpers.film_rows import FILMS
from helpers.reading_pipelines import assert_same_columns, made_by, tells_ids

from sdattn.models.reading import read_prompts

PROMPTS = ["a red cat on the sofa", "A turquoise Cat, a dog (on a cat's SOFA)!", "un café 😀 cat"]


@pytest.mark.parametrize("row", FILMS, ids=str)
@pytest.mark.parametrize("length", [24, 6])
@pytest.mark.filterwarnings("ignore::sdattn.TruncationWarning")
def test_columns_are_those_of_encode_prompt(row, length):
    pipe = row.make()
    pipe.text_encoder = tells_ids(pipe.text_encoder.to(torch.float32))
    made = made_by(pipe, PROMPTS, max_sequence_length=length, do_classifier_free_guidance=False)
    read = read_prompts(pipe, PROMPTS, max_sequence_length=length)
    assert_same_columns(read, made, pipe.tokenizer)


def test_wan_refuses_what_it_would_rewrite():
    pipe = FILMS[0].make()
    [read] = read_prompts(pipe, " a red cat ", max_sequence_length=12)
    assert [word.text for word in read.words] == ["a", "red", "cat"]
    with pytest.raises(
        ValueError, match="A WanPipeline reads 'a cat & dog' for 'a  cat &amp; dog'"
    ):
        read_prompts(pipe, "a  cat &amp; dog", max_sequence_length=12)
