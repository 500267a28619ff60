"""Heatmaps against the formula in float64 and the law that a cell's attention sums to 1."""

import numpy as np
import pytest
import torch
from conftest import make_pipeline, make_sdxl_pipeline
from PIL import Image

import sdattn
from sdattn import CaptureError, Heatmap, Heatmaps, capture, heatmaps, read_prompt
from sdattn.heatmaps import average_layers

PROMPT = "a red cat and a turquoise dog"


def run(pipe, prompt=PROMPT, seed=0, **options):
    settings = {"num_inference_steps": 2, "output_type": "np", "height": 128, "width": 192}
    return pipe(
        prompt, generator=torch.Generator().manual_seed(seed), **{**settings, **options}
    ).images


def stretch(values, size):
    """Bilinear with aligned cell centres, written out: float64 ``[rows, cols]``."""
    out = np.zeros(size)
    for r in range(size[0]):
        for c in range(size[1]):
            y = (r + 0.5) * values.shape[0] / size[0] - 0.5
            x = (c + 0.5) * values.shape[1] / size[1] - 0.5
            y, x = np.clip(y, 0, values.shape[0] - 1), np.clip(x, 0, values.shape[1] - 1)
            y0, x0 = int(y), int(x)
            y1, x1 = min(y0 + 1, values.shape[0] - 1), min(x0 + 1, values.shape[1] - 1)
            fy, fx = y - y0, x - x0
            top = values[y0, x0] * (1 - fx) + values[y0, x1] * fx
            bottom = values[y1, x0] * (1 - fx) + values[y1, x1] * fx
            out[r, c] = top * (1 - fy) + bottom * fy
    return out


@pytest.fixture(scope="module")
def captured():
    pipe = make_pipeline()
    with capture(pipe, steps="all", heads="all") as store:
        run(pipe)
    return pipe, store


def test_a_word_is_the_mean_over_layers_of_its_columns(captured):
    pipe, store = captured
    [found] = heatmaps(store, pipe.tokenizer, PROMPT)
    columns = read_prompt(pipe.tokenizer, PROMPT).find("turquoise")[0]
    assert len(columns) == 9
    expected = np.zeros((16, 24))
    for name in store.maps:
        one = store.maps[name][0].double().mean((0, 1))[..., list(columns)].sum(-1).numpy()
        expected += stretch(one, (16, 24)) / len(store.maps)
    np.testing.assert_allclose(found["turquoise"].values.double(), expected, atol=1e-6)


def test_a_cells_attention_sums_to_1(captured):
    pipe, store = captured
    [found] = heatmaps(store, pipe.tokenizer, PROMPT)
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(16, 24))
    total = sum(one.values for one in found.occurrences())
    for special in ("<sos>", "<eos>", "<pad>"):
        total = total + found[special].values
    torch.testing.assert_close(total, torch.ones(16, 24))


def test_the_running_mean_gives_the_same(captured):
    pipe, store = captured
    with capture(pipe) as mean:
        run(pipe)
    [full], [short] = (heatmaps(s, pipe.tokenizer, PROMPT) for s in (store, mean))
    torch.testing.assert_close(full.maps, short.maps)


def test_words_phrases_tokens_and_repeats(captured):
    pipe, store = captured
    [found] = heatmaps(store, pipe.tokenizer, PROMPT)
    assert found.words == ("a", "red", "cat", "and", "a", "turquoise", "dog")
    assert list(found) == ["a", "red", "cat", "and", "turquoise", "dog"]
    assert len(found) == 6
    assert "cat" in found
    assert "cow" not in found
    phrase = found["red cat"]
    torch.testing.assert_close(phrase.values, found["red"].values + found["cat"].values)
    first, second = found.find("a")
    torch.testing.assert_close(found["a"].values, first.values + second.values)
    assert not torch.equal(first.values, second.values)
    torch.testing.assert_close(found[2].values, found["red"].values)
    assert found[2].label == "red</w>"
    assert repr(phrase).startswith("Heatmap('red cat', 16x24, ")


@pytest.mark.parametrize(("key", "message"), [("cow", "Its words are: a, red"), (77, "0 to 76")])
def test_what_is_not_there_is_told(captured, key, message):
    pipe, store = captured
    with pytest.raises(KeyError, match=message):
        heatmaps(store, pipe.tokenizer, PROMPT)[0][key]


def test_images_are_never_mixed():
    """Two prompts, two images each: as four single runs, with the same noise."""
    pipe = make_pipeline()
    prompts = ["a red cat", "dog dog and more"]
    latents = torch.randn(4, 4, 16, 24, generator=torch.Generator().manual_seed(3))
    with capture(pipe) as store:
        run(pipe, prompts, num_images_per_prompt=2, latents=latents)
    together = heatmaps(store, pipe.tokenizer, prompts)
    assert [one.prompt.text for one in together] == [prompts[0]] * 2 + [prompts[1]] * 2
    for i, one in enumerate(together):
        with capture(pipe) as store:
            run(pipe, prompts[i // 2], latents=latents[i : i + 1])
        [alone] = heatmaps(store, pipe.tokenizer, prompts[i // 2])
        torch.testing.assert_close(one.maps, alone.maps, atol=1e-6, rtol=0)


def test_chosen_columns_only():
    pipe = make_pipeline()
    columns = [c for one in read_prompt(pipe.tokenizer, PROMPT).find("cat") for c in one]
    with capture(pipe, tokens=columns) as store:
        run(pipe)
    [some] = heatmaps(store, pipe.tokenizer, PROMPT)
    with capture(pipe) as store:
        run(pipe)
    [every] = heatmaps(store, pipe.tokenizer, PROMPT)
    assert some.words == ("cat",)
    torch.testing.assert_close(some["cat"].values, every["cat"].values)
    with pytest.raises(KeyError, match="were not captured"):
        some["dog"]


def test_sdxl_comes_at_its_finest_attention():
    pipe = make_sdxl_pipeline()
    with capture(pipe) as store:
        run(pipe)
    [found] = heatmaps(store, pipe.tokenizer, PROMPT)
    assert found.maps.shape == (8, 12, 77)
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(8, 12))


def test_the_wrong_tokenizer_is_refused(captured):
    _, store = captured
    with pytest.raises(ValueError, match="on 77 token columns. The tokenizer makes 20"):
        heatmaps(store, make_pipeline(max_length=20).tokenizer, PROMPT)


def test_the_wrong_number_of_prompts_is_refused(captured):
    pipe, store = captured
    with pytest.raises(ValueError, match=r"2 prompt\(s\) do not fit 1 image"):
        heatmaps(store, pipe.tokenizer, [PROMPT, PROMPT])


def test_self_attention_alone_has_no_words():
    pipe = make_pipeline()
    with capture(pipe, kinds=("self",), layers="mid") as store:
        run(pipe)
    with pytest.raises(CaptureError, match="no maps of cross- or joint attention"):
        heatmaps(store, pipe.tokenizer, PROMPT)


def test_layers_of_one_resolution_are_averaged_as_they_are():
    maps = torch.rand(3, 2, 4, 5, 7)  # layers, images, rows, cols, tokens
    found = average_layers({str(i): one for i, one in enumerate(maps)})
    torch.testing.assert_close(found, maps.mean(0))


# -- one heatmap ----------------------------------------------------------------------------------


@pytest.fixture
def blob():
    values = torch.zeros(4, 6)
    values[1:3, 3] = torch.tensor([0.4, 0.2])
    return Heatmap("cat", values, (2,))


def test_mask_is_where_the_map_reaches_its_share_of_the_peak(blob):
    assert blob.range == pytest.approx((0.0, 0.4))
    assert blob.mask(threshold=0.6).nonzero().tolist() == [[1, 3]]
    assert blob.mask(threshold=0.5).nonzero().tolist() == [[1, 3], [2, 3]]
    large = blob.mask(size=(40, 60), threshold=0.5)
    expected = stretch(blob.values.double().numpy(), (40, 60))
    assert large.dtype == torch.bool
    assert (large.numpy() == (expected >= 0.5 * expected.max() - 1e-9)).all()
    assert not Heatmap("cat", torch.zeros(4, 6), (2,)).mask(threshold=0.0).any()


@pytest.mark.parametrize("threshold", [-0.1, 1.1, float("nan")])
def test_a_threshold_is_a_share(blob, threshold):
    with pytest.raises(ValueError, match="from 0 to 1"):
        blob.mask(threshold=threshold)


def test_sizes_below_one_pixel_are_refused(blob):
    with pytest.raises(ValueError, match="pass \\(height, width\\)"):
        blob.resize((0, 5))


def test_maps_need_as_many_columns_as_the_prompt(tokenizer):
    with pytest.raises(ValueError, match="5 token columns and the prompt 'a cat' has 77"):
        Heatmaps(read_prompt(tokenizer, "a cat"), torch.zeros(2, 2, 5))


def test_overlay_is_the_size_of_the_image_enlarged(blob):
    picture = blob.overlay(Image.new("RGB", (96, 64)))
    assert picture.width == 96 * 4
    assert picture.height > 64 * 4
    with pytest.raises(ValueError, match="4x6 cells does not belong to an image of 64x64"):
        blob.overlay(Image.new("RGB", (64, 64)))
    assert sdattn.Heatmap is Heatmap
