"""A batch run read again, and what `verify` finds in it."""

import io
import json
import os
import shutil

import pytest
import torch
from batch_runs import BOTH, FORMATS, as_layers, new_run, pack, three
from PIL import Image
from safetensors.torch import load

from sdattn.batch import open_batch, status
from sdattn.batch.folder import BatchFolder
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
        picture = Image.open(io.BytesIO(items[item]["image.png"]))
        assert one.image.tobytes() == picture.tobytes()
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


@pytest.mark.parametrize("place", ["../other", "items/../../other", "/etc", "items/0000/link"])
def test_a_place_outside_of_the_run_is_not_read(tmp_path, place):
    root = new_run(tmp_path / "run", {"a": pack("a", 1)})
    write_files(tmp_path / "other", pack("a", 1))
    (root / "items" / "0000" / "link").symlink_to(tmp_path / "other")
    rows = root / "metadata.jsonl"
    assert "items/0000/a" in rows.read_text()
    rows.write_text(rows.read_text().replace("items/0000/a", place))
    with pytest.raises(ValueError, match="no place inside it|is a link"):
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
