"""Threads that encode and write while the model runs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class Writer:
    """Runs calls on threads of its own, at most ``ahead`` waiting or running.

        with Writer(threads=4, ahead=16) as writer:
            writer.submit(store, item)     # waits while there are 16

    The first error of a call is raised by the next ``submit``, or on leaving; nothing is begun
    after it.
    """

    def __init__(self, threads: int, ahead: int):
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="writer")
        self._free = threading.Semaphore(ahead)
        self._error: BaseException | None = None

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        self._pool.shutdown(wait=True)
        if kind is None:
            self._check()

    def submit(self, call: Callable[..., None], *arguments: Any) -> None:
        self._free.acquire()
        try:
            self._check()
            self._pool.submit(self._run, call, *arguments)
        except BaseException:
            self._free.release()
            raise

    def _run(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            if self._error is None:
                call(*arguments)
        except BaseException as error:
            self._error = self._error or error
        finally:
            self._free.release()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
