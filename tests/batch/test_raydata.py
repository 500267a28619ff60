"""`Draw`: rows of images and maps, those of `sdattn batch` bit for bit."""

import math

import numpy as np
import pytest
import torch
from helpers.batch_draws import SMALL, draw
from helpers.batch_runs import rows_of

from sdattn.batch import Draw, open_batch

ROWS = (
    {"prompt": "a red cat", "seed": 5},
    {"prompt": "dog", "seed": 6, "width": 128},
    {"prompt": "a dog, a red dog", "seed": 7, "words": ["red dog"]},
    {"prompt": "cat", "seed": 8, "negative_prompt": "a dog", "guidance_scale": 4.0},
)


def columns_of(rows):
    """As Ray Data has them: arrays, None where a row has no value."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: np.array([row.get(name) for row in rows], object) for name in names}


@pytest.fixture(scope="module")
def drawn(model):
    return Draw(str(model), options=SMALL, device="cpu")(columns_of(ROWS))


@pytest.mark.slow
def test_rows_are_those_of_a_run_bit_for_bit(model, drawn, tmp_path):
    draw(model, tmp_path / "run", ROWS, batch_size=4)
    items, noted = open_batch(tmp_path / "run"), rows_of(tmp_path / "run" / "metadata.jsonl")
    for i, (item, row) in enumerate(zip(items.values(), noted, strict=True)):
        np.testing.assert_array_equal(drawn["image"][i], np.asarray(item.image))
        of_run = torch.stack([heatmap.values for heatmap in item.heatmaps.occurrences()])
        assert torch.equal(torch.from_numpy(drawn["heatmaps"][i]), of_run)
        folder = tmp_path / "run" / row["place"]
        assert drawn["maps"][i] == (folder / "maps.safetensors").read_bytes()
        assert drawn["words"][i] == list(item.heatmaps.words)
        assert drawn["statistics"][i] == row["statistics"]
        assert (drawn["truncated"][i], drawn["blanked"][i]) == ([], False)


def test_a_row_keeps_its_columns_and_the_words_that_it_asks_for(drawn):
    assert drawn["words"][2] == ["red", "dog"]
    assert drawn["prompt"].tolist() == [row["prompt"] for row in ROWS]
    assert [image.shape[1] for image in drawn["image"]] == [64, 128, 64, 64]


def test_columns_of_one_shape_are_one_array_and_parts_are_left_out(model):
    made = Draw(str(model), options=SMALL, device="cpu", save=["image"], seed=5)
    found = made({"prompt": ["a cat", "a cat"], "id": ["x", "x"], "seed": np.array([5, 6])})
    assert found["image"].shape == (2, 64, 64, 3) and found["image"].dtype == np.uint8
    assert {"heatmaps", "maps"}.isdisjoint(found) and found["id"] == ["x", "x"]
    assert not np.array_equal(*found["image"])
    usual = made({"prompt": ["a cat", "a cat"]})["image"]
    for image in usual:  # of the seed that rows have without their own
        np.testing.assert_allclose(image, found["image"][0], atol=1)  # the second of a batch
    np.testing.assert_array_equal(usual[0], found["image"][0])
    assert set(made({"prompt": []})) == {"prompt"}


@pytest.mark.slow
@pytest.mark.parametrize("as_pandas", [False, True])
def test_columns_that_lack_values_as_ray_data_has_them(model, as_pandas):
    """Whole numbers are floats there, with NaN."""
    made = Draw(str(model), options=SMALL, device="cpu", save=["image"], seed=5)
    expected = made({"prompt": ["a cat", "a dog"], "seed": [6, 5]})
    lacking = {"prompt": np.array(["a cat", "a dog"], object), "seed": np.array([6, math.nan])}
    lacking["width"] = np.array([64.0, 64.0])
    lacking["words"] = np.array([["cat"], None], object)
    if as_pandas:
        pandas = pytest.importorskip("pandas")
        lacking = pandas.DataFrame(lacking).convert_dtypes()
        assert lacking["seed"][1] is pandas.NA
    found = made(lacking)
    np.testing.assert_array_equal(found["image"], expected["image"])
    assert [*map(list, found["words"])] == [["cat"], ["a", "dog"]]


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"seed": 2.0**53}, "Row 2 of the batch: seed=.*write a whole number"),  # or one beside it
        ({"seed": -1}, "Row 2 of the batch: seed=-1: write a whole number from 0"),
        ({"words": ["dog"]}, "Row 2 of the batch: 'dog' is not in the prompt"),
        ({"num_inference_step": 3}, "Row 2 of the batch: .*num_inference_step"),
    ],
)
def test_a_row_that_cannot_be_is_refused_by_its_number(model, row, reason):
    made = Draw(str(model), options=SMALL, device="cpu")
    with pytest.raises(ValueError, match=reason):
        made(columns_of([{"prompt": "a cat"}, {"prompt": "a cat", **row}]))
    with pytest.raises(ValueError, match="save=.*'overlays'.*'maps'"):  # and before it is loaded
        Draw("no such model", save=["image", "overlays"])


def test_a_row_that_fails_says_which(model):
    made = Draw(str(model), options=SMALL, device="cpu")
    [forbidden] = {*made.pipe.tokenizer("red").input_ids} - {*made.pipe.tokenizer("").input_ids}

    def check_text(_, args, options):
        if (args[0] == forbidden).any():
            raise RuntimeError("boom")

    made.pipe.text_encoder.register_forward_pre_hook(check_text, with_kwargs=True)
    with pytest.raises(RuntimeError, match="Row 2 of the batch, 'red': .*boom"):
        made({"prompt": ["a cat", "red"]})
