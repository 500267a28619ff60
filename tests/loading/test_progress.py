"""How much of a download has come: counted where the bytes arrive, and told once each."""

import os
import re
import time

import pytest
from filelock import FileLock

from sdattn.loading import progress
from sdattn.loading.progress import Download, own_progress
from sdattn.loading.repository import _remove_remains

MB = 1_000_000
UP, ERASE = "\x1b[1A", "\x1b[2K"  # of a terminal: a line up, and delete a line


def wait_for(read, pattern, most=20):
    """Wait until the text that was printed has a line."""
    said = ""
    for _ in range(100 * most):
        said += read()
        if re.search(pattern, said):
            return said
        time.sleep(0.01)
    raise AssertionError(f"no {pattern!r} in {said!r}")


def test_a_log_has_a_line_at_once_and_more_while_bytes_come(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "EVERY", 0.05)
    (tmp_path / "there before").write_bytes(bytes(7 * MB))
    with Download(tmp_path, 4 * MB, "2 of 9 files of owner/name"):
        said = capfd.readouterr().err
        assert said.startswith("sdattn: fetching 2 of 9 files of owner/name, 4.0 MB\n")
        (tmp_path / "a.incomplete").write_bytes(bytes(MB))
        wait_for(lambda: capfd.readouterr().err, r"sdattn: 1\.0 MB of 4\.0 MB, 25 %, [\d.,]+ \w+/s")
        (tmp_path / "a.incomplete").rename(tmp_path / "a")
        (tmp_path / "b").write_bytes(bytes(3 * MB))
        wait_for(lambda: capfd.readouterr().err, r"4\.0 MB of 4\.0 MB, 100 %")
    assert re.search(r"sdattn: fetched 4\.0 MB in \d+ s\n$", capfd.readouterr().err)


def test_a_download_that_fails_is_not_said_to_be_fetched(tmp_path, capfd):
    with pytest.raises(OSError, match="cut"), Download(tmp_path, MB, "1 of 1 files"):
        raise OSError("cut")
    assert "fetched" not in capfd.readouterr().err


def test_a_terminal_has_a_bar(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(progress, "_has_bar", lambda: True)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with Download(tmp_path, 4 * MB, "1 of 1 files"):
        (tmp_path / "a").write_bytes(bytes(2 * MB))
        wait_for(lambda: capfd.readouterr().err, r"50%.*2\.0/4\.0 MB")
    assert f"{UP}{ERASE}sdattn: fetched" in capfd.readouterr().err  # where the bar was


def test_a_file_counts_once_wherever_the_cache_puts_it(tmp_path, capfd, monkeypatch):
    """A snapshot links to it, or on a disk without links has the file itself."""
    monkeypatch.setattr(progress, "EVERY", 0.05)
    blobs = tmp_path / "blobs"
    snapshot = tmp_path / "snapshots" / "0123abc" / "unet"
    blobs.mkdir()
    with Download(tmp_path, 4 * MB, "2 of 2 files"):
        snapshot.mkdir(parents=True)
        (blobs / "a.incomplete").write_bytes(bytes(MB))
        (blobs / "a.incomplete").rename(snapshot / "a.safetensors")
        (blobs / "b").write_bytes(bytes(MB))
        (snapshot / "b.safetensors").symlink_to(blobs / "b")
        wait_for(lambda: capfd.readouterr().err, r"sdattn: 2\.0 MB of 4\.0 MB, 50 %")
    assert progress._bytes_in(tmp_path) == 2 * MB


def test_bytes_whose_place_is_only_reserved_have_not_come(tmp_path):
    file = tmp_path / "a"
    file.touch()
    os.truncate(file, 100 * MB)
    with file.open("r+b") as opened:
        opened.write(bytes(MB))
    assert progress._bytes_in(tmp_path) < 2 * MB


@pytest.mark.parametrize("were_on", [True, False])
def test_the_hubs_bars_are_off_meanwhile_and_as_before_afterwards(were_on):
    from huggingface_hub import utils

    before = utils.are_progress_bars_disabled()
    try:
        (utils.enable_progress_bars if were_on else utils.disable_progress_bars)()
        with own_progress() as shown:
            assert shown is were_on
            assert utils.are_progress_bars_disabled()
        assert utils.are_progress_bars_disabled() is not were_on
    finally:
        (utils.disable_progress_bars if before else utils.enable_progress_bars)()


@pytest.mark.parametrize("who_writes", ["nobody", "one with a lock", "one without locks"])
def test_remains_are_removed_if_nobody_writes_them(tmp_path, who_writes):
    """What a killed process left behind; a file system may have no locks."""
    home = tmp_path / "models--owner--name"
    (home / "blobs").mkdir(parents=True)
    part = home / "blobs" / "hash.0a1b2c3d.incomplete"
    part.write_bytes(bytes(9))
    remains = {part: part.stat()}
    locks = tmp_path / ".locks" / home.name
    locks.mkdir(parents=True)
    lock = FileLock(locks / "hash.lock")
    if who_writes == "one with a lock":
        lock.acquire()
    if who_writes == "one without locks":
        part.write_bytes(bytes(10))
    _remove_remains(home, remains)
    assert part.exists() == (who_writes != "nobody")
    lock.release()
