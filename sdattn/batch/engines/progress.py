"""Progress of a run: one bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta

from ...files.terminal import counted, say
from ..storage.storage import Storage

_LINE_EVERY = 15.0  # seconds between lines if there is no terminal


class Tally:
    """Counts the rows that all processes have noted, reading only what is new."""

    def __init__(self, storage: Storage):
        self._storage = storage
        self._read: dict[str, tuple[int, int]] = {}  # bytes and rows of each file
        self._lock = threading.Lock()

    def count(self, kind: str) -> int:
        with self._lock:
            with suppress(OSError):  # they are counted next time; a writer raises it as well
                for name, size in self._storage.listing(f".batch/{kind}").items():
                    # Only new bytes are read: files of a long run are large.
                    start, rows = self._read.get(name, (0, 0))
                    if size != start:
                        with (self._storage.root / name).open("rb") as file:
                            file.seek(start)
                            new = file.read()
                        self._read[name] = start + len(new), rows + new.count(b"\n")
            read = self._read.items()
            return sum(rows for name, (_, rows) in read if name.startswith(f".batch/{kind}/"))


class Progress:
    """Shows, inside its block, how many of ``total`` items are whole, and ``before`` it began."""

    def __init__(self, storage: Storage, total: int, before: int):
        self.tally, self.total, self.before = Tally(storage), total, before
        self._redraw = _LINE_EVERY if storage.is_remote else 0.5  # each redraw queries the storage
        self._end = threading.Event()
        show = self._draw_bar if sys.stderr.isatty() else self._print_lines
        self._thread = threading.Thread(target=show, daemon=True)
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def text(self) -> str:
        """Return ``120 of 200 items (80 were there), 3.2 items/s, 0:00:25 left, 1 failed``."""
        done, failed = self.tally.count("done"), self.tally.count("failed")
        rate = done / max(time.monotonic() - self._start, 1e-6)
        left = self.total - self.before - done - failed
        parts = [f"{self.before + done:,} of {counted(self.total, 'item')}"]
        if self.before:
            parts[0] += f" ({self.before:,} were there)"
        if done:
            parts += [f"{rate:.3g} items/s", f"{timedelta(seconds=round(left / rate))} left"]
        if failed:
            parts.append(f"{failed:,} failed")
        return ", ".join(parts)

    def _print_lines(self) -> None:
        while not self._end.wait(_LINE_EVERY):
            say(self.text())

    def _draw_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = BarColumn(bar_width=30), TextColumn("{task.description}")
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=self.total, completed=self.before)
            while True:
                ended = self._end.wait(self._redraw)
                text = self.text()
                done = self.before + self.tally.count("done")
                bar.update(task, completed=done, description=text)
                if ended:
                    return
