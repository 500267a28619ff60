"""Pictures: colours where the heat is, captions that tell the range, sizes."""

import matplotlib
import numpy as np
import pytest
from PIL import Image

from sdattn import render


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


@pytest.mark.parametrize(
    ("size", "grid"),
    [((512, 512), (64, 64)), ((768, 512), (32, 48)), ((320, 640), (80, 40)), ((136, 72), (5, 9))],
)
def test_heat_lies_where_the_map_has_it(size, grid):
    values = np.zeros(grid, dtype=np.float32)
    values[0, -1] = 1.0  # top right
    picture = np.asarray(render.overlay(Image.new("RGB", size), values), dtype=float)
    height, width = picture.shape[:2]
    assert (width / size[0]) == (height / size[1]) == max(1, -(-256 // min(size)))
    brightness = picture.sum(-1)
    row, col = np.unravel_index(brightness.argmax(), brightness.shape)
    assert row < height / grid[0]
    assert col > width - width / grid[1]
    assert brightness[-1, 0] < 30


def test_opacity_mixes_the_grey_picture_with_the_colours():
    image = Image.new("RGB", (256, 256), (200, 100, 50))
    values = np.linspace(0, 1, 256 * 256).reshape(256, 256)
    grey = np.asarray(image.convert("L"), dtype=float)[..., None]
    expected = 0.6 * grey + 0.4 * render.colorize(values)
    found = np.asarray(render.overlay(image, values, opacity=0.4), dtype=float)
    np.testing.assert_allclose(found, expected, atol=1.5)


@pytest.mark.parametrize("label", ["circle", "x" * 2000, "红色", "😀", "a\nb", "<b>"])
def test_captions_leave_the_picture_as_it_is(label):
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
    tiles = [render.overlay(image, values, str(i)) for i, values in enumerate(maps)]
    sheet = render.grid(image, tiles, "a prompt")
    tile = tiles[0]
    columns = (sheet.width - 6) // (tile.width + 6)
    rows = (sheet.height - 6) // (tile.height + 6)
    assert columns * rows >= 8 > columns * (rows - 1)
    assert sheet.crop((6, 6, 262, 262)).tobytes() == image.tobytes()
    left = 6 + tile.width + 6
    assert sheet.crop((left, 6, left + tile.width, 6 + tile.height)).tobytes() == tile.tobytes()
