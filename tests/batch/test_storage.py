"""Runs in a storage, which has no locks and no rename, and fails now and then."""

import json
import time
from pathlib import Path

import pytest
from helpers.batch_runs import FORMATS, draw, kept_of, new_run, pack, three
from helpers.storages import MEMORY, begun, faulty, memory_bucket, objects_of, quick_waits  # noqa: F401
from helpers.tiers import tiered

from sdattn.batch import Request, merge, open_batch, run_batch, status, verify
from sdattn.batch.engines.progress import Tally
from sdattn.batch.storage import bucket, leases
from sdattn.batch.storage.folder import BatchFolder
from sdattn.batch.storage.whole import settle
from sdattn.runs.folder import load_run


@pytest.fixture(params=FORMATS)
def both(request, memory, tmp_path):
    """The same run in a storage and on the disk."""
    runs = memory / "run", tmp_path / "run"
    for root in runs:
        folder = BatchFolder(new_run(root, three(), format=request.param))
        folder.open("job")
        folder.seal(3)
        folder.close()
    return runs


def test_a_run_in_a_storage_is_that_of_the_disk_byte_for_byte(both):
    there, here = both
    assert objects_of(there) == kept_of(here)
    assert not [name for name in there.sizes() if name.startswith(".batch/")]  # nothing at work


@pytest.mark.slow
def test_a_run_in_a_storage_is_read_checked_and_told_of(both):
    there, here = both
    assert verify(str(there)) == verify(here) == (3, [])
    assert status(str(there)) == status(here)
    runs = open_batch(str(there)), open_batch(here)
    assert [*runs[0]] == [*runs[1]] == ["a", "b", "c"]
    for item in runs[0]:
        assert runs[0][item].info == runs[1][item].info
        assert runs[0][item].image.tobytes() == runs[1][item].image.tobytes()
    assert runs[0].to_dataframe().equals(runs[1].to_dataframe())


def test_an_items_folder_is_a_run(memory):
    new_run(memory / "run", three())
    run = load_run("memory://bucket/run/items/0000/b")
    assert run.info["id"] == "b" and str(run.folder) == "memory://bucket/run/items/0000/b"
    with pytest.raises(FileNotFoundError):
        load_run("memory://bucket/nothing")


@pytest.mark.parametrize("format", FORMATS)
def test_what_is_damaged_is_found(memory, format):
    root = memory / "run"
    new_run(root, three(), format=format)
    name = next(name for name in root.sizes() if name.endswith(("image.png", ".tar", ".parquet")))
    data = (root / name).read_bytes()
    (root / name).write_bytes(data[:-9] + bytes([data[-9] ^ 1]) + data[-8:])
    assert verify(root)[1] != []
    (root / name).unlink()
    assert verify(root)[1] != []
    assert status(root).whole == (2 if format == "folder" else 0)


# What is visible, and when


@pytest.mark.parametrize("format", FORMATS)
def test_an_item_is_visible_once_its_row_is_written(memory, format):
    folder = begun(memory / "run", three(), format=format)
    seen = len(open_batch(folder.root))
    assert seen == (3 if format == "folder" else 0)
    folder.layout.flush()
    assert [*open_batch(folder.root)] == ["a", "b", "c"]
    folder.close()


def test_an_item_that_a_kill_left_without_run_json_is_none(memory):
    root = memory / "run"
    folder = begun(root, three())
    folder.journals.gather()
    folder.seal(3)
    folder.close()
    for name in ("image.png", "heatmaps/01-a.png"):
        (root / "items" / "0000" / "d" / name).write_bytes(b"x")
    assert status(root).whole == 3 and len(open_batch(root)) == 3
    assert verify(root)[1] == ["items/0000/d: unfinished, it has no run.json"]
    folder = BatchFolder(root)
    folder.open("again")
    assert settle(folder, {"d"}).keys() == {"a", "b", "c"}
    folder.close()
    assert not [name for name in root.sizes() if name.startswith("items/0000/d")]


@pytest.mark.parametrize("format", FORMATS)
def test_an_item_whose_row_a_kill_has_lost_is_found(memory, format):
    root = memory / "run"
    folder = begun(root, three(), format=format)
    folder.layout.flush()
    for name in [*root.sizes()]:
        if name.startswith(".batch/done"):
            (root / name).unlink()
    folder.lock.release()
    folder = BatchFolder(root)
    folder.open("again")
    assert settle(folder).keys() == {"a", "b", "c"}
    folder.close()
    assert len(open_batch(root)) == 3


# The ledger


def test_a_part_of_the_ledger_is_one_object_until_it_is_large(memory, monkeypatch):
    folder = begun(memory / "run", three())
    done = folder.root / ".batch" / "done"
    assert len([*done.iterdir()]) == 1
    monkeypatch.setattr(bucket, "_LARGE", 1)
    folder.note_whole("job-0", "a", "items/0000/a", pack("a", 1))
    assert len([*done.iterdir()]) == 2
    assert folder.journals.gather() == 3
    assert [*done.iterdir()] == []
    folder.close()


def test_rows_are_counted_by_reading_only_what_is_new(memory, monkeypatch):
    folder, opened = begun(memory / "run", three()), []
    tally = Tally(folder.storage)
    assert tally.count("done") == 3
    monkeypatch.setattr(MEMORY, "open", lambda self, path, *_: opened.append(path))
    assert tally.count("done") == 3 and opened == []
    folder.close()


def test_failures_are_written_at_once(memory, monkeypatch):
    monkeypatch.setattr(bucket, "_EVERY", 1e9)
    folder = begun(memory / "run", {})
    folder.storage._flushed = time.monotonic()
    folder.note_whole("job-0", "a", "items/0000/a", pack("a", 1))
    assert BatchFolder(folder.root).journals.rows() == {}
    folder.journals.note("failed", "job-0", {"id": "x", "line": 1})
    assert [*BatchFolder(folder.root).journals.failures()] == ["x"]
    folder.storage.flush()
    assert [*BatchFolder(folder.root).journals.rows()] == ["a"]
    folder.close()


# A lease in the lock's place


def test_a_lease_is_one_jobs(memory, monkeypatch):
    monkeypatch.setattr(leases, "_BEAT", 1.0)  # a machine under load may hold up a thread for some
    first, second = BatchFolder(memory / "run"), BatchFolder(memory / "run")
    assert first.lock.free()
    first.open("one")
    assert not second.lock.free() and second.lock.join("one") and not second.lock.join("two")
    assert "process" in status_of(first)
    with pytest.raises(OSError, match="run is being written by another job: .* on .*process"):
        second.open("two")
    first.close()
    assert second.lock.free()
    second.open("two")
    second.close()


def status_of(folder):
    return folder.lock.describe_holder()


def test_a_lease_of_the_dead_is_taken_after_some_beats(memory, capsys):
    dead = BatchFolder(memory / "run")
    dead.open("one")
    dead.lock._end.set()  # as a kill does: no beat, and nothing given back
    dead.lock._thread.join()
    folder = BatchFolder(memory / "run")
    folder.open("two")
    assert folder.lock.holder["job"] == "two"
    assert "waiting up to" in capsys.readouterr().err
    folder.close()
    dead.lock._thread = None


def test_a_job_whose_lease_was_taken_writes_no_more(memory):
    folder = BatchFolder(memory / "run")
    folder.open("one")
    joined = BatchFolder(memory / "run")
    assert joined.lock.join("one") and folder.stopped is None and joined.stopped is None
    (memory / "run" / ".batch" / "lease.json").write_text(json.dumps({"job": "two"}))
    assert "another job has taken memory://bucket/run" in joined.stopped
    folder.lock._thread.join(60)
    assert "another job has taken memory://bucket/run" in folder.stopped
    with pytest.raises(OSError, match="another job has taken"):
        folder.storage.write("metadata.jsonl", [])
    folder.close()
    assert folder.lock.holder == {"job": "two"}


# Faults


def every(number, fails, of=lambda path: True):
    """A fault of every so many calls."""
    count = 0

    def call(own, path, *args, **options):
        nonlocal count
        count += of(path)
        if of(path) and count % number == 0:
            return fails(own, path, *args, **options)
        return own(path, *args, **options)

    return call


def refused(own, path, *args, **options):
    raise TimeoutError("the put did not come through")


def late(own, path, *args, **options):
    own(path, *args, **options)
    raise TimeoutError("the answer did not come through")


@pytest.mark.parametrize("fault", [refused, late])
@pytest.mark.parametrize("format", tiered(FORMATS, 2))
def test_puts_that_fail_now_and_then_change_nothing(memory, tmp_path, fault, format):
    new_run(faulty(memory / "run", pipe_file=every(3, fault)), three(), format=format)
    here = new_run(tmp_path / "run", three(), format=format)
    assert objects_of(memory / "run") == kept_of(here)
    assert verify(memory / "run") == (3, [])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("failing", tiered([0, 1, 2, 3, 6], 2))
def test_a_put_that_never_comes_through_leaves_nothing_wrong(memory, failing, format):
    left = failing

    def broken(own, path, *args, **options):
        nonlocal left
        left -= 1
        if left < 0 and "lease" not in path:
            raise TimeoutError("gone")
        return own(path, *args, **options)

    root = memory / "run"
    begun(root, {}, format=format).close()
    folder = BatchFolder(faulty(root, pipe_file=broken))
    with pytest.raises(OSError, match="cannot be reached|Cannot write"):
        folder.open("two")
        for line, (item, files) in enumerate(three().items(), 1):
            folder.layout.add(item, line, files, lambda *w: folder.note_whole("job-0", *w))
            folder.layout.flush()
    folder.close()
    known = open_batch(root)
    assert all(run.info["id"] == item for item, run in known.items())  # what is visible is whole
    folder = BatchFolder(root)
    folder.open("three")
    whole = settle(folder, {"a", "b", "c"})
    for line, (item, files) in enumerate(three().items(), 1):
        if item not in whole:
            folder.layout.add(item, line, files, lambda *w: folder.note_whole("job-1", *w))
    folder.layout.flush()
    folder.seal(folder.journals.gather())
    folder.close()
    assert verify(root) == (3, [])


@pytest.mark.parametrize("format", FORMATS)
def test_a_listing_that_lags_hides_nothing_that_this_process_wrote(memory, format):
    seen = {}

    def lagging(own, path, *args, **options):
        """What it said the last time."""
        try:
            now = own(path, *args, **options)
        except FileNotFoundError:
            now = None
        before = seen.get((path, str(options)))
        seen[path, str(options)] = now
        if before is None:
            raise FileNotFoundError(path)
        return before

    root = memory / "run"
    folder = begun(faulty(root, ls=lagging, find=lagging), three(), format=format)
    folder.layout.flush()
    assert folder.journals.gather() == 3
    folder.seal(3)
    folder.close()
    assert verify(root)[0] == 3 and len(open_batch(root)) == 3


# The whole way


@pytest.mark.slow
@pytest.mark.parametrize("format", ["folder", "webdataset"])
def test_a_batch_is_drawn_resumed_and_merged_there(memory, model, tmp_path, monkeypatch, format):
    monkeypatch.chdir(tmp_path)
    rows = [{"prompt": prompt} for prompt in ("a cat", "a red dog", "red")]
    here = draw(model, tmp_path / "run", *rows, format=format)
    source = (tmp_path / "run.jsonl").read_bytes()
    (memory / "in.jsonl").write_bytes(source)

    def there(out, **more):
        asked = {"save": ("image", "maps"), "batch_size": 1, "device": "cpu", "format": format}
        options = {"num_inference_steps": 1, "height": 64, "width": 64, "guidance_scale": 2.0}
        return run_batch(
            Request("memory://bucket/in.jsonl", out, str(model), options=options, **asked, **more)
        )

    assert there("memory://bucket/run").whole == here.whole == 3
    same = kept_of(tmp_path / "run")
    found = objects_of(memory / "run")
    assert found.keys() == same.keys()
    assert {k: v for k, v in found.items() if k != "batch.json"} == {
        k: v for k, v in same.items() if k != "batch.json"
    }
    again = there("memory://bucket/run")
    assert (again.before, again.whole) == (3, 3)
    for part in (1, 2):
        there(f"memory://bucket/part-{part}", part=(part, 2))
    parts = ["memory://bucket/part-1", memory / "part-2"]
    assert merge(parts, "memory://bucket/all") == merge(parts, tmp_path / "all") == (3, 3)
    assert verify(memory / "all") == verify(tmp_path / "all") == (3, [])


def test_a_run_of_the_disk_is_merged_into_a_storage(memory, tmp_path):
    new_run(tmp_path / "run", three())
    assert merge([tmp_path / "run"], memory / "all") == (3, 3)
    assert verify(memory / "all") == (3, [])
    with pytest.raises(FileExistsError, match="memory://bucket/all is the input"):
        merge([memory / "all"], Path("memory://bucket/all"))
    with pytest.raises(FileExistsError, match="is inside the input"):
        merge([memory / "all"], "memory://bucket/all/below")


def test_files_of_others_are_not_removed(memory):
    root = memory / "run"
    folder = begun(root, three())
    (root / "items/0000/b/mine.txt").write_text("mine")
    with pytest.raises(ValueError, match=r"holds mine.txt, which no run wrote"):
        folder.layout.discard({"b": "items/0000/b"})
    folder.close()
    assert len(open_batch(root)) == 3
    with pytest.raises(FileExistsError, match="is not a batch run's folder"):
        (memory / "other" / "x").write_bytes(b"")
        BatchFolder(memory / "other").open("job")
