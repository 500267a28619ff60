"""What a row of metadata.jsonl says of an item."""

import pytest
from batch_runs import FORMATS, PROMPT, new_run, pack, rows_of, three

ROWS = {
    "id", "line", "prompt", "negative_prompt", "seed", "width", "height", "num_inference_steps",
    "guidance_scale", "words", "truncated", "blanked", "place", "fingerprint", "run_sha256",
    "files",
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


def test_an_item_without_a_picture_names_none(tmp_path):
    root = new_run(tmp_path / "run", three(parts=("maps",)))
    assert all("file_name" not in row for row in rows_of(root / "metadata.jsonl"))
