"""How much of a download has come, and how fast.

The hub's library has bars of its own, which differ by version, fill a log with control characters
and move once every 10 MB. Here the bytes are counted where they arrive, in the cache's folder.
"""

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from pathlib import Path
from stat import S_ISREG
from types import TracebackType
from typing import Any

from ..errors import size_text
from ..files.terminal import say

EVERY = 10.0  # seconds between two lines of a log
_BLINK = 0.2  # seconds between two looks of a bar


class Download:
    """Progress of a download, as a context: a bar in a terminal and in a notebook, else a line at
    once and every ten seconds, on stderr.

    Args:
        folder: where the files arrive, and where they are moved afterwards: to a snapshot if the
            disk knows no links, as is usual on Windows.
        total: bytes that are missing.
        what: what is fetched, for the first line.
    """

    def __init__(self, folder: Path, total: int, what: str):
        self._folder = folder
        self._total = total
        self._what = what
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._bar: Any = None

    def __enter__(self) -> None:
        self._there = _bytes_in(self._folder)
        self._began = time.monotonic()
        say(f"fetching {self._what}, {size_text(self._total)}")
        if _has_bar():
            self._bar = _bar(self._total)
            self._bar.start()
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        if self._bar is not None:
            self._bar.stop()
        if error is None:
            say(f"fetched {size_text(self._total)} in {time.monotonic() - self._began:.0f} s")

    def _watch(self) -> None:
        before = 0
        while not self._ended.wait(EVERY if self._bar is None else _BLINK):
            come = min(_bytes_in(self._folder) - self._there, self._total)
            if self._bar is not None:
                self._bar.update(self._bar.task_ids[0], completed=come)
                continue
            speed = size_text(round((come - before) / EVERY))
            share = round(100 * come / max(self._total, 1))
            say(f"{size_text(come)} of {size_text(self._total)}, {share} %, {speed}/s")
            before = come


def _bar(total: int) -> Any:
    """Return a bar with bytes, speed and the time that is left, which vanishes at the end."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TaskProgressColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = BarColumn(), TaskProgressColumn(), DownloadColumn(), TransferSpeedColumn()
    bar = Progress(
        *columns,
        TimeRemainingColumn(),
        console=Console(stderr=True, force_terminal=True),
        transient=True,
    )
    bar.add_task("", total=total)
    return bar


def _has_bar() -> bool:
    in_notebook = "ipykernel" in sys.modules
    return (sys.stderr.isatty() or in_notebook) and parent_process() is None


def _bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files; of one whose place is reserved, those that are
    written."""
    total = 0
    with suppress(OSError):  # a file that is renamed meanwhile
        for path in folder.rglob("*"):
            found = path.lstat()
            if not S_ISREG(found.st_mode):  # a snapshot's link to a file that is counted
                continue
            written = getattr(found, "st_blocks", None)  # of 512 bytes; Windows does not tell
            total += found.st_size if written is None else min(found.st_size, 512 * written)
    return total


@contextmanager
def own_progress() -> Iterator[bool]:
    """Switch off the hub's bars; yield whether they were on, so that ours may be shown."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_on = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield were_on
    finally:
        if were_on:
            enable_progress_bars()
