"""SIGINT and SIGTERM: finish what is in hand, then leave."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .request import STOPS

_ECHO = 3.0  # seconds in which a launcher repeats a signal that its processes got as well


@contextmanager
def heard(stop: Callable[[str], None]) -> Iterator[None]:
    """Within the block the first SIGINT or SIGTERM calls ``stop`` with its name; another one, some
    seconds later, does what it always does. Only the main thread can hear signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in STOPS]
    before = {number: signal.getsignal(number) for number in numbers}
    first: list[float] = []

    def handle(number: int, _: Any) -> None:
        if not first:
            first.append(time.monotonic())
            name = signal.Signals(number).name
            print(f"sdattn: {name}: finishing the items in hand", file=sys.stderr, flush=True)
            stop(name)
        elif time.monotonic() - first[0] > _ECHO:
            signal.signal(number, before[number])
            signal.raise_signal(number)

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, one in before.items():
            signal.signal(number, one)
