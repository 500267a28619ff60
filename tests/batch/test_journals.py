"""Rows that are noted, gathered, and read from the items where they are lost."""

import random
import shutil

import pytest
from helpers.batch_runs import FORMATS, draw, kept_of, manifest, new_run, rows_of, three
from helpers.tiers import tiered

from sdattn.batch import verify
from sdattn.batch.storage.folder import BatchFolder
from sdattn.batch.storage.whole import settle


def settled(root):
    folder = BatchFolder(root)
    folder.open("later")
    try:
        return settle(folder)
    finally:
        folder.lock.release()


@pytest.mark.parametrize("format", FORMATS)
def test_the_rows_are_read_from_the_items_where_they_are_lost(tmp_path, format):
    root = new_run(tmp_path / "run", three(), format=format, shard_bytes=1)
    made = kept_of(root)
    (root / "metadata.jsonl").unlink()
    assert settled(root).keys() == {"a", "b", "c"}
    assert kept_of(root) == made
    data = made["metadata.jsonl"]
    (root / "metadata.jsonl").write_bytes(data[: len(data) // 2])
    assert settled(root).keys() == {"a", "b", "c"}
    assert kept_of(root) == made


@pytest.mark.parametrize("left", ["newline", "a byte more", "half", "nothing"])
def test_a_torn_line_costs_no_other(tmp_path, left):
    """A process that is killed, or a disk that is full, can leave any part of a line."""
    root = new_run(tmp_path / "run", three())
    made = kept_of(root)
    first, second, third = made["metadata.jsonl"].splitlines(keepends=True)
    torn = {"newline": first[:-1], "a byte more": first[:-2], "half": first[:99], "nothing": b""}
    (root / "metadata.jsonl").unlink()
    done = root / ".batch" / "done"
    (done / "killed-0.jsonl").write_bytes(second + torn[left])
    (done / "killed-1.jsonl").write_bytes(third)
    assert settled(root).keys() == {"a", "b", "c"}
    assert kept_of(root) == made
    assert not [*done.iterdir()]


@pytest.mark.parametrize("format", FORMATS)
def test_rows_of_items_that_are_gone_go(tmp_path, format):
    root = new_run(tmp_path / "run", three(), format=format, shard_bytes=1)
    location = root / rows_of(root / "metadata.jsonl")[1]["place"]
    shutil.rmtree(location) if location.is_dir() else location.unlink()
    assert settled(root).keys() == {"a", "c"}
    assert [row["id"] for row in rows_of(root / "metadata.jsonl")] == ["a", "c"]


def test_a_foreign_folder_among_the_items_is_named(tmp_path):
    root = new_run(tmp_path / "run", three())
    (root / "items" / "0000" / "mine").mkdir()
    with pytest.raises(ValueError, match="items/0000/mine is not an item"):
        settled(root)


def test_rows_follow_the_input_not_the_time(tmp_path):
    folder = BatchFolder(tmp_path / "run")
    folder.open("job")
    folder.write_manifest(manifest())
    lines = [*range(1, 30)]
    random.Random(0).shuffle(lines)
    for line in lines:
        row = {"id": f"i{line}", "line": line, "place": f"p{line}", "fingerprint": "f"}
        folder.journals.note("done", f"job-{line % 3}", row)
    folder.journals.note("done", "job-0", {**row, "fingerprint": "later"})  # one more of the last
    assert folder.journals.gather() == 29
    folder.lock.release()
    rows = rows_of(folder.root / "metadata.jsonl")
    assert [row["line"] for row in rows] == [*range(1, 30)]
    assert rows[lines[-1] - 1]["fingerprint"] == "later"


@pytest.mark.parametrize("format", tiered(FORMATS, quick=0, daily=1))
def test_what_is_broken_or_gone_is_made_anew(model, tmp_path, format):
    root = tmp_path / "run"
    rows = [{"prompt": prompt} for prompt in ("a cat", "a dog", "red")]
    draw(model, root, *rows, format=format, shard_bytes=1)
    made = kept_of(root)
    location = root / rows_of(root / "metadata.jsonl")[1]["place"]
    if format == "folder":
        shutil.rmtree(location)
    else:
        location.write_bytes(location.read_bytes()[:1000])
    (root / "metadata.jsonl").unlink()
    outcome = draw(model, root, *rows, format=format, shard_bytes=1)
    assert (outcome.before, outcome.whole, outcome.exit_code) == (2, 3, 0)
    assert kept_of(root) == made
    assert verify(root) == (3, [])


def test_a_row_that_a_crash_tore_takes_no_other_with_it(tmp_path):
    root = new_run(tmp_path / "run", three())
    (root / "metadata.jsonl").unlink()
    (root / ".batch/done/settled.jsonl").write_text('{"id": "a", "li')
    assert settled(root).keys() == {"a", "b", "c"}
