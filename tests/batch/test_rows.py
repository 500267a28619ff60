"""What a row of metadata.jsonl says of an item."""

import pytest
from helpers.batch_runs import (
    FORMATS,
    PROMPT,
    new_run,
    pack,
    rows_of,
    three,
    without_columns,
)

from sdattn.batch import merge, open_batch
from sdattn.batch.storage.folder import BatchFolder
from sdattn.batch.storage.whole import settle

ROWS = {
    "id", "line", "prompt", "negative_prompt", "seed", "width", "height", "num_inference_steps",
    "guidance_scale", "words", "statistics", "truncated", "blanked", "place", "fingerprint",
    "run_sha256", "files",
}  # fmt: skip


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_tells_of_an_item(tmp_path, format):
    items = three()
    items["b"] = pack("b", 2, negative_prompt="dog", guidance_scale=3, num_inference_steps=7)
    root = new_run(tmp_path / "run", items, format=format)
    first, second, _ = rows_of(root / "metadata.jsonl")
    assert first.keys() - {"file_name"} == ROWS
    assert second["id"] == "b" and second["line"] == second["seed"] == 2
    assert (second["width"], second["height"]) == (96, 64)
    assert (second["negative_prompt"], second["guidance_scale"]) == ("dog", 3.0)
    assert second["num_inference_steps"] == 7
    assert second["prompt"] == PROMPT and second["words"] == ["a", "red", "cat"]
    assert first["negative_prompt"] is first["guidance_scale"] is None
    if format == "folder":
        assert (root / second["file_name"]).read_bytes() == items["b"]["image.png"]
    else:
        assert "file_name" not in second


def test_an_item_without_an_image_names_none(tmp_path):
    root = new_run(tmp_path / "run", three(parts=("maps",)))
    assert all("file_name" not in row for row in rows_of(root / "metadata.jsonl"))


@pytest.mark.parametrize("format", FORMATS)
def test_a_row_has_the_numbers_of_the_maps_that_are_read_again(tmp_path, format):
    root = new_run(tmp_path / "run", three(), format=format)
    run = open_batch(root)
    for row in rows_of(root / "metadata.jsonl"):
        maps = run[row["id"]].heatmaps.occurrences()
        assert [word["word"] for word in row["statistics"]] == row["words"] == PROMPT.split()
        assert row["statistics"] == [found.statistics().rounded().flat() for found in maps]
        for word in row["statistics"]:
            assert {type(value) for name, value in word.items() if name != "word"} == {float}


def test_items_without_maps_have_their_numbers_too(tmp_path):
    with_maps = new_run(tmp_path / "with", three())
    without = new_run(tmp_path / "without", three(parts=("image",)))
    found, expected = (
        [row["statistics"] for row in rows_of(root / "metadata.jsonl")]
        for root in (without, with_maps)
    )
    assert found == expected


def test_a_map_of_0_has_no_centre_and_a_prompt_without_columns_no_words(tmp_path):
    items = {"zero": pack("zero", 1, empty=range(77)), "none": without_columns(pack("none", 2))}
    zero, none = rows_of(new_run(tmp_path / "run", items) / "metadata.jsonl")
    nothing = {"centre_row": None, "centre_col": None, "entropy": None}
    for word in zero["statistics"]:
        assert word == {**dict.fromkeys(word, 0.0), "word": word["word"], **nothing}
    assert (none["words"], none["statistics"]) == ([], [])


@pytest.mark.parametrize("format", FORMATS)
def test_rows_that_are_made_again_or_merged_are_those_that_were_written(tmp_path, format):
    root = new_run(tmp_path / "run", three(), format=format)
    rows = (root / "metadata.jsonl").read_bytes()
    assert rows.count(b'"statistics"') == 3
    merge([root], tmp_path / "merged")
    assert (tmp_path / "merged/metadata.jsonl").read_bytes() == rows
    (root / "metadata.jsonl").unlink()
    settled(root)
    assert (root / "metadata.jsonl").read_bytes() == rows


def settled(root):
    """As the next run begins."""
    folder = BatchFolder(root)
    folder.open("next")
    settle(folder)
    folder.close()
