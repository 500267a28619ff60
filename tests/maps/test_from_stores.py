"""Heatmaps of stores, and several words in one image; test_aggregation.py has the formulas."""

import pytest
import torch
from helpers.tiny_pipelines import make_pipeline, make_sdxl_pipeline

from sdattn import CaptureError, Heatmap, Heatmaps, MapStore, capture, heatmaps, read_prompt
from sdattn.maps.masks import smooth

PROMPT = "a red cat and a turquoise dog"


def run(pipe, prompt=PROMPT, seed=0, **options):
    settings = {"num_inference_steps": 2, "output_type": "np", "height": 128, "width": 192}
    return pipe(
        prompt, generator=torch.Generator().manual_seed(seed), **{**settings, **options}
    ).images


@pytest.fixture(scope="module")
def captured():
    pipe = make_pipeline()
    with capture(pipe) as store:
        run(pipe)
    return pipe, store


def test_sdxl_comes_at_its_finest_attention():
    pipe = make_sdxl_pipeline()
    with capture(pipe) as store:
        run(pipe)
    [found] = heatmaps(store, pipe.tokenizer, PROMPT)
    assert found.maps.shape == (8, 12, 77)
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(8, 12))


def test_the_wrong_tokenizer_is_refused(captured):
    _, store = captured
    with pytest.raises(ValueError, match="77.*columns.*20"):
        heatmaps(store, make_pipeline(max_length=20).tokenizer, PROMPT)


def test_the_wrong_number_of_prompts_is_refused(captured):
    pipe, store = captured
    with pytest.raises(ValueError, match="2 prompt.*1 image"):
        heatmaps(store, pipe.tokenizer, [PROMPT, PROMPT])


def test_self_attention_alone_has_no_words():
    pipe = make_pipeline()
    with capture(pipe, kinds=("self",), layers="mid") as store:
        run(pipe)
    with pytest.raises(CaptureError, match="maps"):
        heatmaps(store, pipe.tokenizer, PROMPT)


# -- several words in one image -----------------------------------------------------------------


@pytest.fixture
def scattered(tokenizer):
    generator = torch.Generator().manual_seed(4)
    values = torch.rand(5, 8, 77, generator=generator) ** 3
    return Heatmaps(read_prompt(tokenizer, "a red cat and a dog"), values)


@pytest.mark.parametrize("size", [None, (13, 17)])
@pytest.mark.parametrize(
    "options",
    [{}, {"threshold": 0.7}, {"threshold": "otsu"}, {"quantile": 0.75, "largest": True},
     {"sigma": 0.8, "threshold": 0.8}],
    ids=str,
)  # fmt: skip
def test_a_pixel_belongs_to_the_word_that_is_highest_in_its_range_there(scattered, size, options):
    words = ["cat", "a", "red cat"]
    found = scattered.segment(words, size, **options)
    assert found.dtype == torch.int64
    maps = [scattered[word] for word in words]
    sigma = options.get("sigma", 0.0)  # masks and values are of the same blurred maps
    maps = [Heatmap(one.label, smooth(one.values, sigma), one.columns) for one in maps]
    values = [one.values if size is None else one.resize(size) for one in maps]
    masks = [scattered[word].mask(size, **options) for word in words]
    assert tuple(found.shape) == (size or (5, 8))
    for y in range(found.shape[0]):
        for x in range(found.shape[1]):
            nearness = [float((one[y, x] - one.min()) / (one.max() - one.min())) for one in values]
            held = [i for i in range(3) if masks[i][y, x]]
            nearest = max(held, key=lambda i: nearness[i], default=-1)
            assert found[y, x] == nearest + 1
    assert set(found.unique().tolist()) == {0, 1, 2, 3}


def test_words_without_a_place_have_no_pixels(tokenizer):
    values = torch.zeros(2, 3, 77)
    values[0, 1, 2], values[1, :, 3] = 0.5, 0.2  # red, cat
    maps = Heatmaps(read_prompt(tokenizer, "a red cat dog"), values)
    assert maps.segment(["red", "cat", "dog"]).tolist() == [[0, 1, 0], [2, 2, 2]]
    assert maps.segment(["dog"]).tolist() == [[0, 0, 0]] * 2


@pytest.mark.parametrize("words", [[], "cat"])
def test_a_list_of_words_is_asked_for(scattered, words):
    with pytest.raises(ValueError, match="pass a list of words"):
        scattered.segment(words)


def test_a_word_that_is_not_in_the_prompt_has_no_segment(scattered):
    with pytest.raises(KeyError, match="cow"):
        scattered.segment(["cat", "cow"])


def test_maps_need_as_many_columns_as_the_prompt(tokenizer):
    with pytest.raises(ValueError, match="5.*prompt.*'a cat'"):
        Heatmaps(read_prompt(tokenizer, "a cat"), torch.zeros(2, 2, 5))


@pytest.mark.slow
def test_a_store_hands_prompt_and_options_on_to_heatmaps():
    pipe = make_pipeline()
    with capture(pipe, heads="all") as store:
        run(pipe, "a red cat")
    assert type(store) is MapStore
    assert store.heatmaps()[0].words == ("a", "red", "cat")
    (named,) = store.heatmaps(pipe, {"dog": [2]}, preset="daam")
    (expected,) = heatmaps(store, pipe, {"dog": [2]}, preset="daam")
    assert named.words == ("dog",)
    assert torch.equal(named["dog"].map, expected["dog"].map)
    with pytest.raises(ValueError, match="a blue dog"):  # another prompt than was drawn
        store.heatmaps(pipe, "a blue dog")
