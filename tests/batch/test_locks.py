"""One job at a time writes in a folder."""

import errno
import fcntl
import os
import subprocess
import sys

import pytest
from helpers.batch_runs import new_run, three

from sdattn.batch import status
from sdattn.batch.storage.locks import FolderLock


@pytest.fixture
def lock(tmp_path):
    made = [FolderLock(tmp_path / "lock", tmp_path / "run") for _ in range(3)]
    yield made
    for one in made:
        one.release()


def test_a_lock_is_one_jobs(lock):
    first, second, third = lock
    assert first.free() and first.holder == {}
    first.take("one")
    assert not second.free()
    assert second.holder["job"] == "one" and second.holder["process"] == os.getpid()
    with pytest.raises(OSError, match=rf"run is being written by another job: .*{os.getpid()}, "):
        second.take("two")
    assert second.holder["job"] == "one"  # the refused one says nothing
    assert not second.join("two")
    assert second.join("one")
    with pytest.raises(OSError, match="being written by another job"):
        third.take("three")
    first.release()
    assert not third.free()  # the second holds it still
    second.release()
    assert third.free()
    third.take("three")
    assert not first.join("one")


def test_a_lock_dies_with_its_process(lock, tmp_path):
    lock[0].path.touch()
    program = (
        "import fcntl, sys; file = open(sys.argv[1], 'ab'); fcntl.flock(file, fcntl.LOCK_SH);"
        "print('held', flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-S", "-c", program, str(lock[0].path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"held\n"
        assert not lock[0].free()
        with pytest.raises(OSError, match=r"another job: \? on \? \(process \?, since \?\)"):
            lock[0].take("mine")
        other.kill()
    assert lock[0].free()
    lock[0].take("mine")


def test_a_broken_note_of_the_holder_stops_nobody(lock):
    lock[0].path.with_suffix(".json").write_text("{")
    assert lock[0].holder == {}
    assert not lock[0].join("one")
    lock[0].take("one")
    assert lock[1].join("one")


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_disk_without_locks_is_told(lock, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match="run lies on a disk without locks"):
        lock[0].take("one")
    with pytest.warns(UserWarning, match="no other job writes there"):
        assert lock[1].join("one")
    assert lock[2].free()


def test_other_errors_of_a_lock_are_raised(lock, monkeypatch):
    def refuse(*_):
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(OSError, match="input/output error"):
        lock[0].take("one")


def test_a_lock_holds_on_nfs_too(lock, monkeypatch):
    """There a shared lock needs a file open to read and an exclusive one a file open to write."""
    real = fcntl.flock

    def flock(file, kind):
        mode = fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE
        refused = os.O_WRONLY if kind & fcntl.LOCK_SH else os.O_RDONLY
        if mode == refused:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        real(file, kind)

    monkeypatch.setattr(fcntl, "flock", flock)
    lock[0].take("one")
    assert lock[1].join("one")
    assert not lock[2].free()
    with pytest.raises(OSError, match="another job"):
        lock[2].take("two")


def test_a_holder_that_is_not_written_yet_is_told(tmp_path):
    root = new_run(tmp_path / "run", three())
    holder = FolderLock(root / ".batch/lock", root)
    holder.take("job")
    (root / ".batch/lock.json").write_text("")
    assert status(root).running == "? on ? (process ?, since ?)"
    holder.release()


def test_a_user_without_a_name_can_lock(tmp_path, monkeypatch):
    def fail():
        raise KeyError("getpwuid(): uid not found: 12345")

    monkeypatch.setattr("getpass.getuser", fail)
    lock = FolderLock(tmp_path / "lock", tmp_path)
    lock.take("job")
    assert lock.holder["user"] == str(os.getuid())
    lock.release()
