"""What leaves for pandas and xarray, where they are there."""

import sys

import numpy as np
import pytest

from sdattn.files.tables import along, labelled, library


@pytest.mark.parametrize("name", ["pandas", "xarray"])
def test_a_library_that_is_missing_is_named_with_the_way_to_get_it(name, monkeypatch):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=rf"{name}.*sdattn\[tables\]"):
        library(name)


def test_axes_have_names_and_cells_their_centres():
    values = np.arange(24.0, dtype=np.float32).reshape(2, 3, 4)
    found = labelled(values, {"word": ["a", "b"], "row": None, "col": None}, prompt="a b")
    assert found.dims == ("word", "row", "col") and found.dtype == np.float32
    np.testing.assert_allclose(found.row, [1 / 6, 3 / 6, 5 / 6])
    np.testing.assert_allclose(found.col, [0.125, 0.375, 0.625, 0.875])
    assert found.sel(word="b").sel(row=0.9, col=0.1, method="nearest") == values[1, 2, 0]
    assert found.attrs == {"prompt": "a b"}
    assert [*labelled(values[0], {"row": None, "step": None}).coords] == ["row"]


def test_arrays_lie_behind_each_other_and_nothing_is_filled_in():
    """Also where labels repeat; a head that a layer has not is NaN, not 0."""
    one = labelled(np.ones((2, 2)), {"word": ["a", "a"], "head": [0, 1]})
    other = labelled(np.full((2, 1), 2.0), {"word": ["a", "a"], "head": [1]})
    found = along([one, other], "layer", ["up", "down"])
    assert found.dims == ("word", "head", "layer")
    assert [*found.word.values] == ["a", "a"] and [*found.layer.values] == ["up", "down"]
    expected = [[[1, np.nan], [1, 2]]] * 2
    np.testing.assert_array_equal(found.values, expected)
