"""The numbers of one map against sums that are written out."""

import json
import math

import numpy as np
import pytest
import torch

from sdattn import Heatmap
from sdattn.files.records import read_record
from sdattn.maps.statistics import WordStatistics


def of(rows):
    return Heatmap("cat", torch.tensor(rows), (2, 5)).statistics()


def test_numbers_of_a_map_that_can_be_added_up_in_the_head():
    found = of([[0.0, 0.0, 0.25, 0.0], [0.0, 0.0, 0.5, 0.25]])
    assert (found.word, found.columns) == ("cat", (2, 5))
    assert (found.peak, found.mass, found.mean) == (0.5, 1.0, 0.125)
    row = (0.25 * 0.5 + 0.75 * 1.5) / 2
    col = (0.25 * 2.5 + 0.5 * 2.5 + 0.25 * 3.5) / 4
    assert found.centre == pytest.approx((row, col))
    assert found.area == 3 / 8  # at or above 0.25, half of the range
    assert found.entropy == pytest.approx(0.5 * math.log(2) + 2 * 0.25 * math.log(4))


@pytest.mark.parametrize("shape", [(16, 24), (7, 3), (1, 9), (5, 1)])
def test_numbers_of_any_map_are_those_of_numpy_in_float64(shape):
    values = np.random.default_rng(1).random(shape, np.float32) * 1e-3
    found = of(values.tolist())
    v = values.astype(np.float64)
    rows, cols = shape
    r, c = np.mgrid[:rows, :cols]
    assert found.peak == v.max()
    assert found.mass == pytest.approx(math.fsum(v.flat), rel=1e-12)
    assert found.mean == pytest.approx(math.fsum(v.flat) / (rows * cols), rel=1e-12)
    expected = np.average((r + 0.5) / rows, weights=v), np.average((c + 0.5) / cols, weights=v)
    assert found.centre == pytest.approx(expected, rel=1e-12)
    p = v / v.sum()
    assert found.entropy == pytest.approx(-(p * np.log(p)).sum(), rel=1e-12)
    middle = np.float32(values.min() + np.float32(0.5) * (values.max() - values.min()))
    assert found.area == (values >= middle).mean()


def test_centre_and_area_do_not_depend_on_the_grid():
    values = torch.rand(4, 6, generator=torch.Generator().manual_seed(3))
    coarse = Heatmap("cat", values, (2,)).statistics()
    fine = values.repeat_interleave(3, 0).repeat_interleave(2, 1)
    fine = Heatmap("cat", fine, (2,)).statistics()
    assert fine.centre == pytest.approx(coarse.centre)
    assert (fine.area, fine.peak) == (coarse.area, coarse.peak)
    assert fine.mean == pytest.approx(coarse.mean)
    assert fine.mass == pytest.approx(6 * coarse.mass)
    assert fine.entropy == pytest.approx(coarse.entropy + math.log(6))


def test_the_ends_of_the_scale():
    even = of([[0.5, 0.5], [0.5, 0.5]])
    assert (even.centre, even.area) == ((0.5, 0.5), 0.0)
    assert even.entropy == pytest.approx(math.log(4))
    point = of([[0.0, 0.0], [0.5, 0.0]])
    assert (point.centre, point.area, point.entropy) == ((0.75, 0.25), 0.25, 0.0)
    nothing = of([[0.0, 0.0]])
    assert (nothing.peak, nothing.mass, nothing.area) == (0.0, 0.0, 0.0)
    assert (nothing.centre, nothing.entropy) == (None, None)


@pytest.mark.parametrize(
    ("value", "message"),
    [(math.nan, "NaN"), (math.inf, "infin"), (-0.25, "'cat'.*-0.25")],
)
def test_maps_that_have_no_such_numbers_are_refused(value, message):
    with pytest.raises(ValueError, match=message):
        of([[0.5, value]])


def test_numbers_do_not_depend_on_the_number_of_threads():
    values = torch.rand(256, 320, generator=torch.Generator().manual_seed(0)) ** 3
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 2, 3):
            torch.set_num_threads(number)
            found.append(Heatmap("cat", values, (2,)).statistics())
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] == found[2]


def test_files_have_six_digits():
    values = np.random.default_rng(4).random((8, 8), np.float32)
    exact = of(values.tolist())
    found = exact.rounded()
    assert (found.word, found.columns) == ("cat", (2, 5))
    for name, value in exact.flat().items():
        if name != "word":
            assert found.flat()[name] == pytest.approx(value, rel=5e-6)
            assert len(f"{found.flat()[name]:.12g}".lstrip("0.").replace(".", "")) <= 6
    nothing = of([[0.0, 0.0]])
    assert nothing.rounded() == nothing
    assert {type(value) for value in of([[3.0, 0.0]]).rounded().flat().values()} == {str, float}


def test_statistics_go_through_json():
    for found in (of([[0.25, 0.5]]), of([[0.0, 0.0]])):
        held = json.loads(json.dumps(found.to_json(), allow_nan=False))
        assert read_record(WordStatistics, held) == found
