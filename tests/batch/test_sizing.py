"""How many items fit into one batch."""

import json
import shutil

import pytest
from helpers.batch_draws import ALL, draw, quick_garbage, watch_models  # noqa: F401
from helpers.batch_runs import rows_of


@pytest.mark.slow
def test_auto_finds_what_fits_and_a_run_keeps_to_it(model, watched, tmp_path, capsys):
    watched.most = 2
    out = tmp_path / "run"
    outcome = draw(model, out, ALL, batch_size="auto")
    assert (outcome.whole, outcome.failed) == (8, 0)
    size = json.loads((out / "batch.json").read_bytes())["batch_size"]
    assert size in (1, 2)
    err = capsys.readouterr().err
    assert f"{size} item{'s' * (size > 1)} to a batch" in err and "run 2 together" not in err
    assert sum(rows > 2 for rows in watched.rows) <= 1  # where it ended the search

    for item in ("000001", "000002"):
        shutil.rmtree(out / "items" / "0000" / item)
    watched.rows.clear()
    watched.most = 10**9  # there would be more room by now
    outcome = draw(model, out, ALL, batch_size="auto")
    assert (outcome.before, outcome.whole) == (6, 8)
    assert watched.rows == {1: [1, 1], 2: [2]}[size]
    assert "to a batch" not in capsys.readouterr().err


@pytest.mark.slow
def test_auto_looks_no_further_than_there_are_items(model, watched, tmp_path):
    assert draw(model, tmp_path / "run", ALL[:3], batch_size="auto").whole == 3
    assert max(watched.rows) <= 2  # the largest power of two
    assert json.loads((tmp_path / "run" / "batch.json").read_bytes())["batch_size"] in (1, 2)


@pytest.mark.slow
def test_auto_tries_the_largest_image_also_if_that_is_the_models_own(model, watched, tmp_path):
    rows = [{"prompt": "a cat", "width": 64, "height": 64}, "a dog"]
    options = {"num_inference_steps": 1, "guidance_scale": 1.0}
    assert draw(model, tmp_path / "run", rows, batch_size="auto", options=options).whole == 2
    drawn = watched.pixels[-2:]
    assert sorted(drawn) == [64 * 64, 128 * 128]
    assert set(watched.pixels[:-2]) == {128 * 128}


@pytest.mark.slow
def test_auto_survives_an_item_that_cannot_be_drawn(model, tmp_path):
    rows = [{"prompt": "a cat", "eta": "much"}, "a dog", "red"]
    outcome = draw(model, tmp_path / "run", rows, batch_size="auto")
    assert (outcome.whole, outcome.failed) == (2, 1)
    [row] = rows_of(tmp_path / "run" / "errors.jsonl")
    assert row["id"] == "000001"
