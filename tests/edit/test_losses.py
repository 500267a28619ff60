"""The losses of guide(), against their formulas in float64."""

import numpy as np
import pytest
import torch

import sdattn
from sdattn import Heatmaps
from sdattn.edit import apart, boxdiff, excite, inside, share_inside
from sdattn.maps.presets import PRESETS
from sdattn.prompts.tokens import read_labels

PROMPT = read_labels({"red cat": [1, 2], "dog": [3]}, 5)
ROWS, COLS = 8, 12


def some_maps(seed=0):
    """Attention shares [rows, cols, 5] that sum to 1, and what a loss is given of them."""
    logits = torch.randn(ROWS, COLS, 5, generator=torch.Generator().manual_seed(seed)).double()
    maps = logits.softmax(-1).requires_grad_()
    return maps.detach().numpy(), Heatmaps(PROMPT, maps), maps


def weights(box):
    """How much of each cell is in a box, by counting a fine grid of points."""
    fine = 40
    y, x = (np.arange(n * fine) + 0.5 for n in (ROWS, COLS))
    left, top, right, bottom = box
    down = (y >= top * ROWS * fine) & (y < bottom * ROWS * fine)
    across = (x >= left * COLS * fine) & (x < right * COLS * fine)
    points = np.outer(down, across).astype(float)
    return points.reshape(ROWS, fine, COLS, fine).mean((1, 3))


@pytest.mark.parametrize(
    "box", [(0, 0, 0.5, 0.5), (0.25, 0.5, 0.75, 1), (0.1, 0.2, 0.35, 0.9), (0, 0, 1, 1)]
)
def test_inside_is_the_share_of_the_mass_outside_the_box(box):
    plain, heatmaps, _ = some_maps()
    cat = plain[..., 1] + plain[..., 2]
    expected = (cat * weights(box)).sum() / cat.sum()
    assert float(share_inside(heatmaps["red cat"].values.detach(), box)) == pytest.approx(expected)
    assert float(inside("red cat", box)(heatmaps).detach()) == pytest.approx(1 - expected)


@pytest.mark.parametrize("box", [(0.25, 0.25, 0.75, 1), (0, 0, 0.5, 0.5)])
@pytest.mark.parametrize("part", [0.2, 0.7, 1e-6])
def test_boxdiff_is_the_sum_of_its_three_constraints(box, part):
    """As showlab/BoxDiff computes them, from the box's corners in cells."""
    plain, heatmaps, _ = some_maps()
    dog, mask = plain[..., 3], weights(box)

    def top(values, number):
        return np.sort(values.ravel())[::-1][: max(1, int(number))].mean()

    expected = (
        1 - top(dog * mask, part * mask.sum()) + top(dog * (1 - mask), part * (1 - mask).sum())
    )
    for axis, n, ends in ((0, COLS, (box[0], box[2])), (1, ROWS, (box[1], box[3]))):
        first, last = (round(end * n) for end in ends)
        wanted = np.zeros(n)
        wanted[first:last] = 1
        near = np.zeros(n)
        for corner in (first, last):
            near[max(corner - 1, 0) : min(corner + 2, n)] = 1
        expected += (abs(dog.max(axis) - wanted) * near).mean()
    assert float(boxdiff("dog", box, part)(heatmaps).detach()) == pytest.approx(expected)


def test_excite_is_one_minus_the_peak_of_the_word_with_the_lowest():
    plain, heatmaps, _ = some_maps()
    shares = plain / plain[..., 1:4].sum(-1, keepdims=True)  # among the words of the prompt
    kernel = np.exp(-(np.array([-1.0, 0.0, 1.0]) ** 2))  # the paper's code: "sigma 0.5", 3x3
    kernel /= kernel.sum()
    peaks = []
    for one in (shares[..., 1] + shares[..., 2], shares[..., 3]):
        padded = np.pad(one, 1, mode="reflect")
        down = sum(w * padded[i : i + ROWS] for i, w in enumerate(kernel))
        peaks.append(sum(w * down[:, i : i + COLS] for i, w in enumerate(kernel)).max())
    for words, expected in ((("red cat", "dog"), min(peaks)), (("dog",), peaks[1])):
        assert float(excite(*words)(heatmaps).detach()) == pytest.approx(1 - expected)


def test_maps_that_a_preset_smoothed_are_not_smoothed_again():
    _, _, maps = some_maps()
    read_so = Heatmaps(PROMPT, maps, preset=PRESETS["attend-and-excite"])
    shares = maps[..., 3] / maps[..., 1:4].sum(-1)
    assert float(excite("dog")(read_so).detach()) == pytest.approx(1 - float(shares.detach().max()))


def test_apart_is_the_overlap_of_two_words():
    plain, heatmaps, _ = some_maps()
    cat, dog = plain[..., 1] + plain[..., 2], plain[..., 3]
    expected = 2 * np.minimum(cat, dog).sum() / (cat + dog).sum()
    assert float(apart("red cat", "dog")(heatmaps).detach()) == pytest.approx(expected)
    assert float(apart("dog", "dog")(heatmaps).detach()) == pytest.approx(1)


@pytest.mark.parametrize(
    "loss",
    [
        inside("dog", (0, 0, 0.5, 0.6)),
        boxdiff("red cat", (0, 0, 0.5, 0.6)),
        excite("red cat", "dog"),
        apart("red cat", "dog"),
    ],
)
def test_gradients_are_those_of_finite_differences(loss):
    _, _, maps = some_maps(1)
    assert torch.autograd.gradcheck(lambda one: loss(Heatmaps(PROMPT, one)), [maps], eps=1e-7)


@pytest.mark.parametrize(
    "box",
    [
        *((0, 0, 0, 1), (0.5, 0.2, 0.4, 0.6), (0, 0, 1.1, 1), (-0.1, 0, 1, 1), (0, 0.3, 1, 0.3)),
        *((0, 0, 0.5), (0, 0, float("nan"), 1), "box", None, (0, 0, "1", 1), (0, 0, 64, 64)),
    ],
)
@pytest.mark.parametrize("make", [inside, boxdiff])
def test_boxes_that_cannot_be_are_refused_at_once(make, box):
    with pytest.raises(ValueError, match=r"`box=.*left, top, right, bottom"):
        make("dog", box)


def test_other_values_that_cannot_be():
    for part in (0, 1.5, -1):
        with pytest.raises(ValueError, match="`part="):
            boxdiff("dog", (0, 0, 1, 1), part)
    for words in ((), (3,), (["cat", "dog"],)):
        with pytest.raises(TypeError, match="words of the prompt"):
            excite(*words)
    with pytest.raises(sdattn.SdattnError, match="'cow' is not in the prompt"):
        apart("cow", "dog")(some_maps()[1])
