"""Masks against answers found another way: all cuts tried, a search cell by cell, double loops."""

import math
from collections import deque

import numpy as np
import pytest
import torch
from helpers.smoothing import smooth_in_loops

from sdattn.maps.masks import (
    MaskSettings,
    components,
    label_map,
    largest_component,
    mask_of,
    otsu,
    quantile_level,
    smooth,
    threshold_level,
)


def random_values(*shape, seed=0, dtype=torch.float32):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def drawn(*lines):
    """A mask from lines of ``#`` and ``.``."""
    return torch.tensor([[mark == "#" for mark in line] for line in lines])


# -- smoothing ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("sigma", "radius"), [(0.8, None), (1.5, 2), (2.0, None), (3.0, 0)])
@pytest.mark.parametrize("size", [(9, 6), (3, 50), (2, 2), (1, 7), (1, 1)])
def test_smoothing_is_a_gaussian_over_the_mirrored_map(size, sigma, radius):
    values = random_values(*size, dtype=torch.float64)
    expected = smooth_in_loops(
        values.numpy(), sigma, math.ceil(3 * sigma) if radius is None else radius
    )
    np.testing.assert_allclose(smooth(values, sigma, radius), expected, atol=1e-12)


def test_the_smoothing_of_attend_and_excite():
    point = torch.zeros(5, 5)
    point[2, 2] = 1
    weights = torch.tensor([0, 0.2119416, 0.5761169, 0.2119416, 0])
    found = smooth(point, 0.5**0.5, radius=1)
    torch.testing.assert_close(found, weights[:, None] * weights)


def test_smoothing_leaves_what_has_nothing_to_smooth():
    maps = random_values(2, 4, 6)
    assert smooth(maps, 0) is maps
    assert torch.equal(smooth(maps[:, :1, :1], 4.0), maps[:, :1, :1])
    torch.testing.assert_close(smooth(torch.full((5, 8), 0.3), 1.7), torch.full((5, 8), 0.3))


def test_maps_are_smoothed_one_by_one_in_their_own_dtype():
    maps = random_values(2, 3, 5, 7)
    found = smooth(maps, 1.0)
    for i in range(2):
        for j in range(3):
            torch.testing.assert_close(found[i, j], smooth(maps[i, j], 1.0))
    assert smooth(maps.bfloat16(), 1.0).dtype == torch.bfloat16


def test_gradients_pass_through_the_smoothing():
    maps = random_values(4, 5, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda m: smooth(m, 1.0), maps)


@pytest.mark.parametrize("bad", [(-1.0, None), (math.nan, None), (math.inf, 2), (1.0, -1)])
def test_a_sigma_and_a_radius_are_numbers_of_cells(bad):
    with pytest.raises(ValueError, match=rf"sigma={bad[0]}, radius={bad[1]}: pass numbers"):
        smooth(torch.ones(3, 3), *bad)


@pytest.mark.parametrize("maps", [torch.ones(3), torch.ones(3, 3, dtype=torch.bool)])
def test_only_floating_point_grids_are_smoothed(maps):
    with pytest.raises(ValueError, match="rows, cols"):
        smooth(maps, 1.0)


# -- levels ---------------------------------------------------------------------------------------


def variances(values, level):
    """(between, within) the two classes that a level makes, from the definition."""
    classes = [values[values < level], values[values >= level]]
    mean = values.mean()
    between = sum(len(c) / len(values) * (c.mean() - mean) ** 2 for c in classes)
    within = sum(len(c) / len(values) * c.var() for c in classes)
    return between, within


@pytest.mark.parametrize("scale", [1.0, 1e-6, 1e6])
@pytest.mark.parametrize("seed", range(4))
def test_otsu_is_the_best_of_all_cuts(seed, scale):
    rng = np.random.default_rng(seed)
    low, high = rng.normal(0.2, 0.1, 90), rng.normal(0.7, 0.1, 60)
    values = scale * np.concatenate([low, high, high[:5]])  # some values occur twice
    levels = np.unique(values)[1:]
    between, within = np.array([variances(values, level) for level in levels]).T
    found = otsu(torch.from_numpy(values).reshape(5, 31))
    assert found == levels[between.argmax()]
    assert found == levels[within.argmin()]


def test_otsu_counts_in_float64():
    values = (1 + random_values(30, 50)).half()  # sums of these in float16 lose the differences
    exact = values.flatten().double().numpy()
    levels = np.unique(exact)[1:]
    between = [variances(exact, level)[0] for level in levels]
    assert otsu(values) == levels[np.argmax(between)]


def test_otsu_parts_two_values_and_takes_the_lower_of_equal_cuts():
    assert otsu(torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.25, 0.0]])) == 0.25
    assert otsu(torch.tensor([0.0, 1.0, 2.0])) == 1.0
    assert otsu(torch.tensor([-3.0, -3.0, -1.0])) == -1.0
    values = random_values(3, 50)
    assert torch.equal(mask_of(values, "otsu"), values >= otsu(values))
    assert otsu(values) in values.flatten().tolist()


@pytest.mark.parametrize("value", [0.0, 0.3, -1.0])
@pytest.mark.parametrize("size", [(4, 6), (1, 1)])
def test_nothing_stands_out_of_a_flat_map(value, size):
    flat = torch.full(size, value)
    assert otsu(flat) == quantile_level(flat, 0.0) == math.inf
    assert not mask_of(flat, "otsu").any()
    assert not mask_of(flat, quantile=0.0).any()
    assert not mask_of(flat, 0.0).any()


def test_a_share_is_of_the_range():
    values = 0.4 + 0.1 * random_values(3, 50, dtype=torch.float64)
    low, high = float(values.min()), float(values.max())
    for share in (0.1, 0.3, 1.0):
        expected = values.numpy() >= low + share * (high - low)
        assert (mask_of(values, share).numpy() == expected).all()
    assert mask_of(values, 0.0).all()
    assert torch.equal(mask_of(values), mask_of(values, 0.5))
    assert mask_of(values, 1.0).sum() == 1
    assert threshold_level(values, 0.0) == low
    assert torch.equal(mask_of(values - 7), mask_of(values))


def test_the_highest_value_reaches_any_share():
    for seed in range(200):  # where low + 1.0 * (high - low) may round above high
        values = random_values(2, 3, seed=seed) * 3 + 0.1
        assert mask_of(values, 1.0).any()


@pytest.mark.parametrize("quantile", [0.0, 0.1, 0.5, 0.77, 0.999])
def test_a_quantile_keeps_its_share_of_the_cells(quantile):
    values = random_values(40, 25, dtype=torch.float64)
    mask = mask_of(values, quantile=quantile)
    assert torch.equal(mask, values >= float(np.quantile(values.numpy(), quantile)))
    assert mask.sum().item() == pytest.approx(1000 * (1 - quantile), abs=1)
    assert mask.all() or values[mask].min() > values[~mask].max()


def test_all_cells_that_are_equal_to_the_quantile_count():
    values = torch.tensor([[0.0, 0.2, 0.2], [0.2, 0.2, 0.9]])
    assert mask_of(values, quantile=0.5).sum() == 5
    assert mask_of(values, quantile=0.9).nonzero().tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": -0.1}, "threshold=-0.1"),
        ({"threshold": 1.1}, "threshold=1.1"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"threshold": "mean"}, "threshold='mean'"),
        ({"quantile": -0.1}, "quantile=-0.1"),
        ({"quantile": 1.0}, "quantile=1.0"),
        ({"quantile": math.nan}, "quantile=nan.*0"),
        ({"threshold": 0.5, "quantile": 0.5}, "threshold=0.5.*quantile=0.5"),
        ({"threshold": "otsu", "quantile": 0.5}, "threshold='otsu' and quantile=0.5"),
    ],
)
def test_what_sets_no_level_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        mask_of(random_values(3, 4), **options)


@pytest.mark.parametrize("options", [{}, {"threshold": "otsu"}, {"quantile": 0.5}])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_maps_with_broken_values_are_refused(options, bad):
    values = random_values(3, 4)
    values[1, 2] = bad
    with pytest.raises(ValueError, match=r"\[3, 4\].*1 .*12 values"):
        mask_of(values, **options)
    with pytest.raises(ValueError, match="0 values"):
        mask_of(torch.zeros(0, 4), **options)


# -- parts ----------------------------------------------------------------------------------------


def search(mask):
    """The parts of a mask as lists of cells, found by spreading from each cell in turn."""
    left = {(r, c) for r, c in np.argwhere(mask).tolist()}
    parts = []
    for start in sorted(left):
        if start not in left:
            continue
        left.remove(start)
        part, waiting = [], deque([start])
        while waiting:
            r, c = waiting.popleft()
            part.append((r, c))
            near = {(r + i, c + j) for i in (-1, 0, 1) for j in (-1, 0, 1)} & left
            left -= near
            waiting.extend(near)
        parts.append(part)
    return parts


@pytest.mark.parametrize("size", [(20, 31), (3, 50), (50, 3), (1, 40), (40, 1), (1, 1)])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.45, 0.7])
def test_components_are_those_of_a_search_cell_by_cell(size, share):
    for seed in range(5):
        mask = random_values(*size, seed=seed) < share
        parts = search(mask.numpy())
        expected = np.zeros(size, dtype=np.int64)
        for number, part in enumerate(parts, 1):
            expected[tuple(np.array(part).T)] = number
        found = components(mask)
        assert found.dtype == torch.int64
        assert (found.numpy() == expected).all()
        largest = max(parts, key=len, default=[])  # the first of the largest
        cells = {(r, c) for r, c in largest_component(mask).nonzero().tolist()}
        assert cells == set(largest)


SPIRAL = drawn(
    "#########",
    "........#",
    "#######.#",
    "#.....#.#",
    "#.###.#.#",
    "#.#...#.#",
    "#.#####.#",
    "#.......#",
    "#########",
)


def test_a_spiral_is_one_and_its_gaps_are_another():
    assert components(SPIRAL).max() == 1
    cut = SPIRAL.clone()
    cut[0, 4] = False
    assert components(cut).max() == 2
    assert components(~SPIRAL).max() == 1


def test_corners_connect_and_the_ends_of_rows_do_not():
    assert components(drawn("#..#", ".#..", "...#")).tolist() == [
        [1, 0, 0, 2],
        [0, 1, 0, 0],
        [0, 0, 0, 3],
    ]
    assert components(drawn("..#", "...", "#..")).max() == 2
    assert components(drawn("...#", "#...")).max() == 2


@pytest.mark.parametrize("size", [(4, 5), (0, 5), (4, 0)])
def test_an_empty_mask_has_no_part(size):
    empty = torch.zeros(size, dtype=torch.bool)
    assert components(empty).tolist() == torch.zeros(size, dtype=torch.int64).tolist()
    assert torch.equal(largest_component(empty), empty)


def test_a_mask_can_be_cut_down_to_its_largest_part():
    values = torch.tensor([[0.9, 0.0, 0.7, 0.8], [0.0, 0.0, 0.1, 0.6]])
    assert mask_of(values, largest=True).nonzero().tolist() == [[0, 2], [0, 3], [1, 3]]
    assert torch.equal(mask_of(values, quantile=0.8, largest=True), drawn("#...", "...."))
    assert not mask_of(torch.zeros(2, 4), largest=True).any()


@pytest.mark.parametrize("mask", [torch.ones(3, 4), torch.ones(2, 3, 4, dtype=torch.bool)])
def test_only_masks_have_parts(mask):
    with pytest.raises(ValueError, match=r"Pass bool \[rows, cols\]"):
        components(mask)


# -- labels ---------------------------------------------------------------------------------------


def test_labels_are_those_of_a_loop_over_cells():
    scales = torch.tensor([1.0, 0.01, 5.0, 0.3])[:, None, None]
    values = (random_values(4, 6, 9, dtype=torch.float64) - 0.3) * scales  # some below 0
    masks = random_values(4, 6, 9, seed=1) < 0.4
    expected = np.zeros((6, 9), dtype=np.int64)
    for r in range(6):
        for c in range(9):
            holding = [word for word in range(4) if masks[word, r, c]]
            ranges = [(float(one.min()), float(one.max())) for one in values]
            shares = [
                (float(values[word, r, c]) - ranges[word][0]) / (ranges[word][1] - ranges[word][0])
                for word in holding
            ]
            if holding:
                expected[r, c] = holding[shares.index(max(shares))] + 1
    found = label_map(values, masks)
    assert found.dtype == torch.int64
    assert (found.numpy() == expected).all()
    assert set(expected.flatten()) == {0, 1, 2, 3, 4}


def test_equal_words_go_to_the_first_and_words_of_one_value_to_the_last():
    some = torch.tensor([[0.2, 0.1]])  # 1 and 0 in its range
    values = torch.stack([torch.full((1, 2), 9.0), some, 2 * some])
    masks = torch.ones(3, 1, 2, dtype=torch.bool)
    assert label_map(values, masks).tolist() == [[2, 1]]
    masks[0, 0, 1] = False
    assert label_map(values, masks).tolist() == [[2, 2]]
    masks[1:, 0, 0] = False
    assert label_map(values, masks).tolist() == [[1, 2]]


@pytest.mark.parametrize(
    ("values", "masks", "message"),
    [
        (torch.ones(2, 3, 4), torch.ones(2, 3, 5).bool(), r"values \[2, 3, 4\] with masks"),
        (torch.ones(2, 3, 4), torch.ones(2, 3, 4), "torch.float32"),
        (torch.ones(3, 4), torch.ones(3, 4).bool(), r"\[words, \(frames,\) rows, cols\]"),
        (torch.ones(0, 3, 4), torch.ones(0, 3, 4).bool(), "0 values"),
        (torch.full((1, 3, 4), math.nan), torch.ones(1, 3, 4).bool(), "12 values"),
    ],
)
def test_labels_need_values_and_masks_that_fit(values, masks, message):
    with pytest.raises(ValueError, match=message):
        label_map(values, masks)


# -- settings -------------------------------------------------------------------------------------


def test_settings_choose_words_and_a_level():
    some = MaskSettings(("Cat", "8k"), 0.25)
    assert [some.selects(word) for word in ("cat", "CAT", "cats", "8K", ",")] == [
        *(True, True, False, True, False)
    ]
    assert MaskSettings().selects("anything")
    values = random_values(3, 50)
    low, high = float(values.min()), float(values.max())
    assert some.level(values) == pytest.approx(low + 0.25 * (high - low))
    assert MaskSettings().level(values) == pytest.approx((low + high) / 2)
    assert MaskSettings(threshold="otsu").level(values) == otsu(values)


@pytest.mark.parametrize(
    "options",
    [
        *({"threshold": bad} for bad in (0, 1, -0.1, 1.1, math.nan, "mean")),
        *({"words": bad} for bad in ("cat", ("red cat",), ("",))),
    ],
)
def test_settings_that_cut_nothing_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        MaskSettings(**options)
