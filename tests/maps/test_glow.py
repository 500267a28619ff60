"""Heat over an image: the one formula against float64, brightness, outlines, scales, refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.overlays import overlaid, own_place, spotlit, tinted
from helpers.tiny_tokenizers import tiny_tokenizer
from PIL import Image

from sdattn import Heatmap, Heatmaps, read_prompt
from sdattn.maps.glow import WORD_COLORS, overlay, own_scale
from sdattn.maps.presets import PRESETS

RAMP = np.linspace(0, 1, 64 * 64).reshape(64, 64)
COLOURED = (200, 100, 50)
REFINED = replace(PRESETS["default"], refine="self")


def heatmap(values, label="cat", **options):
    return Heatmap(label, torch.as_tensor(np.asarray(values), dtype=torch.float32), (1,), **options)


def drawn(image, *maps, **options):
    return np.asarray(overlay(image, maps, **options), dtype=float)


@pytest.mark.parametrize(
    ("values", "options", "places"),
    [
        (0.3 * RAMP + 0.1, {}, (0.3 * RAMP + 0.1) / 0.4 * 0.5**0.5),  # half the strongest: 0.8
        (3 * RAMP, {}, RAMP),  # stronger than the strongest content word
        (0.3 * RAMP + 0.1, {"scale": "shared"}, (0.3 * RAMP + 0.1) / 0.8),
        (0.3 * RAMP, {"scale": (0.1, 0.2)}, (3 * RAMP - 1)),
        (0.3 * RAMP + 0.1, {"cmap": "viridis", "alpha": 0.4}, None),
    ],
)
def test_heat_is_light_that_covers_a_dark_grey_image(values, options, places):
    image = Image.effect_noise((64, 64), 80).convert("RGB").quantize(7).convert("RGB")
    places = own_place(values, 0.8) if places is None else places
    asked = {"cmap": options.get("cmap", "inferno"), "opacity": options.get("alpha", 0.85)}
    expected = overlaid(np.asarray(image), places, **asked)
    found = drawn(image, heatmap(values, top=0.8), **options)
    np.testing.assert_allclose(found, expected, atol=3)  # a colormap has 256 colours


def test_several_words_have_their_own_colours_and_mix_where_they_overlap():
    image = Image.new("RGB", (64, 64), COLOURED)
    maps = [0.8 * RAMP, 0.4 * RAMP.T, np.full((64, 64), 0.02)]
    tints = [(255, 128, 0), (47, 139, 255), (0, 255, 225)]
    assert [f"#{r:02x}{g:02x}{b:02x}" for r, g, b in tints] == [*WORD_COLORS[:3]]
    expected = tinted(COLOURED, [own_place(one, 0.8) for one in maps], tints)
    found = drawn(image, *(heatmap(one, top=0.8) for one in maps))
    # inside, at least two pixels from where a map has half its peak
    far = np.all([abs(one - one.max() / 2) > 0.05 * one.max() for one in maps], axis=0)
    assert far.mean() > 0.5
    np.testing.assert_allclose(found[far], expected[far], atol=1)
    single = drawn(image, heatmap(0.8 * RAMP, top=0.8), colors=["#2f8bff"])
    expected = tinted(COLOURED, [RAMP], [(47, 139, 255)])
    np.testing.assert_allclose(single[-1], expected[-1], atol=1)


@pytest.mark.parametrize(("size", "wide"), [(64, 1), (512, 2), (1000, 4)])
def test_words_in_colours_are_outlined_at_half_their_peak(size, wide):
    """A disc of 1 on 0.2: the line lies inside it, whole, in the word's colour, lighter."""
    down, right = np.mgrid[:size, :size] - (size - 1) / 2
    radius = np.hypot(down, right)
    values = np.where(radius < 0.3 * size, 1.0, 0.2)
    found = drawn(Image.new("RGB", (size, size)), heatmap(values), colors=["#00d084"])
    line = (found == (0x80, 0xE8, 0xC2)).all(-1)  # halfway to white
    assert line[size // 2].sum() == 2 * wide  # left and right
    assert radius[line].max() < 0.3 * size
    assert radius[line].min() > 0.3 * size - 1.5 * wide
    assert len(np.unique(np.round(np.arctan2(down, right)[line], 1))) >= 62  # all around
    weak = drawn(
        Image.new("RGB", (size, size)), heatmap(np.where(values > 0.5, 0.25, 0), top=1.0),
        colors=["#00d084"],
    )  # fmt: skip
    within = tinted((0, 0, 0), [np.array(0.5)], [(0x00, 0xD0, 0x84)])
    faint = (within + np.array([127.5, 231.5, 193.5])) / 2  # its peak is halfway on its scale
    assert np.abs(weak[line] - faint).max() <= 1
    flat = drawn(Image.new("RGB", (size, size)), heatmap(np.ones((8, 8))), colors=["#00d084"])
    assert len(np.unique(flat)) <= 3  # a map without an edge has no line


@pytest.mark.parametrize("image", [0, 40, 128, 255])
@pytest.mark.parametrize("cmap", ["inferno", "viridis", "cividis"])
def test_a_higher_value_is_never_darker(image, cmap):
    """Relative luminance along a map from 0 to its peak, on images from black to white."""
    base = Image.fromarray(np.full((4, 400, 3), image, np.uint8))
    ramp = np.linspace(0, 1, 400)[None].repeat(4, 0)
    found = drawn(base, heatmap(ramp), cmap=cmap)[0] / 255
    linear = np.where(found <= 0.04045, found / 12.92, ((found + 0.055) / 1.055) ** 2.4)
    light = linear @ np.array([0.2126, 0.7152, 0.0722])
    assert (light[16:] > light[:-16] - 0.001).all()  # in steps of 4 %: a colormap has 256 colours
    assert light[-1] > light[0] + 0.35
    np.testing.assert_allclose(255 * found[0], image / 3, atol=1)  # bare: a third as bright


def test_a_spotlight_keeps_the_images_colours_where_the_word_looked():
    image = Image.new("RGB", (64, 64), COLOURED)
    found = drawn(image, heatmap(RAMP), style="spotlight")
    np.testing.assert_allclose(found, spotlit(COLOURED, RAMP), atol=1)
    whole = drawn(image, heatmap(RAMP), style="spotlight", alpha=1.0)
    np.testing.assert_allclose(whole[-1, -1], COLOURED, atol=1)


@pytest.mark.parametrize(
    ("peak", "top", "place"),
    [(0.2, 0.2, 1.0), (0.05, 0.2, 0.5), (0.4, 0.2, 1.0), (0.1, 0.0, 1.0), (-0.1, 0.2, 1.0)],
)
def test_a_words_own_scale_gives_its_peak_the_root_of_its_share(peak, top, place):
    low, high = own_scale(peak, top)
    assert low == 0.0
    assert peak / high == pytest.approx(place)
    low, high = own_scale(peak, top, ground=0.04)
    assert (peak - low) / (high - low) == pytest.approx(place)


def test_a_word_that_nobody_looked_for_leaves_the_image_bare():
    image = Image.effect_noise((256, 256), 50).convert("RGB")
    assert own_scale(0.0, 0.0) == own_scale(0.0, 0.3) == (0.0, 0.0)
    bare = overlay(image, ())
    assert overlay(image, [heatmap(np.zeros((16, 16)), top=0.3)]).tobytes() == bare.tobytes()
    np.testing.assert_allclose(np.asarray(bare), np.asarray(image) / 3, atol=1)


def test_refined_maps_are_bare_up_to_their_lower_quarter():
    """They are above 0 everywhere: from 0 they would tint the whole image."""
    prompt = read_prompt(tiny_tokenizer(), "a cat")
    [cat] = prompt.find("cat")
    values = np.linspace(0.1, 0.5, 64).reshape(8, 8)
    maps = torch.zeros(8, 8, len(prompt.tokens))
    maps[..., cat] = torch.tensor(values, dtype=torch.float32)[..., None]
    found = Heatmaps(prompt, maps, preset=REFINED)["cat"]
    assert found.scale() == pytest.approx((values.ravel()[16], 0.5))
    assert Heatmaps(prompt, maps)["cat"].scale() == pytest.approx((0.0, 0.5))
    maps[..., cat] += 1  # no more than half the peak is taken for the ground
    assert Heatmaps(prompt, maps, preset=REFINED)["cat"].scale()[0] == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("size", "grid"),
    [((512, 512), (64, 64)), ((768, 512), (32, 48)), ((320, 640), (80, 40)), ((136, 72), (5, 9))],
)
def test_heat_lies_where_the_map_has_it(size, grid):
    values = np.zeros(grid)
    values[0, -1] = 1.0  # top right
    found = drawn(Image.new("RGB", size), heatmap(values))
    assert found.shape[:2] == size[::-1]
    row, col = np.unravel_index(found.sum(-1).argmax(), found.shape[:2])
    assert row < size[1] / grid[0]
    assert col > size[0] - size[0] / grid[1]
    assert found[-1, 0].max() < 10


@pytest.mark.parametrize(
    ("size", "grid"),
    [((96, 64), (5, 6)), ((96, 64), (4, 8)), ((64, 96), (6, 5)), ((512, 512), (64, 65))],
)
def test_a_grid_that_is_a_cell_off_is_refused(size, grid):
    with pytest.raises(ValueError, match=f"{grid[0]}x{grid[1]}.*belong"):
        overlay(Image.new("RGB", size), [heatmap(np.zeros(grid))])


@pytest.mark.parametrize(
    ("image", "kind"),
    [(None, TypeError), ("image.png", FileNotFoundError), (np.zeros((8, 8, 3, 1)), ValueError)],
    ids=["none", "name", "array"],
)
def test_what_is_no_image_is_refused(image, kind):
    with pytest.raises(kind, match="image"):
        overlay(image, [heatmap(np.zeros((2, 2)))])


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"scale": "stretch"}, "scale='stretch'.*'own', 'shared' or"),
        ({"scale": 3}, "scale=3"),
        ({"style": "heatt"}, "style='heatt'.*'heat' or 'spotlight'"),
        ({"alpha": 1.2}, "alpha=1.2"),
        ({"cmap": "infernoo"}, "inferno"),
        ({"colors": []}, "a colour for each of 1 maps"),
    ],
)
def test_an_option_that_cannot_be_is_refused(options, told):
    with pytest.raises(ValueError, match=told):
        overlay(Image.new("RGB", (8, 8)), [heatmap(RAMP)], **options)


def test_values_that_are_not_finite_are_refused():
    with pytest.raises(ValueError, match="not finite"):
        overlay(Image.new("RGB", (8, 8)), [heatmap(RAMP * np.nan)], scale=(0, 1))
