"""Heatmaps against the formula in float64 and the law that a cell's attention sums to 1.

The formulas of the other presets are in test_aggregation.py.
"""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_pipelines import make_pipeline, make_sdxl_pipeline

import sdattn
from sdattn import CaptureError, Heatmap, Heatmaps, capture, heatmaps, read_prompt
from sdattn.maps.masks import smooth

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


LARGE = {"height": 256, "width": 384, "num_inference_steps": 4}  # 32x48, 16x24, 8x12, 4x6 cells


@pytest.fixture(scope="module")
def captured():
    pipe = make_pipeline()
    with capture(pipe, steps="all", heads="all") as store:
        run(pipe, **LARGE)
    return pipe, store


def way_up(store, columns, steps):
    """The mean over the layers of the way up on 16 cells and more, written out in float64."""
    layers = [name for name in store.maps if name.startswith("up_blocks")]
    layers = [name for name in layers if min(store.maps[name].shape[3:5]) >= 16]
    assert len(layers) == 6  # of two resolutions
    expected = np.zeros((32, 48))
    for name in layers:
        kept = store.maps[name][0, steps].double().mean((0, 1))  # over steps and heads
        expected += stretch(kept[..., list(columns)].sum(-1).numpy(), (32, 48)) / len(layers)
    return expected


def test_a_word_is_the_mean_over_the_way_up_of_its_columns(captured):
    """Over the second half of the schedule, as far as the store tells its steps apart."""
    pipe, store = captured
    columns = read_prompt(pipe.tokenizer, PROMPT).find("turquoise")[0]
    assert len(columns) == 9
    [found] = heatmaps(store, pipe.tokenizer, PROMPT)
    expected = way_up(store, columns, [2, 3])
    np.testing.assert_allclose(found["turquoise"].values.double(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("kept", "steps"),
    [("mean", [0, 1, 2, 3]), ("last", [3]), ((0.5, 1.0), [2, 3]), ((0.0, 0.3), [0]),
     ([0, 3], [0, 3]), ([0, 1], [0, 1])],
)  # fmt: skip
def test_other_steps_than_the_second_half_are_read_as_they_were_kept(captured, kept, steps):
    pipe, store = captured
    with capture(pipe, steps=kept) as some:
        run(pipe, **LARGE)
    [found] = heatmaps(some, pipe.tokenizer, PROMPT)
    expected = way_up(store, [3], steps)
    np.testing.assert_allclose(found["cat"].values.double(), expected, atol=1e-6)
    assert abs(expected - way_up(store, [3], [2, 3])).max() > 1e-5 or steps == [2, 3]


def test_a_cells_attention_sums_to_1(captured):
    pipe, store = captured
    [found] = heatmaps(store, pipe.tokenizer, PROMPT)
    torch.testing.assert_close(found.maps.sum(-1), torch.ones(32, 48))
    total = sum(one.values for one in found.occurrences())
    for special in ("<sos>", "<eos>", "<pad>"):
        total = total + found[special].values
    torch.testing.assert_close(total, torch.ones(32, 48))


def test_the_running_mean_gives_the_same(captured):
    pipe, store = captured
    with capture(pipe, steps=(0.5, 1.0)) as mean:
        run(pipe, **LARGE)
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
    assert repr(phrase).startswith("Heatmap('red cat', 32x48, ")


@pytest.mark.parametrize(("key", "message"), [("cow", "Its words are: a, red"), (77, "0 to 76")])
def test_what_is_not_there_is_told(captured, key, message):
    pipe, store = captured
    with pytest.raises(KeyError, match=message):
        heatmaps(store, pipe.tokenizer, PROMPT)[0][key]


def test_a_phrase_that_overlaps_itself_counts_each_of_its_columns_once():
    pipe = make_pipeline()
    with capture(pipe) as store:
        run(pipe, "cat cat cat")
    [found] = heatmaps(store, pipe.tokenizer, "cat cat cat")
    assert [one.columns for one in found.find("cat cat")] == [(1, 2), (2, 3)]
    expected = sum(found.token(column).values for column in (1, 2, 3))
    torch.testing.assert_close(found["cat cat"].values, expected)


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


# -- one heatmap ----------------------------------------------------------------------------------


@pytest.fixture
def blob():
    values = torch.zeros(4, 6)
    values[1:3, 3] = torch.tensor([0.4, 0.2])
    return Heatmap("cat", values, (2,))


def test_mask_is_where_the_map_reaches_its_share_of_the_range(blob):
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


def as_heatmap(rows):
    return Heatmap("cat", torch.tensor(rows), (2,))


def cells(mask):
    return [tuple(place) for place in mask.nonzero().tolist()]


def test_otsus_threshold_parts_the_two_classes():
    one = as_heatmap([[0.1, 0.2, 0.1, 0.3], [0.2, 0.9, 1.0, 0.2]])
    assert cells(one.mask(threshold="otsu")) == [(1, 1), (1, 2)]
    assert (0, 3) in cells(one.mask(threshold=0.2))


def test_a_quantile_leaves_out_its_part_of_the_cells():
    one = as_heatmap(torch.arange(20.0).reshape(4, 5).tolist())
    assert cells(one.mask(quantile=0.9)) == [(3, 3), (3, 4)]
    assert one.mask(quantile=0.0).all()


def test_only_the_largest_part_is_kept_where_that_is_asked():
    one = as_heatmap([[1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.8, 0.8]])
    assert cells(one.mask()) == [(0, 0), (1, 2), (1, 3)]
    assert cells(one.mask(largest=True)) == [(1, 2), (1, 3)]


@pytest.mark.parametrize("size", [None, (7, 15)])
def test_the_map_is_blurred_in_its_own_cells_before_it_is_enlarged(size):
    """A lone bright cell is no longer above half the peak of a field of lesser ones."""
    values = torch.zeros(7, 15)
    values[3, 2], values[2:5, 9:12] = 1.0, 0.6
    one = Heatmap("cat", values, (2,))
    assert one.mask(size)[3, 2]
    mask = one.mask(size, sigma=1.0)
    blurred = np.zeros((7, 15))
    weights = {(dy, dx): math.exp(-(dy**2 + dx**2) / 2) for dy in R3 for dx in R3}
    for y in range(7):
        for x in range(15):
            for (dy, dx), weight in weights.items():
                at = mirrored(y + dy, 7), mirrored(x + dx, 15)
                blurred[y, x] += weight * values[at].item() / sum(weights.values())
    np.testing.assert_array_equal(mask.numpy(), blurred >= (blurred.min() + blurred.max()) / 2)
    assert not mask[3, 2]
    large = one.mask((70, 150), sigma=1.0)
    expected = stretch(blurred, (70, 150))
    np.testing.assert_array_equal(large.numpy(), expected >= (expected.min() + expected.max()) / 2)


R3 = range(-3, 4)


def mirrored(place, count):
    """The border cell is the mirror: c b | a b c."""
    place = abs(place)
    return place if place < count else 2 * (count - 1) - place


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.4, "quantile": 0.5}, "two ways to set one level"),
        ({"threshold": "auto"}, 'Pass "otsu" or a share'),
        ({"quantile": 1.0}, "from 0 to below 1"),
        ({"sigma": -1.0}, "sigma=-1.0"),
        ({"size": (0, 4)}, "pass \\(height, width\\)"),
    ],
)
def test_masks_that_cannot_be_are_refused(blob, options, message):
    with pytest.raises(ValueError, match=message):
        blob.mask(**options)


# -- several words in one picture -----------------------------------------------------------------


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


def test_the_range_of_summed_shares_is_called_no_probability():
    pipe = make_pipeline()
    found = sdattn.generate(pipe, PROMPT, preset="sum", num_inference_steps=1).heatmaps[0]
    low, high = found["<sos>"].range
    assert (low, high) == (found["<sos>"].values.min(), found["<sos>"].values.max())
    assert float(found.maps.sum(-1).max()) > 1.5
    assert "summed" in sdattn.PRESETS["sum"].unit
    assert "probability" not in Heatmap.range.__doc__
