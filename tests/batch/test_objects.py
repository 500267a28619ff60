"""What a run asks of a storage, in which order, and how often; its ledger alone."""

import json
import time
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import pytest
from helpers.batch_runs import FORMATS, three
from helpers.storages import MEMORY, begun, faulty, memory_bucket, quick_waits  # noqa: F401

from sdattn.batch import run, status, verify
from sdattn.batch.engines.progress import Tally
from sdattn.batch.storage import bucket
from sdattn.batch.storage.bucket import Bucket
from sdattn.batch.storage.folder import BatchFolder
from sdattn.batch.storage.whole import settle
from sdattn.files.addresses import Address


@pytest.fixture
def asked(monkeypatch):
    """The requests of every storage in memory, (method, path), in their order."""
    found = []

    def listened(name):
        own = getattr(MEMORY, name)

        def call(self, path, *args, **options):
            found.append((name, path))
            return own(self, path, *args, **options)

        monkeypatch.setattr(MEMORY, name, call)

    for name in ("pipe_file", "rm_file", "get_file", "find", "info"):
        listened(name)
    return found


def of(asked, method, part):
    return [path for name, path in asked if name == method and part in path]


def reopened(root, job="again"):
    folder = BatchFolder(root)
    folder.open(job)
    return folder


# Items


def test_run_json_is_written_last_and_removed_first(memory, asked):
    items = {name: {**files, "source.png": b""} for name, files in three().items()}
    folder = begun(memory / "run", items)
    assert of(asked, "pipe_file", "items/0000/b/")[-1].endswith("/run.json")
    asked.clear()
    folder.layout.discard({"b": "items/0000/b"})
    assert of(asked, "rm_file", "items/0000/b/")[0].endswith("/run.json")
    assert len(of(asked, "rm_file", "items/0000/b/")) == len(items["b"])
    folder.close()


def test_sizes_are_those_of_what_is_there_now(memory):
    folder = begun(memory / "run", three())
    where = "b", "items/0000/b", ["image.png"]
    first = folder.layout.sizes(*where)
    assert first == {"image.png": len(three()["b"]["image.png"])}
    folder.layout.discard({"b": where[1]})
    assert folder.layout.sizes(*where) == {}
    (folder.root / "items/0000/b/image.png").write_bytes(b"x")
    assert folder.layout.sizes(*where) == {"image.png": 1}
    (folder.root / "items/0000/c/image.png").write_bytes(b"x")  # by another process
    assert [*folder.layout.find()]
    assert folder.layout.sizes("c", "items/0000/c", ["image.png"]) == {"image.png": 1}
    folder.close()


def test_items_that_are_not_listed_yet_are_there(memory):
    begun(memory / "run", three()).close()
    nothing = faulty(memory / "run", find=lambda own, path, **_: {})
    layout = BatchFolder(nothing).layout
    assert layout.lacking("b", "items/0000/b", {"run.json": len(three()["b"]["run.json"])}) == []


def test_what_is_unfinished_is_told_once_and_left_where_it_is_not_ours(memory):
    root = memory / "run"
    begun(root, three()).close()
    for name in ("d/image.png", "e/image.png", "e/mine.txt"):
        (root / "items/0000" / name).write_bytes(b"x")
    folder = reopened(root)
    for _ in range(2):
        assert [*folder.layout.find()]
        assert folder.layout.unfinished() == ["items/0000/d", "items/0000/e"]
    folder.layout.clear_unfinished()
    assert not (root / "items/0000/d").exists()
    assert (root / "items/0000/e/mine.txt").exists() and (root / "items/0000/e/image.png").exists()
    folder.close()


def test_a_start_lists_items_once_and_opens_none(memory, asked):
    root = memory / "run"
    folder = begun(root, {})
    for line, (item, files) in enumerate(three().items()):
        folder.layout.add(item, 1 + 1000 * line, files, partial(folder.note_whole, "job-0"))
    folder.journals.gather()
    folder.close()
    for look in (lambda folder: status(root), settle):
        folder = reopened(root)
        asked.clear()
        look(folder)
        assert len(of(asked, "find", "items")) == 3 and not of(asked, "info", "items")
        folder.close()


@pytest.mark.parametrize("format", ["webdataset", "parquet"])
def test_a_start_reads_no_shard_that_rows_name(memory, format, asked):
    root = memory / "run"
    folder = begun(root, three(), format=format)
    folder.layout.flush()
    assert len(of(asked, "pipe_file", ".batch/done")) == 1  # of all three rows
    folder.close()
    folder = reopened(root)
    asked.clear()
    assert len(settle(folder)) == 3
    assert not of(asked, "get_file", "shards")
    folder.close()


@pytest.mark.parametrize("format", FORMATS)
def test_verify_asks_once_for_what_is_there(memory, format, asked):
    """Nothing for each item but its files."""
    folder = begun(memory / "run", three(), format=format)
    folder.layout.flush()
    folder.journals.gather()
    folder.seal(3)
    folder.close()
    asked.clear()
    assert verify(memory / "run") == (3, [])
    assert len(of(asked, "find", "items")) == (format == "folder")
    assert len(of(asked, "get_file", "shards")) == (format != "folder")
    assert not of(asked, "info", "items")
    assert len(of(asked, "info", "shards/")) <= 1  # by fsspec, before it fetches


def test_shards_are_read_by_many_threads_from_few_copies(memory, monkeypatch):
    monkeypatch.setattr(bucket, "_KEPT", 1)
    folder = begun(memory / "run", three(), format="webdataset", shard_bytes=1)
    assert folder.journals.gather() == 3
    folder.seal(3)
    folder.close()
    assert len([*(memory / "run/shards").iterdir()]) == 3
    assert verify(memory / "run") == (3, [])


def test_a_copy_stays_while_it_is_read(memory, monkeypatch):
    monkeypatch.setattr(bucket, "_KEPT", 1)
    storage = Bucket(memory)
    for name in ("a", "b"):
        storage.write(name, [name.encode()])

    def read(name):
        with storage.reading(name) as path:
            return path.read_bytes()

    with ThreadPoolExecutor() as pool:
        with storage.reading("a") as path:
            other = pool.submit(read, "b")
            wait([other], 0.3)  # it takes the place of the first copy, and has to wait
            assert path.read_bytes() == b"a"
        assert other.result(60) == b"b"


# The ledger


def unwritten(root, monkeypatch):
    """A folder whose ledger writes when it must."""
    folder = begun(root, {})
    monkeypatch.setattr(bucket, "_EVERY", 1e9)
    folder.storage._every, folder.storage._flushed = 1e9, time.monotonic()
    return folder


def row(item):
    return {"id": item, "line": 1, "place": f"items/0000/{item}", "fingerprint": "f"}


def seen(root):
    """The rows that another process sees."""
    return {*BatchFolder(root).journals.rows()}


def test_rows_are_written_at_most_once_in_a_while(memory, monkeypatch, asked):
    folder = unwritten(memory / "run", monkeypatch)
    ledger = folder.journals
    folder.storage._flushed = 0.0 - 1e9
    for item in "abc":
        ledger.note("done", "job-0", row(item))
    assert len(of(asked, "pipe_file", "/done/")) == 1 and seen(folder.root) == {"a"}
    assert {*ledger.rows()} == {*"abc"} == seen(folder.root)  # its own are always known
    folder.close()


def test_rows_that_belong_together_are_written_together(memory):
    folder = begun(memory / "run", {})
    with folder.storage.together():
        folder.journals.note("done", "job-0", row("a"))
        assert seen(folder.root) == set()
    assert seen(folder.root) == {"a"}
    folder.journals.note("done", "job-0", row("b"))
    assert seen(folder.root) == {"a", "b"}
    folder.close()


def test_what_could_not_be_written_is_written_the_next_time(memory, monkeypatch):
    fails = True

    def put(own, path, *args, **options):
        if fails and "/done/" in path:
            raise TimeoutError("gone")
        return own(path, *args, **options)

    folder = unwritten(faulty(memory / "run", pipe_file=put), monkeypatch)
    folder.journals.note("done", "job-0", row("a"))
    with pytest.raises(OSError, match="cannot be reached: gone"):
        folder.layout.flush()
    fails = False
    folder.close()
    assert seen(memory / "run") == {"a"}


def test_a_ledger_goes_on_after_it_was_closed_or_gathered(memory):
    """A process's worker closes it after each deal."""
    folder = begun(memory / "run", {})
    ledger, other = folder.journals, BatchFolder(memory / "run").journals
    for end, item in (
        (folder.storage.close, "a"),
        (ledger.gather, "b"),
        (folder.storage.close, "c"),
    ):
        ledger.note("done", "job-0", row(item))
        other.note("done", "job-0", row(f"{item}-2"))  # a process of the same name
        end()
    assert seen(memory / "run") == {"a", "b", "c", "a-2", "b-2", "c-2"}
    assert ledger.gather() == 6 and [*(memory / "run/.batch/done").iterdir()] == []
    assert seen(memory / "run") == {"a", "b", "c", "a-2", "b-2", "c-2"}
    folder.close()


def test_rows_that_were_gathered_are_not_written_again(memory, asked):
    folder = begun(memory / "run", {})
    ledger, first = folder.journals, BatchFolder(memory / "run").journals
    for gather in (ledger.gather, lambda: (folder.storage.close(), first.gather())):
        ledger.note("done", "job-0", row("a"))
        gather()
        ledger.note("done", "job-0", row("b"))
        parts = [path.read_text() for path in (folder.hidden / "done").iterdir()]
        assert len(parts) == 1 and json.loads(parts[0])["id"] == "b"
        ledger.gather()
        asked.clear()
        assert {*ledger.rows()} == {"a", "b"}
        assert not of(asked, "info", "/done/")  # what was removed is not looked for
    folder.close()


def test_where_each_writing_is_a_commit_there_are_few(memory):
    hub = BatchFolder(Address(memory.files, memory.path, "hf"))
    assert (hub.lock.beat, hub.storage._every) == (300, 60)


def test_rows_that_no_listing_shows_yet(memory):
    """A process's own count; those of others are missing, stay, and are found by the next run."""
    lags = True

    def listing(own, path, **options):
        if lags and path.endswith("/done"):
            raise FileNotFoundError(path)
        return own(path, **options)

    folder = begun(faulty(memory / "run", ls=listing, find=listing), {})
    other = BatchFolder(memory / "run").journals
    folder.journals.note("done", "job-0", row("a"))
    other.note("done", "job-1", row("b"))
    assert folder.journals.gather() == 1 and {*folder.journals.rows()} == {"a"}
    folder.journals.note("done", "job-0", row("c"))
    lags = False
    assert folder.journals.gather() == 3
    folder.close()


def test_rows_are_counted_while_the_storage_answers(memory):
    folder = begun(memory / "run", three())

    def gone(own, path, *args, **options):
        raise TimeoutError("gone")

    tally = Tally(Bucket(faulty(folder.root, open=gone)))
    assert tally.count("done") == 0
    tally = Tally(folder.storage)
    folder.journals.note("failed", "job-0", row("x"))
    assert (tally.count("done"), tally.count("failed")) == (3, 1)
    folder.note_whole("job-0", "a", "items/0000/a", three()["a"])
    assert (tally.count("done"), tally.count("failed")) == (4, 1)
    folder.close()


# The run


def test_a_run_that_was_told_to_stop_goes_on_the_next_time(memory):
    folder = begun(memory / "run", {})
    folder.stop("enough")
    assert BatchFolder(memory / "run").stopped == "enough"
    folder.close()
    folder = reopened(memory / "run")
    assert folder.stopped is None
    folder.close()


def test_a_large_file_of_a_run_is_compared_to_its_end(memory):
    folder = begun(memory / "run", {})
    folder.storage.write("ids.txt", [b"x" * 2**21])
    folder.seal(0)
    assert folder.changed(folder.manifest.ended) == []
    folder.storage.write("ids.txt", [b"x" * (2**21 - 1), b"y"])
    assert folder.changed(folder.manifest.ended) == ["ids.txt"]
    folder.close()


def test_rows_that_were_counted_are_not_counted_again(memory):
    folder = begun(memory / "run", {})
    tally = Tally(folder.storage)
    for number in range(1, 4):
        folder.journals.note("done", "job-0", row(f"{number}"))
        assert tally.count("done") == number
    folder.close()


def test_what_ends_a_run_is_told_with_what_to_do(memory):
    def gone(own, path, *args, **options):
        raise TimeoutError("gone")

    folder = BatchFolder(faulty(memory / "run", info=gone))
    with pytest.raises(OSError, match="cannot be reached") as ended:
        _ = folder.stopped
    told = str(run._with_advice(ended.value, folder))
    assert told == (
        "memory://bucket/run/.batch/stop cannot be reached: gone. Finished items stay in "
        "memory://bucket/run; once this is fixed, the same command does the rest."
    )
