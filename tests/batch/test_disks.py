"""`sdattn batch` on disks that are full, fill up, or cannot be written."""

import errno
import os
import re
import subprocess

import pytest
from helpers.demo_batches import (  # noqa: F401
    LINUX,
    SETTINGS,
    call_batch,
    check_complete,
    colours,
    stamps,
    whole,
    write_lines,
)
from helpers.forks import in_own_namespace
from helpers.tiers import tiered

from sdattn.batch.reading import verify
from sdattn.batch.storage.folder import BatchFolder

pytestmark = pytest.mark.slow
SMALL = [*SETTINGS, "--width", "64", "--height", "64"]


@pytest.fixture
def may_mount():
    """Skips where no namespace of its own may be made, and none to mount in."""
    try:
        command = ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"]
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no namespace of its own may be made here: {error}")


def said(folder, name):
    """(exit code, stdout, stderr) of a step in a namespace."""
    out, err = ((folder / f"{name}.{end}").read_text() for end in ("out", "err"))
    return int((folder / f"{name}.code").read_text()), out, err


@pytest.mark.weekly
@pytest.mark.usefixtures("may_mount")
@pytest.mark.parametrize("kind", ["folder", "webdataset"])
def test_a_full_disk_is_told_and_what_was_finished_stays(tmp_path, kind):
    number = 30
    write_lines(tmp_path / "in.jsonl", colours(number))
    (tmp_path / "disk").mkdir()
    command = ["batch", "in.jsonl", "--out", "disk/run", *SETTINGS]
    command += ["--format", kind, "--shard-mb", "1"]
    full = ["full", "still"] if kind == "folder" else ["full"]
    steps = [
        "mount -t tmpfs -o size=3m none disk",
        *[(name, *command) for name in full],
        "find disk/run/.batch/tmp -mindepth 1 >left",
        ("check", "batch", "--verify", "disk/run"),
        "cp -a disk/run before",
        "mount -o remount,size=200m disk",
        ("again", *command),
        "cp -a disk/run after",
    ]
    in_own_namespace(steps, cwd=tmp_path)
    for name in full:
        code, out, err = said(tmp_path, name)
        assert code == 1
        assert "Traceback" not in err
        lines = [line for line in err.splitlines() if "items/s" not in line]
        assert len(lines) == 1, err
        assert "No space left on device" in err
        assert "Finished items stay in disk/run" in err
    assert (tmp_path / "left").read_text() == ""
    code, out, err = said(tmp_path, "check")
    assert code == 0, err
    done = int(re.search(r"(\d+) items read, 0 problems", out)[1])
    assert 5 < done < number
    code, out, err = said(tmp_path, "again")
    assert code == 0, err
    # cp -a keeps times: what was there was not written again
    earlier, later = (
        {path: one[1] for path, one in stamps(tmp_path / name).items()}
        for name in ("before", "after")
    )
    assert earlier.items() <= later.items()
    check_complete(tmp_path / "after", number)


@pytest.mark.weekly
@pytest.mark.usefixtures("may_mount")
def test_a_disk_that_cannot_be_written(tmp_path, batch):
    write_lines(tmp_path / "in.jsonl", colours(4))
    assert batch("in.jsonl", *SMALL, "--out", "run")[0] == 0
    before = stamps(tmp_path / "run")
    (tmp_path / "disk").mkdir()
    steps = [
        "mount -t tmpfs -o ro none disk",
        ("new", "batch", "in.jsonl", *SMALL, "--out", "disk/run"),
        "mount --bind run run",
        "mount -o remount,bind,ro run",
        ("old", "batch", "in.jsonl", *SMALL, "--out", "run"),
        ("status", "batch", "--status", "run"),
        ("verify", "batch", "--verify", "run"),
    ]
    in_own_namespace(steps, cwd=tmp_path)
    for name, where in (("new", "disk/run"), ("old", "run")):
        code, _, err = said(tmp_path, name)
        assert code == 1
        told = f"sdattn: Cannot write to {where}: Read-only file system. Choose another --out."
        assert err.splitlines() == [told]
    code, out, err = said(tmp_path, "status")
    assert (code, err) == (0, "")
    assert "4 items are whole, the input has 4" in out and "not running" in out
    code, out, err = said(tmp_path, "verify")
    assert (code, err) == (0, "")
    assert "4 items read, 0 problems" in out
    assert stamps(tmp_path / "run") == before


@pytest.mark.parametrize("full", tiered(["the items", "the rows"], quick=0, daily=1))
@pytest.mark.weekly
def test_a_disk_that_fills_up_at_any_file_is_told_once(batch, tmp_path, monkeypatch, full):
    write_lines(tmp_path / "in.jsonl", colours(6))
    arguments = ["in.jsonl", *SMALL, "--out", "run"]
    root = tmp_path / "run"
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def refuse(*_):
        raise error

    def replace(source, target, really=os.replace):
        refuse() if str(target).endswith("metadata.jsonl") and whole(root) else None
        really(source, target)

    with monkeypatch.context() as patches:
        if full == "the items":
            patches.setattr("sdattn.batch.storage.disk.write_files", refuse)
            patches.setattr(BatchFolder, "stop", refuse)
        else:
            patches.setattr("sdattn.files.writing.os.replace", replace)
        code, _, err = batch(*arguments)
    assert code == 1
    lines = [line for line in err.splitlines() if "items/s" not in line]
    assert len(lines) == 1, err
    assert "No space left on device. Finished items stay in run" in err
    assert list((root / ".batch/tmp").iterdir()) == []
    assert verify(root) == (0 if full == "the items" else 6, [])
    before = stamps(root)
    code, _, err = batch(*arguments)
    assert code == 0, err
    assert before.items() <= stamps(root).items()
    check_complete(root, 6)


@pytest.mark.skipif(not LINUX, reason="limits the size of files")
def test_a_row_is_noted_whole_or_refused(tmp_path):
    import resource

    folder = BatchFolder(tmp_path / "run")
    folder.open("job")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    noted = []
    row = {"place": "items/0000/1", "fingerprint": "f", "prompt": "a cat" * 20}
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # as if the disk were full there
    try:
        with pytest.raises(OSError, match="space|large"):
            for line in range(100):
                folder.journals.note("done", "rank", {"id": f"{line:06d}", "line": line, **row})
                noted.append(f"{line:06d}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    folder.journals.note("done", "rank", {"id": "later", "line": 100, **row})
    assert list(folder.journals.rows()) == [*noted, "later"]
    assert folder.journals.gather() == len(noted) + 1
    folder.lock.release()
