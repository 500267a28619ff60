"""A part of a word, and a word in the other form of its accents, wherever a word is asked for."""

from unicodedata import normalize

import numpy as np
import pytest
from helpers.tiny_pipelines import small_pipeline

import sdattn
from sdattn.edit import guide, inside

PROMPT = normalize("NFC", "a dog's café")
FAST = {"num_inference_steps": 2, "height": 64, "width": 64}
SAME = {"<characters 2:5>": "<columns 2:{}>", normalize("NFD", "Café"): normalize("NFC", "café")}


def drawn(pipe):
    return sdattn.generate(pipe, PROMPT, seed=0, **FAST)


def shown(pipe, word):
    return drawn(pipe).heatmaps[0][word].values


def segmented(pipe, word):
    return drawn(pipe).heatmaps[0].segment([word, "a"])


def guided(pipe, word):
    losses = [inside(word, (0, 0, 0.5, 0.5))]
    run = guide(pipe, PROMPT, losses, seed=0, steps=1.0, iterations=1, enough=0, **FAST)
    return np.asarray(run[0].image)


def knocked_out(pipe, word):
    return np.asarray(sdattn.knockout(pipe, PROMPT, word, 0, **FAST).without)


@pytest.mark.parametrize("entry", [shown, segmented, guided, knocked_out])
@pytest.mark.parametrize("asked", SAME)
def test_a_name_means_the_same_wherever_a_word_does(asked, entry):
    pipe = small_pipeline()
    tokens = sdattn.read_prompt(pipe.tokenizer, PROMPT).tokens
    own = [i for i, token in enumerate(tokens) if not token.special and 2 <= token.start < 5]
    assert own[0] == 2
    other = SAME[asked].format(own[-1] + 1)
    found, expected = entry(pipe, asked), entry(pipe, other)
    assert np.array_equal(found, expected)
    assert not np.array_equal(found, entry(pipe, "a"))


def test_a_heatmap_is_called_as_the_characters_are():
    heatmaps = drawn(small_pipeline()).heatmaps[0]
    part = heatmaps["<characters 2:5>"]
    assert part.label == heatmaps.find("<characters 2:5>")[0].label == "dog"
    assert set(part.columns) < set(heatmaps["dog's"].columns)
    assert heatmaps["<columns 2:4>"].label == "<columns 2:4>"
    assert heatmaps["<columns 2:4>"].columns == (2, 3)
    with pytest.raises(KeyError, match="<characters 2:5>"):
        heatmaps["dog"]
