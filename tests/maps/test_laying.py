"""Maps of a crop, laid where diffusers itself pastes what it drew there."""

import numpy as np
import pytest
import torch
from diffusers.image_processor import VaeImageProcessor
from helpers.bilinear import stretch
from helpers.tiny_tokenizers import tiny_tokenizer
from PIL import Image

from sdattn import Heatmaps, read_prompt
from sdattn.maps.finishing import finish
from sdattn.maps.laying import cut
from sdattn.maps.presets import PRESETS
from sdattn.models.crops import Crop

CROPS = {
    "as drawn": Crop((168, 168, 248, 248), (256, 256), (128, 128)),
    "wide": Crop((178, 142, 262, 198), (320, 256), (96, 64)),
    "at the edge": Crop((0, 40, 60, 80), (101, 83), (96, 64)),
    "cut above and below": Crop((10, 5, 110, 35), (120, 40), (64, 64)),
    "cut left and right": Crop((3, 0, 35, 100), (40, 100), (96, 64)),
}


def maps_of(crop, cells=8):
    """Of 77 columns, on a grid of the proportions that were drawn."""
    rows, cols = crop.drawn[1] // cells, crop.drawn[0] // cells
    numbers = torch.Generator().manual_seed(0)
    return torch.rand(rows, cols, 77, generator=numbers).softmax(-1)


def hill(crop):
    """A smooth map, highest off the middle, in [0, 1]."""
    rows, cols = crop.drawn[1] // 4, crop.drawn[0] // 4
    y, x = torch.meshgrid(torch.linspace(0, 1, rows), torch.linspace(0, 1, cols), indexing="ij")
    return (-((y - 0.45) ** 2 + (x - 0.6) ** 2) / 0.1).exp()


def heatmaps_of(crop, preset="default"):
    prompt = read_prompt(tiny_tokenizer(), "a red cat")
    return finish(maps_of(crop), prompt, PRESETS[preset], crop=crop)


@pytest.mark.parametrize("crop", CROPS.values(), ids=CROPS)
def test_a_map_lies_where_diffusers_pastes_the_crop(crop):
    drawn = hill(crop)
    word = finish(drawn[..., None].repeat(1, 1, 77), word_prompt(), PRESETS["default"], crop=crop)[
        "cat"
    ]
    # the map at the size of the crop's own image, pasted as diffusers pastes that image
    shades = stretch(drawn.numpy(), crop.drawn[::-1])
    image = Image.fromarray(np.rint(shades * 255).astype(np.uint8)).convert("RGB")
    everywhere, nothing = Image.new("L", crop.image, 255), Image.new("RGB", crop.image)
    processor = VaeImageProcessor(resample="bilinear")
    pasted = processor.apply_overlay(everywhere, nothing, image, crop.box)
    expected = np.asarray(pasted.convert("L"), float) / 255
    found = word.resize(crop.image[::-1]).numpy()
    left, top, right, bottom = crop.box
    apart = abs(found - expected)
    assert apart[top:bottom, left:right].mean() < 0.01 and apart.max() < 0.1
    outside = np.ones_like(found, bool)
    outside[top:bottom, left:right] = False
    assert (found[outside] == 0).all() and (found[~outside] > 0).all()


def test_a_crop_of_the_drawn_proportions_changes_no_value():
    crop = CROPS["as drawn"]
    maps = heatmaps_of(crop).maps
    assert crop.kept == (1.0, 1.0) and torch.equal(maps, maps_of(crop))
    whole = Heatmaps(word_prompt(), maps)["cat"]
    inner = heatmaps_of(crop)["cat"].resize((256, 256))[168:248, 168:248]
    torch.testing.assert_close(inner, whole.resize((80, 80)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ["cut above and below", "cut left and right"])
def test_what_was_cut_off_is_in_no_map(name):
    crop, sides = CROPS[name], ("cut above and below", "cut left and right")
    maps = torch.zeros(2, crop.drawn[1], crop.drawn[0])
    middle = [crop.drawn[1] / 2, crop.drawn[0] / 2]
    box = crop.box[3] - crop.box[1], crop.box[2] - crop.box[0]
    scale = max(box[0] / crop.drawn[1], box[1] / crop.drawn[0])
    reach = [side / scale / 2 for side in box]
    axis = sides.index(name)
    at = torch.arange(maps.shape[1 + axis]) + 0.5
    out = (at - middle[axis]).abs() > reach[axis] + 1
    maps.movedim(1 + axis, 0)[out] = 1.0  # what lies around the box, alone
    found = cut(maps, crop)
    assert found.shape[0] == 2 and found.shape[1 + axis] == np.ceil(2 * reach[axis])
    assert out.any() and not found.any()


def test_columns_of_a_crop_still_sum_to_one():
    for crop in CROPS.values():
        total = heatmaps_of(crop).maps.sum(-1)
        torch.testing.assert_close(total, torch.ones_like(total), atol=1e-5, rtol=0)


def test_the_map_is_of_the_whole_image_in_the_cells_own_values():
    word = heatmaps_of(CROPS["wide"])["cat"]
    assert word.map.shape == (37, 46) and word.values.shape == (8, 12)  # cells of 7 pixels
    assert torch.equal(
        word.map.unique(), torch.cat([torch.zeros(1), word.values.flatten()]).unique()
    )
    assert np.array_equal(np.asarray(word), word.map.numpy())


@pytest.mark.parametrize("options", [{}, {"threshold": "otsu"}, {"quantile": 0.7}, {"sigma": 1.0}])
def test_a_mask_has_its_level_from_the_crop_alone(options):
    crop = CROPS["wide"]
    word = heatmaps_of(crop)["cat"]
    alone = Heatmaps(word_prompt(), maps_of(crop))["cat"]
    left, top, right, bottom = crop.box
    mask = word.mask(crop.image[::-1], **options)
    inner = mask[top:bottom, left:right]
    assert torch.equal(inner, alone.mask((bottom - top, right - left), **options))
    assert mask.sum() == inner.sum() > 0
    assert word.mask(**options).shape == word.map.shape


def word_prompt():
    return read_prompt(tiny_tokenizer(), "a red cat")


def test_words_of_a_crop_part_it_among_themselves():
    crop = CROPS["wide"]
    words, size = ["red", "cat"], crop.image[::-1]
    left, top, right, bottom = crop.box
    found = heatmaps_of(crop).segment(words, size)
    alone = Heatmaps(word_prompt(), maps_of(crop)).segment(words, (bottom - top, right - left))
    assert torch.equal(found[top:bottom, left:right], alone)
    assert found.count_nonzero() == alone.count_nonzero() > 0
    assert heatmaps_of(crop).segment(words).shape == (37, 46)


def test_statistics_place_the_crop_in_the_image():
    crop = CROPS["wide"]
    left, top, _, bottom = crop.box
    word = heatmaps_of(crop)["cat"]
    found, values = word.statistics(), word.values.double()
    cell = (bottom - top) / 8
    rows = top + (torch.arange(8).double() + 0.5) * cell
    cols = left + (torch.arange(12).double() + 0.5) * cell
    row = (values.sum(1) * rows).sum() / values.sum() / 256
    col = (values.sum(0) * cols).sum() / values.sum() / 320
    assert found.centre == pytest.approx((row.item(), col.item()))
    cells = (values >= (values.min() + values.max()) / 2).sum()
    assert found.area == pytest.approx(float(cells * cell**2 / (256 * 320)))
    assert found.peak == values.max() and found.mass == pytest.approx(values.sum().item())
    assert found.mean == pytest.approx(values.mean().item())


def test_xarray_has_the_places_of_the_cells_in_the_image():
    pytest.importorskip("xarray")
    crop = CROPS["wide"]
    found = heatmaps_of(crop).to_xarray()
    assert found.shape == (3, 8, 12)
    assert float(found.row[0]) == pytest.approx((142 + 3.5) / 256)
    assert float(found.col[-1]) == pytest.approx((262 - 3.5) / 320)


@pytest.mark.parametrize("stretch", [False, True])
def test_an_overlay_is_bare_around_the_crop(stretch):
    crop = CROPS["wide"]
    numbers = np.random.default_rng(0)
    image = Image.fromarray(numbers.integers(0, 256, (256, 320, 3), np.uint8))
    shown = np.asarray(heatmaps_of(crop)["cat"].overlay(image, stretch=stretch))[:256]
    grey = np.asarray(image.convert("L").convert("RGB"))
    left, top, right, bottom = crop.box
    apart = (shown != grey).any(-1)
    assert apart[top:bottom, left:right].mean() > 0.9
    apart[top:bottom, left:right] = False
    assert not apart.any()


def test_an_overlay_takes_the_image_of_the_run_alone():
    word = heatmaps_of(CROPS["wide"])["cat"]
    word.overlay(Image.new("RGB", (333, 266)))  # made larger, and rounded
    with pytest.raises(ValueError, match="320x256"):
        word.overlay(Image.new("RGB", (96, 64)))


def test_a_crop_of_less_than_a_pixel_is_still_to_be_seen():
    word = heatmaps_of(Crop((2001, 1001, 2007, 1005), (4000, 3000), (96, 64)))["cat"]
    assert word.resize((30, 40)).count_nonzero() == 1
    assert max(word.map.shape) == 2048 and word.map.count_nonzero() > 0


@pytest.mark.parametrize(
    "box", [(0, 0, 0, 10), (5, 0, 3, 10), (-1, 0, 10, 10), (0, 0, 65, 10), (0, 0, 10, 49)]
)
def test_a_box_that_is_no_part_of_the_image_is_refused(box):
    with pytest.raises(ValueError, match="no part"):
        Crop(box, (64, 48), (64, 64))
