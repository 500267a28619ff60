"""Colours of values, captions, sheets, sizes."""

import matplotlib
import numpy as np
import pytest
from PIL import Image

from sdattn.maps import render, sheets


def test_colours_run_from_the_smallest_to_the_largest_value():
    values = np.array([[0.1, 0.2], [0.3, 0.5]])
    found = render.colorize(values)
    expected = matplotlib.colormaps["inferno"]((values - 0.1) / 0.4)[..., :3]
    assert found.dtype == np.uint8
    np.testing.assert_allclose(found, expected * 255, atol=2.0)


def test_a_given_scale_and_a_flat_map():
    np.testing.assert_array_equal(
        render.colorize(np.full((2, 2), 3.0)), render.colorize(np.zeros((2, 2)), (0.0, 1.0))
    )
    np.testing.assert_array_equal(
        render.colorize(np.array([[5.0]]), (0.0, 1.0)), render.colorize(np.array([[1.0]]), (0, 1))
    )


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_values_that_are_not_finite_are_refused(bad):
    with pytest.raises(ValueError, match="not finite"):
        render.colorize(np.array([[0.0, bad]]))


@pytest.mark.parametrize("label", ["circle", "x" * 2000, "红色", "😀", "a\nb", "<b>"])
def test_captions_leave_the_image_as_it_is(label):
    image = Image.effect_noise((300, 260), 50).convert("RGB")
    out = render.caption(image, label, "0.1 to 0.2")
    assert out.size[0] == 300
    assert out.size[1] > 260
    assert out.crop((0, 0, 300, 260)).tobytes() == image.tobytes()
    strip = np.asarray(out)[260:]
    assert strip.max() > 100  # something is written


def test_the_grid_has_the_image_and_every_word():
    image = Image.effect_noise((256, 256), 50).convert("RGB")
    maps = [np.random.default_rng(i).random((16, 16)) for i in range(7)]
    tiles = [render.drawn(values, str(i), (0.0, 1.0)) for i, values in enumerate(maps)]
    sheet = sheets.grid(image, tiles, "a prompt")
    tile = tiles[0]
    columns = (sheet.width - 6) // (tile.width + 6)
    rows = (sheet.height - 6) // (tile.height + 6)
    assert columns * rows >= 8 > columns * (rows - 1)
    assert sheet.crop((6, 6, 262, 262)).tobytes() == image.tobytes()
    left = 6 + tile.width + 6
    assert sheet.crop((left, 6, left + tile.width, 6 + tile.height)).tobytes() == tile.tobytes()


def test_zero_is_the_neutral_colour_and_signs_mirror_each_other():
    values = np.array([[0.0, -0.2, 0.2, 0.05, -0.05]])
    zero, low, high, more, less = render.colorize_signed(values)[0].astype(int)
    expected = matplotlib.colormaps["RdBu_r"]
    np.testing.assert_array_equal(zero, np.rint(np.array(expected(0.5))[0] * 255 + [0] * 3))
    assert zero[0] == zero[1] == zero[2]
    np.testing.assert_allclose(low, np.array(expected(0.0)[:3]) * 255, atol=0.5)
    np.testing.assert_allclose(high, np.array(expected(1.0)[:3]) * 255, atol=0.5)
    assert low[2] > low[0]  # blue below zero
    assert high[0] > high[2]  # red above
    assert np.abs(more - zero).sum() < np.abs(high - zero).sum()
    assert np.abs(less - zero).sum() < np.abs(low - zero).sum()
    alone = render.colorize_signed(np.array([[0.0, 0.3]]))  # the scale reaches as far below
    np.testing.assert_array_equal(alone[0], [zero, high])


def test_a_map_without_differences_is_flat_and_neutral():
    image = np.asarray(render.signed(np.zeros((4, 6)), (60, 40)))
    assert image.shape == (40, 60, 3)
    assert (image == render.colorize_signed(np.array([[-1.0, 0.0, 1.0]]))[0, 1]).all()
    with pytest.raises(ValueError, match="not finite"):
        render.signed(np.full((2, 2), np.nan), (60, 40))


def test_a_signed_map_lies_where_it_should_and_keeps_its_scale():
    values = np.zeros((4, 6), dtype=np.float32)
    values[0, 5], values[3, 0] = 0.5, -1.0
    image = np.asarray(render.signed(values, (300, 200), "B - A"), dtype=int)
    assert image.shape[0] > 200
    red = image[:200, :, 0] - image[:200, :, 2]
    assert red[10, 290] > 20
    assert red[190, 10] < -50
    assert red[:120, :200].min() == red[80:, 100:].max() == 0
    neutral = render.colorize_signed(np.zeros((1, 1)))[0, 0]
    assert (image[90:110, 100:200] == neutral).all()


@pytest.mark.parametrize(("number", "across"), [(0, 1), (1, 1), (5, 1), (13, 2), (60, 3)])
def test_rows_go_on_beside_each_other_under_the_same_head(number, across):
    def tile(red, green):
        return Image.new("RGB", (60, 60), (red, green, 90))

    head = [tile(250, i) for i in range(3)]
    rows = [[tile(i, j) for j in range(3)] for i in range(number)]
    sheet = sheets.bands(head, rows)
    tiles = [*head * across, *(one for row in rows for one in row)]
    found = [color for _, color in sheet.getcolors(1 << 16) if color != (20, 20, 20)]
    assert sorted(found) == sorted({one.getpixel((0, 0)) for one in tiles})
    pixels = np.asarray(sheet)
    for i in (0, 1, 2):
        assert (pixels == (250, i, 90)).all(-1).sum() == across * 60 * 60
    firsts = [np.argwhere((pixels == (i, 0, 90)).all(-1))[0] for i in range(number)]
    order = [(int(left), int(top)) for top, left in firsts]
    assert order == sorted(order)


@pytest.mark.parametrize("text", ["", "one", "many words " * 300, "x" * 5000])
def test_text_above_a_sheet_is_wrapped_to_three_rows(text):
    tile = Image.new("RGB", (300, 200), (200, 0, 0))
    plain = sheets.bands([tile], [])
    headed = sheets.bands([tile], [], {"A": text, "B": "short"})
    assert headed.width == plain.width
    top = headed.height - plain.height
    assert 14 * 1.5 * 3 <= top <= 14 * 1.5 * 5 + 1
    assert headed.crop((0, top, *headed.size)).tobytes() == plain.tobytes()


@pytest.mark.parametrize("size", [(6400, 8), (51200, 8), (8, 6400), (10_000, 1), (4096, 3)])
def test_a_long_thin_image_is_not_enlarged_without_end(size):
    """No drawing has more pixels than a square of 1024, or four times those of the image."""
    image = Image.new("RGB", size)
    drawn = render.caption(render.enlarge(image), "word", "0 to 1")
    assert drawn.width * drawn.height <= max(1024**2, 4 * size[0] * size[1])
    assert sheets.grid(image, [drawn] * 3).width <= 3 * max(4096, size[0]) + 24
