"""The words of a prompt as a table and as an array with names on its axes."""

import sys

import numpy as np
import pandas as pd
import pytest
import torch
from helpers.tiny_tokenizers import tiny_tokenizer

from sdattn import PRESETS, Heatmaps, read_prompt

PROMPT = "a red cat and a dog"


@pytest.fixture
def hm():
    maps = torch.rand(4, 6, 77, generator=torch.Generator().manual_seed(0)).softmax(-1)
    return Heatmaps(read_prompt(tiny_tokenizer(), PROMPT), maps)


def test_it_says_in_a_line_what_it_is_of(hm):
    assert repr(hm) == f"Heatmaps(6 words of '{PROMPT}', 4x6, preset default)"
    cat = hm.keep(hm["cat"].columns)
    assert repr(cat) == f"Heatmaps(1 word of '{PROMPT}', 4x6, preset default)"
    maps, text = hm.maps, "a red\n" + "a " * 40 + "cat"
    long = Heatmaps(read_prompt(tiny_tokenizer(), text), maps, preset=PRESETS["daam"])
    assert long.keep([0]).preset is PRESETS["daam"]
    assert repr(long).startswith("Heatmaps(43 words of 'a red a")
    assert repr(long).endswith("…', 4x6, preset daam)") and len(repr(long)) < 120


def test_words_phrases_tokens_and_repeats(hm):
    assert hm.words == ("a", "red", "cat", "and", "a", "dog")
    assert list(hm) == ["a", "red", "cat", "and", "dog"] and len(hm) == 5
    assert "cat" in hm and "cow" not in hm
    first, second = hm.find("a")
    assert hm["a"].columns == (*first.columns, *second.columns)
    torch.testing.assert_close(hm["a"].values, first.values + second.values)
    phrase = hm["a dog"]
    assert phrase.columns == (*second.columns, *hm["dog"].columns)
    torch.testing.assert_close(phrase.values, second.values + hm["dog"].values)
    assert repr(phrase).startswith("Heatmap('a dog', 4x6, ")
    assert torch.equal(hm[2].values, hm["red"].values) and hm[2].label == "red</w>"


def test_a_phrase_that_overlaps_itself_counts_each_of_its_columns_once(hm):
    found = Heatmaps(read_prompt(tiny_tokenizer(), "cat cat cat"), hm.maps)
    assert [one.columns for one in found.find("cat cat")] == [(1, 2), (2, 3)]
    torch.testing.assert_close(found["cat cat"].values, hm.maps[..., 1:4].sum(-1))


def test_what_is_not_there_is_told(hm):
    with pytest.raises(KeyError, match="Its words are: a, red"):
        hm["cow"]
    with pytest.raises(KeyError, match="were not captured"):
        hm.keep(hm["cat"].columns)["dog"]


def test_a_table_has_a_row_a_word(hm):
    table = hm.to_dataframe()
    assert [*table.word] == ["a", "red", "cat", "and", "a", "dog"]
    assert [*table.columns] == [
        "word", "columns", "peak", "mean", "mass", "centre_row", "centre_col", "area", "entropy",
    ]  # fmt: skip
    first, second = (found.columns for found in hm.find("a"))
    assert [*table[table.word == "a"]["columns"]] == [first, second]
    assert hm.statistics() == [heatmap.statistics() for heatmap in hm.occurrences()]
    cat, own = table[table.word == "cat"].iloc[0], hm["cat"].statistics()
    for name in ("peak", "mean", "mass", "area", "entropy"):
        assert cat[name] == getattr(own, name)
    assert (cat.centre_row, cat.centre_col) == own.centre
    assert {str(kind) for kind in table.dtypes[2:]} == {"float64"}


def test_what_a_map_of_0_has_not_is_nan_in_a_table(hm):
    hm.maps.zero_()
    table = hm.to_dataframe()
    missing = table[["centre_row", "centre_col", "entropy"]]
    assert missing.isna().all(axis=None) and (table.peak == 0).all()
    assert {str(kind) for kind in table.dtypes[2:]} == {"float64"}


def test_tables_of_several_images_can_be_put_together(hm):
    both = pd.concat({0: hm.to_dataframe(), 1: hm.to_dataframe()}, names=["image"])
    assert both.groupby("image").mass.sum().nunique() == 1 and len(both) == 12


def test_an_array_has_a_map_a_word(hm):
    found = hm.to_xarray()
    assert found.dims == ("word", "row", "col") and found.shape == (6, 4, 6)
    assert found.dtype == np.float32
    assert [*found.word.values] == [heatmap.label for heatmap in hm.occurrences()]
    np.testing.assert_array_equal(found.sel(word="cat"), hm["cat"].values)
    each = [heatmap.values for heatmap in hm.find("a")]
    np.testing.assert_array_equal(found.sel(word="a"), torch.stack(each))  # both of them
    row, col = hm["cat"].statistics().centre
    cat = found.sel(word="cat").astype("float64")
    assert float((cat * cat.row).sum() / cat.sum()) == pytest.approx(row, rel=1e-5)
    assert float((cat * cat.col).sum() / cat.sum()) == pytest.approx(col, rel=1e-5)
    assert found.attrs == {"prompt": PROMPT, "preset": "default", "units": "share of attention"}


def test_an_array_is_a_copy(hm):
    before = hm.maps.clone()
    hm.to_xarray().values[:] = 7
    assert torch.equal(hm.maps, before)


def test_columns_without_a_word_make_a_table_and_an_array_without_rows(hm):
    alone = hm.keep([0])
    assert (len(alone.to_dataframe()), alone.to_xarray().shape) == (0, (0, 4, 6))
    assert "entropy" in alone.to_dataframe()


def test_without_pandas_or_xarray_the_error_says_how_to_get_them(hm, monkeypatch):
    for name in ("pandas", "xarray"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError, match=r"pandas.*sdattn\[tables\]"):
        hm.to_dataframe()
    with pytest.raises(ImportError, match=r"xarray.*sdattn\[tables\]"):
        hm.to_xarray()


def test_values_of_a_mapping_stay_a_method_and_map_and_maps_are_tensors(hm):
    assert [heatmap.label for heatmap in hm.values()] == [*hm]
    assert torch.equal(hm["cat"].map, hm.maps[..., 3])
    heatmap = hm["cat"]
    assert heatmap.map is heatmap.values


@pytest.mark.parametrize("column", [3, np.int64(3), torch.tensor(3), np.array(3)])
def test_a_column_is_a_whole_number_of_any_library(hm, column):
    assert hm[column].columns == (3,)
    assert torch.equal(hm.token(column).values, hm.maps[..., 3])


@pytest.mark.parametrize("column", [True, torch.tensor(True), 77, -1, 0.5, torch.tensor([3]), None])
def test_what_is_no_column_is_refused_by_name(hm, column):
    with pytest.raises(KeyError, match="0 to 76"):
        hm[column]


def test_some_columns_are_put_together_as_all_of_them_are(hm):
    """Of a word in several columns a preset takes the sum, or the mean."""
    for name, together in (("default", torch.sum), ("daam", torch.mean)):
        whole = Heatmaps(hm.prompt, hm.maps, preset=PRESETS[name])
        columns = [column for found in whole.find("a") for column in found.columns]
        assert len(columns) == 2
        torch.testing.assert_close(whole["a"].values, together(hm.maps[..., columns], dim=-1))
        some = whole.keep(columns)
        assert some.preset == whole.preset and some["a"].values.equal(whole["a"].values)
