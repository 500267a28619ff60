"""Progress of a run: one bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta

from ..files.terminal import counted, say

# Seconds before the first line and between two, without a terminal
_FIRST_LINE = 2.0
_LINE_EVERY = 15.0
_REDRAW = 0.5


class Progress:
    """Shows, inside its block, what has been counted so far.

        with Progress(total=200, before=80) as progress:
            progress.add(whole=1, failed=0)         # from any thread

    With ``total`` None it counts lines that are checked, of which nobody knows how many there are.
    """

    def __init__(self, total: int | None, before: int = 0, *, is_shown: bool = True):
        self.total = total
        self.before = before
        self.whole = self.failed = 0
        self._lock = threading.Lock()
        self._end = threading.Event()
        show = self._draw_bar if sys.stderr.isatty() else self._print_lines
        self._thread = threading.Thread(target=show if is_shown else None, daemon=True)
        self._start = time.monotonic()

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def add(self, whole: int, failed: int) -> None:
        with self._lock:
            self.whole += whole
            self.failed += failed

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._start

    def text(self) -> str:
        """Return ``120 of 200 items (80 were there), 3.2 items/s, 0:00:25 left, 1 failed``."""
        done = self.whole + self.failed
        if self.total is None:
            text = f"checked {counted(done, 'line')}"
            return text + (f", {self.failed:,} cannot be drawn" if self.failed else "")
        text = f"{self.before + self.whole:,} of {counted(self.total, 'item')}"
        if self.before:
            text += f" ({self.before:,} were there)"
        if done:
            rate = done / max(self.seconds, 1e-6)
            left = timedelta(seconds=round((self.total - self.before - done) / rate))
            text += f", {rate:.3g} items/s, {left} left"
        return text + (f", {self.failed:,} failed" if self.failed else "")

    def _print_lines(self) -> None:
        wait = _FIRST_LINE
        while not self._end.wait(wait):
            say(self.text())
            wait = _LINE_EVERY

    def _draw_bar(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bar

        columns = BarColumn(bar_width=30), TextColumn("{task.description}")
        with Bar(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task("", total=self.total)
            ended = False
            while not ended:
                ended = self._end.wait(_REDRAW)
                bar.update(task, completed=self.before + self.whole, description=self.text())
