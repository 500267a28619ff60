"""A batch run read again, and what `verify` finds in it."""

import io
import json
import os
import shutil
import sys

import numpy as np
import pytest
import torch
from helpers.batch_runs import BOTH, FORMATS, as_layers, new_run, pack, three
from PIL import Image
from safetensors.torch import load

from sdattn.batch import open_batch, status
from sdattn.batch.storage.folder import BatchFolder
from sdattn.files.writing import write_files
from sdattn.maps.aggregation import aggregate


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_is_a_mapping_of_its_items(tmp_path, format):
    items = {name: pack(name, line) for line, name in enumerate(("z", "m", "a"), 1)}
    root = new_run(tmp_path / "run", items, format=format)
    run = open_batch(root)
    assert [*run] == ["z", "m", "a"] and len(run) == 3  # the order of the input
    assert "m" in run and "x" not in run
    for item, one in run.items():
        image = Image.open(io.BytesIO(items[item]["image.png"]))
        assert one.image.tobytes() == image.tobytes()
        assert one.info == json.loads(items[item]["run.json"])
        maps = load(items[item]["maps.safetensors"])
        saved = as_layers({name: maps[name].float() for name in ("down.a", "up.b")})
        assert torch.equal(one.heatmaps.maps, aggregate(saved, BOTH)[0])
        assert one.heatmaps.words == ("a", "red", "cat")
    with pytest.raises(KeyError, match="holds no item 'x'"):
        run["x"]
    assert repr(run) == f"SavedBatch({str(root)!r}: 3 of 3 items, tiny, format {format})"
    about = "96x64 of 'a red cat', seed 1, preset both"
    assert repr(run["z"]) == f"SavedRun({str(run['z'].folder)!r}: {about})"


@pytest.mark.parametrize("location", ["../other", "items/../../other", "/etc", "items/0000/link"])
def test_a_place_outside_of_the_run_is_not_read(tmp_path, location):
    root = new_run(tmp_path / "run", {"a": pack("a", 1)})
    write_files(tmp_path / "other", pack("a", 1))
    (root / "items" / "0000" / "link").symlink_to(tmp_path / "other")
    rows = root / "metadata.jsonl"
    assert "items/0000/a" in rows.read_text()
    rows.write_text(rows.read_text().replace("items/0000/a", location))
    with pytest.raises(ValueError, match="inside it|is a link"):
        open_batch(root)["a"]


def test_status_tells_how_far_a_run_is(tmp_path):
    failed = [{"id": "d", "line": 4}, {"id": "a", "line": 1}]  # the second was drawn later
    root = new_run(tmp_path / "run", three(), failed=failed, items=6, bad_lines=2)
    (root / "errors.jsonl").write_text("".join(json.dumps(one) + "\n" for one in failed))
    now = status(root)
    assert (now.items, now.whole, now.failed, now.bad_lines, now.running) == (6, 3, 1, 2, None)
    folder = BatchFolder(root)
    folder.open("job")
    shutil.rmtree(root / open_batch(root)["b"].folder.relative_to(root))  # by hand
    now = status(root)
    assert now.whole == 2
    assert now.running is not None and f"(process {os.getpid()}, since 20" in now.running
    folder.journals.gather()
    folder.lock.release()
    assert status(root).running is None


def test_whether_an_item_is_there_is_known_without_reading_it(tmp_path):
    run = open_batch(new_run(tmp_path / "run", three(parts=("image",))))
    assert "a" in run and "x" not in run


# A table of words

REPEATED = "A cat and a red cat"
COLUMNS = ["id", "prompt", "seed", "word", "occurrence", "peak", "mean", "mass"]
COLUMNS += ["centre_row", "centre_col", "area", "entropy"]


def test_a_table_has_a_row_a_word_of_each_item(tmp_path):
    items = {"z": pack("z", 1, prompt=REPEATED), "m": pack("m", 2)}
    root = new_run(tmp_path / "run", items)
    maps = {item: one.heatmaps for item, one in open_batch(root).items()}
    shutil.rmtree(root / "items")  # the rows alone are read
    table = open_batch(root).to_dataframe()
    assert [*table.columns] == COLUMNS
    assert {str(kind) for kind in table.dtypes[5:]} == {"float64"}
    assert [*table.id] == ["z"] * 6 + ["m"] * 3  # the order of the input
    assert [*table.word] == [*REPEATED.split(), "a", "red", "cat"]
    assert [*table.occurrence] == [0, 0, 0, 1, 0, 1, 0, 0, 0]
    assert set(table.prompt[:6]) == {REPEATED} and [*table.seed] == [1] * 6 + [2] * 3
    for row in table.to_dict("records"):
        own = maps[row["id"]].find(row["word"])[row["occurrence"]]
        values = np.asarray(own, np.float64)
        assert row["mass"] == pytest.approx(values.sum(), rel=5e-6)
        assert {name: row[name] for name in COLUMNS[5:]} == {
            name: value
            for name, value in own.statistics().rounded().flat().items()
            if name != "word"
        }


def test_a_table_has_what_was_noted_since_rows_were_gathered_and_the_latest_of_it(tmp_path):
    root = new_run(tmp_path / "run", three())
    folder, again = (
        BatchFolder(root),
        json.loads((root / "metadata.jsonl").read_text()[:-1].split("\n")[0]),
    )
    folder.open("job")
    again["statistics"][0]["peak"] = 0.75
    folder.journals.note("done", "job-0", again)
    try:
        table = open_batch(root).to_dataframe()
    finally:
        folder.close()
    assert [*table.id] == ["a"] * 3 + ["b"] * 3 + ["c"] * 3
    assert table.peak[0] == 0.75 and (table.peak[1:] < 0.5).all()


def test_what_a_map_of_0_has_not_is_nan_in_a_table(tmp_path):
    table = open_batch(new_run(tmp_path / "run", {"a": pack("a", empty=(2,))})).to_dataframe()
    missing = table[["centre_row", "centre_col", "entropy"]].isna()
    assert [*missing.all(axis=1)] == [*missing.any(axis=1)] == [False, True, False]


def test_a_run_without_items_is_an_empty_table(tmp_path):
    table = open_batch(new_run(tmp_path / "run", {})).to_dataframe()
    assert (len(table), [*table.columns]) == (0, COLUMNS)


def test_without_pandas_the_error_says_how_to_get_it(tmp_path, monkeypatch):
    run = open_batch(new_run(tmp_path / "run", {"a": pack("a")}))
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"pandas.* pip install 'sdattn\[tables\]'"):
        run.to_dataframe()
