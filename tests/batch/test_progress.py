"""How far a run is, as it is counted and shown."""

import os
import pty
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

from sdattn.batch.engines.progress import Progress, Tally
from sdattn.batch.storage.disk import Disk


def note(root, kind, name, number):
    (root / ".batch" / kind).mkdir(parents=True, exist_ok=True)
    with (root / ".batch" / kind / f"{name}.jsonl").open("a") as file:
        file.write('{"id": 1}\n' * number)


def test_the_line_counts_what_all_processes_noted(tmp_path, monkeypatch):
    now = SimpleNamespace(monotonic=lambda: now.time, time=100.0)
    monkeypatch.setattr("sdattn.batch.engines.progress.time", now)
    progress = Progress(Disk(tmp_path), total=1200, before=80)
    now.time += 1
    assert progress.text() == "80 of 1,200 items (80 were there)"
    note(tmp_path, "done", "a-0", 30)
    note(tmp_path, "done", "a-1", 10)
    now.time += 11.5
    assert progress.text() == "120 of 1,200 items (80 were there), 3.2 items/s, 0:05:38 left"
    note(tmp_path, "done", "a-1", 1080 - 1)
    note(tmp_path, "failed", "a-0", 1)
    now.time += 12.5
    text = progress.text()
    assert text.startswith("1,199 of 1,200 items (80 were there), 44.8 items/s, 0:00:00 left")
    assert text.endswith(", 1 failed")
    new = Progress(Disk(tmp_path / "none"), total=5, before=0)
    now.time += 1
    assert new.text() == "0 of 5 items"


def test_a_tally_reads_each_byte_once_and_no_half_line(tmp_path):
    tally = Tally(Disk(tmp_path))
    assert tally.count("done") == 0
    note(tmp_path, "done", "a", 3)
    with (tmp_path / ".batch/done/a.jsonl").open("a") as file:
        file.write('{"id":')
    assert tally.count("done") == 3
    with (tmp_path / ".batch/done/a.jsonl").open("a") as file:
        file.write(" 4}\n")
    assert [tally.count("done"), tally.count("done")] == [4, 4]
    note(tmp_path, "done", "b", 2)
    assert [tally.count("done"), tally.count("failed")] == [6, 0]


def test_lines_are_written_where_there_is_no_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sdattn.batch.engines.progress._LINE_EVERY", 0.01)
    note(tmp_path, "done", "a", 2)
    lines, end = [], time.monotonic() + 60
    with Progress(Disk(tmp_path), total=5, before=1):
        while not lines and time.monotonic() < end:
            lines += capsys.readouterr().err.splitlines()
    assert lines and all(line.startswith("sdattn: 3 of 5 items (1 were there)") for line in lines)


def test_a_terminal_has_a_bar(tmp_path, monkeypatch):
    master, slave = pty.openpty()
    note(tmp_path, "done", "a", 2)
    with os.fdopen(slave, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with Progress(Disk(tmp_path), total=5, before=1):
            pass
        monkeypatch.undo()
    shown = b""
    with suppress(OSError):  # at the end of what was written
        while True:
            shown += os.read(master, 100_000)
    os.close(master)
    assert b"3 of 5 items" in shown
