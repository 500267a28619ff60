"""One word's map as values, masks and in colour over its image."""

import io
import operator

import numpy as np
import pytest
import torch
from helpers.bilinear import stretch
from helpers.overlays import overlaid, spotlit
from helpers.smoothing import smooth_in_loops
from helpers.tiny_tokenizers import tiny_tokenizer
from matplotlib import pyplot
from PIL import Image

import sdattn
from sdattn import Heatmap, Heatmaps, read_prompt
from sdattn.maps import render

PROMPT = "a red cat and a turquoise dog"


@pytest.fixture
def blob():
    values = torch.zeros(4, 6)
    values[1:3, 3] = torch.tensor([0.4, 0.2])
    return Heatmap("cat", values, (2,))


def test_a_heatmap_has_the_shape_of_its_map_and_is_saved_as_a_notebook_shows_it(blob, tmp_path):
    assert blob.shape == np.asarray(blob).shape == (4, 6)
    assert Heatmap("cat", torch.zeros(3, 4, 6), (2,)).shape == (3, 4, 6)
    shown = Image.open(io.BytesIO(blob._repr_png_()))
    assert blob.save(tmp_path / "cat.png") == tmp_path / "cat.png"
    with Image.open(tmp_path / "cat.png") as saved:
        assert saved.tobytes() == shown.tobytes()
    blob.save(str(tmp_path / "cat.webp"))
    with Image.open(tmp_path / "cat.webp") as saved:
        assert saved.size == shown.size
    for name in ("cat", "cat.npy"):
        with pytest.raises(ValueError, match=r"path.*\.png"):
            blob.save(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        blob.save(tmp_path / "nowhere" / "cat.png")


def test_for_numpy_a_heatmap_is_the_array_of_its_values(blob):
    array = np.asarray(blob)
    assert array.dtype == np.float32
    np.testing.assert_array_equal(array, blob.values.tolist())
    assert np.shares_memory(array, blob.values.numpy())
    assert np.asarray(blob, dtype="float64").dtype == np.float64
    copy = np.array(blob)
    copy[:] = 7
    assert float(blob.values.max()) == pytest.approx(0.4)
    assert np.stack([blob, blob]).shape == (2, 4, 6)
    assert np.max(blob) == array.max() and (blob > np.float32(0.3)).sum() == 1


def test_copies_are_made_as_numpy_asks(blob):
    assert not np.shares_memory(blob.__array__(copy=True), blob.values.numpy())
    assert np.shares_memory(blob.__array__(np.float32, copy=False), blob.values.numpy())
    if np.lib.NumpyVersion(np.__version__) >= "2.0.0":  # in numpy 1 False is "as needed"
        with pytest.raises(ValueError, match="copy"):
            blob.__array__(np.float64, copy=False)


WAYS = {
    "as_tensor": torch.as_tensor,
    "asarray": torch.asarray,
    "tensor": torch.tensor,
    "from_dlpack": torch.from_dlpack,
    "numpy's": lambda heatmap: torch.from_numpy(np.from_dlpack(heatmap)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6)])
def test_for_torch_a_heatmap_is_the_tensor_of_its_values(way, learns, shape):
    heatmap = Heatmap("cat", torch.rand(shape, requires_grad=learns), (2,))
    tensor = WAYS[way](heatmap)
    assert tensor.dtype == torch.float32 and not tensor.requires_grad
    assert tensor.tolist() == heatmap.values.tolist()
    assert (tensor.data_ptr() == heatmap.values.data_ptr()) == (way != "tensor")
    if way not in ("from_dlpack", "numpy's"):
        assert WAYS[way](heatmap, dtype=torch.float64).tolist() == heatmap.values.tolist()


SIGNS = {"-": operator.sub, "+": operator.add, "*": operator.mul, "/": operator.truediv}
OTHERS = {
    "a heatmap": lambda values: Heatmap("dog", values, (3,)),
    "an array": lambda values: values.double().numpy(),
    "a tensor": lambda values: values,
    "a number": lambda _: 0.25,
}


@pytest.mark.parametrize("sign", SIGNS)
@pytest.mark.parametrize("kind", OTHERS)
def test_maps_are_reckoned_with_cell_by_cell(sign, kind):
    one, two = torch.rand(2, 4, 6, generator=torch.Generator().manual_seed(0)) + 0.5
    heatmap, other = Heatmap("cat", one, (2,)), OTHERS[kind](two)
    found = SIGNS[sign](heatmap, other)
    assert found.shape == (4, 6) and isinstance(found, torch.Tensor) == (kind == "a tensor")
    for row in range(4):
        for col in range(6):
            theirs = 0.25 if kind == "a number" else float(two[row, col])
            expected = SIGNS[sign](float(one[row, col]), theirs)
            assert float(found[row, col]) == pytest.approx(expected, rel=1e-6, abs=1e-7)
    if sign != "/":
        turned = SIGNS[sign](other, heatmap)
        np.testing.assert_array_equal(turned, -found if sign == "-" else found)


def test_a_heatmap_is_still_one_thing(blob):
    """It is compared and hashed as an object, and never changed in place."""
    twin = Heatmap("cat", blob.values, (2,))
    assert blob != twin and len({blob, twin}) == 2
    before, map_ = blob.values.clone(), blob
    map_ -= 0.1
    assert isinstance(map_, np.ndarray) and torch.equal(blob.values, before)


def test_a_map_that_learns_can_be_read():
    values = torch.rand(2, 3, requires_grad=True)
    np.testing.assert_array_equal(Heatmap("cat", values, (2,)), values.tolist())


def test_a_plot_draws_each_cell_in_axes_of_its_own_or_in_yours(blob):
    figure, mine = pyplot.subplots()
    try:
        heatmap = Heatmap("$x^{$", blob.values, (2,))  # no formula
        assert heatmap.plot(ax=mine, vmin=0, vmax=1, cmap="gray") is mine
        [drawn] = mine.images
        np.testing.assert_array_equal(drawn.get_array(), blob.values)
        assert drawn.get_clim() == (0, 1)
        assert (drawn.get_cmap().name, mine.get_title()) == ("gray", "$x^{$")
        figure.canvas.draw()
        other = blob.plot()
        assert other is not mine and other.figure is not figure
        assert other.images[0].get_clim() == pytest.approx((0, 0.4))
    finally:
        pyplot.close("all")


def test_words_of_a_prompt_are_plotted_and_shown_on_one_scale(blob):
    weak = Heatmap("of", blob.values / 10, (3,), top=0.4)
    try:
        assert weak.plot().images[0].get_clim() == (0, 0.4)
    finally:
        pyplot.close("all")
    light = [
        np.asarray(Image.open(io.BytesIO(heatmap._repr_png_())).convert("L"))[:256].max()
        for heatmap in (weak, blob)
    ]
    assert light[0] < light[1] / 3


def test_a_notebook_shows_the_map_in_colour(blob):
    with Image.open(io.BytesIO(blob._repr_png_())) as image:
        assert image.format == "PNG"
        assert image.width == 6 * 64 and image.height > 4 * 64  # 256 pixels and a caption
        pixels = np.asarray(image.convert("RGB"), int)
    light = pixels[: 4 * 64].sum(-1).reshape(4, 64, 6, 64)[:, 32, :, 32]  # middles of cells
    assert np.unravel_index(light.argmax(), light.shape) == (1, 3)
    assert light[0, 0] < light[2, 3] < light[1, 3]


def test_mask_is_where_the_map_reaches_its_share_of_the_range(blob):
    assert blob.range == pytest.approx((0.0, 0.4))
    assert blob.mask(threshold=0.6).nonzero().tolist() == [[1, 3]]
    assert blob.mask(threshold=0.5).nonzero().tolist() == [[1, 3], [2, 3]]
    large = blob.mask(size=(40, 60), threshold=0.5)
    expected = stretch(blob.values.double().numpy(), (40, 60))
    assert large.dtype == torch.bool
    assert (large.numpy() == (expected >= 0.5 * expected.max() - 1e-9)).all()
    assert not Heatmap("cat", torch.zeros(4, 6), (2,)).mask(threshold=0.0).any()
    with pytest.raises(ValueError, match="size=.*height, width"):
        blob.resize(None)


@pytest.mark.parametrize(
    ("options", "inside"),
    [
        ({}, [(0, 0), (1, 2), (1, 3)]),
        ({"threshold": 0.2}, [(0, 0), (0, 3), (1, 2), (1, 3)]),
        ({"threshold": "otsu"}, [(0, 0), (1, 2), (1, 3)]),
        ({"quantile": 0.9}, [(0, 0)]),
        ({"largest": True}, [(1, 2), (1, 3)]),
    ],
)
def test_a_mask_is_cut_as_was_asked(options, inside):
    one = Heatmap("cat", torch.tensor([[1.0, 0.1, 0.0, 0.3], [0.1, 0.0, 0.8, 0.9]]), (2,))
    assert [tuple(place) for place in one.mask(**options).nonzero().tolist()] == inside


@pytest.mark.parametrize("size", [None, (7, 15)])
def test_the_map_is_blurred_in_its_own_cells_before_it_is_enlarged(size):
    """A lone bright cell is no longer above half the peak of a field of lesser ones."""
    values = torch.zeros(7, 15)
    values[3, 2], values[2:5, 9:12] = 1.0, 0.6
    one = Heatmap("cat", values, (2,))
    assert one.mask(size)[3, 2]
    mask = one.mask(size, sigma=1.0)
    blurred = smooth_in_loops(values.numpy(), 1.0, 3)
    np.testing.assert_array_equal(mask.numpy(), blurred >= (blurred.min() + blurred.max()) / 2)
    assert not mask[3, 2]
    large = one.mask((70, 150), sigma=1.0)
    expected = stretch(blurred, (70, 150))
    np.testing.assert_array_equal(large.numpy(), expected >= (expected.min() + expected.max()) / 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 0.4, "quantile": 0.5}, "two ways.*level"),
        ({"threshold": "auto"}, "threshold='auto'"),
        ({"threshold": -0.1}, "from 0 to 1"),
        ({"threshold": float("nan")}, "from 0 to 1"),
        ({"quantile": 1.0}, "from 0 to below 1"),
        ({"sigma": -1.0}, "sigma=-1.0"),
        *(
            ({"size": size}, "size=.*height, width")
            for size in (64, (64,), (2, 3, 4), (1.5, 2), (0, 4))
        ),
    ],
)
def test_masks_that_cannot_be_are_refused(blob, options, message):
    with pytest.raises(ValueError, match=message):
        blob.mask(**options)


def test_an_image_stands_for_its_size(blob, tmp_path):
    """Of 36x24 pixels (width x height), which PIL says the other way round than tensors."""
    image = Image.new("RGB", (36, 24))
    image.save(tmp_path / "a.png")
    for given in (image, np.zeros((24, 36, 3), np.uint8), tmp_path / "a.png"):
        assert torch.equal(blob.mask(given), blob.mask((24, 36)))
        assert torch.equal(blob.resize(given), blob.resize((24, 36)))
    with pytest.raises(ValueError, match="4x6 cells.*24x36"):  # of another run
        blob.mask(image.transpose(Image.Transpose.ROTATE_90))


def test_a_size_as_pil_says_it_is_refused(blob):
    for ask in (blob.mask, blob.resize):
        with pytest.raises(ValueError, match=r"\(36, 24\).*here \(24, 36\): the map has 4x6 cells"):
            ask((36, 24))
        assert ask((32, 32)).shape == (32, 32)  # that fits neither way is meant so


def test_overlay_is_the_size_of_the_image_enlarged(blob):
    image = blob.overlay(Image.new("RGB", (96, 64)))
    assert image.width == 96 * 4
    assert image.height > 64 * 4
    with pytest.raises(ValueError, match="4x6.*belong.*64x64"):
        blob.overlay(Image.new("RGB", (64, 64)))
    assert sdattn.Heatmap is Heatmap


def of_peaks(prompt, **peaks):
    """Heatmaps whose words have these peaks, all others one of 0.9 there where nobody looks."""
    read = read_prompt(tiny_tokenizer(), prompt)
    maps = torch.full((2, 3, len(read.tokens)), 0.9)
    for word in read.seen:
        maps[..., word.columns] = 0.0
        maps[0, 1, word.columns[0]] = peaks[word.text]
    return Heatmaps(read, maps)


def test_words_are_drawn_on_their_own_scale_dimmed_by_their_share_of_the_strongest():
    found = of_peaks("a red cat", a=0.8, red=0.2, cat=0.5)
    assert found.top == found["a"].top == found["red"].top == found[0].top == 0.5
    image = Image.new("RGB", (384, 256), (200, 100, 50))

    def middle(word, **options):  # of the cell with the peak
        return np.asarray(found[word].overlay(image, **options), dtype=float)[64, 192]

    for word, own, shared in (("a", 1.0, 1.0), ("red", 0.4**0.5, 0.4), ("cat", 1.0, 1.0)):
        expected = overlaid((200, 100, 50), own)
        np.testing.assert_allclose(middle(word), expected, atol=6)
        expected = overlaid((200, 100, 50), shared)
        np.testing.assert_allclose(middle(word, scale="shared"), expected, atol=6)
    expected = overlaid((200, 100, 50), 0.5)
    np.testing.assert_allclose(middle("red", scale=(0.1, 0.3)), expected, atol=6)
    expected = spotlit((200, 100, 50), 0.4**0.5)
    np.testing.assert_allclose(middle("red", style="spotlight"), expected, atol=6)


def test_where_no_word_names_anything_all_set_the_scale():
    assert of_peaks("a", a=0.25).top == 0.25
    assert of_peaks("a red cat", a=0.8, red=0.2, cat=0.5).keep([1]).top == pytest.approx(0.8)


def test_an_overlay_starts_at_zero_and_not_at_the_lowest_value():
    values = torch.full((8, 8), 0.5)
    values[0, 0] = 1.0
    seen = Heatmap("cat", values, (1,), top=1.0).overlay(Image.new("RGB", (256, 256), "white"))
    np.testing.assert_allclose(seen.getpixel((200, 200)), overlaid([255] * 3, 0.5), atol=2.5)


def test_a_caption_says_the_label_and_the_peak(blob):
    image = Image.new("RGB", (256 * 3 // 2, 256))
    bare = blob.overlay(image, caption=False)
    for scale in ("own", "shared", (0.0, 9.0)):
        bare = blob.overlay(image, caption=False, scale=scale)
        expected = render.caption(bare, blob.label, f"peak {blob.values.max():.2g}")
        assert blob.overlay(image, scale=scale).tobytes() == expected.tobytes()
