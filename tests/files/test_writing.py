"""Files written whole or not at all, whatever stops their process."""

import errno
import os
import re
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from helpers.forks import fork
from helpers.small_runs import saved, small_run
from helpers.trees import tree

from sdattn.files.writing import flush, remove_abandoned, temporary_name, write_whole
from sdattn.runs.folder import save_run
from sdattn.runs.targets import check_target, new_folder


def write_and_die(at, folder, go):
    """Write a new folder, and be killed at a place; or wait there until ``go`` is set."""

    def die():
        os.kill(os.getpid(), signal.SIGKILL)

    really = os.rename

    def rename(source, target):
        last = target == folder
        if last and at == "between":
            die()
        really(source, target)
        if last and at == "after":
            die()

    os.rename = rename
    with new_folder(folder, force=True) as made:
        (made / "new").write_bytes(b"new")
        if at == "inside":
            die()
        if at == "alive":
            (folder.parent / "ready").touch()
            while not go.exists():
                time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="no fork")
@pytest.mark.parametrize(
    ("at", "existing"),
    [("inside", False), ("inside", True), ("between", True), ("after", False), ("after", True)],
)
def test_what_a_kill_left_is_cleared_by_the_next_run_there(tmp_path, at, existing):
    name = "run" * 20
    folder = tmp_path / name
    if existing:
        saved(folder)
    old = tree(folder)
    others = {".run.0123456789ab.tmp": b"", f".{name[:40]}.01234567.89abcdef.tmp": b""}
    for other in others:
        (tmp_path / other).mkdir()
        (tmp_path / other / "mine").write_bytes(b"")
    process = fork(write_and_die, at, folder, None, daemon=True)
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    names = set(os.listdir(tmp_path))
    assert len(names - {name} - others.keys()) == {"inside": 1, "between": 2}.get(at, int(existing))
    if at == "inside":
        check_target(folder, force=True)
        assert tree(folder) == old
    else:  # whole, so it takes its place
        with pytest.raises(FileExistsError, match="exists already"):
            check_target(folder)
        assert tree(folder) == {"new": b"new"}
    assert set(os.listdir(tmp_path)) == others.keys() | ({name} if folder.exists() else set())
    assert all((tmp_path / other / "mine").exists() for other in others)


@pytest.mark.skipif(os.name == "nt", reason="no fork")
def test_what_a_living_process_writes_stays(tmp_path):
    process = fork(write_and_die, "alive", tmp_path / "run", tmp_path / "go", daemon=True)
    while not (tmp_path / "ready").exists():
        assert process.exitcode is None
        time.sleep(0.02)
    before = tree(tmp_path)
    assert len(before) == 2
    check_target(tmp_path / "run")
    assert tree(tmp_path) == before
    (tmp_path / "go").touch()
    process.join(60)
    assert tree(tmp_path) == {"run/new": b"new", "ready": b"", "go": b""}


def test_what_dead_processes_left_is_removed(tmp_path):
    """Also if another process has got the number since, as in a container that was restarted."""
    script = "from sdattn.files.writing import temporary_name; print(temporary_name('.t-'))"
    asked = [sys.executable, "-c", script]
    dead = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    living, before_us = temporary_name(".t-"), temporary_name(".t-")
    elsewhere, old = ".t-othermachine-17-abcdef01", ".t-othermachine-18-abcdef01"
    for name in (dead, living, before_us, elsewhere, old, "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    for name in (old, before_us):
        os.utime(tmp_path / name, (0, 0))
    remove_abandoned(tmp_path, ".t-")
    assert set(os.listdir(tmp_path)) == {living, elsewhere, "mine"}


def test_another_container_with_the_same_host_name_is_another_machine(tmp_path, monkeypatch):
    """It has its own process numbers: ours say nothing about it."""
    really = os.stat

    def stat_there(path, *args, **options):
        found = really(path, *args, **options)
        if path != "/proc/self/ns/pid":
            return found
        return os.stat_result((*found[:1], found.st_ino + 1, *found[2:]))

    if not os.path.exists("/proc/self/ns/pid"):
        pytest.skip("no namespaces of processes")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", stat_there)
        patch.setattr(os, "getpid", lambda: 2**22 + 1)  # no process's here
        theirs = [tmp_path / temporary_name(".t-") for _ in range(2)]
        for path in theirs:
            path.touch()
        os.utime(theirs[0], (0, 0))
    remove_abandoned(tmp_path, ".t-")
    assert [*tmp_path.iterdir()] == theirs[1:]


@pytest.mark.parametrize("name", ["EINVAL", "ENOTSUP", "EACCES"])
def test_a_folder_that_cannot_be_flushed_is_written_all_the_same(tmp_path, monkeypatch, name):
    """As on CIFS and VirtualBox's disks; a file that cannot be, or a broken disk, raises."""
    fsync = os.fsync
    number = getattr(errno, name)

    def refuse(descriptor):
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            return fsync(descriptor)
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", refuse)
    write_whole(tmp_path / "a", b"a")
    assert (tmp_path / "a").read_bytes() == b"a"
    for number, path in ((errno.EIO, tmp_path), (errno.EINVAL, tmp_path / "a")):

        def fail(_, number=number):
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", fail)
        with pytest.raises(OSError, match=re.escape(os.strerror(number))):
            flush(path)


def test_all_is_on_the_disk_before_it_takes_its_place(tmp_path, monkeypatch):
    """The order of what the system is asked: a loss of power must not leave an empty file."""
    done, fsync, rename = [], os.fsync, os.rename

    def note_fsync(descriptor):
        done.append(os.path.realpath(f"/proc/self/fd/{descriptor}"))
        fsync(descriptor)

    def note_rename(source, target):
        done.append(("rename", Path(target).name))
        rename(source, target)

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("no way to tell which file was flushed")
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    save_run(tmp_path / "run", small_run())
    last = done.index(("rename", "run"))
    flushed = {re.sub(r".*\.tmp/?", "", one) for one in done[:last] if isinstance(one, str)}
    wrote = {str(p.relative_to(tmp_path / "run")) for p in (tmp_path / "run").rglob("*")}
    assert flushed == {"", *wrote}
    assert done[last + 1 :] == [str(tmp_path)]


def test_a_file_that_cannot_be_put_in_place_leaves_nothing(tmp_path):
    path = tmp_path / "run.json"
    write_whole(path, b"first")
    write_whole(path, b"second")
    assert path.read_bytes() == b"second"
    folder = tmp_path / "folder"
    (folder / "inside").mkdir(parents=True)
    with pytest.raises(OSError, match="folder"):
        write_whole(folder, b"third")
    assert {one.name for one in tmp_path.iterdir()} == {"run.json", "folder"}
