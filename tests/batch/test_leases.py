"""The lease of a run in a storage: whose job it is, when storages fail and jobs are killed."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
from helpers.storages import MEMORY, begun, faulty, memory_bucket, once, quick_waits  # noqa: F401

from sdattn.batch.storage.leases import StorageLease


def lease(root, job=None, **faults):
    made = StorageLease(faulty(root / "lease.json", **faults), root)
    if job:
        made.take(job)
    return made


@pytest.mark.parametrize("tries", [1, 2])
def test_a_lease_is_taken_though_the_answer_is_lost(memory, tries):
    left = tries

    def late(own, path, *args, **options):
        nonlocal left
        left -= 1
        own(path, *args, **options)
        if left >= 0:
            raise TimeoutError("the answer did not come through")

    mine = lease(memory, "one", pipe_file=late)
    assert mine.holder["job"] == "one"
    mine.release()
    assert mine.holder == {}


def test_of_two_who_take_a_lease_at_once_one_has_it(memory):
    """The storage lets both create it: the last that wrote has it. Or it refuses the second."""

    def overtaken(own, path, *args, **options):
        own(path, *args, **options)
        MEMORY().pipe_file(path, json.dumps({"job": "two", "host": "node7"}).encode())

    def refused(own, path, *args, **options):
        MEMORY().pipe_file(path, json.dumps({"job": "two", "host": "node7"}).encode())
        raise FileExistsError(path)

    for fault in (overtaken, refused):
        with pytest.raises(OSError, match="by another job: .* on node7"):
            lease(memory, "one", pipe_file=fault)
        assert lease(memory).holder["job"] == "two"
        (memory / "lease.json").unlink()


@pytest.mark.parametrize("error", [NotImplementedError, OSError])
def test_a_storage_that_cannot_create_or_holds_something_else(memory, error):
    def unable(own, path, *args, mode="overwrite", **options):
        if mode == "create":
            raise error("conditional writes")
        return own(path, *args, **options)

    for there in (None, b"[1]", b"{", b"{}"):
        if there is not None:
            (memory / "lease.json").write_bytes(there)
        mine = lease(memory, "one", pipe_file=unable)
        assert mine.holder["job"] == "one"
        mine.release()
        (memory / "lease.json").write_bytes(there or b"")
        lease(memory, "two").release()


def test_a_lease_that_is_given_back_during_the_wait_is_taken_at_once(memory):
    first, second = lease(memory, "one"), lease(memory)
    first._end.set()  # it shows no more that it lives
    first._thread.join()
    second.beat = 20.0
    looks = []

    def end(seconds):
        looks.append(seconds)
        first.release()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sdattn.batch.storage.leases.time.sleep", end)
        second.take("two")
    assert looks == [5.0, 1.0]  # one look, and the second look after it was written
    second.release()


def test_a_lease_stays_when_beats_fail_and_is_lost_when_others_count_it_as_dead(
    memory, monkeypatch
):
    """By a clock on which a beat passes with each sign of life that cannot be written."""
    fails, failed = threading.Event(), []

    def gone(own, *args, **options):
        if not fails.is_set():
            return own(*args, **options)
        failed.append(mine.lost)
        raise TimeoutError("gone")

    clock = SimpleNamespace(
        monotonic=lambda: len(failed) * mine.beat, sleep=time.sleep, time=time.time
    )
    monkeypatch.setattr("sdattn.files.addresses._WAITS", ())  # a write is tried once
    mine = lease(memory, pipe_file=gone)
    monkeypatch.setattr("sdattn.batch.storage.leases.time", clock)
    mine.take("one")
    fails.set()
    mine._thread.join(60)
    assert "no sign of life could be written: " in mine.lost
    assert failed == [None] * 4  # three beats are missed, then one more
    mine.release()


def test_a_lease_of_a_storage_that_is_gone_is_left(memory):
    fails = threading.Event()
    mine = lease(memory, "one", cat_file=once(fails))
    fails.set()
    mine.release()  # what ended the run is told, not this
    assert (memory / "lease.json").exists()


def test_a_lease_is_beaten_on_and_taken_again(memory):
    mine = lease(memory)
    for _ in range(2):
        mine.take("one")
        sign = mine.holder["sign"]
        end = time.monotonic() + 60
        while mine.holder["sign"] == sign and time.monotonic() < end:
            time.sleep(0.01)
        assert mine.holder["sign"] != sign
        mine.release()


def test_a_lease_counts_as_free_by_the_clock(memory):
    mine = lease(memory)
    mine.beat = 1000.0
    for beats, free in ((0.0, False), (3.1, True)):
        alive = time.time() - beats * mine.beat
        mine.note.write_text(json.dumps({"job": "one", "alive": alive}))
        assert mine.free() is free
